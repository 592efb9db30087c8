//! `astrai serve`: a model directory in, a server of OpenAI's API out, until a signal ends it. The server itself is the serving
//! crate's; here are its flags, its socket, and its end.

mod restart;
mod socket;
mod times;

use crate::failure::{Done, Failure, bail, say};
use crate::flags::{RoomFlags, SpeculateFlag, named};
use crate::progress::tell;
use astrai_builders::config::{Pooling, Slots};
use astrai_builders::{Cache, ModelConfig};
use astrai_engine::Machine;
use astrai_engine::adapters::Reader;
use astrai_engine::serving::{Published, Room, SEQUENCES};
use astrai_serve::engine::{AdapterId, Engine, Handle, Patch, Stats};
use astrai_serve::http::{
    AdapterSettings, Calls, Collector, Ending, HttpServer, HttpSettings, Keys, Listener, Loaded, Rates,
    Served, Tls,
};
use astrai_train::signals::Stop;
use clap::{Args, ValueEnum};
use serde_json::json;
use signal_hook::consts::SIGUSR2;
use std::collections::BTreeSet;
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

use restart::{State, Successor, notify_ready};
pub use socket::{Socket, listen};
use socket::{SocketFile, host, inherited, listen_at};
use times::TimeFlags;

/// This machine, for itself only.
pub const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Bytes of pages that are there before the first request, if these are no more than an eighth of what is free.
const POPULATED: u64 = 1 << 30;

/// How often a server looks for signals.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How often it tells what it did.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Values of `--embeddings`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PoolingName {
    /// The last token's final hidden state
    Last,
    /// The mean over all tokens
    Mean,
}

/// Serve a model over HTTP, with OpenAI's API
///
/// Chat and text completions, streamed or whole, many at once: /v1/chat/completions, /v1/completions, /v1/models, and /health,
/// /ready and /metrics for whoever operates it; at / is a page to talk to the model. Of an encoder, vectors of texts only. One line
/// on standard output says when it is ready and where. What a request leaves open (temperature, top_p, top_k, min_p,
/// repetition_penalty) is as the model's generation_config.json recommends. SIGINT and SIGTERM let it finish what it has and end;
/// a second one ends it at once. SIGUSR2 starts the same command again, and leaves the socket to it once it is ready; a socket
/// that the process is started with (LISTEN_FDS, as of systemd) takes the place of an address. While there are requests, a line every ten seconds on standard error says how it goes.
#[derive(Args)]
#[command(after_help = "Examples:
  astrai serve model/ --dtype bf16
  astrai serve model/ --embeddings mean
  astrai serve model/ --host 0.0.0.0 --port 80 --api-key \"$KEY\" --served-name gpt --max-seqs 64 --kv-memory 8GiB
  curl http://127.0.0.1:8000/v1/chat/completions -d '{\"model\": \"model\", \"messages\": [{\"role\": \"user\", \"content\": \"Hello.\"}]}'")]
