//! `astrai bench serve`: clients of the engine, each of which asks again when it has been answered; no network between.

use super::{Bench, Costs, Planned, Runs, costs, draw};
use crate::failure::{Failure, bail};
use crate::measure::{Seconds, rounded};
use crate::progress::tell;
use astrai_builders::config::Slots;
use astrai_builders::{Cache, ModelConfig};
use astrai_engine::adapters;
use astrai_engine::load::Workload;
use astrai_engine::machine::{Machine, Speeds, median};
use astrai_engine::model::{Model, read_config, served_fidelity};
use astrai_engine::programs::Programs;
use astrai_engine::serving::{KvMemory, Room, Speculation, steps_drafted};
use astrai_estimate::check::Looks;
use astrai_estimate::hardware::Hardware;
use astrai_estimate::replay::{StepCosts, replay};
use astrai_estimate::schedule::{Purpose, Schedule};
use astrai_serve::engine::{AdapterId, DraftModel, End, Engine, Handle};
use astrai_serve::grammar::{Compiler, Constraint, Wanted};
use astrai_serve::request::{Request, Sampling};
use astrai_serve::tokenizer::Tokenizer;
use clap::Args;
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Tokens of an answer, by default.
const NEW: u64 = 64;

/// Looks at the machine's speeds before and after a run, and the time before each.
const LOOKS: usize = 4;
const BETWEEN_LOOKS: Duration = Duration::from_millis(100);

/// Most tokens of a step.
const CHUNK: u64 = 512;

/// Bytes of the file of a schema or of a text, at most.
const LARGEST: u64 = 16 << 20;

/// What is asked.
#[derive(Args, Clone, Debug)]
pub struct AskedFlags {
    /// Every answer is a list without an end of what this JSON schema describes, in the tokens of --shape, a model directory; the same
    /// requests are made without it in turn: of_base (serve)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["wire", "url"])]
    json_schema_path: Option<PathBuf>,
    /// Prompts are pieces of this text, in the tokens of --shape, a model directory, and not random ids (serve)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["wire", "url"])]
    dataset_path: Option<PathBuf>,
    /// Temperature at which tokens are drawn, by seeds (serve) [default: 0, with --n and --json-schema-path 1]
    #[arg(long, value_name = "T", conflicts_with_all = ["wire", "url"])]
    temperature: Option<f32>,
    /// Most tokens of a step, of prompts and of answers together (serve) [default: a prompt's, at most 512]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20), conflicts_with_all = ["wire", "url"])]
    max_batch_tokens: Option<u32>,
}

impl AskedFlags {
    /// Whether any is given.
    pub fn given(&self) -> bool {
        self.json_schema_path.is_some()
            || self.dataset_path.is_some()
            || self.temperature.is_some()
            || self.max_batch_tokens.is_some()
    }

    /// The tokenizer of a model directory.
    fn tokenizer(shape: Option<&Path>) -> Result<Tokenizer, Failure> {
        let Some(folder) = shape.filter(|path| path.is_dir()) else {
            bail!(
                "--json-schema-path and --dataset-path want the tokens of --shape: give a model directory with a tokenizer.json"
            );
        };
        Ok(Tokenizer::open(folder).map_err(|e| e.to_string())?)
    }

    /// The ids of the text that prompts are pieces of.
    fn text(&self, shape: Option<&Path>) -> Result<Option<Vec<u32>>, Failure> {
        let Some(path) = &self.dataset_path else { return Ok(None) };
        let text = astrai_files::read_text(path, LARGEST).map_err(|e| e.to_string())?;
        let ids = AskedFlags::tokenizer(shape)?.encode(&text, false).map_err(|e| e.to_string())?;
        if ids.is_empty() { bail!("{}: is empty", path.display()) } else { Ok(Some(ids)) }
    }

