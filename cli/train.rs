//! `astrai train`: settings and data in, a trained model out, with its metrics and checkpoints.

use crate::failure::{Done, Failure, warn};
use crate::flags::DeviceName;
use crate::machine::Machine;
use crate::model::{Model, check_sizes, read_config};
use crate::peaks::Peaks;
use crate::table::bytes;
use crate::watch::Screen;
use astrai_builders::ModelConfig;
use astrai_ir::DType;
use astrai_runtime::{Device, Dump, Error as RunError, Recompute, WeightSource};
use astrai_train::batch::Items;
use astrai_train::checkpoint::{Opened, RunFolder, TrainerState, agree};
use astrai_train::dataset::{Dataset, Sources};
use astrai_train::engine::{Engine, Plan, Recipe};
use astrai_train::settings::{self, Partial, Settings, Storage};
use astrai_train::signals::Stop;
use astrai_train::trainer::{Trainer, Watch, total_steps};
use astrai_train::update::{Optimizer, Rule};
use clap::Args;
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Train a model on text or token ids
///
/// Text is tokenised once, into OUT/data; with --vocab N a byte-level BPE tokenizer is trained on it first. Every --save-every
/// steps, at the end, and on SIGINT or SIGTERM, OUT gets a checkpoint step_NNNNNN that is a model directory of its own
/// (Hugging Face layout); --resume goes on from the newest, bit for bit. OUT/metrics.jsonl has a line a step, OUT/loss.svg the curve.
/// Settings may also stand in a TOML file (--file), under the flags' names with underscores; flags win.
#[derive(Args)]
#[command(after_help = "Examples:
  astrai train --config config.json --data texts/ --vocab 8192 --out run --steps 1000
  astrai train --model model/ --data more.jsonl --out run2 --epochs 1 --lr 1e-4 --dtype bf16
  astrai train --out run --resume
  astrai train --file run.toml --dry-run")]
pub struct Train {
    #[command(flatten)]
    given: Partial,
    /// Settings as TOML; flags win
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Go on from the newest checkpoint in --out; what is not given again is as it was
    #[arg(long)]
    resume: bool,
    /// Print the plan, its memory and what would be read, and stop
    #[arg(long)]
    dry_run: bool,
    /// What runs the model
    #[arg(long, value_enum, default_value_t = DeviceName::Auto)]
    device: DeviceName,
    /// Rows of metrics as JSON lines instead of a progress bar
    #[arg(long)]
    json: bool,
}

/// The model of a run, before its first step.
struct Start {
    config: ModelConfig,
    text: String,
    model: Option<Model>,
}

impl Train {
    /// Trains.
    pub fn run(self, out: &mut dyn Write) -> Done {
        let file = self.file.as_deref().map(Partial::read).transpose()?.unwrap_or_default();
        if self.dry_run {
            let settings = Settings::merge(file, self.given.clone())?;
            return self.plan(&settings, out);
        }
        let mut screen = Screen::new(self.json);
        let path = self.given.out.clone().or(file.out.clone());
        let path = path.ok_or("no output folder: give --out DIR, or `out` in the file")?;
        let (folder, checkpoint) = match self.resume {
            true => {
                let resumed = RunFolder::resume(&path)?;
                resumed.notes.iter().for_each(|n| screen.note(n));
                if resumed.checkpoint.is_none() {
                    screen.note(&format!("{}: no checkpoint yet, the run begins", path.display()));
                }
                (resumed.folder, resumed.checkpoint)
            }
            false => (RunFolder::create(&path)?, None),
        };
        let before = checkpoint.as_ref().map(|c| Partial::from(&c.trainer.settings)).unwrap_or_default();
        let named = self.given.config.is_some() || self.given.model.is_some();
        let settings = Settings::merge(file.over(before), self.given.clone())?;
        let start = start(&settings, checkpoint.as_ref().filter(|_| !named))?;
        let steps = run(&self, &settings, start, &folder, checkpoint, &mut screen)?;
        drop(screen);
        let newest = std::fs::read_to_string(path.join("latest")).unwrap_or_default();
        let newest = path.join(newest.trim());
        if self.json {
            writeln!(out, "{}", json!({"steps": steps, "checkpoint": newest.display().to_string()}))?;
        } else {
            writeln!(out, "{steps} steps, the model is in {}", newest.display())?;
        }
        Ok(ExitCode::SUCCESS)
    }

