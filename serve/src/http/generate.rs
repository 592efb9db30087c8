//! From a body to a response, the same for all endpoints that generate: read and prepared apart from the asynchronous threads, submitted,
//! then streamed or collected.

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use serde_json::{Value, json};

use super::app::{App, now};
use super::batch::{Batch, Progress};
use super::body::receive;
use super::error::ApiError;
use super::fields::Fields;
use super::middleware::{Caller, Incoming};
use super::params::{Params, StreamOptions};
use super::sse::{self, Frames};
use super::traces::Trace;
use crate::answer::{Delta, Ended, Token};
use crate::engine::Usage;
use crate::request::Request;

/// Choices of a request, over all its prompts.
pub const MOST_CHOICES: usize = 256;

/// The newer name of a limit.
const LIMITS: &[(&str, &str)] = &[("max_tokens", "max_completion_tokens")];

/// Log-probabilities of a request.
const MOST_LOGPROBS: usize = 1 << 20;

/// What an endpoint has read of a request: itself, what is common to all, and the ids of the prompts.
pub type Asked<E> = (E, Params, Vec<Vec<u32>>);

/// An endpoint that generates: what is its own in reading a request and in writing an answer.
pub trait Endpoint: Send + Unpin + Sized + 'static {
    /// What the ids of its answers begin with.
    const PREFIX: &'static str;

    /// The field that has the prompt.
    const PROMPT: &'static str;

    /// Fields whose names are others where several endpoints read them, each with what its clients call it.
    const NAMES: &'static [(&'static str, &'static str)] = &[];

    /// What it does, in the words of traces.
    const OPERATION: &'static str = "chat";

    /// What is sent in a stream that has been silent for long.
    const PING: &'static [u8] = b": ping\n\n";

    /// Reads the fields of a request.
    ///
    /// # Errors
    /// A field is wrong, or there is no prompt in it.
    fn read(fields: &mut Fields, app: &App, caller: Caller) -> Result<Asked<Self>, ApiError>;

    /// Takes what is new of a choice of a plain response.
    fn take(&mut self, head: &Head, delta: Delta);

    /// The plain response of what was taken.
    fn whole(self, head: &Head, used: &Usage) -> Value;

    /// Begins a stream.
    fn begin(&mut self, head: &Head, out: &mut Frames);

    /// Sends what is new of a choice; `sampled` tokens came so far.
    fn delta(&mut self, head: &Head, delta: Delta, sampled: usize, out: &mut Frames);

    /// Ends a stream.
    fn end(&mut self, head: &Head, used: &Usage, out: &mut Frames);

    /// Ends a stream that failed.
    fn fail(&mut self, _: &Head, why: &ApiError, out: &mut Frames) {
        out.data(&why.json());
    }
}

