//! Training objectives held to a reference. In: a folder with `strategies.json`, a list of runs (`strategy`, its options, `metrics`, and where
//! they differ from the strategy's name and from 1e-5 `batch` and `loss_tolerance`), and `strategies.safetensors` with `batch.<batch>.<key>`,
//! `run.<i>.loss`, `run.<i>.grad.<name>` and stages on the way, `expect.*`. Out: a row for losses, gradients, metrics and stages.

use super::{Row, largest};
use crate::machine::Machine;
use crate::model::Model;
use crate::objective::{BatchFile, Outcome, Policies, log_probabilities, objective};
use crate::{Error, Hear, Note};
use astrai_ir::DType;
use astrai_runtime::weights::Checkpoint;
use astrai_train::strategies::{self, Batch, Options, Scale};
use serde_json::Value as Json;
use std::path::Path;

/// Name of the list of runs, by which a folder is recognised.
pub const RUNS: &str = "strategies.json";
const TENSORS: &str = "strategies.safetensors";

/// The worst of several comparisons.
pub(super) struct Worst {
    row: Row,
    count: usize,
}

impl Worst {
    pub(super) fn new(check: &'static str) -> Worst {
        Worst { row: Row::without(check, "missing", "nothing to compare"), count: 0 }
    }

    pub(super) fn see(&mut self, error: f64, tolerance: f64, note: &str) {
        self.count += 1;
        let over = |r: &Row| r.error.unwrap_or(-1.0) / r.tolerance.unwrap_or(1.0);
        let here = error / tolerance;
        if !over(&self.row).is_nan() && (here.is_nan() || here > over(&self.row)) {
            self.row = Row::compared(std::mem::take(&mut self.row.check), error, tolerance, note);
        }
    }

    pub(super) fn done(mut self) -> Row {
        if self.count > 1 {
            self.row.note = format!("worst of {}: {}", self.count, self.row.note);
        }
        self.row
    }
}

/// A folder of objectives.
pub struct Objectives<'a> {
    folder: &'a Path,
    machine: &'a Machine,
    policy: Model,
    frozen: [Model; 2],
    file: Checkpoint,
    runs: Vec<Json>,
}