    fn machine(&self, settings: &Settings) -> Result<Machine, Failure> {
        let device = match self.device {
            DeviceName::Auto | DeviceName::Cpu => Device::Host,
            DeviceName::Interpreter => Device::Interpreter,
            DeviceName::Null => {
                return Err("--device null runs nothing; use --dry-run, or --device cpu".into());
            }
        };
        Ok(Machine::new(device, settings.threads)?)
    }

    /// `--dry-run`.
    fn plan(&self, settings: &Settings, out: &mut dyn Write) -> Done {
        let start = start(settings, None)?;
        let machine = Machine::new(Device::Null, settings.threads)?;
        let sources = Sources::find(settings)?;
        let plan = Plan::new(&start.config, &recipe(settings), &machine.target, Dump::None)?;
        let [weights, states, arenas] = plan.memory()?;
        let launches = [&plan.grad, &plan.update].map(|p| p.plan.launches());
        let parameters = start.config.parameter_count();
        let flops = flops_per_token(&start.config, settings.seq);
        if self.json {
            let report = json!({
                "parameters": parameters, "reads": sources.shown, "steps": settings.steps, "epochs": settings.epochs,
                "tokens_per_step": settings.tokens_per_step(), "flops_per_token": flops,
                "weight_bytes": weights, "state_bytes": states, "planned_bytes": arenas,
                "launches_grad": launches[0], "launches_update": launches[1],
            });
            writeln!(out, "{report}")?;
            return Ok(ExitCode::SUCCESS);
        }
        let rows = [
            ("parameters", parameters.to_string()),
            ("reads", sources.shown),
            ("tokens a step", settings.tokens_per_step().to_string()),
            ("kernel launches", format!("{} a micro-batch, {} an update", launches[0], launches[1])),
            ("operations a token", format!("{:.3e}", flops)),
            ("weights", bytes(weights)),
            ("gradients and optimiser", bytes(states)),
            ("activations and scratch", bytes(arenas)),
            ("memory in all", bytes(weights + states + arenas)),
        ];
        for (name, value) in rows {
            writeln!(out, "{name:<24} {value}")?;
        }
        plan.check_memory()?;
        Ok(ExitCode::SUCCESS)
    }
}

/// The model that a run starts from: of a checkpoint, of a directory, or fresh.
fn start(settings: &Settings, checkpoint: Option<&Opened>) -> Result<Start, Failure> {
    let start = match (checkpoint, &settings.config, &settings.model) {
        (Some(c), ..) => {
            let reading = ModelConfig::parse(&c.config, &c.path.join("config.json").display().to_string());
            let reading = reading.map_err(|e| e.to_string())?;
            Start { config: reading.config, text: c.config.clone(), model: None }
        }
        (None, _, Some(folder)) => {
            let model = Model::open(folder, false)?;
            warn(&model.warnings);
            Start {
                config: model.config.clone(),
                text: text(&folder.join("config.json"))?,
                model: Some(model),
            }
        }
        (None, Some(path), _) => {
            let (config, warnings) = read_config(path, false)?;
            warn(&warnings);
            let path = if path.is_dir() { path.join("config.json") } else { path.clone() };
            let model = Model::fresh(config.clone(), vec![], settings.seed);
            Start { config, text: text(&path)?, model: Some(model) }
        }
        (None, None, None) => return Err("no model: give --config FILE or --model DIR".into()),
    };
    check_sizes(&start.config, settings.batch as u64, settings.seq as u64)?;
    Ok(start)
}

fn text(path: &Path) -> Result<String, Failure> {
    Ok(std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?)
}

