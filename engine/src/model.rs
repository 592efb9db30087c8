//! A model on disk: its configuration, and sessions of its programs with its weights.

use crate::gguf;
use crate::machine::Machine;
use astrai_builders::config::{Init, Slots, TensorSpec};
use astrai_builders::{Loss, ModelConfig, Program, Reading, build};
use astrai_ir::{Backend, Code, DType, Graph, Narrow, Storage};
use astrai_passes::{Fidelity, Saturate, Stack};
use astrai_runtime::weights::{Checkpoint, Entry, Packed, Quantised, WeightsError, Widened, Writer, is_gguf};
use astrai_runtime::{
    Buffers, Compiled, Error, OfFiles, Options, Origin, Random, Session, WeightSource, compile,
};
use astrai_train::lora;
use std::collections::BTreeMap;
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
    /// What they are made of, as it was before it was opened.
    origin: Origin,
}

impl Model {
    /// Opens a model directory, or a GGUF file; every tensor of the configuration must be there with its shape. An adapter's folder is opened as its
    /// base with the adapter merged.
    pub fn open(folder: &Path, strict: bool) -> Result<Model, String> {
        match lora::is_adapter(folder) {
            true => Model::open(&lora::Folder::base(folder)?, strict)?.merged(folder),
            false if is_gguf(folder) => {
                let origin = Origin::default().and(folder);
                let (reading, weights) = gguf::open(folder)?;
                let (config, warnings) = (reading.config, reading.warnings);
                Ok(Model { config, warnings, folder: None, weights: Box::new(weights), origin })
            }
            false => Model::open_with(folder, folder, strict),
        }
    }

    /// The model with the adapter of a folder merged into its weights, where one is given.
    pub fn open_adapted(folder: &Path, adapter: Option<&Path>) -> Result<Model, String> {
        let model = Model::open(folder, false)?;
        match adapter {
            Some(adapter) => model.merged(adapter),
            None => Ok(model),
        }
    }

    /// The same with the adapter of a folder merged into its weights.
    pub fn merged(self, adapter: &Path) -> Result<Model, String> {
        let origin = self.origin.and(adapter);
        let adapter = lora::Folder::open(adapter, &self.config)?;
        // What is merged are numbers, not codes.
        let config = ModelConfig { packed: None, ..self.config };
        Ok(Model { config, weights: Box::new(lora::Merged::new(self.weights, adapter)), origin, ..self })
    }

    /// The model with the weights of its linear layers rounded to nearest when they are loaded, where that is asked for.
    pub fn quantised(mut self, narrow: Option<Narrow>) -> Model {
        if let Some(narrow) = narrow {
            self.config.narrow = Some(narrow);
            let names = self.config.names;
            let head = if self.config.tie_embeddings { names.embed } else { names.head };
            self.weights = Box::new(Quantised::new(self.weights, narrow, head.to_string()));
        }
        self
    }

    /// The model whose pages of keys and values, or latents, hold codes, where that is asked for.
    pub fn with_pages(mut self, code: Option<Code>) -> Model {
        self.config.pages = code;
        self
    }

    /// The model whose weights are looked for where devices keep weights as their kernels read them, and kept there if that is asked
    /// for.
    pub fn kept(self, keep: bool) -> Model {
        let name = format!("{}{:?}", self.origin.name, self.config.narrow);
        let origin = Origin { name, keep, ..self.origin.clone() };
        Model { weights: Box::new(OfFiles { inner: self.weights, origin }), ..self }
    }

