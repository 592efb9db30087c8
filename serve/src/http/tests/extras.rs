//! What other servers offer besides: log-probabilities of prompts, tokens that may or may not come, ids beside texts.

use super::*;

#[test]
fn an_echoed_prompt_has_log_probabilities() {
    let server = Server::new();
    for stream in [false, true] {
        let fields = json!({"echo": true, "logprobs": 1, "max_tokens": 2, "stream": stream});
        let reply = server.complete(json!("abx"), fields);
        let choice = match stream {
            false => reply.good()["choices"][0].clone(),
            true => {
                let chunks = reply.events();
                let chunks = chunks.iter().filter_map(|e| e["choices"].get(0)).cloned().collect::<Vec<_>>();
                let mut joined = chunks[0].clone();
                for chunk in &chunks[1..] {
                    joined["text"] =
                        format!("{}{}", joined["text"].as_str().unwrap(), chunk["text"].as_str().unwrap())
                            .into();
                    for key in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                        let more = chunk["logprobs"][key].as_array().cloned().unwrap_or_default();
                        joined["logprobs"][key].as_array_mut().unwrap().extend(more);
                    }
                }
                joined
            }
        };
        assert_eq!(choice["text"], "abxyz");
        let shown = &choice["logprobs"];
        assert_eq!(shown["tokens"], json!(["ab", "x", "y", "z"]));
        assert_eq!(shown["text_offset"], json!([0, 2, 3, 4]));
        let own: Vec<Option<f64>> = serde_json::from_value(shown["token_logprobs"].clone()).unwrap();
        // After `ab` comes `c`, not `x`; the rest is as the model would have it.
        assert!(
            own[0].is_none() && own[1].unwrap() < -20.0 && own[2].unwrap() > -0.1 && own[3].unwrap() > -0.1,
            "{own:?}"
        );
        assert_eq!(
            (&shown["top_logprobs"][0], shown["top_logprobs"][1].get("c").is_some()),
            (&Value::Null, true)
        );
    }
    let listed = server.complete(json!("xy"), json!({"prompt_logprobs": 0, "max_tokens": 1})).good();
    let listed = &listed["choices"][0]["prompt_logprobs"];
    assert_eq!((&listed[0], &listed[1]["121"]["decoded_token"]), (&Value::Null, &json!("y")));
    // Of a prompt alone nothing is shown that comes after it.
    let alone =
        json!({"echo": true, "logprobs": 0, "max_tokens": 0, "stream_options": {"include_usage": true}});
    let whole = server.complete(json!("abx"), with(alone.clone(), json!({"stream_options": null}))).good();
    let choice = &whole["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("abx"), &json!("length")));
    assert_eq!(choice["logprobs"]["tokens"], json!(["ab", "x"]));
    assert_eq!(whole["usage"]["total_tokens"], 2);
    let chunks = server.complete(json!("abx"), with(alone, json!({"stream": true}))).events();
    let texts: String = chunks.iter().filter_map(|c| c["choices"][0]["text"].as_str()).collect();
    let used = &chunks[chunks.len() - 2]["usage"]["completion_tokens"];
    assert_eq!((&*texts, used), ("abx", &json!(0)));
    // A prompt that the cache has is computed all the same.
    let again = server.complete(json!("abx"), json!({"echo": true, "logprobs": 0, "max_tokens": 1})).good();
    assert!(again["choices"][0]["logprobs"]["token_logprobs"][1].as_f64().unwrap() < -20.0);
    server.settle();
}

#[test]
fn tokens_may_be_allowed_or_not() {
    let server = Server::new();
    let said = |fields: Value| {
        let body = server.complete(json!("x"), with(json!({"max_tokens": 4}), fields)).good();
        body["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    assert_eq!(said(json!({})), "yzab");
    assert_eq!(said(json!({"allowed_token_ids": [121, 49]})), "y111");
    // The word as such may not come, its first letter may.
    let without = said(json!({"bad_words": ["za"]}));
    assert!(without.starts_with("yz") && !without.contains("za"), "{without}");
    assert!(!said(json!({"bad_words": ["y"]})).contains('y'));
    assert!(!said(json!({"bad_words": ["\n"], "logit_bias": {"10": 100}})).contains('\n'));
    // A stop string ends no answer before it has so many tokens.
    let stop = |least: u32| said(json!({"stop": ["z", "b"], "min_tokens": least}));
    assert_eq!([0, 1, 2, 4].map(stop), ["y", "y", "yza", "yzab"]);
    assert_eq!(said(json!({"typical_p": 0.5, "temperature": 1, "seed": 1})), "yzab");
    assert_eq!(said(json!({"min_tokens": 4, "stop_token_ids": [121]})).len(), 4);
}

#[test]
fn prompts_are_cut_and_ids_shown_if_asked_for() {
    let server = Server::new();
    let body = server
        .complete(
            json!("axb"),
            json!({"truncate_prompt_tokens": 2, "max_tokens": 2, "return_token_ids": true}),
        )
        .good();
    let choice = &body["choices"][0];
    assert_eq!((&choice["text"], &body["usage"]["prompt_tokens"]), (&json!("cd"), &json!(2)));
    assert_eq!((&choice["prompt_token_ids"], &choice["token_ids"]), (&json!([120, 98]), &json!([99, 100])));
    for stream in [false, true] {
        let reply = server.chat("hi", json!({"max_tokens": 2, "return_token_ids": true, "stream": stream}));
        let choices = match stream {
            false => vec![reply.good()["choices"][0].clone()],
            true => reply.events().iter().filter_map(|e| e["choices"].get(0)).cloned().collect(),
        };
        let ids: Vec<u64> = choices
            .iter()
            .flat_map(|c| c["token_ids"].as_array().cloned().unwrap_or_default())
            .map(|id| id.as_u64().unwrap())
            .collect();
        assert_eq!(ids, [97, 98]);
        assert!(choices[0]["prompt_token_ids"].as_array().unwrap().len() > 3);
    }
}

#[test]
fn clients_that_tokenise_elsewhere_learn_of_special_tokens() {
    let told = Server::new().get("/tokenizer_info").good();
    assert_eq!(told.as_object().unwrap().len(), 4);
    assert!(told["eos_token"].is_null() || told["eos_token"].is_string(), "{told}");
}
