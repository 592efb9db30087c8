//! Python, as far as templates see it. In: values, and the methods and filters that templates call on them. Out: what Python
//! and Jinja give. `minijinja` and its companion crate know most of it; here is what they lack or spell otherwise.

use super::limits;
use minijinja::value::{Kwargs, Tuple, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

pub(super) fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// Arguments of a call, taken in their order or by their names.
pub(super) struct Arguments {
    of: &'static str,
    /// The next one last.
    positional: Vec<Value>,
    named: Option<Kwargs>,
}

impl Arguments {
    pub(super) fn new(of: &'static str, args: &[Value]) -> Result<Arguments, Error> {
        let (named, positional) = match args.split_last() {
            Some((last, rest)) if last.is_kwargs() => (Some(Kwargs::try_from(last.clone())?), rest),
            _ => (None, args),
        };
        Ok(Arguments { of, positional: positional.iter().rev().cloned().collect(), named })
    }

    pub(super) fn take(&mut self, name: &str) -> Result<Option<Value>, Error> {
        match (self.positional.pop(), &self.named) {
            (None, Some(named)) if named.has(name) => named.get(name).map(Some),
            (value, _) => Ok(value),
        }
    }

    pub(super) fn flag(&mut self, name: &str) -> Result<bool, Error> {
        Ok(self.take(name)?.is_some_and(|v| v.is_true()))
    }

    fn read<T>(
        &mut self,
        name: &str,
        read: impl Fn(&Value) -> Option<T>,
        kind: impl Fn(&Value) -> String,
    ) -> Result<Option<T>, Error> {
        let Some(value) = self.take(name)?.filter(|v| !v.is_none()) else { return Ok(None) };
        let wrong = || invalid(format!("{}: {name} must be {}", self.of, kind(&value)));
        read(&value).ok_or_else(wrong).map(Some)
    }

    pub(super) fn text(&mut self, name: &str) -> Result<Option<String>, Error> {
        self.read(name, |v| v.as_str().map(str::to_owned), |v| format!("a text, not {}", v.kind()))
    }

    pub(super) fn count(&mut self, name: &str) -> Result<Option<i64>, Error> {
        self.read(name, |v| i64::try_from(v.clone()).ok(), |_| "a whole number".into())
    }

    pub(super) fn need<T>(&self, name: &str, value: Option<T>) -> Result<T, Error> {
        value.ok_or_else(|| Error::new(ErrorKind::MissingArgument, format!("{}: {name} is missing", self.of)))
    }

    pub(super) fn finish(self) -> Result<(), Error> {
        if !self.positional.is_empty() {
            return Err(Error::new(ErrorKind::TooManyArguments, format!("{}: too many arguments", self.of)));
        }
        self.named.map_or(Ok(()), |named| named.assert_all_used())
    }
}

/// A float as Python spells it: shortest digits that read back the same, an exponent outside of 1e-4..1e16.
pub(super) fn float(x: f64) -> String {
    if x.is_nan() {
        return "nan".into();
    }
    let text = format!("{x:?}");
    match text.split_once('e') {
        Some((digits, exponent)) => match exponent.parse::<i32>() {
            Ok(exponent) => format!("{digits}e{exponent:+03}"),
            Err(_) => text,
        },
        None => text,
    }
}

/// A value as `{{ value }}` shows it.
pub(super) fn printed(value: &Value) -> String {
    if value.kind() == ValueKind::Number && !value.is_integer() {
        return f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float);
    }
    value.to_string()
}

/// What `str.strip` strips: white space and the four separators of information that Python counts as such.
fn blank(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

pub(super) fn strip(text: &str, chars: Option<&str>, (start, end): (bool, bool)) -> String {
    let drop = |c: char| chars.map_or_else(|| blank(c), |chars| chars.contains(c));
    let text = if start { text.trim_start_matches(drop) } else { text };
    let text = if end { text.trim_end_matches(drop) } else { text };
    text.to_owned()
}

/// Methods of texts, lists and dicts.
pub(super) fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let known = match (value.as_str(), value.kind()) {
        (Some(text), _) => text_method(text, name, args)?,
        (_, ValueKind::Seq) => list_method(value, name, args)?,
        (_, ValueKind::Map) if name == "copy" && args.is_empty() => Some(value.clone()),
        _ => None,
    };
    match known {
        Some(made) => Ok(made),
        None => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args),
    }
}