    /// The model that a directory configures, with the weights of another directory or file.
    pub fn open_with(folder: &Path, weights: &Path, strict: bool) -> Result<Model, String> {
        let origin = Origin::default().and(folder);
        let origin = if weights == folder { origin } else { origin.and(weights) };
        let Reading { mut config, packing, warnings, .. } = reading(folder, strict)?;
        let file = Checkpoint::open(weights).map_err(|e| e.to_string())?;
        let (names, layers) = (config.names, config.num_layers);
        // Modules of multi-token prediction: not every checkpoint that states some has them, and more than the first are not read.
        let behind = |name: &str| {
            let number = name.strip_prefix(names.layer.split('{').next().unwrap_or_default());
            let number = number.and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
            number.is_some_and(|number| number >= layers)
        };
        config.mtp = config.mtp.filter(|_| file.names().any(behind));
        let tensors = config.tensors().into_iter().chain(config.module_tensors()).map(|t| (t.name, t.shape));
        let (tied, encoder, modules) =
            (config.tie_embeddings, config.encoder.is_some(), config.mtp.is_some());
        let extra = |name: &str| {
            ((tied || encoder) && name == names.head)
                || modules && behind(name)
                || names.ignored_prefixes.iter().any(|part| name.starts_with(part))
                || name.ends_with("rotary_emb.inv_freq")
                || name.ends_with("attn.masked_bias")
        };
        let weights: Box<dyn WeightSource> = match packing {
            Some(packing) => {
                let packed = Packed::open(file, packing, tensors, &extra).map_err(|e| e.to_string())?;
                config.packed = stays(&config, &packed);
                Box::new(packed)
            }
            None => {
                let weights = Widened(file);
                let expected: Vec<_> =
                    tensors.flat_map(|(name, shape)| weights.expected(name, shape)).collect();
                weights.0.check(&expected, &extra).map_err(|e| e.to_string())?;
                let names = config.tensors().into_iter().map(|t| t.name);
                let kept: BTreeMap<_, _> =
                    names.filter_map(|name| weights.narrow(&name).map(|narrow| (name, narrow))).collect();
                config.packed = (!kept.is_empty()).then(|| Storage::Each(Arc::new(kept)));
                Box::new(weights)
            }
        };
        Ok(Model { config, warnings, folder: Some(folder.to_path_buf()), weights, origin })
    }

    /// A model with fresh random weights.
    pub fn fresh(config: ModelConfig, warnings: Vec<String>, seed: u64) -> Model {
        let draw = |init: Init| match init {
            Init::Zeros => (0.0, 0.0),
            Init::Ones => (1.0, 0.0),
            Init::Normal(std) => (0.0, std as f32),
        };
        let tensors = config.tensors().into_iter().chain(config.module_tensors());
        let tensors = tensors.map(|t| {
            let (mean, std) = draw(t.init);
            (t.name, (t.shape, mean, std))
        });
        let weights = Box::new(Random { tensors: tensors.collect(), seed });
        let narrow = config.narrow;
        Model { config, warnings, folder: None, weights, origin: Origin::default() }.quantised(narrow)
    }

