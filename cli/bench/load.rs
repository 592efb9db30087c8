//! `astrai bench serve --url`: clients of a server that speaks OpenAI's API, ours or another. In: a load. Out: what the server did with it, under
//! the names of `vllm bench serve`. Each request is a thread that reads its stream and notes when each chunk comes.

use crate::failure::{Failure, bail};
use crate::progress::Progress;
use crate::workload::WorkloadFlags;
use astrai_engine::load::{Answered, Asked, Workload};
use clap::Args;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use ureq::http::Response;
use ureq::{Agent, Body};

/// Requests at once unless told otherwise: each has a thread.
const AT_ONCE: usize = 4096;

/// Bytes of a thread's stack.
const STACK: usize = 256 << 10;

/// Bytes of a line of a stream, at most.
const LINE: u64 = 16 << 20;

/// What is asked of a server.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Of a server (bench serve --url)")]
pub struct LoadFlags {
    /// Server to measure in place of the engine in this process: http://127.0.0.1:8000, say. It is sent prompts of random token ids
    /// by /v1/completions, and reads past the end of text (ignore_eos)
    #[arg(long, value_name = "URL", conflicts_with_all = ["shape", "batch", "seq", "new", "requests", "size", "repeat", "profile",
        "fidelity", "speculate", "draft", "adapters", "quantize", "device", "dtype", "simd", "threads"])]
    pub url: Option<String>,
    /// Name of the model [default: the first that /v1/models lists]
    #[arg(long, value_name = "NAME", requires = "url")]
    model: Option<String>,
    /// Key that requests bring [default: ASTRAI_API_KEY of the environment, if it is there]
    #[arg(long, value_name = "KEY", requires = "url")]
    api_key: Option<String>,
    #[command(flatten)]
    pub workload: WorkloadFlags,
    /// File for the same figures, and those of each request, as JSON
    #[arg(long, value_name = "FILE", requires = "url")]
    save_result: Option<PathBuf>,
}

/// What came of a request, with the seconds from each chunk to the next.
type Streamed = (Answered, Vec<f64>);

impl LoadFlags {
    /// Sends the load and prints what came of it.
    pub fn run(&self, url: &str, out: &mut dyn Write) -> Result<(), Failure> {
        let load = self.workload.workload()?;
        let requests: Vec<Asked> = load.requests().collect();
        let created = self.save_result.as_ref().map(|path| {
            let file = File::create(path).map_err(|e| format!("{}: {e}", path.display()))?;
            Ok::<_, Failure>((path, file))
        });
        let saved = created.transpose()?;
        let at_once = self.workload.max_concurrency.map_or(AT_ONCE, |n| n as usize).min(requests.len());
        let key = self.api_key.clone().or_else(|| std::env::var("ASTRAI_API_KEY").ok());
        let server = Server::find(url, key, self.model.clone(), at_once)?;
        // What does not work once is not tried a thousand times; and the server is warm. Its prefix cache may keep what it is asked, so
        // the prompt is none of the load's.
        let trial = Workload { seed: !load.seed, requests: 1, ..load }.requests().next();
        if let Some(why) = trial.and_then(|trial| server.ask(&trial).0.error) {
            bail!("{url}: {why}");
        }
        let (streamed, seconds) = send(&server, &requests, at_once)?;
        let (answered, between): (Vec<Answered>, Vec<Vec<f64>>) = streamed.into_iter().unzip();
        let good = answered.iter().zip(&between).filter(|(a, _)| a.error.is_none());
        let all: Vec<_> = good.flat_map(|(_, b)| b).map(|seconds| (*seconds, 1)).collect();
        let figures = self.workload.figures(&answered, &all, seconds);
        let w = &self.workload;
        let rate = w.request_rate.filter(|r| r.is_finite()).map_or(json!("inf"), |r| json!(r));
        let head = json!({
            "backend": "openai", "model_id": server.model, "num_prompts": requests.len(), "request_rate": rate,
            "max_concurrency": w.max_concurrency,
        });
        let mut told = figures.told(head);
        writeln!(out, "{told}")?;
        if let Some((path, mut file)) = saved {
            figures.add_each(&mut told);
            told["itls"] = json!(between);
            writeln!(file, "{told}").map_err(|e| format!("{}: {e}", path.display()))?;
        }
        match answered.iter().find_map(|a| a.error.as_ref()) {
            Some(why) if answered.iter().all(|a| a.error.is_some()) => {
                bail!("no request was answered: {why}")
            }
            _ => Ok(()),
        }
    }
}

