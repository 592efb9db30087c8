//! `POST /v1/embeddings`, `/v1/score` and `/v1/rerank`: vectors of texts, and how near texts are to one another by them. In: texts or ids. Out:
//! vectors of length 1, or cosines, in the forms of OpenAI's, vLLM's, Cohere's and Jina's APIs. Each text is a request of the engine.

use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Instant;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::app::{App, now};
use super::body::receive;
use super::completions::{Prompt, prompts};
use super::error::ApiError;
use super::fields::{Fields, kind};
use super::middleware::Caller;
use super::params;
use crate::engine::{AdapterId, End, NO_VECTORS, Stream, SubmitError};
use crate::request::Request;

/// Texts of a request; as many as OpenAI's API takes.
const MOST_TEXTS: usize = 2048;

/// Numbers of an answer: 2,048 vectors of 4,096.
const MOST_NUMBERS: usize = 1 << 23;

/// Texts of a request that the engine has at once: enough to fill its steps, few enough to leave room for others in its queue.
const AT_ONCE: usize = 64;

/// Texts as ids, and what to do with their vectors.
struct Asked<T> {
    app: Arc<App>,
    caller: Caller,
    model: String,
    adapter: Option<AdapterId>,
    priority: i32,
    texts: Vec<Vec<u32>>,
    /// The endpoint's own.
    own: T,
}

/// How texts become ids.
struct Encoder<'a> {
    app: &'a App,
    add_special: bool,
    truncation: Option<usize>,
}

impl Encoder<'_> {
    fn ids(&self, field: &str, prompt: Prompt) -> Result<Vec<u32>, ApiError> {
        let mut ids = match prompt {
            Prompt::Text(text) => self.app.encode(field, &text, self.add_special)?,
            Prompt::Ids(ids) => ids,
        };
        ids.truncate(self.truncation.unwrap_or(usize::MAX));
        let limits = self.app.engine.limits();
        match ids.iter().find(|id| **id as usize >= limits.vocabulary) {
            Some(id) => {
                let what = format!("token {id} is not among the model's {} ids", limits.vocabulary);
                Err(ApiError::field(field, what))
            }
            None if ids.is_empty() => {
                Err(ApiError::field(field, "is empty; it must have at least one token"))
            }
            None if ids.len() > limits.context => {
                Err(ApiError::beyond_context(field, ids.len(), limits.context))
            }
            None => Ok(ids),
        }
    }

    fn all(&self, field: &str, prompts: Vec<Prompt>) -> Result<Vec<Vec<u32>>, ApiError> {
        let one = prompts.len() == 1;
        let name = |i: usize| if one { field.to_owned() } else { format!("{field}[{i}]") };
        prompts.into_iter().enumerate().map(|(i, prompt)| self.ids(&name(i), prompt)).collect()
    }
}

/// Reads a request: what all of these have in common, then what `read` reads.
async fn ask<T: Send + 'static>(
    app: Arc<App>,
    caller: Caller,
    body: Body,
    read: impl FnOnce(&mut Fields, &Encoder) -> Result<(Vec<Vec<u32>>, T), ApiError> + Send + 'static,
) -> Result<Asked<T>, ApiError> {
    app.check_ready()?;
    let content = receive(&app, body).await?;
    let shared = app.clone();
    app.spawn_bounded(move |abandoned| {
        let app = shared;
        let mut fields = Fields::parse(&content, abandoned)?;
        let (model, adapter) = params::model(&mut fields, &app)?;
        if app.engine.embedding().is_none() {
            return Err(ApiError::field("model", NO_VECTORS));
        }
        let priority = fields.or("priority", 0)?;
        let add_special = fields.or("add_special_tokens", true)?;
        let truncation = match fields.take::<i128>("truncate_prompt_tokens")? {
            None => None,
            Some(-1) => Some(app.engine.limits().context),
            Some(n) => match usize::try_from(n) {
                Ok(n) if n > 0 => Some(n),
                _ => {
                    return Err(fields
                        .refusal("truncate_prompt_tokens", format!("must be at least 1, or -1, not {n}")));
                }
            },
        };
        let (texts, own) = read(&mut fields, &Encoder { app: &app, add_special, truncation })?;
        Ok(Asked { app, caller, model, adapter, priority, texts, own })
    })
    .await
}

