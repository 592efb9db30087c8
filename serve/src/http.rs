//! The server. In: connections from anywhere. Out: answers of the engine in the forms of OpenAI's and Anthropic's APIs, plain and
//! streamed, and what operators ask: health, readiness, metrics. Whatever comes over the wire is hostile until a field table, the
//! template's limits and the engine's own checks have passed it; whatever goes wrong is one error object with a status.
//!
//! A request is prepared (parsed, rendered, tokenised) off the asynchronous threads, a bounded number at a time, and then
//! waits in the engine's queue. Its answer lives in the future that writes the response: when the client leaves, hyper
//! drops that future, and the engine gives up the request within a step.

mod adapters;
mod anthropic;
mod api;
mod app;
mod batch;
mod body;
mod chat;
mod completions;
mod connections;
mod embeddings;
mod error;
mod fields;
mod forced;
mod generate;
mod keys;
mod logprobs;
mod metrics;
mod middleware;
mod models;
mod page;
mod params;
mod rates;
mod responses;
mod sse;
mod structured;
mod tags;
mod talk;
#[cfg(test)]
mod tests;
mod texts;
mod tls;
mod traces;
mod write_timeout;

use std::future::Future;
use std::io;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use crate::engine::Engine;
use crate::markup::CallFormat;
use crate::request::Sampling;
use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;
use app::App;
use axum::Router;
use connections::Times;
use traces::Exporter;

pub use adapters::{AdapterSettings, Loaded};
pub use connections::Listener;
pub use keys::Keys;
pub use rates::Rates;
pub use tls::Tls;
pub use traces::Collector;

/// What a server serves.
#[derive(Debug)]
pub struct Served {
    /// Answers the requests; ends with the server.
    pub engine: Engine,
    /// The model's.
    pub tokenizer: Tokenizer,
    /// The model's, if it has one; without, there are no chats.
    pub template: Option<ChatTemplate>,
    /// Ids of the model, at least one; the first is the one it is told by, the others are accepted too.
    pub names: Vec<String>,
    /// How.
    pub settings: HttpSettings,
}

/// How a server finds calls of tools in answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calls {
    /// As the model's chat template writes them.
    OfTemplate,
    /// In this format.
    Of(CallFormat),
    /// Not at all: they are text.
    Text,
}

impl FromStr for Calls {
    type Err = String;

    /// `auto`, `none`, or a format's name.
    fn from_str(name: &str) -> Result<Calls, String> {
        match name {
            "auto" => Ok(Calls::OfTemplate),
            "none" => Ok(Calls::Text),
            format => format.parse().map(Calls::Of),
        }
    }
}

/// How a server serves.
#[derive(Clone, Debug)]
pub struct HttpSettings {
    /// One of these must come with each request but `/`, `/health` and `/ready`; none asks for none.
    pub keys: Arc<Keys>,
    /// What each key may use in a minute.
    pub rates: Rates,
    /// Whether a line of JSON on standard error tells of each request.
    pub log: bool,
    /// Bytes of a request's body.
    pub body_limit: usize,
    /// Bytes of all bodies together that have not become requests yet; the first 64 KiB of each are not counted.
    pub bodies_limit: usize,
    /// How long requests may go on when the server is told to stop.
    pub shutdown_timeout: Duration,
    /// Origins whose pages may use the server from a browser; `*` allows all, none allows none.
    pub cors_origins: Vec<String>,
    /// Time for the head of a request, and between two requests of a connection.
    pub idle_timeout: Duration,
    /// Time for the body of a request.
    pub body_timeout: Duration,
    /// Comments go to streams that have been silent for so long, so that nothing between takes them for dead.
    pub keep_alive: Duration,
    /// Time in which a client must take something of what it is sent, or be left.
    pub stall_timeout: Duration,
    /// What a request gets that says nothing about it: a model's recommended temperature, say.
    pub sampling: Sampling,
    /// How the model writes calls of tools.
    pub calls: Calls,
    /// What encrypts connections; none leaves them plain.
    pub tls: Option<Tls>,
    /// Adapters of the model, where there is room for some.
    pub adapters: Option<AdapterSettings>,
    /// The OpenTelemetry collector that gets a span of each request, `http://HOST:PORT`.
    pub otlp_endpoint: Option<Collector>,
    /// Whether metrics are told under vLLM's names too.
    pub vllm_metrics: bool,
}

impl Default for HttpSettings {
    fn default() -> HttpSettings {
        HttpSettings {
            keys: Arc::default(),
            rates: Rates::default(),
            log: false,
            body_limit: 4 << 20,
            bodies_limit: 256 << 20,
            shutdown_timeout: Duration::from_secs(30),
            cors_origins: Vec::new(),
            idle_timeout: Duration::from_secs(75),
            body_timeout: Duration::from_secs(60),
            keep_alive: Duration::from_secs(12),
            stall_timeout: Duration::from_secs(60),
            sampling: Sampling::default(),
            calls: Calls::OfTemplate,
            tls: None,
            adapters: None,
            otlp_endpoint: None,
            vllm_metrics: false,
        }
    }
}

/// How a server ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It listens until its requests are done, and tells whoever comes that it ends.
    Leave,
    /// Another process listens at the same socket: this one leaves that to it, and finishes the requests of its connections.
    HandOver,
}

/// A server that has all it needs but connections: what is wrong with its settings is known.
#[derive(Debug)]
pub struct HttpServer {
    app: Arc<App>,
    engine: Engine,
    routes: Router,
}

impl HttpServer {
    /// Reads what the settings name.
    ///
    /// # Errors
    /// They name nothing, or what no header can hold.
    pub fn new(served: Served) -> io::Result<HttpServer> {
        let (app, engine) = App::new(served)?;
        let app = Arc::new(app);
        let routes = middleware::layered(api::routes(app.clone()), &app)?;
        Ok(HttpServer { app, engine, routes })
    }

    /// Serves until `stop` is ready. From then on the server takes no more requests and says so, or leaves them to another process,
    /// and finishes those it has; what is not finished after the shutdown timeout ends with an error of its own. Returns when all have
    /// been told.
    pub async fn serve(self, listener: impl Into<Listener>, stop: impl Future<Output = Ending>) {
        let HttpServer { app, engine, routes } = self;
        let (patience, times) = (app.settings.shutdown_timeout, Times::of(&app.settings));
        let tls = app.settings.tls.as_ref().map(Tls::acceptor);
        let ended = app.clone();
        let drain = async move |patience| {
            app.drain();
            // The engine's thread is waited for, and it tells every request the end.
            let _ = tokio::task::spawn_blocking(move || engine.drain(Some(patience))).await;
        };
        connections::accept(listener.into(), routes, tls, times, stop, patience, drain).await;
        let _ = tokio::task::spawn_blocking(move || ended.traces.as_ref().map(Exporter::flush)).await;
    }
}
