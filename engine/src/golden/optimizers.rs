//! Optimisers and schedules held to a reference. In: a folder with `optimizers.json`, a list of runs with all their settings,
//! `golden.safetensors` with their batches and what came of them, and `schedules.json`. Out: a row for losses, norms, logits after the last step,
//! logits under averaged weights, and schedules.

use super::objectives::Worst;
use super::{Row, batches, floats, largest};
use crate::batch::RaggedBatch;
use crate::curve::{self, Course};
use crate::machine::Machine;
use crate::model::{Model, plan};
use crate::{Error, Hear, Note};
use astrai_builders::Program;
use astrai_ir::DType;
use astrai_runtime::weights::Checkpoint;
use astrai_runtime::{Session, Source, WeightSource};
use astrai_train::engine::Engine;
use astrai_train::schedule::{Decay, Schedule, WarmUp};
use astrai_train::update::{EMA, Muon, Optimizer, Rest, Rule, Scale};
use serde_json::Value as Json;
use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Name of the list of runs, by which a folder is recognised.
pub const RUNS: &str = "optimizers.json";
const SCHEDULES: &str = "schedules.json";

/// A folder of optimisers' runs.
pub struct Optimizers<'a> {
    folder: &'a Path,
    machine: &'a Machine,
    model: Model,
    path: PathBuf,
    file: Checkpoint,
    runs: Vec<Json>,
}

impl<'a> Optimizers<'a> {
    /// Opens a folder: its model, runs and tensors.
    ///
    /// # Errors
    /// One of them is missing or not what it should be.
    pub fn open(folder: &'a Path, machine: &'a Machine) -> Result<Optimizers<'a>, Error> {
        let path = folder.join("golden.safetensors");
        let runs = serde_json::from_value(read(&folder.join(RUNS))?).map_err(|e| e.to_string())?;
        let (model, file) = (Model::open(folder, false)?, Checkpoint::open(&path)?);
        Ok(Optimizers { folder, machine, model, path, file, runs })
    }

    /// Trains by every run, or those of `only`, and compares; then the schedules.
    ///
    /// # Errors
    /// A run says what no optimiser knows, or the device failed.
    pub fn check(&self, only: Option<&[usize]>, hear: Hear) -> Result<Vec<Row>, Error> {
        let mut worst = ["losses", "grad_norms", "final_logits", "ema_logits"].map(Worst::new);
        for (i, run) in self.runs.iter().enumerate() {
            hear(Note::Progress { what: "optimizers", done: i as u64, total: self.runs.len() as u64 });
            if only.is_none_or(|only| only.contains(&i)) {
                self.run(i, run, &mut worst).map_err(|e| format!("run {i}: {e}"))?;
            }
        }
        let mut rows: Vec<Row> =
            worst.into_iter().map(Worst::done).filter(|r| r.verdict != "missing").collect();
        rows.push(schedules(&self.folder.join(SCHEDULES))?);
        Ok(rows)
    }

    fn run(&self, i: usize, run: &Json, worst: &mut [Worst; 4]) -> Result<(), Error> {
        let (optimizer, lr) = optimizer(run)?;
        let name = run["optimizer"].as_str().unwrap_or_default();
        let narrow = run["ns_dtype"].as_str() == Some("bfloat16");
        let (ids, sizes) = batches(&self.file, &self.path, &self.model.config)?;
        let steps = sizes[0];
        let course = Course { ids: &ids, sizes, optimizer, lr, storage: DType::F32, adapter: None };
        let (got, engine) = curve::train(&self.model, course, self.machine, &mut |_, _| {})?;
        let [losses, norms] =
            ["losses", "grad_norms"].map(|x| floats(&self.file, &self.path, &format!("run.{i}.{x}"), steps));
        let relative = |got: f64, want: f32| (got - f64::from(want)) / f64::from(want).abs();
        let label = format!("run {i}, {name}{}", if narrow { " rounded to bf16" } else { "" });
        let tolerances = if narrow { [2e-2, 2e-2, 4e-2] } else { [1e-4, 1e-3, 1e-3] };
        let off = largest(got.iter().zip(losses?).map(|(s, w)| relative(s.loss, w)));
        worst[0].see(off, tolerances[0], &label);
        let off = largest(got.iter().zip(norms?).map(|(s, w)| relative(s.grad_norm, w)));
        worst[1].see(off, tolerances[1], &label);
        for (at, prefix, name) in [(2, "", "final_logits"), (3, EMA, "ema_logits")] {
            let name = format!("run.{i}.{name}");
            if self.file.get(&name).is_some() {
                let logits = self.logits(&engine, prefix)?;
                let want = floats(&self.file, &self.path, &name, logits.len())?;
                worst[at].see(distance(&logits, &want, narrow), tolerances[2], &label);
            }
        }
        Ok(())
    }

    /// Logits of the probe under the weights of this prefix.
    fn logits(&self, engine: &Engine, prefix: &str) -> Result<Vec<f32>, Error> {
        let probe = self.file.get("probe.input_ids").ok_or("no `probe.input_ids`")?.to_i64()?;
        let batch = RaggedBatch::new(&[&probe], self.model.config.vocab_size)?;
        let source = Trained::of(engine, prefix)?;
        let planned =
            plan(&self.model.config, &Program::full(1, probe.len() as u64), DType::F32, self.machine)?;
        let mut session = Session::new(Arc::new(planned), &source, &self.machine.device, &mut |_, _| {})?;
        let results = session.run(&batch.inputs(session.inputs()))?;
        Ok(results.first().map(|(_, v)| v.to_f32()).unwrap_or_default())
    }
}