impl<T> Asked<T> {
    /// The vectors of all texts, in their order. Dropping the future gives up what is left.
    async fn vectors(&mut self) -> Result<Vec<Vec<f32>>, ApiError> {
        let (texts, mut vectors) = (std::mem::take(&mut self.texts), Vec::new());
        let mut coming = VecDeque::new();
        for text in texts {
            let (priority, caller, tokens) = (self.priority, self.caller.number(), text.len());
            let adapter = self.adapter;
            let request = Request { priority, caller, adapter, embed: true, ..Request::new(text) };
            if coming.len() == AT_ONCE {
                vectors.extend(self.next(&mut coming).await?);
            }
            let stream = loop {
                match self.app.engine.submit(request.clone()) {
                    // Its own texts make way for the next.
                    Err(SubmitError::Busy(_) | SubmitError::Full(_)) if !coming.is_empty() => {
                        vectors.extend(self.next(&mut coming).await?);
                    }
                    other => break other?,
                }
            };
            self.app.limiter.use_tokens(self.caller.0, tokens);
            coming.push_back((stream, Instant::now()));
        }
        while let Some(vector) = self.next(&mut coming).await? {
            vectors.push(vector);
        }
        Ok(vectors)
    }

    /// The vector of the first of those that are coming.
    async fn next(&self, coming: &mut VecDeque<(Stream, Instant)>) -> Result<Option<Vec<f32>>, ApiError> {
        let Some((mut stream, submitted)) = coming.pop_front() else { return Ok(None) };
        let event = stream.recv().await;
        match event.map(|event| (event.end, event.vector)) {
            Some((Some(End::Finished(usage)), Some(vector))) => {
                self.app.metrics.embedded(&usage, submitted);
                Ok(Some(vector))
            }
            Some((Some(End::Failed(why)), _)) if !self.app.is_ready() => Err(ApiError::unavailable(why)),
            Some((Some(End::Failed(why)), _)) => Err(ApiError::internal(why)),
            _ => Err(ApiError::internal("the engine has stopped")),
        }
    }
}