/// Sends all, so many at once; what came of each, and the seconds it took.
fn send(server: &Server, requests: &[Asked], at_once: usize) -> Result<(Vec<Streamed>, f64), Failure> {
    let next = AtomicUsize::new(0);
    let all = Mutex::new((vec![Streamed::default(); requests.len()], 0));
    let progress = Mutex::new(Progress::new("sending requests"));
    let started = Instant::now();
    let client = || {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(asked) = requests.get(i) else { return };
            let at = Duration::try_from_secs_f64(asked.at).unwrap_or(Duration::MAX);
            thread::sleep(at.saturating_sub(started.elapsed()));
            let answer = server.ask(asked);
            let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
            all.0[i] = answer;
            all.1 += 1;
            progress.lock().unwrap_or_else(PoisonError::into_inner).set(all.1, requests.len() as u64);
        }
    };
    thread::scope(|scope| {
        (0..at_once).try_for_each(|_| {
            let client = thread::Builder::new().stack_size(STACK).spawn_scoped(scope, client);
            client.map(drop).map_err(|e| format!("a thread for a client: {e}; lower --max-concurrency"))
        })
    })?;
    let seconds = started.elapsed().as_secs_f64();
    Ok((all.into_inner().unwrap_or_else(PoisonError::into_inner).0, seconds))
}

/// A server, and how it is asked.
struct Server {
    agent: Agent,
    url: String,
    key: Option<String>,
    model: String,
}

impl Server {
    fn find(
        url: &str,
        key: Option<String>,
        model: Option<String>,
        at_once: usize,
    ) -> Result<Server, Failure> {
        if !url.starts_with("http://") {
            bail!("--url {url}: give http://HOST:PORT; other schemes are not supported");
        }
        let url = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        let config = Agent::config_builder().http_status_as_error(false);
        let config = config.max_idle_connections(at_once).max_idle_connections_per_host(at_once);
        let agent: Agent = config.timeout_connect(Some(Duration::from_secs(30))).build().into();
        let mut server = Server { agent, url, key, model: String::new() };
        server.model = match model {
            Some(model) => model,
            None => server.first_model()?,
        };
        Ok(server)
    }

    fn first_model(&self) -> Result<String, Failure> {
        let url = format!("{}/v1/models", self.url);
        let mut get = self.agent.get(&url);
        if let Some(key) = &self.key {
            get = get.header("authorization", format!("Bearer {key}"));
        }
        let failed = |e: ureq::Error| format!("{url}: {e}");
        let mut response = get.call().map_err(failed)?;
        if response.status() != 200 {
            bail!("{url}: {}", refusal(&mut response));
        }
        let text = response.body_mut().read_to_string().map_err(failed)?;
        let models: Value = serde_json::from_str(&text).unwrap_or_default();
        let name = models["data"][0]["id"].as_str().map(str::to_owned);
        Ok(name.ok_or_else(|| format!("{url} lists no model; name it with --model"))?)
    }

    fn ask(&self, asked: &Asked) -> Streamed {
        let (mut answer, mut between) = Streamed::default();
        answer.input = asked.prompt.len();
        if let Err(why) = self.stream(asked, &mut answer, &mut between) {
            answer.error = Some(why);
        }
        (answer, between)
    }

    /// Sends a request and reads its stream.
    fn stream(&self, asked: &Asked, answer: &mut Answered, between: &mut Vec<f64>) -> Result<(), String> {
        let body = json!({
            "model": self.model, "prompt": asked.prompt, "max_tokens": asked.output, "temperature": 0, "ignore_eos": true,
            "stream": true, "stream_options": {"include_usage": true},
        });
        let body = body.to_string();
        let sent = Instant::now();
        let mut post =
            self.agent.post(format!("{}/v1/completions", self.url)).content_type("application/json");
        if let Some(key) = &self.key {
            post = post.header("authorization", format!("Bearer {key}"));
        }
        let mut response = post.send(body).map_err(|e| e.to_string())?;
        if response.status() != 200 {
            return Err(refusal(&mut response));
        }
        let mut stream = BufReader::new(response.body_mut().as_reader());
        let (mut line, mut chunks) = (Vec::new(), 0u64);
        loop {
            line.clear();
            let n = (&mut stream).take(LINE).read_until(b'\n', &mut line).map_err(|e| e.to_string())?;
            let now = sent.elapsed().as_secs_f64();
            let Some(data) = line.trim_ascii().strip_prefix(b"data:") else {
                if n == 0 {
                    return Err("the stream broke off".into());
                }
                continue;
            };
            if data.trim_ascii() == b"[DONE]" {
                break;
            }
            let chunk: Value =
                serde_json::from_slice(data).map_err(|e| format!("a chunk is no JSON: {e}"))?;
            if let Some(error) = chunk.get("error") {
                return Err(error["message"].as_str().unwrap_or("an error without a message").into());
            }
            answer.output = chunk["usage"]["completion_tokens"].as_u64().unwrap_or(answer.output);
            if chunk["choices"].as_array().is_some_and(|choices| !choices.is_empty()) {
                match chunks {
                    0 => answer.first = now,
                    _ => between.push(now - answer.whole),
                }
                answer.whole = now;
                chunks += 1;
            }
        }
        if chunks == 0 {
            return Err("the stream had no token".into());
        }
        // Whoever does not count has sent a token a chunk.
        answer.output = if answer.output == 0 { chunks } else { answer.output };
        Ok(())
    }
}

/// What a response says that is no answer.
fn refusal(response: &mut Response<Body>) -> String {
    let text = response.body_mut().read_to_string().unwrap_or_default();
    format!("{}: {}", response.status(), text.chars().take(300).collect::<String>())
}
