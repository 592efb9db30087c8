//! Requests of Anthropic's API as chats. In: fields in one form. Out: the same fields in the other: system prompt and turns as messages,
//! results of tools as messages of their own, tools, choices and thinking under the names that chats have.

use serde_json::{Map, Value, json};

use super::super::error::ApiError;
use super::super::fields::{Fields, Read, append, kind};
use super::super::params::short;

/// What a client puts before its system prompt to count by; it changes with every request, and would keep prefixes from being found.
const BILLING: &str = "x-anthropic-billing-header:";

/// Tokens of thinking that may be asked for, at least.
const LEAST_THINKING: usize = 1024;

/// Rewrites the fields of a request. `max_tokens` must be there if it is to be answered.
///
/// # Errors
/// A field is missing or has a form that it cannot have.
pub fn request(fields: &mut Fields, answered: bool) -> Result<(), ApiError> {
    if answered && !fields.has("max_tokens") {
        return Err(fields.refusal("max_tokens", "is missing; say how many tokens there may be at most"));
    }
    for name in ["mcp_servers", "container"] {
        if fields.raw(name).is_some_and(|value| value.as_array().is_none_or(|all| !all.is_empty())) {
            return Err(fields.refusal(name, "is not supported; leave it out"));
        }
    }
    let mut turns = Turns::default();
    if let Some(system) = fields.raw("system") {
        turns.system = texts(system, "system")?;
    }
    match fields.raw("messages") {
        None => return Err(fields.refusal("messages", "is missing; give at least one message")),
        Some(Value::Array(all)) => {
            for (i, message) in all.into_iter().enumerate() {
                turns.add(message, &format!("messages[{i}]"))?;
            }
        }
        Some(other) => {
            let what = format!("must be a list of messages, not {}", kind(&other));
            return Err(fields.refusal("messages", what));
        }
    }
    // Of a turn that the client has begun the answer is the rest.
    let begun = turns.all.last().is_some_and(|last| {
        last["role"] == "assistant" && last["content"] != "" && !last.contains_key("tool_calls")
    });
    if begun {
        fields.put("continue_final_message", true.into());
    }
    fields.put("messages", turns.messages());
    if let Some(stops) = fields.raw("stop_sequences") {
        fields.put("stop", stops);
    }
    tools(fields)?;
    thinking(fields)?;
    output(fields)
}

/// The texts of a system prompt or a result: a text, or a list of blocks of text.
fn texts(value: Value, at: &str) -> Result<Vec<String>, ApiError> {
    let blocks = match value {
        Value::Null => return Ok(Vec::new()),
        Value::String(text) => return Ok(vec![text]),
        Value::Array(blocks) => blocks,
        other => {
            let what = format!("must be a text or a list of blocks, not {}", kind(&other));
            return Err(ApiError::field(at, what));
        }
    };
    let one = |(i, block): (usize, Value)| text(&block, &format!("{at}[{i}]"));
    let texts: Vec<String> = blocks.into_iter().enumerate().map(one).collect::<Result<_, _>>()?;
    Ok(texts.into_iter().filter(|text| !text.starts_with(BILLING)).collect())
}

fn text(block: &Value, at: &str) -> Result<String, ApiError> {
    let what = block["type"].as_str().unwrap_or("");
    match block["text"].as_str() {
        Some(text) if what == "text" => Ok(text.to_owned()),
        _ if what == "text" => Err(ApiError::field(format!("{at}.text"), "must be a text")),
        _ => {
            let wrong = format!("only texts are supported here, not {:?}; remove the block", short(what));
            Err(ApiError::field(format!("{at}.type"), wrong))
        }
    }
}

/// A conversation in the making.
#[derive(Default)]
struct Turns {
    system: Vec<String>,
    all: Vec<Map<String, Value>>,
}