    /// What holds answers of so many tokens of a model.
    fn constraint(
        &self,
        shape: Option<&Path>,
        (vocabulary, new): (usize, u64),
    ) -> Result<Option<Constraint>, Failure> {
        let Some(path) = &self.json_schema_path else { return Ok(None) };
        let wrong = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
        let bytes = astrai_files::read(path, LARGEST).map_err(|e| e.to_string())?;
        let mut item: Value = serde_json::from_slice(&bytes).map_err(|e| wrong(&e))?;
        // A token may end an item and begin the next, but it has no two whole ones.
        let mut list = json!({"type": "array", "minItems": 2 * new});
        for key in ["$defs", "definitions"] {
            if let Some(all) = item.as_object_mut().and_then(|item| item.remove(key)) {
                list[key] = all;
            }
        }
        list["items"] = item;
        let tokenizer = AskedFlags::tokenizer(shape)?;
        let compiler = Arc::new(Compiler::new(&tokenizer, vocabulary, &[])?);
        let grammar = compiler.compile(Wanted::Schema(list)).map_err(|e| wrong(&e))?;
        Ok(Some(Constraint { grammar: Some(grammar), thought: None }))
    }
}

/// The speeds of about half a second: what else the machine does in a moment would count for seconds of the runs before and after.
fn look(looks: &Looks) -> Option<Speeds> {
    let one = |_| {
        thread::sleep(BETWEEN_LOOKS);
        looks.now()
    };
    Speeds::over(&(0..LOOKS).map(one).collect::<Vec<_>>())
}

/// What is sent: so many requests, so many of them at a time.
struct Load {
    clients: u64,
    requests: u64,
    choices: u32,
    prompt: u64,
    new: u64,
    vocab: u64,
    text: Option<Vec<u32>>,
    temperature: f32,
}

/// An engine, with so many adapters, of which each request asks for the next, and what holds its answers.
struct Subject {
    engine: Engine,
    adapters: u64,
    held: Option<Constraint>,
}

/// What runs of one engine gave.
#[derive(Default)]
struct Served {
    seconds: Vec<f64>,
    waits: Waits,
}

/// Seconds that tokens took to come.
#[derive(Default)]
struct Waits {
    /// From a request to its first token.
    first: Vec<f64>,
    /// From a token to the next of the same request.
    next: Vec<f64>,
}

impl Load {
    /// All requests once: the seconds they took together, and each token's.
    fn run(&self, subject: &Subject) -> Result<(f64, Waits), Failure> {
        let sent = AtomicU64::new(0);
        let started = Instant::now();
        let waits = thread::scope(|s| {
            let clients: Vec<_> = (0..self.clients)
                .map(|_| {
                    let (handle, sent) = (subject.engine.handle(), &sent);
                    s.spawn(move || self.client(&handle, sent, subject))
                })
                .collect();
            let mut all = Waits::default();
            for client in clients {
                let waits = client.join().map_err(|_| "a client's thread failed")??;
                all.first.extend(waits.first);
                all.next.extend(waits.next);
            }
            Ok::<_, Failure>(all)
        })?;
        Ok((started.elapsed().as_secs_f64(), waits))
    }

    /// One request after the other, until all have been sent.
    fn client(&self, handle: &Handle, sent: &AtomicU64, subject: &Subject) -> Result<Waits, Failure> {
        let mut waits = Waits::default();
        loop {
            let i = sent.fetch_add(1, Ordering::Relaxed);
            if i >= self.requests {
                return Ok(waits);
            }
            let token = |at: u64| match &self.text {
                Some(ids) => ids[at as usize % ids.len()],
                None => (draw(at) % self.vocab) as u32,
            };
            let prompt = (i * self.prompt..(i + 1) * self.prompt).map(token);
            let adapter = i.checked_rem(subject.adapters).map(adapter);
            let constraint = subject.held.clone();
            let mut request =
                Request { n: self.choices, adapter, constraint, ..Request::new(prompt.collect()) };
            let (temperature, max_tokens) = (self.temperature, Some(self.new as usize));
            request.sampling = Sampling { temperature, max_tokens, seed: Some(i), ..Sampling::default() };
            self.send(handle, request, &mut waits)?;
        }
    }

    fn send(&self, handle: &Handle, request: Request, waits: &mut Waits) -> Result<(), Failure> {
        // Of each choice.
        let mut before = vec![Instant::now(); request.n as usize];
        let mut tokens = vec![0; request.n as usize];
        let mut stream = handle.submit(request).map_err(|e| e.to_string())?;
        loop {
            let event = stream.blocking_recv().ok_or("the engine ended without an answer")?;
            for update in &event.updates {
                let (at, now) = (update.index as usize, Instant::now());
                let to = if tokens[at] == 0 { &mut waits.first } else { &mut waits.next };
                to.push((now - before[at]).as_secs_f64());
                before[at] = now;
                tokens[at] += 1;
            }
            match event.end {
                None => {}
                Some(End::Finished(_)) if tokens.iter().all(|n| *n == self.new) => return Ok(()),
                Some(End::Finished(_)) => return Err("an answer is shorter than it was to be".into()),
                Some(End::Cancelled(_)) => return Err("a request was cancelled".into()),
                Some(End::Refused(why) | End::Failed(why)) => return Err(why.into()),
            }
        }
    }
}

