//! `astrai train`: settings and data in, a trained model out, with its metrics and checkpoints.

mod files;
mod policies;

use crate::bench::largest;
use crate::failure::{Done, Failure, bail, warn};
use crate::flags::{DeviceName, HardwareFlag, SimdFlag};
use crate::table::bytes;
use crate::watch::Screen;
use astrai_builders::ModelConfig;
use astrai_builders::config::{LayerSpec, MlpSpec};
use astrai_engine::machine::{Machine, Peaks};
use astrai_engine::model::{Model, check_sizes, read_config};
use astrai_estimate::check::predict;
use astrai_ir::Target;
use astrai_runtime::weights::is_gguf;
use astrai_runtime::{Dump, WeightSource};
use astrai_train::checkpoint::{
    Opened, RunFolder, TrainerState, check_compatible, check_same_data, folder_name, open_latest,
};
use astrai_train::dataset::{Dataset, Sources};
use astrai_train::engine::{Engine, Plan, Recipe};
use astrai_train::frozen::fingerprint;
use astrai_train::hooks::{Commands, Hook};
use astrai_train::lora::{Beside, Fresh, is_adapter};
use astrai_train::settings::{Length, Partial, Settings};
use astrai_train::signals::Stop;
use astrai_train::trainer::{Callbacks, Trainer, total_steps};
use astrai_train::update::matches;
use clap::Args;
use files::{described, with_those_of_the_model};
use serde_json::{Map, json};
use std::io::Write;
use std::path::{Path, PathBuf, absolute};
use std::process::ExitCode;

/// Train a model on text or token ids
///
/// Text is tokenised once, into OUT/data; with --vocab N a byte-level BPE tokenizer is trained on it first. Every --save-every
/// steps, at the end, and on SIGINT or SIGTERM, OUT gets a checkpoint step_NNNNNN that is a model directory of its own
/// (Hugging Face layout); --resume goes on from the newest, bit for bit. OUT/metrics.jsonl has a line a step, OUT/loss.svg the curves.
/// Settings may also stand in a TOML or YAML file (--file), under the flags' names with underscores; flags win.
#[derive(Args)]
#[command(after_help = "Examples:
  astrai train --config config.json --data texts/ --vocab 8192 --out run --steps 1000
  astrai train --model model/ --data more.jsonl --out run2 --epochs 1 --lr 1e-4 --dtype bf16
  astrai train --out run --resume
  astrai train --file run.yaml --dry-run")]
pub struct Train {
    #[command(flatten)]
    given: Partial,
    /// Settings as TOML, or as YAML where the name ends in .yaml or .yml; flags win
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Go on from the newest checkpoint in --out; what is not given again is as it was
    #[arg(long)]
    resume: bool,
    /// Print the plan, its memory and what would be read, and stop
    #[arg(long)]
    dry_run: bool,
    /// What runs the model: cpu (also auto), cuda or cuda:N for a GPU, interpreter for the slow reference
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceName::Auto)]
    device: DeviceName,
    #[command(flatten)]
    simd: SimdFlag,
    #[command(flatten)]
    hardware: HardwareFlag,
    /// Rows of metrics as JSON lines instead of a progress bar
    #[arg(long)]
    json: bool,
}

/// What a run consists of, checked, before anything is written.
struct Begin {
    settings: Settings,
    config: ModelConfig,
    /// Text of `config.json`.
    text: String,
    /// Where weights come from, unless from a checkpoint.
    model: Option<Model>,
    sources: Sources,
    /// How the model is trained by its strategy.
    recipe: Recipe,
}