fn text_method(text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let made = match name {
        "strip" | "lstrip" | "rstrip" => {
            let mut args = Arguments::new("strip", args)?;
            let chars = args.text("chars")?;
            args.finish()?;
            Value::from(strip(text, chars.as_deref(), (name != "rstrip", name != "lstrip")))
        }
        "split" | "rsplit" => {
            let mut args = Arguments::new("split", args)?;
            let (sep, most) = (args.text("sep")?, args.count("maxsplit")?);
            args.finish()?;
            split(text, sep.as_deref(), most.unwrap_or(-1), name == "rsplit")?
        }
        "partition" | "rpartition" => partition(text, name == "rpartition", args)?,
        "removeprefix" | "removesuffix" => {
            let mut args = Arguments::new("removeprefix", args)?;
            let affix = args.text("affix")?;
            let affix = args.need("affix", affix)?;
            args.finish()?;
            let cut = if name == "removeprefix" {
                text.strip_prefix(affix.as_str())
            } else {
                text.strip_suffix(affix.as_str())
            };
            Value::from(cut.unwrap_or(text))
        }
        "center" | "ljust" | "rjust" | "zfill" => pad(text, name, args)?,
        "join" => {
            let (items,): (&Value,) = minijinja::value::from_args(args)?;
            Value::from(joined(items, text)?)
        }
        "replace" => {
            let mut args = Arguments::new("replace", args)?;
            let (old, new) = (args.text("old")?, args.text("new")?);
            let (old, new) = (args.need("old", old)?, args.need("new", new)?);
            let most = args.count("count")?;
            args.finish()?;
            Value::from(replaced(text, &old, &new, most)?)
        }
        "splitlines" => lines(text, args)?,
        "title" => Value::from(title(text)),
        "casefold" => Value::from(text.to_lowercase().replace('ß', "ss")),
        "swapcase" => Value::from(text.chars().map(swap).collect::<String>()),
        "isdecimal" => Value::from(!text.is_empty() && text.chars().all(|c| c.is_ascii_digit())),
        "index" => {
            let found = minijinja::value::from_args::<(&str,)>(args).map(|(what,)| text.find(what))?;
            let at = found.ok_or_else(|| invalid("index: the text is not there".into()))?;
            Value::from(text[..at].chars().count())
        }
        "isspace" => Value::from(!text.is_empty() && text.chars().all(blank)),
        _ => return Ok(None),
    };
    Ok(Some(made))
}

fn list_method(list: &Value, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    match name {
        "copy" if args.is_empty() => Ok(Some(list.clone())),
        "index" => {
            let (what,): (&Value,) = minijinja::value::from_args(args)?;
            let at = list.try_iter()?.position(|item| item == *what);
            at.map(|at| Some(Value::from(at)))
                .ok_or_else(|| invalid("index: no such item in the list".into()))
        }
        "append" | "extend" | "insert" | "pop" | "remove" | "clear" | "sort" | "reverse" => {
            Err(invalid(format!("{name} would alter a list, which templates may not; build a new one")))
        }
        _ => Ok(None),
    }
}

/// Python's `str.split` and `str.rsplit`; no separator means runs of white space.
fn split(text: &str, sep: Option<&str>, most: i64, from_end: bool) -> Result<Value, Error> {
    let most = usize::try_from(most).unwrap_or(usize::MAX - 1);
    let mut parts: Vec<&str> = match (sep, from_end) {
        (Some(""), _) => return Err(invalid("split: the separator is empty".into())),
        (Some(sep), false) => text.splitn(most + 1, sep).collect(),
        (Some(sep), true) => text.rsplitn(most + 1, sep).collect(),
        (None, _) => return Ok(words(text, most, from_end).into_iter().map(Value::from).collect()),
    };
    if from_end {
        parts.reverse();
    }
    Ok(parts.into_iter().map(Value::from).collect())
}