pub struct Serve {
    /// A model directory
    model: PathBuf,
    /// Address to listen on, or a name that has one; 0.0.0.0 is all of this machine's
    #[arg(long, value_name = "ADDRESS", default_value_t = LOCAL, value_parser = host)]
    host: IpAddr,
    /// Port to listen on; 0 picks a free one
    #[arg(long, value_name = "N", default_value_t = 8000)]
    port: u16,
    /// Listen at this file, a UNIX socket, instead of an address; whoever may write to it may use the server
    #[arg(long, value_name = "PATH", conflicts_with_all = ["host", "port"])]
    unix_socket: Option<PathBuf>,
    /// Certificate in PEM, with those that vouch for it behind it: connections are encrypted
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The certificate's private key in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Name that requests call the model by; may be repeated [default: the folder's name]
    #[arg(long, value_name = "NAME")]
    served_name: Vec<String>,
    /// Key that requests must bring; may be repeated. Everybody on this machine can read a command line: give the key in the
    /// environment instead [default: none is asked for]
    #[arg(long, value_name = "KEY", env = "ASTRAI_API_KEY", hide_env_values = true)]
    api_key: Vec<String>,
    /// How the model writes calls of tools: hermes, llama3_json, mistral, deepseek_v3, glm4, harmony or qwen3_coder; auto finds it
    /// in the chat template, none leaves calls as text
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    tool_parser: Calls,
    /// File with more keys, one a line; a # at the beginning or after a space begins a remark. It is read again when it changes
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Requests a minute that each key may make; what is more is refused with 429 [default: any]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    requests_per_minute: Option<u32>,
    /// Tokens a minute, of prompts and answers, that each key may use [default: any]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    tokens_per_minute: Option<u32>,
    /// Tell of each request on standard error, as a line of JSON
    #[arg(long)]
    log_requests: bool,
    /// Also give vectors of texts, made of their final hidden states: /v1/embeddings, /v1/score, /v1/rerank
    #[arg(long, value_enum, value_name = "POOLING")]
    embeddings: Option<PoolingName>,
    /// Most answers computed at once
    #[arg(long, value_name = "N", default_value_t = SEQUENCES as u16, value_parser = clap::value_parser!(u16).range(1..=4096))]
    max_seqs: u16,
    /// Adapters at once, those of --adapter NAME=DIR and those that are loaded at run time [default: as many as are given]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    max_adapters: Option<u32>,
    /// Folder in which adapters lie that may be loaded at run time, by /v1/load_lora_adapter [default: none may]
    #[arg(long, value_name = "DIR", requires = "max_adapters")]
    adapter_folder: Option<PathBuf>,
    /// Greatest rank of an adapter that requests choose by name
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=512))]
    max_adapter_rank: u32,
    /// Most tokens in one step, of prompts and answers together [default: 64 a core, 256 where it has a matrix unit, 512 at most, on GPUs and with experts]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    max_batch_tokens: Option<u32>,
    /// Computes every prompt anew: pages of prompts are not kept for others that begin alike
    #[arg(long)]
    no_prefix_cache: bool,
    /// Answers that may wait, counting each of the `n` of a request; what comes then is refused with 429
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    queue: u32,
    /// Most tokens of the prompts of requests that wait; what comes then is refused with 429 [default: any]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    queue_tokens: Option<u32>,
    /// Origin whose pages may use the server from a browser (CORS), `https://app.example` say, or * for all; may be repeated
    /// [default: none]
    #[arg(long, value_name = "ORIGIN")]
    cors_origin: Vec<String>,
    /// Most bytes of a request's body; a larger one is refused with 413
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 20, value_parser = clap::value_parser!(u32).range(1..))]
    body_limit: u32,
    /// Most bytes of all bodies that are being received and read together, but for the first 64 KiB of each; beyond that
    /// requests are refused with 503
    #[arg(long, value_name = "BYTES", default_value_t = 256 << 20, value_parser = clap::value_parser!(u32).range(1..))]
    bodies_limit: u32,
    /// OpenTelemetry collector, http://HOST:PORT, that gets a span of each request, as JSON over HTTP to /v1/traces [default: none]
    #[arg(long, value_name = "URL")]
    otlp_endpoint: Option<Collector>,
    /// The line that says that it is ready as JSON
    #[arg(long)]
    json: bool,
    /// Tell the same in /metrics under vLLM's names too (`vllm:`, with model_name), for dashboards and autoscalers that read these
    #[arg(long)]
    vllm_metrics: bool,
    #[command(flatten)]
    speculate: SpeculateFlag,
    #[command(flatten)]
    room: RoomFlags,
    #[command(flatten)]
    times: TimeFlags,
}

