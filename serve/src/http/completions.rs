//! `POST /v1/completions`: prompts as they are, continued.

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::app::App;
use super::error::ApiError;
use super::fields::{Fields, Read, kind};
use super::gate::Caller;
use super::generate::{self, Endpoint, Head, Whole, stop_reason, usage};
use super::logprobs;
use super::params::{Params, StreamOptions};
use super::sse::Form;
use crate::answer::{Delta, Ended, Token};
use crate::engine::Usage;

/// Tokens of an answer when the request does not say.
const USUAL: usize = 16;

/// Prompts of a request.
const MOST_PROMPTS: usize = 256;

/// A completion's form.
#[derive(Debug)]
pub struct Completion {
    head: Head,
    stream: StreamOptions,
    stops: Vec<String>,
    n: usize,
    /// Tokens of all prompts.
    prompt: usize,
    /// What is shown of each prompt.
    echo: Option<Vec<String>>,
    logprobs: bool,
    /// Characters shown of each choice.
    offsets: Vec<usize>,
}

/// `POST /v1/completions`
pub async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Response {
    generate::generate::<Completion>(app, caller, body).await.unwrap_or_else(IntoResponse::into_response)
}

enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

/// The prompts of a request: a text, texts, ids, or lists of ids.
fn prompts(fields: &mut Fields) -> Result<Vec<Prompt>, ApiError> {
    const WHAT: &str = "must be a text, a list of texts, a list of token ids, or a list of such lists";
    let list = match fields.raw("prompt") {
        None => return Err(fields.refusal("prompt", "is missing; give a text to continue")),
        Some(Value::String(text)) => return Ok(vec![Prompt::Text(text)]),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(fields.refusal("prompt", format!("{WHAT}, not {}", kind(&other)))),
    };
    let ids = |list: Vec<Value>, at: &str| -> Result<Prompt, ApiError> {
        let one = |(i, v)| u32::read(v).map_err(|wrong| fields.refusal(&format!("{at}[{i}]"), wrong));
        list.into_iter().enumerate().map(one).collect::<Result<_, _>>().map(Prompt::Ids)
    };
    match list.first() {
        None => return Err(fields.refusal("prompt", "is empty; give a text to continue")),
        Some(Value::Number(_)) => return Ok(vec![ids(list, "prompt")?]),
        Some(_) if list.len() > MOST_PROMPTS => {
            let what = format!("must have at most {MOST_PROMPTS} prompts, not {}", list.len());
            return Err(fields.refusal("prompt", what));
        }
        Some(_) => {}
    }
    let one = |(i, value)| match value {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(list) => ids(list, &format!("prompt[{i}]")),
        other => Err(fields.refusal(&format!("prompt[{i}]"), format!("{WHAT}, not {}", kind(&other)))),
    };
    list.into_iter().enumerate().map(one).collect()
}

impl Endpoint for Completion {
    const PREFIX: &'static str = "cmpl-";
    const PROMPT: &'static str = "prompt";

    fn read(
        fields: &mut Fields,
        params: &mut Params,
        head: Head,
    ) -> Result<(Completion, Vec<Vec<u32>>), ApiError> {
        let tokenizer = &head.app.tokenizer;
        params.sampling.logprobs = fields.take("logprobs")?;
        let echo = fields.or("echo", false)?;
        if echo && params.sampling.logprobs.is_some() {
            let what =
                "together with logprobs needs log-probabilities of the prompt, which are not supported";
            return Err(fields.refusal("echo", what));
        }
        let add_special = fields.or("add_special_tokens", true)?;
        let (mut shown, mut all) = (Vec::new(), Vec::new());
        for prompt in prompts(fields)? {
            let wrong = |e: crate::tokenizer::TokenizerError| fields.refusal("prompt", e.message);
            let (text, ids) = match prompt {
                Prompt::Text(text) => {
                    let ids = tokenizer.encode(&text, add_special).map_err(wrong)?;
                    (text, ids)
                }
                Prompt::Ids(ids) if echo => {
                    (tokenizer.decode(&ids, params.skip_special).map_err(wrong)?, ids)
                }
                Prompt::Ids(ids) => (String::new(), ids),
            };
            shown.push(text);
            all.push(ids);
        }
        let most = all.iter().map(|ids| head.app.engine.limits().context.saturating_sub(ids.len())).min();
        params.sampling.max_tokens.get_or_insert(USUAL.min(most.unwrap_or(0)).max(1));
        let n = params.n as usize;
        let form = Completion {
            stream: params.stream.unwrap_or_default(),
            stops: params.stops.clone(),
            n,
            prompt: all.iter().map(Vec::len).sum(),
            echo: echo.then_some(shown),
            logprobs: params.sampling.logprobs.is_some(),
            offsets: Vec::new(),
            head,
        };
        Ok((form, all))
    }

    fn whole(&mut self, choices: Vec<Whole>, used: &Usage) -> Value {
        let one = |(index, choice): (usize, Whole)| {
            let text = format!("{}{}", self.echoed(index), choice.text);
            self.choice(index, text, &choice.tokens, choice.ended)
        };
        let choices = choices.into_iter().enumerate().map(one).collect();
        let mut object = self.head.object("text_completion", choices);
        object["usage"] = usage(used);
        object
    }
}

impl Completion {
    fn echoed(&self, index: usize) -> &str {
        self.echo.as_ref().and_then(|all| all.get(index / self.n.max(1))).map_or("", String::as_str)
    }

    fn choice(&mut self, index: usize, text: String, tokens: &[Token], ended: Option<Ended>) -> Value {
        if self.offsets.len() <= index {
            self.offsets.resize(index + 1, 0);
        }
        let shown = match self.logprobs {
            true => logprobs::completion(&self.head.app.tokenizer, tokens, &mut self.offsets[index]),
            false => Value::Null,
        };
        let reason = ended.map(Ended::name);
        let stopped = ended.map_or(Value::Null, |ended| stop_reason(ended, &self.stops));
        json!({
            "index": index, "text": text, "logprobs": shown, "finish_reason": reason, "stop_reason": stopped,
        })
    }

    fn chunk(&self, choices: Vec<Value>, sampled: usize) -> Value {
        let mut chunk = self.head.object("text_completion", choices);
        if self.stream.continuous {
            chunk["usage"] = usage(&Usage { prompt: self.prompt, output: sampled, ..Usage::default() });
        } else if self.stream.usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }
}

impl Form for Completion {
    fn begin(&mut self) -> Vec<Value> {
        let echo = self.echo.clone().unwrap_or_default();
        let n = self.n;
        let all = echo.into_iter().flat_map(|text| std::iter::repeat_n(text, n)).enumerate();
        let choices: Vec<Value> = all.map(|(i, text)| self.choice(i, text, &[], None)).collect();
        choices.into_iter().map(|choice| self.chunk(vec![choice], 0)).collect()
    }

    fn delta(&mut self, delta: Delta, sampled: usize) -> Vec<Value> {
        let choice = self.choice(delta.index as usize, delta.text, &delta.tokens, delta.ended);
        vec![self.chunk(vec![choice], sampled)]
    }

    fn usage(&mut self, used: &Usage) -> Option<Value> {
        self.stream.usage.then(|| {
            let mut chunk = self.head.object("text_completion", Vec::new());
            chunk["usage"] = usage(used);
            chunk
        })
    }
}
