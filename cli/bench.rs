//! `astrai bench`: the figures that anyone can measure again, as JSON lines with the fields of the peer's script
//! (`torch_lm.py`), so that both sides are read by one program.

mod breakdown;
mod decode;
mod load;
mod serve;
mod train;
mod wire;

use self::breakdown::Runs;
use crate::failure::{Done, Failure, bail, warn};
use crate::flags::{AdaptersFlag, FidelityFlags, KvFlag, MachineFlags, QuantizeFlag, SpeculateFlag};
use crate::measure::{Seconds, once, peak_rss_mb, rounded};
use crate::progress::Progress;
use crate::run::profile_table;
use crate::summary::fields;
use crate::workload::WorkloadFlags;
use astrai_builders::{Logits, ModelConfig, Program, build};
use astrai_engine::batch::RaggedBatch;
use astrai_engine::load::draw;
use astrai_engine::machine::Machine;
use astrai_engine::model::{Model, check_sizes, plan_within, read_config};
use astrai_estimate::check::predict;
use astrai_estimate::hardware::Hardware;
use astrai_ir::plan::RegionId;
use astrai_ir::{DType, Dim, Graph, IrError, Symbol};
use astrai_passes::Saturate;
use astrai_runtime::Device;
use astrai_runtime::device::KernelCache;
use astrai_runtime::{Compiled as Planned, Options, Random, Session, Value as Array, compile};
use clap::{Args, ValueEnum};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;

/// Sizes (m, n, k) that the peer's script measures.
const GEMMS: [(usize, usize, usize); 7] = [
    (512, 512, 512),
    (1024, 1024, 1024),
    (2048, 3072, 768),
    (768, 3072, 1024),
    (1024, 50304, 768),
    (64, 4096, 4096),
    (1, 4096, 4096),
];

/// The peer's default of `--seq`, which stands in every line.
const SEQ: u64 = 512;

/// x[m, k] times w[n, k] transposed.
#[derive(Clone, Copy, Debug)]
struct Size {
    m: usize,
    n: usize,
    k: usize,
}

/// Longest side accepted, so that a matrix's bytes can be counted.
const LONGEST: usize = 1 << 20;

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Size, String> {
        let sides: Option<Vec<usize>> =
            text.split(',').map(|side| side.parse().ok().filter(|n| (1..=LONGEST).contains(n))).collect();
        match sides.as_deref() {
            Some(&[m, n, k]) => Ok(Size { m, n, k }),
            _ => Err(format!("wants three numbers M,N,K from 1 to {LONGEST}")),
        }
    }
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Job {
    /// x[m, k] times w[n, k] transposed, over a list of sizes: gflops
    Gemm,
    /// One forward pass of --batch sequences of --seq tokens, logits of the last position: tokens_per_s
    Prefill,
    /// --new single-token steps of --batch sequences after prompts of --seq tokens, keys and values in pages: tokens_per_s
    Decode,
    /// --requests of --seq tokens through the serving engine, --batch at a time, each answered with --new tokens:
    /// tokens_per_s, and milliseconds to the first token and from one to the next. With --url through a server, over HTTP
    Serve,
    /// One optimiser step (forward, backward, clip, update) on --batch sequences of --seq tokens: tokens_per_s, and the update's part
    Train,
    /// Seconds to plan the prefill program and write its kernels, then to build the kernels, cold and warm
    Compile,
}

/// Measure, and print JSON lines
///
/// The lines have the fields of torch_lm.py: the median of --repeat timed runs after one that warms up, the fastest, the slowest, and
/// the peak memory of the process. Weights are random. Measure on an otherwise idle machine, from a release build.
/// Beside them stands the floor: the seconds of the same operations and bytes at the peaks of arithmetic and of reading
/// memory, kernel by kernel. The peaks are measured before and after each run, or each second of short ones, and of_floor is the median of
/// what part of a run its own floor is. peak_held and read_held are the parts of the peaks of arithmetic and of reading that were there
/// on average while they were measured: below 1 something else used the processor or the memory. In f32 the peak of arithmetic is the
/// vector instructions': products of trained f32 weights may beat it by a matrix unit, in pieces of bf16.
/// `compile` has a line each for plan, kernels_cold (an empty cache) and kernels_warm.
#[derive(Args)]
#[command(after_help = "Examples:
  astrai bench gemm --dtype bf16
  astrai bench gemm --size 2048,3072,768 --repeat 100
  astrai bench prefill --shape model/config.json --seq 512 --threads 2
  astrai bench decode --shape model/config.json --seq 512 --new 32 --dtype bf16
  astrai bench serve --shape model/config.json --batch 16 --seq 128 --new 64 --dtype bf16
  astrai bench serve --shape model/config.json --n 8 --seq 1024 --requests 1 --dtype bf16
  astrai bench serve --wire --shape model/
  astrai bench serve --shape model/config.json --batch 16 --seq 128 --adapters 16 --dtype bf16
  astrai bench serve --shape model/ --batch 16 --seq 128 --json-schema-path person.json --dtype bf16
  astrai bench serve --url http://127.0.0.1:8000 --num-prompts 200 --request-rate 8 --goodput ttft:500 tpot:50
  astrai bench train --shape model/config.json --batch 4 --seq 256 --profile
  astrai bench train --shape model/config.json --batch 4 --seq 256 --lora-rank 16
  astrai bench compile --shape model/config.json")]
