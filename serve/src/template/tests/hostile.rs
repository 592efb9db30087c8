//! Templates and messages that no one should have written: each ends in one clear line, and soon.

use super::*;

fn stopped(source: &str) -> String {
    match once(source) {
        Err(e @ TemplateError::Stopped(_)) => e.to_string(),
        other => panic!("{source}: {other:?}"),
    }
}

fn failed(source: &str) -> String {
    let e = once(source).expect_err(source).to_string();
    assert!(!e.contains('\n') && e.len() < 600, "{e}");
    e
}

#[test]
fn endless_loops_run_out_of_steps() {
    let end = "the chat template was stopped: it takes too many steps; use a template that comes to an end";
    assert_eq!(
        stopped("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
        end
    );
    let twice = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}";
    assert_eq!(stopped(twice), end);
}

#[test]
fn depth_is_refused_or_borne() {
    assert!(failed("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}").contains("recursion"));
    assert!(once(&format!("{{{{ {} }}}}", "(".repeat(100_000))).is_err());
    let deep = "{% set ns = namespace(x=[]) %}{% for i in range(90000) %}{% set ns.x = [ns.x] %}{% endfor %}";
    assert_eq!(once(deep).unwrap(), "");
    assert!(failed(&format!("{deep}{{{{ ns.x | tojson }}}}")).contains("nested deeper"));
    let nested = format!("{{{{ {}1{} }}}}", "[".repeat(5000), "]".repeat(5000));
    assert!(failed(&nested).contains("recursion"));
}

#[test]
fn what_fails_says_where_and_why() {
    let e = failed("a\n{{ messages[0].nothing.more }}");
    assert!(e.starts_with("the chat template fails at its line 2: undefined value"), "{e}");
    assert_eq!(
        failed("{{ raise_exception('no\n good') }}"),
        "the chat template refuses this conversation: no good"
    );
    assert_eq!(once("{{ raise_exception('no\n good') }}"), Err(TemplateError::Raised("no\n good".into())));
    assert!(failed("{% set l = [] %}{{ l.append(1) }}").contains("append would alter a list"));
    assert!(failed("{% include 'other' %}").contains("template not found"));
    assert!(once("{% include 'chat' %}").is_err());
    assert!(failed("{{ nowhere() }}").contains("unknown function"));
}

#[test]
fn messages_of_the_wrong_shape_are_refused_by_field() {
    let call =
        |function: Value| json!([{"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}]);
    let at = "messages[0].tool_calls[0].function";
    for (messages, wanted) in [
        (json!(null), "messages: must be a list of messages, not null".to_owned()),
        (json!("x"), "messages: must be a list of messages, not a text".into()),
        (json!([]), "messages: is empty; give at least one message".into()),
        (json!([123]), "messages[0]: must be an object with a role, not a number".into()),
        (json!([{}]), "messages[0].role: is missing; name a role, `user` say".into()),
        (json!([{"role": 123}]), "messages[0].role: must be a text, not a number".into()),
        (
            json!([{"role": "user", "content": 123}]),
            "messages[0].content: must be a text or a list of parts, not a number".into(),
        ),
        (
            json!([{"role": "user", "content": [{}]}]),
            "messages[0].content[0].type: must be a text, `text` say".into(),
        ),
        (
            json!([{"role": "user", "content": [{"type": "text"}]}]),
            "messages[0].content[0].text: must be a text".into(),
        ),
        (json!([{"role": "user", "name": 1}]), "messages[0].name: must be a text, not a number".into()),
        (
            json!([{"role": "a", "tool_calls": {}}]),
            "messages[0].tool_calls: must be a list, not an object".into(),
        ),
        (call(json!(null)), format!("{at}: must be an object with a name and arguments")),
        (call(json!({"name": 1})), format!("{at}.name: must be a text")),
        (
            call(json!({"name": "f", "arguments": "[1]"})),
            format!("{at}.arguments: must hold a JSON object, not a list"),
        ),
    ] {
        assert_eq!(Message::list(messages).unwrap_err().to_string(), wanted);
    }
    let deep = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
    let e = Message::list(call(json!({"name": "f", "arguments": deep}))).unwrap_err();
    assert_eq!(e.field, format!("{at}.arguments"));
    let e = serde_json::from_value::<Message>(json!({"role": true})).unwrap_err();
    assert_eq!(e.to_string(), "role: must be a text, not a boolean");
}

#[test]
fn arguments_become_objects_and_keys_keep_their_order() {
    let given = json!([{"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{\"b\": 1, \"a\": 2}"},
        "id": "1"}, {"function": {"name": "g", "arguments": ""}}], "role": "assistant", "extra": [1]}]);
    let messages = Message::list(given).unwrap();
    let shown = Value::from(messages[0].clone()).to_string();
    assert_eq!(
        shown,
        r#"{"tool_calls":[{"type":"function","function":{"name":"f","arguments":{"b":1,"a":2}},"id":"1"},{"function":{"name":"g","arguments":{}}}],"role":"assistant","extra":[1]}"#
    );
    assert!(Message::check(&messages).is_ok());
}

#[test]
fn the_rules_of_the_api_are_checked_apart() {
    let e = |messages: Value| Message::check(&Message::list(messages).unwrap()).unwrap_err().to_string();
    assert!(e(json!([{"role": "note", "content": ""}])).starts_with("messages[0].role: \"note\" is none of"));
    assert_eq!(
        e(json!([{"role": "user"}])),
        "messages[0].content: is missing; a message of role user needs it"
    );
    assert!(e(json!([{"role": "tool", "content": "x"}])).starts_with("messages[0].tool_call_id: is missing"));
}
