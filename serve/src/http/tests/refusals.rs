//! What is refused, field by field: with which status, naming which field.

use super::*;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn many(n: usize, item: Value) -> Value {
    Value::Array(vec![item; n])
}

/// Fields of chats and completions, and the field that is at fault where it is not the first.
fn common() -> Vec<(Value, &'static str)> {
    let biases: Map<String, Value> = (0..301).map(|i| (i.to_string(), json!(1))).collect();
    vec![
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"temperature": -1}), "temperature"),
        (json!({"temperature": 101}), "temperature"),
        (json!({"temperature": 1e300}), "temperature"),
        (json!({"temperature": [1]}), "temperature"),
        (json!({"temperature": true}), "temperature"),
        (json!({"top_p": 0}), "top_p"),
        (json!({"top_p": 1.1}), "top_p"),
        (json!({"top_k": -2}), "top_k"),
        (json!({"top_k": 1.5}), "top_k"),
        (json!({"top_k": 5_000_000_000_u64}), "top_k"),
        (json!({"min_p": 2}), "min_p"),
        (json!({"repetition_penalty": 0}), "repetition_penalty"),
        (json!({"presence_penalty": 3}), "presence_penalty"),
        (json!({"frequency_penalty": {}}), "frequency_penalty"),
        (json!({"logit_bias": []}), "logit_bias"),
        (json!({"logit_bias": {"a": 1}}), "logit_bias"),
        (json!({"logit_bias": {"-1": 1}}), "logit_bias"),
        (json!({"logit_bias": {"258": 1}}), "logit_bias"),
        (json!({"logit_bias": {"1": "x"}}), "logit_bias"),
        (json!({"logit_bias": {"1": 1e300}}), "logit_bias"),
        (json!({"logit_bias": biases}), "logit_bias"),
        (json!({"seed": 1.5}), "seed"),
        (json!({"seed": 1e40}), "seed"),
        (json!({"stop": 3}), "stop"),
        (json!({"stop": ""}), "stop"),
        (json!({"stop": [""]}), "stop[0]"),
        (json!({"stop": ["a", 3]}), "stop[1]"),
        (json!({"stop": many(65, json!("a"))}), "stop"),
        (json!({"stop": "x".repeat(70_000)}), "stop"),
        (json!({"stop_token_ids": [258]}), "stop_token_ids"),
        (json!({"stop_token_ids": ["a"]}), "stop_token_ids"),
        (json!({"stop_token_ids": many(129, json!(1))}), "stop_token_ids"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"max_tokens": -1}), "max_tokens"),
        (json!({"max_tokens": 1.5}), "max_tokens"),
        (json!({"max_tokens": "many"}), "max_tokens"),
        (json!({"max_completion_tokens": "many"}), "max_completion_tokens"),
        (json!({"max_completion_tokens": 0}), "max_completion_tokens"),
        (json!({"max_completion_tokens": 100_000}), "max_completion_tokens"),
        (json!({"min_tokens": 9, "max_tokens": 2}), "min_tokens"),
        (json!({"min_tokens": -1}), "min_tokens"),
        (json!({"ignore_eos": 1}), "ignore_eos"),
        (json!({"n": 0}), "n"),
        (json!({"n": -1}), "n"),
        (json!({"n": 2, "temperature": 0}), "n"),
        (json!({"n": 129}), "n"),
        (json!({"n": 1_000_000_000}), "n"),
        (json!({"n": 1e30}), "n"),
        (json!({"best_of": 2}), "best_of"),
        (json!({"stream": "yes"}), "stream"),
        (json!({"stream_options": {}}), "stream_options"),
        (json!({"stream": true, "stream_options": {"include_usage": 1}}), "stream_options.include_usage"),
        (json!({"stream": true, "stream_options": 1}), "stream_options"),
        (json!({"priority": 1e12}), "priority"),
        (json!({"skip_special_tokens": "no"}), "skip_special_tokens"),
        (json!({"include_stop_str_in_output": 0}), "include_stop_str_in_output"),
        (json!({"cache_salt": "x".repeat(300)}), "cache_salt"),
        (json!({"logprobs": "x"}), "logprobs"),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {}}}),
            "response_format.json_schema.schema",
        ),
        (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema"),
        (json!({"response_format": {"type": "json_object"}, "guided_regex": "a"}), "guided_regex"),
        (json!({"structured_outputs": {"regex": "a", "json": {}}}), "structured_outputs.regex"),
        (json!({"structured_outputs": {"what": 1}}), "structured_outputs"),
        (json!({"response_format": {"type": "sound"}}), "response_format.type"),
        (json!({"response_format": {"type": 123}}), "response_format.type"),
        (json!({"response_format": {}}), "response_format.type"),
        (json!({"response_format": "text"}), "response_format"),
        (json!({"use_beam_search": true}), "use_beam_search"),
        (json!({"suffix": "end"}), "suffix"),
        (json!({"guided_regex": "("}), "guided_regex"),
        (json!({"guided_choice": [1]}), "guided_choice"),
        (json!({"guided_json": {"type": 3}}), "guided_json"),
        (json!({"grammar": "root ::= other"}), "grammar"),
        (json!({"modalities": ["text", "audio"]}), "modalities"),
        (json!({"audio": {"voice": "x"}}), "audio"),
        (json!({"chat_template": "{{ 1 }}"}), "chat_template"),
        (json!({"functions": [{"name": "f"}]}), "functions"),
        (json!({"prompt_logprobs": 21}), "prompt_logprobs"),
        (json!({"typical_p": 0}), "typical_p"),
        (json!({"allowed_token_ids": []}), "allowed_token_ids"),
        (json!({"allowed_token_ids": [9999]}), "allowed_token_ids"),
        (json!({"bad_words": "x"}), "bad_words"),
        (json!({"bad_words": ["x", ""]}), "bad_words[1]"),
        (json!({"truncate_prompt_tokens": 0}), "truncate_prompt_tokens"),
        (json!({"return_token_ids": 1}), "return_token_ids"),
        (json!({"thinking_token_budget": -1}), "thinking_token_budget"),
        (json!({"model": 3}), "model"),
    ]
}

