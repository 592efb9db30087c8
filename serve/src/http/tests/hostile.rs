//! Bodies and bytes that no client would send. Nothing is answered by 500, and the server goes on.

use super::*;
use astrai_builders::config::Pooling;
use proptest::prelude::*;
use std::sync::OnceLock;

const CHAT: &str = "/v1/chat/completions";

fn raw(server: &Server, body: &[u8]) -> Reply {
    server.ask("POST", CHAT, "", body)
}

#[test]
fn what_is_no_json_object_is_refused() {
    let server = Server::new();
    let deep = format!("{{\"messages\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    for body in [
        &b""[..],
        b"{",
        b"null",
        b"[]",
        b"3",
        b"\"x\"",
        b"{\"temperature\": NaN}",
        b"{\"temperature\": Infinity}",
        b"{\"temperature\": 1e999}",
        b"{\"messages\": [{\"role\": \"user\", \"content\": \"\xff\xfe\"}]}",
        b"{\"messages\": [{\"role\": \"user\", \"content\": \"\\ud800\"}]}",
        b"{\"messages\": [{\"role\": \"user\", \"content\": \"\\udc00x\"}]}",
        b"{\"messages\": [{\"role\": \"user\", \"content\": \"\0\"}]}",
        b"\0",
        b"{} {}",
        deep.as_bytes(),
    ] {
        let reply = raw(&server, body);
        assert_eq!(reply.error().0, 400, "{:?}", String::from_utf8_lossy(&body[..body.len().min(80)]));
    }
    // A NUL that is written as JSON writes it is a character like others.
    assert_eq!(server.chat("\0", json!({"max_tokens": 1})).status, 200);
    // The type of the body is not asked for.
    let form = "content-type: application/x-www-form-urlencoded\r\n";
    let body = chat("hi", json!({"max_tokens": 1})).to_string();
    assert_eq!(server.ask("POST", CHAT, form, body.as_bytes()).status, 200);
    // Its encoding is.
    let packed = server.ask("POST", CHAT, "content-encoding: gzip\r\n", b"\x1f\x8b\x08");
    assert!(packed.error().0 == 415 && packed.text().contains("gzip"), "{}", packed.text());
}

#[test]
fn bodies_are_bounded() {
    let settings = HttpSettings { body_limit: 1000, ..HttpSettings::default() };
    let server = Server::with(Alphabet::new(), Settings::default(), settings);
    assert_eq!(server.chat(&"x".repeat(1000), json!({})).error(), (413, None, "request_too_large".into()));
    // A length that is not told beforehand is counted.
    let mut stream = server.connect();
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    for _ in 0..3 {
        let _ = stream.write_all(format!("190\r\n{}\r\n", "x".repeat(400)).as_bytes());
    }
    let mut seen = [0; 12];
    stream.read_exact(&mut seen).unwrap();
    assert_eq!(&seen, b"HTTP/1.1 413");
    // Bodies that do not end hold their room, and ordinary requests pass by them.
    let settings = HttpSettings { bodies_limit: 200_000, ..HttpSettings::default() };
    let server = Server::with(Alphabet::new(), Settings::default(), settings);
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 300000\r\n\r\n");
    let large = chat(&"x".repeat(250_000), json!({}));
    let mut held = Vec::new();
    until("the room is taken", || {
        // A holder that is read while the request below has the room is itself refused: others follow.
        let mut holder = server.connect();
        let _ = holder.write_all(&[head.as_bytes(), &[b' '; 240_000]].concat());
        held.push(holder);
        server.post(CHAT, &large).status == 503
    });
    assert_eq!(server.chat("hi", json!({"max_tokens": 1})).status, 200);
    drop(held);
    until("the room is given back", || server.post(CHAT, &large).status == 400);
}

