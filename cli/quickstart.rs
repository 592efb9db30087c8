//! `astrai quickstart`: a small model planned, trained on text that is at hand, served, and asked over HTTP to go on with some,
//! with a word on each step; the shortest way to see the whole.

mod text;

use crate::failure::{Done, Failure, bail, warn};
use crate::flags::{FidelityFlags, MachineFlags};
use crate::measure;
use crate::progress::tell;
use crate::serve::{LOCAL, Server, listen};
use crate::table::{bytes, count};
use crate::train::Train;
use astrai_builders::ModelConfig;
use astrai_engine::machine::Machine;
use astrai_engine::model::Model;
use astrai_engine::serving::{Published, Room};
use astrai_ir::DType;
use astrai_runtime::Dump;
use astrai_serve::http::HttpSettings;
use astrai_train::batch::PackedBatch;
use astrai_train::engine::{Engine, Plan, Recipe};
use astrai_train::metrics::{self, Row};
use astrai_train::settings::Settings;
use astrai_train::trainer::{METRICS, PICTURE};
use clap::{Args, FromArgMatches};
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use text::{Text, near, repository};

/// Tokens generated.
const NEW: usize = 48;
/// The name that the model is served under.
const NAME: &str = "quickstart";
/// Sequences that the tour's server takes at once.
const SERVED: usize = 8;
/// Peak learning rate; small models take a large one.
const LR: &str = "0.002";
/// How often the loss is printed over a run.
const SHOWN: usize = 8;
/// The time of a step is known after so many, or after so long.
const TRIAL: (usize, Duration) = (5, Duration::from_secs(3));

/// Train a small model on text at hand for two minutes, serve it, and let it write
///
/// A byte-level BPE tokenizer and a llama of five million parameters learn from astrai's own sources, or from any text given with
/// --data. Needs no download. How many steps two minutes are is measured first. Then the model is served on a free port of this
/// machine, and asked for a text as any program would ask. Without a C compiler the interpreter trains a far smaller model.
#[derive(Args)]
#[command(after_help = "Examples:
  astrai quickstart
  astrai quickstart my-model --data ~/notes --minutes 5
  astrai quickstart my-model --dtype bf16      more steps in the time, where the processor multiplies bf16 fast
  astrai quickstart my-model --steps 20        a look at the whole in half a minute")]
pub struct Quickstart {
    /// Folder to make everything in [default: a new one among temporary files]
    folder: Option<PathBuf>,
    /// Text to learn from, a file or folder; may be repeated [default: astrai's sources]
    #[arg(long, value_name = "PATH")]
    data: Vec<PathBuf>,
    /// How long to train
    #[arg(long, default_value_t = 2.0, value_name = "MINUTES", value_parser = minutes)]
    minutes: f64,
    /// Train for so many steps instead
    #[arg(long, value_name = "N", conflicts_with = "minutes", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    steps: Option<u64>,
    /// Go on serving when all is shown, until Ctrl-C
    #[arg(long)]
    keep_serving: bool,
    /// One JSON object instead of the tour
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    fidelity: FidelityFlags,
    #[command(flatten)]
    machine: MachineFlags,
}

fn minutes(text: &str) -> Result<f64, String> {
    let given = text.parse().ok().filter(|m| (0.05..=10_000.0).contains(m));
    given.ok_or_else(|| "give a number of minutes from 0.05 to 10000".into())
}

/// The model that is made, and a batch.
struct Size {
    vocab: usize,
    hidden: usize,
    inner: usize,
    layers: usize,
    batch: usize,
    seq: usize,
}

/// What is shown, and what it is shown of.
struct Tour<'a> {
    out: &'a mut dyn Write,
    quickstart: &'a Quickstart,
    machine: Machine,
    size: Size,
    folder: PathBuf,
    text: Text,
}

/// A run that is over.
struct Trained {
    /// Its newest checkpoint, a model directory.
    model: PathBuf,
    steps: u64,
    tokens: u64,
    seconds: f64,
    /// Loss of the first step, then means over equal parts of the run.
    losses: Vec<f64>,
    validation: Option<f64>,
}

