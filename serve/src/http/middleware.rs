//! What every request passes: an id, the rules for browsers, the key. Outside all of it stands the guard against panics.

use std::io::{self, Write};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Version, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http_body::{Body as _, Frame, SizeHint};
use serde_json::{Value, json};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowHeaders, AllowOrigin, Any, CorsLayer};

use super::app::{App, now};
use super::error::ApiError;
use super::keys::KeyHash;
use super::traces::Trace;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Where a request stands in a trace.
const TRACEPARENT: &str = "traceparent";

/// Tells clients of Anthropic's API from those of OpenAI's.
pub const VERSION: &str = "anthropic-version";

/// Of the ids that clients give.
const LONGEST_ID: usize = 128;

/// Paths that are counted by themselves.
pub const PATHS: [&str; 21] = [
    "/health",
    "/ready",
    "/metrics",
    "/openapi.json",
    "/tokenize",
    "/tokenizer_info",
    "/detokenize",
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
];

/// A request as it came, for whoever answers it.
#[derive(Debug)]
pub struct Incoming {
    /// Its id.
    pub id: String,
    /// Why the answer broke off that had begun.
    pub failure: OnceLock<String>,
}

/// Who calls: the hash of the key that was given, where keys are asked for.
#[derive(Clone, Copy, Debug)]
pub struct Caller(pub Option<KeyHash>);

impl Caller {
    /// By which the engine tells callers apart.
    pub fn number(self) -> u64 {
        self.0.map_or(0, |hash| hash.iter().take(8).fold(0, |n, b| n << 8 | u64::from(*b)))
    }
}

/// The routes within the middleware.
pub fn layered(routes: Router, app: &Arc<App>) -> io::Result<Router> {
    let mut router = routes.layer(middleware::from_fn_with_state(app.clone(), key));
    if let Some(cors) = cors(&app.settings.cors_origins)? {
        router = router.layer(cors);
    }
    let panicked =
        |_| ApiError::internal("the server failed on this request; please report it").into_response();
    let router = router.layer(CatchPanicLayer::custom(panicked));
    Ok(router.layer(middleware::from_fn_with_state(app.clone(), identify)))
}

fn cors(origins: &[String]) -> io::Result<Option<CorsLayer>> {
    if origins.is_empty() {
        return Ok(None);
    }
    let origin = if origins.iter().any(|o| o == "*") {
        AllowOrigin::any()
    } else {
        let parse = |o: &String| {
            HeaderValue::from_str(o)
                .map_err(|_| io::Error::other(format!("{o:?} is no origin; give https://host")))
        };
        AllowOrigin::list(origins.iter().map(parse).collect::<io::Result<Vec<_>>>()?)
    };
    // A star would leave out the header that has the key.
    let headers = AllowHeaders::mirror_request();
    let cors = CorsLayer::new().allow_origin(origin).allow_methods(Any).allow_headers(headers);
    Ok(Some(cors.expose_headers([REQUEST_ID, header::RETRY_AFTER])))
}

/// Gives the response the id that the request came with, or one of ours.
async fn identify(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let given = request.headers().get(&REQUEST_ID).filter(|id| {
        let plain = |b: &u8| b.is_ascii_alphanumeric() || b"-_.:".contains(b);
        (1..=LONGEST_ID).contains(&id.len()) && id.as_bytes().iter().all(plain)
    });
    let id = given.cloned().or_else(|| HeaderValue::from_str(&format!("req-{}", app.new_id())).ok());
    let told = id.as_ref().and_then(|id| id.to_str().ok()).unwrap_or_default().to_owned();
    let incoming = Arc::new(Incoming { id: told, failure: OnceLock::new() });
    request.extensions_mut().insert(incoming.clone());
    let path = request.uri().path().trim_end_matches('/');
    let (method, started) = (request.method().clone(), Instant::now());
    let anthropic = speaks_anthropic(path, request.headers());
    let path = PATHS.into_iter().find(|known| *known == path).unwrap_or("other");
    let traceparent = request.headers().get(TRACEPARENT).and_then(|value| value.to_str().ok());
    let trace = match method == Method::POST {
        true => Trace::of(&app, method.as_str(), path, traceparent),
        false => Trace::default(),
    };
    request.extensions_mut().insert(trace.clone());
    // Servers behind others that take a different one of two would be told different requests.
    let hosts = request.headers().get_all(header::HOST).iter().count();
    let mut encodings = request.headers().get_all(header::CONTENT_ENCODING).iter();
    let encoded = encodings.find(|encoding| !encoding.as_bytes().eq_ignore_ascii_case(b"identity"));
    let mut response = match encoded {
        _ if hosts > 1 || hosts == 0 && request.version() >= Version::HTTP_11 => {
            ApiError::body(format!("a request has one Host header, not {hosts}")).into_response()
        }
        Some(encoding) => {
            let what = format!("a body in the encoding {encoding:?} is not read; send it as it is");
            ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, what).into_response()
        }
        None => next.run(request).await,
    };
    let status = response.status().as_u16();
    app.metrics.response(path, status);
    trace.answered(status, response.extensions().get::<ApiError>().map(|why| why.message.as_str()));
    if let Some(value) = trace.traceparent().and_then(|value| HeaderValue::try_from(value).ok()) {
        response.headers_mut().insert(TRACEPARENT, value);
    }
    let line = app.settings.log.then(|| Line::of(&method, path, &response, incoming, started));
    if let Some(why) = response.extensions_mut().remove::<ApiError>().filter(|_| anthropic) {
        response = in_anthropics_form(response, &why, id.as_ref());
    }
    if let Some(id) = id {
        if anthropic {
            response.headers_mut().insert(HeaderName::from_static("request-id"), id.clone());
        }
        response.headers_mut().insert(REQUEST_ID, id);
    }
    match line {
        Some(line) => {
            response.map(|body| Body::new(Logged { whole: line.head || body.is_end_stream(), body, line }))
        }
        None => response,
    }
}