pub struct Bench {
    /// What is measured
    #[arg(value_enum)]
    job: Job,
    /// A config.json or model directory (all but gemm)
    #[arg(long, value_name = "FILE")]
    shape: Option<PathBuf>,
    /// Sequences in a run, clients of an engine (all but gemm) [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 31))]
    batch: Option<u64>,
    /// Tokens of a sequence (prefill, train, compile) or of its prompt (decode, serve) [default: 512]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 31))]
    seq: Option<u64>,
    /// Tokens decoded in a run (decode), or for a request (serve) [default: 32, 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    new: Option<u64>,
    /// Requests of a run (serve) [default: 2 for each client]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    requests: Option<u64>,
    /// Choices of a request (serve) [default: 1]
    #[arg(long = "n", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=128))]
    choices: Option<u32>,
    /// Sizes to measure in place of the peer's (gemm); may be repeated
    #[arg(long, value_name = "M,N,K")]
    size: Vec<Size>,
    /// The processor time of the server for each streamed token, in front of a model of no cost with the tokenizer of --shape: HTTP, JSON,
    /// detokenising, events (serve). --batch clients [default: 64], prompts of --seq [default: 32], answers of --new [default: 128] tokens
    #[arg(long, conflicts_with_all = ["choices", "size", "profile", "url", "speculate", "quantize", "kv_cache_dtype", "fidelity", "device", "dtype", "simd", "threads"])]
    wire: bool,
    /// Timed runs
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    repeat: u32,
    /// Also where the time of a step goes, kernel by kernel, and beyond its floor, kind by kind (train, prefill, decode)
    #[arg(long)]
    profile: bool,
    /// Hardware, best a file of `astrai estimate --calibrate`: whose peaks --profile predicts by; also the seconds that an estimate on it predicts, and their
    /// relative error; of serve for memory as fast as it was read beside the load, and the first token's too (prefill, decode, serve, train)
    #[arg(long, value_name = "NAME|FILE", conflicts_with_all = ["url", "wire"])]
    hardware: Option<String>,
    #[command(flatten)]
    trained: train::TrainFlags,
    #[command(flatten)]
    speculate: SpeculateFlag,
    #[command(flatten)]
    adapters: AdaptersFlag,
    #[command(flatten)]
    asked: serve::AskedFlags,
    #[command(flatten)]
    quantize: QuantizeFlag,
    #[command(flatten)]
    pages: KvFlag,
    #[command(flatten)]
    fidelity: FidelityFlags,
    #[command(flatten)]
    machine: MachineFlags,
    #[command(flatten)]
    load: load::LoadFlags,
}

