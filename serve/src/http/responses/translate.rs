//! Requests of the Responses API as chats. In: items and fields in one form. Out: messages, and fields under the names that chats have.

use serde_json::{Map, Value, json};

use super::super::error::ApiError;
use super::super::fields::{Fields, kind};
use super::super::params::short;
use super::super::talk::Said;
use crate::request::MOST_LOGPROBS;

/// Fields that a response repeats, with what they are where the request has none.
const REPEATED: [(&str, &str); 15] = [
    ("instructions", "null"),
    ("max_output_tokens", "null"),
    ("metadata", "{}"),
    ("parallel_tool_calls", "true"),
    ("previous_response_id", "null"),
    ("reasoning", r#"{"effort": null, "summary": null}"#),
    ("store", "true"),
    ("text", r#"{"format": {"type": "text"}}"#),
    ("tool_choice", r#""auto""#),
    ("tools", "[]"),
    ("top_logprobs", "0"),
    ("truncation", r#""disabled""#),
    ("user", "null"),
    ("background", "false"),
    ("service_tier", r#""default""#),
];

/// The fields that a response repeats.
pub fn repeated(fields: &Fields) -> Map<String, Value> {
    let one = |(name, absent): (&str, &str)| {
        let value = fields.peek(name).cloned().or_else(|| serde_json::from_str(absent).ok());
        (name.to_owned(), value.unwrap_or_default())
    };
    REPEATED.into_iter().map(one).collect()
}

/// Rewrites the fields of a request that goes on from messages; gives the conversation up to its answer.
///
/// # Errors
/// A field is missing, or has a form that it cannot have.
pub fn request(fields: &mut Fields, before: Vec<Value>) -> Result<Vec<Value>, ApiError> {
    if fields.or("background", false)? {
        return Err(fields.refusal("background", "is not supported; leave it out"));
    }
    for (name, instead) in [
        ("conversation", "send the items, or previous_response_id"),
        ("prompt", "send its text as instructions"),
    ] {
        if fields.raw(name).is_some() {
            return Err(fields.refusal(name, format!("is not supported; {instead}")));
        }
    }
    let mut messages = before;
    match fields.raw("input") {
        None => return Err(fields.refusal("input", "is missing; give a text or a list of items")),
        Some(Value::String(text)) => messages.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) => {
            for (i, item) in items.into_iter().enumerate() {
                add(&mut messages, item, &format!("input[{i}]"))?;
            }
        }
        Some(other) => {
            let what = format!("must be a text or a list of items, not {}", kind(&other));
            return Err(fields.refusal("input", what));
        }
    }
    let system = fields.take::<String>("instructions")?;
    let system = system.map(|text| json!({"role": "system", "content": text}));
    fields.put("messages", system.into_iter().chain(messages.iter().cloned()).collect());
    if let Some(most) = fields.raw("max_output_tokens") {
        fields.put("max_completion_tokens", most);
    }
    if let Some(mut reasoning) = fields.object("reasoning")?
        && let Some(effort) = reasoning.raw("effort")
    {
        fields.put("reasoning_effort", effort);
    }
    tools(fields)?;
    format(fields)?;
    Ok(messages)
}

/// How many likeliest tokens are told beside each of the answer's text, if log-probabilities are.
///
/// # Errors
/// There are to be too many.
pub fn likeliest(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let include: Vec<String> = fields.list("include", usize::MAX)?;
    let top = fields.or("top_logprobs", 0)?;
    if top > MOST_LOGPROBS {
        return Err(fields.refusal("top_logprobs", format!("must be at most {MOST_LOGPROBS}, not {top}")));
    }
    let wanted = top > 0 || include.iter().any(|what| what == "message.output_text.logprobs");
    Ok(wanted.then_some(top))
}

/// Adds an item to the conversation.
fn add(messages: &mut Vec<Value>, item: Value, at: &str) -> Result<(), ApiError> {
    if !item.is_object() {
        return Err(ApiError::field(at, format!("must be an item, an object, not {}", kind(&item))));
    }
    let named = |key: &str| {
        let text = item[key].as_str().map(str::to_owned);
        text.ok_or_else(|| ApiError::field(format!("{at}.{key}"), "must be a text"))
    };
    match item["type"].as_str().unwrap_or("message") {
        "message" => {
            let mut role = named("role")?;
            if role == "developer" {
                role = "system".into();
            }
            let content = texts(&item["content"], &format!("{at}.content"))?;
            messages.push(json!({"role": role, "content": content}));
        }
        "function_call" => {
            let function = json!({"name": named("name")?, "arguments": named("arguments")?});
            let call = json!({"id": named("call_id")?, "type": "function", "function": function});
            match messages.last_mut().filter(|last| last["role"] == "assistant") {
                Some(last) if last["tool_calls"].is_array() => {
                    last["tool_calls"].as_array_mut().into_iter().for_each(|calls| calls.push(call.clone()));
                }
                Some(last) => last["tool_calls"] = json!([call]),
                None => messages.push(json!({"role": "assistant", "content": "", "tool_calls": [call]})),
            }
        }
        "function_call_output" => {
            let output = texts(&item["output"], &format!("{at}.output"))?;
            messages.push(json!({"role": "tool", "tool_call_id": named("call_id")?, "content": output}));
        }
        "reasoning" => {
            let thought = texts(&item["content"], &format!("{at}.content")).unwrap_or_default();
            if !thought.is_empty() {
                messages.push(json!({"role": "assistant", "content": "", "reasoning_content": thought}));
            }
        }
        other => {
            let wrong = format!("{:?} is not supported; give a message, a call or its output", short(other));
            return Err(ApiError::field(format!("{at}.type"), wrong));
        }
    }
    join(messages);
    Ok(())
}

/// A thought, or what was said, and what follows it from the assistant are one message.
fn join(messages: &mut Vec<Value>) {
    let [.., before, last] = messages.as_mut_slice() else { return };
    let both = before["role"] == "assistant" && last["role"] == "assistant";
    if !both || before["content"] != "" || before["tool_calls"].is_array() {
        return;
    }
    if last["reasoning_content"].is_null() && !before["reasoning_content"].is_null() {
        last["reasoning_content"] = before["reasoning_content"].take();
    }
    messages.remove(messages.len() - 2);
}

/// The text of content: a text, or parts that are texts.
fn texts(content: &Value, at: &str) -> Result<String, ApiError> {
    let parts = match content {
        Value::String(text) => return Ok(text.clone()),
        Value::Array(parts) => parts,
        other => {
            let what = format!("must be a text or a list of parts, not {}", kind(other));
            return Err(ApiError::field(at, what));
        }
    };
    let mut texts = Vec::with_capacity(parts.len());
    for (i, part) in parts.iter().enumerate() {
        let kinds = ["input_text", "output_text", "reasoning_text", "summary_text", "text"];
        let what = part["type"].as_str().unwrap_or("");
        match part["text"].as_str().or_else(|| part["refusal"].as_str()) {
            Some(text) if kinds.contains(&what) || what == "refusal" => texts.push(text),
            _ => {
                let wrong = format!("only texts are supported, not {:?}; remove the part", short(what));
                return Err(ApiError::field(format!("{at}[{i}].type"), wrong));
            }
        }
    }
    Ok(texts.join("\n"))
}

fn tools(fields: &mut Fields) -> Result<(), ApiError> {
    let mut tools = Vec::new();
    for (i, mut tool) in fields.list::<Map<String, Value>>("tools", usize::MAX)?.into_iter().enumerate() {
        let what = tool.remove("type");
        if what.as_ref().and_then(Value::as_str) != Some("function") {
            let wrong = "only \"function\" is supported; remove the tool";
            return Err(fields.refusal(&format!("tools[{i}].type"), wrong));
        }
        tools.push(json!({"type": "function", "function": tool}));
    }
    if !tools.is_empty() {
        fields.put("tools", tools.into());
    }
    if let Some(choice) = fields.raw("tool_choice") {
        let name = choice.get("name").filter(|_| choice["type"] == "function").cloned();
        let named = name.map(|name| json!({"type": "function", "function": {"name": name}}));
        let choice =
            named.or_else(|| Some(choice).filter(|choice| !choice.is_object())).ok_or_else(|| {
                let what =
                    "must be \"none\", \"auto\", \"required\", or {\"type\": \"function\", \"name\": …}";
                fields.refusal("tool_choice", what)
            })?;
        fields.put("tool_choice", choice);
    }
    Ok(())
}

/// What the answer must be.
fn format(fields: &mut Fields) -> Result<(), ApiError> {
    let Some(mut text) = fields.object("text")? else { return Ok(()) };
    let Some(format) = text.take::<Map<String, Value>>("format")? else { return Ok(()) };
    let kind = format.get("type").cloned().unwrap_or_default();
    let format = if kind == "json_schema" {
        json!({"type": kind, "json_schema": format})
    } else {
        Value::Object(format)
    };
    fields.put("response_format", format);
    Ok(())
}

/// An answer as a message of the conversation; its calls have the ids of their items.
pub fn message(said: &Said, items: &[Value]) -> Value {
    let mut message = json!({"role": "assistant", "content": said.content});
    if !said.reasoning.is_empty() {
        message["reasoning_content"] = json!(said.reasoning);
    }
    let calls = items.iter().filter(|item| item["type"] == "function_call").map(|item| {
        let function = json!({"name": item["name"], "arguments": item["arguments"]});
        json!({"id": item["call_id"], "type": "function", "function": function})
    });
    let calls: Vec<Value> = calls.collect();
    if !calls.is_empty() {
        message["tool_calls"] = json!(calls);
    }
    message
}