/// The adapter of a slot.
fn adapter(slot: u64) -> AdapterId {
    AdapterId { slot: slot as u32, number: slot }
}

/// Milliseconds that a half, 95 and 99 of 100 of these waits do not exceed.
fn percentiles(mut seconds: Vec<f64>) -> Value {
    seconds.sort_by(f64::total_cmp);
    let at = |p: f64| {
        let i = (p * seconds.len().saturating_sub(1) as f64).round() as usize;
        seconds.get(i).map(|s| rounded(1e3 * s, 2))
    };
    json!({"p50": at(0.5), "p95": at(0.95), "p99": at(0.99)})
}

impl Bench {
    pub(super) fn serve(&self, machine: &Machine, out: &mut dyn Write) -> Result<(), Failure> {
        let new = self.new.unwrap_or(NEW);
        let (config, clients, prompt) = self.shape(new)?;
        let requests = self.requests.unwrap_or(2 * clients);
        let choices = self.choices.unwrap_or(1);
        let shape = self.shape.as_deref();
        let (held, text) = (self.asked.constraint(shape, (config.vocab_size, new))?, self.asked.text(shape)?);
        if let Some(id) = text.iter().flatten().find(|id| **id as usize >= config.vocab_size) {
            bail!("the tokenizer of --shape has token {id}, the model {} tokens", config.vocab_size);
        }
        // Choices of a greedy request would be the same, and the likeliest text of a grammar says one thing for ever.
        let usual = if choices > 1 || held.is_some() { 1.0 } else { 0.0 };
        let temperature = self.asked.temperature.unwrap_or(usual);
        let (vocab, base) = (config.vocab_size as u64, held.is_some());
        let load = Load { clients, requests, choices, prompt, new, vocab, text, temperature };
        let (slots, speculation) = (self.adapters.slots(), self.speculate.asked());
        let plain = slots.is_none() && speculation.is_none() && !base && choices == 1;
        let foreseen = match &self.hardware {
            Some(_) if !plain => bail!(
                "--hardware predicts single answers without --adapters, --speculate and --json-schema-path; leave it out"
            ),
            Some(name) => Some((Hardware::open(name)?, config.clone())),
            None => None,
        };
        let [prompts, answers] = self.least(&load, &config, machine)?;
        let first = self.subject(&load, config.clone(), (slots, speculation), machine)?;
        let mut subjects = vec![Subject { held, ..first }];
        if slots.is_some() || speculation.is_some() || base {
            subjects.push(self.subject(&load, config, (None, None), machine)?);
        }
        for subject in &subjects {
            load.run(subject)?;
        }
        let mut served: Vec<Served> = subjects.iter().map(|_| Served::default()).collect();
        let mut runs = Runs::new(machine);
        let meter = foreseen.as_ref().and_then(|(hardware, _)| Looks::of(hardware, machine));
        let mut speeds: Vec<Speeds> = meter.iter().filter_map(look).collect();
        runs.look(&[]);
        // In turn, so that what else the machine does meets all of them.
        for again in 0..self.repeat {
            if again > 0 && subjects.len() > 1 {
                runs.look(&[]);
            }
            for (i, (subject, served)) in subjects.iter().zip(&mut served).enumerate() {
                let (all, each) = load.run(subject)?;
                if i == 0 {
                    runs.add(all);
                    runs.look(&[]);
                }
                served.seconds.push(all);
                served.waits.first.extend(each.first);
                served.waits.next.extend(each.next);
            }
            speeds.extend(meter.iter().filter_map(look));
        }
        let counters = subjects[0].engine.handle().stats().scheduler;
        subjects.into_iter().for_each(|subject| subject.engine.drain(None));
        let mut served = served.into_iter();
        let Served { seconds, waits } = served.next().unwrap_or_default();
        let (each, seconds) = (seconds.clone(), Seconds::of(seconds));
        let mut line = self.line(machine, &seconds, runs.peak_rss_mb());
        line.insert("new".into(), json!(new));
        line.insert("requests".into(), json!(requests));
        line.insert("n".into(), json!(choices));
        let tokens = (requests * u64::from(choices) * new) as f64;
        line.insert("tokens_per_s".into(), json!(rounded(tokens / seconds.median, 2)));
        // Tokens that are proposed come several in a step.
        if speculation.is_none() {
            let parts = [(&*prompts.0, prompts.1), (&*answers.0, answers.1)];
            line.extend(runs.floor(&parts, self.machine.storage()));
        }
        let first = median(waits.first.iter().copied()).unwrap_or_default();
        line.insert("first_token_ms".into(), percentiles(waits.first));
        line.insert("next_token_ms".into(), percentiles(waits.next));
        if let Some((hardware, config)) = foreseen {
            // Each run beside what is predicted at the speeds before and after it: where cores are moved, runs differ. Shown is the run whose
            // error is the median, of the runs during which they stayed, if there are any.
            let looks = |i: usize| speeds.get(i).copied().zip(speeds.get(i + 1).copied());
            let stayed = |i: &usize| looks(*i).is_none_or(|(before, after)| before.alike(after));
            let any = (0..each.len()).any(|i| stayed(&i));
            let mut replays = Vec::new();
            for i in (0..each.len()).filter(|i| !any || stayed(i)) {
                let (run, now) = (each[i], looks(i).map(|(before, after)| before.between(after)));
                let [all, to_first] = self.replayed(&load, &config, &hardware.at(now), machine)?;
                replays.push((all / run - 1.0, all, run, to_first, now));
            }
            replays.sort_by(|a, b| a.0.total_cmp(&b.0));
            let (error, all, run, _, now) = replays[replays.len() / 2];
            let to_first = median(replays.iter().map(|replay| replay.3)).unwrap_or_default();
            for (key, value) in [("predicted_seconds", all), ("run_seconds", run)] {
                line.insert(key.into(), json!(rounded(value, 6)));
            }
            line.insert("error".into(), json!(rounded(error, 4)));
            let rates = [
                ("read_gb_per_s", now.map(|now| now.read)),
                ("exchanged_gb_per_s", now.and_then(|now| now.exchange)),
                ("product_gflops", now.and_then(|now| now.product)),
            ];
            for (key, rate) in rates {
                line.extend(rate.map(|rate| (key.into(), json!(rounded(rate / 1e9, 1)))));
            }
            line.insert("predicted_first_token_ms".into(), json!(rounded(1e3 * to_first, 2)));
            line.insert("first_token_error".into(), json!(rounded(to_first / first - 1.0, 4)));
        }
        if let Some(n) = self.adapters.adapters {
            line.insert("adapters".into(), json!(n));
        }
        if speculation.is_some() {
            line.insert("proposed".into(), json!(counters.proposed));
            line.insert("accepted".into(), json!(counters.accepted));
        }
        if let Some(base) = served.next() {
            let (of_base, waits) = (Seconds::of(base.seconds).median, base.waits);
            line.insert("base_tokens_per_s".into(), json!(rounded(tokens / of_base, 2)));
            line.insert("of_base".into(), json!(rounded(of_base / seconds.median, 3)));
            line.insert("base_next_token_ms".into(), percentiles(waits.next));
        }
        Ok(writeln!(out, "{}", Value::Object(line))?)
    }