impl Bench {
    /// Measures and prints.
    pub fn run(self, out: &mut dyn Write) -> Done {
        if let Some(url) = &self.load.url {
            if self.job != Job::Serve {
                bail!("--url goes with bench serve; leave it out");
            }
            self.load.run(url, out)?;
            return Ok(ExitCode::SUCCESS);
        }
        if self.load.workload != WorkloadFlags::default() {
            bail!(
                "--num-prompts, --random-input-len and what else says which requests a server is sent go with --url; leave them out"
            );
        }
        if self.wire {
            if self.job != Job::Serve {
                bail!("--wire goes with bench serve; leave it out");
            }
            self.wire(out)?;
            return Ok(ExitCode::SUCCESS);
        }
        let hardware = self.hardware.as_ref().map(|name| self.machine.device.hardware(name)).transpose()?;
        let machine = self.machine.machine_as(hardware.as_ref())?;
        let kernels = machine.device.name() != "interpreter";
        let profiles = matches!(self.job, Job::Train | Job::Prefill | Job::Decode) && kernels;
        if self.profile && !profiles {
            bail!("--profile goes with bench train, prefill and decode, and with kernels; leave it out");
        }
        if self.new.is_some() && !matches!(self.job, Job::Decode | Job::Serve) {
            bail!("--new goes with bench decode and serve; leave it out");
        }
        if !self.size.is_empty() && self.job != Job::Gemm {
            bail!("--size goes with bench gemm; leave it out");
        }
        if self.requests.is_some() && self.job != Job::Serve {
            bail!("--requests goes with bench serve; leave it out");
        }
        if self.choices.is_some() && self.job != Job::Serve {
            bail!("--n goes with bench serve; leave it out");
        }
        if self.speculate.asked().is_some() && self.job != Job::Serve {
            bail!("--speculate and --draft go with bench serve; leave them out");
        }
        if (self.adapters.adapters.is_some() || self.asked.given()) && self.job != Job::Serve {
            bail!(
                "--adapters, --json-schema-path, --dataset-path, --temperature and --max-batch-tokens go with bench serve; leave them out"
            );
        }
        if let Some(flag) = self.trained.given().filter(|_| self.job != Job::Train) {
            bail!("{flag} goes with bench train; leave it out");
        }
        match self.job {
            Job::Gemm => self.fidelity.none("bench gemm is one dot")?,
            Job::Train => self.fidelity.none("training is always exact")?,
            _ => {}
        }
        if self.hardware.is_some() && matches!(self.job, Job::Gemm | Job::Compile) {
            bail!("--hardware goes with bench prefill, decode, serve and train; leave it out");
        }
        if self.quantize.quantize.is_some() && matches!(self.job, Job::Gemm | Job::Train) {
            bail!("--quantize goes with bench prefill, decode, serve and compile; leave it out");
        }
        if !matches!(self.job, Job::Decode | Job::Serve) {
            self.pages.none("only bench decode and serve have pages")?;
        }
        match self.job {
            Job::Gemm => self.gemm(&machine, out)?,
            Job::Prefill => self.prefill(&machine, out)?,
            Job::Decode => self.decode(&machine, out)?,
            Job::Serve => self.serve(&machine, out)?,
            Job::Train => self.train(&machine, out)?,
            Job::Compile => self.compile(&machine, out)?,
        }
        Ok(ExitCode::SUCCESS)
    }

    /// The fields that every line has, in the peer's order.
    fn line(&self, machine: &Machine, s: &Seconds, peak_rss_mb: u64) -> Map<String, Value> {
        let job = self.job.to_possible_value().map_or(String::new(), |v| v.get_name().to_string());
        let name = self.shape.as_ref().and_then(|p| p.file_name());
        let shape = name.map_or_else(|| job.clone(), |n| n.to_string_lossy().into_owned());
        let mut line = fields(json!({
            "peer": concat!("astrai ", env!("CARGO_PKG_VERSION")),
            "job": job,
            "shape": shape,
            "dtype": self.machine.storage().name(),
            "batch": self.batch.unwrap_or(1),
            "seq": self.seq.unwrap_or(SEQ),
            "compiled": true,
            "device": machine.device.name(),
            "threads": machine.device.threads(),
            "seconds_median": rounded(s.median, 5),
            "seconds_min": rounded(s.min, 5),
            "seconds_max": rounded(s.max, 5),
            "peak_rss_mb": peak_rss_mb,
        }));
        if let Some(narrow) = self.quantize.quantize {
            line.insert("weights".into(), json!(narrow.to_string()));
        }
        if let Some(code) = self.pages.code() {
            line.insert("kv_cache_dtype".into(), json!(code.name()));
        }
        line
    }

    /// Seconds that so many runs of a program of these sizes take on `--hardware`; none without it.
    fn predicted(
        &self,
        program: &Planned,
        size: &dyn Fn(&str) -> Option<u64>,
        runs: f64,
    ) -> Result<Option<f64>, Failure> {
        let Some(name) = &self.hardware else { return Ok(None) };
        Ok(Some(runs * predict(program, size, &Hardware::open(name)?)?))
    }