/// What is told of a request on a line, when its answer has ended: what it was, who asked (the beginning of the hash of a key), how long that
/// took, and what went wrong.
struct Line {
    incoming: Arc<Incoming>,
    fields: Value,
    error: Option<String>,
    /// Whether nobody waits for a body.
    head: bool,
    started: Instant,
}

impl Line {
    fn of(
        method: &Method,
        path: &str,
        response: &Response,
        incoming: Arc<Incoming>,
        started: Instant,
    ) -> Line {
        let caller = response.extensions().get::<Caller>().and_then(|caller| caller.0);
        let key = caller.map(|hash| hash[..4].iter().map(|byte| format!("{byte:02x}")).collect::<String>());
        let fields = json!({
            "request_id": incoming.id, "method": method.as_str(), "path": path, "status": response.status().as_u16(), "key": key,
        });
        let error = response.extensions().get::<ApiError>().map(|why| why.message.clone());
        Line { incoming, fields, error, head: method == Method::HEAD, started }
    }
}

/// A response's body, of whose end a line tells.
struct Logged {
    body: Body,
    line: Line,
    /// Whether all of it was taken.
    whole: bool,
}

impl http_body::Body for Logged {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        self.whole |= matches!(frame, Poll::Ready(None)) || self.body.is_end_stream();
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Logged {
    fn drop(&mut self) {
        let left = || (!self.whole).then(|| "the client has left".to_owned());
        let broke_off = self.line.incoming.failure.get().cloned();
        let Line { fields, error, started, .. } = &mut self.line;
        fields["time"] = json!(now());
        fields["seconds"] = json!(started.elapsed().as_secs_f64());
        fields["error"] = json!(error.take().or(broke_off).or_else(left));
        // Whoever does not read it does not want it.
        let _ = writeln!(io::stderr(), "{fields}");
    }
}

/// Whether errors are to have the form of Anthropic's API.
fn speaks_anthropic(path: &str, headers: &HeaderMap) -> bool {
    path.starts_with("/v1/messages") || path.starts_with("/v1/models") && headers.contains_key(VERSION)
}

/// An error in that form; what was refused for want of room has the status by which these clients know it.
fn in_anthropics_form(response: Response, why: &ApiError, id: Option<&HeaderValue>) -> Response {
    let body = why.anthropic(id.and_then(|id| id.to_str().ok()));
    let mut new = super::api::json(&body);
    let overloaded = StatusCode::from_u16(529).ok().filter(|_| why.status == StatusCode::SERVICE_UNAVAILABLE);
    *new.status_mut() = overloaded.unwrap_or(response.status());
    let of_body = |name: &HeaderName| [header::CONTENT_TYPE, header::CONTENT_LENGTH].contains(name);
    for (name, value) in response.headers().iter().filter(|(name, _)| !of_body(name)) {
        new.headers_mut().append(name.clone(), value.clone());
    }
    new
}

/// Lets in who has a key. Whether the server lives is no secret, nor is its page, which asks for the key.
async fn key(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let open = ["", "/health", "/ready"].contains(&request.uri().path().trim_end_matches('/'));
    let headers = request.headers();
    let bearer = headers.get(header::AUTHORIZATION).and_then(|v| {
        let (scheme, key) = v.as_bytes().split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
    });
    let given = bearer.or_else(|| headers.get("x-api-key").map(HeaderValue::as_bytes));
    let caller = given.and_then(|key| app.keys.check(key));
    if app.keys.are_wanted() && caller.is_none() && !open && request.method() != Method::OPTIONS {
        let message = match given {
            Some(_) => "the API key is not one of this server's",
            None => "an API key is missing; send `Authorization: Bearer KEY` or `x-api-key: KEY`",
        };
        return ApiError::new(StatusCode::UNAUTHORIZED, message).into_response();
    }
    if request.method() == Method::POST
        && let Err(why) = app.limiter.enter(caller)
    {
        return why.into_response();
    }
    request.extensions_mut().insert(Caller(caller));
    let mut response = next.run(request).await;
    response.extensions_mut().insert(Caller(caller));
    response
}