impl Quickstart {
    /// Walks through everything.
    pub fn run(self, out: &mut dyn Write) -> Done {
        let machine = self.machine.machine()?;
        let size = match &machine.cpu {
            Some(_) => Size { vocab: 4096, hidden: 256, inner: 704, layers: 6, batch: 8, seq: 128 },
            None => Size { vocab: 300, hidden: 32, inner: 64, layers: 2, batch: 2, seq: 16 },
        };
        let (folder, temporary) = match &self.folder {
            Some(given) => (given.clone(), None),
            None => {
                let made = tempfile::Builder::new().prefix("astrai-quickstart-").tempdir();
                let made = made.map_err(|e| format!("a temporary folder: {e}"))?;
                (made.path().to_path_buf(), Some(made))
            }
        };
        let text = Text::find(&self.data, &folder)?;
        make_folder(&folder)?;
        // From here on there is something to look at, and nobody removes it.
        let _kept = temporary.map(tempfile::TempDir::keep);
        let (report, server) = Tour { out, quickstart: &self, machine, size, folder, text }.walk()?;
        if self.json {
            writeln!(out, "{report}")?;
        }
        if !self.keep_serving {
            server.stop()?;
            return Ok(ExitCode::SUCCESS);
        }
        if !self.json {
            writeln!(out, "Serving on {} until Ctrl-C.", server.url())?;
        }
        out.flush()?;
        server.wait_for_signal(&AtomicBool::new(false))?;
        Ok(ExitCode::SUCCESS)
    }
}

