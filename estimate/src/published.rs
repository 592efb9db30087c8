//! Measurements that others published, and how far the estimate is from them. In: tables of `estimate/published` (or files in their
//! form) with sources, hardware, workloads. Out: predicted beside measured for each; the numbers of kernels fitted on every other
//! measurement of a file, from the first on, and tested on the rest.

use crate::Refused;
use crate::fit::{Fitted, fit};
use crate::hardware::Hardware;
use crate::quantity::Kind;
use crate::schedule::{Purpose, Schedule, stages};
use crate::work::{Work, settled, work};
use crate::zero::{gathering, summed};
use astrai_builders::{ModelConfig, Ranks};
use astrai_ir::{DType, Dim, Mesh};
use serde::Deserialize;

/// Files of measurements, by name.
const TABLES: [(&str, &str); 3] = [
    ("kernels.toml", include_str!("../published/kernels.toml")),
    ("decode.toml", include_str!("../published/decode.toml")),
    ("train.toml", include_str!("../published/train.toml")),
];

macro_rules! models {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../published/models/", $name, ".json")))),*]
    };
}

/// Shapes of the models measured.
const MODELS: &[(&str, &str)] = models![
    "astrai-1b",
    "llama-3.1-8b",
    "llama-3.2-1b",
    "qwen2.5-0.5b",
    "qwen2.5-1.5b",
    "qwen2.5-3b",
    "qwen2.5-7b",
    "qwen2.5-14b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-30b-a3b",
];

/// A file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    measurement: Vec<Entry>,
}

/// A measurement as a file has it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    what: String,
    source: String,
    hardware: String,
    engine: String,
    quantity: String,
    value: f64,
    #[serde(default)]
    bandwidth: Option<String>,
    #[serde(default)]
    kernel: Option<KernelEntry>,
    #[serde(default)]
    model: Option<String>,
    #[serde(default, rename = "for")]
    purpose: Option<String>,
    #[serde(default = "one")]
    batch: u64,
    #[serde(default = "one")]
    micro: u64,
    #[serde(default = "one")]
    seq: u64,
    #[serde(default = "one")]
    dp: u64,
    #[serde(default = "one")]
    tp: u64,
    #[serde(default)]
    zero: u8,
    #[serde(default)]
    reason: Option<String>,
}

fn one() -> u64 {
    1
}

/// A kernel by itself.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct KernelEntry {
    form: String,
    m: u64,
    #[serde(default = "one")]
    n: u64,
    #[serde(default = "one")]
    k: u64,
    #[serde(default = "one")]
    batch: u64,
    #[serde(default = "one")]
    kv_heads: u64,
    #[serde(default = "one")]
    seq: u64,
    #[serde(default)]
    sequences: Option<u64>,
    #[serde(default)]
    causal: bool,
    #[serde(default)]
    dtype: Option<String>,
    #[serde(default)]
    reads: Option<u64>,
}

/// What starts the kernels of a measurement, and how long the next one waits for that.
pub const ENGINES: [&str; 2] = ["kernel", "graph"];

/// A measurement and what is needed to predict it.
#[derive(Clone, Debug)]
pub struct Case {
    /// What was measured.
    pub what: String,
    /// Who measured.
    pub source: String,
    /// The machine.
    pub hardware: Hardware,
    /// Which of [`ENGINES`].
    pub engine: usize,
    /// Seconds that were measured.
    pub measured: f64,
    /// Launches, sizes settled, and how often each runs.
    pub works: Vec<(Work, f64)>,
    /// Ranks.
    pub mesh: Mesh,
    /// Seconds beside the launches, of what the plan has not.
    pub beside: f64,
    /// Fitted on, rather than tested.
    pub fitted: bool,
    /// Why a great error is expected.
    pub reason: Option<String>,
}

/// A measurement beside its prediction.
#[derive(Clone, Debug)]
pub struct Compared {
    /// The measurement.
    pub case: Case,
    /// Seconds predicted.
    pub predicted: f64,
}

impl Compared {
    /// Relative error.
    pub fn error(&self) -> f64 {
        self.predicted / self.case.measured - 1.0
    }
}

/// All measurements.
pub struct Outcome {
    /// In the order of the files.
    pub rows: Vec<Compared>,
    /// The numbers fitted.
    pub fitted: Fitted,
}

