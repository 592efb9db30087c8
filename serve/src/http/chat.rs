//! `POST /v1/chat/completions`: a conversation, put through the model's template and continued. Tools are shown to the
//! template; what the model writes about calling them comes back as text.

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::app::App;
use super::error::ApiError;
use super::fields::{Fields, kind};
use super::gate::Caller;
use super::generate::{self, Endpoint, Head, Whole, stop_reason, usage};
use super::logprobs;
use super::params::{Params, StreamOptions, short};
use super::sse::Form;
use crate::answer::{Delta, Ended, Token};
use crate::engine::Usage;
use crate::request::MOST_LOGPROBS;
use crate::template::{Chat, Message};

/// Tools, and documents, of a request.
const MOST_TOOLS: usize = 1024;

/// A chat's form.
#[derive(Debug)]
pub struct Reply {
    head: Head,
    stream: StreamOptions,
    stops: Vec<String>,
    n: u32,
    /// Tokens of the prompt.
    prompt: usize,
    logprobs: bool,
}

/// `POST /v1/chat/completions`
pub async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Response {
    generate::generate::<Reply>(app, caller, body).await.unwrap_or_else(IntoResponse::into_response)
}

/// The prompt's ids of a conversation.
///
/// # Errors
/// A field is wrong, or the template refuses the conversation.
pub fn prompt(app: &App, fields: &mut Fields) -> Result<Vec<u32>, ApiError> {
    let Some(template) = &app.template else {
        let what = "the model has no chat template; use /v1/completions";
        return Err(ApiError::field("messages", what));
    };
    let given = fields.raw("messages").unwrap_or_default();
    let mut messages = Message::list(given)?;
    Message::check(&messages)?;
    messages.iter().enumerate().try_for_each(|(i, message)| texts_only(i, message))?;
    let tools = tools(fields)?;
    let documents: Option<Vec<Value>> = match fields.list("documents", MOST_TOOLS)? {
        none if none.is_empty() => None,
        some => Some(some),
    };
    let continue_final_message = fields.or("continue_final_message", false)?;
    let add_generation_prompt = fields.or("add_generation_prompt", !continue_final_message)?;
    let mut variables: Map<String, Value> = fields.or("chat_template_kwargs", Map::new())?;
    if let Some(effort) = fields.take::<String>("reasoning_effort")? {
        variables.entry("reasoning_effort").or_insert(effort.into());
    }
    template.adapt(&mut messages, None, tools.is_some())?;
    let text = template.render(&Chat {
        messages: &messages,
        tools: tools.as_deref(),
        documents: documents.as_deref(),
        add_generation_prompt,
        continue_final_message,
        template: None,
        variables: Some(&variables),
    })?;
    // The template has put the special tokens where they belong.
    let add_special = fields.or("add_special_tokens", false)?;
    app.tokenizer.encode(&text, add_special).map_err(|e| fields.refusal("messages", e.message))
}

fn texts_only(i: usize, message: &Message) -> Result<(), ApiError> {
    let parts = message.fields().get("content").and_then(Value::as_array);
    for (j, part) in parts.into_iter().flatten().enumerate() {
        let what = part.get("type").and_then(Value::as_str).unwrap_or("");
        if what != "text" {
            let field = format!("messages[{i}].content[{j}].type");
            let wrong = format!("only \"text\" is supported, not {:?}; remove the part", short(what));
            return Err(ApiError::field(field, wrong));
        }
    }
    Ok(())
}

/// The tools that the template is to show, if any.
fn tools(fields: &mut Fields) -> Result<Option<Vec<Value>>, ApiError> {
    let tools: Vec<Map<String, Value>> = fields.list("tools", MOST_TOOLS)?;
    for (i, tool) in tools.iter().enumerate() {
        let function = tool.get("function").and_then(Value::as_object);
        if tool.get("type").and_then(Value::as_str) != Some("function") {
            return Err(fields.refusal(&format!("tools[{i}].type"), "must be \"function\""));
        }
        if !function.is_some_and(|f| f.get("name").is_some_and(Value::is_string)) {
            let what = "must be an object with a name";
            return Err(fields.refusal(&format!("tools[{i}].function"), what));
        }
    }
    let choice = fields.raw("tool_choice");
    fields.take::<bool>("parallel_tool_calls")?;
    let shown = match choice.as_ref() {
        None => true,
        Some(Value::String(how)) if how == "auto" => true,
        Some(Value::String(how)) if how == "none" => false,
        Some(Value::String(how)) => {
            let wrong = format!("must be \"auto\" or \"none\"; {:?} is not supported", short(how));
            return Err(fields.refusal("tool_choice", wrong));
        }
        Some(other) => {
            let wrong = format!("must be \"auto\" or \"none\"; {} is not supported", kind(other));
            return Err(fields.refusal("tool_choice", wrong));
        }
    };
    let tools: Vec<Value> = tools.into_iter().map(Value::Object).collect();
    Ok((shown && !tools.is_empty()).then_some(tools))
}

