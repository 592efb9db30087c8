//! Traces for OpenTelemetry. In: requests, with where they stand in a trace of their clients' (W3C Trace Context). Out: a span of each, in the terms
//! of the conventions for generative models, as OTLP in JSON over HTTP. A thread of its own sends them; what a collector does not take
//! in time is left out, and no request waits for it.

use std::str::FromStr;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{fmt, io};

use serde_json::{Map, Value, json};
use ureq::Agent;

use super::app::App;
use super::params::Params;
use crate::engine::Usage;

/// Spans that wait to be sent, at most.
const WAITING: usize = 4096;

/// Spans of a message to the collector, at most.
const TOGETHER: usize = 512;

/// Time in which spans gather.
const GATHER: Duration = Duration::from_millis(500);

/// Time for the collector to take a message, and for the last ones when the server ends.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the thread is sent.
enum Message {
    Span(Value),
    /// All that came before is to be sent; then the sender is dropped.
    Flush(SyncSender<()>),
}

/// Where a collector takes spans. It is read from the collector's address as `OTEL_EXPORTER_OTLP_ENDPOINT` has it: without `/v1/traces`.
#[derive(Clone, Debug)]
pub struct Collector(String);

impl FromStr for Collector {
    type Err = &'static str;

    fn from_str(endpoint: &str) -> Result<Collector, &'static str> {
        if !endpoint.starts_with("http://") || endpoint.len() < 8 {
            return Err("the collector's address must be http://HOST:PORT");
        }
        let base = endpoint.trim_end_matches('/').trim_end_matches("/v1/traces");
        Ok(Collector(format!("{base}/v1/traces")))
    }
}

/// The way to a collector.
pub struct Exporter(SyncSender<Message>);

impl fmt::Debug for Exporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Exporter")
    }
}

impl Exporter {
    /// To a collector, in the name of a service.
    ///
    /// # Errors
    /// There is no thread.
    pub fn start(Collector(url): &Collector, service: &str) -> io::Result<Exporter> {
        let agent: Agent = Agent::config_builder().timeout_global(Some(PATIENCE)).build().into();
        let (send, receive) = sync_channel(WAITING);
        let (url, service) = (url.clone(), service.to_owned());
        Builder::new().name("traces".into()).spawn(move || export(&receive, &agent, &url, &service))?;
        Ok(Exporter(send))
    }

    /// Waits until all is sent, or for as long as a collector may take.
    pub fn flush(&self) {
        let (sent, all) = sync_channel(1);
        if self.0.try_send(Message::Flush(sent)).is_ok() {
            // A collector that takes longer does not get the rest.
            let _ = all.recv_timeout(PATIENCE);
        }
    }
}

/// Sends spans until nobody makes any.
fn export(receive: &Receiver<Message>, agent: &Agent, url: &str, service: &str) {
    let mut fails = false;
    while let Ok(first) = receive.recv() {
        let (mut spans, mut flush) = (Vec::new(), None);
        let (mut next, until) = (Some(first), Instant::now() + GATHER);
        while let Some(message) = next {
            match message {
                Message::Span(span) => spans.push(span),
                Message::Flush(sent) => flush = Some(sent),
            }
            let more = flush.is_none() && spans.len() < TOGETHER;
            next = more
                .then(|| receive.recv_timeout(until.saturating_duration_since(Instant::now())).ok())
                .flatten();
        }
        if !spans.is_empty() {
            let sent = agent.post(url).content_type("application/json").send(message(spans, service));
            if let (Err(e), false) = (&sent, fails) {
                // Said once, until it works again: whoever does not read it does not want it.
                let _ = io::Write::write_all(
                    &mut io::stderr(),
                    format!("astrai: warning: {url}: {e}; spans are left out\n").as_bytes(),
                );
            }
            fails = sent.is_err();
        }
        drop(flush);
    }
}

/// An `ExportTraceServiceRequest`.
fn message(spans: Vec<Value>, service: &str) -> String {
    let resource = json!([attribute("service.name", &json!(service))]);
    let scope = json!({"name": "astrai", "version": env!("CARGO_PKG_VERSION")});
    let spans = json!([{"scope": scope, "spans": spans}]);
    json!({"resourceSpans": [{"resource": {"attributes": resource}, "scopeSpans": spans}]}).to_string()
}

/// An attribute as OTLP writes it: integers of 64 bits are texts.
fn attribute(key: &str, value: &Value) -> Value {
    let of = |value: &Value| match value {
        Value::String(text) => json!({"stringValue": text}),
        Value::Bool(is) => json!({"boolValue": is}),
        Value::Number(n) if n.is_f64() => json!({"doubleValue": n}),
        other => json!({"intValue": other.to_string()}),
    };
    let value = match value {
        Value::Array(list) => json!({"arrayValue": {"values": list.iter().map(of).collect::<Vec<_>>()}}),
        one => of(one),
    };
    json!({"key": key, "value": value})
}

/// The span of a request, if somebody wants it; sent when the last clone is dropped, which is when the answer has been written or its client
/// has left.
#[derive(Clone, Debug, Default)]
pub struct Trace(Option<Arc<Span>>);

#[derive(Debug)]
struct Span {
    app: Arc<App>,
    /// In hexadecimal, as its parent's is.
    trace: String,
    id: String,
    parent: Option<String>,
    started: SystemTime,
    told: Mutex<Told>,
}

/// What is told of a request.
#[derive(Debug, Default)]
struct Told {
    name: String,
    attributes: Map<String, Value>,
    finish_reasons: Vec<Value>,
    error: Option<String>,
}

