//! Golden cases of text: answers with calls of tools, and what structured output must accept and refuse. In: a file of cases. Out: how many
//! there are, and for each that fails a line.

use std::path::Path;
use std::sync::Arc;

use astrai_files::read_present;
use serde_json::{Value, json};

use crate::grammar::{Compiler, Wanted};
use crate::markup::{Call, CallFormat, Markup, Parser, Piece, ThoughtTags, Tools};

/// What came of a file's cases.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// Cases there are.
    pub cases: usize,
    /// A line for each that fails.
    pub failed: Vec<String>,
}

impl Told {
    fn case(&mut self, name: &str, failure: Option<String>) {
        self.cases += 1;
        self.failed.extend(failure.map(|what| format!("{name}: {what}")));
    }
}

/// A file of cases, and how it is checked.
pub type Cases = (&'static str, fn(&Value) -> Told);

/// The files of cases.
pub const FILES: [Cases; 5] = [
    ("calls.json", calls),
    ("schemas.json", schemas),
    ("regexes.json", regexes),
    ("grammars.json", grammars),
    ("malformed.json", malformed),
];

/// Bytes of a file of cases.
const LARGEST: u64 = 1 << 26;

/// What came of each of the files that a folder has.
///
/// # Errors
/// A file is unreadable, or no JSON; one line says so.
pub fn check(folder: &Path) -> Result<Vec<(&'static str, Told)>, String> {
    let mut all = Vec::new();
    for (name, check) in FILES {
        let path = folder.join(name);
        let Some(bytes) = read_present(&path, LARGEST).map_err(|e| e.to_string())? else { continue };
        let file = serde_json::from_slice(&bytes)
            .map_err(|e| format!("{}: is no JSON ({e}); fetch it again", path.display()))?;
        all.push((name, check(&file)));
    }
    Ok(all)
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("")
}

/// `calls.json`: every case whole, at every cut that it names, at every single place, and character by character.
fn calls(file: &Value) -> Told {
    let tools = Arc::new(Tools::new(list(&file["tools"])));
    let mut told = Told::default();
    for case in list(&file["cases"]) {
        told.case(text(&case["name"]), call(case, &tools));
    }
    told
}

fn call(case: &Value, tools: &Arc<Tools>) -> Option<String> {
    let calls: CallFormat = match text(&case["format"]) {
        "think" => CallFormat::Hermes,
        format => match format.parse() {
            Ok(format) => format,
            Err(unknown) => return Some(unknown),
        },
    };
    let markup = Markup { calls: Some(calls), thoughts: Some(ThoughtTags::Think) };
    let (said, opened) = (text(&case["text"]), case["generation_prompt_opens_think"] == true);
    let places: Vec<usize> = said.char_indices().map(|(at, _)| at).chain([said.len()]).collect();
    let named = list(&case["cuts"]).iter().map(|cut| {
        list(cut).iter().filter_map(|n| places.get(usize::try_from(n.as_u64()?).ok()?).copied()).collect()
    });
    let single = places.iter().map(|at| vec![*at]);
    for cuts in named.chain(single).chain([vec![], places.clone()]) {
        let mut parser = Parser::new(markup, Some(tools.clone()), opened);
        let (mut from, mut pieces) = (0, Vec::new());
        for to in cuts.iter().copied().chain([said.len()]) {
            pieces.extend(parser.push(said.get(from..to).unwrap_or("")));
            from = to;
        }
        pieces.extend(parser.finish());
        let (got, want) = (shown(pieces), &case["expected"]);
        let same =
            |key: &str| got[key].as_str() == want[key].as_str().map(str::trim).filter(|t| !t.is_empty());
        let calls = |value: &Value| value["tool_calls"].to_string();
        if !same("content") || !same("reasoning") || calls(&got) != calls(want) {
            return Some(format!("cut at {cuts:?} it is {got}"));
        }
    }
    None
}

/// Content, reasoning and calls of an answer; what is empty is null.
pub fn shown(pieces: Vec<Piece>) -> Value {
    let (mut content, mut reasoning, mut calls) = (String::new(), String::new(), vec![]);
    for piece in pieces {
        match piece {
            Piece::Content(text) => content.push_str(&text),
            Piece::Reasoning(text) => reasoning.push_str(&text),
            Piece::Call(Call { name, arguments }) => {
                let arguments: Value = serde_json::from_str(&arguments).unwrap_or_default();
                calls.push(json!({"name": name, "arguments": arguments}));
            }
        }
    }
    let shown = |text: String| Some(text.trim().to_owned()).filter(|t| !t.is_empty());
    json!({"content": shown(content), "reasoning": shown(reasoning), "tool_calls": calls})
}

/// Compiles, and holds each text to what it must be.
fn accepts(compiler: &Arc<Compiler>, wanted: Wanted, good: &[String], bad: &[String]) -> Option<String> {
    let grammar = match compiler.compile(wanted) {
        Ok(grammar) => grammar,
        Err(why) => return Some(format!("is refused: {why}")),
    };
    if let Some(text) = good.iter().find(|text| !grammar.accepts(text)) {
        return Some(format!("{text} is refused"));
    }
    bad.iter().find(|text| grammar.accepts(text)).map(|text| format!("{text} is accepted"))
}

/// A value as Python writes it by itself, with a space after commas and colons; and without.
fn spellings(values: &Value) -> Vec<String> {
    let spaced = |value: &Value| {
        let mut out = Vec::new();
        let mut writer = serde_json::Serializer::with_formatter(&mut out, Spaced);
        // Writing to memory does not fail.
        let _ = serde::Serialize::serialize(value, &mut writer);
        String::from_utf8_lossy(&out).into_owned()
    };
    list(values).iter().flat_map(|value| [spaced(value), value.to_string()]).collect()
}

struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(b": ")
    }
}