    fn gemm(&self, machine: &Machine, out: &mut dyn Write) -> Result<(), Failure> {
        let set = [
            ("--shape", self.shape.is_some()),
            ("--batch", self.batch.is_some()),
            ("--seq", self.seq.is_some()),
        ];
        if let Some((flag, _)) = set.iter().find(|(_, set)| *set) {
            bail!("{flag} means nothing to bench gemm, which has its own sizes; leave it out");
        }
        let storage = self.machine.storage();
        let all = GEMMS.map(|(m, n, k)| Size { m, n, k });
        for Size { m, n, k } in if self.size.is_empty() { &all[..] } else { &self.size[..] }.iter().copied() {
            let work = 2.0 * (m * n * k) as f64;
            let times = ((2e9 / work) as usize).max(1);
            let mut session = gemm_session((m, n, k), storage, machine)?;
            let x = random_input(m, k, storage);
            let mut runs = Runs::new(machine);
            let seconds = runs.repeat(
                self.repeat,
                &mut session,
                |_| vec![],
                |session, _| (0..times).try_for_each(|_| session.execute(&[("x", &x)])),
            )?;
            let mut line = self.line(machine, &seconds, runs.peak_rss_mb());
            let gflops = 1e-9 * work * times as f64 / seconds.median;
            line.extend([
                ("gflops".to_string(), json!(rounded(gflops, 2))),
                ("m".into(), json!(m)),
                ("n".into(), json!(n)),
                ("k".into(), json!(k)),
            ]);
            let moved = ((m * k + n * k + m * n) * storage.bytes() * times) as f64;
            line.extend(runs.floor(&[(&[(work * times as f64, moved)], 1.0)], storage));
            writeln!(out, "{}", Value::Object(line))?;
        }
        Ok(())
    }

    /// The configuration of `--shape`, `--batch` and `--seq`, behind which a sequence may have so many tokens more.
    fn shape(&self, more: u64) -> Result<(ModelConfig, u64, u64), Failure> {
        let needed = "--shape FILE is needed: the config.json of the model to measure";
        let path = self.shape.as_ref().ok_or(needed)?;
        let (mut config, warnings) = read_config(path, false)?;
        (config.narrow, config.pages) = (self.quantize.quantize, self.pages.code());
        warn(&warnings);
        let (batch, seq) = (self.batch.unwrap_or(1), self.seq.unwrap_or(SEQ));
        check_sizes(&config, batch, seq + more)?;
        Ok((config, batch, seq))
    }

    /// The configuration and the program of prefill.
    fn program(&self) -> Result<(ModelConfig, Program), Failure> {
        let (config, batch, seq) = self.shape(0)?;
        Ok((config, Program { logits: Logits::Last, ..Program::full(batch, seq) }))
    }

    fn prefill(&self, machine: &Machine, out: &mut dyn Write) -> Result<(), Failure> {
        let (config, program) = self.program()?;
        let fidelity = self.fidelity.asked().unwrap_or_default();
        let planned = plan_within(&config, &program, self.machine.storage(), machine, fidelity)?;
        planned.check_memory(&*machine.device)?;
        let costs = launch_costs(&planned)?;
        let expected = self.predicted(&planned, &largest(&planned), 1.0)?;
        let vocab = config.vocab_size;
        let ids: Vec<i64> = (0..program.tokens).map(|i| (draw(i) % vocab as u64) as i64).collect();
        let batch = RaggedBatch::new(&ids.chunks(program.span as usize).collect::<Vec<_>>(), vocab)?;
        let model = Model::fresh(config, vec![], 0);
        let storage = self.machine.storage();
        let mut session = Progress::during("making weights", |set| model.start(planned, machine, set))?;
        let inputs = batch.inputs(session.inputs());
        let mut runs = Runs::new(machine);
        let seconds = runs.repeat(self.repeat, &mut session, |_| vec![], |s, _| s.execute(&inputs))?;
        let mut line = self.line(machine, &seconds, runs.peak_rss_mb());
        line.insert("tokens_per_s".into(), json!(rounded(program.tokens as f64 / seconds.median, 2)));
        line.extend(beside(expected, &seconds));
        line.extend(runs.floor(&[(&costs, 1.0)], storage));
        writeln!(out, "{}", Value::Object(line))?;
        if self.profile {
            session.start_profile();
            let (_, seconds) = once(|| session.execute(&inputs).map(drop))?;
            let rows = session.take_profile().unwrap_or_default().by_kernel();
            eprint!("\n{}", profile_table(&rows));
            if let Some(peaks) = runs.last() {
                eprint!("\n{}", breakdown::breakdown(&[(None, &rows)], peaks, storage, seconds));
            }
        }
        Ok(())
    }

