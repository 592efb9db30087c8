//! `astrai compile`: from a config.json, a model directory or a graph to a plan and the source of its kernels, with what
//! they will cost. Needs no weights, builds nothing, allocates nothing of the model's size.

mod cost;
mod cuda;
mod mesh;
mod train;

use self::mesh::MeshFlag;
use crate::explain::explain;
use crate::failure::{Done, Failure, bail, spare, warn};
use crate::flags::{
    AdaptersFlag, DeviceName, FidelityName, HardwareFlag, KvFlag, MachineFlags, QuantizeFlag,
};
use crate::page::page;
use crate::summary::{describe, fields, graph_parameters, summary};
use crate::{measure, output};
use astrai_builders::config::Slots;
use astrai_builders::{Cache, Logits, ModelConfig, Program, build, placements};
use astrai_engine::machine::Machine;
use astrai_engine::model::{check_sizes, packed};
use astrai_estimate::llmsim;
use astrai_ir::{Graph, Narrow, graphviz, json as ir_json};
use astrai_passes::{Fidelity, MeshSharding, Saturate, Stack};
use astrai_runtime::{Compiled as Planned, Dump, Options, Stage};
use astrai_serve::cache::stored;
use clap::{Args, ValueEnum};
use serde_json::{Map, Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Tokens of a sequence unless `--seq` says otherwise or the model takes fewer.
const SEQ: u64 = 512;

/// The value of `--explain` that is no layer kind.
const COST: &str = "cost";

/// Longest graph file read, bytes.
const MAX_GRAPH: u64 = 1 << 30;

/// Values of `--for`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Purpose {
    /// Logits of the last position of `--batch` sequences of `--seq` tokens
    #[value(alias = "extend")]
    Prefill,
    /// One token of each of `--batch` sequences, keys and values of up to `--seq` tokens in pages
    Decode,
    /// A training step on `--batch` sequences of `--seq` tokens: gradient and AdamW update
    Train,
}

/// Values of `--form`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, ValueEnum)]
pub enum Form {
    /// Lines for people, one node a line
    #[default]
    Text,
    /// A graph that `astrai compile` takes again
    Json,
    /// The language of Graphviz
    Dot,
    /// The model as LLMSim's list of operators, which `astrai compile` takes again; no pass
    Llmsim,
}

/// Compile a model and say what it costs: kernels, flops, bytes, memory
///
/// Takes a config.json, a model directory, or a graph as `-o` writes it (recognised by its key `astrai_ir` and compiled
/// as given); of LLMSim's graphs the model that they are of. No weights are needed and nothing is built or run, so that models far larger than this machine can be
/// planned.
///
/// With `--for train` there are two programs: flops, bytes and launches are of both, a micro-batch and its update; the
/// planned memory is what `astrai train` holds: weights, states (gradients, moments, in bf16 also f32 master weights), activations. The
/// passes and files of the update stand under `update/`.
#[derive(Args)]
#[command(after_help = "Examples:
  astrai compile model/config.json --seq 1024
  astrai compile model/ --for decode --batch 8 --dtype bf16 --json
  astrai compile model/ --for train --batch 4 --seq 256 --dtype bf16
  astrai compile model/ -o out/          then look at out/graph.dot, out/ir/, out/kernels/
  astrai compile model/ --mesh tp=8,dp=2 --for train --batch 16 --dtype bf16
  astrai compile model/ --html model.html   then open model.html in a browser
  astrai compile model/ --device cuda -o out/ --ptx
  astrai compile model/ --device cuda --for decode --explain cost
  astrai compile model/ --dump-after merge | less
  astrai compile model/ --dump-after saturate --form dot | dot -Tsvg > model.svg
  astrai compile model/ --for decode --fidelity fast --explain layer")]