/// What all objects of an answer have in common.
#[derive(Debug)]
pub struct Head {
    pub app: Arc<App>,
    pub id: String,
    pub created: u64,
    pub caller: Caller,
    pub incoming: Arc<Incoming>,
    pub params: Params,
    /// Tokens of all prompts.
    pub prompt: usize,
    /// Ids of the prompts, if they are shown.
    prompts: Vec<Vec<u32>>,
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
                // What the prefix cache had is known at the end.
                let prompt = self.prompt;
                chunk["usage"] = json!({
                    "prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled,
                });
            }
            Some(StreamOptions { usage: true, .. }) => chunk["usage"] = Value::Null,
            _ => {}
        }
        chunk
    }

    /// The end of a stream of chunks, `reasoning` tokens of which were thoughts.
    pub fn done(&self, object: &str, used: &Usage, reasoning: usize, out: &mut Frames) {
        if self.params.stream.is_some_and(|options| options.usage) {
            let mut chunk = self.object(object, Vec::new());
            chunk["usage"] = usage(used, reasoning);
            out.data(&chunk);
        }
        out.raw("data: [DONE]\n\n");
    }

    /// Adds to a choice its ids, and with its first those of its prompt, if they are to be shown.
    pub fn show_ids(&self, choice: &mut Value, index: u32, tokens: &[Token], first: bool) {
        if !self.params.show_ids {
            return;
        }
        choice["token_ids"] = tokens.iter().map(|token| token.id).collect();
        if first {
            choice["prompt_token_ids"] = json!(self.prompts.get((index / self.params.n.max(1)) as usize));
        }
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

/// A usage as clients read it; `reasoning` tokens of the answer were thoughts.
pub fn usage(usage: &Usage, reasoning: usize) -> Value {
    json!({
        "prompt_tokens": usage.prompt, "completion_tokens": usage.output,
        "total_tokens": usage.prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    })
}

/// Answers a request.
///
/// # Errors
/// It is wrong, or there is no answer to it.
pub async fn generate<E: Endpoint>(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Extension(trace): Extension<Trace>,
    Extension(incoming): Extension<Arc<Incoming>>,
    content: Body,
) -> Result<Response, ApiError> {
    app.check_ready()?;
    let content = receive(&app, content).await?;
    let shared = app.clone();
    let prepared = app
        .spawn_bounded(move |abandoned| {
            let fields = Fields::parse(&content, abandoned)?;
            // Of two names for one limit errors have the one that was given.
            let limit = if fields.has("max_completion_tokens") { LIMITS } else { &[] };
            let named = |e: ApiError| e.renamed(limit).renamed(E::NAMES);
            Ok((prepare::<E>(shared, caller, incoming, fields).map_err(named)?, limit))
        })
        .await?;
    let ((mut endpoint, head, requests), limit) = prepared;
    trace.asks(E::OPERATION, &head.id, &head.params);
    // The engine knows of prompts, not of where they came from.
    let mut batch = Batch::submit(&app, requests, &head.params, caller.0, trace)
        .map_err(|e| e.renamed(&[("prompt", E::PROMPT)]).renamed(limit).renamed(E::NAMES))?;
    if head.params.stream.is_some() {
        return sse::respond(batch, endpoint, head).await;
    }
    loop {
        match batch.next().await {
            Some(Progress::Deltas(deltas)) => deltas.into_iter().for_each(|d| endpoint.take(&head, d)),
            Some(Progress::End(end)) => return Ok(super::api::json(&endpoint.whole(&head, &end?))),
            None => return Err(ApiError::internal("the engine has stopped")),
        }
    }
}

type Prepared<E> = (E, Head, Vec<Request>);

fn prepare<E: Endpoint>(
    app: Arc<App>,
    caller: Caller,
    incoming: Arc<Incoming>,
    mut fields: Fields,
) -> Result<Prepared<E>, ApiError> {
    let (endpoint, params, mut prompts) = E::read(&mut fields, &app, caller)?;
    if let Some(most) = params.truncation {
        prompts.iter_mut().for_each(|prompt| drop(prompt.drain(..prompt.len().saturating_sub(most))));
    }
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
        let of_prompt = params.sampling.prompt_logprobs.map_or(0, |top| top as usize + 1);
        let entries = choices * params.sampling.max_tokens.unwrap_or(room) * shown
            + prompts.len() * prompt.len() * of_prompt;
        if entries > MOST_LOGPROBS {
            let what =
                format!("{entries} log-probabilities are too many ({MOST_LOGPROBS}); lower max_tokens");
            return Err(ApiError::field("logprobs", what));
        }
    }
    let id = format!("{}{}", E::PREFIX, app.new_id());
    let prompt = prompts.iter().map(Vec::len).sum();
    let shown = if params.show_ids { prompts.clone() } else { Vec::new() };
    let request = |prompt| {
        let Params { n, priority, adapter, .. } = params;
        let (salt, constraint) = (params.salt.clone(), params.constraint.clone());
        let caller = caller.number();
        Request {
            prompt,
            n,
            priority,
            caller,
            salt,
            sampling: params.sampling.clone(),
            constraint,
            adapter,
            embed: false,
        }
    };
    let requests = prompts.into_iter().map(request).collect();
    let head = Head { app, id, created: now(), caller, incoming, params, prompt, prompts: shown };
    Ok((endpoint, head, requests))
}

/// Whether prompt and answer fit the context; the error has a code of its own, by which clients shorten their prompts.
fn fits(prompt: usize, params: &Params, context: usize, field: &'static str) -> Result<(), ApiError> {
    match params.sampling.max_tokens {
        _ if prompt >= context => Err(ApiError::beyond_context(field, prompt, context)),
        Some(most) if most > context - prompt => {
            let sum = most.saturating_add(prompt);
            let what =
                format!("this model's maximum context length is {context} tokens, and {sum} are asked for");
            let what = format!("{what} ({prompt} in the prompt, {most} to generate); lower it");
            Err(ApiError::field("max_tokens", what).with_code("context_length_exceeded"))
        }
        _ => Ok(()),
    }
}