    /// Room for all clients at once, in steps of about a prompt.
    fn room(&self, load: &Load) -> Room {
        let queue = load.clients as usize * load.choices as usize;
        let usual = (load.prompt.min(CHUNK) as usize).max(queue);
        Room {
            sequences: queue,
            tokens: Some(self.asked.max_batch_tokens.map_or(usual, |n| n as usize)),
            context: Some((load.prompt + load.new) as usize),
            kv: Some(KvMemory::Share(1.0)),
            queue,
            prefix_cache: false,
            ..Room::of_one(self.machine.storage(), self.fidelity.asked())
        }
    }

    /// Seconds of the whole load, and the median of those to a first token, of the same scheduler in predicted time.
    fn replayed(
        &self,
        load: &Load,
        config: &ModelConfig,
        hardware: &Hardware,
        machine: &Machine,
    ) -> Result<[f64; 2], Failure> {
        let schedule = Schedule::of_one(Purpose::Decode, 1, load.prompt + load.new, self.machine.storage());
        let mut costs = StepCosts::plan(config, &schedule, &self.room(load), hardware, machine.backend())?;
        let asked = Workload {
            requests: load.requests as u32,
            rate: f64::INFINITY,
            input: load.prompt as u32,
            output: load.new as u32,
            ratio: 0.0,
            prefix: 0,
            vocabulary: load.vocab as u32,
            seed: 0,
        };
        let found = replay(&mut costs, asked.requests().map(Ok), load.clients as usize)?;
        let firsts = found.answered.iter().map(|a| a.first).collect();
        Ok([found.seconds, Seconds::of(firsts).median])
    }