pub struct Compile {
    /// A config.json, a model directory, or a graph (JSON)
    model: PathBuf,
    /// Write graphs, plan, kernels and summary into this folder
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Write the PTX of CUDA kernels beside their sources, too
    #[arg(long, requires = "output")]
    ptx: bool,
    /// Write one page for a browser: graphs by layer kind, what each pass changed, kernels, memory over time
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Which program [default: prefill]
    #[arg(long = "for", value_enum, value_name = "PROGRAM")]
    purpose: Option<Purpose>,
    /// Sequences in a run [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 31))]
    batch: Option<u64>,
    /// Tokens of a sequence [default: 512, or what the model takes if that is less]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 31))]
    seq: Option<u64>,
    /// Print the graph after this pass ("all": after every one) instead of the summary
    #[arg(long, value_name = "PASS", conflicts_with = "json")]
    dump_after: Option<String>,
    /// How graphs are printed [default: text]
    #[arg(long, value_enum, value_name = "FORM", requires_ifs = [("text", "dump_after"), ("json", "dump_after"), ("dot", "dump_after")])]
    form: Option<Form>,
    /// How far the program may go from the numbers of its graph [default: exact]
    #[arg(long, value_enum, value_name = "CLASS")]
    fidelity: Option<FidelityName>,
    /// Take the graph as it is: look for no equal form
    #[arg(long, conflicts_with = "fidelity")]
    no_saturate: bool,
    /// Print which rules fired on a layer kind ("main": the graph around the layers), kernels and bytes before and after;
    /// "cost": what each kernel costs and, with --device cuda, uses of a multiprocessor, with predicted times
    #[arg(long, value_name = "KIND", conflicts_with = "dump_after")]
    explain: Option<String>,
    /// Ranks along each axis: stages of layers (pp), data (dp), experts (ep), tensors (tp), such as tp=8,dp=2; plans the program
    /// of one rank
    #[arg(long, value_name = "AXES")]
    mesh: Option<MeshFlag>,
    /// Which of the stages of --mesh pp=N is planned
    #[arg(long, value_name = "N", default_value_t = 0)]
    stage: usize,
    /// Refuse a config.json with unknown keys instead of warning
    #[arg(long)]
    strict: bool,
    /// The summary as one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    quantize: QuantizeFlag,
    #[command(flatten)]
    pages: KvFlag,
    #[command(flatten)]
    adapters: AdaptersFlag,
    #[command(flatten)]
    hardware: HardwareFlag,
    #[command(flatten)]
    machine: MachineFlags,
}

/// What was compiled.
struct Made {
    /// Programs, each with what stands before the names of its passes and files; the first has an empty prefix.
    programs: Vec<(&'static str, Planned)>,
    report: Map<String, Value>,
    /// What `--explain` prints.
    explained: String,
}

/// What is compiled.
struct Subject {
    graph: Graph,
    parameters: u64,
    about: Map<String, Value>,
    build_seconds: f64,
    shards: MeshSharding,
    narrow: Option<Narrow>,
}

impl Compile {
    /// The layer kind whose rules are explained.
    fn explained_kind(&self) -> Option<&str> {
        self.explain.as_deref().filter(|kind| *kind != COST)
    }

