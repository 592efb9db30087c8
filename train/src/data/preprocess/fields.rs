//! The fields of a record: texts, messages, numbers, under the names that the configuration gives them.

use super::build::{Nothing, Record};
use super::config::Fields;
use astrai_serve::template::Message;
use serde_json::Value;

/// The name that a record has for a field.
pub(super) fn field<'a>(fields: &'a Fields, name: &'a str) -> &'a str {
    fields.get(name).map_or(name, String::as_str)
}

/// Numbers or truth values, one or a list.
pub(super) fn numbers(record: &Record, field: &str) -> Result<Vec<f32>, Nothing> {
    let one = |value: &Value| match value {
        Value::Number(n) => n.as_f64().map(|x| x as f32).filter(|x| x.is_finite()),
        Value::Bool(b) => Some(f32::from(u8::from(*b))),
        _ => None,
    };
    let all: Option<Vec<f32>> = match record.get(field) {
        Some(Value::Array(list)) => list.iter().map(one).collect(),
        Some(value) => one(value).map(|x| vec![x]),
        None => None,
    };
    all.ok_or_else(|| format!("`{field}` is no number or list of numbers; mend it").into())
}

/// A text as a message of a role, or messages as they are.
pub(super) fn as_messages(value: &Value, field: &str, role: &str) -> Result<Vec<Message>, Nothing> {
    match value {
        Value::String(text) => Ok(vec![Message::text(role, text)]),
        Value::Array(_) => Ok(Message::list(value.clone()).map_err(|e| format!("`{field}`: {e}"))?),
        _ => Err(format!("`{field}` is neither a text nor messages; mend it").into()),
    }
}

pub(super) fn answer(record: &Record, field: &str, name: &str) -> Result<Vec<Message>, Nothing> {
    match record.get(field) {
        Some(value) => as_messages(value, field, "assistant"),
        None => {
            Err(format!("has no `{field}`; give it, or name the field of {name} in the configuration").into())
        }
    }
}

/// The prompt: under its own name, or under `input`, the older one.
pub(super) fn prompt(record: &Record, fields: &Fields) -> Result<Option<Vec<Message>>, Nothing> {
    let name = field(fields, "prompt");
    let older = (!fields.contains_key("prompt")).then(|| record.get("input")).flatten();
    let value = record.get(name).filter(|v| !v.is_null()).or(older);
    value.map(|value| as_messages(value, name, "user")).transpose()
}
