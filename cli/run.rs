//! `astrai run`: token ids in, logits, loss and gradients, or an encoder's vectors, out, as safetensors; with a profile of the kernels on request.

use crate::failure::{Done, Failure, bail, check_folder, spare, warn};
use crate::flags::{FidelityFlags, HardwareFlag, MachineFlags, QuantizeFlag};
use crate::measure;
use crate::progress::Progress;
use crate::table::{bytes, table};
use astrai_builders::{Logits, Loss, ModelConfig, Program};
use astrai_engine::Machine;
use astrai_engine::batch::{RaggedBatch, Sequences};
use astrai_engine::gradients::by_checkpoint_name;
use astrai_engine::model::{Model, check_sizes, plan_gradient, plan_within, read_config};
use astrai_engine::objective::{BatchFile, Policies, objective};
use astrai_ir::DType;
use astrai_runtime::device::MemoryUse;
use astrai_runtime::weights::{Checkpoint, write};
use astrai_runtime::{ProfileRow, Session, Value as Array};
use astrai_train::strategies::{self, METRIC, Options, STRATEGIES, option};
use clap::builder::{PossibleValue, PossibleValuesParser};
use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Values of `--strategy`.
fn names() -> PossibleValuesParser {
    PossibleValuesParser::new(STRATEGIES.iter().map(|s| PossibleValue::new(s.name).help(s.description)))
}

/// Values of `--want`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Want {
    /// f32 [batch, seq, vocab]
    Logits,
    /// f32, one number: mean cross-entropy of each next token
    Loss,
    /// `grad.<checkpoint name>` f32: gradients of the loss
    Grads,
    /// f32 [batch, hidden]: an encoder's vector of each sequence
    Embedding,
}

/// Run a model on token ids: logits, loss, gradients, embeddings
///
/// The input file holds `input_ids`, i64 or i32 [batch, seq]; its other tensors are not read. The output file holds
/// what `--want` names.
#[derive(Args)]
#[command(after_help = "Example:
  astrai run model/ --inputs in.safetensors --outputs out.safetensors --want logits,loss --profile
  astrai run model/ --inputs pairs.safetensors --outputs out.safetensors --strategy dpo --set loss_type=ipo --set beta=0.1 --reference base/ --want loss,grads")]
pub struct Run {
    /// A model directory: config.json and safetensors
    model: PathBuf,
    /// Token ids (safetensors)
    #[arg(long, value_name = "FILE")]
    inputs: PathBuf,
    /// Where results are written (safetensors)
    #[arg(long, value_name = "FILE")]
    outputs: PathBuf,
    /// What is computed, separated by commas [default: logits, or an encoder's embedding]
    #[arg(long, value_enum, value_delimiter = ',')]
    want: Vec<Want>,
    /// Compute a training strategy's loss of a batch instead. The input file holds the batch under the keys of docs/training.md; the
    /// output has `loss`, `metric.<name>` and, if wanted, gradients
    #[arg(long, value_name = "NAME", value_parser = names())]
    strategy: Option<String>,
    /// An option of the strategy, such as loss_type=ipo; may be repeated
    #[arg(long, value_name = "KEY=VALUE", requires = "strategy")]
    set: Vec<String>,
    /// The frozen reference policy: a model directory, or weights (safetensors) of the model's configuration
    #[arg(long, value_name = "DIR", requires = "strategy")]
    reference: Option<PathBuf>,
    /// The policy that wrote the answers, as --reference
    #[arg(long, value_name = "DIR", requires = "strategy")]
    old: Option<PathBuf>,
    /// Equal micro-batches that the batch is computed in [default: 1]
    #[arg(long, value_name = "N", requires = "strategy")]
    micro_batches: Option<usize>,
    /// An adapter in PEFT's layout, merged into the weights of the model
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Time every kernel in a second run and print predicted beside measured
    #[arg(long)]
    profile: bool,
    /// Print what the run took of the memory of a GPU, and what was kept and given out again
    #[arg(long)]
    memory: bool,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    quantize: QuantizeFlag,
    #[command(flatten)]
    fidelity: FidelityFlags,
    #[command(flatten)]
    hardware: HardwareFlag,
    #[command(flatten)]
    machine: MachineFlags,
}

