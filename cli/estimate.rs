//! `astrai estimate`: flags and printing of what a program will cost.

mod here;
mod legacy;
mod replay;
mod schedule;
mod search;
mod shown;

pub use here::measured;

use crate::compile::{Purpose, config_value};
use crate::failure::{Done, Failure, bail, spare, warn};
use crate::flags::{DeviceName, QuantizeFlag};
use crate::table::table;
use astrai_builders::ModelConfig;
use astrai_engine::model::packed;
use astrai_estimate::estimate::Planned;
use astrai_estimate::hardware::{Hardware, PRESETS};
use astrai_estimate::report;
use astrai_train::settings::Recompute;
use clap::{Args, ValueEnum};
use schedule::ScheduleFlags;
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Values of `--legacy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Legacy {
    /// LLMSim's formulas, defects included
    Llmsim,
}

/// Say what a program will cost on which hardware
///
/// The programs are those that would run: one of every stage's ranks, planned by the passes that also plan for this machine, with
/// the hardware's numbers. A row is a kernel in the layers of one kind: its operations and bytes, the time that they take at the part
/// of the peaks that such kernels reach, and what is sent between ranks. Hardware is a preset or a JSON or JSON5 file with spelled-out
/// units; files of LLMSim's are read, too.
///
/// TTFT is the time of a prefill of all sequences, TPOT that of a step of decode with `--seq` tokens there. MFU is the model's
/// operations beside the peak: all pairs of attention (as PaLM counts), and visible pairs only. `--zero` is not in the plans: what it
/// shares is divided by the formula of its paper.
#[derive(Args)]
// What is negative is refused by the flag that it was given to.
#[command(mut_args(|a| if a.get_long().is_some() && a.get_action().takes_values() { a.allow_negative_numbers(true) } else { a }))]
#[command(after_help = "Examples:
  astrai estimate --list
  astrai estimate model/config.json --for decode --batch 32 --seq 4096 --hardware h200
  astrai estimate model/config.json --for train --batch 64 --seq 4096 --dp 8 --tp 4 --json
  astrai estimate model/config.json --for decode --seq 4096 --search throughput --devices 64 --max-latency 50
  astrai estimate model/config.json --for decode --seq 4096 --search cost --max-devices 64 --tp 8 --csv schedules.csv
  astrai estimate model/config.json --replay --request-rate 20 --num-prompts 10000 --goodput ttft:500 tpot:50
  astrai estimate --calibrate here.json
  astrai estimate model/config.json --check --for decode --dtype f32 --hardware here.json
  astrai estimate model/config.json --check --for decode --device cuda
  astrai estimate --published
  astrai estimate model/config.json --legacy llmsim --hardware klx_p800 --tp 8")]
pub struct Estimate {
    /// A config.json or a model directory; for --calibrate several, or none for shapes that suit it
    #[arg(required_unless_present_any = ["list", "published", "calibrate"])]
    model: Vec<PathBuf>,
    /// List the presets of hardware and what they say
    #[arg(long, conflicts_with_all = SCHEDULE)]
    list: bool,
    /// A preset, or a file [default: h100-sxm; of --check and --calibrate this machine, measured]
    #[arg(long, value_name = "NAME|FILE")]
    hardware: Option<String>,
    #[command(flatten)]
    schedule: ScheduleFlags,
    #[command(flatten)]
    quantize: QuantizeFlag,
    /// The view of another simulator
    #[arg(long, value_enum, value_name = "SIMULATOR")]
    legacy: Option<Legacy>,
    /// LLMSim's schedule: a layer more for multi-token prediction
    #[arg(long, requires = "legacy")]
    mtp: bool,
    /// LLMSim's schedule: tokens are dispatched to experts and combined
    #[arg(long, requires = "legacy")]
    deepep: bool,
    /// LLMSim's schedule: dense layers of a model with experts are not divided by tp
    #[arg(long, requires = "legacy")]
    dense_dp: bool,
    /// One JSON object
    #[arg(long)]
    json: bool,
    /// Write the rows as comma-separated values; with --legacy llmsim those of LLMSim, of a search all schedules
    #[arg(long, value_name = "FILE", conflicts_with = "list")]
    csv: Option<PathBuf>,
    /// Write the rows and the summary as a workbook of XLSX; with --legacy llmsim those of LLMSim, of a search all schedules
    #[arg(long, value_name = "FILE", conflicts_with = "list")]
    xlsx: Option<PathBuf>,
    /// Write a page of charts that fetches nothing: time, roofline, memory, timeline, sensitivity; of a search also its frontier
    #[arg(long, value_name = "FILE", conflicts_with_all = ["legacy", "list"])]
    html: Option<PathBuf>,
    /// Write the launches of a step as JSON for Chrome's trace viewers (chrome://tracing, Perfetto)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["legacy", "list", "search"])]
    timeline: Option<PathBuf>,
    #[command(flatten)]
    searched: search::SearchFlags,
    #[command(flatten)]
    here: HereFlags,
    #[command(flatten)]
    replay: replay::ReplayFlags,
}

/// Flags of the schedule, for what has none.
const SCHEDULE: [&str; 15] = [
    "purpose",
    "batch",
    "seq",
    "context_dist",
    "tp",
    "dp",
    "ep",
    "pp",
    "micro_batches",
    "interleave",
    "zero",
    "recompute",
    "dtype",
    "kv_cache_dtype",
    "quantize",
];

/// What is run or measured here.
#[derive(Args, Clone, Debug)]
struct HereFlags {
    /// Run the program here with random weights: predicted beside measured seconds, by operator and in total
    #[arg(long, conflicts_with_all = ["legacy", "list", "search", "csv"])]
    check: bool,
    /// Run train, prefill and decode here in f32 and bf16, fit the numbers of kernels to them, and write the hardware file
    #[arg(long, value_name = "FILE", conflicts_with_all = ["legacy", "list", "search", "csv", "check"])]
    #[arg(conflicts_with_all = SCHEDULE)]
    calibrate: Option<PathBuf>,
    /// Predict measurements that others published; numbers of kernels are fitted on half of them
    #[arg(conflicts_with_all = SCHEDULE)]
    #[arg(long, conflicts_with_all = ["model", "legacy", "list", "search", "csv", "check", "calibrate"])]
    published: bool,
    /// Steps measured, at least (--check, --calibrate) [default: 7]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    repeat: Option<u32>,
    /// What runs it: cpu (also auto), cuda or cuda:N (--check, --calibrate)
    #[arg(long, value_name = "DEVICE")]
    device: Option<DeviceName>,
    /// Threads; 0 means one a core (--check, --calibrate)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=1024))]
    threads: Option<u16>,
}

impl HereFlags {
    fn repeat(&self) -> usize {
        self.repeat.unwrap_or(7) as usize
    }

    /// A flag that is given and means nothing unless something is run.
    fn given(&self) -> Option<&'static str> {
        let given = [
            ("--device", self.device.is_some()),
            ("--repeat", self.repeat.is_some()),
            ("--threads", self.threads.is_some()),
        ];
        given.into_iter().find(|(_, given)| *given).map(|(flag, _)| flag)
    }
}

impl Estimate {
    /// Estimates and prints.
    pub fn run(self, out: &mut dyn Write) -> Done {
        self.replay.check()?;
        let files = [
            ("--csv", &self.csv),
            ("--xlsx", &self.xlsx),
            ("--html", &self.html),
            ("--timeline", &self.timeline),
        ];
        let written: Vec<_> =
            files.into_iter().filter_map(|(flag, file)| Some((flag, file.as_ref()?))).collect();
        let of_flags = [&self.hardware, &self.schedule.context_dist].into_iter().flatten().map(Path::new);
        let of_flags = of_flags.chain(self.schedule.server.draft());
        let read: Vec<&Path> =
            self.model.iter().chain(&self.replay.trace).map(PathBuf::as_path).chain(of_flags).collect();
        for (i, (flag, file)) in written.iter().enumerate() {
            spare(flag, file, read.iter().copied())?;
            if let Some((other, _)) = written[..i].iter().find(|(_, other)| other == file) {
                bail!("{flag}: {} is {other}'s; name another file", file.display());
            }
        }
        let here = self.here.check || self.here.calibrate.is_some();
        if let Some(flag) = self.here.given().filter(|_| !here) {
            bail!("{flag} goes with --check and --calibrate; a plan is made for --hardware");
        }
        if let Some((flag, _)) = written.first().filter(|_| here || self.here.published) {
            bail!(
                "{flag} writes what is planned, not what --check, --calibrate and --published print; leave it out"
            );
        }
        let planned =
            !(here || self.list || self.here.published || self.replay.replay || self.legacy.is_some());
        if let Some(flag) = self.schedule.of_plan().filter(|_| !planned) {
            bail!(
                "{flag} goes with the plan of a step, not with --list, --check, --calibrate, --published, --replay or --legacy"
            );
        }
        if let Some(flag) = self.searched.given().filter(|_| self.searched.search.is_none()) {
            bail!("{flag} goes with --search; leave it out");
        }
        let model = match self.model.as_slice() {
            [] => None,
            [model] => Some(model.as_path()),
            _ if self.here.calibrate.is_some() => None,
            [_, second, ..] => {
                bail!("{}: one model at a time; only --calibrate takes several", second.display())
            }
        };
        let flags = &self.schedule;
        if flags.recompute.is_some_and(|r| r != Recompute::Selective) && flags.purpose != Purpose::Train {
            bail!("--recompute: only training computes activations again; leave it out");
        }
        if (flags.purpose != Purpose::Decode && !self.replay.replay) || self.legacy.is_some() {
            flags
                .pages
                .none("only programs --for decode have pages, and only the plan knows how they are stored")?;
        }
        if flags.purpose == Purpose::Train {
            self.quantize.none("weights are not trained as codes")?;
        }
        if self.legacy.is_some() {
            self.quantize.none("only the plan knows how weights are stored")?;
        }
        match (model, self.legacy) {
            _ if self.list => self.presets(out)?,
            _ if self.here.published => self.published(out)?,
            _ if self.here.calibrate.is_some() => self.calibrate(out)?,
            (Some(model), Some(Legacy::Llmsim)) => self.llmsim(model, out)?,
            (Some(model), None) if self.here.check => self.check(model, out)?,
            (Some(model), None) if self.replay.replay => self.replay(model, out)?,
            (Some(model), None) if self.searched.search.is_some() => self.search(model, out)?,
            (Some(model), None) => self.plan(model, out)?,
            (None, _) => bail!("give a config.json or a model directory"),
        }
        Ok(ExitCode::SUCCESS)
    }

    fn hardware(&self) -> &str {
        self.hardware.as_deref().unwrap_or("h100-sxm")
    }

    /// The configuration, and the file's name.
    fn config(&self, model: &Path) -> Result<(ModelConfig, String), Failure> {
        let (value, file) = config_value(model)?;
        let reading = ModelConfig::parse(&value.to_string(), &file).map_err(|e| e.to_string())?;
        warn(&reading.warnings);
        // Codes are no weights of training.
        let forward = self.schedule.purpose != Purpose::Train && self.here.calibrate.is_none();
        let narrow = self.quantize.quantize.or_else(|| packed(&reading).filter(|_| forward));
        let pages = self.schedule.pages.code();
        Ok((ModelConfig { narrow, pages, ..reading.config }, file))
    }

    fn plan(&self, model: &Path, out: &mut dyn Write) -> Result<(), Failure> {
        let (config, file) = self.config(model)?;
        let hardware = Hardware::open(self.hardware())?;
        let schedule = self.schedule.planned()?;
        let named = |e: String| if e.starts_with('-') { e } else { format!("{file}: {e}") };
        let planned = Planned::new(&config, &schedule, hardware.planner().backend()).map_err(named)?;
        let found = planned.on(&hardware).map_err(named)?;
        if let Some(path) = &self.csv {
            write(path, report::to_csv(&found).as_bytes())?;
        }
        if let Some(path) = &self.timeline {
            write(path, report::timeline(&found)?.to_string().as_bytes())?;
        }
        if let Some(path) = &self.xlsx {
            write(path, &report::sheets_of(&found)?)?;
        }
        if let Some(path) = &self.html {
            write(path, report::page(&file, &planned, &hardware, None)?.as_bytes())?;
        }
        match self.json {
            true => writeln!(out, "{}", report::to_json(&found))?,
            false => write!(out, "{}", shown::estimate(&found))?,
        }
        Ok(())
    }

    /// What the presets say.
    fn presets(&self, out: &mut dyn Write) -> Result<(), Failure> {
        let mut rows = Vec::new();
        for (name, _) in PRESETS {
            let h = Hardware::open(name)?;
            if self.json {
                writeln!(out, "{}", json!({"preset": name, "hardware": h.save()}))?;
                continue;
            }
            let saved = h.save();
            let cell = |section: &str, key: &str| saved[section][key].as_str().unwrap_or("").to_string();
            let memory = ["size", "bandwidth"].map(|key| cell("memory", key));
            let compute = ["fp32", "bf16", "fp8"].map(|key| cell("compute", key));
            let source = h.sources.first().cloned().unwrap_or_default();
            let names = [name.to_string(), h.name.clone()];
            rows.push([&names[..], &memory, &compute, &[source]].concat());
        }
        if !self.json {
            let head = ["preset", "name", "memory", "bandwidth", "fp32", "bf16", "fp8", "source"];
            write!(out, "{}", table(&head, &rows))?;
        }
        Ok(())
    }
}

/// Writes a file whole, or names it.
fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    Ok(std::fs::write(path, bytes).map_err(|e| format!("{}: {e}", path.display()))?)
}
