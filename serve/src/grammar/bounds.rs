//! Bounds of a grammar in Lark that stand before its parser, which is recursive: brackets in each other, repetitions of repetitions. Schemas in
//! it are checked as those of requests.

use serde_json::{Deserializer, Value};

use super::schema;

/// Brackets in each other.
const DEEPEST: usize = 64;

/// The product of the counts of repetition in a line, at most.
pub(super) const MOST: u64 = 20_000;

/// The grammar, if its brackets and counts are within bounds.
///
/// # Errors
/// One line that says what is too deep or too large.
pub(super) fn lark(text: String) -> Result<String, String> {
    if text.trim().is_empty() {
        return Err("is empty; give a grammar in GBNF or Lark".into());
    }
    let mut depth = 0_usize;
    for c in text.chars() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > DEEPEST {
            return Err(format!("has more than {DEEPEST} brackets in each other"));
        }
    }
    for line in text.lines() {
        let of_braces = line.split('{').skip(1).filter_map(|rest| count(rest.split('}').next()?));
        let of_tildes = line.split('~').skip(1).filter_map(|rest| count(rest.split_whitespace().next()?));
        if of_braces.chain(of_tildes).fold(1, u64::saturating_mul) > MOST {
            return Err(format!("has repetitions of more than {MOST} together"));
        }
    }
    schemas(&text)
}

/// The grammar, each schema behind `%json` checked.
fn schemas(text: &str) -> Result<String, String> {
    const BEGIN: &str = "%json";
    let (mut out, mut rest) = (String::new(), text);
    while let Some(at) = rest.find(BEGIN) {
        let (before, from) = rest.split_at(at + BEGIN.len());
        out.push_str(before);
        let mut values = Deserializer::from_str(from).into_iter::<Value>();
        let taken = match values.next() {
            Some(Ok(schema)) => {
                out.push(' ');
                out.push_str(&schema::checked(schema)?.to_string());
                values.byte_offset()
            }
            // In a text, or no JSON, which the library refuses.
            _ => 0,
        };
        rest = &from[taken..];
    }
    out.push_str(rest);
    Ok(out)
}

/// The largest number of a count, `3`, `3,5` or `3..5`.
fn count(text: &str) -> Option<u64> {
    let numbers = text.split([',', '.']).map(str::trim).filter(|n| !n.is_empty());
    let plain = |n: &str| n.bytes().all(|b| b.is_ascii_digit());
    let numbers: Vec<&str> = numbers.collect();
    let counts = numbers.iter().all(|n| plain(n)).then(|| numbers.iter());
    counts?.map(|n| n.parse().unwrap_or(u64::MAX)).max()
}
