//! Strict JSON. In: the bytes of a configuration file. Out: its top-level object, or the line and column of what is
//! wrong. Unlike a plain parse, a key given twice is an error, because which of the two counts would be chance.

use super::error::{ConfigError, excerpt};
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::fmt;

/// Text of `bytes`, a leading byte order mark removed.
pub(crate) fn decode<'a>(bytes: &'a [u8], file: &str) -> Result<&'a str, ConfigError> {
    std::str::from_utf8(bytes).map_err(|e| ConfigError::File {
        file: file.to_owned(),
        problem: format!("is not UTF-8 (byte {})", e.valid_up_to()),
        remedy: "give a config.json, saved as UTF-8, or the model's folder".to_owned(),
    })
}

/// The object that `text` holds.
pub(crate) fn object(text: &str, file: &str) -> Result<Map<String, Value>, ConfigError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    match serde_json::from_str::<Unique>(text) {
        Ok(Unique(Value::Object(map))) => Ok(map),
        Ok(Unique(other)) => Err(ConfigError::File {
            file: file.to_owned(),
            problem: format!("holds {}, not a JSON object", kind(&other)),
            remedy: "a configuration is an object of keys and values".to_owned(),
        }),
        Err(e) => Err(ConfigError::File {
            file: file.to_owned(),
            problem: format!("is not valid JSON ({})", excerpt_error(&e)),
            remedy: "correct it there (JSON has no comments, NaN or Infinity, and no key twice)".to_owned(),
        }),
    }
}

/// The parser's message with its position; the message may quote a key, so it is made one short line.
fn excerpt_error(e: &serde_json::Error) -> String {
    let full = e.to_string();
    let position = format!(" at line {} column {}", e.line(), e.column());
    let message = full.strip_suffix(&position).unwrap_or(&full);
    format!("{}{position}", excerpt(message))
}

/// The kind of a value, for messages.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// A value in which no object has a key twice.
struct Unique(Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        d.deserialize_any(UniqueVisitor).map(Unique)
    }
}

struct UniqueVisitor;

macro_rules! visit_plain {
    ($($visit:ident: $type:ty),*) => {
        $(fn $visit<E: Error>(self, v: $type) -> Result<Value, E> {
            Ok(v.into())
        })*
    };
}

impl<'de> Visitor<'de> for UniqueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    visit_plain!(visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_f64: f64, visit_str: &str);

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Unique(v)) = seq.next_element()? {
            list.push(v);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if map.contains_key(&key) {
                return Err(A::Error::custom(format!("key `{}` appears twice", excerpt(&key))));
            }
            let Unique(value) = entries.next_value()?;
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}
