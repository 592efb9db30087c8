//! A JSON value in text that comes character by character: where it ends. What is inside is only looked at when it is whole.

use serde::Deserialize;
use serde_json::value::RawValue;
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

    /// The text of the object, which is whole.
    pub fn take(&mut self) -> String {
        self.open.clear();
        std::mem::take(&mut self.text)
    }
}

/// A call written as an object.
#[derive(Deserialize)]
struct Written<'a> {
    name: String,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
    #[serde(borrow)]
    parameters: Option<&'a RawValue>,
}

/// A call written as an object with a name and arguments, which some formats call parameters: an object, one written as a text, or none.
pub(super) fn call(object: &str) -> Option<Call> {
    let Written { name, arguments, parameters } = serde_json::from_str(object).ok()?;
    let arguments = match arguments.or(parameters).map(RawValue::get) {
        None => "{}".into(),
        Some(text) if text.starts_with('"') => compact_object(&serde_json::from_str::<String>(text).ok()?)?,
        Some(text) => compact_object(text)?,
    };
    (!name.is_empty()).then_some(Call { name, arguments })
}

/// A call of a tool by its name, with the text of its arguments' object.
pub(super) fn named(name: &str, object: &str) -> Option<Call> {
    let name = name.trim();
    let plain = !name.is_empty() && !name.contains(char::is_whitespace);
    Some(Call { name: name.into(), arguments: compact_object(object).filter(|_| plain)? })
}

fn compact_object(text: &str) -> Option<String> {
    serde_json::from_str::<Map<String, Value>>(text).ok().map(|_| compact(text))
}

/// JSON without the space between its parts. Numbers keep their digits, of which a parsed number has seventeen at most.
pub(super) fn compact(json: &str) -> String {
    let (mut in_string, mut escaped) = (false, false);
    let kept = |c: &char| {
        let quote = *c == '"' && !escaped;
        escaped = in_string && *c == '\\' && !escaped;
        in_string ^= quote;
        in_string || !c.is_ascii_whitespace()
    };
    json.chars().filter(kept).collect()
}