impl Serve {
    /// Serves until a signal.
    pub fn run(self, out: &mut dyn Write) -> Done {
        if self.api_key.iter().chain(&self.served_name).chain(&self.cors_origin).any(|t| t.trim().is_empty())
        {
            bail!(
                "--api-key, ASTRAI_API_KEY, --served-name and --cors-origin may not be empty; leave them out"
            );
        }
        let restart = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(SIGUSR2, restart.clone()).map_err(|e| format!("signals: {e}"))?;
        // A port that is taken is known before the weights are read.
        let given = inherited(self.unix_socket.as_deref())?;
        let here = given.is_none();
        let socket = match (given, &self.unix_socket) {
            (Some(socket), _) => socket,
            (None, Some(path)) => listen_at(path)?,
            (None, None) => listen(self.host, self.port)?,
        };
        let keys = Keys::new(&self.api_key, self.api_key_file.as_deref()).map_err(|e| e.to_string())?;
        let keys = Arc::new(keys);
        let tls = self.tls_cert.as_deref().zip(self.tls_key.as_deref());
        let tls = tls.map(|(certificate, key)| Tls::read(certificate, key)).transpose()?;
        let named: Vec<(&str, &Path)> = self.room.adapter.iter().filter_map(|a| named(a)).collect();
        let slots = self.slots(&named)?;
        let merged = if named.is_empty() { self.room.merged()? } else { None };
        let published = Published::read_any(&self.model, merged, &mut tell())?;
        let published = self.room.stored(published);
        let machine = self.room.machine.machine()?;
        let room = Room {
            sequences: self.max_seqs.into(),
            tokens: self.max_batch_tokens.map(|n| n as usize),
            queue: self.queue as usize,
            queue_tokens: self.queue_tokens.map(|n| n as usize),
            prefix_cache: !self.no_prefix_cache,
            populated: POPULATED,
            speculation: self.speculate.asked(),
            pooling: self.embeddings.map(|pooling| match pooling {
                PoolingName::Last => Pooling::Last,
                PoolingName::Mean => Pooling::Mean,
            }),
            adapters: slots,
            ..self.room.of_one()
        };
        let (reader, patches) = adapters(&published, &room, &named, &machine)?;
        let engine =
            published.start_drafted(self.speculate.draft.as_deref(), &room, &machine, &mut tell())?;
        let loaded = load(&engine, &named, patches)?;
        let (context, stats) = (engine.handle().limits().context, engine.handle().stats());
        let names = match self.served_name.is_empty() {
            true => vec![published.name()],
            false => {
                let mut seen = BTreeSet::new();
                self.served_name.into_iter().filter(|name| seen.insert(name.clone())).collect()
            }
        };
        if let Some((name, _)) = loaded.iter().find(|(name, _)| names.contains(name)) {
            bail!("--adapter {name}: the model itself has this name; give another");
        }
        let open = self.adapter_folder;
        let adapters = reader.map(|reader| AdapterSettings {
            slots: slots.map_or(0, |s| s.slots as u32),
            loaded,
            read: Arc::new(move |folder: &Path| reader.read(&inside(open.as_deref(), folder)?)),
        });
        let name = names[0].clone();
        let settings = HttpSettings {
            keys: keys.clone(),
            rates: Rates { requests: self.requests_per_minute, tokens: self.tokens_per_minute },
            log: self.log_requests,
            cors_origins: self.cors_origin,
            calls: self.tool_parser,
            body_limit: self.body_limit as usize,
            bodies_limit: self.bodies_limit as usize,
            tls,
            adapters,
            otlp_endpoint: self.otlp_endpoint,
            vllm_metrics: self.vllm_metrics,
            ..self.times.of(HttpSettings::default())
        };
        let open = here && self.unix_socket.is_none() && self.host.is_unspecified() && !keys.are_wanted();
        let server = Server::start(socket, published.served(engine, names, settings))?;
        if open {
            say("warning: whoever reaches this machine can use the server; --api-key asks for a key");
        }
        let url = server.url().to_owned();
        if self.json {
            let line = json!({"url": url, "pid": std::process::id(), "model": name, "context": context, "max_seqs": room.sequences, "kv_tokens": stats.pages * Cache::PAGE,
                "kv_cache_dtype": stats.page.name, "kv_bytes": stats.page.all});
            writeln!(out, "{line}")?;
        } else {
            writeln!(
                out,
                "{name} is served on {url} (a context of {context} tokens, {} answers at once)",
                room.sequences
            )?;
        }
        out.flush()?;
        notify_ready();
        server.wait_for_signal(&restart)?;
        Ok(ExitCode::SUCCESS)
    }
}

impl Serve {
    /// Room for adapters that requests choose by name, where there is to be some.
    fn slots(&self, named: &[(&str, &Path)]) -> Result<Option<Slots>, Failure> {
        let given = named.len();
        if given > 0 && given < self.room.adapter.len() {
            bail!(
                "--adapter: an adapter that is merged cannot be beside those of a name; give all of them names, NAME=DIR"
            );
        }
        let mut names: Vec<&str> = named.iter().map(|(name, _)| *name).collect();
        names.sort_unstable();
        if names.iter().any(|name| name.is_empty()) || names.windows(2).any(|two| two[0] == two[1]) {
            bail!("--adapter NAME=DIR: names must differ, and may not be empty");
        }
        let slots = self.max_adapters.map_or(given, |n| n as usize);
        if slots < given {
            bail!("--max-adapters {slots}: {given} adapters are given; give more, or leave it out");
        }
        // Kernels add in pairs: a slot begins with one wherever it lies.
        let rank = (self.max_adapter_rank as usize).next_multiple_of(2);
        Ok((slots > 0).then_some(Slots { slots, rank }))
    }
}

