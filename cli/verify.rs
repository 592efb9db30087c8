//! `astrai verify`: a model or data held to what a reference implementation computed for it. In: a folder with what was computed
//! beside what it was computed of. Out: a row a check, and success only when every check asked for was made and passed.

use crate::failure::{Done, Failure, bail, warn};
use crate::flags::{FidelityFlags, MachineFlags};
use crate::progress::tell;
use crate::table::table;
use astrai_engine::golden::lora::{self, Lora};
use astrai_engine::golden::objectives::{self, Objectives};
use astrai_engine::golden::optimizers::{self, Optimizers};
use astrai_engine::golden::{Golden, Row, data, gguf, narrow, packed};
use astrai_engine::{Error, Hear, Machine, Model, texts};
use astrai_estimate::llmsim::verify as llmsim;
use astrai_ir::DType;
use astrai_runtime::weights::Checkpoint;
use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Values of `--only`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Check {
    /// Logits of a full forward pass
    Logits,
    /// Mean next-token cross-entropy
    Loss,
    /// Gradients of the loss by every checkpoint tensor
    Grads,
    /// Greedy continuation of a prompt, over paged keys and values
    Greedy,
    /// Losses and gradient norms of a short training run
    Train,
}

/// Compare a model, data or texts with what a reference implementation made of them
///
/// A folder is known by its files and checked whole: `expected.json` (files of records, and what is in them), `chat_expected.json` (chats
/// and preferences, and what preprocessing makes of them), `packing.json` (lengths and their bins), `calls.json` (tool calls in generated
/// text), `schemas.json`, `regexes.json`, `grammars.json`, `malformed.json` (structured output), `strategies.json` (training
/// objectives), `optimizers.json` (optimisers and schedules), `adapter_config.json` (an adapter, its base and what training makes of it),
/// `golden.safetensors` with `dequantised.*` (a published quantised checkpoint), a `golden.json` of kinds of rounding or of `.gguf` files, or LLMSim's records. Else the folder is a model's: the golden file holds `input_ids`, `logits`, `loss`, `grad.*`, `greedy.*` and `train.*`. Tolerances in f32: logits and each gradient
/// within 1e-4 of their largest magnitude, loss within 1e-5, greedy tokens equal (a token may differ, and ends the comparison, where the
/// reference's margin is below 1e-3; the margins themselves must agree). In bf16: logits within 3e-2 by norm, loss within 3e-2
/// relative, and a greedy token may differ where the margin is below 3e-2 of the largest logit. The short training run: losses within 2e-3
/// relative, gradient norms within 1e-2 (in bf16: losses within 2e-2). Exit code 1 when anything
/// asked for is off, missing, or without a tolerance (gradients in bf16).
///
/// A folder of LLMSim's records in place of a model: each file is held to `astrai estimate --legacy llmsim`, every number to 1e-6.
#[derive(Args)]
#[command(after_help = "Examples:
  astrai verify tests/golden/llama
  astrai verify tests/golden/llama --only logits,loss,train --dtype bf16
  astrai verify model/ --golden reference.safetensors --dtype bf16 --only logits --json")]
pub struct Verify {
    /// A model directory, or a folder of one of the other kinds
    model: PathBuf,
    /// What the reference computed [default: golden.safetensors in the model directory]
    #[arg(long, value_name = "FILE")]
    golden: Option<PathBuf>,
    /// Only these checks, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "CHECKS")]
    only: Vec<Check>,
    /// One JSON object instead of the table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    fidelity: FidelityFlags,
    #[command(flatten)]
    machine: MachineFlags,
}

/// Checks of a folder; none of one that has none of the files by which it is known.
type Reader = fn(&Path, &Machine, Hear) -> Result<Vec<Row>, Error>;

/// Kinds of folders beside models with a golden file.
const FOLDERS: &[Reader] = &[
    |at, _, _| data::rows(at),
    |at, _, _| texts::rows(at),
    |at, machine, hear| match at.join(objectives::RUNS).is_file() {
        true => Objectives::open(at, machine)?.check(None, hear),
        false => Ok(vec![]),
    },
    |at, machine, hear| match at.join(lora::CONFIG).is_file() {
        true => Lora::open(at, machine)?.check(hear),
        false => Ok(vec![]),
    },
    |at, machine, hear| match at.join(optimizers::RUNS).is_file() {
        true => Optimizers::open(at, machine)?.check(None, hear),
        false => Ok(vec![]),
    },
    narrow::rows,
    gguf::rows,
    packed::rows,
    |at, _, _| match at.join("config.json").exists() {
        true => Ok(vec![]),
        false => llmsim::records(at).iter().map(|file| simulated(file)).collect(),
    },
];