fn usage(tokens: usize) -> Value {
    json!({"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens})
}

fn tokens(texts: &[Vec<u32>]) -> usize {
    texts.iter().map(Vec::len).sum()
}

/// The number that reads back as this one, in as few digits as that takes.
fn number(x: f32) -> Value {
    json!(x.to_string().parse::<f64>().unwrap_or_default())
}

/// `POST /v1/embeddings`
///
/// # Errors
/// A field is wrong, or there is no vector.
pub async fn embeddings(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Response, ApiError> {
    let read = |fields: &mut Fields, encoder: &Encoder| {
        let base64 = match fields.take::<String>("encoding_format")?.as_deref() {
            None | Some("float") => false,
            Some("base64") => true,
            Some(_) => return Err(fields.refusal("encoding_format", "must be \"float\" or \"base64\"")),
        };
        let width = encoder.app.engine.embedding().unwrap_or(0);
        let dimensions = fields.or("dimensions", width)?;
        if !(1..=width).contains(&dimensions) {
            return Err(fields.refusal("dimensions", format!("must be from 1 to {width}, not {dimensions}")));
        }
        let input = prompts(fields, "input", MOST_TEXTS)?;
        if input.len() * dimensions > MOST_NUMBERS {
            let most = MOST_NUMBERS / dimensions;
            return Err(
                fields.refusal("input", format!("must have at most {most} texts of {dimensions} dimensions"))
            );
        }
        Ok((encoder.all("input", input)?, (base64, dimensions)))
    };
    let mut asked = ask(app, caller, body, read).await?;
    let (base64, dimensions) = asked.own;
    let used = tokens(&asked.texts);
    let mut data = String::new();
    for (index, vector) in asked.vectors().await?.into_iter().enumerate() {
        let comma = if index == 0 { "" } else { "," };
        let vector = shown(&shortened(vector, dimensions), base64);
        let _ = write!(data, "{comma}{{\"object\":\"embedding\",\"index\":{index},\"embedding\":{vector}}}");
    }
    let (model, usage) = (json!(asked.model), json!({"prompt_tokens": used, "total_tokens": used}));
    let body = format!("{{\"object\":\"list\",\"data\":[{data}],\"model\":{model},\"usage\":{usage}}}");
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}

/// A vector in JSON: as a value of each number it would take several times the memory.
fn shown(vector: &[f32], base64: bool) -> String {
    if base64 {
        let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
        return format!("\"{}\"", STANDARD.encode(bytes));
    }
    let numbers: Vec<String> = vector.iter().map(f32::to_string).collect();
    format!("[{}]", numbers.join(","))
}

/// The first numbers of a vector, with the length 1 again.
fn shortened(mut vector: Vec<f32>, dimensions: usize) -> Vec<f32> {
    if dimensions < vector.len() {
        vector.truncate(dimensions);
        let length = vector.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt();
        vector.iter_mut().filter(|_| length > 0.0).for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
    vector
}

/// The cosine of vectors of length 1.
fn cosine(a: &[f32], b: &[f32]) -> Value {
    let dot: f64 = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
    number(dot.clamp(-1.0, 1.0) as f32)
}

/// `POST /v1/score`: pairs of texts; a first one alone is paired with each of the second.
///
/// # Errors
/// A field is wrong, or there is no vector.
pub async fn score(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Response, ApiError> {
    let read = |fields: &mut Fields, encoder: &Encoder| {
        let [first, second] = ["text_1", "text_2"].map(|field| prompts(fields, field, MOST_TEXTS));
        let (first, second) = (first?, second?);
        let (firsts, pairs) = (first.len(), second.len());
        if firsts != 1 && firsts != pairs {
            let what = format!("has {firsts} texts, text_2 {pairs}; give one, or as many");
            return Err(fields.refusal("text_1", what));
        }
        let mut texts = encoder.all("text_1", first)?;
        texts.extend(encoder.all("text_2", second)?);
        Ok((texts, firsts))
    };
    let mut asked = ask(app, caller, body, read).await?;
    let (firsts, used) = (asked.own, tokens(&asked.texts));
    let vectors = asked.vectors().await?;
    let (first, second) = vectors.split_at(firsts.min(vectors.len()));
    let pairs = first.iter().cycle().zip(second).enumerate();
    let data: Vec<Value> =
        pairs.map(|(i, (a, b))| json!({"index": i, "object": "score", "score": cosine(a, b)})).collect();
    let (id, created) = (format!("score-{}", asked.app.new_id()), now());
    Ok(super::api::json(&json!({
        "id": id, "object": "list", "created": created, "model": asked.model, "data": data, "usage": usage(used),
    })))
}

/// What `/rerank` was asked.
struct Ranking {
    documents: Vec<String>,
    top: usize,
    shows: bool,
}

/// `POST /v1/rerank`: documents, those nearest to a query first.
///
/// # Errors
/// A field is wrong, or there is no vector.
pub async fn rerank(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Response, ApiError> {
    let read = |fields: &mut Fields, encoder: &Encoder| {
        let query: Option<String> = fields.take("query")?;
        let query = query.ok_or_else(|| fields.refusal("query", "is missing; give a text"))?;
        let documents = documents(fields)?;
        let top = fields.or("top_n", documents.len())?;
        if top == 0 {
            return Err(fields.refusal("top_n", "must be at least 1, not 0"));
        }
        let shows = fields.or("return_documents", true)?;
        let mut texts = vec![encoder.ids("query", Prompt::Text(query))?];
        texts.extend(encoder.all("documents", documents.iter().cloned().map(Prompt::Text).collect())?);
        Ok((texts, Ranking { documents, top, shows }))
    };
    let mut asked = ask(app, caller, body, read).await?;
    let used = tokens(&asked.texts);
    let vectors = asked.vectors().await?;
    let Some((query, vectors)) = vectors.split_first() else {
        return Err(ApiError::internal("the engine gave no vectors"));
    };
    let score = |v: &Vec<f32>| cosine(query, v);
    let mut ranked: Vec<(usize, Value)> = vectors.iter().map(score).enumerate().collect();
    // Of equals the earlier goes first.
    ranked.sort_by(|(_, a), (_, b)| b.as_f64().unwrap_or(0.0).total_cmp(&a.as_f64().unwrap_or(0.0)));
    let Ranking { documents, top, shows } = &asked.own;
    let result = |(index, score): (usize, Value)| {
        let mut result = json!({"index": index, "relevance_score": score});
        if *shows {
            result["document"] = json!({"text": documents.get(index)});
        }
        result
    };
    let results: Vec<Value> = ranked.into_iter().take(*top).map(result).collect();
    let id = format!("rerank-{}", asked.app.new_id());
    Ok(super::api::json(&json!({"id": id, "model": asked.model, "results": results, "usage": usage(used)})))
}

/// Texts, or objects with a text.
fn documents(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let all: Vec<Value> = fields.list("documents", MOST_TEXTS)?;
    if all.is_empty() {
        return Err(fields.refusal("documents", "is missing or empty; give texts"));
    }
    let text = |(i, mut value): (usize, Value)| match value.get_mut("text").map(Value::take).unwrap_or(value)
    {
        Value::String(text) => Ok(text),
        other => {
            let what = format!("must be a text, or an object with a text, not {}", kind(&other));
            Err(fields.refusal(&format!("documents[{i}]"), what))
        }
    };
    all.into_iter().enumerate().map(text).collect()
}
