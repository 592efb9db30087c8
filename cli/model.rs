//! A model on disk: its configuration, and sessions of its programs with its weights.

use crate::machine::Machine;
use astrai_builders::config::Init;
use astrai_builders::{ModelConfig, Program, build};
use astrai_ir::{DType, Graph};
use astrai_runtime::weights::Checkpoint;
use astrai_runtime::{Dump, Error, Options, Random, Session, WeightSource, compile};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A model directory, or a configuration with fresh weights.
pub struct Model {
    /// The resolved configuration.
    pub config: ModelConfig,
    /// What was noticed while reading it.
    pub warnings: Vec<String>,
    /// Where its weights are; `None` for fresh ones.
    pub folder: Option<PathBuf>,
    weights: Box<dyn WeightSource>,
}

impl Model {
    /// Opens a model directory; every tensor of the configuration must be there with its shape.
    pub fn open(folder: &Path, strict: bool) -> Result<Model, String> {
        let (config, warnings) = read_config(folder, strict)?;
        let checkpoint = Checkpoint::open(folder).map_err(|e| e.to_string())?;
        let expected: Vec<_> = config.tensors().into_iter().map(|t| (t.name, t.shape)).collect();
        let names = config.model_type.names;
        let tied = config.tie_embeddings;
        let extra = |name: &str| {
            (tied && name == names.head)
                || name.ends_with("rotary_emb.inv_freq")
                || name.ends_with("attn.masked_bias")
        };
        checkpoint.check(&expected, &extra).map_err(|e| e.to_string())?;
        Ok(Model { config, warnings, folder: Some(folder.to_path_buf()), weights: Box::new(checkpoint) })
    }

    /// A model with fresh random weights.
    pub fn fresh(config: ModelConfig, warnings: Vec<String>, seed: u64) -> Model {
        let draw = |init: Init| match init {
            Init::Zeros => (0.0, 0.0),
            Init::Ones => (1.0, 0.0),
            Init::Normal(std) => (0.0, std as f32),
        };
        let tensors = config.tensors().into_iter();
        let tensors = tensors.map(|t| {
            let (mean, std) = draw(t.init);
            (t.name, (t.shape, mean, std))
        });
        let weights = Box::new(Random { tensors: tensors.collect(), seed });
        Model { config, warnings, folder: None, weights }
    }

    /// A session of one of the model's programs.
    pub fn session(
        &self,
        program: &Program,
        storage: DType,
        machine: &Machine,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Session, Error> {
        let graph: Graph = build(&self.config, program)?;
        let options = Options { storage, dump: Dump::None, gradient_of: None };
        let compiled = Arc::new(compile(&graph, &machine.target, &options)?);
        Session::new(
            compiled,
            &*self.weights,
            machine.pool.clone(),
            machine.tools(),
            &machine.target,
            progress,
        )
    }
}

/// The configuration of a file or model directory, and what was noticed.
pub fn read_config(path: &Path, strict: bool) -> Result<(ModelConfig, Vec<String>), String> {
    let reading = ModelConfig::read(path).map_err(|e| e.to_string())?;
    let reading = if strict { reading.deny_unknown().map_err(|e| e.to_string())? } else { reading };
    Ok((reading.config, reading.warnings))
}