fn compiler() -> Result<Arc<Compiler>, Told> {
    Compiler::of_bytes().map(Arc::new).map_err(|why| Told { cases: 1, failed: vec![why] })
}

/// `schemas.json`: valid instances are accepted and others not; a schema with a keyword that few have may be refused.
fn schemas(file: &Value) -> Told {
    let compiler = match compiler() {
        Ok(compiler) => compiler,
        Err(told) => return told,
    };
    let mut told = Told::default();
    for case in list(file) {
        let wanted = Wanted::Schema(case["schema"].clone());
        let failure = accepts(&compiler, wanted, &spellings(&case["valid"]), &spellings(&case["invalid"]));
        let may = !case["may_refuse"].is_null() && case["may_refuse"] != false;
        told.case(text(&case["name"]), failure.filter(|why| !may || !why.starts_with("is refused")));
    }
    told
}

fn texts(values: &Value) -> Vec<String> {
    list(values).iter().map(|value| text(value).to_owned()).collect()
}

/// `regexes.json`: whole texts match or do not.
fn regexes(file: &Value) -> Told {
    let compiler = match compiler() {
        Ok(compiler) => compiler,
        Err(told) => return told,
    };
    let mut told = Told::default();
    for case in list(file) {
        let regex = text(&case["regex"]);
        let wanted = Wanted::Regex(regex.into());
        told.case(regex, accepts(&compiler, wanted, &texts(&case["match"]), &texts(&case["no_match"])));
    }
    told
}

/// `grammars.json`: the same language in both forms.
fn grammars(file: &Value) -> Told {
    let compiler = match compiler() {
        Ok(compiler) => compiler,
        Err(told) => return told,
    };
    let mut told = Told::default();
    for case in list(file) {
        for form in ["gbnf", "lark"] {
            let wanted = Wanted::Grammar(text(&case[form]).into());
            let failure = accepts(&compiler, wanted, &texts(&case["accept"]), &texts(&case["reject"]));
            told.case(&format!("{} in {form}", text(&case["name"])), failure);
        }
    }
    told
}

/// `malformed.json`: what must be refused is. Cases about fields of requests are a server's, and are left out.
fn malformed(file: &Value) -> Told {
    let compiler = match compiler() {
        Ok(compiler) => compiler,
        Err(told) => return told,
    };
    let mut told = Told::default();
    for case in list(file).iter().filter(|case| case["expect"] == "400") {
        let value = match case["value_text"].as_str() {
            Some(text) => serde_json::from_str(text).ok(),
            None => Some(case["value"].clone()),
        };
        let wanted = match (text(&case["kind"]), value) {
            ("json_schema", Some(schema)) => Wanted::Schema(schema),
            ("regex", Some(Value::String(text))) => Wanted::Regex(text),
            ("grammar", Some(Value::String(text))) => Wanted::Grammar(text),
            _ => continue,
        };
        let failure = compiler.compile(wanted).is_ok().then(|| "is not refused".to_owned());
        told.case(&format!("{} ({})", text(&case["why"]), text(&case["kind"])), failure);
    }
    told
}