/// Bodies as large as may be, made to be looked at again and again.
#[test]
fn the_work_of_a_body_grows_with_its_length() {
    let text = |text: &str| json!({"type": "text", "text": text});
    let mut parts = vec![text(&"x".repeat(2 << 20))];
    parts.resize(50_000, text("x"));
    let said = json!([{"role": "user", "content": parts}]);
    let names: Vec<String> = (0..100_000).map(|i| format!("p{i}")).collect();
    let properties: Map<String, Value> = names.iter().map(|name| (name.clone(), json!({}))).collect();
    let parameters = json!({"type": "object", "properties": properties, "required": names});
    let one = |i: usize| json!({"type": "function", "function": {"name": format!("f{i}")}});
    let few = json!([{"type": "function", "function": {"name": "f", "parameters": parameters}}]);
    let many: Vec<Value> = (0..1024).map(one).collect();
    let forced = |tools: Value| chat("hi", json!({"tools": tools, "tool_choice": "required"}));
    for (calls, path, body) in [
        ("auto", "/v1/messages", json!({"max_tokens": 1, "messages": said})),
        ("qwen3_coder", CHAT, forced(few.clone())),
        ("glm4", CHAT, forced(few)),
        ("hermes", CHAT, forced(many.into())),
        ("auto", "/v1/completions", json!({"prompt": "x", "bad_words": ["xy".repeat(1 << 20)]})),
    ] {
        let settings = HttpSettings { calls: calls.parse().unwrap(), ..HttpSettings::default() };
        let server = Server::with(Alphabet::new(), Settings::default(), settings);
        let since = Instant::now();
        let reply = server.post(path, &body);
        assert_eq!(reply.status, 400, "{calls}: {}", reply.text());
        assert!(since.elapsed() < Duration::from_secs(5), "{calls}: {:?}", since.elapsed());
    }
}

#[test]
fn bytes_that_are_no_http_harm_nobody() {
    let server = Server::new();
    let long = format!("GET / HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(1 << 20));
    for bytes in [
        &b"\0\0\0\0\0\0\0\0"[..],
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: nine\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{",
        b"GET /v1/models/%ff HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"GET /v1/models/%00%0a HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        long.as_bytes(),
    ] {
        let mut stream = server.connect();
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut seen = Vec::new();
        let _ = stream.read_to_end(&mut seen);
        assert!(
            !seen.starts_with(b"HTTP/1.1 5") && !seen.starts_with(b"HTTP/1.1 2"),
            "{:?}",
            String::from_utf8_lossy(bytes)
        );
        assert_eq!(server.get("/health").status, 200);
    }
}

fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(|| {
        Server::with(Alphabet::pooling(Pooling::Mean), Settings::default(), HttpSettings::default())
    })
}

/// Any JSON, often of numbers at the edges.
fn anything() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-3i64..300).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "\\PC{0,8}".prop_map(Value::from),
        prop_oneof![Just("user"), Just("text"), Just("auto"), Just("function"), Just("loop")]
            .prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        let keys = prop_oneof![
            Just("role".to_owned()),
            Just("content".to_owned()),
            Just("type".to_owned()),
            Just("text".to_owned()),
            Just("function".to_owned()),
            "[a-z0-9]{0,4}",
        ];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((keys, inner), 0..4).prop_map(|e| Value::Object(e.into_iter().collect())),
        ]
    })
}

const PATHS: [&str; 7] =
    [CHAT, "/v1/completions", "/v1/embeddings", "/v1/score", "/v1/rerank", "/tokenize", "/detokenize"];

const FIELDS: [&str; 37] = [
    "model",
    "messages",
    "prompt",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "stop",
    "stream",
    "max_tokens",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "seed",
    "tools",
    "tool_choice",
    "response_format",
    "echo",
    "stream_options",
    "stop_token_ids",
    "min_tokens",
    "chat_template_kwargs",
    "documents",
    "cache_salt",
    "priority",
    "repetition_penalty",
    "add_generation_prompt",
    "continue_final_message",
    "tokens",
    "input",
    "dimensions",
    "encoding_format",
    "text_1",
    "text_2",
    "query",
    "top_n",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn no_body_makes_the_server_fail(
        path in prop::sample::select(&PATHS[..]),
        sound: bool,
        fields in prop::collection::vec((prop::sample::select(&FIELDS[..]), anything()), 0..4),
    ) {
        let base = if sound { json!({
            "prompt": "x", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}], "input": "x", "text_1": "x",
            "text_2": ["x"], "query": "x", "documents": ["x"],
        }) } else { json!({}) };
        let fields = fields.into_iter().map(|(k, v)| (k.to_owned(), v)).collect::<Map<_, _>>();
        let body = with(base, Value::Object(fields));
        let reply = server().post(path, &body);
        prop_assert!([200, 400, 404].contains(&reply.status), "{} {}: {}", path, body, reply.text());
        if reply.status != 200 {
            reply.error();
        }
        prop_assert_eq!(server().get("/health").status, 200);
    }

    #[test]
    fn no_bytes_make_the_server_fail(bytes in prop::collection::vec(any::<u8>(), 0..64), cut in 0usize..80) {
        let mut body = chat("hi", json!({"max_tokens": 2, "stop": "zz"})).to_string().into_bytes();
        let cut = cut.min(body.len());
        body.splice(cut..(cut + bytes.len() / 8).min(body.len()), bytes);
        let reply = server().ask("POST", CHAT, "", &body);
        prop_assert!([200, 400, 404].contains(&reply.status), "{}", reply.text());
    }
}