    /// What the load costs at least: a step of prompts and one of answers of all clients, kernel by kernel, and how many of them
    /// there would be if every step were full. Tokens see as many keys as they do on average.
    fn least(
        &self,
        load: &Load,
        config: &ModelConfig,
        machine: &Machine,
    ) -> Result<[(Costs, f64); 2], Failure> {
        let room = self.room(load);
        let fidelity = room.fidelity.unwrap_or_else(|| served_fidelity(config));
        let context = (load.prompt + load.new) as usize;
        let tokens = room.step_tokens(context, config, machine.backend().target());
        let sizes = [tokens, room.sequences].map(|n| n as u64);
        let each = sizes[1];
        // No step has more than all prompts that are asked at once.
        let all = sizes[0].min(load.prompt * each).max(each);
        let part = |tokens: u64, sequences: u64, keys: u64, of: fn(&Programs) -> &Planned| {
            let table = (keys as usize).div_ceil(Cache::PAGE);
            let cache = Cache { page: Cache::PAGE, pages: table * room.sequences, table, windows: None };
            let programs = Programs::plan(config, sizes, cache, room.storage, machine, fidelity)?;
            let size = |name: &str| match name {
                "tokens" => Some(tokens),
                "sequences" => Some(sequences),
                _ => (name == "context").then_some(sequences * table as u64),
            };
            costs(of(&programs), &size)
        };
        let together = (all / load.prompt).clamp(1, each);
        let prompts = part(all, together, load.prompt.div_ceil(2), Programs::prefill)?;
        let answers = part(each, each, load.prompt + load.new / 2, Programs::decode)?;
        let (asked, choices) = (load.requests as f64, load.choices as f64);
        // The first token of an answer comes of its prompt.
        let drawn = asked * choices * (load.new - 1) as f64;
        Ok([(prompts, asked * load.prompt as f64 / all as f64), (answers, drawn / each as f64)])
    }

    /// An engine with random weights and room for all clients at once, and with random adapters in these slots.
    fn subject(
        &self,
        load: &Load,
        config: ModelConfig,
        (adapters, speculation): (Option<Slots>, Option<Speculation>),
        machine: &Machine,
    ) -> Result<Subject, Failure> {
        let room = Room { speculation, adapters, ..self.room(load) };
        let slots = adapters.map_or(0, |slots| slots.slots as u64);
        let slotted = ModelConfig { adapters, ..config.clone() };
        let draft = self.speculate.draft.as_ref().filter(|_| speculation.is_some());
        let draft = draft.map(|path| read_config(path, false)).transpose()?;
        let draft = draft.map(|(config, _)| Model::fresh(config, vec![], 0));
        let model = Model::fresh(config, vec![], 0);
        let (model, draft) = steps_drafted(&model, draft.as_ref(), &room, machine, &mut tell())?;
        let draft = draft.map(|draft| Box::new(draft) as DraftModel);
        let engine = Engine::start_drafted(model, draft, &room.settings()).map_err(|e| e.to_string())?;
        let reader =
            adapters.map(|_| adapters::Reader::new(&slotted, room.storage, machine.backend())).transpose()?;
        for (reader, slot) in reader.iter().flat_map(|r| (0..slots).map(move |slot| (r, slot))) {
            let patch = reader.drawn(|i| draw(i ^ slot << 40));
            let written = engine.handle().adapt(adapter(slot), patch).blocking_recv();
            written.map_err(|_| "the engine ended before an adapter was loaded")??;
        }
        Ok(Subject { engine, adapters: slots, held: None })
    }
}