impl Turns {
    fn add(&mut self, message: Value, at: &str) -> Result<(), ApiError> {
        let Value::Object(mut message) = message else {
            return Err(ApiError::field(at, format!("must be an object, not {}", kind(&message))));
        };
        let content = message.remove("content").unwrap_or_default();
        let inside = format!("{at}.content");
        if content.is_null() {
            return Err(ApiError::field(inside, "is missing"));
        }
        match message.get("role").and_then(Value::as_str) {
            Some("user") => self.user(content, &inside),
            Some("assistant") => self.assistant(content, &inside),
            // Before all turns it is part of the system prompt; later most templates know no such thing.
            Some("system") if self.all.is_empty() => {
                self.system.extend(texts(content, &inside)?);
                Ok(())
            }
            Some("system") => {
                texts(content, &inside)?.into_iter().for_each(|text| self.say("user", &text));
                Ok(())
            }
            _ => Err(ApiError::field(format!("{at}.role"), "must be \"user\" or \"assistant\"")),
        }
    }

    /// Adds a text to the last turn, if it is of this role, or begins one.
    fn say(&mut self, role: &str, text: &str) {
        match self.all.last_mut() {
            Some(last) if last["role"] == *role => {
                let content = last.entry("content").or_insert_with(|| "".into());
                if *content != "" {
                    append(content, "\n");
                }
                append(content, text);
            }
            _ => self.push(json!({"role": role, "content": text})),
        }
    }

    fn push(&mut self, message: Value) {
        if let Value::Object(message) = message {
            self.all.push(message);
        }
    }

    /// A turn of the user's: results of tools first, in order, then what is said.
    fn user(&mut self, content: Value, at: &str) -> Result<(), ApiError> {
        let Value::Array(blocks) = content else {
            return texts(content, at).map(|texts| texts.iter().for_each(|text| self.say("user", text)));
        };
        if blocks.is_empty() {
            return Err(ApiError::field(at, "is empty; give a block at least"));
        }
        let mut said = Vec::new();
        for (i, block) in blocks.iter().enumerate() {
            let at = format!("{at}[{i}]");
            if block["type"] != "tool_result" {
                said.push(text(block, &at)?);
                continue;
            }
            let Some(id) = block["tool_use_id"].as_str() else {
                return Err(ApiError::field(
                    format!("{at}.tool_use_id"),
                    "must name the call that this answers",
                ));
            };
            let result = texts(block["content"].clone(), &format!("{at}.content"))?.join("\n");
            self.push(json!({"role": "tool", "tool_call_id": id, "content": result}));
        }
        said.iter().for_each(|text| self.say("user", text));
        Ok(())
    }

    fn assistant(&mut self, content: Value, at: &str) -> Result<(), ApiError> {
        let Value::Array(blocks) = content else {
            return texts(content, at).map(|texts| texts.iter().for_each(|text| self.say("assistant", text)));
        };
        if self.all.last().is_none_or(|last| last["role"] != "assistant") {
            self.push(json!({"role": "assistant", "content": ""}));
        }
        for (i, block) in blocks.iter().enumerate() {
            let at = format!("{at}[{i}]");
            match block["type"].as_str() {
                Some("thinking") => {
                    let thought = block["thinking"].as_str().unwrap_or("");
                    if let Some(last) = self.all.last_mut() {
                        last.insert("reasoning_content".into(), thought.into());
                    }
                }
                Some("redacted_thinking") => {}
                Some("tool_use") => {
                    let call = call(block, &at)?;
                    if let Some(last) = self.all.last_mut() {
                        let calls = last.entry("tool_calls").or_insert_with(|| json!([]));
                        calls.as_array_mut().into_iter().for_each(|calls| calls.push(call.clone()));
                    }
                }
                _ => {
                    let text = text(block, &at)?;
                    self.say("assistant", &text);
                }
            }
        }
        Ok(())
    }

    fn messages(self) -> Value {
        let system = self.system.join("\n");
        let first = (!system.is_empty()).then(|| json!({"role": "system", "content": system}));
        first.into_iter().chain(self.all.into_iter().map(Value::Object)).collect()
    }
}

fn call(block: &Value, at: &str) -> Result<Value, ApiError> {
    let (Some(id), Some(name)) = (block["id"].as_str(), block["name"].as_str()) else {
        return Err(ApiError::field(at, "must have an id and a name"));
    };
    let input = match &block["input"] {
        Value::Null => json!({}),
        input @ Value::Object(_) => input.clone(),
        other => {
            let what = format!("must be an object, not {}", kind(other));
            return Err(ApiError::field(format!("{at}.input"), what));
        }
    };
    Ok(json!({"id": id, "type": "function", "function": {"name": name, "arguments": input}}))
}

