//! Targets of what serving reads of answers and of what they are to be: calls of tools in every format, schemas, regular expressions, grammars.

use crate::mutate::{Draws, object, text};
use crate::targets::{Run, shown};
use astrai_serve::grammar::{Compiler, Wanted};
use astrai_serve::markup::{CallFormat, Markup, Parser, Piece, ThoughtTags, Tools};
use serde_json::{Value, json};
use std::sync::Arc;

/// Names of formats, with a sound answer of each.
const ANSWERS: [(&str, &str); 7] = [
    (
        "hermes",
        "<think>a</think> b <tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, \"</tool_call>\"]}}\n</tool_call>",
    ),
    ("llama3_json", "{\"name\": \"f\", \"parameters\": {\"a\": 1}}; {\"name\": \"f\", \"parameters\": {}}"),
    (
        "mistral",
        "a[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}][TOOL_CALLS]f[CALL_ID]a1[ARGS]{\"a\": 2}",
    ),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    ("glm4", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value></arg_value>\n</tool_call>"),
    (
        "harmony",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant to=functions.f<|channel|>commentary<|message|>{}<|call|>",
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\nx </parameter>\n</parameter>\n</function>\n</tool_call>",
    ),
];

/// A format's number and a strange answer.
pub fn answer(d: &mut Draws) -> Vec<u8> {
    let format = d.below(ANSWERS.len());
    let mut made = vec![format as u8];
    for _ in 0..1 + d.below(3) {
        made.extend(text(ANSWERS[format].1, d).into_bytes());
    }
    made
}

/// Reads an answer whole and character by character, which must tell the same; a call's arguments are an object.
pub fn read_answer(input: &[u8]) -> Result<(), String> {
    let Some((format, text)) = input.split_first() else { return Err("nothing".into()) };
    let Some((name, _)) = ANSWERS.get(usize::from(*format)) else { return Err("no such format".into()) };
    let calls: CallFormat = name.parse()?;
    let text = String::from_utf8_lossy(text);
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}]);
    let tools = Arc::new(Tools::new(tools.as_array().map_or(&[], Vec::as_slice)));
    let read = |parts: &mut dyn Iterator<Item = &str>| {
        let markup = Markup { calls: Some(calls), thoughts: Some(ThoughtTags::Think) };
        let mut parser = Parser::new(markup, Some(tools.clone()), false);
        let mut pieces: Vec<Piece> = parts.flat_map(|part| parser.push(part)).collect();
        pieces.extend(parser.finish());
        let mut joined: Vec<Piece> = Vec::new();
        for piece in pieces {
            match (joined.last_mut(), piece) {
                (Some(Piece::Content(last)), Piece::Content(next)) => last.push_str(&next),
                (Some(Piece::Reasoning(last)), Piece::Reasoning(next)) => last.push_str(&next),
                (_, next) => joined.push(next),
            }
        }
        joined
    };
    let whole = read(&mut std::iter::once(&*text));
    assert_eq!(whole, read(&mut text.split_inclusive(|_: char| true)), "the cuts change what is read");
    let mut any = Err("no call".to_owned());
    for piece in whole {
        if let Piece::Call(call) = piece {
            let arguments: Value = shown(serde_json::from_str(&call.arguments))?;
            assert!(arguments.is_object() && !call.name.is_empty());
            any = Ok(());
        }
    }
    any
}

/// A kind and what is wanted, strangely.
pub fn wanted(d: &mut Draws) -> Vec<u8> {
    let schema = json!({"type": "object", "properties": {"a": {"type": ["string", "null"], "minLength": 1, "maxLength": 9, "pattern": "^a+$"},
        "b": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1, "maxItems": 3}, "c": {"enum": [1, "x"]},
        "d": {"format": "date-time"}}, "required": ["a"], "additionalProperties": {"type": "integer", "minimum": 1, "maximum": 9},
        "$defs": {"n": {"anyOf": [{"type": "number", "multipleOf": 2}, {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}]}}});
    let kind = d.below(4) as u8;
    let made = match kind {
        0 => object(&schema, d),
        1 => text("^(a|b){1,3}[^c-z\\s]+(?:x*y?)+\\d{2}$", d).into_bytes(),
        2 => text(
            "root ::= (pair \",\")* pair # x\npair ::= \"a\\\\n\" [^a-z\\\\]{1,3} | \"(\" root? \")\"\n",
            d,
        )
        .into_bytes(),
        _ => {
            text("start: pair+\npair: \"a\" WORD | \"(\" start? \")\"\nWORD: /[a-z]{1,9}/\n", d).into_bytes()
        }
    };
    std::iter::once(kind).chain(made).collect()
}

/// Compiles what is wanted.
pub fn compile() -> Run {
    let compiler = Compiler::of_bytes().map(Arc::new);
    Box::new(move |input| {
        let compiler = compiler.as_ref().map_err(Clone::clone)?;
        let Some((kind, rest)) = input.split_first() else { return Err("nothing".into()) };
        let text = String::from_utf8_lossy(rest).into_owned();
        let wanted = match kind {
            0 => Wanted::Schema(shown(serde_json::from_slice(rest))?),
            1 => Wanted::Regex(text),
            _ => Wanted::Grammar(text),
        };
        shown(compiler.compile(wanted)).map(drop)
    })
}
