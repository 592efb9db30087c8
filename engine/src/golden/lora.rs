//! Adapters held to a reference. In: a folder with `adapter_config.json` and `adapter_model.safetensors`, which names its base, and
//! `golden.safetensors`: `input_ids`, `base_logits`, `logits`, `loss`, `grad.<factor>`, `merged.logits`, `merged.weight.<name>` and `train.*`,
//! the factors alone trained. Out: a row for each kind.

use super::objectives::Worst;
use super::{Row, batches, floats, largest};
use crate::batch::{RaggedBatch, Sequences};
use crate::curve::{self, Course};
use crate::gradients::{GRAD, by_checkpoint_name};
use crate::machine::Machine;
use crate::model::{Model, check_sizes};
use crate::{Error, Hear, Note};
use astrai_builders::{Loss, Program, build};
use astrai_ir::DType;
use astrai_runtime::weights::Checkpoint;
use astrai_runtime::{Options, Session, Value, WeightSource, compile};
use astrai_train::lora::{ADAPTER_CONFIG, Beside, Folder};
use astrai_train::update::{Optimizer, Rule};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Name of the configuration, by which a folder is recognised.
pub const CONFIG: &str = ADAPTER_CONFIG;

/// An adapter beside its golden file.
pub struct Lora<'a> {
    machine: &'a Machine,
    base: Model,
    merged: Model,
    adapter: Folder,
    path: PathBuf,
    file: Checkpoint,
}

/// Outputs of a program by name.
type Outputs = Vec<(String, Value)>;

impl<'a> Lora<'a> {
    /// Opens a folder: the adapter, its base and what the reference computed.
    ///
    /// # Errors
    /// One of them is missing or not what it should be.
    pub fn open(folder: &Path, machine: &'a Machine) -> Result<Lora<'a>, Error> {
        let path = folder.join("golden.safetensors");
        let of = Folder::base(folder)?;
        let (base, merged) = (Model::open(&of, false)?, Model::open_adapted(&of, Some(folder))?);
        let adapter = Folder::open(folder, &base.config)?;
        adapter.lora.check_trainable()?;
        let file = Checkpoint::open(&path)?;
        Ok(Lora { machine, base, merged, adapter, path, file })
    }

    /// Computes everything and compares.
    ///
    /// # Errors
    /// The golden file is not of this adapter, or the device failed.
    pub fn check(&self, hear: Hear) -> Result<Vec<Row>, Error> {
        let names = ["base_logits", "logits", "loss", "grads", "merged.weights", "merged.logits"];
        let mut rows = names.map(Worst::new);
        let beside = Beside { base: self.base.source(), factors: &self.adapter.factors };
        let base = self.run(self.base.source(), false)?;
        let adapted = self.run(&beside, true)?;
        let merged = self.run(self.merged.source(), false)?;
        for (at, name, outputs) in
            [(0, "base_logits", &base), (1, "logits", &adapted), (5, "merged.logits", &merged)]
        {
            let got = found(outputs, "logits")?;
            rows[at].see(off(&got, &self.floats(name, got.len())?), 1e-4, "of the largest magnitude");
        }
        let (got, want) = (f64::from(found(&adapted, "loss")?[0]), f64::from(self.floats("loss", 1)?[0]));
        rows[2].see((got - want).abs() / want.abs(), 1e-5, "relative");
        for (name, value) in adapted.iter().filter(|(name, _)| name.starts_with(GRAD)) {
            let got = value.to_f32();
            rows[3].see(off(&got, &self.floats(name, got.len())?), 1e-4, name);
        }
        for name in self.file.names() {
            if name.starts_with(GRAD) && !adapted.iter().any(|(n, _)| n == name) {
                rows[3].see(f64::NAN, 1e-4, &format!("`{name}` is not trained"));
            }
            let Some(weight) = name.strip_prefix("merged.weight.") else { continue };
            let tensor = self.merged.source().tensor(weight);
            let t = tensor.ok_or_else(|| format!("the model has no `{weight}`"))?;
            let got = Value { dtype: t.dtype, shape: t.shape, bytes: t.bytes.into_owned() }.to_f32();
            rows[4].see(off(&got, &self.floats(name, got.len())?), 1e-4, weight);
        }
        Ok(rows.into_iter().map(Worst::done).chain(self.train(hear)?).collect())
    }

    /// Logits and loss of `input_ids`, with the adapter also the gradients of what is trained.
    fn run(&self, source: &dyn WeightSource, adapted: bool) -> Result<Outputs, Error> {
        let (config, machine) = (&self.base.config, self.machine);
        let sequences = Sequences::read(&self.file, &self.path)?;
        check_sizes(config, sequences.batch as u64, sequences.seq as u64)?;
        let batch = RaggedBatch::new(&sequences.rows(), config.vocab_size)?;
        let full = Program::full(sequences.batch as u64, sequences.seq as u64);
        let graph = build(config, &Program { loss: Loss::Mean, ..full })?;
        let adapter = adapted.then(|| self.adapter.adapter.clone());
        let gradient_of = adapted.then(|| "loss".to_string());
        let planned =
            compile(&graph, machine.backend(), &Options { adapter, gradient_of, ..Options::default() })?;
        let mut session = Session::new(Arc::new(planned), source, &machine.device, &mut |_, _| {})?;
        let results = session.run(&batch.inputs(session.inputs()))?;
        Ok(by_checkpoint_name(results, session.program()))
    }

    /// Losses and gradient norms of the run that trains the factors.
    fn train(&self, hear: Hear) -> Result<[Row; 2], Error> {
        let mut rows = ["train.losses", "train.grad_norms"].map(Worst::new);
        let (ids, sizes) = batches(&self.file, &self.path, &self.base.config)?;
        let steps = sizes[0];
        let rule = Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-4 };
        let course = Course {
            ids: &ids,
            sizes,
            optimizer: Optimizer::new(rule, 0.0, Some(1.0)),
            lr: 1e-2,
            storage: DType::F32,
            adapter: Some((&self.adapter.adapter, &self.adapter.factors)),
        };
        let (got, _) = curve::train(&self.base, course, self.machine, &mut |done, total| {
            hear(Note::Progress { what: "training steps", done, total })
        })?;
        let [losses, norms] = ["train.losses", "train.grad_norms"].map(|name| self.floats(name, steps));
        let relative = |got: f64, want: f32| (got - f64::from(want)) / f64::from(want).abs();
        let error = largest(got.iter().zip(losses?).map(|(s, w)| relative(s.loss, w)));
        rows[0].see(error, 1e-3, "worst step, relative");
        let error = largest(got.iter().zip(norms?).map(|(s, w)| relative(s.grad_norm, w)));
        rows[1].see(error, 1e-2, "worst step, relative");
        Ok(rows.map(Worst::done))
    }

    fn floats(&self, name: &str, count: usize) -> Result<Vec<f32>, Error> {
        floats(&self.file, &self.path, name, count)
    }
}

fn found(outputs: &Outputs, name: &str) -> Result<Vec<f32>, Error> {
    let of = outputs.iter().find(|(n, _)| n == name).map(|(_, v)| v.to_f32());
    of.filter(|x| !x.is_empty()).ok_or_else(|| format!("the program has no {name}").into())
}

/// How far off the numbers are, of the largest magnitude.
fn off(got: &[f32], want: &[f32]) -> f64 {
    let top = largest(want.iter().map(|x| f64::from(*x)));
    largest(got.iter().zip(want).map(|(a, b)| f64::from(*a) - f64::from(*b))) / top.max(1e-30)
}