impl Run {
    /// Runs and writes.
    pub fn run(mut self, out: &mut dyn Write) -> Done {
        check_folder(&self.outputs)?;
        let read = [
            Some(&self.model),
            Some(&self.inputs),
            self.adapter.as_ref(),
            self.reference.as_ref(),
            self.old.as_ref(),
        ];
        if std::fs::metadata(&self.outputs).is_ok_and(|found| !found.is_file()) {
            bail!(
                "--outputs: {} is no regular file, and results come in one's place",
                self.outputs.display()
            );
        }
        spare("--outputs", &self.outputs, read.into_iter().flatten().map(PathBuf::as_path))?;
        if let Some(name) = self.strategy.clone() {
            return self.objective(out, &name);
        }
        let (mut config, warnings) = read_config(&self.model, false)?;
        config.narrow = self.quantize.quantize;
        self.check_want(&config)?;
        let sequences = Sequences::read(&Checkpoint::open(&self.inputs)?, &self.inputs)?;
        check_sizes(&config, sequences.batch as u64, sequences.seq as u64)?;
        let grads = self.want.contains(&Want::Grads);
        if (grads || self.want.contains(&Want::Loss)) && sequences.seq < 2 {
            bail!("a loss needs sequences of at least 2 tokens");
        }
        let batch = RaggedBatch::new(&sequences.rows(), config.vocab_size)?;
        warn(&warnings);
        let machine = self.machine.machine_as(self.hardware.open(self.machine.device)?.as_ref())?;
        if self.profile && machine.device.name() == "interpreter" {
            bail!("--profile times kernels, and the interpreter has none; use --device cpu");
        }
        self.check_memory_flag(&machine)?;
        let logits = if self.want.contains(&Want::Logits) { Logits::All } else { Logits::None };
        let full = Program::full(sequences.batch as u64, sequences.seq as u64);
        let loss = if self.want.contains(&Want::Loss) { Loss::Mean } else { Loss::None };
        let program = Program { logits, loss, ..full };
        let storage = self.machine.storage();
        // Weights say how they can stay; without them there is still a plan, which may be too large for the machine.
        let model = Model::open_adapted(&self.model, self.adapter.as_deref())
            .map(|model| model.quantised(self.quantize.quantize));
        let config = model.as_ref().map_or(&config, |model| &model.config);
        let planned = match grads {
            true => {
                self.fidelity.none("gradients are always exact")?;
                self.quantize.none("weights are not trained as codes")?;
                plan_gradient(config, &program, storage, &machine)?
            }
            false => {
                let fidelity = self.fidelity.asked().unwrap_or_default();
                plan_within(config, &program, storage, &machine, fidelity)?
            }
        };
        planned.check_memory(&*machine.device)?;
        let model = model?;
        let mut session = Progress::during("loading weights", |set| model.start(planned, &machine, set))?;
        let inputs = batch.inputs(session.inputs());
        let (results, seconds) = measure::once(|| session.run(&inputs))?;
        let rows = if self.profile { profile(&mut session, &inputs)? } else { vec![] };
        let results = by_checkpoint_name(results, session.program());
        let wanted = |name: &str| name != "loss" || self.want.contains(&Want::Loss);
        let results: Vec<_> = results.into_iter().filter(|(n, _)| wanted(n)).collect();
        let results = shaped(results, &sequences);
        write_results(&self.outputs, &results)?;
        let used = machine.device.memory_use().filter(|_| self.memory);
        self.finish(out, &results, seconds, &rows, used)
    }