#[test]
fn each_wrong_field_is_named() {
    let server = Server::new();
    let base = json!({"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"});
    for (fields, param) in common() {
        for path in [CHAT, COMPLETIONS] {
            let reply = server.post(path, &with(base.clone(), fields.clone()));
            let (status, named, _) = reply.error();
            assert_eq!((status, named.as_deref()), (400, Some(param)), "{path} {fields}: {}", reply.text());
        }
    }
    assert_eq!(server.get("/ready").status, 200);
    server.settle();
}

#[test]
fn each_wrong_chat_is_named() {
    let server = Server::new();
    let user = json!({"role": "user", "content": "hi"});
    let image = json!([{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]);
    let function = json!({"type": "function", "function": {"name": "f"}});
    let other = json!({"type": "function", "function": {"name": "g"}});
    let listing = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}});
    let odd = json!({"type": "function", "function": {"name": "a\nb", "parameters": {"type": 3}}});
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}});
    for (fields, param) in [
        (json!({"messages": null}), "messages"),
        (json!({"messages": "string"}), "messages"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": [123]}), "messages[0]"),
        (json!({"messages": [{}]}), "messages[0].role"),
        (json!({"messages": [{"role": 123}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
        (json!({"messages": [{"role": "user", "content": 123}]}), "messages[0].content"),
        (json!({"messages": [user, {"role": "king", "content": "x"}]}), "messages[1].role"),
        (json!({"messages": [{"role": "tool", "content": "x"}]}), "messages[0].tool_call_id"),
        (json!({"messages": [{"role": "user", "content": [{"text": "x"}]}]}), "messages[0].content[0].type"),
        (json!({"messages": [{"role": "user", "content": image}]}), "messages[0].content[0].type"),
        (
            json!({"messages": [{"role": "assistant", "tool_calls": [call]}]}),
            "messages[0].tool_calls[0].function.arguments",
        ),
        (json!({"messages": [{"role": "user", "content": "raise"}]}), "messages"),
        (json!({"messages": [{"role": "user", "content": "loop"}]}), "messages"),
        (json!({"tools": "x"}), "tools"),
        (json!({"tools": ["x"]}), "tools[0]"),
        (json!({"tools": [{"type": "web"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function", "function": {}}]}), "tools[0].function"),
        (json!({"tools": [listing]}), "tools[0].function.parameters.type"),
        (json!({"tools": [], "tool_choice": "required"}), "tool_choice"),
        (json!({"tools": [function], "tool_choice": other}), "tool_choice"),
        (json!({"tools": [function], "tool_choice": "some"}), "tool_choice"),
        (json!({"tools": [odd], "tool_choice": "required"}), "tools"),
        (json!({"parallel_tool_calls": 3}), "parallel_tool_calls"),
        (json!({"top_logprobs": 3}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": -1}), "top_logprobs"),
        (json!({"logprobs": 3}), "logprobs"),
        (json!({"echo": true}), "echo"),
        (json!({"chat_template_kwargs": {"messages": []}}), "chat_template_kwargs.messages"),
        (json!({"chat_template_kwargs": []}), "chat_template_kwargs"),
        (json!({"continue_final_message": true, "add_generation_prompt": true}), "continue_final_message"),
        (json!({"reasoning_effort": 3}), "reasoning_effort"),
        (json!({"documents": 3}), "documents"),
    ] {
        let reply = server.chat("hi", fields.clone());
        let (status, named, _) = reply.error();
        assert_eq!((status, named.as_deref()), (400, Some(param)), "{fields}: {}", reply.text());
    }
    // What an answer cannot be is the request's fault, also where it is known late.
    for fields in [
        json!({"structured_outputs": {"choice": ["a"]}, "bad_words": ["a"]}),
        json!({"allowed_token_ids": [257], "min_tokens": 2}),
        json!({"structured_outputs": {"choice": ["a"]}, "min_tokens": 2}),
    ] {
        let reply = server.chat("hi", with(json!({"max_tokens": 5}), fields.clone()));
        assert_eq!(reply.error().0, 400, "{fields}");
        assert!(reply.text().contains("no token is left"), "{}", reply.text());
    }
    // So is a grammar whose masks would take too long.
    let keys: serde_json::Map<_, _> = (0..800).map(|i| (format!("k{i}"), json!({"type": "null"}))).collect();
    let wide = json!({"type": "object", "properties": keys, "additionalProperties": false});
    let reply = server.chat("hi", json!({"max_tokens": 50, "structured_outputs": {"json": wide}}));
    assert_eq!(reply.error().0, 400);
    assert!(reply.text().contains("cannot go on by its grammar"), "{}", reply.text());
    let raised = server.chat("raise", json!({})).json();
    assert!(raised["error"]["message"].as_str().unwrap().contains("no such thing"));
    let looped = server.chat("loop", json!({})).json();
    assert!(looped["error"]["message"].as_str().unwrap().contains("too many steps"));
    assert_eq!(server.post(CHAT, &json!({})).error().1.as_deref(), Some("messages"));
}

#[test]
fn each_wrong_completion_is_named() {
    let server = Server::new();
    for (fields, param) in [
        (json!({"prompt": null}), "prompt"),
        (json!({"prompt": ""}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": {}}), "prompt"),
        (json!({"prompt": 3}), "prompt"),
        (json!({"prompt": [[]]}), "prompt"),
        (json!({"prompt": [true]}), "prompt[0]"),
        (json!({"prompt": [1, "x"]}), "prompt[1]"),
        (json!({"prompt": ["x", 1]}), "prompt[1]"),
        (json!({"prompt": [[1], [-1]]}), "prompt[1][0]"),
        (json!({"prompt": [258]}), "prompt"),
        (json!({"prompt": [5_000_000_000_u64]}), "prompt[0]"),
        (json!({"prompt": many(257, json!("x"))}), "prompt"),
        (json!({"prompt": many(200, json!("x")), "n": 2}), "n"),
        (json!({"logprobs": 21}), "logprobs"),
        (json!({"max_tokens": 0, "echo": false}), "max_tokens"),
        (json!({"logprobs": true}), "logprobs"),
        (json!({"thinking_token_budget": 5}), "thinking_token_budget"),
        (json!({"logprobs": 1, "echo": true, "n": 2}), "n"),
        (json!({"echo": "x"}), "echo"),
        (json!({"prompt": many(250, json!("x")), "logprobs": 20, "max_tokens": 250}), "logprobs"),
    ] {
        let reply = server.complete(json!("x"), with(json!({"temperature": 1}), fields.clone()));
        let (status, named, _) = reply.error();
        assert_eq!((status, named.as_deref()), (400, Some(param)), "{fields}: {}", reply.text());
    }
}

#[test]
fn the_context_is_named_when_it_is_too_small() {
    let server = Server::new();
    let long = "x".repeat(300);
    let code = "context_length_exceeded".to_owned();
    let cases = [
        (server.chat(&long, json!({})), "messages", ["307", "256"]),
        (server.complete(json!(long), json!({})), "prompt", ["300", "256"]),
        // The beginning of what is far too long is enough to tell.
        (server.complete(json!("x".repeat(3_900_000)), json!({})), "prompt", ["more than 4096", "256"]),
        (server.complete(json!("x"), json!({"max_tokens": 256})), "max_tokens", ["257", "256"]),
        (server.chat("x", json!({"max_tokens": u64::MAX})), "max_tokens", ["18446744073709551615", "256"]),
    ];
    for (reply, param, numbers) in cases {
        assert_eq!(reply.error(), (400, Some(param.into()), code.clone()), "{}", reply.text());
        numbers.iter().for_each(|n| assert!(reply.text().contains(n), "{}", reply.text()));
    }
    // The edges that just fit.
    assert_eq!(server.complete(json!("x"), json!({"max_tokens": 255})).good()["usage"]["total_tokens"], 256);
    assert_eq!(server.complete(json!("x".repeat(255)), json!({})).good()["usage"]["completion_tokens"], 1);
}

#[test]
fn unknown_models_paths_and_methods_are_json() {
    let server = Server::new();
    for path in [CHAT, COMPLETIONS] {
        let reply = server.post(path, &chat("hi", json!({"model": "gpt", "prompt": "x"})));
        assert_eq!(reply.error(), (404, Some("model".into()), "model_not_found".into()));
    }
    assert_eq!(server.get("/v2/nothing").error(), (404, None, "not_found".into()));
    let wrong = server.get(CHAT);
    assert_eq!((wrong.error().0, wrong.header("allow")), (405, Some("POST")));
    assert_eq!(server.post("/health", &json!({})).error().0, 405);
    let head = server.ask("HEAD", "/health", "", b"");
    assert_eq!((head.status, head.body.len()), (200, 0));
    assert_eq!(server.ask("OPTIONS", CHAT, "", b"").status, 204);
    // A slash at the end and a query change nothing.
    assert_eq!(server.get("/v1/models/").status, 200);
    let body = chat("hi", json!({"max_tokens": 1}));
    assert_eq!(server.post("/v1/chat/completions/?beta=true", &body).status, 200);
}
