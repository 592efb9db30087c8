//! Anthropic's API: messages plain and streamed, their errors, counts, and models.

use super::*;

const PATH: &str = "/v1/messages";
const SAID: &str =
    "<think>\nhm\n</think>\n\nLook:\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>";
const MARKS: &str = "<tool_call> </think>";

fn ask(said: &str, fields: Value) -> Value {
    with(
        json!({"max_tokens": 500, "messages": [{"role": "user", "content": said}], "temperature": 0}),
        fields,
    )
}

fn tools() -> Value {
    json!([{"name": "f", "description": "d", "input_schema": {"type": "object"}}])
}

/// The frames of a stream: event and data, whose types are equal.
fn frames(reply: &Reply) -> Vec<Value> {
    assert_eq!(reply.status, 200, "{}", reply.text());
    let frames = reply.text().strip_suffix("\n\n").unwrap().split("\n\n").map(|frame| {
        let (event, data) = frame.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], *event);
        data
    });
    frames.collect()
}

#[test]
fn messages_are_blocks() {
    let server = Server::saying(SAID, MARKS);
    let body = server.post(PATH, &ask("hi", json!({"tools": tools(), "system": "be"}))).good();
    let content = body["content"].as_array().unwrap();
    let kinds: Vec<&str> = content.iter().map(|block| block["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["thinking", "text", "tool_use"]);
    assert_eq!((&content[0]["thinking"], &content[1]["text"]), (&json!("hm"), &json!("Look:")));
    assert_eq!((&content[2]["name"], &content[2]["input"]), (&json!("f"), &json!({"a": 1})));
    assert!(content[2]["id"].as_str().unwrap().starts_with("toolu_"));
    assert_eq!(
        (&body["type"], &body["role"], &body["stop_reason"]),
        (&json!("message"), &json!("assistant"), &json!("tool_use"))
    );
    let counted = server
        .post("/v1/messages/count_tokens", &ask("hi", json!({"tools": tools(), "system": "be"})))
        .good();
    assert_eq!(counted["input_tokens"], body["usage"]["input_tokens"]);
}

#[test]
fn a_stream_opens_and_closes_its_blocks() {
    let server = Server::saying(SAID, MARKS);
    let reply = server.post(PATH, &ask("hi", json!({"tools": tools(), "stream": true})));
    let frames = frames(&reply);
    let mut open = None;
    let (mut blocks, mut texts) = (0, [const { String::new() }; 3]);
    for frame in &frames {
        match frame["type"].as_str().unwrap() {
            "content_block_start" => {
                assert!(open.is_none() && frame["index"] == blocks);
                open = Some(frame["content_block"]["type"].as_str().unwrap().to_owned());
                blocks += 1;
            }
            "content_block_delta" => {
                assert_eq!(frame["index"], blocks - 1);
                let delta = &frame["delta"];
                let part = ["thinking", "text", "partial_json"].map(|key| delta[key].as_str().unwrap_or(""));
                texts.iter_mut().zip(part).for_each(|(text, part)| text.push_str(part));
            }
            "content_block_stop" => assert!(open.take().is_some() && frame["index"] == blocks - 1),
            _ => {}
        }
    }
    assert_eq!(texts, ["hm", "Look:", "{\"a\":1}"]);
    let kinds: Vec<&str> = frames.iter().map(|f| f["type"].as_str().unwrap()).collect();
    assert_eq!(
        (kinds[0], blocks, &kinds[kinds.len() - 2..]),
        ("message_start", 3, &["message_delta", "message_stop"][..])
    );
    let (start, delta) = (&frames[0]["message"], &frames[frames.len() - 2]);
    assert_eq!((&start["content"], &start["stop_reason"]), (&json!([]), &Value::Null));
    assert_eq!(delta["delta"], json!({"stop_reason": "tool_use", "stop_sequence": null}));
    assert!(delta["usage"]["output_tokens"].as_u64().unwrap() > 50);
}

#[test]
fn reasons_of_stops_and_what_the_cache_had_are_told() {
    let server = Server::new();
    let stopped = server.post(PATH, &ask("hi", json!({"stop_sequences": ["x", "de"]}))).good();
    assert_eq!((&stopped["stop_reason"], &stopped["stop_sequence"]), (&json!("stop_sequence"), &json!("de")));
    assert_eq!(stopped["content"], json!([{"type": "text", "text": "abc"}]));
    let cut = server.post(PATH, &ask("hi", json!({"max_tokens": 2}))).good();
    assert_eq!((&cut["stop_reason"], &cut["usage"]["output_tokens"]), (&json!("max_tokens"), &json!(2)));
    // More than the context has is no error here.
    let whole = server.post(PATH, &ask("hi", json!({"max_tokens": 100_000}))).good();
    assert_eq!(whole["stop_reason"], "model_context_window_exceeded");
    // What changes with every request, and is said before the prompt, keeps nothing from being found again.
    let billed = |n: u32| {
        let system = json!([
            {"type": "text", "text": format!("x-anthropic-billing-header: cch={n}")},
            {"type": "text", "text": "a long prompt", "cache_control": {"type": "ephemeral"}},
        ]);
        server.post(PATH, &ask("hi", json!({"system": system, "max_tokens": 1}))).good()["usage"].clone()
    };
    let (first, second) = (billed(1), billed(2));
    let sum = |usage: &Value| {
        usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap()
    };
    assert_eq!(sum(&first), sum(&second));
    assert!(second["cache_read_input_tokens"].as_u64().unwrap() + 4 >= sum(&second), "{second}");
    server.settle();
}

#[test]
fn turns_are_translated_as_they_are_meant() {
    let server = Server::new();
    let text = |text: &str| json!({"type": "text", "text": text});
    let messages = json!([
        {"role": "system", "content": "first"},
        {"role": "user", "content": [text("a"), text("b")]},
        {"role": "user", "content": "c"},
        {"role": "system", "content": [text("later")]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
            text("d"), {"type": "tool_use", "id": "1", "name": "f", "input": {"k": 1}},
        ]},
        {"role": "user", "content": [
            text("e"), {"type": "tool_result", "tool_use_id": "1", "content": [text("r")], "is_error": true},
        ]},
    ]);
    let same = json!([
        {"role": "system", "content": "base\nfirst"},
        {"role": "user", "content": "a\nb\nc\nlater"},
        {"role": "assistant", "content": "d"},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "user", "content": "e"},
    ]);
    let theirs =
        server.post("/v1/messages/count_tokens", &json!({"system": "base", "messages": messages})).good();
    let ours = server.post("/tokenize", &json!({"messages": same})).good();
    assert_eq!(theirs["input_tokens"], ours["count"]);
    // An answer that the client has begun goes on.
    let begun = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": [text("m")]}]);
    let on =
        server.post("/v1/messages", &json!({"messages": begun, "max_tokens": 2, "temperature": 0})).good();
    assert_eq!(on["content"], json!([{"type": "text", "text": "no"}]));
}