    /// The loss of a strategy on the batch of the input file.
    fn objective(&mut self, out: &mut dyn Write, name: &str) -> Done {
        if self.want.is_empty() {
            self.want = vec![Want::Loss];
        }
        if self.profile || self.want.iter().any(|w| !matches!(w, Want::Loss | Want::Grads)) {
            bail!("--strategy computes loss and grads; leave --profile and other --want away");
        }
        self.fidelity.none("objectives are always exact")?;
        self.quantize.none("objectives are computed with the model's own weights")?;
        let options = self.set.iter().map(|text| option(text)).collect::<Result<Options, _>>()?;
        let strategy = strategies::strategy(name, options)?;
        for ((flag, given), read) in
            [("reference", &self.reference), ("old", &self.old)].into_iter().zip(strategy.frozen())
        {
            if given.is_some() && !read {
                bail!("--{flag}: {name} reads none with these options");
            }
        }
        let file = Checkpoint::open(&self.inputs)?;
        let batch = BatchFile { file: &file, path: &self.inputs, prefix: "" };
        let window = batch.read(name, self.micro_batches.unwrap_or(1))?;
        let machine = self.machine.machine_as(self.hardware.open(self.machine.device)?.as_ref())?;
        self.check_memory_flag(&machine)?;
        let policy = Model::open_adapted(&self.model, self.adapter.as_deref())?;
        warn(&policy.warnings);
        let open = |path: &PathBuf| match path.is_dir() {
            true => Model::open(path, false),
            false => Model::open_with(&self.model, path, false),
        };
        let reference = self.reference.as_ref().map(open).transpose()?;
        let old = self.old.as_ref().map(open).transpose()?;
        let policies = Policies { policy: &policy, reference: reference.as_ref(), old: old.as_ref() };
        let (on, grads) = ((self.machine.storage(), &machine), self.want.contains(&Want::Grads));
        let (got, seconds) = measure::once(|| objective(&policies, &*strategy, &window, on, grads))?;
        let number = |x: f64| Array::f32(&[1], &[x as f32]);
        let mut results = vec![("loss".to_string(), number(got.loss))];
        results.extend(got.metrics.iter().map(|(n, x)| (format!("{METRIC}{n}"), number(*x))));
        results.extend(got.grads.into_iter().filter(|(n, _)| n.starts_with("grad.")));
        write_results(&self.outputs, &results)?;
        let used = machine.device.memory_use().filter(|_| self.memory);
        self.finish(out, &results, seconds, &[], used)
    }

    /// Reports what was written, and refuses it if it is not finite.
    fn finish(
        &self,
        out: &mut dyn Write,
        results: &[(String, Array)],
        seconds: f64,
        rows: &[ProfileRow],
        used: Option<MemoryUse>,
    ) -> Done {
        let done = self.report(out, results, seconds, rows, used)?;
        // What was computed is written and shown, for whoever looks for the cause.
        let spoilt = results.iter().find(|(_, v)| v.to_f32().iter().any(|x| !x.is_finite()));
        match spoilt {
            Some((name, _)) => bail!(
                "{name} has values that are not finite; the weights are damaged, or too large for this dtype"
            ),
            None => Ok(done),
        }
    }

    /// Refuses `--memory` where the device keeps no account of its own.
    fn check_memory_flag(&self, machine: &Machine) -> Result<(), Failure> {
        let name = machine.device.name();
        if self.memory && machine.device.memory_use().is_none() {
            bail!("--memory: the memory of {name} is the system's; use it with --device cuda");
        }
        Ok(())
    }

    /// Settles what is wanted; refuses what this kind of model has not.
    fn check_want(&mut self, config: &ModelConfig) -> Result<(), Failure> {
        if self.want.is_empty() {
            self.want = vec![if config.encoder.is_some() { Want::Embedding } else { Want::Logits }];
        }
        if self.want.iter().any(|w| *w != Want::Embedding) {
            config.check_decoder()?;
        }
        if self.want.contains(&Want::Embedding) && config.encoder.is_none() {
            let name = config.model_type;
            bail!("--want embedding: `{name}` is no encoder; want logits, loss or grads");
        }
        Ok(())
    }

