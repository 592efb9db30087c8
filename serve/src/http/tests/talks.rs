//! Thoughts and calls of tools, through each of the endpoints for conversations.

use super::*;

const CALLS: &str = "<think>\nhm\n</think>\n\nLook: <tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, \"é\"]}}\n</tool_call>\n\
    <tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>";
const MARKS: &str = "<tool_call> </think>";

fn tools() -> Value {
    let one = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}});
    json!([one("f"), one("g")])
}

#[test]
fn a_chat_has_thoughts_and_calls_in_fields_of_their_own() {
    let server = Server::saying(CALLS, MARKS);
    let body = server.chat("hi", json!({"tools": tools(), "max_tokens": 500})).good();
    let (message, usage) = (&body["choices"][0]["message"], &body["usage"]);
    assert_eq!((&message["content"], &message["reasoning"]), (&json!("Look:"), &json!("hm")));
    assert_eq!(message["reasoning_content"], message["reasoning"]);
    let calls = message["tool_calls"].as_array().unwrap();
    assert_eq!(calls.len(), 2);
    assert_eq!(calls[0]["function"], json!({"name": "f", "arguments": "{\"a\":[1,\"é\"]}"}));
    assert!(calls[0]["id"].as_str().unwrap().starts_with("call_") && calls[0]["id"] != calls[1]["id"]);
    assert_eq!(body["choices"][0]["finish_reason"], "tool_calls");
    let thought = usage["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    assert!((10..=24).contains(&thought), "{usage}");
    // One call at most; none is read where no tools are shown.
    let one =
        server.chat("hi", json!({"tools": tools(), "max_tokens": 500, "parallel_tool_calls": false})).good();
    assert_eq!(one["choices"][0]["message"]["tool_calls"].as_array().unwrap().len(), 1);
    let untold = server.chat("hi", json!({"max_tokens": 500, "include_reasoning": false})).good();
    let message = &untold["choices"][0]["message"];
    assert!(message.get("reasoning").is_none() && message["content"].as_str().unwrap().starts_with("Look:"));
    let none = server.chat("hi", json!({"max_tokens": 500})).good();
    assert!(none["choices"][0]["message"]["content"].as_str().unwrap().contains("<tool_call>"));
    assert_eq!(none["choices"][0]["finish_reason"], "stop");
}

#[test]
fn a_stream_of_a_chat_tells_the_same() {
    let server = Server::saying(CALLS, MARKS);
    let fields = json!({"tools": tools(), "max_tokens": 500, "stream": true, "stream_options": {"include_usage": true}});
    let events = server.chat("hi", fields).events();
    let (mut content, mut reasoning, mut calls) = (String::new(), String::new(), vec![]);
    for delta in events.iter().filter_map(|e| e["choices"][0]["delta"].as_object()) {
        content += delta.get("content").and_then(Value::as_str).unwrap_or("");
        reasoning += delta.get("reasoning_content").and_then(Value::as_str).unwrap_or("");
        for call in delta.get("tool_calls").and_then(Value::as_array).into_iter().flatten() {
            let index = call["index"].as_u64().unwrap() as usize;
            if index == calls.len() {
                assert!(call["id"].is_string() && call["type"] == "function");
                calls.push((call["function"]["name"].as_str().unwrap().to_owned(), String::new()));
            }
            calls[index].1 += call["function"]["arguments"].as_str().unwrap();
        }
    }
    assert_eq!((content.as_str(), reasoning.as_str()), ("Look:", "hm"));
    assert_eq!(calls, [("f".into(), "{\"a\":[1,\"é\"]}".into()), ("g".into(), "{}".into())]);
    let reasons: Vec<&str> =
        events.iter().filter_map(|e| e["choices"][0]["finish_reason"].as_str()).collect();
    assert_eq!(reasons, ["tool_calls"]);
    let usage = events.iter().rev().find(|e| e["usage"].is_object()).unwrap();
    assert!(usage["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap() > 0);
}
