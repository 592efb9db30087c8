//! Keys, ids, browsers; clients that leave; too many of them; the end.

use super::*;
use std::sync::mpsc::channel;

const CHAT: &str = "/v1/chat/completions";

fn slow(settings: Settings, http: HttpSettings) -> Server {
    Server::with(Alphabet::paced(Duration::from_millis(3)), settings, http)
}

/// Begins a request that lasts, and waits until it runs.
fn begin(server: &Server, stream: bool) -> TcpStream {
    let before = server.engine.stats().running;
    let body = chat("hi", json!({"stream": stream, "max_tokens": 200})).to_string();
    let connection = server.send("POST", CHAT, "", body.as_bytes());
    until("it runs", || server.engine.stats().running > before);
    connection
}

fn rest(mut connection: TcpStream) -> Reply {
    let mut bytes = Vec::new();
    connection.read_to_end(&mut bytes).unwrap();
    Reply::parse(&bytes)
}

/// One who forwards requests must not read another host in them than this server does.
#[test]
fn a_request_names_one_host() {
    let server = Server::new();
    let ask = |head: &str| {
        let mut stream = server.connect();
        stream.write_all(format!("GET /v1/models {head}\r\nconnection: close\r\n\r\n").as_bytes()).unwrap();
        rest(stream).status
    };
    assert_eq!(ask("HTTP/1.1\r\nhost: a"), 200);
    assert_eq!(ask("HTTP/1.0"), 200);
    for bad in ["HTTP/1.1", "HTTP/1.1\r\nhost: a\r\nhost: a", "HTTP/1.0\r\nhost: a\r\nhost: b"] {
        assert_eq!(ask(bad), 400, "{bad}");
    }
    assert_eq!(server.get("/v1/models/%00%ff").error().0, 400);
}