    fn report(
        &self,
        out: &mut dyn Write,
        results: &[(String, Array)],
        seconds: f64,
        rows: &[ProfileRow],
        used: Option<MemoryUse>,
    ) -> Done {
        let loss = results.iter().find(|(n, _)| n == "loss").and_then(|(_, v)| v.to_f32().first().copied());
        if self.json {
            let shapes = results.iter().map(|(n, v)| (n.clone(), json!(v.shape)));
            let mut report = json!({
                "outputs": self.outputs.display().to_string(),
                "tensors": shapes.collect::<serde_json::Map<_, _>>(),
                "seconds": seconds,
            });
            if let Some(loss) = loss {
                report["loss"] = json!(loss);
            }
            let metric =
                |(n, v): &(String, Array)| Some((n.strip_prefix(METRIC)?.to_string(), json!(v.to_f32()[0])));
            if self.strategy.is_some() {
                report["metrics"] =
                    results.iter().filter_map(metric).collect::<serde_json::Map<_, _>>().into();
            }
            if self.profile {
                report["profile"] = rows.iter().map(profile_json).collect();
            }
            if let Some(m) = used {
                report["memory"] = json!({"used": m.used, "most": m.most, "kept": m.kept, "taken": m.taken, "reused": m.reused});
            }
            writeln!(out, "{report}")?;
            return Ok(ExitCode::SUCCESS);
        }
        for (name, v) in results {
            match name.strip_prefix(METRIC) {
                Some(metric) => writeln!(out, "{metric} = {}", v.to_f32()[0])?,
                None => writeln!(out, "{name} f32 {:?}", v.shape)?,
            }
        }
        if let Some(loss) = loss {
            writeln!(out, "loss = {loss}")?;
        }
        writeln!(out, "ran in {:.1} ms, written to {}", seconds * 1e3, self.outputs.display())?;
        if self.profile {
            write!(out, "\n{}", profile_table(rows))?;
        }
        if let Some(m) = used {
            let [used, most, kept] = [m.used, m.most, m.kept].map(bytes);
            let (taken, reused) = (m.taken, m.reused);
            writeln!(
                out,
                "memory: {used} in use, {most} at most, {kept} kept; taken {taken} times, reused {reused} times"
            )?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Results as they are written: f32, tokens as `[batch, seq]`, the loss as `[1]`.
fn shaped(results: Vec<(String, Array)>, of: &Sequences) -> Vec<(String, Array)> {
    let shape = |name: &str, v: &Array| match (name, v.shape.as_slice()) {
        ("logits", [_, vocab]) => vec![of.batch, of.seq, *vocab],
        ("loss", _) => vec![1],
        (_, shape) => shape.to_vec(),
    };
    let f32_of = |(n, v): (String, Array)| {
        let shape = shape(&n, &v);
        (n, Array::f32(&shape, &v.to_f32()))
    };
    results.into_iter().map(f32_of).collect()
}

fn write_results(path: &Path, results: &[(String, Array)]) -> Result<(), Failure> {
    let tensors =
        results.iter().map(|(n, v)| (n.as_str(), DType::F32, v.shape.as_slice(), v.bytes.as_slice()));
    Ok(write(path, tensors, &BTreeMap::new())?)
}

/// A second run, whose pages and caches are warm, timed kernel by kernel.
fn profile(session: &mut Session, inputs: &[(&str, &Array)]) -> Result<Vec<ProfileRow>, Failure> {
    session.start_profile();
    session.run(inputs)?;
    Ok(session.take_profile().unwrap_or_default().by_kernel())
}

fn profile_json(r: &ProfileRow) -> Value {
    json!({
        "kernel": r.kernel, "origin": &*r.origin, "launches": r.runs, "predicted_seconds": r.predicted,
        "measured_seconds": r.measured, "bytes": r.bytes, "flops": r.flops,
    })
}

pub(crate) fn profile_table(rows: &[ProfileRow]) -> String {
    let total: f64 = rows.iter().map(|r| r.measured).sum();
    let row = |r: &ProfileRow| {
        vec![
            r.kernel.clone(),
            r.runs.to_string(),
            format!("{:.3}", r.predicted * 1e3),
            format!("{:.3}", r.measured * 1e3),
            format!("{:.1}%", 100.0 * r.measured / total.max(1e-12)),
            format!("{:.2}", r.bytes as f64 / r.measured.max(1e-12) * 1e-9),
            format!("{:.2}", r.flops as f64 / r.measured.max(1e-12) * 1e-9),
            r.origin.to_string(),
        ]
    };
    let head =
        ["kernel", "launches", "predicted ms", "measured ms", "share", "GB/s", "GFLOP/s", "first origin"];
    table(&head, &rows.iter().map(row).collect::<Vec<_>>())
}
