//! Structural tags: answers whose parts stand between tags, as vLLM's `structural_tag` and xgrammar describe them. In: the description, hostile,
//! in the form with a `format` or the older one of `structures` and `triggers`. Out: a grammar in Lark, or what of it cannot be.
//!
//! A text that goes on until a tag is one terminal that ends with the tag: a lexer takes as much as it can, and would take the beginning of
//! a tag for text. So free text may stand where a tag or the answer ends it, and nowhere else.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::fields::{Read, kind};
use super::params::short;
use crate::grammar::{Wanted, quoted, within};
use crate::tokenizer::Tokenizer;

/// Formats in each other.
const DEEPEST: usize = 32;

/// Kinds of formats that are understood.
const KINDS: [&str; 11] = [
    "const_string",
    "json_schema",
    "regex",
    "any_text",
    "sequence",
    "or",
    "optional",
    "star",
    "tag",
    "triggered_tags",
    "tags_with_separator",
];

/// A part of a tag.
#[derive(Clone, PartialEq)]
enum Piece {
    Text(String),
    /// A special token, which no text is taken for.
    Token(u32),
}

/// Pieces of a tag; never empty.
type Tag = Vec<Piece>;

/// What comes right behind a format.
#[derive(Clone, Copy)]
enum Behind<'a> {
    /// The end of the answer.
    End,
    /// One of these tags, which belongs to the format.
    Tags(&'a [Tag]),
    /// Something that a free text would be taken for.
    Other,
}

/// The answer that a description wants.
///
/// # Errors
/// One line: what of it is wrong, or not supported.
pub fn wanted(tokenizer: &Tokenizer, value: Value) -> Result<Wanted, String> {
    let mut writer = Writer { tokenizer, rules: String::new(), names: HashMap::new() };
    let description = match value {
        Value::String(text) => serde_json::from_str(&text).map_err(|_| "must be the JSON of an object")?,
        other => other,
    };
    within(&description.to_string())?;
    let mut object = Map::read(description)?;
    let format = match (object.remove("format"), object.remove("structures")) {
        (Some(format), None) => format,
        (None, Some(structures)) => triggered(structures, object.remove("triggers"))?,
        _ => return Err("needs either `format`, or `structures` with `triggers`".into()),
    };
    let start = writer.format(&format, Behind::End, 0)?;
    let text = format!("start: {start}\n{}", writer.rules);
    within(&text).map(|()| Wanted::Lark(text))
}

/// The older form in terms of the newer.
fn triggered(structures: Value, triggers: Option<Value>) -> Result<Value, String> {
    let structures = Vec::<Value>::read(structures).map_err(|wrong| format!("structures {wrong}"))?;
    let tag = |value| {
        let mut structure = Map::read(value).map_err(|wrong| format!("structures: each {wrong}"))?;
        let schema = structure.remove("schema").filter(|schema| !schema.is_null()).unwrap_or(true.into());
        structure.insert("content".into(), serde_json::json!({"type": "json_schema", "json_schema": schema}));
        Ok(Value::Object(structure))
    };
    let tags = structures.into_iter().map(tag).collect::<Result<Vec<_>, String>>()?;
    Ok(serde_json::json!({"type": "triggered_tags", "triggers": triggers, "tags": tags}))
}

struct Writer<'a> {
    tokenizer: &'a Tokenizer,
    rules: String,
    /// Names of rules and terminals, by their bodies.
    names: HashMap<String, String>,
}

/// Looks at the values of a format, and names it in what is wrong with them.
struct Format<'a> {
    of: &'a str,
    object: &'a Map<String, Value>,
}

impl<'a> Format<'a> {
    fn wrong<T>(&self, what: impl std::fmt::Display) -> Result<T, String> {
        Err(format!("{}: {what}", self.of))
    }