/// A record of LLMSim held to our view of it.
fn simulated(file: &Path) -> Result<Row, Error> {
    let llmsim::Checked { file, error, note, .. } = llmsim::check(file).map_err(|e| e.to_string())?;
    let error = error.unwrap_or(f64::NAN);
    Ok(Row::compared(file, error, llmsim::TOLERANCE, &note))
}

impl Verify {
    /// Checks and prints.
    pub fn run(self, out: &mut dyn Write) -> Done {
        let machine = self.machine.machine()?;
        if self.golden.is_none()
            && let Some(done) = self.folder(&machine, out)?
        {
            return Ok(done);
        }
        let path = self.golden.clone().unwrap_or_else(|| self.model.join("golden.safetensors"));
        let file = Checkpoint::open(&path)?;
        let model = Model::open(&self.model, false)?;
        warn(&model.warnings);
        let mut golden = Golden::over(file, &path, &model, &machine, self.machine.storage())?;
        golden.fidelity = self.fidelity.asked().unwrap_or_default();
        let checks = match self.only.is_empty() {
            true => Check::value_variants(),
            false => self.only.as_slice(),
        };
        if checks.iter().all(|c| matches!(c, Check::Grads | Check::Train)) {
            self.fidelity.none("gradients and training are always exact")?;
        }
        let (mut hear, asked) = (tell(), |c: Check| checks.contains(&c));
        let mut rows = golden.forward(asked(Check::Logits), asked(Check::Loss), &mut hear)?;
        for check in [Check::Grads, Check::Greedy, Check::Train] {
            match check {
                _ if !asked(check) => {}
                Check::Greedy => rows.push(golden.greedy(&mut hear)?),
                Check::Grads => rows.push(golden.gradients(&mut hear)?),
                _ => rows.extend(golden.train(&mut hear)?),
            }
        }
        self.report(out, (&machine, golden.storage), &rows)
    }

    /// Checks a folder that is known by what it holds beside or instead of a golden file; `None` for others.
    fn folder(&self, machine: &Machine, out: &mut dyn Write) -> Result<Option<ExitCode>, Failure> {
        let (mut rows, mut hear) = (Vec::new(), tell());
        for read in FOLDERS {
            rows.extend(read(&self.model, machine, &mut hear)?);
        }
        if rows.is_empty() {
            return Ok(None);
        }
        if !self.only.is_empty() || self.machine.storage() != DType::F32 {
            bail!("{}: is checked whole and in f32; leave --only and --dtype out", self.model.display());
        }
        self.fidelity.none("a folder of this kind is always checked exactly")?;
        self.report(out, (machine, DType::F32), &rows).map(Some)
    }

    /// Prints the rows; success only if all are `ok`.
    fn report(&self, out: &mut dyn Write, on: (&Machine, DType), rows: &[Row]) -> Done {
        let ok = rows.iter().all(|r| r.verdict == "ok");
        self.print(out, on, rows, ok)?;
        Ok(if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    fn print(
        &self,
        out: &mut dyn Write,
        on: (&Machine, DType),
        rows: &[Row],
        ok: bool,
    ) -> Result<(), Failure> {
        if self.json {
            let row = |r: &Row| {
                json!({
                    "check": r.check, "error": r.error, "tolerance": r.tolerance, "verdict": r.verdict, "note": r.note,
                })
            };
            let report = json!({
                "model": self.model.display().to_string(),
                "device": on.0.device.name(),
                "dtype": on.1.name(),
                "checks": rows.iter().map(row).collect::<Vec<Value>>(),
                "ok": ok,
            });
            return Ok(writeln!(out, "{report}")?);
        }
        let figure = |x: Option<f64>| x.map_or_else(String::new, |x| format!("{x:.2e}"));
        let row = |r: &Row| {
            vec![r.check.clone(), figure(r.error), figure(r.tolerance), r.verdict.into(), r.note.clone()]
        };
        let rows: Vec<_> = rows.iter().map(row).collect();
        Ok(write!(out, "{}", table(&["check", "error", "tolerance", "verdict", "note"], &rows))?)
    }
}
