//! The Responses API: items, events in their order, and conversations that go on.

use super::*;

const PATH: &str = "/v1/responses";
const SAID: &str =
    "<think>\nhm\n</think>\n\nLook:\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>";

fn ask(fields: Value) -> Value {
    with(json!({"input": "hi", "temperature": 0, "max_output_tokens": 500}), fields)
}

fn tools() -> Value {
    json!([{"type": "function", "name": "f", "parameters": {"type": "object"}}])
}

#[test]
fn answers_are_items() {
    let server = Server::saying(SAID, "<tool_call> </think>");
    let body = server
        .post(PATH, &ask(json!({"tools": tools(), "instructions": "be", "metadata": {"k": "v"}})))
        .good();
    let output = body["output"].as_array().unwrap();
    let kinds: Vec<&str> = output.iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    assert_eq!(output[0]["content"], json!([{"type": "reasoning_text", "text": "hm"}]));
    assert_eq!(output[1]["content"][0]["text"], "Look:");
    assert_eq!((&output[2]["name"], &output[2]["arguments"]), (&json!("f"), &json!("{\"a\":1}")));
    assert_eq!(
        (&body["object"], &body["status"], &body["metadata"]),
        (&json!("response"), &json!("completed"), &json!({"k": "v"}))
    );
    let usage = &body["usage"];
    assert!(usage["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap() > 0, "{usage}");
}

#[test]
fn a_stream_tells_what_becomes_of_each_item() {
    let server = Server::saying(SAID, "<tool_call> </think>");
    let reply = server.post(PATH, &ask(json!({"tools": tools(), "stream": true})));
    assert_eq!(reply.status, 200, "{}", reply.text());
    let frames = reply.text().strip_suffix("\n\n").unwrap().split("\n\n");
    let events: Vec<Value> =
        frames.map(|frame| serde_json::from_str(frame.split_once("\ndata: ").unwrap().1).unwrap()).collect();
    assert!(events.iter().enumerate().all(|(i, event)| event["sequence_number"] == i));
    let mut kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    kinds.dedup();
    let kinds: Vec<&str> = kinds.iter().map(|kind| kind.strip_prefix("response.").unwrap()).collect();
    let item = |kind: &'static str| {
        let texts: [&'static str; 2] = if kind == "thought" {
            ["reasoning_text.delta", "reasoning_text.done"]
        } else {
            ["output_text.delta", "output_text.done"]
        };
        [
            "output_item.added",
            "content_part.added",
            texts[0],
            texts[1],
            "content_part.done",
            "output_item.done",
        ]
    };
    let call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ];
    let want =
        [&["created", "in_progress"][..], &item("thought"), &item("text"), &call, &["completed"]].concat();
    assert_eq!(kinds, want);
    let last = &events.last().unwrap()["response"];
    assert_eq!((&last["status"], last["output"].as_array().unwrap().len()), (&json!("completed"), 3));
    let text: String = events
        .iter()
        .filter(|event| event["type"] == "response.output_text.delta")
        .map(|event| event["delta"].as_str().unwrap())
        .collect();
    assert_eq!(text, "Look:");
}

#[test]
fn conversations_go_on_where_they_were() {
    let server = Server::new();
    let first = server.post(PATH, &ask(json!({"max_output_tokens": 3, "instructions": "be"}))).good();
    assert_eq!(
        (&first["status"], &first["incomplete_details"]),
        (&json!("incomplete"), &json!({"reason": "max_output_tokens"}))
    );
    let on = json!({"previous_response_id": first["id"], "max_output_tokens": 1, "input": "so"});
    let second = server.post(PATH, &ask(on.clone())).good();
    let messages = json!([
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "abc"}, {"role": "user", "content": "so"},
    ]);
    let whole = server.post("/tokenize", &json!({"messages": messages})).good();
    assert_eq!(second["usage"]["input_tokens"], whole["count"]);
    let items = json!([
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "abc"}]},
        {"role": "user", "content": "so"},
    ]);
    let stateless = server.post(PATH, &ask(json!({"input": items, "max_output_tokens": 1}))).good();
    assert_eq!(stateless["usage"]["input_tokens"], whole["count"]);
    let gone = server.post(PATH, &ask(json!({"previous_response_id": "resp_none"})));
    assert_eq!(gone.error().0, 404);
    let unkept = server.post(PATH, &ask(json!({"store": false, "max_output_tokens": 1}))).good();
    let on = server.post(PATH, &ask(json!({"previous_response_id": unkept["id"]})));
    assert_eq!(on.error().1.as_deref(), Some("previous_response_id"));
}