    fn get(&self, key: &str) -> Result<&'a Value, String> {
        let value = self.object.get(key).filter(|value| !value.is_null());
        value.map_or_else(|| self.wrong(format!("`{key}` is missing")), Ok)
    }

    fn text(&self, key: &str) -> Result<&'a str, String> {
        let value = self.get(key)?;
        value.as_str().map_or_else(|| self.wrong(format!("`{key}` must be a text, not {}", kind(value))), Ok)
    }

    fn list(&self, key: &str) -> Result<&'a [Value], String> {
        match self.get(key)? {
            Value::Array(list) if list.is_empty() => self.wrong(format!("`{key}` is empty")),
            Value::Array(list) => Ok(list),
            other => self.wrong(format!("`{key}` must be a list, not {}", kind(other))),
        }
    }

    fn texts(&self, key: &str) -> Result<Vec<&'a str>, String> {
        let text = |value: &'a Value| value.as_str().filter(|text| !text.is_empty());
        let texts: Option<Vec<&str>> = self.list(key)?.iter().map(text).collect();
        texts.map_or_else(|| self.wrong(format!("`{key}` must have texts, none of them empty")), Ok)
    }

    fn is(&self, key: &str) -> Result<bool, String> {
        match self.object.get(key) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(is)) => Ok(*is),
            Some(other) => self.wrong(format!("`{key}` must be a boolean, not {}", kind(other))),
        }
    }

    /// Texts that a free text may not have in it.
    fn excludes(&self) -> Result<Vec<&'a str>, String> {
        let absent = self.object.get("excludes").is_none_or(|e| e.is_null() || e == &Value::Array(vec![]));
        if absent { Ok(Vec::new()) } else { self.texts("excludes") }
    }
}