/// By the norm of the difference where the reference was rounded, else of the largest magnitude.
fn distance(got: &[f32], want: &[f32], by_norm: bool) -> f64 {
    let off = || got.iter().zip(want).map(|(a, b)| f64::from(*a) - f64::from(*b));
    let all = || want.iter().map(|x| f64::from(*x));
    let norm = |x: f64| x.sqrt();
    match by_norm {
        true => norm(off().map(|x| x * x).sum()) / norm(all().map(|x| x * x).sum()),
        false => largest(off()) / largest(all()).max(1e-30),
    }
}

/// Weights in an engine's memory, by checkpoint name.
struct Trained(HashMap<String, (Vec<usize>, Vec<u8>)>);

impl Trained {
    fn of(engine: &Engine, prefix: &str) -> Result<Trained, Error> {
        let mut all = HashMap::new();
        for w in engine.weights() {
            let buffer = format!("{prefix}{}", w.name);
            let Some((_, shape)) = engine.buffers().shape(&buffer) else { continue };
            let row = shape.iter().skip(1).product::<usize>() * DType::F32.bytes();
            let mut first = 0;
            for part in w.rows() {
                let range = first * row..(first + part.rows) * row;
                first += part.rows;
                let bytes = engine.buffers().read(&buffer, |bytes| bytes[range].to_vec())?;
                let shape = std::iter::once(part.rows).chain(shape[1..].iter().copied()).collect();
                all.insert(part.name.clone(), (shape, bytes));
            }
        }
        Ok(Trained(all))
    }
}

impl WeightSource for Trained {
    fn tensor(&self, name: &str) -> Option<Source<'_>> {
        let (shape, bytes) = self.0.get(name)?;
        Some(Source { dtype: DType::F32, shape: shape.clone(), bytes: Cow::Borrowed(bytes) })
    }
}

fn read(path: &Path) -> Result<Json, Error> {
    let text = astrai_files::read_text(path, 16 << 20).map_err(|e| e.to_string())?;
    Ok(serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))?)
}