#[test]
fn keys_guard_all_but_health_and_the_page() {
    let server = Server::with(Alphabet::new(), Settings::default(), Server::keyed(&["one", "two"]));
    for path in ["/v1/models", "/metrics", "/nowhere", "/v1/models/x"] {
        assert_eq!(server.get(path).error(), (401, None, "invalid_api_key".into()), "{path}");
    }
    assert_eq!((server.get("/health").status, server.get("/ready").status), (200, 200));
    let page = server.get("/");
    assert_eq!((page.status, page.header("content-type")), (200, Some("text/html; charset=utf-8")));
    assert!(
        page.header("content-security-policy")
            .unwrap()
            .starts_with("default-src 'none'; script-src 'sha256-")
    );
    for (header, status) in [
        ("authorization: Bearer one\r\n", 200),
        ("authorization: bearer two\r\n", 200),
        ("x-api-key: two\r\n", 200),
        ("authorization: Bearer on\r\n", 401),
        ("authorization: Bearer \r\n", 401),
        ("authorization: Basic one\r\n", 401),
        ("authorization: B\r\n", 401),
        ("x-api-key: \u{e9}\r\n", 401),
    ] {
        assert_eq!(server.ask("GET", "/v1/models", header, b"").status, status, "{header}");
    }
    // What one caller's prompts left in the cache, another does not find.
    let body = chat("hi", json!({"max_tokens": 1})).to_string();
    let cached = |key: &str| {
        let reply = server.ask("POST", CHAT, &format!("x-api-key: {key}\r\n"), body.as_bytes());
        reply.good()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    assert_eq!([cached("one"), cached("one"), cached("two"), cached("two")], [0, 8, 0, 8]);
}

#[test]
fn ids_are_echoed_if_they_are_safe() {
    let server = Server::new();
    let id = |header: &str, path: &str| {
        server.ask("GET", path, header, b"").header("x-request-id").unwrap().to_owned()
    };
    assert_eq!(id("x-request-id: a-1_b.c:d\r\n", "/health"), "a-1_b.c:d");
    assert_eq!(id("x-request-id: mine\r\n", "/nowhere"), "mine");
    for bad in ["x-request-id: a b\r\n", "x-request-id: <x>\r\n", "x-request-id: \r\n", ""] {
        assert!(id(bad, "/health").starts_with("req-"), "{bad}");
    }
    assert!(id(&format!("x-request-id: {}\r\n", "x".repeat(129)), "/health").starts_with("req-"));
    assert_ne!(id("", "/health"), id("", "/health"));
}

#[test]
fn browsers_may_call_from_where_they_are_allowed() {
    let cors_origins = vec!["https://a.example".to_owned()];
    let server = Server::with(
        Alphabet::new(),
        Settings::default(),
        HttpSettings { cors_origins, ..HttpSettings::default() },
    );
    // An error in the other API's form has them too.
    let reply = server.ask("POST", "/v1/messages", "origin: https://a.example\r\n", b"{");
    assert_eq!((reply.status, reply.header("access-control-allow-origin")), (400, Some("https://a.example")));
    let asked = |origin: &str| {
        let headers = format!("origin: {origin}\r\naccess-control-request-method: POST\r\n");
        let reply = server.ask("OPTIONS", CHAT, &headers, b"");
        assert_eq!(reply.status, 200);
        reply.header("access-control-allow-origin").map(str::to_owned)
    };
    assert_eq!(asked("https://a.example").as_deref(), Some("https://a.example"));
    assert_eq!(asked("https://b.example"), None);
    assert_eq!(
        Server::new()
            .ask("GET", "/health", "origin: https://a.example\r\n", b"")
            .header("access-control-allow-origin"),
        None
    );
}

#[test]
fn who_leaves_frees_what_it_held() {
    let server = slow(Settings::default(), HttpSettings::default());
    for stream in [true, false] {
        let connection = begin(&server, stream);
        if stream {
            let mut some = [0; 300];
            (&connection).read_exact(&mut some).unwrap();
        }
        let before = server.engine.stats().cancelled;
        drop(connection);
        server.settle();
        assert_eq!(server.engine.stats().cancelled, before + 1, "stream: {stream}");
    }
    assert_eq!(server.engine.stats().finished, 0);
}

#[test]
fn who_sends_nothing_is_left() {
    let short = Duration::from_millis(100);
    let settings = HttpSettings { idle_timeout: short, body_timeout: short, ..HttpSettings::default() };
    let server = slow(Settings::default(), settings);
    let mut silent = server.connect();
    silent.write_all(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-").unwrap();
    // Whatever is said to it, the connection is closed.
    let _ = silent.read_to_end(&mut Vec::new());
    let mut without_body = server.connect();
    without_body
        .write_all(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        .unwrap();
    assert_eq!(rest(without_body).status, 408);
}

#[test]
fn who_stops_reading_is_left() {
    let settings = HttpSettings { stall_timeout: Duration::from_millis(100), ..HttpSettings::default() };
    let server = slow(Settings::default(), settings);
    // Far more than the buffers between hold.
    let fields = json!({
        "n": 64, "temperature": 1, "logprobs": true, "top_logprobs": 20, "max_tokens": 240, "stream": true,
    });
    let mut connection = server.send("POST", CHAT, "", chat("hi", fields).to_string().as_bytes());
    until("it is given up", || server.engine.stats().cancelled == 1);
    server.settle();
    let mut seen = Vec::new();
    let _ = connection.read_to_end(&mut seen);
    assert!(seen.starts_with(b"HTTP/1.1 200") && !seen.ends_with(b"0\r\n\r\n"), "{} bytes", seen.len());
}

#[test]
fn too_many_are_told_to_come_back() {
    let (steps, gate) = channel();
    let few = Settings { queue: 1, sequences: Some(1), ..Settings::default() };
    let server = Server::with(Alphabet::gated(gate), few, HttpSettings::default());
    let body = chat("hi", json!({"max_tokens": 2})).to_string();
    let first = server.send("POST", CHAT, "", body.as_bytes());
    until("it is in the queue", || server.engine.stats().queued == 1);
    steps.send(()).unwrap();
    until("it runs", || server.engine.stats().queued == 0);
    let second = server.send("POST", CHAT, "", body.as_bytes());
    until("it is in the queue", || server.engine.stats().queued == 1);
    let third = server.chat("hi", json!({}));
    assert_eq!(
        (third.error(), third.header("retry-after")),
        ((429, None, "rate_limit_exceeded".into()), Some("1"))
    );
    drop(steps);
    assert_eq!((rest(first).status, rest(second).status), (200, 200));
    server.settle();
    // Where nobody waits, the prompts of a request are taken together however many they are.
    let prompts = json!(["a", "b", "c", "d", "e"]);
    let several = server.complete(prompts, json!({"max_tokens": 1})).good();
    assert_eq!(several["choices"].as_array().unwrap().len(), 5);
    server.settle();
}

#[test]
fn draining_finishes_what_runs() {
    let mut server = slow(Settings::default(), HttpSettings::default());
    let (streamed, plain) = (begin(&server, true), begin(&server, false));
    server.stop();
    until("it is not ready", || server.get("/ready").status == 503);
    let refused = server.chat("hi", json!({}));
    assert_eq!((refused.error().0, refused.header("retry-after")), (503, Some("5")));
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(rest(streamed).events().last().unwrap(), "[DONE]");
    assert_eq!(rest(plain).good()["usage"]["completion_tokens"], 200);
    let address = server.address;
    server.join();
    assert!(TcpStream::connect(address).is_err(), "the listener is open still");
}

#[test]
fn draining_ends_what_does_not_finish() {
    let settings = HttpSettings { shutdown_timeout: Duration::from_millis(50), ..HttpSettings::default() };
    let mut server = slow(Settings::default(), settings);
    let (streamed, plain) = (begin(&server, true), begin(&server, false));
    server.stop();
    let last = rest(streamed).events().pop().unwrap();
    assert_eq!(last["error"]["message"], "the server is shutting down");
    assert_eq!(rest(plain).error().0, 503);
    server.join();
}

#[test]
fn an_idle_connection_does_not_hold_the_end() {
    let server = Server::new();
    let idle = server.connect();
    let started = Instant::now();
    server.join();
    assert!(started.elapsed() < Duration::from_secs(4));
    drop(idle);
}

#[test]
fn metrics_count_what_happened() {
    let both = HttpSettings { vllm_metrics: true, ..HttpSettings::default() };
    let server = Server::with(Alphabet::new(), Settings::default(), both);
    server.chat("hi", json!({"max_tokens": 4})).good();
    server.chat("hi", json!({"max_tokens": 9, "stop": "d", "stream": true})).events();
    server.chat("hi", json!({"n": 0})).error();
    server.settle();
    let reply = server.get("/metrics");
    assert!(reply.header("content-type").unwrap().starts_with("text/plain; version=0.0.4"));
    let value = |name: &str| {
        let line =
            reply.text().lines().find(|l| l.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')));
        line.unwrap_or_else(|| panic!("no {name} in {}", reply.text()))
            .rsplit(' ')
            .next()
            .unwrap()
            .parse::<f64>()
            .unwrap()
    };
    let block = SIZES.page_size as f64;
    let stored = format!(
        "astrai_cache_config_info{{block_size=\"{block}\",bytes_per_token=\"10\",cache_dtype=\"int8\"}}"
    );
    for (name, want) in [
        ("astrai_num_requests_running", 0.0),
        ("astrai_kv_cache_usage_perc", 0.0),
        ("astrai_kv_cache_bytes", 10.0 * value("astrai_kv_pages") * block),
        (stored.as_str(), 1.0),
        ("astrai_prompt_tokens_total", 18.0),
        ("astrai_prefix_cache_hits_total", 8.0),
        ("astrai_requests_finished_total", 2.0),
        ("astrai_request_success_total{finished_reason=\"length\"}", 1.0),
        ("astrai_request_success_total{finished_reason=\"stop\"}", 1.0),
        ("astrai_http_responses_total{path=\"/v1/chat/completions\",status=\"200\"}", 2.0),
        ("astrai_http_responses_total{path=\"/v1/chat/completions\",status=\"400\"}", 1.0),
        ("astrai_time_to_first_token_seconds_count", 2.0),
        ("astrai_request_queue_time_seconds_count", 2.0),
        ("astrai_e2e_request_latency_seconds_count", 2.0),
        ("astrai_request_time_per_output_token_seconds_count", 2.0),
        ("astrai_request_generation_tokens_sum", 8.0),
        ("vllm:request_generation_tokens_sum{model_name=\"org/alphabet\"}", 8.0),
        ("vllm:request_success_total{finished_reason=\"stop\",model_name=\"org/alphabet\"}", 1.0),
    ] {
        assert_eq!(value(name), want, "{name}");
    }
    assert!(value("astrai_generation_tokens_total") >= 8.0);
}

#[test]
fn keys_of_a_file_are_read_again_when_it_changes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys");
    std::fs::write(&path, "# ours\nfirst # a remark\n\nsecond\na#b\t#c\n").unwrap();
    let settings =
        HttpSettings { keys: Arc::new(Keys::new(&[], Some(&path)).unwrap()), ..HttpSettings::default() };
    let server = Server::with(Alphabet::new(), Settings::default(), settings);
    let status = |key: &str| server.ask("GET", "/v1/models", &format!("x-api-key: {key}\r\n"), b"").status;
    assert_eq!(["first", "second", "a#b", "a", ""].map(status), [200, 200, 200, 401, 401]);
    // A server that has none from the beginning is not started.
    let none = Keys::new(&[], Some(&folder.path().join("other"))).unwrap_err();
    assert!(none.to_string().contains("no such file"), "{none}");
    // A file without a key lets nobody in who was not let in before.
    std::fs::write(&path, "# nobody\n").unwrap();
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(["first", "third"].map(status), [200, 401]);
    std::fs::write(&path, "third\n").unwrap();
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(["first", "third"].map(status), [401, 200]);
}

#[test]
fn each_key_has_its_share_of_a_minute() {
    let rates = Rates { requests: Some(2), tokens: Some(1000) };
    let settings = HttpSettings { rates, ..Server::keyed(&["a", "b"]) };
    let server = Server::with(Alphabet::new(), Settings::default(), settings);
    let ask = |key: &str| {
        let body = chat("hi", json!({"max_tokens": 1})).to_string();
        server.ask("POST", "/v1/chat/completions", &format!("x-api-key: {key}\r\n"), body.as_bytes())
    };
    assert_eq!(["a", "a", "b"].map(|key| ask(key).status), [200, 200, 200]);
    let refused = ask("a");
    assert_eq!(refused.error(), (429, None, "rate_limit_exceeded".into()));
    let wait: u16 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=31).contains(&wait));
    assert_eq!(ask("b").status, 200);
}

/// Whoever leaves has used what was computed until then.
#[test]
fn who_leaves_pays() {
    // The prompt uses all but one of them.
    let rates = Rates { requests: None, tokens: Some(10) };
    for stream in [true, false] {
        let server = slow(Settings::default(), HttpSettings { rates, ..HttpSettings::default() });
        let before = server.engine.stats().output_tokens;
        let connection = begin(&server, stream);
        until("it has an answer", || server.engine.stats().output_tokens > before + 9);
        drop(connection);
        server.settle();
        assert_eq!(server.chat("hi", json!({"max_tokens": 1})).error().0, 429, "stream: {stream}");
    }
}

#[test]
fn every_path_is_in_the_document() {
    let server = Server::new();
    let document = server.get("/openapi.json").good();
    let paths = document["paths"].as_object().unwrap();
    for path in super::super::middleware::PATHS {
        let methods = paths.get(path).unwrap_or_else(|| panic!("{path} is not in the document"));
        let method = if methods.get("get").is_some() { "GET" } else { "POST" };
        let status = server.ask(method, path, "", b"{}").status;
        let told = methods[method.to_lowercase()]["responses"].as_object().unwrap();
        assert!(told.contains_key(&status.to_string()), "{path}: {status}");
    }
    let text = document.to_string();
    for part in text.split("\"$ref\":\"#").skip(1) {
        let pointer = part.split('"').next().unwrap();
        assert!(document.pointer(pointer).is_some(), "{pointer}");
    }
}

/// Each name that the board asks for is one that `/metrics` has, and each that it has is asked for, but for what the board has no panel for.
#[test]
fn the_board_asks_for_what_is_measured() {
    let server = Server::new();
    server.chat("hi", json!({"max_tokens": 3})).good();
    let measured = server.get("/metrics");
    let types = measured.text().lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let mut names: Vec<String> = Vec::new();
    for (name, kind) in types {
        match kind {
            "histogram" => names.extend(["bucket", "sum", "count"].map(|part| format!("{name}_{part}"))),
            _ => names.push(name.to_owned()),
        }
    }
    let board: Value = serde_json::from_str(include_str!("../../../grafana.json")).unwrap();
    let asked: Vec<&str> = board["panels"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|panel| {
            panel["targets"].as_array().unwrap().iter().map(|target| target["expr"].as_str().unwrap())
        })
        .collect();
    let word = |c: char| !c.is_ascii_alphanumeric() && c != '_';
    let words: Vec<&str> =
        asked.iter().flat_map(|e| e.split(word)).filter(|w| w.starts_with("astrai_")).collect();
    assert!(words.len() > 20);
    for name in &words {
        assert!(names.iter().any(|known| known == name), "{name} is not measured");
    }
    let whole = |name: &str| {
        words.iter().any(|w| {
            *w == name || w.strip_prefix(name).is_some_and(|end| ["_bucket", "_sum", "_count"].contains(&end))
        })
    };
    let types = measured.text().lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let left: Vec<&str> = types.map(|(name, _)| name).filter(|name| !whole(name)).collect();
    assert_eq!(
        left,
        [
            "astrai_cache_config_info",
            "astrai_forked_sequences_total",
            "astrai_kv_cache_bytes",
            "astrai_request_time_per_output_token_seconds",
            "astrai_requests_finished_total",
        ]
    );
}