impl Outcome {
    /// Median of the absolute errors of those tested, and the greatest of those without a reason.
    pub fn tested(&self) -> (f64, f64) {
        let rows = || self.rows.iter().filter(|r| !r.case.fitted);
        let mut errors: Vec<f64> = rows().map(|r| r.error().abs()).collect();
        errors.sort_by(f64::total_cmp);
        let worst = rows().filter(|r| r.case.reason.is_none()).map(|r| r.error().abs()).fold(0.0, f64::max);
        (errors.get(errors.len() / 2).copied().unwrap_or(0.0), worst)
    }
}

/// Runs the repository's tables.
///
/// # Errors
/// A table is wrong; one line that names it and the key.
pub fn run() -> Result<Outcome, Refused> {
    let mut cases = Vec::new();
    for (file, text) in TABLES {
        cases.extend(read(text, file)?);
    }
    let training: Vec<&Case> = cases.iter().filter(|c| c.fitted).collect();
    let fitted = fit(&training)?;
    let rows = cases
        .into_iter()
        .map(|case| {
            let predicted = fitted.predict(&case)?;
            Ok(Compared { case, predicted })
        })
        .collect::<Result<Vec<_>, Refused>>()?;
    Ok(Outcome { rows, fitted })
}

/// The measurements of a file of this form.
///
/// # Errors
/// One line that names the file and the key.
pub fn read(text: &str, file: &str) -> Result<Vec<Case>, Refused> {
    let wrong = |e: toml::de::Error| format!("{file}: {}", astrai_files::one_line(&e.to_string()));
    let table: Table = toml::from_str(text).map_err(wrong)?;
    let of = |(i, e): (usize, &Entry)| {
        let at = |line: Refused| {
            format!("{file}: measurement {} (\"{}\"): {line}", i + 1, astrai_files::one_line(&e.what))
        };
        case(e, i % 2 == 0).map_err(at)
    };
    table.measurement.iter().enumerate().map(of).collect()
}

fn case(e: &Entry, fitted: bool) -> Result<Case, Refused> {
    let mut hardware = Hardware::open(&e.hardware)?;
    if let Some(text) = &e.bandwidth {
        hardware.bandwidth = Kind::Bandwidth.parse(text).map_err(|line| format!("bandwidth: {line}"))?;
    }
    let engine = ENGINES.iter().position(|n| *n == e.engine);
    let engine = engine.ok_or_else(|| format!("engine: there are {}", ENGINES.join(", ")))?;
    if !(e.value.is_finite() && e.value > 0.0) || e.source.is_empty() {
        return Err("value must be a number above 0, and source a text".into());
    }
    let (works, mesh, beside, tokens) = match (&e.kernel, &e.model) {
        (Some(k), None) => (vec![(kernel(k)?, 1.0)], Mesh::default(), 0.0, 0.0),
        (None, Some(model)) => program(e, model, &hardware)?,
        _ => return Err("give either kernel or model".into()),
    };
    let (flops, bytes) = works.first().map_or((0.0, 0.0), |(w, _)| (size(&w.flops), size(&w.bytes)));
    let measured = match e.quantity.as_str() {
        "us" => e.value / 1e6,
        "tpot_ms" | "ttft_ms" => e.value / 1e3,
        "tflops" => flops / (e.value * 1e12),
        "tb_s" => bytes / (e.value * 1e12),
        "tokens_per_s" => tokens / e.value,
        _ => {
            return Err(
                "quantity: there are us, tpot_ms, ttft_ms, tflops, tb_s, tokens_per_s (of a device)".into()
            );
        }
    };
    let (what, source) = (e.what.clone(), e.source.clone());
    let reason = e.reason.clone();
    Ok(Case { what, source, hardware, engine, measured, works, mesh, beside, fitted, reason })
}

fn size(d: &Dim) -> f64 {
    d.literal().unwrap_or(0) as f64
}

/// The launches of a step, sizes settled; and the tokens of a device in it.
type Launches = (Vec<(Work, f64)>, Mesh, f64, f64);