impl Tour<'_> {
    fn tell(&mut self, text: &str) -> Result<(), Failure> {
        match self.quickstart.json {
            true => Ok(()),
            false => Ok(writeln!(self.out, "{text}\n")?),
        }
    }

    fn storage(&self) -> DType {
        self.quickstart.machine.storage()
    }

    fn walk(mut self) -> Result<(Value, Server), Failure> {
        let (files, size) = (self.text.corpus.files().len(), self.text.corpus.bytes());
        let of = if self.quickstart.data.is_empty() { "astrai's own sources, " } else { "" };
        self.tell(&format!("1. Text to learn from: {of}{files} files, {}.", bytes(size)))?;
        let config = self.write_config()?;
        let parameters = config.parameter_count();
        let (plan, seconds) = measure::once(|| self.plan(&config))?;
        let figures = self.planned(&plan, parameters, seconds)?;
        let steps = match self.quickstart.steps {
            Some(steps) => steps,
            None => self.steps(&config, plan)?,
        };
        let trained = self.train(steps)?;
        self.show(&trained)?;
        let server = self.serve(&trained.model)?;
        let (prompt, answer) = self.complete(&server, &trained.model)?;
        self.what_next(&trained)?;
        let picture = self.run_folder().join(PICTURE).display().to_string();
        let report = json!({
            "folder": self.folder.display().to_string(), "model": trained.model.display().to_string(),
            "text_bytes": size, "parameters": parameters, "plan": figures, "steps": trained.steps,
            "tokens": trained.tokens, "train_seconds": trained.seconds, "losses": trained.losses,
            "first_loss": trained.losses.first(), "last_loss": trained.losses.last(), "val_loss": trained.validation,
            "picture": picture, "url": server.url(), "prompt": prompt, "text": answer,
        });
        Ok((report, server))
    }

    fn run_folder(&self) -> PathBuf {
        self.folder.join("run")
    }

    /// Writes `config.json`.
    fn write_config(&self) -> Result<ModelConfig, Failure> {
        let Size { vocab, hidden, inner, layers, .. } = self.size;
        // The tokenizer that is trained has the end of a text at 0 and padding at 1.
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden,
            "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": 8,
            "num_key_value_heads": 4, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "tie_word_embeddings": true, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1,
            "torch_dtype": "float32",
        });
        let path = self.folder.join("config.json");
        std::fs::write(&path, format!("{config:#}\n")).map_err(|e| format!("{}: {e}", path.display()))?;
        let reading = ModelConfig::parse(&config.to_string(), "quickstart").map_err(|e| e.to_string())?;
        Ok(reading.config)
    }

    fn plan(&self, config: &ModelConfig) -> Result<Plan, Failure> {
        let recipe = Recipe {
            storage: self.storage(),
            ..Settings::of_sizes(self.size.batch as u64, self.size.seq as u64).recipe()
        };
        Ok(Plan::new(config, &recipe, self.machine.backend(), Dump::None)?)
    }

    fn planned(&mut self, plan: &Plan, parameters: u64, seconds: f64) -> Result<Value, Failure> {
        let [mut kernels, mut launches, mut flops] = [0; 3];
        for program in [&plan.grad, &plan.update] {
            let cost = program.cost()?;
            kernels += program.kernels.len() as u64;
            (launches, flops) = (launches + cost.launches, flops + cost.flops);
        }
        let memory: u64 = plan.memory()?.iter().sum();
        let Size { batch, seq, .. } = self.size;
        self.tell(&format!(
            "2. A llama of {} parameters. Its config.json became a graph, the graph its own gradient, and both {kernels}\n   \
             kernels, in {seconds:.2} s. A training step on {batch} sequences of {seq} tokens is {launches} launches and {} operations;\n   \
             it takes {}.",
            count(parameters), count(flops), bytes(memory)
        ))?;
        Ok(
            json!({"kernels": kernels, "launches": launches, "flops": flops, "planned_bytes": memory, "compile_seconds": seconds}),
        )
    }

    /// Steps that fill the time, found by making some.
    fn steps(&mut self, config: &ModelConfig, plan: Plan) -> Result<u64, Failure> {
        let Size { vocab, batch, seq, .. } = self.size;
        let ids: Vec<i32> = (0..=seq).map(|i| (i * 2_654_435_761 % vocab) as i32).collect();
        let mut trial = PackedBatch::default();
        (0..batch).for_each(|_| trial.push(&ids[..seq], &ids[1..]));
        let model = Model::fresh(config.clone(), vec![], 0);
        let mut engine = Engine::open(plan, model.source(), &self.machine.device, &mut |_, _| {})?;
        let mut runs = Vec::new();
        let started = Instant::now();
        // The first touches all memory and does not count.
        engine.step(std::slice::from_ref(&trial), 1e-4)?;
        while runs.len() < TRIAL.0 && (runs.is_empty() || started.elapsed() < TRIAL.1) {
            runs.push(measure::once(|| engine.step(std::slice::from_ref(&trial), 1e-4))?.1);
        }
        let step = measure::Seconds::of(runs).median.max(1e-6);
        let steps = (60.0 * self.quickstart.minutes / step) as u64;
        // Even, so that the validation after the second half is the end.
        let steps = (steps / 2 * 2).max(2);
        self.tell(&format!(
            "3. A step takes {:.0} ms here, so {steps} steps fill {} minutes.",
            1e3 * step,
            self.quickstart.minutes
        ))?;
        Ok(steps)
    }

    /// Runs `astrai train`, the very command that is shown.
    fn train(&mut self, steps: u64) -> Result<Trained, Failure> {
        let flags = &self.quickstart.machine;
        let device = self.machine.device.name();
        let run = self.run_folder();
        let shown = |p: &Path| p.display().to_string();
        let mut words =
            vec!["--config".to_string(), shown(&self.folder.join("config.json")), "--data".into()];
        words.extend(self.text.roots.iter().map(|p| shown(p)));
        let validate = if steps.is_multiple_of(2) { steps / 2 } else { steps };
        let Size { vocab, batch, seq, .. } = self.size;
        let numbers = format!(
            "--vocab {vocab} --batch {batch} --seq {seq} --steps {steps} --lr {LR} --eval-every {validate} --save-every 0 \
             --dtype {} --threads {} --device {device}",
            self.storage().name(),
            flags.threads
        );
        words.extend(["--out".into(), shown(&run)]);
        words.extend(numbers.split(' ').map(str::to_string));
        let line: Vec<String> = words.iter().map(|w| quoted(w)).collect();
        self.tell(&format!("   astrai train {}", line.join(" ")))?;
        let command = Train::augment_args(clap::Command::new("train").no_binary_name(true));
        let parsed = command.try_get_matches_from(&words).and_then(|m| Train::from_arg_matches(&m));
        parsed.map_err(|e| e.to_string())?.run(&mut std::io::sink())?;
        trained(&run)
    }

    fn show(&mut self, t: &Trained) -> Result<(), Failure> {
        let losses: Vec<String> = t.losses.iter().map(|l| format!("{l:.2}")).collect();
        let validation =
            t.validation.map_or(String::new(), |v| format!("\n   On text that was held out: {v:.2}."));
        self.tell(&format!(
            "4. {} steps, {} tokens, {:.0} s. The loss, nats a token, fell from {} (choosing blindly would give {:.2}) to {}:\n   \
             {}{validation}\n   The curve is in {}",
            t.steps,
            t.tokens,
            t.seconds,
            losses.first().map_or("", String::as_str),
            (self.size.vocab as f64).ln(),
            losses.last().map_or("", String::as_str),
            losses.join("  "),
            self.run_folder().join(PICTURE).display(),
        ))
    }

    /// Serves the trained model.
    fn serve(&mut self, folder: &Path) -> Result<Server, Failure> {
        let published = Published::read(folder, &mut tell())?;
        let ids = [2, self.size.seq];
        self.text.write_ids(&self.folder.join("inputs.safetensors"), &published.tokenizer, ids)?;
        let listener = listen(LOCAL, 0)?;
        let room = Room {
            sequences: SERVED,
            queue: SERVED,
            ..Room::of_one(self.storage(), self.quickstart.fidelity.asked())
        };
        let engine = published.start(&room, &self.machine, &mut tell())?;
        Server::start(listener, published.served(engine, vec![NAME.into()], HttpSettings::default()))
    }

    /// The trained model continues the beginning of a text, for a client of its server.
    fn complete(&mut self, server: &Server, folder: &Path) -> Result<(String, String), Failure> {
        let prompt = self.text.prompt()?;
        let url = format!("{}/v1/completions", server.url());
        let body = json!({"model": NAME, "prompt": prompt, "max_tokens": NEW, "temperature": 0});
        let (answer, seconds) = measure::once(|| post(&url, &body))?;
        let text = answer["choices"][0]["text"].as_str();
        let text = text.ok_or_else(|| format!("{url}: no text in the answer {answer}"))?.to_string();
        let lines =
            |text: &str| text.lines().filter(|l| !l.trim().is_empty()).collect::<Vec<_>>().join("\n     ");
        let model = quoted(&folder.display().to_string());
        self.tell(&format!(
            "5. astrai serve {model} --port 0\n\n   \
             serves the model, here on {}, the way OpenAI's API is served. Asked there, at /v1/completions, to continue\n\n     {}\n\n   \
             it answers, with the likeliest token each time ({NEW} tokens in {seconds:.2} s)\n\n     {}",
            server.url(), lines(&prompt), lines(&text)
        ))?;
        Ok((prompt, text))
    }

    fn what_next(&mut self, t: &Trained) -> Result<(), Failure> {
        let word = |p: &Path| quoted(&p.display().to_string());
        let (dir, model) = (word(&self.folder), word(&t.model));
        let (run, longer) = (word(&self.run_folder()), 2 * t.steps);
        let name = json!({"model": NAME, "prompt": "fn", "max_tokens": 32});
        let verify = repository().map_or(String::new(), |root| {
            let golden = word(&near(&root.join("tests/golden/llama")));
            format!("\n  astrai verify {golden}        the same numbers as a reference implementation")
        });
        let Size { batch, seq, .. } = self.size;
        self.tell(&format!(
            "Next (the model is a folder as Hugging Face lays it out, {model}):\n  \
             astrai serve {model} --served-name {NAME}        then, from elsewhere:\n    \
             curl http://127.0.0.1:8000/v1/completions -d '{name}'\n  \
             astrai generate {model} --prompt fn --max-tokens 64 --temperature 0.8        the same without a server\n  \
             astrai train --out {run} --resume --steps {longer}        train on\n  \
             astrai run {model} --inputs {dir}/inputs.safetensors --outputs {dir}/out.safetensors --want logits,loss,grads --profile\n  \
             astrai compile {dir}/config.json --for train -o {dir}/compiled        graphs, plan and kernels as files\n  \
             astrai bench train --shape {dir}/config.json --batch {batch} --seq {seq}{verify}"
        ))
    }
}

