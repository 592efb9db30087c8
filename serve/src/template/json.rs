//! The filter `tojson`. In: a value of a template. Out: the text that Python's `json.dumps` gives, which is what models were
//! trained on: a blank after separators, keys in the order they came, nothing escaped for HTML, floats as Python spells them.

use super::limits;
use super::python::{Arguments, float, invalid};
use minijinja::value::ValueKind;
use minijinja::{Error, Value};

/// Deeper values are refused, as Python refuses them.
const DEPTH: usize = 500;

/// Wider indents are refused: a line would be blanks.
const INDENT: i64 = 256;

struct Writer {
    out: String,
    ascii: bool,
    sorted: bool,
    indent: Option<String>,
    comma: String,
    colon: String,
}

/// `value | tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(value: &Value, mut args: Arguments) -> Result<Value, Error> {
    let ascii = args.flag("ensure_ascii")?;
    let indent = args.take("indent")?.filter(|v| !v.is_none()).map(|v| indent(&v)).transpose()?;
    let separators = args.take("separators")?.filter(|v| !v.is_none());
    let sorted = args.flag("sort_keys")?;
    args.finish()?;
    let (comma, colon) = match separators {
        Some(pair) => pair_of(&pair)?,
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let mut writer = Writer { out: String::new(), ascii, sorted, indent, comma, colon };
    writer.value(value, 0)?;
    Ok(Value::from(writer.out))
}

fn indent(value: &Value) -> Result<String, Error> {
    if let Some(text) = value.as_str().filter(|text| text.len() <= INDENT as usize) {
        return Ok(text.to_owned());
    }
    match bool::try_from(value.clone()).map(i64::from).or_else(|_| i64::try_from(value.clone())) {
        Ok(blanks) if blanks <= INDENT => Ok(" ".repeat(usize::try_from(blanks).unwrap_or(0))),
        _ => Err(invalid(format!("tojson: indent must be a number or blanks, at most {INDENT}"))),
    }
}

fn pair_of(value: &Value) -> Result<(String, String), Error> {
    let items: Vec<Value> = value.try_iter()?.take(3).collect();
    match items.as_slice() {
        [comma, colon] if comma.as_str().is_some() && colon.as_str().is_some() => {
            Ok((comma.to_string(), colon.to_string()))
        }
        _ => Err(invalid("tojson: separators must be two texts".into())),
    }
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH {
            return Err(invalid(format!("tojson: the value is nested deeper than {DEPTH}")));
        }
        if self.out.len() > limits::TEXT {
            return Err(limits::exceeded());
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)),
            ValueKind::String => self.text(value.as_str().unwrap_or("")),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.map(|item| (None, item));
                self.container(['[', ']'], items, depth)?;
            }
            ValueKind::Map => {
                let mut pairs: Vec<(Option<String>, Value)> = Vec::new();
                for key in value.try_iter()? {
                    pairs.push((Some(name(&key)?), value.get_item(&key)?));
                }
                if self.sorted {
                    pairs.sort_by(|(a, _), (b, _)| a.cmp(b));
                }
                self.container(['{', '}'], pairs.into_iter(), depth)?;
            }
            kind => return Err(invalid(format!("tojson: a value that is {kind} has no JSON form"))),
        }
        Ok(())
    }

    fn container(
        &mut self,
        [open, close]: [char; 2],
        items: impl Iterator<Item = (Option<String>, Value)>,
        depth: usize,
    ) -> Result<(), Error> {
        self.out.push(open);
        let mut empty = true;
        for (key, value) in items {
            if !empty {
                self.out.push_str(&self.comma);
            }
            empty = false;
            self.line(depth + 1);
            if let Some(key) = key {
                self.text(&key);
                self.out.push_str(&self.colon);
            }
            self.value(&value, depth + 1)?;
        }
        if !empty {
            self.line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            (0..depth).for_each(|_| self.out.push_str(indent));
        }
    }

    fn text(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    match f64::try_from(value.clone()) {
        Ok(x) if x.is_nan() => "NaN".into(),
        Ok(x) if x.is_infinite() => if x > 0.0 { "Infinity" } else { "-Infinity" }.into(),
        Ok(x) => float(x),
        Err(_) => value.to_string(),
    }
}

/// A key as `json.dumps` writes it.
fn name(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.to_string()),
        ValueKind::None => Ok("null".into()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.into()),
        ValueKind::Number => Ok(number(key)),
        kind => Err(invalid(format!("tojson: a key that is {kind} has no JSON form"))),
    }
}
