//! From a body to a response, the same for chats and completions: read and prepared apart from the asynchronous threads,
//! submitted, then streamed or collected.

use std::sync::Arc;

use axum::body::{Body, to_bytes};
use axum::http::StatusCode;
use axum::response::Response;
use bytes::Bytes;
use serde_json::{Value, json};
use std::error::Error;
use std::time::Duration;
use tokio::time::timeout;

use super::app::{App, now};
use super::batch::{Batch, Progress};
use super::error::ApiError;
use super::fields::Fields;
use super::gate::Caller;
use super::params::Params;
use super::sse::{self, Form};
use crate::answer::{Ended, Token};
use crate::engine::Usage;
use crate::request::Request;

/// Choices of a request, over all its prompts.
const MOST_CHOICES: usize = 256;

/// Log-probabilities of a request.
const MOST_LOGPROBS: usize = 1 << 20;

/// Time for a body to come.
const BODY_TIME: Duration = Duration::from_secs(60);

/// A choice that is whole.
#[derive(Debug, Default)]
pub struct Whole {
    pub text: String,
    pub tokens: Vec<Token>,
    pub ended: Option<Ended>,
}

/// An endpoint that generates.
pub trait Endpoint: Form + Sized {
    /// What the ids of its answers begin with.
    const PREFIX: &'static str;

    /// Reads the fields that are this endpoint's own; gives the form of the answer, and the prompts.
    ///
    /// # Errors
    /// A field is wrong, or there is no prompt in it.
    fn read(fields: &mut Fields, params: &mut Params, head: Head) -> Result<(Self, Vec<Vec<u32>>), ApiError>;

    /// The field that has the prompt.
    const PROMPT: &'static str;

    /// The body of a plain response.
    fn whole(&mut self, choices: Vec<Whole>, usage: &Usage) -> Value;
}

/// What all chunks of an answer say.
#[derive(Clone, Debug)]
pub struct Head {
    pub app: Arc<App>,
    pub id: String,
    pub created: u64,
    pub model: String,
}

impl Head {
    /// An object that begins as all of an answer do.
    pub fn object(&self, object: &str, choices: Vec<Value>) -> Value {
        let Head { id, created, model, .. } = self;
        json!({"id": id, "object": object, "created": created, "model": model, "choices": choices})
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

/// What stopped a choice: a string or an id of the request, or null.
pub fn stop_reason(ended: Ended, stops: &[String]) -> Value {
    match ended {
        Ended::StopString(place) => stops.get(place).map_or(Value::Null, |s| json!(s)),
        Ended::StopId(id) => json!(id),
        Ended::Eos | Ended::Length => Value::Null,
    }
}

/// A body, if it is not too large and comes in time.
///
/// # Errors
/// It does not.
pub async fn body(app: &App, body: Body) -> Result<Bytes, ApiError> {
    let limit = app.settings.body_limit;
    let late = |_| ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body did not come in time");
    timeout(BODY_TIME, to_bytes(body, limit)).await.map_err(late)?.map_err(|e| {
        let large = e.source().is_some_and(|e| e.to_string().contains("length limit"));
        let message = format!("the body has more than the {limit} bytes that are allowed");
        match large {
            true => ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message),
            false => ApiError::body("the body broke off"),
        }
    })
}

/// Answers a request.
///
/// # Errors
/// It is wrong, or there is no answer to it.
pub async fn generate<E: Endpoint>(
    app: Arc<App>,
    caller: Caller,
    content: Body,
) -> Result<Response, ApiError> {
    if !app.is_ready() {
        let why = app.engine.dead().unwrap_or("the server is shutting down");
        return Err(ApiError::unavailable(why));
    }
    let content = body(&app, content).await?;
    let shared = app.clone();
    let prepared = app.apart(move || prepare::<E>(&shared, caller, &content)).await?;
    let (mut endpoint, params, requests) = prepared;
    let batch = Batch::submit(&app, requests, &params.scan, params.skip_special).map_err(|e| {
        // The engine knows of prompts, not of where they came from.
        let param = e.param.as_deref().map(|p| if p == "prompt" { E::PROMPT } else { p }.to_owned());
        ApiError { param, ..e }
    })?;
    match params.stream {
        Some(_) => sse::respond(batch, endpoint, app.settings.keep_alive).await,
        None => {
            let (choices, usage) = collect(batch).await?;
            Ok(super::api::json(&endpoint.whole(choices, &usage)))
        }
    }
}

type Prepared<E> = (E, Params, Vec<Request>);

fn prepare<E: Endpoint>(app: &Arc<App>, caller: Caller, content: &[u8]) -> Result<Prepared<E>, ApiError> {
    let mut fields = Fields::parse(content)?;
    let mut params = Params::read(&mut fields, app, caller)?;
    let (id, model) = (format!("{}{}", E::PREFIX, app.mint()), params.model.clone());
    let head = Head { app: app.clone(), id, created: now(), model };
    let (endpoint, prompts) = E::read(&mut fields, &mut params, head)?;
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
    let request = |prompt| {
        let Params { n, priority, .. } = params;
        Request { prompt, n, priority, salt: params.salt.clone(), sampling: params.sampling.clone() }
    };
    let requests = prompts.into_iter().map(request).collect();
    Ok((endpoint, params, requests))
}

/// Whether prompt and answer fit the context; the error has a code of its own, by which clients shorten their prompts.
fn fits(prompt: usize, params: &Params, context: usize, field: &'static str) -> Result<(), ApiError> {
    let wrong = |param, what| Err(ApiError::field(param, what).with_code("context_length_exceeded"));
    match params.sampling.max_tokens {
        _ if prompt >= context => {
            let what = format!("has {prompt} tokens, and the context of this model is {context} tokens");
            wrong(field, format!("{what}; shorten the prompt"))
        }
        Some(most) if most > context - prompt => {
            let sum = most.saturating_add(prompt);
            let what = format!("the context of this model is {context} tokens, and {sum} are asked for");
            wrong("max_tokens", format!("{what} ({prompt} in the prompt, {most} to generate); lower it"))
        }
        _ => Ok(()),
    }
}

async fn collect(mut batch: Batch) -> Result<(Vec<Whole>, Usage), ApiError> {
    let mut choices: Vec<Whole> = Vec::new();
    loop {
        match batch.next().await {
            Some(Progress::Deltas(deltas)) => {
                for delta in deltas {
                    let at = delta.index as usize;
                    if choices.len() <= at {
                        choices.resize_with(at + 1, Whole::default);
                    }
                    choices[at].text.push_str(&delta.text);
                    choices[at].tokens.extend(delta.tokens);
                    choices[at].ended = delta.ended;
                }
            }
            Some(Progress::End(end)) => return Ok((choices, end?)),
            None => return Err(ApiError::internal("the engine has stopped")),
        }
    }
}
