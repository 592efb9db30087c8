//! A model held to what a reference implementation computed for it. In: a model and its golden file: `input_ids` i64
//! `[batch, seq]`, `logits`, `loss`, `grad.*`, `greedy.*` and `train.*`, each optional. Out: a row a check, with its error and tolerance. Data are held to
//! theirs in [`data`].

pub mod data;

use crate::batch::{RaggedBatch, Sequences};
use crate::curve;
use crate::gradients::{GRAD, by_checkpoint_name};
use crate::greedy::{self, Choice};
use crate::machine::Machine;
use crate::model::{Model, check_sizes, plan_gradient, plan_within};
use crate::serving::{Room, steps};
use crate::{Error, Hear, Note};
use astrai_builders::{Logits, Loss, ModelConfig, Program};
use astrai_ir::DType;
use astrai_passes::Fidelity;
use astrai_runtime::weights::Checkpoint;
use astrai_runtime::{Compiled, Session, Value as Array};
use astrai_train::engine::StepResult;
use std::path::{Path, PathBuf};

pub mod gguf;
pub mod lora;
pub mod narrow;
pub mod objectives;
pub mod optimizers;
pub mod packed;

/// Outcome of a check.
#[derive(Clone, Debug)]
pub struct Row {
    /// What was compared.
    pub check: String,
    /// How far off it is; of what the note says.
    pub error: Option<f64>,
    /// How far off it may be.
    pub tolerance: Option<f64>,
    /// `ok`, `off`, `missing` or `no tolerance`.
    pub verdict: &'static str,
    /// What the error is a part of, or what was found.
    pub note: String,
}

impl Row {
    /// A check that was made: `ok` where the error is within the tolerance.
    pub fn compared(check: impl Into<String>, error: f64, tolerance: f64, note: &str) -> Row {
        // A NaN is off: it is not within anything.
        let verdict = if error <= tolerance { "ok" } else { "off" };
        Row {
            check: check.into(),
            error: Some(error),
            tolerance: Some(tolerance),
            verdict,
            note: note.into(),
        }
    }

    fn without(check: impl Into<String>, verdict: &'static str, note: &str) -> Row {
        Row { check: check.into(), error: None, tolerance: None, verdict, note: note.into() }
    }
}

/// A model beside its golden file.
pub struct Golden<'a> {
    /// The model.
    pub model: &'a Model,
    /// The device that computes.
    pub machine: &'a Machine,
    /// What the reference computed.
    pub file: Checkpoint,
    /// The type of weights and activations in memory.
    pub storage: DType,
    /// Of logits, loss and greedy tokens; gradients are exact.
    pub fidelity: Fidelity,
    path: PathBuf,
}

