//! Every case of the golden calls, at every cut; and what none of them has.

use super::*;
use crate::golden::{FILES, shown};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

fn read<'a>(mut parser: Parser, parts: impl IntoIterator<Item = &'a str>) -> Value {
    let mut all: Vec<Piece> = parts.into_iter().flat_map(|part| parser.push(part)).collect();
    all.extend(parser.finish());
    shown(all)
}

fn markup(format: &str) -> Markup {
    let thoughts = Some(ThoughtTags::Think);
    match format {
        "think" => Markup { calls: Some(CallFormat::Hermes), thoughts },
        other => Markup { calls: Some(other.parse().unwrap()), thoughts },
    }
}

fn parser(format: &str, tools: &Arc<Tools>, opened: bool) -> Parser {
    Parser::new(markup(format), Some(tools.clone()), opened)
}

#[test]
fn golden_calls_are_read_at_every_cut() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/golden/tools/calls.json");
    let Ok(text) = fs::read(path) else { return println!("skipped: no ../shared/golden") };
    let (_, check) = FILES[0];
    let told = check(&serde_json::from_slice(&text).unwrap());
    assert!(told.cases > 50 && told.failed.is_empty(), "{:#?}", told.failed);
}

fn tools() -> Arc<Tools> {
    let text = json!({"type": "string"});
    let maybe = json!({"anyOf": [{"type": "integer"}, {"type": "null"}]});
    let parameters = json!({"type": "object", "properties": {"s": text, "n": maybe}});
    Arc::new(Tools::new(&[json!({"type": "function", "function": {"name": "f", "parameters": parameters}})]))
}

fn expect(format: &str, text: &str, content: Option<&str>, calls: Value) {
    let expected = json!({"content": content, "reasoning": null, "tool_calls": calls});
    let characters: Vec<String> = text.chars().map(String::from).collect();
    let parts: Vec<&str> = characters.iter().map(String::as_str).collect();
    for parts in [vec![text], parts] {
        assert_eq!(read(parser(format, &tools(), false), parts).to_string(), expected.to_string(), "{text}");
    }
}

#[test]
fn texts_around_calls_are_shown_and_calls_without_their_last_tag_count() {
    let f = json!([{"name": "f", "arguments": {"s": "x"}}]);
    let call = r#"<tool_call>{"name": "f", "arguments": {"s": "x"}}"#;
    expect("hermes", &format!("{call}</tool_call> after"), Some("after"), f.clone());
    expect("hermes", call, None, f.clone());
    expect("hermes", &format!("{call}x</tool_call>"), Some(&format!("{call}x</tool_call>")), json!([]));
    // What a malformed call breaks off at may begin the next.
    expect("hermes", &format!("<tool_call>{call}</tool_call>"), Some("<tool_call>"), f.clone());
    expect("hermes", "a <b> < <tool_", Some("a <b> < <tool_"), json!([]));
    expect("mistral", "[TOOL_CALLS]f{\"s\": \"x\"}", None, f.clone());
    expect("mistral", "[TOOL_CALLS]f[CALL_ID]a1[ARGS]{\"s\": \"x\"} ok", Some("ok"), f.clone());
    expect("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS] {\"s\": \"x\"}", None, {
        json!([{"name": "f", "arguments": {}}, {"name": "f", "arguments": {"s": "x"}}])
    });
    let newer = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"s\": \"x\"}<｜tool▁call▁end｜>";
    expect("deepseek_v3", newer, None, f.clone());
    expect("llama3_json", r#"{"name": "f", "parameters": {"s": "x"}} and"#, Some("and"), f.clone());
    let unknown = r#"{"name": "g", "parameters": {}}"#;
    expect("llama3_json", unknown, Some(unknown), json!([]));
    expect("harmony", "no header at all", Some("no header at all"), json!([]));
    expect("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>", None, {
        json!([{"name": "f", "arguments": {}}])
    });
}

#[test]
fn bare_texts_have_the_types_of_their_schema() {
    let call = |n: &str, s: &str| {
        let argument = |key, value| format!("<arg_key>{key}</arg_key><arg_value>{value}</arg_value>");
        format!("<tool_call>f\n{}{}</tool_call>", argument("n", n), argument("s", s))
    };
    for (n, s, read) in [
        ("5", "5", json!({"n": 5, "s": "5"})),
        ("null", "null", json!({"n": null, "s": "null"})),
        ("\"x\"", "\"x\"", json!({"n": "x", "s": "\"x\""})),
        ("x", "</arg_value>", json!({"n": "x", "s": "</arg_value>"})),
        ("1.5", "a</arg_value></arg_value>\n<arg", json!({"n": 1.5, "s": "a</arg_value></arg_value>\n<arg"})),
    ] {
        expect("glm4", &call(n, s), None, json!([{"name": "f", "arguments": read}]));
    }
}

#[test]
fn arguments_keep_the_digits_of_their_numbers() {
    let object =
        r#"{ "s" : "a \\\" { b", "n": 123456789012345678901, "x":[ 0.10000000000000000001, -0.0 ] }"#;
    let kept = r#"{"s":"a \\\" { b","n":123456789012345678901,"x":[0.10000000000000000001,-0.0]}"#;
    let quoted = Value::from(object).to_string();
    for (format, text) in [
        ("hermes", format!("<tool_call>{{\"name\": \"f\", \"arguments\": {object}}}</tool_call>")),
        ("hermes", format!("<tool_call>{{\"name\": \"f\", \"arguments\": {quoted}}}</tool_call>")),
        ("mistral", format!("[TOOL_CALLS]f[ARGS]{object}")),
        ("harmony", format!("<|channel|>commentary to=functions.f<|message|>{object}<|call|>")),
    ] {
        let mut parser = parser(format, &tools(), false);
        let mut pieces = parser.push(&text);
        pieces.extend(parser.finish());
        assert!(matches!(&pieces[..], [Piece::Call(call)] if call.arguments == kept), "{text}: {pieces:?}");
    }
    let text = "<tool_call>\n<function=f>\n<parameter=n>\n123456789012345678901\n</parameter>\n</function>\n</tool_call>";
    let pieces = parser("qwen3_coder", &tools(), false).push(text);
    assert!(
        matches!(&pieces[..], [Piece::Call(call)] if call.arguments == r#"{"n":123456789012345678901}"#),
        "{pieces:?}"
    );
}

#[test]
fn formats_are_found_in_templates() {
    let of = |source: &str| {
        let Markup { calls, thoughts } = Markup::of_template(source);
        (calls.map(|f| f.to_string()), thoughts)
    };
    assert_eq!(of("{{ '<|im_start|>' }}"), (None, None));
    assert_eq!(of("'<tool_call>\\n' </think>"), (Some("hermes".into()), Some(ThoughtTags::Think)));
    assert_eq!(of("<tool_call><function=").0, Some("qwen3_coder".into()));
    assert_eq!(of("[TOOL_CALLS][THINK][/THINK]"), (Some("mistral".into()), Some(ThoughtTags::Bracket)));
    assert!("xml".parse::<CallFormat>().unwrap_err().contains("hermes"));
    assert!(markup("think").opens_thought("user\n<think>\n") && !markup("think").opens_thought("</think>\n"));
}

#[test]
fn tags_have_their_first_character_once() {
    let all = ["hermes", "llama3_json", "mistral", "deepseek_v3", "glm4", "harmony", "qwen3_coder"];
    for tag in all.iter().flat_map(|name| markup(name).tokens(true)) {
        let first = tag.chars().next().unwrap();
        assert_eq!(tag.matches(first).count(), 1, "{tag}");
    }
}