/// Tools, and which of them are to be called.
fn tools(fields: &mut Fields) -> Result<(), ApiError> {
    let mut tools = Vec::new();
    for (i, tool) in fields.list::<Map<String, Value>>("tools", usize::MAX)?.into_iter().enumerate() {
        match tool.get("type").and_then(Value::as_str) {
            None | Some("custom") => {}
            Some(other) => {
                let wrong = format!(
                    "{:?} is a tool of another server's; give one with an input_schema",
                    short(other)
                );
                return Err(fields.refusal(&format!("tools[{i}].type"), wrong));
            }
        }
        let mut function = Map::new();
        for (theirs, ours) in
            [("name", "name"), ("description", "description"), ("input_schema", "parameters")]
        {
            function.extend(tool.get(theirs).map(|value| (ours.to_owned(), value.clone())));
        }
        tools.push(json!({"type": "function", "function": function}));
    }
    let none = tools.is_empty();
    if !none {
        fields.put("tools", tools.into());
    }
    let Some(mut choice) = fields.object("tool_choice")? else { return Ok(()) };
    let name = choice.take::<String>("name")?;
    let alone = choice.or("disable_parallel_tool_use", false)?;
    let kind = choice.peek("type").and_then(Value::as_str);
    if none && matches!(kind, Some("any" | "tool")) {
        return Err(choice.refusal("type", "asks for a call, but there are no tools"));
    }
    let ours = match (choice.take::<String>("type")?.as_deref(), name) {
        (Some("auto"), _) => json!("auto"),
        (Some("any"), _) => json!("required"),
        (Some("none"), _) => json!("none"),
        (Some("tool"), Some(name)) => json!({"type": "function", "function": {"name": name}}),
        (Some("tool"), None) => return Err(choice.refusal("name", "is missing; name the tool")),
        _ => return Err(choice.refusal("type", "must be \"auto\", \"any\", \"tool\" or \"none\"")),
    };
    fields.put("tool_choice", ours);
    fields.put("parallel_tool_calls", (!alone).into());
    Ok(())
}

fn thinking(fields: &mut Fields) -> Result<(), ApiError> {
    let Some(mut thinking) = fields.object("thinking")? else { return Ok(()) };
    let on = match thinking.take::<String>("type")?.as_deref() {
        Some("enabled") => {
            let budget = thinking.take::<usize>("budget_tokens")?;
            let most = fields.peek("max_tokens").and_then(Value::as_u64).unwrap_or(u64::MAX);
            match budget {
                Some(n) if n as u64 >= most => {
                    return Err(
                        thinking.refusal("budget_tokens", format!("must be below max_tokens, {most}"))
                    );
                }
                Some(n) if n >= LEAST_THINKING => fields.put("thinking_token_budget", n.into()),
                _ => {
                    let what = format!("must be at least {LEAST_THINKING}");
                    return Err(thinking.refusal("budget_tokens", what));
                }
            }
            true
        }
        Some("adaptive") => true,
        Some("disabled") => false,
        _ => return Err(thinking.refusal("type", "must be \"enabled\", \"adaptive\" or \"disabled\"")),
    };
    let mut variables: Map<String, Value> = fields.or("chat_template_kwargs", Map::new())?;
    variables.entry("enable_thinking").or_insert(on.into());
    fields.put("chat_template_kwargs", variables.into());
    Ok(())
}

/// What the answer must be, in either of the places where it is said, and how much effort it is worth.
fn output(fields: &mut Fields) -> Result<(), ApiError> {
    let mut inner = None;
    if let Some(mut config) = fields.object("output_config")? {
        inner = config.raw("format");
        if let Some(effort) = config.take::<String>("effort")? {
            fields.put("reasoning_effort", effort.into());
        }
    }
    let Some(format) = inner.or_else(|| fields.raw("output_format")) else {
        return Ok(());
    };
    let mut format = Map::read(format).map_err(|wrong| fields.refusal("output_format", wrong))?;
    if format.get("type").is_none_or(|kind| kind != "json_schema") {
        return Err(fields.refusal("output_format.type", "must be \"json_schema\""));
    }
    let schema = format.remove("schema").unwrap_or_default();
    fields.put("response_format", json!({"type": "json_schema", "json_schema": {"schema": schema}}));
    Ok(())
}