fn words(text: &str, most: usize, from_end: bool) -> Vec<&str> {
    let mut rest = text.trim_matches(blank);
    let mut found = Vec::new();
    while !rest.is_empty() {
        let cut = if from_end { rest.rfind(blank) } else { rest.find(blank) };
        let Some(at) = cut.filter(|_| found.len() < most) else {
            found.push(rest);
            break;
        };
        let next = at + rest[at..].chars().next().map_or(0, char::len_utf8);
        if from_end {
            found.push(&rest[next..]);
            rest = rest[..at].trim_end_matches(blank);
        } else {
            found.push(&rest[..at]);
            rest = rest[next..].trim_start_matches(blank);
        }
    }
    if from_end {
        found.reverse();
    }
    found
}

fn partition(text: &str, from_end: bool, args: &[Value]) -> Result<Value, Error> {
    let (sep,): (&str,) = minijinja::value::from_args(args)?;
    if sep.is_empty() {
        return Err(invalid("partition: the separator is empty".into()));
    }
    let found = if from_end { text.rsplit_once(sep) } else { text.split_once(sep) };
    let parts = match (found, from_end) {
        (Some((a, b)), _) => [a, sep, b],
        (None, false) => [text, "", ""],
        (None, true) => ["", "", text],
    };
    Ok(Value::from(Tuple::from(parts.map(Value::from))))
}

pub(super) fn pad(text: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let mut args = Arguments::new("width", args)?;
    let width = args.count("width")?;
    let width = usize::try_from(args.need("width", width)?).unwrap_or(0);
    let fill = args.text("fillchar")?;
    args.finish()?;
    let fill = fill.unwrap_or_else(|| if name == "zfill" { "0" } else { " " }.into());
    let blanks = width.saturating_sub(text.chars().count());
    if blanks.saturating_mul(fill.len()) > limits::TEXT {
        return Err(limits::exceeded());
    }
    let left = match name {
        "ljust" => 0,
        "center" => blanks / 2 + (blanks & width & 1),
        _ => blanks,
    };
    let sign = text.len() - text.strip_prefix(['+', '-']).filter(|_| name == "zfill").unwrap_or(text).len();
    let (sign, digits) = text.split_at(sign);
    Ok(Value::from(format!("{sign}{}{digits}{}", fill.repeat(left), fill.repeat(blanks - left))))
}

/// The texts of items with another between them.
pub(super) fn joined(items: &Value, between: &str) -> Result<String, Error> {
    let mut made = String::new();
    for (i, item) in items.try_iter()?.enumerate() {
        if i > 0 {
            made.push_str(between);
        }
        made.push_str(&printed(&item));
        if made.len() > limits::TEXT {
            return Err(limits::exceeded());
        }
    }
    Ok(made)
}

/// `old` replaced by `new`, from the left, `most` times if that is not negative.
pub(super) fn replaced(text: &str, old: &str, new: &str, most: Option<i64>) -> Result<String, Error> {
    let most = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
    let found = text.matches(old).count().min(most);
    if found.saturating_mul(new.len()) > limits::TEXT {
        return Err(limits::exceeded());
    }
    Ok(text.replacen(old, new, most))
}

/// Python's `str.splitlines`, which knows more ends of a line than most.
fn lines(text: &str, args: &[Value]) -> Result<Value, Error> {
    let mut args = Arguments::new("splitlines", args)?;
    let keep = args.flag("keepends")?;
    args.finish()?;
    let ends = |c| {
        matches!(
            c,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let (mut rest, mut found) = (text, Vec::new());
    while let Some(at) = rest.find(ends) {
        let end = if rest[at..].starts_with("\r\n") {
            2
        } else {
            rest[at..].chars().next().map_or(0, char::len_utf8)
        };
        found.push(Value::from(&rest[..if keep { at + end } else { at }]));
        rest = &rest[at + end..];
    }
    if !rest.is_empty() {
        found.push(Value::from(rest));
    }
    Ok(Value::from(found))
}

/// Python's `str.title`: every run of letters begins with a capital.
fn title(text: &str) -> String {
    let mut made = String::with_capacity(text.len());
    let mut inside = false;
    for c in text.chars() {
        if inside {
            made.extend(c.to_lowercase());
        } else {
            made.extend(c.to_uppercase());
        }
        inside = c.is_alphabetic();
    }
    made
}

fn swap(c: char) -> char {
    let mut other =
        if c.is_uppercase() { c.to_lowercase().to_string() } else { c.to_uppercase().to_string() };
    match (other.pop(), other.is_empty()) {
        (Some(swapped), true) => swapped,
        _ => c,
    }
}
