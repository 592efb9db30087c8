//! From a body to a response, the same for chats and completions: read and prepared apart from the asynchronous threads,
//! submitted, then streamed or collected.

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use http_body::Body as _;
use serde_json::{Value, json};
use std::future::poll_fn;
use std::ops::Deref;
use std::pin::Pin;
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

use super::app::{App, now};
use super::batch::{Batch, Progress};
use super::error::ApiError;
use super::fields::Fields;
use super::middleware::Caller;
use super::params::{Params, StreamOptions};
use super::sse;
use crate::answer::{Delta, Ended};
use crate::engine::Usage;
use crate::request::Request;

/// Choices of a request, over all its prompts.
const MOST_CHOICES: usize = 256;

/// Log-probabilities of a request.
const MOST_LOGPROBS: usize = 1 << 20;

/// The beginning of a body that is not counted among all bodies: ordinary requests are never refused for the large ones.
const FREE: usize = 64 << 10;

/// Bodies whose memory is given back to the system.
const LARGE: usize = 1 << 20;

/// Time for a body to come.
const BODY_TIME: Duration = Duration::from_secs(60);

/// An endpoint that generates: what is its own in reading a request and in writing an answer.
pub trait Endpoint: Send + Unpin + Sized + 'static {
    /// What the ids of its answers begin with.
    const PREFIX: &'static str;

    /// The field that has the prompt.
    const PROMPT: &'static str;

    /// The type of a plain response.
    const OBJECT: &'static str;

    /// The type of a chunk of a stream.
    const CHUNK: &'static str;

    /// Reads the fields that are this endpoint's own; gives the prompts.
    ///
    /// # Errors
    /// A field is wrong, or there is no prompt in it.
    fn read(fields: &mut Fields, params: &mut Params, app: &App) -> Result<(Self, Vec<Vec<u32>>), ApiError>;

    /// A choice of a plain response.
    fn whole(&mut self, head: &Head, choice: Delta) -> Value;

    /// Choices that a stream begins with, each in a chunk of its own.
    fn begin(&mut self, head: &Head) -> Vec<Value>;

    /// What is new of a choice, as choices of chunks of their own.
    fn delta(&mut self, head: &Head, delta: Delta) -> Vec<Value>;
}

/// What all objects of an answer have in common.
#[derive(Debug)]
pub struct Head {
    pub app: Arc<App>,
    id: String,
    created: u64,
    pub params: Params,
    /// Tokens of all prompts.
    prompt: usize,
}

impl Head {
    /// An object of the answer.
    pub fn object(&self, object: &str, choices: Vec<Value>) -> Value {
        let Head { id, created, params, .. } = self;
        json!({"id": id, "object": object, "created": created, "model": params.model, "choices": choices})
    }

    /// A chunk of a stream of which `sampled` tokens came so far.
    pub fn chunk(&self, object: &str, choice: Value, sampled: usize) -> Value {
        let mut chunk = self.object(object, vec![choice]);
        match self.params.stream {
            Some(StreamOptions { continuous: true, .. }) => {
                chunk["usage"] = usage(&Usage { prompt: self.prompt, output: sampled, ..Usage::default() });
            }
            Some(StreamOptions { usage: true, .. }) => chunk["usage"] = Value::Null,
            _ => {}
        }
        chunk
    }

    /// What stopped a choice: a string or an id of the request, or null.
    pub fn stop_reason(&self, ended: Option<Ended>) -> Value {
        match ended {
            Some(Ended::StopString(place)) => json!(self.params.stops.get(place)),
            Some(Ended::StopId(id)) => json!(id),
            _ => Value::Null,
        }
    }
}

/// A usage as clients read it.
pub fn usage(usage: &Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt, "completion_tokens": usage.output,
        "total_tokens": usage.prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
    })
}

/// A body that has come whole, with its share of the room for bodies.
pub struct Received {
    bytes: Vec<u8>,
    /// Given back after the bytes are gone.
    room: Option<OwnedSemaphorePermit>,
}

impl Deref for Received {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        if self.bytes.len() > LARGE {
            drop(std::mem::take(&mut self.bytes));
            // SAFETY: the call has no preconditions. Without it the allocator would keep what a large body took for later ones.
            #[cfg(target_env = "gnu")]
            unsafe {
                libc::malloc_trim(0)
            };
        }
    }
}