impl Writer<'_> {
    /// An expression of a format with what is behind it, if that is a tag.
    fn format(&mut self, value: &Value, behind: Behind, depth: usize) -> Result<String, String> {
        if depth > DEEPEST {
            return Err(format!("has more than {DEEPEST} formats in each other"));
        }
        let Value::Object(object) = value else {
            return Err(format!("a format must be an object, not {}", kind(value)));
        };
        let of = object.get("type").and_then(Value::as_str).unwrap_or("");
        let f = Format { of, object };
        let plain = match of {
            "const_string" => {
                let text = f.text("value")?;
                if text.is_empty() { return f.wrong("`value` is empty") } else { self.tag(text) }
            }
            "json_schema" => self.schema(&f)?,
            "regex" => {
                if !f.excludes()?.is_empty() {
                    return f.wrong("`excludes` is not supported");
                }
                let checked = Wanted::checked_regex(f.text("pattern")?);
                self.named("PART", format!("/{}/", slashed(&checked.or_else(|e| f.wrong(e))?)))?
            }
            "any_text" => return self.text(&f, &[], behind),
            "sequence" => return self.sequence(&f, behind, depth),
            "or" => {
                let each = f.list("elements")?.iter().map(|e| self.format(e, behind, depth + 1));
                return Ok(format!("({})", each.collect::<Result<Vec<_>, _>>()?.join(" | ")));
            }
            "optional" | "star" => {
                let content = self.format(f.get("content")?, Behind::Other, depth + 1)?;
                format!("({content}){}", if of == "star" { "*" } else { "?" })
            }
            "tag" => return self.tagged(&f, f.text("begin")?, behind, depth),
            "triggered_tags" => return self.triggered(&f, behind, depth),
            "tags_with_separator" => self.separated(&f, depth)?,
            other => {
                return Err(format!(
                    "the format {:?} is not supported; there are {}",
                    short(other),
                    KINDS.join(", ")
                ));
            }
        };
        self.closed(plain, behind)
    }

    /// An expression with the tag behind it.
    fn closed(&mut self, plain: String, behind: Behind) -> Result<String, String> {
        Ok(match behind {
            Behind::Tags(ends) => {
                let ends: Vec<String> = ends.iter().map(|end| spelt(end)).collect();
                self.named("part", format!("{plain} ({})", ends.join(" | ")))?
            }
            Behind::End | Behind::Other => plain,
        })
    }

    fn schema(&mut self, f: &Format) -> Result<String, String> {
        let style = f.object.get("style").filter(|style| !style.is_null() && *style != "json");
        if style.is_some() {
            return f.wrong("`style` can only be \"json\"");
        }
        let schema = Wanted::checked_schema(f.get("json_schema")?.clone()).or_else(|wrong| f.wrong(wrong))?;
        self.named("part", format!("%json {schema}"))
    }

    fn sequence(&mut self, f: &Format, behind: Behind, depth: usize) -> Result<String, String> {
        let elements = f.list("elements")?;
        let mut all = Vec::new();
        for (i, element) in elements.iter().enumerate() {
            let behind = if i + 1 == elements.len() { behind } else { Behind::Other };
            all.push(self.format(element, behind, depth + 1)?);
        }
        self.named("part", all.join(" "))
    }

    /// A tag, of whose beginning `rest` is still to come.
    fn tagged(&mut self, f: &Format, rest: &str, behind: Behind, depth: usize) -> Result<String, String> {
        let ends = match f.get("end")? {
            Value::String(end) => vec![end.as_str()],
            Value::Array(_) => f.texts("end")?,
            other => return f.wrong(format!("`end` must be a text or a list of texts, not {}", kind(other))),
        };
        let begin = if rest.is_empty() { String::new() } else { self.tag(rest) };
        let content = f.get("content")?;
        if ends == [""] {
            let content = self.format(content, behind, depth + 1)?;
            return self.named("part", format!("{begin} {content}"));
        }
        let ends: Vec<Tag> = ends.into_iter().map(|end| self.pieces(end)).collect();
        let content = self.format(content, Behind::Tags(&ends), depth + 1)?;
        let tag = self.named("part", format!("{begin} {content}"))?;
        self.closed(tag, behind)
    }

    /// Texts with tags in them, each of which begins with a trigger.
    fn triggered(&mut self, f: &Format, behind: Behind, depth: usize) -> Result<String, String> {
        let (triggers, tags) = (f.texts("triggers")?, f.list("tags")?);
        let mut rests = vec![Vec::new(); triggers.len()];
        for tag in tags {
            let Some(object) = tag.as_object() else { return f.wrong("`tags` must have objects") };
            let tag = Format { of: "tag", object };
            let begin = tag.text("begin")?;
            let found = triggers.iter().position(|trigger| begin.starts_with(trigger));
            let Some(at) = found else {
                return f.wrong(format!("the tag {:?} begins with no trigger", short(begin)));
            };
            rests[at].push(self.tagged(&tag, &begin[triggers[at].len()..], Behind::Other, depth + 1)?);
        }
        let heads: Vec<Tag> = triggers.iter().map(|trigger| self.pieces(trigger)).collect();
        let (mut excluded, mut called) = (firsts(&heads), Vec::new());
        excluded.extend(f.excludes()?.into_iter().map(str::to_owned));
        if let Behind::Tags(ends) = behind {
            excluded.extend(firsts(ends));
        }
        for (head, rests) in heads.iter().zip(&rests).filter(|(_, rests)| !rests.is_empty()) {
            called.push(format!("{} ({})", self.until(head, &excluded)?, rests.join(" | ")));
        }
        let called = self.named("part", called.join(" | "))?;
        let (must, once) = (f.is("at_least_one")?, f.is("stop_after_first")?);
        if must && once {
            return self.closed(called, behind);
        }
        let last = self.text(f, &firsts(&heads), behind)?;
        match (must, once) {
            (false, true) => {
                let alone = self.closed(called, behind)?;
                Ok(format!("({alone} | {last})"))
            }
            (true, _) => self.named("part", format!("{called}+ {last}")),
            (false, false) => self.named("part", format!("{called}* {last}")),
        }
    }

    fn separated(&mut self, f: &Format, depth: usize) -> Result<String, String> {
        let mut tags = Vec::new();
        for tag in f.list("tags")? {
            let Some(object) = tag.as_object() else { return f.wrong("`tags` must have objects") };
            let tag = Format { of: "tag", object };
            tags.push(self.tagged(&tag, tag.text("begin")?, Behind::Other, depth + 1)?);
        }
        let (tag, separator) = (self.named("part", tags.join(" | "))?, f.text("separator")?);
        let between = if separator.is_empty() { String::new() } else { self.tag(separator) };
        let all = if f.is("stop_after_first")? { tag } else { format!("{tag} ({between} {tag})*") };
        Ok(if f.is("at_least_one")? { format!("({all})") } else { format!("({all})?") })
    }

    /// A free text without these and what its format excludes, up to the tag behind it.
    fn text(&mut self, f: &Format, without: &[String], behind: Behind) -> Result<String, String> {
        let mut excluded = without.to_vec();
        excluded.extend(f.excludes()?.into_iter().map(str::to_owned));
        match behind {
            Behind::Other => {
                f.wrong("free text can only stand at the end of the answer, or at the end of a tag's content")
            }
            Behind::End => Ok(format!("{}?", self.said(&excluded)?)),
            Behind::Tags(ends) => {
                excluded.extend(firsts(ends));
                let each =
                    ends.iter().map(|end| self.until(end, &excluded)).collect::<Result<Vec<_>, _>>()?;
                Ok(format!("({})", each.join(" | ")))
            }
        }
    }

    /// A text that is not empty and has none of these in it.
    fn said(&mut self, excluded: &[String]) -> Result<String, String> {
        let none = if excluded.is_empty() {
            String::new()
        } else {
            format!(" & ~/(.|\\n)*({})(.|\\n)*/", alternatives(excluded))
        };
        self.named("SAID", format!("/(.|\\n)+/{none}"))
    }

    /// A text without any of these, and then this tag, whose own text is among them.
    fn until(&mut self, tag: &[Piece], excluded: &[String]) -> Result<String, String> {
        let (first, rest) = tag.split_first().ok_or("a tag is empty")?;
        let first = match first {
            Piece::Token(id) => format!("{}? <[{id}]>", self.said(excluded)?),
            Piece::Text(text) => {
                let (text, none) = (escaped(text), alternatives(excluded));
                self.named("UNTIL", format!("/(.|\\n)*{text}/ & ~/(.|\\n)*({none})(.|\\n)+/"))?
            }
        };
        Ok(format!("{first} {}", spelt(rest)))
    }

    /// The name of a rule or terminal of this body.
    fn named(&mut self, prefix: &str, body: String) -> Result<String, String> {
        if let Some(name) = self.names.get(&body) {
            return Ok(name.clone());
        }
        let name = format!("{prefix}{}", self.names.len());
        self.rules.push_str(&format!("\n{name}: {body}\n"));
        within(&self.rules).map_err(|wrong| format!("its grammar {wrong}"))?;
        self.names.insert(body, name.clone());
        Ok(name)
    }

    fn tag(&self, text: &str) -> String {
        spelt(&self.pieces(text))
    }

    /// A text that is not empty, in which special tokens are what they are.
    fn pieces(&self, text: &str) -> Tag {
        let spans = self.tokenizer.encode_spans(text).unwrap_or_default();
        let (mut pieces, mut at) = (Vec::new(), 0);
        for (id, span) in spans.into_iter().filter(|(id, _)| self.tokenizer.is_special(*id)) {
            let Some(before) = text.get(at..span.start) else { continue };
            if !before.is_empty() {
                pieces.push(Piece::Text(before.into()));
            }
            pieces.push(Piece::Token(id));
            at = span.end;
        }
        if let Some(rest) = text.get(at..).filter(|rest| !rest.is_empty()) {
            pieces.push(Piece::Text(rest.into()));
        }
        pieces
    }
}