impl Train {
    /// Trains.
    pub fn run(self, out: &mut dyn Write) -> Done {
        let file = self.file.as_deref().map(Partial::read).transpose()?.unwrap_or_default();
        let path = self.given.out.clone().or(file.out.clone());
        let path = path.ok_or("no output folder: give --out DIR, or `out` in the file")?;
        if self.dry_run {
            return self.plan(file, &path, out);
        }
        if self.hardware.hardware.is_some() {
            bail!("--hardware goes with --dry-run, which predicts; leave it out");
        }
        let mut screen = Screen::new(self.json);
        if self.resume && !path.is_dir() && !self.names_model(&file) {
            let path = path.display();
            bail!(
                "{path}: there is no run here to go on with; give the --out of one, or all that a new one needs"
            );
        }
        // A folder that is there is taken first, to read where its run stands; a new one is made when all else is well.
        let taken = if path.is_dir() { Some(self.take(&path, &mut screen)?) } else { None };
        let begin = self.begin(file, taken.as_ref().and_then(|(_, c)| c.as_ref()))?;
        let machine = self.machine(&begin.settings)?;
        let (folder, checkpoint) = match taken {
            Some(taken) => taken,
            None => self.take(&path, &mut screen)?,
        };
        let steps = run(begin, &machine, folder, checkpoint, &mut screen)?;
        drop(screen);
        let newest = path.join(folder_name(steps));
        if self.json {
            writeln!(out, "{}", json!({"steps": steps, "checkpoint": newest.display().to_string()}))?;
        } else {
            writeln!(out, "{steps} steps, the model is in {}", newest.display())?;
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Takes the run's folder, and with --resume the checkpoint to go on from.
    fn take(&self, path: &Path, screen: &mut Screen) -> Result<(RunFolder, Option<Opened>), Failure> {
        if !self.resume {
            return Ok((RunFolder::create(path)?, None));
        }
        let resumed = RunFolder::resume(path)?;
        resumed.notes.iter().for_each(|n| screen.note(n));
        if resumed.checkpoint.is_none() {
            screen.note(&format!("{}: no checkpoint yet, the run begins", path.display()));
        }
        Ok((resumed.folder, resumed.checkpoint))
    }

    fn names_model(&self, file: &Partial) -> bool {
        [file, &self.given].iter().any(|p| p.config.is_some() || p.model.is_some())
    }

    /// Settings, model and data of a run, from its flags, its file and the checkpoint that it goes on from.
    fn begin(&self, file: Partial, checkpoint: Option<&Opened>) -> Result<Begin, Failure> {
        let before = checkpoint.map(|c| Partial::from(&c.trainer.settings)).unwrap_or_default();
        let named = self.names_model(&file);
        let settings = Settings::merge(file.over(before), self.given.clone())?;
        let (config, text, model) = start(&settings, checkpoint.filter(|_| !named))?;
        check_router(&config, &settings)?;
        let folder = checkpoint.map(|c| c.path.as_path()).or(settings.model.as_deref());
        let sources = Sources::find(&settings, config.vocab_size, folder)?;
        let recipe = settings.recipe_of(&config, sources.frozen, sources.answers)?;
        policies::check(&settings, &recipe, sources.frozen)?;
        check_sizes(&config, recipe.tokens / recipe.span, recipe.span)?;
        Ok(Begin { settings, config, text, model, sources, recipe })
    }

    fn machine(&self, settings: &Settings) -> Result<Machine, Failure> {
        let device = self.device.kind("use --dry-run, or --device cpu")?;
        Ok(Machine::with(device, settings.threads, self.simd.on(self.device)?, &Target::clone)?)
    }

    /// `--dry-run`.
    fn plan(&self, file: Partial, path: &Path, out: &mut dyn Write) -> Done {
        let newest = if self.resume { open_latest(path)? } else { None };
        let begin = self.begin(file, newest.as_ref().map(|n| &n.checkpoint))?;
        let settings = &begin.settings;
        let hardware = self.hardware.open(self.device)?;
        let Some(machine) = self.device.planner(settings.threads, self.simd, hardware.as_ref())? else {
            bail!("--device interpreter plans nothing; with --dry-run use cpu, cuda or null");
        };
        let plan = Plan::new(&begin.config, &begin.recipe, machine.backend(), Dump::None)?;
        let scoring = policies::shown(&begin, &machine)?;
        let [weights, states, arenas] = plan.memory()?;
        let (copy, checkpoint) = (plan.copy_bytes(), plan.checkpoint_bytes());
        let kept = plan.grad.plan.main.arena;
        let gradients = 4 * plan.trained_parameters();
        let seconds = plan.least_seconds(machine.backend().target(), settings.accum)?;
        let predicted = hardware.map(|hardware| {
            let of = |p| predict(p, &largest(p), &hardware);
            Ok::<_, Failure>(of(&plan.grad)? * settings.accum as f64 + of(&plan.update)?)
        });
        let predicted = predicted.transpose()?;
        let launches = [&plan.grad, &plan.update].map(|p| p.plan.launches());
        let (parameters, trained) = (begin.config.parameter_count(), plan.trained_parameters());
        let flops = flops_per_token(&begin.config, settings);
        let steps = match (settings.length(), begin.sources.windows) {
            (Length::Steps(n), _) => Some(n),
            (Length::Epochs(_), windows) => windows.map(|n| total_steps(settings, n)),
        };
        steps.map_or(Ok(()), |n| settings.schedule(n).map(drop))?;
        let tokens = begin.recipe.tokens * settings.accum as u64;
        if self.json {
            let report = json!({
                "parameters": parameters, "trained_parameters": trained, "reads": begin.sources.shown, "steps": steps, "epochs": settings.epochs,
                "tokens_per_step": tokens, "flops_per_token": flops,
                "weight_bytes": weights, "state_bytes": states, "planned_bytes": arenas, "copy_bytes": copy,
                "gradient_bytes": gradients, "activation_bytes": kept, "checkpoint_bytes": checkpoint, "least_seconds": seconds, "predicted_seconds": predicted,
                "launches_grad": launches[0], "launches_update": launches[1],
                "frozen": scoring.iter().map(|(name, _, bytes)| (name.to_string(), json!(bytes))).collect::<Map<_, _>>(),
            });
            writeln!(out, "{report}")?;
        } else {
            let unknown = || "known when the text is tokenised".to_string();
            let mut rows = vec![
                ("parameters", parameters.to_string()),
                ("trained parameters", trained.to_string()),
                ("reads", begin.sources.shown),
                ("steps", steps.map_or_else(unknown, |n| n.to_string())),
                ("tokens a step", tokens.to_string()),
                ("kernel launches", format!("{} a micro-batch, {} an update", launches[0], launches[1])),
                ("operations a token", format!("{:.3e}", flops)),
                ("weights", bytes(weights)),
                ("gradients", bytes(gradients)),
                ("optimiser", bytes(states.saturating_sub(gradients))),
                ("activations", bytes(kept)),
                ("inside layers, kernels", bytes(arenas.saturating_sub(kept))),
            ];
            if copy > 0 {
                rows.push(("copy for checkpoints", bytes(copy)));
            }
            rows.push(("memory in all", bytes(weights + states + arenas + copy)));
            rows.push(("a checkpoint", bytes(checkpoint)));
            let speed = |s: f64| format!("{s:.3} s a step, {:.0} tokens/s", tokens as f64 / s);
            rows.push(("at the peaks", speed(seconds)));
            rows.extend(predicted.map(|seconds| ("predicted", speed(seconds))));
            for (name, from, need) in scoring {
                let before =
                    need.map_or(String::new(), |n| format!(", scored before the first step in {}", bytes(n)));
                rows.push((name, format!("{from}{before}")));
            }
            for (name, value) in rows {
                writeln!(out, "{name:<24} {value}")?;
            }
        }
        plan.check_memory(&*machine.device)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// The model that a run starts from: of a checkpoint, of a directory, or fresh; and the text of its `config.json`.
fn start(
    settings: &Settings,
    checkpoint: Option<&Opened>,
) -> Result<(ModelConfig, String, Option<Model>), Failure> {
    match (checkpoint, &settings.config, &settings.model) {
        (Some(c), _, model) => {
            let reading = ModelConfig::parse(&c.config, &c.path.join("config.json").display().to_string());
            // What an adapter is trained beside is not in its checkpoints.
            let base = model.as_deref().filter(|_| settings.lora_rank.is_some());
            let base = base.map(|folder| Model::open(folder, false)).transpose()?;
            let config = reading.map_err(|e| e.to_string())?.config;
            if let (Some(base), Some(folder)) = (&base, model)
                && base.config.save() != config.save()
            {
                bail!("{}: is not the model beside which the adapter was trained", folder.display());
            }
            Ok((config, c.config.clone(), base))
        }
        (None, _, Some(folder)) => {
            if is_gguf(folder) {
                bail!(
                    "--model {}: is a GGUF file; `astrai import` makes a model directory of it",
                    folder.display()
                );
            }
            if settings.lora_rank.is_some() && is_adapter(folder) {
                bail!("{}: is an adapter itself; export it as a model first", folder.display());
            }
            let model = Model::open(folder, false)?;
            model.config.check_decoder()?;
            warn(&model.warnings);
            let config = model.folder.as_deref().unwrap_or(folder).join("config.json");
            Ok((model.config.clone(), text(&config)?, Some(model)))
        }
        (None, Some(path), _) => {
            let (config, warnings) = read_config(path, false)?;
            config.check_decoder()?;
            warn(&warnings);
            let path = if path.is_dir() { path.join("config.json") } else { path.clone() };
            let model = Model::fresh(config.clone(), vec![], settings.seed);
            Ok((config, text(&path)?, Some(model)))
        }
        (None, None, None) => Err("no model: give --config FILE or --model DIR".into()),
    }
}

/// The text of a `config.json`; what is trained of a quantised checkpoint is not quantised.
fn text(path: &Path) -> Result<String, Failure> {
    let text = astrai_files::read_text(path, 16 << 20)?;
    let keys = serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(&text).ok();
    let plain = keys.and_then(|mut keys| keys.shift_remove("quantization_config").map(|_| keys));
    Ok(plain.map_or(text, |keys| format!("{:#}\n", serde_json::Value::Object(keys))))
}

fn run(
    begin: Begin,
    machine: &Machine,
    folder: RunFolder,
    checkpoint: Option<Opened>,
    screen: &mut Screen,
) -> Result<u64, Failure> {
    let Begin { settings, config, text, model, sources, recipe } = begin;
    machine.warnings.iter().for_each(|w| screen.note(w));
    // Planned first: what does not fit the memory is known before text is tokenised.
    let plan = Plan::new(&config, &recipe, machine.backend(), Dump::None)?;
    plan.check_memory(&*machine.device)?;
    if let Some(c) = &checkpoint {
        check_compatible(c, &text, &settings)?.iter().for_each(|line| screen.note(line));
        let (was, is) = (&c.trainer.settings.model, settings.model.as_deref().map(absolute).transpose());
        if let (None, Some(was), Ok(Some(is))) = (&recipe.adapter, was, is)
            && *was != is
        {
            let [was, is] = [was, &is].map(|path| path.display());
            screen.note(&format!(
                "model was {was}, is now {is}: the run goes on from its checkpoint, not from that"
            ));
        }
    }
    let before = checkpoint.as_ref().map(|c| c.trainer.data.as_str());
    let there = sources.frozen;
    let mut data = Dataset::prepare(sources, &settings, config.vocab_size, before, screen)?;
    let text = match recipe.adapter {
        Some(_) => text,
        None => described(text, &settings, recipe.storage, data.special.as_ref()),
    };
    if recipe.adapter.is_none() {
        with_those_of_the_model(&mut data.tokenizer, &settings, checkpoint.as_ref(), model.as_ref())?;
    }
    let starts = model.as_ref().filter(|_| checkpoint.is_none());
    policies::freeze(
        &mut data,
        (&settings, &recipe, there),
        (starts, config.vocab_size, machine),
        folder.path(),
        screen,
    )?;
    let mut state = state(&settings, &data, machine.device.identity(), checkpoint.as_ref(), screen)?;
    let base = model.as_ref().map(Model::source);
    if let (Some(_), Some(model)) = (&recipe.adapter, &model) {
        screen.progress("looking at the base's weights", 0, 1);
        let known = state.base.replace(fingerprint(&model.config, model.source(), &recipe));
        if known.is_some() && known != state.base {
            bail!(
                "{}: its weights are not those beside which the adapter was trained; give that --model, or begin another run",
                settings.model.as_deref().unwrap_or(Path::new("")).display()
            );
        }
    }
    let (fresh, beside);
    let source: &dyn WeightSource = match (&checkpoint, base, &recipe.adapter) {
        (Some(c), Some(base), Some(_)) => {
            beside = Beside { base, factors: &c.model };
            &beside
        }
        (None, Some(base), Some(adapter)) => {
            fresh = Fresh::new(&config, adapter, base, settings.seed)?;
            &fresh
        }
        (Some(c), _, None) => &c.model,
        (None, Some(base), None) => base,
        (_, None, _) => return Err("no weights to start from".into()),
    };
    let mut load = |done, all| screen.progress("taking the weights", done, all);
    let mut engine = Engine::open(plan, source, &machine.device, &mut load)?;
    if let Some(c) = &checkpoint {
        engine.restore(&c.optimizer, c.trainer.step)?;
        engine.loss_scale = c.trainer.loss_scale.or(engine.loss_scale);
    }
    drop(checkpoint);
    let peak = Peaks::compute(&*machine.device, engine.recipe().storage).unwrap_or(0.0);
    let flops = (flops_per_token(&config, &settings), peak);
    let stop = Stop::on_signals().map_err(|e| format!("signals: {e}"))?;
    let total = state.total_steps;
    let commands = Commands::new(settings.on.as_deref().unwrap_or_default())?;
    let hooks: Vec<Box<dyn Hook>> = vec![Box::new(commands)];
    let trainer = Trainer { engine, data, settings, config: text, state, flops, hooks };
    let steps = trainer.run(folder, screen, &stop)?;
    if stop.requested() && steps < total {
        screen.note(&format!("stopped at step {steps} of {total}; go on with --resume"));
    }
    Ok(steps)
}

/// Where the run stands: at its beginning, or at the checkpoint that it goes on from.
fn state(
    settings: &Settings,
    data: &Dataset,
    compiler: String,
    checkpoint: Option<&Opened>,
    screen: &mut Screen,
) -> Result<TrainerState, Failure> {
    let total = total_steps(settings, data.train.len());
    settings.schedule(total)?;
    let fresh = TrainerState::new(settings.clone(), total, data.fingerprint.clone(), compiler);
    let Some(c) = checkpoint else { return Ok(fresh) };
    check_same_data(c, &data.fingerprint)?;
    if c.trainer.versions != fresh.versions {
        screen.note(
            "the checkpoint was written by another version, compiler or device: bits may differ from here on",
        );
    }
    let mut state = c.trainer.clone();
    (state.settings, state.total_steps, state.versions) = (fresh.settings, total, fresh.versions);
    if state.step >= total {
        bail!("the run is complete at step {}; give more --steps or --epochs", state.step);
    }
    Ok(state)
}

/// Refuses losses of routers of a model that has none.
fn check_router(config: &ModelConfig, s: &Settings) -> Result<(), Failure> {
    if config.layers.iter().any(|l| !matches!(l.mlp, MlpSpec::Dense { .. })) {
        return Ok(());
    }
    let given =
        [("router_aux_loss_coef", s.router_aux_loss_coef), ("router_z_loss_coef", s.router_z_loss_coef)];
    if let Some((key, factor)) = given.iter().find(|(_, factor)| *factor != 0.0) {
        bail!("{key}: {factor}, but the model has no experts; remove it");
    }
    Ok(())
}

/// Operations of forward and backward for a token, nothing computed twice: 6 for each parameter of a product that it meets, 4 where
/// that is frozen, and 12 for each component of a head and token of the sequence (PaLM, arXiv:2204.02311, appendix B).
pub fn flops_per_token(config: &ModelConfig, settings: &Settings) -> f64 {
    let names = config.names;
    let products = config
        .tensors()
        .into_iter()
        .filter(|t| t.shape.len() > 1 && (config.tie_embeddings || t.name != names.embed));
    let frozen = |name: &str| settings.freeze.iter().flatten().any(|pattern| matches(pattern, name));
    let (mut all, mut fixed) = (0, 0);
    for t in products {
        all += t.elements();
        fixed += if frozen(&t.name) { t.elements() } else { 0 };
    }
    let idle = |l: &LayerSpec| match &l.mlp {
        MlpSpec::Experts(e) => 3 * (e.count - e.chosen) * e.intermediate * config.hidden_size,
        MlpSpec::Stacked(e) => 3 * (e.count - e.chosen) * e.intermediate * config.hidden_size,
        MlpSpec::Dense { .. } => 0,
    };
    let parameters = all - config.layers.iter().map(idle).sum::<usize>() as u64;
    let heads = (config.num_layers * config.heads * config.head_dim) as f64;
    let each = if settings.lora_rank.is_some() { 4.0 } else { 6.0 };
    each * parameters as f64 - 2.0 * fixed as f64 + 12.0 * heads * settings.seq as f64
}