fn run(
    train: &Train,
    settings: &Settings,
    start: Start,
    folder: &RunFolder,
    checkpoint: Option<Opened>,
    screen: &mut Screen,
) -> Result<u64, Failure> {
    let machine = train.machine(settings)?;
    machine.warnings.iter().for_each(|w| screen.note(w));
    // Planned first: what does not fit the memory is known before text is tokenised.
    let plan = Plan::new(&start.config, &recipe(settings), &machine.target, Dump::None)?;
    plan.check_memory()?;
    let data = Dataset::prepare(settings, start.config.vocab_size, settings.model.as_deref(), screen)?;
    let total = total_steps(settings, data.train.len());
    settings.schedule(total)?;
    let compiler = machine.compiler();
    let mut state = TrainerState::new(settings.clone(), total, data.fingerprint.clone(), compiler.clone());
    if let Some(c) = &checkpoint {
        let changed = agree(c, &start.text, settings, &data.fingerprint)?;
        changed.iter().for_each(|line| screen.note(line));
        if c.trainer.versions != state.versions {
            screen.note(
                "the checkpoint was written by another version or C compiler: bits may differ from here on",
            );
        }
        let fresh = state;
        state = c.trainer.clone();
        (state.settings, state.total_steps, state.versions) = (fresh.settings, total, fresh.versions);
        if state.step >= total {
            return Err(
                format!("the run is complete at step {}; give more --steps or --epochs", state.step).into()
            );
        }
    }
    let source: &dyn WeightSource = match (&checkpoint, &start.model) {
        (Some(c), _) => &c.model,
        (None, Some(model)) => model.source(),
        (None, None) => return Err("no weights to start from".into()),
    };
    let mut load = |done, all| screen.progress("taking the weights", done, all);
    let mut engine = Engine::open(plan, source, &machine.runner(), &mut load)?;
    if let Some(c) = &checkpoint {
        engine.restore(&c.optimizer, c.trainer.step)?;
    }
    drop(checkpoint);
    let peak = Peaks::measure(&machine.pool).map_or(0.0, |p| p.of(engine.recipe().storage));
    let flops = (flops_per_token(&start.config, settings.seq), peak);
    let stop = Stop::on_signals().map_err(|e| format!("signals: {e}"))?;
    let trainer =
        Trainer { engine, data, settings: settings.clone(), config: start.text, folder, state, flops };
    let steps = trainer.run(screen, &stop)?;
    if stop.requested() && steps < total {
        screen.note(&format!("stopped at step {steps} of {total}; go on with --resume"));
    }
    Ok(steps)
}

/// What the engine is told of the settings.
pub fn recipe(s: &Settings) -> Recipe {
    let rule = match s.optimizer {
        settings::Optimizer::Adamw => Rule::AdamW { beta1: s.beta1, beta2: s.beta2, eps: s.eps },
        settings::Optimizer::Sgd => Rule::Sgd { momentum: s.momentum },
    };
    let clip = (s.clip > 0.0).then_some(s.clip);
    Recipe {
        tokens: (s.batch * s.seq) as u64,
        sequences: s.batch as u64,
        span: s.seq as u64,
        storage: match s.dtype {
            Storage::F32 => DType::F32,
            Storage::Bf16 => DType::BF16,
        },
        accumulate: s.accum > 1,
        recompute: match s.recompute {
            settings::Recompute::None => Recompute::None,
            settings::Recompute::Selective => Recompute::Selective,
            settings::Recompute::Full => Recompute::Full,
        },
        optimizer: Optimizer { rule, weight_decay: s.weight_decay, clip },
    }
}

/// Operations of forward and backward for a token, nothing computed twice: 6 for each parameter of a product, and 12 for each
/// component of a head and token of the sequence (PaLM, arXiv:2204.02311, appendix B).
pub fn flops_per_token(config: &ModelConfig, seq: usize) -> f64 {
    let names = config.model_type.names;
    let products = config
        .tensors()
        .into_iter()
        .filter(|t| t.shape.len() > 1 && (config.tie_embeddings || t.name != names.embed));
    let parameters: u64 = products.map(|t| t.elements()).sum();
    let heads = (config.num_layers * config.heads * config.head_dim) as f64;
    6.0 * parameters as f64 + 12.0 * heads * seq as f64
}

impl From<astrai_train::Error> for Failure {
    fn from(e: astrai_train::Error) -> Failure {
        match e {
            astrai_train::Error::Run(e) => RunError::into(e),
            e => e.to_string().into(),
        }
    }
}

impl From<settings::Error> for Failure {
    fn from(e: settings::Error) -> Failure {
        e.to_string().into()
    }
}

impl From<astrai_train::FileError> for Failure {
    fn from(e: astrai_train::FileError) -> Failure {
        e.to_string().into()
    }
}