    /// Compiles and prints.
    pub fn run(self, out: &mut dyn Write) -> Done {
        let machine = self.machine.planner(self.hardware.open(self.machine.device)?.as_ref())?;
        if let (Some(Purpose::Train), true) =
            (self.purpose, self.fidelity.is_some() || self.no_saturate || self.explained_kind().is_some())
        {
            bail!(
                "--for train: training is always exact; leave --fidelity, --no-saturate and --explain KIND out"
            );
        }
        if self.purpose == Some(Purpose::Train) {
            self.quantize.none("weights are not trained as codes")?;
        }
        if self.purpose != Some(Purpose::Decode) {
            self.pages.none("only programs --for decode have pages")?;
            if self.adapters.adapters.is_some() {
                bail!("--adapters goes with --for decode; leave it out");
            }
        }
        if self.mesh.is_some() {
            self.quantize.none("weights of ranks are not stored as codes")?;
        }
        if let (Some(kind), true) = (self.explained_kind(), self.json || self.no_saturate) {
            bail!("--explain {kind}: leave --json and --no-saturate out");
        }
        if let (Some(mesh), DeviceName::Cpu) = (&self.mesh, self.machine.device)
            && mesh.ranks() > 1
        {
            bail!("--mesh {mesh}: programs of several ranks are planned only; use --device null");
        }
        if self.form == Some(Form::Llmsim) {
            return self.llmsim(out);
        }
        if let Some(file) = &self.html {
            let hardware = self.hardware.hardware.iter().map(Path::new);
            spare("--html", file, hardware.chain([self.model.as_path()]))?;
        }
        let dumps = self.output.is_some() || self.html.is_some() || self.dump_after.is_some();
        let made = match (read_graph(&self.model)?, self.purpose) {
            (None, Some(Purpose::Train)) => self.train(&machine, dumps)?,
            (graph, _) => self.one(graph.as_ref(), &machine, dumps)?,
        };
        let Made { programs, mut report, mut explained } = made;
        let machined = self.machined(&programs, &machine, &mut report)?;
        if self.explain.as_deref() == Some(COST) {
            let target = machine.backend().target();
            let costs = cost::costs(&programs, machined.as_ref(), target)?;
            explained = cost::shown(&costs, target);
            if let Some(none) = report.get("nvrtc_absent").and_then(Value::as_str) {
                explained += &format!("no registers: {none}\n");
            }
            report.insert("costs".into(), Value::Array(costs));
        }
        if let Some(folder) = &self.output {
            output::write(folder, &programs, machine.backend(), &Value::Object(report.clone()))?;
            machined.filter(|_| self.ptx).map_or(Ok(()), |made| made.write(folder))?;
        }
        if let Some(file) = &self.html {
            let text = page(&programs, &report, machine.backend().target())?;
            std::fs::write(file, text).map_err(|e| format!("{}: {e}", file.display()))?;
        }
        match &self.dump_after {
            Some(pass) => dump(out, &programs, pass, self.form.unwrap_or_default())?,
            None if self.json => writeln!(out, "{}", Value::Object(report))?,
            None if self.explain.is_some() => write!(out, "{explained}")?,
            None => {
                write!(out, "{}", describe(&report))?;
                for path in self.output.iter().chain(&self.html) {
                    writeln!(out, "\nwritten to {}", path.display())?;
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    }

    /// A program of its own: of a model, or a graph as given.
    fn one(&self, graph: Option<&Value>, machine: &Machine, dumps: bool) -> Result<Made, Failure> {
        let subject = match graph {
            Some(value) => self.given(value)?,
            None => self.subject(machine.backend().samples())?,
        };
        let options = Options {
            storage: self.machine.storage(),
            narrow: subject.narrow.map(Into::into),
            dump: if dumps { Dump::All } else { Dump::None },
            saturate: self.saturate(),
            stack: self.adapters.slots().map(|Slots { slots, rank }| Stack { slots, rank }),
            shards: subject.shards,
            ..Options::default()
        };
        let (planned, seconds) =
            measure::once(|| astrai_runtime::compile(&subject.graph, machine.backend(), &options))?;
        let mut report = summary(&planned, subject.parameters, subject.build_seconds + seconds)?;
        report.extend(subject.about);
        if self.mesh.is_some() {
            mesh::report(&mut report, &[&planned], &options.shards.mesh, self.stage)?;
        }
        let explained = match self.explained_kind() {
            Some(kind) => {
                let saturate = Saturate { enabled: false, ..options.saturate };
                let plain = Options { dump: Dump::None, saturate, ..options };
                explain(kind, &astrai_runtime::compile(&subject.graph, machine.backend(), &plain)?, &planned)?
            }
            None => String::new(),
        };
        Ok(Made { programs: vec![("", planned)], report, explained })
    }

    /// Which equal forms are looked for.
    fn saturate(&self) -> Saturate {
        let fidelity = self.fidelity.map_or(Fidelity::Exact, FidelityName::fidelity);
        Saturate { fidelity, enabled: !self.no_saturate, ..Saturate::default() }
    }

    /// The model as LLMSim's graph.
    fn llmsim(&self, out: &mut dyn Write) -> Done {
        if let Some(pass) = &self.dump_after {
            bail!("--form llmsim is of the model, not of a pass; leave --dump-after {pass} out");
        }
        let (value, file) = config_value(&self.model)?;
        let graph = llmsim::graph::build(&value).map_err(|e| format!("{file}: {e}"))?;
        writeln!(out, "{graph:#}")?;
        Ok(ExitCode::SUCCESS)
    }

    /// The configuration: of a file, a model directory, or what a graph of LLMSim's was built from.
    fn config(&self) -> Result<ModelConfig, Failure> {
        let (value, file) = config_value(&self.model)?;
        let reading = ModelConfig::parse(&value.to_string(), &file).map_err(|e| e.to_string())?;
        let reading = if self.strict { reading.deny_unknown().map_err(|e| e.to_string())? } else { reading };
        warn(&reading.warnings);
        // Weights of ranks and of training are no codes.
        let codes = self.mesh.is_none() && self.purpose != Some(Purpose::Train);
        let narrow = self.quantize.quantize.or_else(|| packed(&reading).filter(|_| codes));
        Ok(ModelConfig { narrow, ..reading.config })
    }

    /// Sequences of a run and their length.
    fn sizes(&self, config: &ModelConfig) -> Result<(u64, u64), Failure> {
        let most = config.max_positions as u64;
        let (batch, seq) = (self.batch.unwrap_or(1), self.seq.unwrap_or(SEQ.min(most)));
        check_sizes(config, batch, seq)?;
        Ok((batch, seq))
    }

    /// The graph of a model; where programs draw tokens, one of decode does.
    fn subject(&self, draws: bool) -> Result<Subject, Failure> {
        let mut config = self.config()?;
        config.pages = self.pages.code();
        let narrow = config.narrow;
        let (batch, seq) = self.sizes(&config)?;
        let (mesh, batch) = self.mesh(&config, batch)?;
        let logits = if config.encoder.is_some() { Logits::None } else { Logits::Last };
        let full = Program { logits, ..Program::full(batch, seq) };
        let (name, program) = match self.purpose {
            Some(Purpose::Decode) => {
                let table = (seq as usize).div_ceil(Cache::PAGE);
                let cache = Cache {
                    page: Cache::PAGE,
                    pages: table.saturating_mul(batch as usize),
                    table,
                    windows: None,
                };
                let program = Program::paged(batch, batch, cache).drawing(draws);
                ("decode", Program { span: seq, ..program })
            }
            _ => ("prefill", full),
        };
        let (graph, build_seconds) = measure::once(|| build(&config, &program))?;
        let mut about = fields(json!({
            "model_type": config.model_type, "for": name, "batch": batch, "seq": seq,
            "dtype": self.machine.storage().name(),
        }));
        about.extend(narrow.map(|narrow| ("weights".to_string(), json!(narrow.to_string()))));
        if self.purpose == Some(Purpose::Decode) {
            about.insert("kv_cache_dtype".into(), json!(stored(config.pages, self.machine.storage())));
        }
        let leaves = placements(&config, &mesh, &graph);
        let shards = MeshSharding { mesh, leaves, stage: self.stage, trained: false };
        Ok(Subject { graph, parameters: config.parameter_count(), about, build_seconds, shards, narrow })
    }

    /// A graph as given.
    fn given(&self, value: &Value) -> Result<Subject, Failure> {
        let set = [
            ("--mesh", self.mesh.is_some()),
            ("--stage", self.stage > 0),
            ("--for", self.purpose.is_some()),
            ("--batch", self.batch.is_some()),
            ("--seq", self.seq.is_some()),
            ("--strict", self.strict),
        ];
        if let Some((flag, _)) = set.iter().find(|(_, set)| *set) {
            let path = self.model.display();
            bail!("{path} is a graph, which is compiled as given: leave {flag} out");
        }
        let (graph, build_seconds) = measure::once(|| ir_json::from_json(value))
            .map_err(|e| format!("{}: {e}", self.model.display()))?;
        let parameters = graph_parameters(&graph)?;
        let about = fields(json!({"dtype": self.machine.storage().name()}));
        let (shards, narrow) = (MeshSharding::default(), self.quantize.quantize);
        Ok(Subject { graph, parameters, about, build_seconds, shards, narrow })
    }
}

/// The JSON of a configuration, and the file's name: of a config.json, a model directory, a graph of LLMSim's.
pub fn config_value(path: &Path) -> Result<(Value, String), Failure> {
    let path = if path.is_dir() { path.join("config.json") } else { path.to_path_buf() };
    let file = path.display().to_string();
    let text = astrai_files::read_text(&path, MAX_GRAPH)?;
    let value: Value = serde_json::from_str(&text).map_err(|e| format!("{file}: is not JSON: {e}"))?;
    if !llmsim::graph::is_graph(&value) {
        return Ok((value, file));
    }
    let config = llmsim::graph::read(&value).map_err(|e| format!("{file}: {e}"))?;
    Ok((config.clone(), file))
}

/// The JSON of a graph file; `None` for whatever else there may be, which is read as a configuration.
fn read_graph(path: &Path) -> Result<Option<Value>, Failure> {
    if path.is_dir() {
        return Ok(None);
    }
    let text = astrai_files::read_text(path, MAX_GRAPH)?;
    if !text.contains("\"astrai_ir\"") {
        return Ok(None);
    }
    let value: Value =
        serde_json::from_str(&text).map_err(|e| format!("{}: is not JSON: {e}", path.display()))?;
    Ok(value.get("astrai_ir").is_some().then_some(value))
}

/// Prints the graph after a pass, or after each of them under its name.
fn dump(
    out: &mut dyn Write,
    programs: &[(&'static str, Planned)],
    pass: &str,
    form: Form,
) -> Result<(), Failure> {
    let stages: Vec<_> = output::stages(programs).collect();
    let written = |name: &str, stage: &Stage| match (form, &stage.graph) {
        (Form::Text, _) => Ok(output::text(stage).unwrap_or_default()),
        (Form::Json, Some(graph)) => Ok(ir_json::write_json(graph)),
        (Form::Dot, Some(graph)) => Ok(graphviz::to_dot(graph)),
        _ => Err(format!("--dump-after {name}: this stage leaves no graph; leave --form out")),
    };
    if pass == "all" {
        let begin = match form {
            Form::Text => "#",
            Form::Dot => "//",
            Form::Json | Form::Llmsim => {
                return Err("--form json: name the one pass after which to dump".into());
            }
        };
        for (name, stage) in stages.iter().filter(|(_, s)| form == Form::Text || s.graph.is_some()) {
            writeln!(out, "{begin} after {name}\n{}", written(name, stage)?)?;
        }
        return Ok(());
    }
    match stages.iter().find(|(name, _)| *name == pass) {
        Some((name, stage)) => Ok(write!(out, "{}", written(name, stage)?)?),
        None => {
            let names: Vec<&str> = stages.iter().map(|(name, _)| name.as_str()).collect();
            let names = names.join(", ");
            Err(format!("--dump-after {pass}: there is no pass of this name; there are {names}, all").into())
        }
    }
}