/// The optimiser of a run, and its learning rate.
fn optimizer(run: &Json) -> Result<(Optimizer, f64), Error> {
    let number = |of: &Json, key: &str| of[key].as_f64().ok_or_else(|| Error(format!("no number `{key}`")));
    let pair = |of: &Json| match of["betas"]
        .as_array()
        .map(|x| x.iter().filter_map(Json::as_f64).collect::<Vec<_>>())
    {
        Some(b) if b.len() == 2 => Ok([b[0], b[1]]),
        _ => Err(Error("no two `betas`".into())),
    };
    let lr = number(run, "lr")?;
    let rule = match run["optimizer"].as_str() {
        Some(name @ ("adam" | "adamw" | "nadamw")) => {
            let ([beta1, beta2], eps) = (pair(run)?, number(run, "eps")?);
            match name {
                "adam" => Rule::Adam { beta1, beta2, eps },
                "adamw" => Rule::AdamW { beta1, beta2, eps },
                _ => Rule::NAdamW { beta1, beta2, eps },
            }
        }
        Some("sgd") => Rule::Sgd {
            momentum: number(run, "momentum")?,
            nesterov: run["nesterov"].as_bool().unwrap_or(false),
        },
        Some("muon") => {
            let adamw = &run["adamw"];
            let rest = Rest {
                betas: pair(adamw)?,
                eps: number(adamw, "eps")?,
                rate: number(adamw, "lr")? / lr,
                weight_decay: number(adamw, "weight_decay")?,
            };
            let of: Vec<f64> =
                run["ns_coefficients"].as_array().into_iter().flatten().filter_map(Json::as_f64).collect();
            let coefficients = of.try_into().map_err(|_| "`ns_coefficients` are not three")?;
            let scale = match run["adjust_lr_fn"].as_str() {
                Some("original") => Scale::Original,
                Some("match_rms_adamw") => Scale::MatchRmsAdamw,
                Some("spectral_unclamped") => Scale::SpectralUnclamped,
                other => return Err(format!("`adjust_lr_fn` {other:?} is unknown").into()),
            };
            let (momentum, steps) = (number(run, "momentum")?, number(run, "ns_steps")? as u32);
            let (nesterov, narrow) = (run["nesterov"] == true, run["ns_dtype"] == "bfloat16");
            Rule::Muon { matrices: Muon { momentum, nesterov, coefficients, steps, scale, narrow }, rest }
        }
        other => return Err(format!("optimizer {other:?} is unknown").into()),
    };
    let plain = Optimizer::new(rule, number(run, "weight_decay")?, run["max_grad_norm"].as_f64());
    Ok((Optimizer { ema: run["ema_decay"].as_f64(), ..plain }, lr))
}

/// Factors of every schedule of a file.
fn schedules(path: &Path) -> Result<Row, Error> {
    let (all, mut worst) = (read(path)?, Worst::new("schedules"));
    for (i, entry) in all["schedules"].as_array().into_iter().flatten().enumerate() {
        let schedule = schedule(entry).map_err(|e| format!("{}: schedule {i}: {e}", path.display()))?;
        let factors = entry["factors"].as_array().into_iter().flatten();
        let off =
            factors.enumerate().map(|(t, want)| schedule.at(t as u64) - want.as_f64().unwrap_or(f64::NAN));
        worst.see(largest(off), 1e-9, &format!("schedule {i}, {}", entry["schedule"].as_str().unwrap_or("")));
    }
    Ok(worst.done())
}

fn schedule(entry: &Json) -> Result<Schedule, Error> {
    let count = |key: &str| entry[key].as_u64();
    let decay = match entry["schedule"].as_str() {
        Some("cosine") => Decay::Cosine,
        Some("cosine_clamped") => Decay::CosineClamped,
        Some("sgdr") => Decay::Sgdr,
        Some("wsd_linear") => Decay::WsdLinear,
        Some("wsd_sqrt") => Decay::Wsd,
        Some("wsd_cosine") => Decay::WsdCosine,
        Some("wsd_seed") => Decay::WsdSquare,
        Some("linear") => Decay::Linear,
        Some("constant") => Decay::Constant,
        Some("inverse_sqrt") => Decay::InverseSqrt,
        other => return Err(format!("{other:?} is unknown").into()),
    };
    let warm_up = match entry["warmup_form"].as_str() {
        Some("t/W") => WarmUp::Zero,
        Some("(t+1)/W") => WarmUp::First,
        Some("max(min, t/W)") => WarmUp::Floor,
        other => return Err(format!("a warm-up {other:?} is unknown").into()),
    };
    let warmup = count("warmup").unwrap_or(0);
    let stable = count("stable");
    let lasts = stable.zip(count("decay")).map(|(stable, decay)| warmup + stable + decay);
    Ok(Schedule {
        decay,
        lr: 1.0,
        min_lr: entry["min"].as_f64().unwrap_or(0.0),
        warmup,
        warm_up,
        stable,
        cycle: (count("t0").unwrap_or(0), count("t_mult").unwrap_or(1)),
        total: count("total").or(lasts).unwrap_or(u64::MAX),
    })
}
