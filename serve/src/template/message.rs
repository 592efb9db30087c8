//! Messages as templates see them. In: JSON in the manner of OpenAI's API, from anyone. Out: messages of the right shape, keys
//! in the order they came (templates print them), arguments of tool calls as objects, or an error that names the field.

use super::line;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The names under which models call a text of reasoning.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Roles of OpenAI's API.
const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// What is wrong with a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
pub struct MessageError {
    /// The field, as a path: `messages[2].tool_calls[0].function.name`.
    pub field: String,
    /// The defect and the remedy.
    pub message: String,
}

fn refuse<T>(field: impl Into<String>, message: impl Into<String>) -> Result<T, MessageError> {
    Err(MessageError { field: field.into(), message: message.into() })
}

fn inside(at: &str, key: &str) -> String {
    if at.is_empty() { key.to_owned() } else { format!("{at}.{key}") }
}

/// A message: a role, content (a text, or a list of parts), calls of tools with their arguments as objects, and whatever else
/// was given, for the template to use.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Value", into = "Value")]
pub struct Message(Map<String, Value>);

impl TryFrom<Value> for Message {
    type Error = MessageError;

    fn try_from(value: Value) -> Result<Message, MessageError> {
        Message::parse(value, "")
    }
}

impl From<Message> for Value {
    fn from(message: Message) -> Value {
        Value::Object(message.0)
    }
}

impl Message {
    /// A message of a role with content.
    pub(super) fn of(role: &str, content: Value) -> Message {
        let entries = [("role".to_owned(), Value::from(role)), ("content".to_owned(), content)];
        Message(entries.into_iter().collect())
    }

    /// A message with a text.
    pub fn text(role: &str, content: &str) -> Message {
        Message::of(role, Value::from(content))
    }

    /// Reads `messages` of a request: at least one, each of the right shape.
    ///
    /// # Errors
    /// A field has the wrong type; it is named from `messages` on.
    pub fn list(value: Value) -> Result<Vec<Message>, MessageError> {
        match value {
            Value::Array(items) if items.is_empty() => {
                refuse("messages", "is empty; give at least one message")
            }
            Value::Array(items) => items
                .into_iter()
                .enumerate()
                .map(|(i, item)| Message::parse(item, &format!("messages[{i}]")))
                .collect(),
            other => refuse("messages", format!("must be a list of messages, not {}", kind(&other))),
        }
    }

    fn parse(value: Value, at: &str) -> Result<Message, MessageError> {
        let mut entries = match value {
            Value::Object(entries) => entries,
            other => {
                let field = if at.is_empty() { "message" } else { at };
                return refuse(field, format!("must be an object with a role, not {}", kind(&other)));
            }
        };
        match entries.get("role") {
            Some(Value::String(role)) if !role.is_empty() => {}
            Some(Value::String(_)) => return refuse(inside(at, "role"), "is empty; name a role, `user` say"),
            Some(other) => {
                return refuse(inside(at, "role"), format!("must be a text, not {}", kind(other)));
            }
            None => return refuse(inside(at, "role"), "is missing; name a role, `user` say"),
        }
        content(entries.get("content"), &inside(at, "content"))?;
        for key in ["name", "tool_call_id"].into_iter().chain(REASONING) {
            if let Some(other) = entries.get(key).filter(|v| !v.is_string() && !v.is_null()) {
                return refuse(inside(at, key), format!("must be a text, not {}", kind(other)));
            }
        }
        match entries.get_mut("tool_calls") {
            None | Some(Value::Null) => {}
            Some(Value::Array(calls)) => {
                for (i, one) in calls.iter_mut().enumerate() {
                    call(one, &format!("{}[{i}]", inside(at, "tool_calls")))?;
                }
            }
            Some(other) => {
                return refuse(inside(at, "tool_calls"), format!("must be a list, not {}", kind(other)));
            }
        }
        Ok(Message(entries))
    }

    /// What OpenAI's API demands beyond the shape: known roles, content where the role needs it, `tool_call_id` with the answer
    /// of a tool. Templates know other roles too; so this is a step of its own.
    ///
    /// # Errors
    /// A message breaks these rules; the field is named from `messages` on.
    pub fn check(messages: &[Message]) -> Result<(), MessageError> {
        for (i, message) in messages.iter().enumerate() {
            let field = |key: &str| format!("messages[{i}].{key}");
            let has = |key: &str| message.0.get(key).is_some_and(|v| !v.is_null());
            let role = message.role();
            if !ROLES.contains(&role) {
                return refuse(field("role"), format!("{:?} is none of {}", line(role), ROLES.join(", ")));
            }
            let calls = message.0.get("tool_calls").and_then(Value::as_array).is_some_and(|c| !c.is_empty());
            let calls =
                role == "assistant" && (calls || has("function_call") || message.reasoning().is_some());
            if !has("content") && !calls {
                return refuse(field("content"), format!("is missing; a message of role {role} needs it"));
            }
            if role == "tool" && !has("tool_call_id") {
                return refuse(field("tool_call_id"), "is missing; name the call that this answers");
            }
        }
        Ok(())
    }

