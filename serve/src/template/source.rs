//! Source of a template, made fit for the engine. In: Jinja as transformers reads it. Out: the same with `generation` blocks,
//! which mark what the assistant wrote and print it unaltered, spelt as the plain scope that they are; and with a filter on
//! what `~`, `+` and `*` work on, since the engine counts their steps but not the text that they make.

/// Replaces `{% generation %}` by `{% with %}` and its end alike; whitespace control stays. Comments, raw blocks and strings
/// are left alone. Every end of a line becomes `\n`, as Jinja reads it.
pub(super) fn plain(source: &str) -> String {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut made = String::with_capacity(source.len());
    let mut rest = source.as_str();
    while let Some(at) = rest.find('{') {
        made.push_str(&rest[..at]);
        rest = &rest[at..];
        let taken = match rest.as_bytes().get(1) {
            Some(b'#') => rest.find("#}").map_or(rest.len(), |end| end + 2),
            Some(b'{') => code(rest, "}}"),
            Some(b'%') => match keyword(rest) {
                "raw" => raw(rest),
                _ => code(rest, "%}"),
            },
            _ => 1,
        };
        let (tag, after) = rest.split_at(taken);
        match keyword(tag) {
            word @ ("generation" | "endgeneration") if tag.starts_with("{%") => {
                made.push_str(&tag.replacen(word, if word == "generation" { "with" } else { "endwith" }, 1));
            }
            "raw" => made.push_str(tag),
            _ if tag.starts_with("{{") || tag.starts_with("{%") => insert_filters(tag, &mut made),
            _ => made.push_str(tag),
        }
        rest = after;
    }
    made + rest
}

/// The first word of a tag.
fn keyword(tag: &str) -> &str {
    let inner = tag.get(2..).unwrap_or("").trim_start_matches(['-', '+']).trim_start();
    let end = inner.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(inner.len());
    &inner[..end]
}

/// Length of a tag that ends with `close`, outside of strings and of braces.
fn code(tag: &str, close: &str) -> usize {
    let bytes = tag.as_bytes();
    let (mut at, mut braces) = (2, 0usize);
    while at < bytes.len() {
        match bytes[at] {
            b'{' => {
                braces += 1;
                at += 1;
            }
            b'}' if braces > 0 => {
                braces -= 1;
                at += 1;
            }
            quote @ (b'"' | b'\'') => {
                at += 1;
                while at < bytes.len() && bytes[at] != quote {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
                at += 1;
            }
            _ if bytes[at..].starts_with(close.as_bytes()) => return at + close.len(),
            _ => at += 1,
        }
    }
    tag.len()
}

/// The filters that count text; see [`super::limits`].
pub(super) const TEXT: &str = "__text";
pub(super) const TIMES: &str = "__times";
pub(super) const AGAIN: &str = "__again";
pub(super) const POWER: &str = "__power";

/// Words that no operand ends with.
const KEYWORDS: [&str; 15] = [
    "and",
    "or",
    "not",
    "in",
    "is",
    "if",
    "elif",
    "else",
    "for",
    "set",
    "with",
    "filter",
    "call",
    "do",
    "recursive",
];

/// Copies a tag with the filters put in: a filter binds closer than any of the operators, so it goes right behind the operand.
fn insert_filters(tag: &str, made: &mut String) {
    let tokens = tokens(tag);
    let solid = |token: &&&str| !token.starts_with(char::is_whitespace);
    let operand = |token: &str| {
        let word = token.starts_with(|c: char| c.is_alphanumeric() || c == '_');
        (word && !KEYWORDS.contains(&token)) || token.ends_with(['"', '\'', ')', ']', '}'])
    };
    // Where the text so far would take a filter, and ends of right operands to come.
    let mut ends: Vec<usize> = Vec::new();
    let mut at = made.len();
    for (i, token) in tokens.iter().enumerate() {
        let left = (0..i).rev().find(|j| solid(&&tokens[*j]));
        let before = left.is_some_and(|j| operand(tokens[j]));
        let follows = tokens[i + 1..].iter().find(solid).is_some_and(|t| !["%}", "}}"].contains(t));
        let filter = match *token {
            "~" | "+" => TEXT,
            "*" if left.is_some_and(|j| ends.contains(&j)) => AGAIN,
            "*" => TIMES,
            "**" => POWER,
            _ => "",
        };
        if before && follows && !filter.is_empty() {
            made.insert_str(at, &format!("|{filter}"));
            if filter != TEXT {
                ends.push(right(&tokens, i + 1));
            }
        }
        made.push_str(token);
        if solid(&token) {
            at = made.len();
        }
        if ends.contains(&i) {
            made.push_str(&format!("|{TIMES}"));
        }
    }
}

/// The last token of the operand that begins at `from`: signs, a word or a string or brackets, then attributes, calls, filters.
fn right(tokens: &[&str], from: usize) -> usize {
    let (mut depth, mut last, mut before) = (0usize, from, "");
    for (i, token) in tokens.iter().enumerate().skip(from) {
        let solid = |c: char| c.is_alphanumeric() || matches!(c, '_' | '"' | '\'');
        match *token {
            t if t.starts_with(char::is_whitespace) => continue,
            "(" | "[" => depth += 1,
            "{" if depth > 0 || before.is_empty() => depth += 1,
            "}}" if depth > 1 => depth -= 2,
            ")" | "]" | "}" if depth > 0 => depth -= 1,
            "." | "|" => {}
            "-" | "+" if matches!(before, "" | "-" | "+") => {}
            _ if depth > 0 => {}
            t if t.starts_with(solid) && matches!(before, "" | "-" | "+" | "." | "|") => {}
            t if t.ends_with(['"', '\'']) && before.ends_with(['"', '\'']) => {}
            _ => break,
        }
        (last, before) = (i, token);
    }
    last
}

/// A tag cut into words, numbers, strings, blanks and signs.
fn tokens(tag: &str) -> Vec<&str> {
    let (mut found, mut rest) = (Vec::new(), tag);
    while let Some(first) = rest.chars().next() {
        let run = |inside: fn(char) -> bool| rest.find(|c| !inside(c)).unwrap_or(rest.len());
        let taken = match first {
            c if c.is_whitespace() => run(char::is_whitespace),
            '0'..='9' => number(rest),
            c if c.is_alphanumeric() || c == '_' => run(|c| c.is_alphanumeric() || c == '_'),
            '"' | '\'' => string(rest, first),
            _ => ["**", "{{", "}}", "{%", "%}"]
                .iter()
                .find(|s| rest.starts_with(**s))
                .map_or(first.len_utf8(), |s| s.len()),
        };
        let (token, after) = rest.split_at(taken);
        found.push(token);
        rest = after;
    }
    found
}

fn number(text: &str) -> usize {
    let hex = text.starts_with("0x") || text.starts_with("0X");
    let mut before = '0';
    for (at, c) in text.char_indices() {
        let exponent = matches!(c, '+' | '-') && matches!(before, 'e' | 'E') && !hex;
        let point = c == '.' && text[at + 1..].starts_with(|c: char| c.is_ascii_digit());
        if !(c.is_ascii_alphanumeric() || c == '_' || point || exponent) {
            return at;
        }
        before = c;
    }
    text.len()
}

fn string(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Length of a raw block with its ends.
fn raw(block: &str) -> usize {
    let mut at = 2;
    while let Some(next) = block[at..].find("{%") {
        at += next;
        if keyword(&block[at..]) == "endraw" {
            return at + code(&block[at..], "%}");
        }
        at += 2;
    }
    block.len()
}
