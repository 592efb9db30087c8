//! Fields of a request's body. In: bytes. Out: values of the right type, each taken by its name, or the error that names the
//! field, what it must be and what it is. A field that is null is a field that is absent.

use serde_json::{Map, Value};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::error::ApiError;
pub(super) use crate::template::kind;

/// The fields of a body that are not read yet.
#[derive(Clone, Debug)]
pub struct Fields {
    entries: Map<String, Value>,
    /// Set when the client that sent them has left.
    pub(super) abandoned: Arc<AtomicBool>,
    /// Path of the object they are in; empty for the body itself.
    within: &'static str,
}

impl Fields {
    /// Parses a body; `abandoned` is set when its client leaves.
    ///
    /// # Errors
    /// It is no JSON object. Numbers that are none (`1e999`), halves of surrogate pairs and too deep nesting are not JSON.
    pub fn parse(body: &[u8], abandoned: Arc<AtomicBool>) -> Result<Fields, ApiError> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(entries)) => Ok(Fields { entries, abandoned, within: "" }),
            Ok(other) => Err(ApiError::body(format!("the body must be a JSON object, not {}", kind(&other)))),
            Err(e) => {
                let e = e.to_string();
                Err(ApiError::body(format!("the body is no valid JSON: {}", e.lines().next().unwrap_or(""))))
            }
        }
    }

    /// Whether all fields have been read.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// A field's value as it is.
    pub fn raw(&mut self, name: &str) -> Option<Value> {
        self.entries.remove(name).filter(|v| !v.is_null())
    }

    /// A field's value, which stays.
    pub fn peek(&self, name: &str) -> Option<&Value> {
        self.entries.get(name).filter(|value| !value.is_null())
    }

    /// Whether a field is there.
    pub fn has(&self, name: &str) -> bool {
        self.peek(name).is_some()
    }

    /// Sets a field.
    pub fn put(&mut self, name: &str, value: Value) {
        self.entries.insert(name.into(), value);
    }

    /// A field of a type.
    ///
    /// # Errors
    /// The value is of another.
    pub fn take<T: Read>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        let value = self.raw(name);
        value.map(|v| T::read(v).map_err(|wrong| self.refusal(name, wrong))).transpose()
    }

    /// A field of a type, with what its absence means.
    ///
    /// # Errors
    /// The value is of another type.
    pub fn or<T: Read>(&mut self, name: &str, absent: T) -> Result<T, ApiError> {
        Ok(self.take(name)?.unwrap_or(absent))
    }

    /// A list of no more than `most`, empty if absent.
    ///
    /// # Errors
    /// It is no list, it is longer, or an item is of another type.
    pub fn list<T: Read>(&mut self, name: &str, most: usize) -> Result<Vec<T>, ApiError> {
        let list: Vec<Value> = self.or(name, Vec::new())?;
        if list.len() > most {
            let n = list.len();
            return Err(self.refusal(name, format!("must have at most {most} items, not {n}")));
        }
        self.items(name, list)
    }

    /// The items of the list at `path`.
    ///
    /// # Errors
    /// An item is of another type.
    pub fn items<T: Read>(&self, path: &str, list: Vec<Value>) -> Result<Vec<T>, ApiError> {
        let item = |(i, v)| T::read(v).map_err(|wrong| self.refusal(&format!("{path}[{i}]"), wrong));
        list.into_iter().enumerate().map(item).collect()
    }

    /// An object's fields.
    ///
    /// # Errors
    /// It is none.
    pub fn object(&mut self, name: &'static str) -> Result<Option<Fields>, ApiError> {
        Ok(self.take::<Map<String, Value>>(name)?.map(|entries| Fields {
            entries,
            abandoned: self.abandoned.clone(),
            within: name,
        }))
    }

    /// The error of a field.
    pub fn refusal(&self, name: &str, wrong: impl std::fmt::Display) -> ApiError {
        let path = if self.within.is_empty() { name.to_owned() } else { format!("{}.{name}", self.within) };
        ApiError::field(path, wrong)
    }
}

/// Adds to a text where it is; what is no text becomes one.
pub fn append(value: &mut Value, text: &str) {
    match value {
        Value::String(before) => before.push_str(text),
        other => *other = text.into(),
    }
}

/// What a field can be.
pub trait Read: Sized {
    /// Reads the value, or says what it must be.
    fn read(value: Value) -> Result<Self, String>;
}

fn must<T>(be: &str, value: &Value) -> Result<T, String> {
    Err(format!("must be {be}, not {}", kind(value)))
}

impl Read for Value {
    fn read(value: Value) -> Result<Value, String> {
        Ok(value)
    }
}

macro_rules! read_variant {
    ($($type:ty, $variant:ident, $be:literal;)*) => {$(
        impl Read for $type {
            fn read(value: Value) -> Result<$type, String> {
                match value {
                    Value::$variant(read) => Ok(read),
                    other => must($be, &other),
                }
            }
        }
    )*};
}

read_variant! {
    bool, Bool, "a boolean";
    String, String, "a text";
    Vec<Value>, Array, "a list";
    Map<String, Value>, Object, "an object";
}

impl Read for f32 {
    /// What is too large for it is infinite, which no range has.
    fn read(value: Value) -> Result<f32, String> {
        value.as_f64().map_or_else(|| must("a number", &value), |x| Ok(x as f32))
    }
}

/// Integers that a float holds exactly.
const EXACT: f64 = 9_007_199_254_740_992.0;

impl Read for i128 {
    fn read(value: Value) -> Result<i128, String> {
        let Value::Number(n) = &value else { return must("an integer", &value) };
        let whole = |x: &f64| x.fract() == 0.0 && x.abs() <= EXACT;
        let read = n.as_i64().map(i128::from).or_else(|| n.as_u64().map(i128::from));
        let read = read.or_else(|| n.as_f64().filter(whole).map(|x| x as i128));
        read.ok_or_else(|| format!("must be an integer, not {n}"))
    }
}

macro_rules! read_integer {
    ($($type:ty)*) => {$(
        impl Read for $type {
            fn read(value: Value) -> Result<$type, String> {
                let n = i128::read(value)?;
                let least = i128::from(<$type>::MIN as i64);
                n.try_into().map_err(|_| match n < least {
                    true => format!("must be at least {least}, not {n}"),
                    false => format!("{n} is too large; at most {}", <$type>::MAX),
                })
            }
        }
    )*};
}

read_integer!(u32 usize i32);