/// What a run's folder says of it.
fn trained(run: &Path) -> Result<Trained, Failure> {
    let latest = run.join("latest");
    let name = std::fs::read_to_string(&latest).map_err(|e| format!("{}: {e}", latest.display()))?;
    let (rows, notes) = metrics::read(&run.join(METRICS))?;
    warn(&notes);
    let steps: Vec<_> =
        rows.iter().filter_map(|r| if let Row::Step(s) = r { Some(s) } else { None }).collect();
    let mut validations =
        rows.iter().filter_map(|r| if let Row::Validation(v) = r { Some(v.val_loss) } else { None });
    let mean = |part: &[&metrics::StepMetrics]| part.iter().map(|s| s.loss).sum::<f64>() / part.len() as f64;
    let parts = steps.chunks(steps.len().div_ceil(SHOWN).max(1)).map(mean);
    let losses = steps.first().map(|s| s.loss).into_iter().chain(parts).collect();
    Ok(Trained {
        model: run.join(name.trim()),
        steps: steps.len() as u64,
        tokens: steps.last().map_or(0, |s| s.tokens),
        seconds: steps.iter().map(|s| s.seconds).sum(),
        losses,
        validation: validations.next_back(),
    })
}

/// A request of JSON, and its answer.
fn post(url: &str, body: &Value) -> Result<Value, String> {
    let failed = |e: ureq::Error| format!("{url}: {e}");
    let mut answer =
        ureq::post(url).content_type("application/json").send(body.to_string()).map_err(failed)?;
    let text = answer.body_mut().read_to_string().map_err(failed)?;
    serde_json::from_str(&text).map_err(|e| format!("{url}: the answer is no JSON: {e}"))
}

/// A folder that is there and empty.
fn make_folder(folder: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    if std::fs::read_dir(folder).is_ok_and(|mut list| list.next().is_some()) {
        bail!("{}: the folder is not empty; give one that is, or a new name", folder.display());
    }
    Ok(())
}

/// A word as a shell reads it.
fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "/._-+".contains(c);
    if text.chars().all(plain) { text.into() } else { format!("'{}'", text.replace('\'', "'\\''")) }
}
