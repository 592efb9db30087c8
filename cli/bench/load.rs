//! `astrai bench serve --url`: clients of a server that speaks OpenAI's API, ours or another. In: a load. Out: what the server did with it, under
//! the names of `vllm bench serve`. Each request is a thread that reads its stream and notes when each chunk comes.

mod figures;

use super::draw;
use crate::failure::{Failure, bail};
use crate::progress::Progress;
use clap::Args;
use figures::{Figures, Metric, Objective, Percentiles};
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
        "fidelity", "speculate", "quantize", "device", "dtype", "simd", "threads"])]
    pub url: Option<String>,
    /// Name of the model [default: the first that /v1/models lists]
    #[arg(long, value_name = "NAME", requires = "url")]
    model: Option<String>,
    /// Key that requests bring [default: ASTRAI_API_KEY of the environment, if it is there]
    #[arg(long, value_name = "KEY", requires = "url")]
    api_key: Option<String>,
    /// Requests [default: 1000]
    #[arg(long, value_name = "N", requires = "url", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    num_prompts: Option<u32>,
    /// Requests a second, at random times (Poisson); inf sends all at once [default: inf]
    #[arg(long, value_name = "R", requires = "url")]
    request_rate: Option<f64>,
    /// Requests at once; the next one waits for the end of one of them [default: any, up to 4096]
    #[arg(long, value_name = "N", requires = "url", value_parser = clap::value_parser!(u32).range(1..=AT_ONCE as i64))]
    max_concurrency: Option<u32>,
    /// Tokens of a prompt [default: 1024]
    #[arg(long, value_name = "N", requires = "url", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    random_input_len: Option<u32>,
    /// Tokens of an answer [default: 128]
    #[arg(long, value_name = "N", requires = "url", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    random_output_len: Option<u32>,
    /// Lengths are drawn from (1 - R) to (1 + R) times these, 0 to 1 [default: 0]
    #[arg(long, value_name = "R", requires = "url")]
    random_range_ratio: Option<f64>,
    /// Tokens with which every prompt begins, before its own [default: 0]
    #[arg(long, value_name = "N", requires = "url", value_parser = clap::value_parser!(u32).range(..=1 << 24))]
    random_prefix_len: Option<u32>,
    /// Prompts are drawn from the first N ids of the vocabulary [default: 1000]
    #[arg(long, value_name = "N", requires = "url", value_parser = clap::value_parser!(u32).range(1..))]
    random_vocab: Option<u32>,
    /// Draws other prompts, lengths and times [default: 0]
    #[arg(long, value_name = "N", requires = "url")]
    seed: Option<u64>,
    /// What a good request keeps to, in milliseconds: ttft:200 tpot:50 e2el:5000; request_goodput counts these
    #[arg(long, value_name = "METRIC:MS", requires = "url", num_args = 1..)]
    goodput: Vec<Objective>,
    /// Metrics of which percentiles are told: of ttft, tpot, itl, e2el [default: ttft,tpot,itl]
    #[arg(long, value_name = "LIST", requires = "url", value_delimiter = ',')]
    percentile_metrics: Vec<Metric>,
    /// Which percentiles [default: 99]
    #[arg(long, value_name = "LIST", requires = "url")]
    metric_percentiles: Option<Percentiles>,
    /// File for the same figures, and those of each request, as JSON
    #[arg(long, value_name = "FILE", requires = "url")]
    save_result: Option<PathBuf>,
}

/// A request to be sent.
#[derive(Debug)]
struct Asked {
    /// After the beginning.
    at: Duration,
    prompt: Vec<u32>,
    output: u64,
}

/// What came of a request. Times are seconds from when it was sent.
#[derive(Clone, Debug, Default)]
pub struct Answered {
    input: usize,
    output: u64,
    /// To the first chunk.
    first: f64,
    /// From each chunk to the next.
    between: Vec<f64>,
    /// To the last chunk.
    whole: f64,
    error: Option<String>,
}

/// Draws in one order.
struct Dice {
    seed: u64,
    drawn: u64,
}

impl Dice {
    fn next(&mut self) -> u64 {
        self.drawn += 1;
        draw(draw(self.seed) ^ self.drawn)
    }