impl<'a> Golden<'a> {
    /// The golden file of a model.
    ///
    /// # Errors
    /// The file is no safetensors file, the model has no logits.
    pub fn open(
        path: &Path,
        model: &'a Model,
        machine: &'a Machine,
        storage: DType,
    ) -> Result<Golden<'a>, Error> {
        Golden::over(Checkpoint::open(path)?, path, model, machine, storage)
    }

    /// The same, of a file that was opened at this path.
    ///
    /// # Errors
    /// The model has no logits.
    pub fn over(
        file: Checkpoint,
        path: &Path,
        model: &'a Model,
        machine: &'a Machine,
        storage: DType,
    ) -> Result<Golden<'a>, Error> {
        model.config.check_decoder().map_err(|e| e.to_string())?;
        Ok(Golden { model, machine, file, storage, fidelity: Fidelity::Exact, path: path.to_path_buf() })
    }

    /// A session of a program of the model.
    fn session(&self, program: &Program, hear: Hear) -> Result<Session, Error> {
        self.start(hear, plan_within(&self.model.config, program, self.storage, self.machine, self.fidelity)?)
    }

    fn start(&self, hear: Hear, planned: Compiled) -> Result<Session, Error> {
        planned.check_memory(&*self.machine.device)?;
        let what = "loading weights";
        let mut progress = |done, total| hear(Note::Progress { what, done, total });
        Ok(self.model.start(planned, self.machine, &mut progress)?)
    }

    /// Logits and loss of `input_ids`, by one program.
    ///
    /// # Errors
    /// The golden file is not of this model, or the device failed.
    pub fn forward(&self, logits: bool, loss: bool, hear: Hear) -> Result<Vec<Row>, Error> {
        let mut rows = Vec::new();
        let missing = |name: &'static str| Row::without(name, "missing", "not in the golden file");
        let wanted = |asked: bool, name| asked && self.file.get(name).is_some();
        let (do_logits, do_loss) = (wanted(logits, "logits"), wanted(loss, "loss"));
        let results = match do_logits || do_loss {
            true => self.results(do_logits, do_loss, hear)?,
            false => vec![],
        };
        let got = |name: &str| results.iter().find(|(n, _)| n == name).map(|(_, v)| v.to_f32());
        if logits {
            rows.push(match got("logits") {
                Some(got) => {
                    let (error, tolerance, note) =
                        self.compare_logits(&got, &self.floats("logits", got.len())?);
                    Row::compared("logits", error, tolerance, note)
                }
                None => missing("logits"),
            });
        }
        if loss {
            rows.push(match got("loss") {
                Some(got) => {
                    let (got, want) = (f64::from(got[0]), f64::from(self.floats("loss", 1)?[0]));
                    let tolerance = if self.storage == DType::F32 { 1e-5 } else { 3e-2 };
                    Row::compared("loss", (got - want).abs() / want.abs(), tolerance, "relative")
                }
                None => missing("loss"),
            });
        }
        Ok(rows)
    }

    fn results(&self, logits: bool, loss: bool, hear: Hear) -> Result<Vec<(String, Array)>, Error> {
        let config = &self.model.config;
        let sequences = Sequences::read(&self.file, &self.path)?;
        check_sizes(config, sequences.batch as u64, sequences.seq as u64)?;
        let batch = RaggedBatch::new(&sequences.rows(), config.vocab_size)?;
        let logits = if logits { Logits::All } else { Logits::None };
        let full = Program::full(sequences.batch as u64, sequences.seq as u64);
        let mut session = self
            .session(&Program { logits, loss: if loss { Loss::Mean } else { Loss::None }, ..full }, hear)?;
        Ok(session.run(&batch.inputs(session.inputs()))?)
    }

    /// Error, tolerance and measure.
    fn compare_logits(&self, got: &[f32], want: &[f32]) -> (f64, f64, &'static str) {
        let differences = || got.iter().zip(want).map(|(a, b)| f64::from(*a) - f64::from(*b));
        if self.storage != DType::F32 {
            let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
            let error = norm(&mut differences()) / norm(&mut want.iter().map(|x| f64::from(*x)));
            return (error, 3e-2, "by norm");
        }
        let top = largest(want.iter().map(|x| f64::from(*x)));
        let error = largest(differences());
        match top == 0.0 {
            true => (error, 1e-6, "absolute, all zero"),
            false => (error / top, 1e-4, "of the largest magnitude"),
        }
    }

    /// Elements of a float tensor of the golden file, of which there must be `count`.
    fn floats(&self, name: &str, count: usize) -> Result<Vec<f32>, Error> {
        floats(&self.file, &self.path, name, count)
    }

    /// The worst gradient of all checkpoint tensors; f32 only, as the references are.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn gradients(&self, hear: Hear) -> Result<Row, Error> {
        let names: Vec<&str> = self.file.names().filter(|n| n.starts_with(GRAD)).collect();
        if names.is_empty() {
            return Ok(Row::without("grads", "missing", "no `grad.*` in the golden file"));
        }
        if self.storage != DType::F32 {
            return Ok(Row::without("grads", "no tolerance", "references' gradients are held in f32 only"));
        }
        let sequences = Sequences::read(&self.file, &self.path)?;
        check_sizes(&self.model.config, sequences.batch as u64, sequences.seq as u64)?;
        let batch = RaggedBatch::new(&sequences.rows(), self.model.config.vocab_size)?;
        let full = Program::full(sequences.batch as u64, sequences.seq as u64);
        let program = Program { logits: Logits::None, ..full };
        let planned = plan_gradient(&self.model.config, &program, self.storage, self.machine)?;
        let mut session = self.start(hear, planned)?;
        let results = session.run(&batch.inputs(session.inputs()))?;
        let results = by_checkpoint_name(results, session.program());
        let mut worst = Row::compared("grads", 0.0, 1e-4, "");
        for name in &names {
            let Some((_, got)) = results.iter().find(|(n, _)| n == name) else {
                return Ok(Row::without("grads", "missing", &format!("the model has no `{name}`")));
            };
            let got = got.to_f32();
            let (error, tolerance, how) = self.compare_logits(&got, &self.floats(name, got.len())?);
            let over = error / tolerance;
            if over.is_nan() || over > worst.error.unwrap_or(0.0) / worst.tolerance.unwrap_or(1.0) {
                worst = Row::compared("grads", error, tolerance, &format!("{name}, {how}"));
            }
            if over.is_nan() {
                return Ok(worst);
            }
        }
        worst.note = format!("worst of {}: {}", names.len(), worst.note);
        Ok(worst)
    }

    /// Losses and gradient norms of the short training run.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn train(&self, hear: Hear) -> Result<Vec<Row>, Error> {
        let names = ["train.batches", "train.losses", "train.grad_norms"];
        if let Some(absent) = names.iter().find(|n| self.file.get(n).is_none()) {
            return Ok(vec![Row::without("train", "missing", &format!("no `{absent}` in the golden file"))]);
        }
        let (ids, sizes) = batches(&self.file, &self.path, &self.model.config)?;
        let steps = sizes[0];
        let (losses, norms) = (self.floats(names[1], steps)?, self.floats(names[2], steps)?);
        let course = curve::Course::golden(&ids, sizes, self.storage);
        let (got, _) = curve::train(self.model, course, self.machine, &mut |done, total| {
            hear(Note::Progress { what: "training steps", done, total })
        })?;
        let worst = |f: &dyn Fn(&StepResult) -> f64, want: &[f32]| {
            let off = got.iter().zip(want).map(|(s, w)| (f(s) - f64::from(*w)) / f64::from(*w).abs());
            largest(off)
        };
        // In bf16 the curve follows the reference's; norms of single steps have no tolerance there.
        let narrow = self.storage != DType::F32;
        let note = format!("worst of {steps} steps, relative");
        let tolerance = if narrow { 2e-2 } else { 2e-3 };
        let mut rows = vec![Row::compared("train.losses", worst(&|s| s.loss, &losses), tolerance, &note)];
        if !narrow {
            rows.push(Row::compared("train.grad_norms", worst(&|s| s.grad_norm, &norms), 1e-2, &note));
        }
        Ok(rows)
    }

    fn integers(&self, name: &str) -> Result<Vec<i64>, Error> {
        let path = self.path.display();
        let t = self.file.get(name).ok_or_else(|| format!("{path}: no tensor `{name}`"))?;
        Ok(t.to_i64()?)
    }

    /// Greedy continuation by the engine that serves, over paged keys and values.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn greedy(&self, hear: Hear) -> Result<Row, Error> {
        let names = ["greedy.prompt_ids", "greedy.output_ids", "greedy.margin"];
        if let Some(absent) = names.iter().find(|n| self.file.get(n).is_none()) {
            return Ok(Row::without("greedy", "missing", &format!("no `{absent}` in the golden file")));
        }
        let (prompt, want) = (self.integers(names[0])?, self.integers(names[1])?);
        let margins = self.floats(names[2], want.len())?;
        if prompt.is_empty() || want.is_empty() {
            let path = self.path.display();
            return Err(format!("{path}: `{}` and `{}` must not be empty", names[0], names[1]).into());
        }
        let length = (prompt.len() + want.len()) as u64;
        check_sizes(&self.model.config, 1, length)?;
        let room = Room {
            // The prompt in more than one step, as a long one would be.
            tokens: Some(prompt.len().div_ceil(2)),
            context: Some(length as usize),
            prefix_cache: false,
            ..Room::of_one(self.storage, Some(self.fidelity))
        };
        let model = steps(self.model, &room, self.machine, hear)?;
        let (what, total) = ("greedy tokens", want.len() as u64);
        let chosen = greedy::continue_greedily(model, &prompt, want.len(), &mut |n| {
            hear(Note::Progress { what, done: n as u64, total })
        })?;
        Ok(judge(&chosen, &want, &margins, self.storage))
    }
}

