//! Plain answers: their form, what fields do, how tokens are counted.

use super::*;

#[test]
fn a_chat_has_its_form() {
    let server = Server::new();
    let reply = server.chat("hi", json!({"max_tokens": 4}));
    assert_eq!(reply.header("content-type"), Some("application/json"));
    let body = reply.good();
    assert!(
        body["id"].as_str().unwrap().starts_with("chatcmpl-")
            && body["created"].as_u64() > Some(1_700_000_000)
    );
    assert_eq!((&body["object"], &body["model"]), (&json!("chat.completion"), &json!("org/alphabet")));
    let choice = json!({
        "index": 0, "message": {"role": "assistant", "content": "abcd", "refusal": null}, "logprobs": null,
        "finish_reason": "length", "stop_reason": null,
    });
    assert_eq!(body["choices"], json!([choice]));
    let usage = json!({
        "prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0},
    });
    assert_eq!(body["usage"], usage);
    // Full pages of the same prompt are found again.
    let again = server.chat("hi", json!({"max_tokens": 4, "model": "alias"})).good();
    assert_eq!(
        (&again["model"], &again["usage"]["prompt_tokens_details"]["cached_tokens"]),
        (&json!("alias"), &json!(8))
    );
    let apart = server.chat("hi", json!({"max_tokens": 4, "cache_salt": "mine"})).good();
    assert_eq!(apart["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
}

#[test]
fn fields_do_what_they_say() {
    let server = Server::new();
    let text = |fields: Value| {
        let body = server.chat("hi", fields).good();
        let choice = &body["choices"][0];
        let text = choice["message"]["content"].as_str().unwrap().to_owned();
        (text, choice["finish_reason"].as_str().unwrap().to_owned(), choice["stop_reason"].clone())
    };
    let is = |text: &str, reason: &str, stop: Value| (text.to_owned(), reason.to_owned(), stop);
    for (fields, want) in [
        (json!({"max_completion_tokens": 2, "max_tokens": 9}), is("ab", "length", json!(null))),
        (json!({"stop": "de"}), is("abc", "stop", json!("de"))),
        (json!({"stop": ["zz", "d"], "include_stop_str_in_output": true}), is("abcd", "stop", json!("d"))),
        (json!({"stop_token_ids": [101]}), is("abcd", "stop", json!(101))),
        (json!({"logit_bias": {"53": 100}, "stop": "x"}), is("5", "", json!(null))),
        (json!({"logit_bias": {"257": 100}}), is("", "stop", json!(null))),
        (json!({"logit_bias": {"257": 100}, "min_tokens": 2}), is("ab", "stop", json!(null))),
        (
            json!({"logit_bias": {"257": 100}, "ignore_eos": true, "max_tokens": 2}),
            is("", "length", json!(null)),
        ),
        (
            json!({"logit_bias": {"257": 100}, "ignore_eos": true, "max_tokens": 2, "skip_special_tokens": false}),
            is("<|end|><|end|>", "length", json!(null)),
        ),
        (
            json!({"max_tokens": 2.0, "seed": -1, "top_k": -1, "user": 3, "metadata": {}, "store": true}),
            is("ab", "length", json!(null)),
        ),
        (
            json!({"max_tokens": 2, "messages": [{"role": "user", "content": [{"type": "text", "text": "!"}]}], "add_generation_prompt": false}),
            is("\u{fffd}", "length", json!(null)),
        ),
        (
            json!({"max_tokens": 2, "chat_template_kwargs": {"note": "x"}, "add_generation_prompt": false}),
            is("yz", "length", json!(null)),
        ),
        (
            json!({"max_tokens": 2, "messages": [{"role": "assistant", "content": "m"}], "continue_final_message": true}),
            is("no", "length", json!(null)),
        ),
        (
            json!({"max_tokens": 2, "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none", "parallel_tool_calls": true, "response_format": {"type": "text"}}),
            is("ab", "length", json!(null)),
        ),
    ] {
        let got = text(fields.clone());
        if want.1.is_empty() {
            assert!(got.0.starts_with(&want.0), "{fields}: {got:?}");
        } else {
            assert_eq!(got, want, "{fields}");
        }
    }
    // Tools are shown to the template.
    let tools = json!({"max_tokens": 1, "tools": [{"type": "function", "function": {"name": "f"}}]});
    let shown = server.chat("hi", tools).good()["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(shown > 40, "{shown}");
}

#[test]
fn a_completion_has_its_form() {
    let server = Server::new();
    let body = server.complete(json!("x"), json!({"max_tokens": 3, "logprobs": 1})).good();
    assert!(body["id"].as_str().unwrap().starts_with("cmpl-"));
    assert_eq!(body["object"], "text_completion");
    let choice = &body["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("yza"), &json!("length")));
    let shown = &choice["logprobs"];
    assert_eq!((&shown["tokens"], &shown["text_offset"]), (&json!(["y", "z", "a"]), &json!([0, 1, 2])));
    let first = shown["token_logprobs"][0].as_f64().unwrap();
    assert!(first <= 0.0 && first > -1e-6, "{first}");
    assert_eq!(shown["top_logprobs"][0].as_object().unwrap().keys().collect::<Vec<_>>(), ["y"]);
    // 16 tokens when nothing is said, of which the last ends the text here.
    assert_eq!(server.complete(json!("x"), json!({})).good()["usage"]["completion_tokens"], 16);
    assert_eq!(server.complete(json!("6"), json!({})).good()["usage"]["completion_tokens"], 4);
}

#[test]
fn prompts_come_in_four_forms() {
    let server = Server::new();
    let texts = |prompt: Value, fields: Value| {
        let body = server.complete(prompt, with(json!({"max_tokens": 2}), fields)).good();
        let choices = body["choices"].as_array().unwrap().clone();
        choices.iter().enumerate().for_each(|(i, c)| assert_eq!(c["index"], i));
        choices.iter().map(|c| c["text"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(texts(json!("x"), json!({})), ["yz"]);
    assert_eq!(texts(json!(["x", "b"]), json!({"echo": true})), ["xyz", "bcd"]);
    assert_eq!(texts(json!([120]), json!({"echo": true})), ["xyz"]);
    assert_eq!(texts(json!([[120], [98, 99]]), json!({})), ["yz", "de"]);
    let several = json!({"n": 2, "temperature": 1, "seed": 4});
    assert_eq!(texts(json!(["x", "b"]), several), ["yz", "yz", "cd", "cd"]);
}

#[test]
fn log_probabilities_of_a_chat_are_of_its_text() {
    let server = Server::new();
    let fields = json!({"logprobs": true, "top_logprobs": 2, "max_tokens": 9, "stop_token_ids": [100]});
    let body = server.chat("hi", fields).good();
    let content = body["choices"][0]["logprobs"]["content"].as_array().unwrap();
    let texts: Vec<&str> = content.iter().map(|e| e["token"].as_str().unwrap()).collect();
    assert_eq!(texts, ["a", "b", "c"]);
    assert_eq!(
        (&content[0]["bytes"], content[0]["top_logprobs"].as_array().unwrap().len()),
        (&json!([97]), 2)
    );
    // A face is one text of four tokens.
    let body = server.chat(
        "hi",
        json!({"logprobs": true, "max_tokens": 5, "logit_bias": {"33": 50, "240": 60}, "seed": 1}),
    );
    let body = body.good();
    let content = body["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert!(content.iter().all(|e| e["bytes"].as_array().unwrap().len() == 1), "{content:?}");
    // What a bias forces was impossible; JSON has no infinity for that.
    assert!(content.iter().all(|e| e["logprob"].as_f64().unwrap() >= -9999.0));
}

#[test]
fn texts_and_tokens_are_told() {
    let server = Server::new();
    let ids = server.post("/tokenize", &json!({"prompt": "abc<|end|>", "return_token_strs": true})).good();
    assert_eq!((&ids["tokens"], &ids["count"]), (&json!([256, 99, 257]), &json!(3)));
    assert_eq!((&ids["max_model_len"], &ids["token_strs"]), (&json!(256), &json!(["ab", "c", "<|end|>"])));
    let chat = server.post("/tokenize", &json!({"messages": [{"role": "user", "content": "hi"}]})).good();
    assert_eq!(chat["count"], 9);
    let text = server.post("/detokenize", &json!({"tokens": [256, 99, 257]})).good();
    assert_eq!(text["prompt"], "abc<|end|>");
    assert_eq!(server.post("/detokenize", &json!({"tokens": [258]})).error().0, 400);
    assert_eq!(server.post("/tokenize", &json!({"prompt": 3})).error().1.as_deref(), Some("prompt"));
}

#[test]
fn models_are_listed_under_all_their_names() {
    let server = Server::new();
    let body = server.get("/v1/models").good();
    let ids: Vec<&str> = body["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    assert_eq!((&body["object"], ids), (&json!("list"), vec!["org/alphabet", "alias"]));
    let one = server.get("/v1/models/org/alphabet").good();
    assert_eq!(
        (&one["id"], &one["object"], &one["owned_by"]),
        (&json!("org/alphabet"), &json!("model"), &json!("astrai"))
    );
    assert_eq!(server.get("/v1/models/org%2Falphabet").good()["id"], "org/alphabet");
    let missing = server.get("/v1/models/other").error();
    assert_eq!(missing, (404, Some("model".into()), "model_not_found".into()));
}