#[test]
fn effort_reaches_the_template() {
    let template = format!("{TEMPLATE}{{{{ reasoning_effort }}}}");
    let engine = Alphabet::new().start(Settings::default());
    let server = Server::of(engine, &template, HttpSettings::default());
    let count = |fields: Value| {
        let count =
            server.post("/v1/messages/count_tokens", &ask("hi", fields)).good()["input_tokens"].clone();
        count.as_u64().unwrap()
    };
    let without = count(json!({"output_config": {"effort": null}}));
    assert_eq!(count(json!({"output_config": {"effort": "medium"}})), without + 6);
}

#[test]
fn errors_have_their_form() {
    let server = Server::with(Alphabet::new(), Settings::default(), Server::keyed(&["k"]));
    let key = "x-api-key: k\r\n";
    let post = |body: &Value, headers: &str| {
        server.ask("POST", "/v1/messages?beta=true", headers, body.to_string().as_bytes())
    };
    let told = |reply: &Reply| {
        let body = reply.json();
        assert_eq!(
            (&body["type"], body["request_id"].as_str()),
            (&json!("error"), reply.header("request-id"))
        );
        assert!(!body["error"]["message"].as_str().unwrap().is_empty());
        (reply.status, body["error"]["type"].as_str().unwrap().to_owned())
    };
    assert_eq!(told(&post(&ask("hi", json!({})), "")), (401, "authentication_error".into()));
    let image = json!([{"role": "user", "content": [{"type": "image", "source": {}}]}]);
    for fields in [
        json!({"max_tokens": null}),
        json!({"max_tokens": 0}),
        json!({"messages": null}),
        json!({"messages": []}),
        json!({"messages": [{"role": "king", "content": "x"}]}),
        json!({"messages": [{"role": "user"}]}),
        json!({"messages": image}),
        json!({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}),
        json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        json!({"tools": tools(), "tool_choice": {"type": "tool"}}),
        json!({"tool_choice": {"type": "any"}}),
        json!({"n": 2, "temperature": 1}),
        json!({"messages": [{"role": "user", "content": []}]}),
        json!({"mcp_servers": [{"type": "url", "url": "http://x"}]}),
        json!({"thinking": {"type": "enabled", "budget_tokens": 5}}),
        json!({"max_tokens": 1200, "thinking": {"type": "enabled", "budget_tokens": 1200}}),
        json!({"thinking": {"type": "on"}}),
        json!({"stop_sequences": 3}),
        json!({"system": 3}),
        json!({"output_config": 3}),
        json!({"output_config": {"effort": 3}}),
    ] {
        let reply = post(&ask("hi", fields.clone()), key);
        assert_eq!(told(&reply), (400, "invalid_request_error".into()), "{fields}");
    }
    assert_eq!(told(&post(&ask("hi", json!({"model": "other"})), key)), (404, "not_found_error".into()));
    let broken = post(&ask("hi", json!({"max_tokens": 5, "logit_bias": {"7": 100}, "stream": true})), key);
    let last = frames(&broken).pop().unwrap();
    assert_eq!((&last["type"], &last["error"]["type"]), (&json!("error"), &json!("api_error")));
    assert_eq!(last["request_id"].as_str(), broken.header("request-id"));
}

#[test]
fn models_have_both_shapes() {
    let server = Server::new();
    let theirs = "anthropic-version: 2023-06-01\r\n";
    let list = server.ask("GET", "/v1/models", theirs, b"").good();
    assert_eq!(
        (&list["has_more"], &list["first_id"], &list["last_id"]),
        (&json!(false), &json!("org/alphabet"), &json!("alias"))
    );
    let one = server.ask("GET", "/v1/models/org/alphabet", theirs, b"").good();
    assert_eq!((&one["type"], &one["id"]), (&json!("model"), &json!("org/alphabet")));
    assert!(one["created_at"].as_str().unwrap().ends_with('Z'));
    assert_eq!(server.get("/v1/models").good()["object"], "list");
}