/// How many likeliest tokens are shown beside each, if any are.
fn likeliest(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let on = fields.or("logprobs", false)?;
    match (on, fields.take::<u32>("top_logprobs")?) {
        (_, Some(top)) if top > MOST_LOGPROBS => {
            Err(fields.refusal("top_logprobs", format!("must be at most {MOST_LOGPROBS}, not {top}")))
        }
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(fields.refusal("top_logprobs", "needs logprobs; set it to true")),
    }
}

impl Endpoint for Reply {
    const PREFIX: &'static str = "chatcmpl-";
    const PROMPT: &'static str = "messages";

    fn read(
        fields: &mut Fields,
        params: &mut Params,
        head: Head,
    ) -> Result<(Reply, Vec<Vec<u32>>), ApiError> {
        params.sampling.logprobs = likeliest(fields)?;
        if fields.or("echo", false)? {
            return Err(fields.refusal("echo", "is for /v1/completions; leave it out"));
        }
        let prompt = prompt(&head.app, fields)?;
        let form = Reply {
            stream: params.stream.unwrap_or_default(),
            stops: params.stops.clone(),
            n: params.n,
            prompt: prompt.len(),
            logprobs: params.sampling.logprobs.is_some(),
            head,
        };
        Ok((form, vec![prompt]))
    }

    fn whole(&mut self, choices: Vec<Whole>, used: &Usage) -> Value {
        let one = |(index, choice): (usize, Whole)| {
            let message = json!({"role": "assistant", "content": choice.text, "refusal": null});
            let ended = choice.ended;
            json!({
                "index": index, "message": message, "logprobs": self.logprobs(&choice.tokens, ended),
                "finish_reason": ended.map_or("stop", Ended::name),
                "stop_reason": ended.map_or(Value::Null, |ended| stop_reason(ended, &self.stops)),
            })
        };
        let choices = choices.into_iter().enumerate().map(one).collect();
        let mut object = self.head.object("chat.completion", choices);
        object["usage"] = usage(used);
        object
    }
}

impl Reply {
    /// Of the tokens that are shown: one that ends the answer is not.
    fn logprobs(&self, tokens: &[Token], ended: Option<Ended>) -> Value {
        let hidden = usize::from(matches!(ended, Some(Ended::Eos | Ended::StopId(_))));
        match self.logprobs {
            true => logprobs::chat(&self.head.app.tokenizer, &tokens[..tokens.len().saturating_sub(hidden)]),
            false => Value::Null,
        }
    }

    fn chunk(&self, choice: Value, sampled: usize) -> Value {
        let mut chunk = self.head.object("chat.completion.chunk", vec![choice]);
        if self.stream.continuous {
            chunk["usage"] = usage(&Usage { prompt: self.prompt, output: sampled, ..Usage::default() });
        } else if self.stream.usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }
}

impl Form for Reply {
    fn begin(&mut self) -> Vec<Value> {
        let delta = json!({"role": "assistant", "content": ""});
        let one = |index: u32| {
            let choice = json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null});
            self.chunk(choice, 0)
        };
        (0..self.n).map(one).collect()
    }

    /// What is shown, and by itself that it ends.
    fn delta(&mut self, delta: Delta, sampled: usize) -> Vec<Value> {
        let Delta { index, text, tokens, ended } = delta;
        let mut chunks = Vec::new();
        let shown = self.logprobs(&tokens, ended);
        if !text.is_empty() || !shown.is_null() {
            let delta = json!({"content": text});
            let choice = json!({"index": index, "delta": delta, "logprobs": shown, "finish_reason": null});
            chunks.push(self.chunk(choice, sampled));
        }
        if let Some(ended) = ended {
            let choice = json!({
                "index": index, "delta": {}, "logprobs": null, "finish_reason": ended.name(),
                "stop_reason": stop_reason(ended, &self.stops),
            });
            chunks.push(self.chunk(choice, sampled));
        }
        chunks
    }

    fn usage(&mut self, used: &Usage) -> Option<Value> {
        self.stream.usage.then(|| {
            let mut chunk = self.head.object("chat.completion.chunk", Vec::new());
            chunk["usage"] = usage(used);
            chunk
        })
    }
}