/// What reads adapters, and those that are given: what is wrong with one is known before the weights are read.
fn adapters(
    published: &Published,
    room: &Room,
    named: &[(&str, &Path)],
    machine: &Machine,
) -> Result<(Option<Arc<Reader>>, Vec<Patch>), Failure> {
    let Some(slots) = room.adapters else { return Ok((None, vec![])) };
    let config = ModelConfig { adapters: Some(slots), ..published.model.config.clone() };
    let reader = Reader::new(&config, room.storage, machine.backend())?;
    let patches = named.iter().map(|(_, folder)| reader.read(folder)).collect::<Result<_, _>>()?;
    Ok((Some(Arc::new(reader)), patches))
}

/// The folder of an adapter that a request names: of the operator's folder and no other.
fn inside(open: Option<&Path>, folder: &Path) -> Result<PathBuf, String> {
    let none = "no adapter is loaded on request; start the server with --adapter-folder DIR";
    let open = open.and_then(|open| open.canonicalize().ok()).ok_or(none)?;
    let found = open.join(folder).canonicalize().ok().filter(|path| path.starts_with(&open));
    // What is elsewhere on the machine is not to be found out.
    found.ok_or_else(|| "is no folder inside the server's --adapter-folder".into())
}

/// Gives each adapter a slot.
fn load(engine: &Engine, named: &[(&str, &Path)], patches: Vec<Patch>) -> Result<Vec<Loaded>, Failure> {
    let mut loaded = Vec::new();
    for ((slot, patch), (name, _)) in (0..).zip(patches).zip(named) {
        let adapter = AdapterId { slot, number: slot.into() };
        let written = engine.handle().adapt(adapter, patch).blocking_recv();
        written.map_err(|_| "the engine ended before an adapter was loaded")??;
        loaded.push((name.to_string(), adapter));
    }
    Ok(loaded)
}

/// A server on threads of its own.
pub struct Server {
    url: String,
    file: Option<SocketFile>,
    /// The socket, for a server that takes it over.
    descriptor: OwnedFd,
    engine: Handle,
    stop: oneshot::Sender<Ending>,
    thread: JoinHandle<()>,
}

impl Server {
    /// Starts to serve.
    pub fn start(socket: Socket, served: Served) -> Result<Server, Failure> {
        let failed = |e: io::Error| Failure::Message(format!("the server did not start: {e}"));
        let (engine, encrypted) = (served.engine.handle(), served.settings.tls.is_some());
        let server = HttpServer::new(served).map_err(failed)?;
        let descriptor = socket.descriptor().try_clone_to_owned().map_err(failed)?;
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(failed)?;
        let inside = runtime.enter();
        let (listener, url, file) = match socket {
            Socket::Tcp(listener) => {
                let scheme = if encrypted { "https" } else { "http" };
                let url = format!("{scheme}://{}", listener.local_addr().map_err(failed)?);
                (tokio::net::TcpListener::from_std(listener).map(Listener::Tcp), url, None)
            }
            Socket::Unix(listener, file) => {
                let at = listener.local_addr().map_err(failed)?;
                let url = format!("unix:{}", at.as_pathname().unwrap_or(Path::new("")).display());
                (tokio::net::UnixListener::from_std(listener).map(Listener::Unix), url, file)
            }
        };
        let listener = listener.map_err(failed)?;
        drop(inside);
        let (stop, stopped) = oneshot::channel();
        let work = move || {
            let stop = async { stopped.await.unwrap_or(Ending::Leave) };
            runtime.block_on(async { server.serve(listener, stop).await })
        };
        let thread = thread::Builder::new().name("server".into()).spawn(work).map_err(failed)?;
        Ok(Server { url, file, descriptor, engine, stop, thread })
    }

    /// Where it listens.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Lets it finish what it has, and waits for its end.
    pub fn stop(self) -> Result<(), Failure> {
        self.end(Ending::Leave)
    }

    fn end(mut self, ending: Ending) -> Result<(), Failure> {
        // The port is closed when the server closes it.
        drop(self.descriptor);
        if ending == Ending::HandOver {
            // Its file is the other server's.
            if let Some(file) = self.file.take() {
                std::mem::forget(file);
            }
        }
        // A server that has ended by itself is told nothing; how it ended comes next.
        let _ = self.stop.send(ending);
        match self.thread.join() {
            Ok(()) => Ok(()),
            Err(_) => Err("the server panicked; please report this".into()),
        }
    }

