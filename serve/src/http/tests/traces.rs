//! Spans as a collector gets them, and a collector that is none.

use super::*;
use std::net::TcpListener;
use std::sync::mpsc::{Receiver, channel};

/// A collector: the spans that come, and what they come with.
fn collector() -> (String, Receiver<Value>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let (send, receive) = channel();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut bytes = Vec::new();
            let mut some = [0; 4096];
            let body = loop {
                let n = stream.read(&mut some).unwrap_or(0);
                bytes.extend_from_slice(&some[..n]);
                let text = String::from_utf8_lossy(&bytes);
                let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
                assert!(head.starts_with("POST /v1/traces ") && head.contains("application/json"), "{head}");
                let length = head
                    .lines()
                    .find_map(|l| l.to_lowercase().strip_prefix("content-length: ")?.parse().ok());
                if n == 0 || length == Some(body.len()) {
                    break body.to_owned();
                }
            };
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}");
            let told: Value = serde_json::from_str(&body).unwrap();
            let resource = &told["resourceSpans"][0];
            assert_eq!(resource["resource"]["attributes"][0]["value"]["stringValue"], "org/alphabet");
            for span in resource["scopeSpans"][0]["spans"].as_array().unwrap() {
                send.send(span.clone()).unwrap();
            }
        }
    });
    (endpoint, receive)
}

fn traced(endpoint: &str) -> Server {
    let settings = HttpSettings { otlp_endpoint: Some(endpoint.parse().unwrap()), ..HttpSettings::default() };
    Server::with(Alphabet::new(), Settings::default(), settings)
}

fn value(span: &Value, key: &str) -> Value {
    let all = span["attributes"].as_array().unwrap();
    all.iter().find(|a| a["key"] == key).map_or(Value::Null, |a| a["value"].clone())
}

#[test]
fn each_request_has_a_span() {
    let (endpoint, spans) = collector();
    let server = traced(&endpoint);
    let (trace, parent) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");
    let body = chat("hi", json!({"stream": true, "max_tokens": 5, "seed": -2})).to_string();
    let header = |given: &str| format!("traceparent: {given}\r\n");
    let reply = server.ask(
        "POST",
        "/v1/chat/completions",
        &header(&format!("00-{trace}-{parent}-01")),
        body.as_bytes(),
    );
    let answered = reply.header("traceparent").unwrap().to_owned();
    let id = reply.events()[0]["id"].clone();
    let next = || spans.recv_timeout(Duration::from_secs(20)).unwrap();
    let span = next();
    assert_eq!((&span["traceId"], &span["parentSpanId"]), (&json!(trace), &json!(parent)));
    assert_eq!(answered, format!("00-{trace}-{}-01", span["spanId"].as_str().unwrap()));
    assert_eq!(
        (&span["name"], &span["kind"], &span["status"]),
        (&json!("chat org/alphabet"), &json!(2), &json!({}))
    );
    for (key, want) in [
        ("gen_ai.operation.name", json!({"stringValue": "chat"})),
        ("gen_ai.request.model", json!({"stringValue": "org/alphabet"})),
        ("gen_ai.request.max_tokens", json!({"intValue": "5"})),
        ("gen_ai.request.seed", json!({"intValue": "-2"})),
        ("gen_ai.request.temperature", json!({"doubleValue": 0.0})),
        ("gen_ai.request.stream", json!({"boolValue": true})),
        ("gen_ai.response.id", json!({"stringValue": id})),
        ("gen_ai.usage.output_tokens", json!({"intValue": "5"})),
        ("gen_ai.response.finish_reasons", json!({"arrayValue": {"values": [{"stringValue": "length"}]}})),
        ("http.response.status_code", json!({"intValue": "200"})),
    ] {
        assert_eq!(value(&span, key), want, "{key}: {span}");
    }
    let nanos = |key: &str| span[key].as_str().unwrap().parse::<u64>().unwrap();
    assert!(nanos("endTimeUnixNano") > nanos("startTimeUnixNano"));
    // What is refused has one too; what a client does not want, or does not say rightly, has its own or none.
    let refused = |given: &str| {
        server
            .ask("POST", "/v1/completions", &header(given), br#"{"prompt": 3}"#)
            .header("traceparent")
            .map(str::to_owned)
    };
    assert_eq!(refused(&format!("00-{trace}-{parent}-00")), None);
    for odd in [
        "",
        "00-x-y-01",
        &format!("00-{trace}-{parent}-01-x"),
        &format!("ff-{trace}-{parent}-01"),
        &format!("00-{}-{parent}-01", "0".repeat(32)),
    ] {
        let told = refused(odd).unwrap();
        let span = next();
        assert!(
            told.contains(span["traceId"].as_str().unwrap())
                && span.get("parentSpanId").is_none()
                && !told.contains(trace),
            "{odd}"
        );
        assert_eq!(
            (&span["status"]["code"], value(&span, "error.type")),
            (&json!(2), json!({"stringValue": "400"}))
        );
        assert_eq!(
            (span["traceId"].as_str().unwrap().len(), span["spanId"].as_str().unwrap().len()),
            (32, 16)
        );
    }
    server.get("/v1/models").good();
    server.complete(json!("a"), json!({"max_tokens": 2})).good();
    server.join();
    assert_eq!(next()["name"], "text_completion org/alphabet", "the end waits for the last");
}

#[test]
fn a_collector_that_is_none_holds_nobody_up() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let server = traced(&format!("http://{closed}"));
    for _ in 0..20 {
        server.chat("hi", json!({"max_tokens": 2})).good();
    }
    server.settle();
    server.join();
    let odd = "ftp://x".parse::<crate::http::Collector>().unwrap_err();
    assert!(odd.contains("http://HOST:PORT"), "{odd}");
}