    /// A session of one of the model's programs.
    pub fn session(
        &self,
        program: &Program,
        storage: DType,
        machine: &Machine,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Session, Error> {
        self.start(plan(&self.config, program, storage, machine)?, machine, progress)
    }

    /// A session of a program that was planned for this model.
    pub fn start(
        &self,
        planned: Compiled,
        machine: &Machine,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Session, Error> {
        Session::new(Arc::new(planned), &*self.weights, &machine.device, progress)
    }

    /// The same over memory that outlives runs.
    pub fn start_over(
        &self,
        planned: Compiled,
        buffers: &Buffers,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Session, Error> {
        Session::over(Arc::new(planned), &*self.weights, buffers, progress)
    }

    /// Where its weights come from, by checkpoint name.
    pub fn source(&self) -> &dyn WeightSource {
        &*self.weights
    }

    /// Writes `config.json` and `model.safetensors` into a folder, one tensor in memory at a time.
    pub fn save(&self, folder: &Path) -> Result<(), String> {
        let config = folder.join("config.json");
        let text = format!("{:#}\n", self.config.save());
        std::fs::write(&config, text).map_err(|e| format!("{}: {e}", config.display()))?;
        let specs = self.config.tensors();
        let entry =
            |t: &TensorSpec| Entry { name: t.name.clone(), dtype: DType::F32, shape: t.shape.clone() };
        let entries: Vec<Entry> = specs.iter().map(entry).collect();
        let write = || -> Result<(), WeightsError> {
            let path = folder.join("model.safetensors");
            let mut file = Writer::create(&path, &entries, &BTreeMap::new())?;
            for t in specs.iter().filter_map(|t| self.weights.tensor(&t.name)) {
                file.put(&t.bytes)?;
            }
            file.finish()
        };
        write().map_err(|e| e.to_string())
    }
}

/// The program of a model for a machine: planned, its kernels written, nothing built or loaded yet.
pub fn plan(
    config: &ModelConfig,
    program: &Program,
    storage: DType,
    machine: &Machine,
) -> Result<Compiled, Error> {
    plan_within(config, program, storage, machine, Fidelity::Exact)
}

/// The same, as far from the numbers of its graph as `fidelity` allows.
pub fn plan_within(
    config: &ModelConfig,
    program: &Program,
    storage: DType,
    machine: &Machine,
    fidelity: Fidelity,
) -> Result<Compiled, Error> {
    let graph: Graph = build(config, program)?;
    let saturate = Saturate { fidelity, ..Saturate::default() };
    let narrow = stored(config, machine.backend());
    let stack = config.adapters.map(|Slots { slots, rank }| Stack { slots, rank });
    compile(&graph, machine.backend(), &Options { storage, saturate, narrow, stack, ..Options::default() })
}

/// How a checkpoint's weights are stored by its configuration alone, where kernels would read any of them so.
pub fn packed(reading: &Reading) -> Option<Narrow> {
    let narrow = reading.packing?.narrow();
    crate::export::rounded(&reading.config, narrow).ok().map(|_| narrow)
}

/// How weights are stored where kernels are this backend's: rounded as is asked for, else as the checkpoint has them.
pub fn stored(config: &ModelConfig, backend: &dyn Backend) -> Option<Storage> {
    let kept = config.packed.as_ref().filter(|_| backend.reads_codes());
    config.narrow.map(Storage::from).or(kept.cloned())
}

/// How far a model that answers requests goes unless told otherwise: with latents in pages, exact steps would make every key
/// again; other models gain next to nothing.
pub fn served_fidelity(config: &ModelConfig) -> Fidelity {
    if config.caches_latents() { Fidelity::Standard } else { Fidelity::Exact }
}

/// [`plan`] of a program with a loss and its gradient by every weight, `grad.<buffer>`.
pub fn plan_gradient(
    config: &ModelConfig,
    program: &Program,
    storage: DType,
    machine: &Machine,
) -> Result<Compiled, Error> {
    let graph: Graph = build(config, &Program { loss: Loss::Mean, ..program.clone() })?;
    let options = Options { storage, gradient_of: Some("loss".into()), ..Options::default() };
    compile(&graph, machine.backend(), &options)
}

/// Refuses sizes that a model or the kernels' 32-bit indices do not take.
pub fn check_sizes(config: &ModelConfig, batch: u64, seq: u64) -> Result<(), String> {
    if seq > config.max_positions as u64 {
        let most = config.max_positions;
        return Err(format!("sequences of {seq} tokens: the model takes at most {most} positions"));
    }
    match batch.checked_mul(seq) {
        Some(tokens) if tokens <= i32::MAX as u64 => Ok(()),
        _ => {
            Err(format!("{batch} sequences of {seq} tokens: a batch has at most {} tokens in all", i32::MAX))
        }
    }
}

/// The configuration of a file or model directory, and what was noticed.
pub fn read_config(path: &Path, strict: bool) -> Result<(ModelConfig, Vec<String>), String> {
    if is_gguf(path) {
        let (reading, _) = gguf::open(path)?;
        // How the file has its weights is no part of a configuration without them.
        return Ok((ModelConfig { packed: None, ..reading.config }, reading.warnings));
    }
    reading(path, strict).map(|reading| (reading.config, reading.warnings))
}

fn reading(path: &Path, strict: bool) -> Result<Reading, String> {
    let reading = ModelConfig::read(path).map_err(|e| e.to_string())?;
    if strict { reading.deny_unknown().map_err(|e| e.to_string()) } else { Ok(reading) }
}

/// How packed weights stay in memory, of those that kernels would read as codes.
fn stays(config: &ModelConfig, packed: &Packed) -> Option<Storage> {
    let graph = build(config, &Program::full(1, 1)).ok()?;
    let names = astrai_passes::narrow_weights(&graph, packed.narrow()).ok()?;
    let all = names.len();
    let kept: BTreeMap<_, _> =
        names.into_iter().filter(|name| packed.stays(name)).map(|name| (name, packed.narrow())).collect();
    match kept.len() {
        0 => None,
        n if n == all => Some(packed.narrow().into()),
        _ => Some(Storage::Each(Arc::new(kept))),
    }
}