impl Trace {
    /// Of a request with this `traceparent`, if it has one. None where nobody takes spans, or where its client wants none.
    pub fn of(app: &Arc<App>, method: &str, path: &str, traceparent: Option<&str>) -> Trace {
        if app.traces.is_none() {
            return Trace::default();
        }
        let parent = traceparent.and_then(parsed);
        if parent.as_ref().is_some_and(|(.., sampled)| !sampled) {
            return Trace::default();
        }
        let (trace, parent) = match parent {
            Some((trace, parent, _)) => (trace, Some(parent)),
            None => (format!("{}{}", app.new_id(), &app.new_id()[8..16]), None),
        };
        let told = Told { name: format!("{method} {path}"), ..Told::default() };
        let id = app.new_id()[8..].to_owned();
        let span =
            Span { app: app.clone(), trace, id, parent, started: SystemTime::now(), told: Mutex::new(told) };
        let trace = Trace(Some(Arc::new(span)));
        trace.tell(|told| {
            told.attributes.insert("http.request.method".into(), method.into());
            told.attributes.insert("url.path".into(), path.into());
        });
        trace
    }

    fn tell(&self, tell: impl FnOnce(&mut Told)) {
        if let Some(span) = &self.0 {
            tell(&mut span.told.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// The header by which whoever comes next in the trace is told of this span.
    pub fn traceparent(&self) -> Option<String> {
        self.0.as_ref().map(|span| format!("00-{}-{}-01", span.trace, span.id))
    }

    /// What the request asks for; `id` is its answer's.
    pub fn asks(&self, operation: &str, id: &str, params: &Params) {
        self.tell(|told| {
            told.name = format!("{operation} {}", params.model);
            let sampling = &params.sampling;
            let all = json!({
                "gen_ai.operation.name": operation, "gen_ai.provider.name": "astrai", "gen_ai.response.id": id,
                "gen_ai.request.model": params.model, "gen_ai.response.model": params.model,
                "gen_ai.request.choice.count": params.n, "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.request.temperature": f64::from(sampling.temperature), "gen_ai.request.top_p": f64::from(sampling.top_p),
                "gen_ai.request.seed": sampling.seed.map(|seed| seed as i64), "gen_ai.request.stream": params.stream.is_some(),
            });
            let given = all.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
            told.attributes.extend(given.map(|(key, value)| (key.clone(), value.clone())));
        });
    }

    /// A choice ended.
    pub fn ends(&self, reason: &'static str) {
        self.tell(|told| told.finish_reasons.push(reason.into()));
    }

    /// A prompt's choices have ended.
    pub fn uses(&self, usage: &Usage) {
        self.tell(|told| {
            for (key, n) in [("input", usage.prompt), ("output", usage.output)] {
                let key = format!("gen_ai.usage.{key}_tokens");
                let before = told.attributes.get(&key).and_then(Value::as_u64).unwrap_or(0);
                told.attributes.insert(key, json!(before + n as u64));
            }
            let queued = json!(usage.queued.as_secs_f64());
            told.attributes.insert("gen_ai.latency.time_in_queue".into(), queued);
            if let Some(first) = usage.first_token {
                let first = json!(first.as_secs_f64());
                told.attributes.insert("gen_ai.latency.time_to_first_token".into(), first);
            }
        });
    }

    /// How the response began.
    pub fn answered(&self, status: u16, error: Option<&str>) {
        self.tell(|told| {
            told.attributes.insert("http.response.status_code".into(), status.into());
            if status >= 400 {
                told.attributes.insert("error.type".into(), status.to_string().into());
                told.error = Some(error.unwrap_or_default().into());
            }
        });
    }

    /// Why there is no answer, or no more of it.
    pub fn fails(&self, kind: &str, why: &str) {
        self.tell(|told| {
            told.attributes.insert("error.type".into(), kind.into());
            told.error = Some(why.into());
        });
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        let Some(exporter) = &self.app.traces else { return };
        let nanos = |at: SystemTime| at.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos().to_string();
        let told = self.told.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !told.finish_reasons.is_empty() {
            let reasons = std::mem::take(&mut told.finish_reasons);
            told.attributes.insert("gen_ai.response.finish_reasons".into(), reasons.into());
        }
        let attributes: Vec<Value> =
            told.attributes.iter().map(|(key, value)| attribute(key, value)).collect();
        let mut span = json!({
            "traceId": self.trace, "spanId": self.id, "name": told.name, "kind": 2,
            "startTimeUnixNano": nanos(self.started), "endTimeUnixNano": nanos(SystemTime::now()),
            "attributes": attributes, "status": {},
        });
        if let Some(parent) = &self.parent {
            span["parentSpanId"] = json!(parent);
        }
        if let Some(why) = &told.error {
            span["status"] = json!({"code": 2, "message": why});
        }
        // Where too many wait, the collector is too slow.
        let _ = exporter.0.try_send(Message::Span(span));
    }
}

/// Trace, span and whether the client keeps it, of a `traceparent`; none of what is not one.
fn parsed(header: &str) -> Option<(String, String, bool)> {
    let mut parts = header.split('-');
    let [version, trace, span, flags] = std::array::from_fn(|_| parts.next().unwrap_or(""));
    let hex = |part: &str, n: usize| {
        part.len() == n && part.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
    };
    let some = |part: &str| part.bytes().any(|b| b != b'0');
    let known = hex(version, 2) && version != "ff" && (version != "00" || parts.next().is_none());
    let whole = known && hex(trace, 32) && hex(span, 16) && hex(flags, 2) && some(trace) && some(span);
    let sampled = u8::from_str_radix(flags, 16).is_ok_and(|flags| flags & 1 == 1);
    whole.then(|| (trace.to_owned(), span.to_owned(), sampled))
}
