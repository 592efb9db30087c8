//! A JSON value in text that comes character by character: where it ends. What is inside is only looked at when it is whole.

use serde_json::{Map, Value};

use super::Call;

/// Objects and lists in each other, at most: as many as the parser takes.
const DEEPEST: usize = 120;

/// An object that is being read.
#[derive(Debug, Default)]
pub(super) struct Object {
    text: String,
    /// What closes each that is open.
    open: Vec<char>,
    in_string: bool,
    escaped: bool,
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Read {
    More,
    Whole,
    /// This is no JSON object.
    Wrong,
}

impl Object {
    /// Takes the next character, the first of which is `{`.
    pub fn push(&mut self, c: char) -> Read {
        self.text.push(c);
        if self.in_string {
            match c {
                '\0'..=' ' if c < ' ' => return Read::Wrong,
                _ if self.escaped => self.escaped = false,
                '\\' => self.escaped = true,
                '"' => self.in_string = false,
                _ => {}
            }
            return Read::More;
        }
        match c {
            '{' => self.open.push('}'),
            '[' if !self.open.is_empty() => self.open.push(']'),
            '}' | ']' => {
                if self.open.pop() != Some(c) {
                    return Read::Wrong;
                }
                if self.open.is_empty() {
                    return Read::Whole;
                }
            }
            _ if self.open.is_empty() => return Read::Wrong,
            '"' => self.in_string = true,
            _ => {}
        }
        if self.open.len() > DEEPEST { Read::Wrong } else { Read::More }
    }

    /// Whether nothing has been read.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// The object, if it is one; whole ones only.
    pub fn take(&mut self) -> Option<Map<String, Value>> {
        let text = std::mem::take(&mut self.text);
        self.open.clear();
        serde_json::from_str(&text).ok()
    }
}

/// A call written as an object with a name and arguments, which some formats call parameters.
pub(super) fn call(mut object: Map<String, Value>) -> Option<Call> {
    let name = match object.remove("name") {
        Some(Value::String(name)) if !name.is_empty() => name,
        _ => return None,
    };
    let arguments = object.remove("arguments").or_else(|| object.remove("parameters"));
    arguments_of(arguments).map(|arguments| Call { name, arguments })
}

/// The text of a call's arguments: an object, one written as a text, or none.
fn arguments_of(value: Option<Value>) -> Option<String> {
    match value {
        None | Some(Value::Null) => Some("{}".into()),
        Some(Value::Object(arguments)) => Some(Value::Object(arguments).to_string()),
        Some(Value::String(text)) => {
            let inner: Map<String, Value> = serde_json::from_str(&text).ok()?;
            Some(Value::Object(inner).to_string())
        }
        Some(_) => None,
    }
}

/// A call of a tool by its name, with the object that was read.
pub(super) fn named(name: &str, object: Option<Map<String, Value>>) -> Option<Call> {
    let name = name.trim();
    let plain = !name.is_empty() && !name.contains(char::is_whitespace);
    let arguments = Value::Object(object.filter(|_| plain)?).to_string();
    Some(Call { name: name.into(), arguments })
}