/// Ids and `[steps, batch, seq]` of a short run's `train.batches`.
fn batches(file: &Checkpoint, path: &Path, config: &ModelConfig) -> Result<(Vec<i64>, [usize; 3]), Error> {
    let (name, path) = ("train.batches", path.display());
    let t = file.get(name).ok_or_else(|| format!("{path}: no tensor `{name}`"))?;
    let &[steps, batch, seq] = t.shape() else {
        return Err(format!("{path}: `{name}` is {:?}, it should be [steps, batch, seq]", t.shape()).into());
    };
    if steps == 0 || batch == 0 || seq < 2 {
        return Err(format!("{path}: `{name}` {:?} leaves nothing to train on", t.shape()).into());
    }
    check_sizes(config, batch as u64, seq as u64)?;
    Ok((t.to_i64()?, [steps, batch, seq]))
}

/// Elements of a float tensor of a file, of which there must be `count`.
fn floats(file: &Checkpoint, path: &Path, name: &str, count: usize) -> Result<Vec<f32>, Error> {
    let path = path.display();
    let t = file.get(name).ok_or_else(|| format!("{path}: no tensor `{name}`"))?;
    if t.elements() != count {
        let shape = t.shape();
        return Err(format!("{path}: `{name}` is {shape:?}, it should have {count} elements").into());
    }
    let mut out = vec![0.0; count];
    t.to_f32(&mut out)?;
    Ok(out)
}

