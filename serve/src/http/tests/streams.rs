//! Streams: the order of their chunks, what each says, and what they are silent about.

use super::*;
use std::sync::mpsc::channel;

#[test]
fn a_chat_streams_in_order() {
    let server = Server::new();
    let reply = server.chat("hi", json!({"stream": true, "max_tokens": 3}));
    assert_eq!(
        (reply.header("cache-control"), reply.header("x-accel-buffering")),
        (Some("no-cache"), Some("no"))
    );
    let events = reply.events();
    let head = |e: &Value| (e["id"].clone(), e["created"].clone(), e["model"].clone(), e["object"].clone());
    let chunks = &events[..events.len() - 1];
    assert!(chunks.iter().all(|c| head(c) == head(&chunks[0])));
    assert_eq!(chunks[0]["object"], "chat.completion.chunk");
    let first = json!([{
        "index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null,
    }]);
    assert_eq!(chunks[0]["choices"], first);
    let mut text = String::new();
    for chunk in &chunks[1..chunks.len() - 1] {
        let delta = &chunk["choices"][0]["delta"];
        assert_eq!(delta.as_object().unwrap().keys().collect::<Vec<_>>(), ["content"]);
        assert_eq!(chunk["choices"][0]["finish_reason"], Value::Null);
        text.push_str(delta["content"].as_str().unwrap());
    }
    assert_eq!(text, "abc");
    let last = &chunks.last().unwrap()["choices"][0];
    assert_eq!((&last["delta"], &last["finish_reason"]), (&json!({}), &json!("length")));
    // Nothing about usage unless asked for, and no chunk without a choice.
    assert!(chunks.iter().all(|c| c.get("usage").is_none() && c["choices"].as_array().unwrap().len() == 1));
}

#[test]
fn usage_comes_last_if_asked_for() {
    let server = Server::new();
    for path in ["/v1/chat/completions", "/v1/completions"] {
        let fields = json!({"stream": true, "stream_options": {"include_usage": true}, "max_tokens": 3, "prompt": "x"});
        let events = server.post(path, &chat("hi", fields)).events();
        let (usage, chunks) = events[..events.len() - 1].split_last().unwrap();
        assert_eq!(usage["choices"], json!([]));
        assert_eq!(usage["usage"]["completion_tokens"], 3);
        assert!(chunks.iter().all(|c| c["usage"].is_null() && c.get("usage").is_some()));
        assert!(chunks.iter().all(|c| c["choices"].as_array().unwrap().len() == 1));
        let options = json!({"include_usage": true, "continuous_usage_stats": true});
        let fields = json!({"stream": true, "stream_options": options, "max_tokens": 3, "prompt": "x"});
        let events = server.post(path, &chat("hi", fields)).events();
        let counts =
            events.iter().filter_map(|e| e["usage"]["completion_tokens"].as_u64()).collect::<Vec<_>>();
        assert!(counts.is_sorted() && counts.last() == Some(&3), "{counts:?}");
    }
}

#[test]
fn each_choice_has_its_role_and_its_end() {
    let server = Server::new();
    let fields = json!({"stream": true, "n": 3, "temperature": 1, "seed": 3, "stop": ["e"]});
    let events = server.chat("hi", fields).events();
    let mut texts = vec![None::<String>; 3];
    let mut ends = [0; 3];
    for choice in events.iter().filter_map(|e| e["choices"].as_array()).flatten() {
        let at = choice["index"].as_u64().unwrap() as usize;
        let delta = &choice["delta"];
        match (delta["role"].as_str(), &mut texts[at]) {
            (Some("assistant"), none @ None) => *none = Some(String::new()),
            (None, Some(text)) => text.push_str(delta["content"].as_str().unwrap_or("")),
            other => panic!("{other:?}"),
        }
        if !choice["finish_reason"].is_null() {
            ends[at] += 1;
            assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), &json!("e")));
        }
    }
    assert_eq!((texts, ends), (vec![Some("abcd".to_owned()); 3], [1; 3]));
}

#[test]
fn a_completion_streams_with_its_echo() {
    let server = Server::new();
    let fields = json!({"stream": true, "echo": true, "max_tokens": 3, "n": 2, "temperature": 1, "seed": 3});
    let events = server.complete(json!(["x", "b"]), fields).events();
    let mut texts = vec![String::new(); 4];
    for choice in events.iter().filter_map(|e| e["choices"].as_array()).flatten() {
        texts[choice["index"].as_u64().unwrap() as usize].push_str(choice["text"].as_str().unwrap());
    }
    assert_eq!(texts, ["xyza", "xyza", "bcde", "bcde"]);
    let fields = json!({"stream": true, "max_tokens": 3, "logprobs": 0});
    let events = server.complete(json!("x"), fields).events();
    let offsets = events.iter().filter_map(|e| e["choices"][0]["logprobs"]["text_offset"].as_array());
    assert_eq!(offsets.flatten().collect::<Vec<_>>(), [0, 1, 2]);
}

#[test]
fn characters_stay_whole() {
    let server = Server::new();
    let fields = json!({"stream": true, "max_tokens": 5, "add_generation_prompt": false});
    let events = server.chat("!", fields).events();
    let texts: Vec<&str> =
        events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(texts, ["", "🙂", "a"]);
}

#[test]
fn what_fails_before_the_stream_has_a_status_and_after_it_an_event() {
    let server = Server::new();
    let at_once = json!({"prompt": [9, 7], "stream": true});
    assert_eq!(server.post("/v1/completions", &at_once).error(), (500, None, "server_error".into()));
    // 7 comes as the second token.
    let later = json!({"prompt": "x", "stream": true, "logit_bias": {"7": 100}, "temperature": 0});
    let events = server.post("/v1/completions", &later).events();
    assert!(events.last().unwrap()["error"]["message"].as_str().unwrap().contains("NaN"));
    server.settle();
}

#[test]
fn a_silent_stream_is_kept_alive() {
    let (steps, gate) = channel();
    let settings = HttpSettings { keep_alive: Duration::from_millis(60), ..HttpSettings::default() };
    let server = Server::with(Alphabet::gated(gate), Settings::default(), settings);
    let body = chat("hi", json!({"stream": true, "max_tokens": 2})).to_string();
    let mut stream = server.send("POST", "/v1/chat/completions", "", body.as_bytes());
    let mut seen = Vec::new();
    let mut part = [0; 4096];
    while seen.windows(8).filter(|w| w == b": ping\n\n").count() < 2 {
        let n = stream.read(&mut part).unwrap();
        assert!(n > 0, "{}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&part[..n]);
    }
    drop(steps);
    stream.read_to_end(&mut seen).unwrap();
    let events = Reply::parse(&seen).events();
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
}