    /// From 0 to below 1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn length(&mut self, length: u32, ratio: f64) -> u64 {
        let [least, most] = [1.0 - ratio, 1.0 + ratio].map(|by| (f64::from(length) * by).round() as u64);
        (least + self.next() % (most.saturating_sub(least) + 1)).max(1)
    }

    fn ids(&mut self, n: u64, vocabulary: u32) -> Vec<u32> {
        (0..n).map(|_| (self.next() % u64::from(vocabulary)) as u32).collect()
    }
}

impl LoadFlags {
    /// The requests, by when they are sent.
    fn requests(&self) -> Result<Vec<Asked>, Failure> {
        let (rate, ratio) =
            (self.request_rate.unwrap_or(f64::INFINITY), self.random_range_ratio.unwrap_or(0.0));
        if rate.is_nan() || rate <= 0.0 {
            bail!("--request-rate {rate}: give a number above 0, or inf");
        }
        if !(0.0..=1.0).contains(&ratio) {
            bail!("--random-range-ratio {ratio}: give a number from 0 to 1");
        }
        let vocabulary = self.random_vocab.unwrap_or(1000);
        let mut dice = Dice { seed: self.seed.unwrap_or(0), drawn: 0 };
        let prefix = dice.ids(self.random_prefix_len.unwrap_or(0).into(), vocabulary);
        let mut at = 0.0;
        let mut one = |_| {
            let input = dice.length(self.random_input_len.unwrap_or(1024), ratio);
            let output = dice.length(self.random_output_len.unwrap_or(128), ratio);
            let mut prompt = prefix.clone();
            prompt.extend(dice.ids(input, vocabulary));
            let asked =
                Asked { at: Duration::try_from_secs_f64(at).unwrap_or(Duration::MAX), prompt, output };
            at -= (1.0 - dice.unit()).ln() / rate;
            asked
        };
        Ok((0..self.num_prompts.unwrap_or(1000)).map(&mut one).collect())
    }

    /// Sends the load and prints what came of it.
    pub fn run(&self, url: &str, out: &mut dyn Write) -> Result<(), Failure> {
        let requests = self.requests()?;
        let created = self.save_result.as_ref().map(|path| {
            let file = File::create(path).map_err(|e| format!("{}: {e}", path.display()))?;
            Ok::<_, Failure>((path, file))
        });
        let saved = created.transpose()?;
        let at_once = self.max_concurrency.map_or(AT_ONCE, |n| n as usize).min(requests.len());
        let key = self.api_key.clone().or_else(|| std::env::var("ASTRAI_API_KEY").ok());
        let server = Server::find(url, key, self.model.clone(), at_once)?;
        // What does not work once is not tried a thousand times; and the server is warm.
        if let Some(why) = requests.first().and_then(|first| server.ask(first).error) {
            bail!("{url}: {why}");
        }
        let (answered, seconds) = send(&server, &requests, at_once)?;
        let figures = Figures {
            answered: &answered,
            seconds,
            goodput: &self.goodput,
            metrics: &self.percentile_metrics,
            percentiles: self.metric_percentiles.as_ref(),
        };
        let rate = self.request_rate.filter(|r| r.is_finite()).map_or(json!("inf"), |r| json!(r));
        let head = json!({
            "backend": "openai", "model_id": server.model, "num_prompts": requests.len(), "request_rate": rate,
            "max_concurrency": self.max_concurrency,
        });
        let mut told = figures.told(head);
        writeln!(out, "{told}")?;
        if let Some((path, mut file)) = saved {
            figures.add_each(&mut told);
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
fn send(server: &Server, requests: &[Asked], at_once: usize) -> Result<(Vec<Answered>, f64), Failure> {
    let next = AtomicUsize::new(0);
    let all = Mutex::new((vec![Answered::default(); requests.len()], 0));
    let progress = Mutex::new(Progress::new("sending requests"));
    let started = Instant::now();
    let client = || {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(asked) = requests.get(i) else { return };
            thread::sleep(asked.at.saturating_sub(started.elapsed()));
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

    fn ask(&self, asked: &Asked) -> Answered {
        let mut answer = Answered { input: asked.prompt.len(), ..Answered::default() };
        if let Err(why) = self.stream(asked, &mut answer) {
            answer.error = Some(why);
        }
        answer
    }

    /// Sends a request and reads its stream.
    fn stream(&self, asked: &Asked, answer: &mut Answered) -> Result<(), String> {
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
                    _ => answer.between.push(now - answer.whole),
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