    /// Serves until SIGINT or SIGTERM, then stops. A second signal ends the process at once. An engine that fails is an error:
    /// whoever watches the process can start it anew. When `restart` is set, the same command is started again; once that server
    /// is ready, this one leaves the socket to it.
    pub fn wait_for_signal(self, restart: &AtomicBool) -> Result<(), Failure> {
        let stop = Stop::on_signals().map_err(|e| format!("signals: {e}"))?;
        let (mut told, mut at) = (self.engine.stats(), Instant::now());
        let (mut successor, mut ending) = (None::<Successor>, Ending::Leave);
        while !stop.requested() && !self.thread.is_finished() && self.engine.dead().is_none() {
            thread::sleep(POLL_INTERVAL);
            if restart.swap(false, Ordering::Relaxed) && successor.is_none() {
                successor = Successor::start(&self.descriptor);
            }
            match successor.as_mut().map(Successor::state) {
                Some(State::Ready) => {
                    ending = Ending::HandOver;
                    break;
                }
                Some(State::Gone) => successor = None,
                Some(State::Starting) | None => {}
            }
            let (now, passed) = (self.engine.stats(), at.elapsed());
            if passed >= REPORT_INTERVAL {
                activity(&told, &now, passed).iter().for_each(|line| say(line));
                (told, at) = (now, Instant::now());
            }
        }
        if ending == Ending::Leave {
            // One that is not ready yet must not begin to answer, for it ends with this one.
            drop(successor.take());
        }
        let engine = self.engine.clone();
        self.end(ending)?;
        activity(&told, &engine.stats(), at.elapsed()).iter().for_each(|line| say(line));
        match engine.dead() {
            Some(why) => Err(why.into()),
            None => Ok(()),
        }
    }
}

/// What was done between two looks, if anything.
fn activity(before: &Stats, now: &Stats, passed: Duration) -> Option<String> {
    let new = |of: fn(&Stats) -> u64| of(now).saturating_sub(of(before));
    let [finished, cancelled, failed] = [new(|s| s.finished), new(|s| s.cancelled), new(|s| s.failed)];
    let (prompts, output) = (new(|s| s.prompt_tokens), new(|s| s.output_tokens));
    if finished + cancelled + failed + prompts + output == 0 {
        return None;
    }
    let rate = output as f64 / passed.as_secs_f64().max(1e-3);
    Some(format!(
        "{finished} requests answered, {cancelled} cancelled, {failed} failed; tokens: {prompts} in, {output} out, {rate:.1} a second; \
         {} running, {} waiting",
        now.running,
        now.waiting.max(now.queued),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_are_loaded_from_one_folder_only() {
        let dir = tempfile::tempdir().unwrap();
        let [open, other] = ["open", "other"].map(|name| dir.path().join(name));
        std::fs::create_dir_all(open.join("poet")).unwrap();
        std::fs::create_dir_all(&other).unwrap();
        std::os::unix::fs::symlink(&other, open.join("link")).unwrap();
        let of = |folder: &Path| inside(Some(&open), folder);
        let poet = open.join("poet").canonicalize().unwrap();
        assert_eq!((of(Path::new("poet")), of(&open.join("poet"))), (Ok(poet.clone()), Ok(poet)));
        let lines: Vec<_> =
            ["link", "../other", "none", "/", "/etc"].map(|path| of(Path::new(path)).unwrap_err()).into();
        assert!(lines.iter().all(|line| *line == lines[0]), "{lines:?}");
        assert!(inside(None, Path::new("poet")).unwrap_err().contains("--adapter-folder"));
    }

    #[test]
    fn a_server_that_does_nothing_says_nothing() {
        let before = Stats { finished: 3, output_tokens: 50, ..Stats::default() };
        assert_eq!(activity(&before, &before, REPORT_INTERVAL), None);
        let now = Stats { finished: 4, output_tokens: 150, prompt_tokens: 7, running: 2, ..before };
        let line = activity(&before, &now, REPORT_INTERVAL).unwrap();
        assert_eq!(
            line,
            "1 requests answered, 0 cancelled, 0 failed; tokens: 7 in, 100 out, 10.0 a second; 2 running, 0 waiting"
        );
    }
}