/// Log-probabilities are of the text: neither of thoughts nor of what ends them.
#[test]
fn log_probabilities_are_of_the_text() {
    let server = Server::saying(SAID, "<tool_call> </think>");
    let fields = json!({"tools": tools(), "include": ["message.output_text.logprobs"], "top_logprobs": 1});
    let whole = server.post(PATH, &ask(fields.clone())).good();
    let told = |part: &Value| {
        let all = part["logprobs"].as_array().unwrap().iter();
        all.map(|one| one["token"].as_str().unwrap().to_owned()).collect::<String>()
    };
    assert_eq!(whole["top_logprobs"], 1);
    let part = &whole["output"][1]["content"][0];
    assert_eq!(told(part).trim(), "Look:");
    assert_eq!(part["logprobs"][0]["top_logprobs"].as_array().unwrap().len(), 1);
    let streamed = server.post(PATH, &ask(with(fields, json!({"stream": true}))));
    let deltas =
        streamed.text().split("\n\n").filter(|frame| frame.starts_with("event: response.output_text.delta"));
    let deltas = deltas.map(|frame| serde_json::from_str(frame.split_once("\ndata: ").unwrap().1).unwrap());
    assert_eq!(deltas.map(|event: Value| told(&event)).collect::<String>(), told(part));
    let without = server.post(PATH, &ask(json!({"include": ["reasoning.encrypted_content"]}))).good();
    assert_eq!(without["output"][1]["content"][0]["logprobs"], json!([]));
}

/// What is too long loses its oldest turns, if it may.
#[test]
fn a_long_conversation_keeps_what_has_room() {
    let server = Server::new();
    let turn = |i: usize| {
        let said = json!({"role": "user", "content": format!("{i}{}", "x".repeat(40))});
        [said, json!({"role": "assistant", "content": "ok"})]
    };
    let mut messages: Vec<Value> = (0..9).flat_map(turn).collect();
    messages.push(json!({"role": "user", "content": "last"}));
    let most = 20;
    let fields = |auto: &str| json!({"input": messages, "instructions": "be", "truncation": auto, "max_output_tokens": most});
    let refused = server.post(PATH, &ask(fields("disabled"))).error();
    assert_eq!((refused.0, &*refused.2), (400, "context_length_exceeded"));
    let body = server.post(PATH, &ask(fields("auto"))).good();
    assert_eq!(body["truncation"], "auto");
    let counts = (0..messages.len()).step_by(2).map(|from| {
        let head = json!({"role": "system", "content": "be"});
        let kept: Vec<Value> = std::iter::once(head).chain(messages[from..].iter().cloned()).collect();
        server.post("/tokenize", &json!({"messages": kept})).good()["count"].as_u64().unwrap()
    });
    let longest = counts.filter(|n| *n + most <= 256).max().unwrap();
    assert_eq!(body["usage"]["input_tokens"], longest);
    // Nothing can be left out of one turn.
    let one = json!({"input": "x".repeat(300), "truncation": "auto"});
    assert_eq!(server.post(PATH, &ask(one)).error().2, "context_length_exceeded");
}

/// What an answer cannot be ends a stream as the request's fault.
#[test]
fn a_stream_that_fails_says_whose_fault_it_is() {
    let held = json!({"max_output_tokens": 9, "structured_outputs": {"regex": "abx"}, "bad_words": ["x"], "stream": true});
    let reply = Server::new().post(PATH, &ask(held));
    assert!(
        reply.text().contains("response.failed") && reply.text().contains("invalid_prompt"),
        "{}",
        reply.text()
    );
}

#[test]
fn wrong_fields_are_named() {
    let server = Server::new();
    for (fields, param) in [
        (json!({"input": null}), "input"),
        (json!({"input": 3}), "input"),
        (json!({"input": [3]}), "input[0]"),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input[0].type"),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
            "input[0].content[0].type",
        ),
        (json!({"input": [{"type": "function_call", "name": "f"}]}), "input[0].arguments"),
        (json!({"background": true}), "background"),
        (json!({"truncation": "some"}), "truncation"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"text": {"format": {"type": "x"}}}), "text.format.type"),
        (json!({"text": {"format": {"type": "json_schema"}}}), "text.format.schema"),
        (json!({"max_output_tokens": 0}), "max_output_tokens"),
        (json!({"max_output_tokens": 10_000}), "max_output_tokens"),
        (json!({"input": []}), "input"),
        (json!({"tool_choice": {"type": "mcp"}}), "tool_choice"),
        (json!({"top_logprobs": 21}), "top_logprobs"),
        (json!({"conversation": "conv_1"}), "conversation"),
        (json!({"prompt": {"id": "p"}}), "prompt"),
        (json!({"n": 2, "temperature": 1}), "n"),
    ] {
        let (status, named, _) = server.post(PATH, &ask(fields.clone())).error();
        assert_eq!((status, named.as_deref()), (400, Some(param)), "{fields}");
    }
}