/// A body, if it is not too large, comes in time, and there is room for it beside the others.
///
/// # Errors
/// It does not.
pub async fn body(app: &App, mut body: Body) -> Result<Received, ApiError> {
    let limit = app.settings.body_limit;
    let mut got = Received { bytes: Vec::new(), room: None };
    let receive = async {
        while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
            let frame = frame.map_err(|_| ApiError::body("the body broke off"))?;
            let Ok(data) = frame.into_data() else { continue };
            if got.bytes.len() + data.len() > limit {
                let message = format!("the body has more than the {limit} bytes that are allowed");
                return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message));
            }
            got.bytes.extend_from_slice(&data);
            if !app.grow_room(&mut got.room, got.bytes.len().saturating_sub(FREE)) {
                return Err(ApiError::unavailable("too many large bodies at a time; try again later"));
            }
        }
        Ok(())
    };
    let late = |_| ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body did not come in time");
    timeout(BODY_TIME, receive).await.map_err(late)??;
    Ok(got)
}

/// Answers a request.
///
/// # Errors
/// It is wrong, or there is no answer to it.
pub async fn generate<E: Endpoint>(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    content: Body,
) -> Result<Response, ApiError> {
    app.check_ready()?;
    let content = body(&app, content).await?;
    let shared = app.clone();
    let prepared = app
        .spawn_bounded(move |abandoned| {
            let fields = Fields::parse(&content, abandoned)?;
            prepare::<E>(shared, caller, fields)
        })
        .await?;
    let (mut endpoint, head, requests) = prepared;
    let choices = requests.len() * head.params.n as usize;
    let batch = Batch::submit(&app, requests, &head.params).map_err(|e| {
        // The engine knows of prompts, not of where they came from.
        let param = e.param.as_deref().map(|p| if p == "prompt" { E::PROMPT } else { p }.to_owned());
        ApiError { param, ..e }
    })?;
    if head.params.stream.is_some() {
        return sse::respond(batch, endpoint, head).await;
    }
    let (choices, used) = collect(batch, choices).await?;
    let choices = choices.into_iter().map(|choice| endpoint.whole(&head, choice)).collect();
    let mut whole = head.object(E::OBJECT, choices);
    whole["usage"] = usage(&used);
    Ok(super::api::json(&whole))
}

type Prepared<E> = (E, Head, Vec<Request>);

fn prepare<E: Endpoint>(app: Arc<App>, caller: Caller, mut fields: Fields) -> Result<Prepared<E>, ApiError> {
    let mut params = Params::read(&mut fields, &app, caller)?;
    let (endpoint, prompts) = E::read(&mut fields, &mut params, &app)?;
    let choices = prompts.len().saturating_mul(params.n as usize);
    if choices > MOST_CHOICES {
        let what = format!("{choices} choices over all prompts are too many; {MOST_CHOICES} is the limit");
        return Err(ApiError::field("n", what));
    }
    let context = app.engine.limits().context;
    for prompt in &prompts {
        fits(prompt.len(), &params, context, E::PROMPT)?;
        let room = context - prompt.len();
        let shown = params.sampling.logprobs.map_or(0, |top| top as usize + 1);
        let entries = choices * params.sampling.max_tokens.unwrap_or(room) * shown;
        if entries > MOST_LOGPROBS {
            let what =
                format!("{entries} log-probabilities are too many ({MOST_LOGPROBS}); lower max_tokens");
            return Err(ApiError::field("logprobs", what));
        }
    }
    let id = format!("{}{}", E::PREFIX, app.new_id());
    let prompt = prompts.iter().map(Vec::len).sum();
    let request = |prompt| {
        let Params { n, priority, .. } = params;
        Request { prompt, n, priority, salt: params.salt.clone(), sampling: params.sampling.clone() }
    };
    let requests = prompts.into_iter().map(request).collect();
    Ok((endpoint, Head { app, id, created: now(), params, prompt }, requests))
}

/// Whether prompt and answer fit the context; the error has a code of its own, by which clients shorten their prompts.
fn fits(prompt: usize, params: &Params, context: usize, field: &'static str) -> Result<(), ApiError> {
    match params.sampling.max_tokens {
        _ if prompt >= context => Err(ApiError::beyond_context(field, prompt, context)),
        Some(most) if most > context - prompt => {
            let sum = most.saturating_add(prompt);
            let what = format!("the context of this model is {context} tokens, and {sum} are asked for");
            let what = format!("{what} ({prompt} in the prompt, {most} to generate); lower it");
            Err(ApiError::field("max_tokens", what).with_code("context_length_exceeded"))
        }
        _ => Ok(()),
    }
}

async fn collect(mut batch: Batch, choices: usize) -> Result<(Vec<Delta>, Usage), ApiError> {
    let mut choices = vec![Delta::default(); choices];
    loop {
        match batch.next().await {
            Some(Progress::Deltas(deltas)) => {
                deltas.into_iter().for_each(|delta| choices[delta.index as usize].append(delta));
            }
            Some(Progress::End(end)) => return Ok((choices, end?)),
            None => return Err(ApiError::internal("the engine has stopped")),
        }
    }
}