impl<'a> Objectives<'a> {
    /// Opens a folder: its models, runs and tensors.
    ///
    /// # Errors
    /// One of them is missing or not what it should be.
    pub fn open(folder: &'a Path, machine: &'a Machine) -> Result<Objectives<'a>, Error> {
        let list = folder.join(RUNS);
        let text = astrai_files::read_text(&list, 16 << 20).map_err(|e| e.to_string())?;
        let runs = serde_json::from_str(&text).map_err(|e| format!("{}: {e}", list.display()))?;
        let of = |name: &str| Model::open_with(folder, &folder.join(name), false);
        let frozen = [of("ref_model.safetensors")?, of("old_model.safetensors")?];
        let policy = Model::open(folder, false)?;
        Ok(Objectives {
            folder,
            machine,
            policy,
            frozen,
            file: Checkpoint::open(&folder.join(TENSORS))?,
            runs,
        })
    }

    /// Computes every run, or those of `only`, and compares.
    ///
    /// # Errors
    /// A run says what no strategy knows, or the device failed.
    pub fn check(&self, only: Option<&[usize]>, hear: Hear) -> Result<Vec<Row>, Error> {
        let mut worst = ["losses", "grads", "metrics"].map(Worst::new);
        for (done, run) in self.runs.iter().enumerate() {
            hear(Note::Progress { what: "objectives", done: done as u64, total: self.runs.len() as u64 });
            if only.is_none_or(|only| only.contains(&done)) {
                self.run(done, run, &mut worst)?;
            }
        }
        let mut rows: Vec<Row> = worst.into_iter().map(Worst::done).collect();
        if self.file.names().any(|n| n.starts_with("expect.")) {
            rows.push(self.stages()?);
        }
        Ok(rows)
    }

    fn batch(&self, name: &str, strategy: &str, windows: usize) -> Result<Vec<Batch>, Error> {
        let (path, prefix) = (self.folder.join(TENSORS), format!("batch.{name}."));
        Ok(BatchFile { file: &self.file, path: &path, prefix: &prefix }.read(strategy, windows)?)
    }

    fn run(&self, i: usize, run: &Json, worst: &mut [Worst; 3]) -> Result<(), Error> {
        let bad = |what: &str| format!("{}: run {i} has no {what}", self.folder.join(RUNS).display());
        let name = run["strategy"].as_str().ok_or_else(|| bad("`strategy`"))?;
        let mut options: Options = run.as_object().cloned().unwrap_or_default();
        let known = [
            "run",
            "strategy",
            "batch",
            "reference",
            "loss_tolerance",
            "metrics",
            "gradient_accumulation_steps",
        ];
        known.iter().for_each(|k| _ = options.remove(*k));
        // AstrAI's own runs name no batch.
        if name == "grpo" && run.get("batch").is_none() {
            options.insert("preset".into(), "seed".into());
        }
        let strategy = strategies::strategy(name, options).map_err(|e| format!("run {i}: {e}"))?;
        let windows = run["gradient_accumulation_steps"].as_u64().unwrap_or(1) as usize;
        let window = self.batch(run["batch"].as_str().unwrap_or(name), name, windows)?;
        let [reference, old] = &self.frozen;
        let policies = Policies { policy: &self.policy, reference: Some(reference), old: Some(old) };
        let got = objective(&policies, &*strategy, &window, (DType::F32, self.machine), true)
            .map_err(|e| format!("run {i} ({name}): {e}"))?;
        let want = f64::from(self.floats(&format!("run.{i}.loss"), 1)?[0]);
        let label = format!("run {i}, {name} {}", run["loss_type"].as_str().unwrap_or(""));
        // A run that says its tolerance is held to it times max(0.1, size); AstrAI's, which say none, to 1e-5 of their size, or to the
        // rounding of the reference's own log-probabilities where the loss, a difference of ratios of them, is smaller than that.
        let (tolerance, floor) = match run["loss_tolerance"].as_f64() {
            Some(tolerance) => (tolerance, 0.1),
            None => (1e-5, self.rounding(&window)? / 1e-5),
        };
        worst[0].see((got.loss - want).abs() / want.abs().max(floor), tolerance, label.trim_end());
        self.gradients(i, &got, &mut worst[1])?;
        self.metrics(i, run, &got, &mut worst[2]);
        Ok(())
    }

    /// What one rounding to f32 changes of the largest log-probability of a target.
    fn rounding(&self, window: &[Batch]) -> Result<f64, Error> {
        let mut most = 0.0f64;
        for batch in window {
            let of = log_probabilities(&self.policy, &batch.sequences(), (DType::F32, self.machine))?;
            most = most.max(largest(of.iter().map(|x| f64::from(*x))));
        }
        Ok(most * f64::from(f32::EPSILON))
    }

    fn gradients(&self, i: usize, got: &Outcome, worst: &mut Worst) -> Result<(), Error> {
        let prefix = format!("run.{i}.");
        let names =
            self.file.names().filter(|n| n.strip_prefix(&prefix).is_some_and(|n| n.starts_with("grad.")));
        for name in names {
            let own = &name[prefix.len()..];
            let found = got.grads.iter().find(|(n, _)| n == own);
            let (_, value) = found.ok_or_else(|| format!("the model has no `{own}`"))?;
            let got = value.to_f32();
            let want = self.floats(name, got.len())?;
            let off = largest(got.iter().zip(&want).map(|(a, b)| f64::from(*a) - f64::from(*b)));
            let top = largest(want.iter().map(|x| f64::from(*x)));
            match top == 0.0 {
                true => worst.see(off, 1e-6, &format!("{name}, absolute, all zero")),
                false => worst.see(off / top, 1e-4, &format!("{name}, of the largest magnitude")),
            }
        }
        Ok(())
    }

    /// Every metric of the run that the strategy has; one that it has not is off.
    fn metrics(&self, i: usize, run: &Json, got: &Outcome, worst: &mut Worst) {
        let of = |name: &str| got.metrics.iter().find(|(n, _)| n == name).map(|(_, x)| *x);
        // AstrAI's names: the divergence with its coefficient, and the rest of the loss.
        let kl = of("kl").unwrap_or(0.0) * run["kl_coef"].as_f64().unwrap_or(0.0);
        for (name, want) in run["metrics"].as_object().into_iter().flatten() {
            let ours = match name.as_str() {
                "loss" | "task_loss" | "dpo_loss" => Some(got.loss),
                "policy_loss" => Some(got.loss - kl),
                "kl_loss" => Some(kl),
                // Counted over the whole step; ours is the mean over its micro-batches.
                "valid_tokens" => {
                    of(name).map(|x| x * run["gradient_accumulation_steps"].as_f64().unwrap_or(1.0))
                }
                _ => of(name),
            };
            let want = want.as_f64().unwrap_or(f64::NAN);
            let off = ours.map_or(f64::NAN, |x| (x - want).abs() / want.abs().max(1.0));
            worst.see(off, 1e-4, &format!("run {i}, {name}"));
        }
    }

    /// Log-probabilities and advantages on the way.
    fn stages(&self) -> Result<Row, Error> {
        let mut worst = Worst::new("stages");
        let on = (DType::F32, self.machine);
        let [reference, old] = &self.frozen;
        let pairs = self.batch("dpo", "dpo", 1)?[0].sequences();
        for (name, of) in [("expect.dpo.logps", &self.policy), ("expect.dpo.ref_logps", reference)] {
            let got = strategies::sums(&pairs, &log_probabilities(of, &pairs, on)?);
            self.stage(name, &got, &mut worst)?;
        }
        let groups = self.batch("grpo", "grpo", 1)?;
        let Batch::Groups(answers) = &groups[0] else { return Err("grpo learns from groups".into()) };
        let all = &answers.sequences;
        for (name, of) in [("expect.grpo.old_logps", old), ("expect.grpo.ref_logps", reference)] {
            let logps = log_probabilities(of, all, on)?;
            let width = self.file.get(name).and_then(|t| t.shape().last().copied()).unwrap_or(1);
            let mut table = vec![0.0; width * all.sequences()];
            for (row, b) in table.chunks_mut(width).zip(all.starts.windows(2)) {
                let of = b[0] as usize..b[1] as usize;
                let learnt = all.targets[of.clone()].iter().zip(&logps[of]).filter(|(t, _)| **t >= 0);
                row.iter_mut().zip(learnt).for_each(|(x, (_, y))| *x = *y);
            }
            self.stage(name, &table, &mut worst)?;
        }
        for (name, scale) in [("group", Scale::Group), ("batch", Scale::Batch), ("none", Scale::None)] {
            let got = strategies::advantages(&answers.rewards, answers.size, scale);
            self.stage(&format!("expect.grpo.advantages.{name}"), &got, &mut worst)?;
        }
        Ok(worst.done())
    }

    fn stage(&self, name: &str, got: &[f32], worst: &mut Worst) -> Result<(), Error> {
        let want = self.floats(name, got.len())?;
        let off = largest(got.iter().zip(&want).map(|(a, b)| f64::from(*a) - f64::from(*b)));
        let top = largest(want.iter().map(|x| f64::from(*x)));
        worst.see(off / top.max(1.0), 1e-4, name);
        Ok(())
    }

    fn floats(&self, name: &str, count: usize) -> Result<Vec<f32>, Error> {
        super::floats(&self.file, &self.folder.join(TENSORS), name, count)
    }
}
