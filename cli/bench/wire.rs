//! `astrai bench serve --wire`: what HTTP, JSON, detokenising and server-sent events cost. In: a model's tokenizer, so many clients. Out: the processor
//! time of this process for each streamed token, without the engine's thread, in front of a model that costs nothing. The clients are a process of
//! their own.

use super::{Bench, draw};
use crate::failure::{Failure, bail};
use crate::measure::{Seconds, rounded};
use crate::serve::{LOCAL, Server, listen};
use astrai_serve::engine::{Engine, Model, ModelError, Settings, Sizes};
use astrai_serve::http::{HttpSettings, Served};
use astrai_serve::scheduler::plan::StepPlan;
use astrai_serve::tokenizer::Tokenizer;
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Clients, prompts' tokens and answers' tokens by default.
const CLIENTS: u64 = 64;
const PROMPT: u64 = 32;
const NEW: u64 = 128;

/// What a step takes without costing anything: tokens are to come one by one, as they do from a model.
const STEP: Duration = Duration::from_millis(5);

/// Different tokens of answers, at most.
const WORDS: usize = 4096;

/// A model that says tokens at random, at no cost.
struct Costless {
    sizes: Sizes,
    words: Vec<u32>,
    logits: Vec<f32>,
    /// Where the logits are not zero.
    set: Vec<usize>,
    steps: u64,
}

impl Model for Costless {
    fn sizes(&self) -> Sizes {
        self.sizes
    }

    fn step<'m>(&'m mut self, plan: &StepPlan, logits: &mut Vec<&'m mut [f32]>) -> Result<(), ModelError> {
        std::thread::sleep(STEP);
        self.steps += 1;
        let (rows, width) = (plan.rows().count(), self.sizes.vocabulary);
        self.logits.resize(rows.max(self.logits.len() / width) * width, 0.0);
        for at in self.set.drain(..) {
            self.logits[at] = 0.0;
        }
        for row in 0..rows {
            let word =
                draw(self.steps * self.sizes.sequences as u64 + row as u64) as usize % self.words.len();
            let at = row * width + self.words[word] as usize;
            self.logits[at] = 1.0;
            self.set.push(at);
        }
        logits.push(&mut self.logits[..rows * width]);
        Ok(())
    }
}

/// Nanoseconds of processor time of this process.
fn processor() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the time is written within this call.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Nanoseconds of processor time of the engine's thread.
fn engines() -> Result<u64, Failure> {
    let failed = |e: std::io::Error| format!("/proc/self/task: {e}");
    for task in std::fs::read_dir("/proc/self/task").map_err(failed)? {
        let path = task.map_err(failed)?.path();
        let read = |name: &str| std::fs::read_to_string(path.join(name)).unwrap_or_default();
        if read("comm").trim() == "engine" {
            let time = read("schedstat").split(' ').next().and_then(|n| n.parse().ok());
            return Ok(time.ok_or("this kernel does not tell the processor time of threads (schedstat)")?);
        }
    }
    bail!("the engine has no thread")
}

impl Bench {
    /// Measures and prints.
    pub(super) fn wire(&self, out: &mut dyn Write) -> Result<(), Failure> {
        let needed = "--shape MODEL is needed: a model directory with a tokenizer";
        let folder = self.shape.as_deref().ok_or(needed)?;
        let (clients, new) = (self.batch.unwrap_or(CLIENTS), self.new.unwrap_or(NEW));
        let prompt = self.seq.unwrap_or(PROMPT);
        let requests = self.requests.unwrap_or(8 * clients);
        let (server, vocabulary) = start(folder, [clients, prompt, new].map(|n| n as usize))?;
        let ask = |requests: u64| -> Result<Value, Failure> {
            let flags = [
                ("--num-prompts", requests),
                ("--max-concurrency", clients),
                ("--random-input-len", prompt),
                ("--random-output-len", new),
                ("--random-vocab", vocabulary as u64),
            ];
            let mut command = Command::new(std::env::current_exe().map_err(|e| e.to_string())?);
            command.args(["bench", "serve", "--url", server.url()]);
            command.args(flags.iter().flat_map(|(flag, n)| [flag.to_string(), n.to_string()]));
            let told = command.stderr(Stdio::inherit()).output().map_err(|e| format!("clients: {e}"))?;
            match serde_json::from_slice::<Value>(&told.stdout) {
                Ok(told) if told["failed"] == 0 => Ok(told),
                _ => bail!("the clients were not answered: {}", String::from_utf8_lossy(&told.stdout)),
            }
        };
        ask(clients)?;
        // One request more is sent first, to see whether the server answers.
        let tokens = ((requests + 1) * new) as f64;
        let each = |nanos: u64| nanos as f64 / tokens / 1e3;
        let mut runs: [Vec<f64>; 4] = Default::default();
        for _ in 0..self.repeat {
            let before = (processor(), engines()?);
            let told = ask(requests)?;
            let (all, engine) = (processor() - before.0, engines()? - before.1);
            let of = |name: &str| told[name].as_f64().unwrap_or(f64::NAN);
            let run = [each(all - engine), each(engine), of("output_throughput"), of("median_itl_ms")];
            runs.iter_mut().zip(run).for_each(|(all, x)| all.push(x));
        }
        let [server_us, engine_us, throughput, itl] = runs.map(Seconds::of);
        let line = json!({
            "peer": concat!("astrai ", env!("CARGO_PKG_VERSION")), "job": "serve", "wire": true, "batch": clients, "seq": prompt,
            "new": new, "requests": requests, "server_us_per_token": rounded(server_us.median, 2),
            "server_us_per_token_min": rounded(server_us.min, 2), "server_us_per_token_max": rounded(server_us.max, 2),
            "engine_us_per_token": rounded(engine_us.median, 2), "tokens_per_s": rounded(throughput.median, 2),
            "median_itl_ms": rounded(itl.median, 3),
        });
        writeln!(out, "{line}")?;
        server.stop()
    }
}

/// A server of no cost and the ids that it knows, with room for so many sequences of a prompt and an answer.
fn start(folder: &Path, [clients, prompt, new]: [usize; 3]) -> Result<(Server, usize), Failure> {
    let tokenizer = Tokenizer::open(folder).map_err(|e| e.to_string())?;
    let vocabulary = tokenizer.vocabulary();
    let whole = |id: &u32| {
        let text = tokenizer.decode(&[*id], false).unwrap_or_default();
        !tokenizer.is_special(*id) && !text.is_empty() && !text.contains(char::REPLACEMENT_CHARACTER)
    };
    let words: Vec<u32> = (0..vocabulary as u32).filter(whole).take(WORDS).collect();
    if words.is_empty() {
        bail!("{}: no token of the tokenizer is a text", folder.display());
    }
    let (page_size, positions) = (16, prompt + new + 1);
    let sizes = Sizes {
        vocabulary,
        page_size,
        pages: clients * positions.div_ceil(page_size),
        windows: None,
        positions,
        tokens: clients.max(512),
        sequences: clients,
    };
    let model = Costless { sizes, words, logits: Vec::new(), set: Vec::new(), steps: 0 };
    let settings = Settings { queue: clients, prefix_cache: false, ..Settings::default() };
    let engine = Engine::start(model, &settings).map_err(|e| e.to_string())?;
    let names = vec!["costless".to_owned()];
    let served = Served { engine, tokenizer, template: None, names, settings: HttpSettings::default() };
    Ok((Server::start(listen(LOCAL, 0)?, served)?, vocabulary))
}