    /// Who speaks.
    pub fn role(&self) -> &str {
        self.0.get("role").and_then(Value::as_str).unwrap_or("")
    }

    pub(super) fn set_role(&mut self, role: &str) {
        self.0.insert("role".into(), Value::from(role));
    }

    /// All fields, in the order they came.
    pub fn fields(&self) -> &Map<String, Value> {
        &self.0
    }

    fn reasoning(&self) -> Option<&Value> {
        REASONING.into_iter().find_map(|key| self.0.get(key).filter(|v| !v.is_null()))
    }

    /// The fields a template gets: none that is null, and reasoning under each name that templates read it by.
    pub(super) fn as_seen(&self) -> Map<String, Value> {
        let mut seen = Map::new();
        let reasoning = self.reasoning().cloned();
        if let Some(reasoning) = &reasoning {
            seen.insert("thinking".into(), reasoning.clone());
        }
        seen.extend(self.0.iter().filter(|(_, v)| !v.is_null()).map(|(k, v)| (k.clone(), v.clone())));
        if let Some(reasoning) = reasoning {
            seen.insert("reasoning_content".into(), reasoning);
        }
        seen
    }

    /// Makes one text of the parts.
    pub(super) fn join_parts(&mut self) -> Result<(), MessageError> {
        let Some(Value::Array(parts)) = self.0.get("content") else { return Ok(()) };
        let mut texts = Vec::with_capacity(parts.len());
        for (i, part) in parts.iter().enumerate() {
            match part.get("text").and_then(Value::as_str) {
                Some(text) => texts.push(text),
                None => {
                    let what = part.get("type").and_then(Value::as_str).unwrap_or("");
                    let message =
                        format!("the model takes texts only, not a part of type {:?}; remove it", line(what));
                    return refuse(format!("content[{i}]"), message);
                }
            }
        }
        let joined = texts.join("\n");
        self.0.insert("content".into(), Value::from(joined));
        Ok(())
    }

    /// Makes a part of the text.
    pub(super) fn split_text(&mut self) {
        if let Some(content @ Value::String(_)) = self.0.get_mut("content") {
            let text = content.take();
            *content = serde_json::json!([{"type": "text", "text": text}]);
        }
    }
}

fn content(value: Option<&Value>, at: &str) -> Result<(), MessageError> {
    let parts = match value {
        None | Some(Value::Null | Value::String(_)) => return Ok(()),
        Some(Value::Array(parts)) => parts,
        Some(other) => return refuse(at, format!("must be a text or a list of parts, not {}", kind(other))),
    };
    for (i, part) in parts.iter().enumerate() {
        let at = format!("{at}[{i}]");
        let Some(part) = part.as_object() else {
            return refuse(at, format!("must be a part with a type, not {}", kind(part)));
        };
        match (part.get("type").and_then(Value::as_str), part.get("text")) {
            (None, _) => return refuse(inside(&at, "type"), "must be a text, `text` say"),
            (Some("text"), text) if !text.is_some_and(Value::is_string) => {
                return refuse(inside(&at, "text"), "must be a text");
            }
            _ => {}
        }
    }
    Ok(())
}

fn call(value: &mut Value, at: &str) -> Result<(), MessageError> {
    let Some(entries) = value.as_object_mut() else {
        return refuse(at, format!("must be a call with a function, not {}", kind(value)));
    };
    for key in ["id", "type"] {
        if let Some(other) = entries.get(key).filter(|v| !v.is_string() && !v.is_null()) {
            return refuse(inside(at, key), format!("must be a text, not {}", kind(other)));
        }
    }
    let at = inside(at, "function");
    let Some(function) = entries.get_mut("function").and_then(Value::as_object_mut) else {
        return refuse(at, "must be an object with a name and arguments");
    };
    if !function.get("name").is_some_and(Value::is_string) {
        return refuse(inside(&at, "name"), "must be a text");
    }
    let arguments = function.entry("arguments").or_insert(Value::Null);
    let at = inside(&at, "arguments");
    let parsed = match &*arguments {
        Value::Object(_) => return Ok(()),
        Value::Null => Map::new(),
        Value::String(text) if text.trim().is_empty() => Map::new(),
        Value::String(text) => match serde_json::from_str(text) {
            Ok(Value::Object(parsed)) => parsed,
            Ok(other) => return refuse(at, format!("must hold a JSON object, not {}", kind(&other))),
            Err(e) => return refuse(at, format!("is no JSON ({}); give an object", line(&e.to_string()))),
        },
        other => return refuse(at, format!("must be an object or its JSON, not {}", kind(other))),
    };
    *arguments = Value::Object(parsed);
    Ok(())
}

/// A value's type, as an error shows it.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