    fn compile(&self, machine: &Machine, out: &mut dyn Write) -> Result<(), Failure> {
        let (config, program) = self.program()?;
        let saturate =
            Saturate { fidelity: self.fidelity.asked().unwrap_or_default(), ..Saturate::default() };
        let (storage, narrow) = (self.machine.storage(), config.narrow.map(Into::into));
        let options = Options { storage, narrow, saturate, ..Options::default() };
        let planning = || -> Result<_, Failure> {
            Ok(compile(&build(&config, &program)?, machine.backend(), &options)?)
        };
        let planned = planning()?;
        let seconds = (0..self.repeat).map(|_| Ok(once(planning)?.1)).collect::<Result<_, Failure>>()?;
        let kernels = planned.kernels.iter().flatten().count();
        let mut put = |stage: &str, seconds: Vec<f64>| -> Result<(), Failure> {
            let mut line = self.line(machine, &Seconds::of(seconds), peak_rss_mb());
            line.insert("stage".into(), json!(stage));
            line.insert("kernels".into(), json!(kernels));
            Ok(writeln!(out, "{}", Value::Object(line))?)
        };
        put("plan", seconds)?;
        let Some(cpu) = &machine.cpu else { return Ok(()) };
        let kernels: Vec<_> = planned.kernels.iter().flatten().collect();
        let (mut cold, mut warm) = (vec![], vec![]);
        for _ in 0..self.repeat {
            let cache = KernelCache::temporary().map_err(|e| format!("a temporary folder: {e}"))?;
            let prepare = || cpu.with_cache(cache.clone()).load(&kernels).map(drop);
            cold.push(once(prepare)?.1);
            warm.push(once(prepare)?.1);
        }
        put("kernels_cold", cold)?;
        put("kernels_warm", warm)
    }
}

/// Operations and bytes of each kernel launch.
fn launch_costs(planned: &Planned) -> Result<Costs, Failure> {
    costs(planned, &largest(planned))
}

/// The greatest values of a program's symbols.
pub fn largest(planned: &Planned) -> impl Fn(&str) -> Option<u64> {
    |name| planned.plan.symbols.iter().find(|s| *s.name == *name).map(|s| s.max)
}

/// The fields of a prediction beside the median.
fn beside(predicted: Option<f64>, seconds: &Seconds) -> Vec<(String, Value)> {
    let Some(predicted) = predicted else { return vec![] };
    let error = predicted / seconds.median - 1.0;
    vec![
        ("predicted_seconds".into(), json!(rounded(predicted, 6))),
        ("error".into(), json!(rounded(error, 4))),
    ]
}

/// Operations and bytes of launches.
type Costs = Vec<(f64, f64)>;

/// Those of each kernel launch in a run of these sizes.
fn costs(planned: &Planned, size: &dyn Fn(&str) -> Option<u64>) -> Result<Costs, Failure> {
    let plan = &planned.plan;
    let cost = |r: RegionId| -> Result<(f64, f64), Failure> {
        let region = &plan.regions[r];
        Ok((region.flops().eval(size)? as f64, region.bytes().eval(size)? as f64))
    };
    plan.each_launch().into_iter().map(|(_, r)| cost(r)).collect()
}

/// `y = x · wᵀ`; in bf16 all three are stored so, each rounding a cast of the graph.
fn gemm_graph((m, n, k): (usize, usize, usize), storage: DType) -> Result<Graph, IrError> {
    let tokens = Symbol { name: "tokens".into(), min: 1, max: m as u64, multiple_of: 1 };
    let mut g = Graph::new(vec![tokens]);
    let x = g.input("x", storage, vec![Dim::symbol("tokens"), Dim::from(k)])?;
    let w = g.weight("w", storage, &[n, k])?;
    let (x, w) = (g.cast(x, DType::F32)?, g.cast(w, DType::F32)?);
    let y = g.linear(x, w)?;
    let y = g.cast(y, storage)?;
    g.set_output("y", y)?;
    Ok(g)
}

fn gemm_session(size: (usize, usize, usize), storage: DType, machine: &Machine) -> Result<Session, Failure> {
    let (_, n, k) = size;
    let planned = compile(&gemm_graph(size, storage)?, machine.backend(), &Options::default())?;
    planned.check_memory(&*machine.device)?;
    let weights = Random { tensors: HashMap::from([("w".to_string(), (vec![n, k], 0.0, 1.0))]), seed: 0 };
    Ok(Session::new(Arc::new(planned), &weights, &machine.device, &mut |_, _| {})?)
}

fn random_input(m: usize, k: usize, storage: DType) -> Array {
    let mut bytes = Vec::with_capacity(m * k * storage.bytes());
    for i in 0..(m * k) as u64 {
        storage.encode((draw(i) >> 11) as f64 / (1u64 << 52) as f64 - 1.0, &mut bytes);
    }
    Array { dtype: storage, shape: vec![m, k], bytes }
}