/// A tag as Lark writes it.
fn spelt(tag: &[Piece]) -> String {
    let piece = |piece: &Piece| match piece {
        Piece::Text(text) => quoted(text),
        Piece::Token(id) => format!("<[{id}]>"),
    };
    tag.iter().map(piece).collect::<Vec<_>>().join(" ")
}

/// Texts with which tags begin.
fn firsts(tags: &[Tag]) -> Vec<String> {
    let first = |tag: &Tag| match tag.first() {
        Some(Piece::Text(text)) => Some(text.clone()),
        _ => None,
    };
    tags.iter().filter_map(first).collect()
}

fn alternatives(texts: &[String]) -> String {
    texts.iter().map(|text| escaped(text)).collect::<Vec<_>>().join("|")
}

/// A text as an expression between slashes.
fn escaped(text: &str) -> String {
    slashed(&regex_syntax::escape(text))
}

/// An expression as it stands between slashes.
fn slashed(expression: &str) -> String {
    let (mut out, mut chars) = (String::new(), expression.chars());
    while let Some(c) = chars.next() {
        match c {
            '\\' => out.extend(['\\'].into_iter().chain(chars.next())),
            '/' => out.push_str("\\/"),
            '\n' => out.push_str("\\n"),
            c => out.push(c),
        }
    }
    out
}