/// Tokens equal up to the first that differs where the reference's margin excuses it; in f32 the margins up to there agree
/// too, else a wrong margin could excuse a wrong token.
fn judge(chosen: &[Choice], want: &[i64], margins: &[f32], storage: DType) -> Row {
    const MARGIN: f64 = 2e-4; // of the largest logit: each of the two logits may be off by 1e-4 of it
    let mut worst = 0f64;
    for (i, ((c, &token), &margin)) in chosen.iter().zip(want).zip(margins).enumerate() {
        if c.token != token {
            let excused = if storage == DType::F32 { 1e-3 } else { 3e-2 * c.top };
            let note = format!("token {i} is {} instead of {token}, margin {margin:.1e}", c.token);
            let verdict = if margin.abs() < excused { "ok" } else { "off" };
            return Row { error: Some(worst), ..Row::without("greedy", verdict, &note) };
        }
        let off = f64::from((c.margin - margin).abs()) / f64::from(c.top).max(1e-30);
        worst = if off.is_nan() { f64::NAN } else { worst.max(off) };
        if storage == DType::F32 && (off.is_nan() || off > MARGIN) {
            return Row::compared(
                "greedy",
                off,
                MARGIN,
                &format!("margin of token {i}, of the largest logit"),
            );
        }
    }
    let note = format!("{} tokens equal; error is of the margins", want.len());
    match storage {
        DType::F32 => Row::compared("greedy", worst, MARGIN, &note),
        _ => Row { error: Some(worst), ..Row::without("greedy", "ok", &note) },
    }
}

/// Largest magnitude; NaN if one is.
fn largest(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(0.0, |m: f64, x| if m.is_nan() || x.is_nan() { f64::NAN } else { m.max(x.abs()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choices(tokens: &[i64]) -> Vec<Choice> {
        tokens.iter().map(|&token| Choice { token, margin: 0.5, top: 2.0 }).collect()
    }

    #[test]
    fn a_small_margin_excuses_a_token_and_a_large_one_does_not() {
        let got = choices(&[1, 2, 3]);
        let verdict = |want: &[i64], margins: &[f32]| judge(&got, want, margins, DType::F32).verdict;
        assert_eq!(verdict(&[1, 2, 3], &[0.5; 3]), "ok");
        assert_eq!(verdict(&[1, 9, 9], &[0.5, 5e-4, 0.5]), "ok");
        assert_eq!(verdict(&[1, 9, 3], &[0.5; 3]), "off");
        assert_eq!(verdict(&[1, 2, 3], &[0.5, 0.51, 0.5]), "off");
        assert_eq!(verdict(&[1, 2, 3], &[0.5, f32::NAN, 0.5]), "off");
    }

    #[test]
    fn nan_is_never_within_a_tolerance() {
        assert_eq!(Row::compared("logits", f64::NAN, 1.0, "").verdict, "off");
        assert!(largest([1.0, f64::NAN, 2.0].into_iter()).is_nan());
        assert_eq!(largest([1.0, -3.0].into_iter()), 3.0);
    }
}