fn program(e: &Entry, model: &str, hardware: &Hardware) -> Result<Launches, Refused> {
    let text = MODELS.iter().find(|(n, _)| *n == model).map(|(_, text)| *text);
    let text = text.ok_or_else(|| format!("model: there is no shape `{}`", astrai_files::one_line(model)))?;
    let config = ModelConfig::parse(text, model).map_err(|e| e.to_string())?.config;
    let purpose = match e.purpose.as_deref() {
        Some("train") => Purpose::Train,
        Some("prefill") => Purpose::Prefill,
        Some("decode") => Purpose::Decode,
        _ => return Err("for: there are train, prefill, decode".into()),
    };
    let ranks = Ranks { pp: 1, dp: e.dp as usize, ep: 1, tp: e.tp as usize };
    let of_one = Schedule::of_one(purpose, e.batch, e.seq, DType::BF16);
    let schedule = Schedule { ranks, micro: e.micro, zero: e.zero, ..of_one };
    let mesh = schedule.mesh(&config)?;
    let planned = stages(&config, &schedule, hardware.planner().backend())?;
    let mut works = Vec::new();
    for run in planned.iter().flat_map(|s| &s.runs) {
        let symbols = &run.planned.plan.symbols;
        let bound = |name: &str| symbols.iter().find(|s| &*s.name == name).map(|s| s.max);
        let times = if run.name == "update" { 1.0 } else { e.micro as f64 };
        for w in work(&run.planned) {
            let [piece, own] = if run.name == "update" { summed(&schedule, &w) } else { [None, Some(w)] };
            for (w, times) in piece.map(|w| (w, e.micro as f64)).into_iter().chain(own.map(|w| (w, times))) {
                let launches = w.launches as f64 * times;
                works.push((settled(w, &bound)?, launches));
            }
        }
    }
    let beside = gathering(&schedule, hardware, &mesh, planned[0].weights)? * e.micro as f64;
    let rows = if purpose == Purpose::Decode { e.batch } else { e.batch * e.seq };
    Ok((works, mesh, beside, rows as f64 / schedule.devices() as f64))
}

/// A kernel by itself as a launch.
fn kernel(k: &KernelEntry) -> Result<Work, Refused> {
    let dtype = match k.dtype.as_deref() {
        None | Some("bf16") => DType::BF16,
        Some("f32") => DType::F32,
        _ => return Err("kernel.dtype: there are bf16, f32".into()),
    };
    let [m, n, d, batch] = [k.m, k.n, k.k, k.batch].map(u128::from);
    let (kv, seq, width) = (u128::from(k.kv_heads), u128::from(k.seq), dtype.bytes() as u128);
    let visible = if k.causal { 2 } else { 1 };
    // Unless told otherwise each row is a sequence's newest.
    let sequences = k.sequences.map_or(m, u128::from);
    let (form, flops, bytes, groups) = match k.form.as_str() {
        "dot" => ("dot", 2 * m * n * d * batch, (m * d + n * d + m * n) * width * batch, 0),
        "grouped" => ("grouped", 2 * m * n * d, (m * d + batch * n * d + m * n) * width, 0),
        "attention" => (
            "attention",
            4 * m * seq * d * batch / visible,
            (2 * m * batch * d + 2 * sequences * seq * kv * d) * width,
            0,
        ),
        "attention_grad" => (
            "attention_grad",
            10 * m * seq * d * batch / visible,
            (4 * m * batch * d + 4 * sequences * seq * kv * d) * width,
            0,
        ),
        "loops" => ("loops", 4 * m * n, u128::from(k.reads.unwrap_or(2)) * (m * n) * width, 0),
        _ => return Err("kernel.form: there are dot, grouped, attention, attention_grad, loops".into()),
    };
    let dim = |n: u128| {
        usize::try_from(n).map(Dim::from).map_err(|_| "kernel: the sizes are too great".to_string())
    };
    // The second of the operands of a sum has as many bytes as its result.
    let bytes = if form == "loops" && k.reads.is_some() { bytes / 2 } else { bytes };
    Ok(Work {
        form,
        sizes: [dim(m)?, dim(n)?, dim(d)?, dim(batch)?],
        types: [dtype; 3],
        flops: dim(flops)?,
        bytes: dim(bytes)?,
        groups,
        ..Work::beside("", vec![])
    })
}

#[cfg(test)]
mod tests;
