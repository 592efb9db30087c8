//! `POST /v1/chat/completions`: a conversation, put through the model's template and continued. Tools are shown to the
//! template; what the model writes about calling them comes back as text.

use serde_json::{Map, Value, json};

use super::app::App;
use super::error::ApiError;
use super::fields::{Fields, kind};
use super::generate::{Endpoint, Head};
use super::logprobs;
use super::params::{Params, short};
use crate::answer::{Delta, Ended, Token};
use crate::request::MOST_LOGPROBS;
use crate::template::{Chat, Message};

/// Tools, and documents, of a request.
const MOST_TOOLS: usize = 1024;

/// How chats are read and written.
#[derive(Debug)]
pub struct ChatCompletions;

/// The prompt of a conversation as text, and whether special tokens are to be added to it.
///
/// # Errors
/// A field is wrong, or the template refuses the conversation.
pub fn prompt(app: &App, fields: &mut Fields) -> Result<(String, bool), ApiError> {
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
        abandoned: Some(&fields.abandoned),
    })?;
    // The template has put the special tokens where they belong.
    Ok((text, fields.or("add_special_tokens", false)?))
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
    let shown = match choice.as_ref().map(|how| (how, how.as_str())) {
        None | Some((_, Some("auto"))) => true,
        Some((_, Some("none"))) => false,
        Some((how, text)) => {
            let what = text.map_or_else(|| kind(how).to_owned(), |text| format!("{:?}", short(text)));
            let wrong = format!("must be \"auto\" or \"none\"; {what} is not supported");
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

/// Log-probabilities of the tokens that are shown, if asked for: one that ends the answer is not.
fn shown_logprobs(head: &Head, tokens: &[Token], ended: Option<Ended>) -> Value {
    let hidden = usize::from(matches!(ended, Some(Ended::Eos | Ended::StopId(_))));
    match head.params.sampling.logprobs {
        Some(_) => logprobs::chat(&head.app.tokenizer, &tokens[..tokens.len().saturating_sub(hidden)]),
        None => Value::Null,
    }
}

impl Endpoint for ChatCompletions {
    const PREFIX: &'static str = "chatcmpl-";
    const PROMPT: &'static str = "messages";
    const OBJECT: &'static str = "chat.completion";
    const CHUNK: &'static str = "chat.completion.chunk";

    fn read(fields: &mut Fields, params: &mut Params, app: &App) -> Result<(Self, Vec<Vec<u32>>), ApiError> {
        params.sampling.logprobs = likeliest(fields)?;
        if fields.or("echo", false)? {
            return Err(fields.refusal("echo", "is for /v1/completions; leave it out"));
        }
        let (text, add_special) = prompt(app, fields)?;
        Ok((ChatCompletions, vec![app.encode(Self::PROMPT, &text, add_special)?]))
    }

    fn whole(&mut self, head: &Head, choice: Delta) -> Value {
        let Delta { index, text, tokens, ended } = choice;
        let message = json!({"role": "assistant", "content": text, "refusal": null});
        json!({
            "index": index, "message": message, "logprobs": shown_logprobs(head, &tokens, ended),
            "finish_reason": ended.map_or("stop", Ended::name), "stop_reason": head.stop_reason(ended),
        })
    }

    fn begin(&mut self, head: &Head) -> Vec<Value> {
        let delta = json!({"role": "assistant", "content": ""});
        let one = |index| json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null});
        (0..head.params.n).map(one).collect()
    }

    /// What is shown, and by itself that it ends.
    fn delta(&mut self, head: &Head, delta: Delta) -> Vec<Value> {
        let Delta { index, text, tokens, ended } = delta;
        let shown = shown_logprobs(head, &tokens, ended);
        let new = (!text.is_empty() || !shown.is_null()).then(|| {
            let delta = json!({"content": text});
            json!({"index": index, "delta": delta, "logprobs": shown, "finish_reason": null})
        });
        let end = ended.map(|reason| {
            json!({
                "index": index, "delta": {}, "logprobs": null, "finish_reason": reason.name(),
                "stop_reason": head.stop_reason(ended),
            })
        });
        new.into_iter().chain(end).collect()
    }
}
