//! `astrai serve` as a client and an operator meet it: it says where it is, answers many at once with what each would get alone,
//! lets in who has a key, and leaves in order.

use crate::answers::fixture::{endless, good, greedy, make, model, program, refused, text, utf8};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A server that is ready.
pub struct Server {
    child: Child,
    out: BufReader<ChildStdout>,
    /// What it has said on standard error by now.
    told: Arc<Mutex<String>>,
    listens: JoinHandle<()>,
    url: String,
    ready: Value,
}

impl Server {
    pub fn start(model: &Path, flags: &[&str]) -> Server {
        Server::spawn(program(&[&["serve", text(model), "--port", "0", "--json"][..], flags].concat()))
    }

    pub fn spawn(mut c: Command) -> Server {
        let mut child = c.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        out.read_line(&mut line).unwrap();
        if line.is_empty() {
            panic!("{}", utf8(&child.wait_with_output().unwrap().stderr));
        }
        let ready: Value = serde_json::from_str(&line).unwrap();
        let url = ready["url"].as_str().unwrap().to_string();
        let told = Arc::new(Mutex::new(String::new()));
        let (lines, shared) = (BufReader::new(child.stderr.take().unwrap()).lines(), told.clone());
        let listen = move || lines.map_while(Result::ok).for_each(|l| *shared.lock().unwrap() += &(l + "\n"));
        Server { child, out, told, listens: thread::spawn(listen), url, ready }
    }

    /// The next line on standard output.
    pub fn next_line(&mut self) -> Value {
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    pub fn told(&self) -> String {
        self.told.lock().unwrap().clone()
    }

    pub fn get(&self, path: &str) -> (u16, String) {
        answer(agent().get(self.at(path)).call())
    }

    pub fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let sent = agent().post(self.at(path)).content_type("application/json").send(body.to_string());
        let (status, text) = answer(sent);
        (status, serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}")))
    }

    /// The text of a completion that must succeed.
    fn complete(&self, body: &Value) -> String {
        let (status, answer) = self.post("/v1/completions", body);
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["text"].as_str().unwrap().trim().to_string()
    }

    pub fn at(&self, path: &str) -> String {
        format!("{}{path}", self.url)
    }

    pub fn process(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, name: &str) {
        assert!(Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap().success());
    }

    /// Exit code and standard error of a server that ends by itself, soon.
    pub fn ended(&mut self) -> (Option<i32>, String) {
        let since = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                // A process that took over may go on to write.
                let listened = Instant::now();
                while !self.listens.is_finished() && listened.elapsed() < Duration::from_millis(500) {
                    thread::sleep(Duration::from_millis(5));
                }
                return (status.code(), self.told());
            }
            assert!(since.elapsed() < Duration::from_secs(60), "the server does not end");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

fn agent() -> ureq::Agent {
    ureq::Agent::config_builder().http_status_as_error(false).build().into()
}

fn answer(sent: Result<ureq::http::Response<ureq::Body>, ureq::Error>) -> (u16, String) {
    let mut answer = sent.unwrap();
    (answer.status().as_u16(), answer.body_mut().read_to_string().unwrap())
}

fn prompt(text: &str, most: u32) -> Value {
    json!({"model": "short", "prompt": text, "max_tokens": most, "temperature": 0})
}

#[test]
fn a_server_is_measured_over_http() {
    let mut server = Server::start(model(), &["--max-seqs", "4", "--api-key", "k"]);
    let file = server_file("load.json");
    let bench = ["bench", "serve", "--url", &server.url];
    let load = [
        "--num-prompts",
        "12",
        "--random-input-len",
        "20",
        "--random-output-len",
        "8",
        "--random-vocab",
        "20",
    ];
    let more = [
        "--api-key",
        "k",
        "--request-rate",
        "200",
        "--max-concurrency",
        "3",
        "--random-range-ratio",
        "0.5",
        "--random-prefix-len",
        "5",
        "--goodput",
        "ttft:60000",
        "tpot:60000",
        "--percentile-metrics",
        "ttft,itl,e2el",
        "--metric-percentiles",
        "50,99.9",
        "--save-result",
        text(&file),
    ];
    let told = good(&[&bench[..], &load, &more].concat());
    let told: Value = serde_json::from_str(&told).unwrap();
    let saved: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(
        (&told["completed"], &told["failed"], &told["model_id"]),
        (&json!(12), &json!(0), &json!("short"))
    );
    let lengths = |name: &str| -> Vec<u64> {
        saved[name].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect()
    };
    let (input, output) = (lengths("input_lens"), lengths("output_lens"));
    assert!(
        input.iter().all(|n| (15..=35).contains(n)) && output.iter().all(|n| (4..=12).contains(n)),
        "{saved}"
    );
    assert!(output.iter().any(|n| *n != output[0]));
    assert_eq!(told["total_output_tokens"], output.iter().sum::<u64>());
    // A chunk may hold several tokens, but each answer begins with one.
    assert!(
        saved["itls"]
            .as_array()
            .unwrap()
            .iter()
            .zip(&output)
            .all(|(itl, n)| itl.as_array().unwrap().len() < *n as usize)
    );
    assert_eq!(told["request_goodput"], told["request_throughput"]);
    for key in ["output_throughput", "mean_ttft_ms", "median_itl_ms", "p50_ttft_ms", "p99.9_e2el_ms"] {
        assert!(told[key].as_f64().is_some_and(|x| x > 0.0), "{key}: {told}");
    }
    assert!(told.get("mean_tpot_ms").is_none());
    let same = good(&[&bench[..], &load, &more].concat());
    assert_eq!(
        serde_json::from_str::<Value>(&same).unwrap()["total_input_tokens"],
        told["total_input_tokens"]
    );
    for (flags, word) in [
        (&["--api-key", "other"][..], "not one of this server's"),
        (&["--api-key", "k", "--model", "other"], "does not exist"),
        (&["--api-key", "k", "--random-prefix-len", "500"], "128"),
        (&["--api-key", "k", "--request-rate", "0"], "--request-rate"),
        (&["--api-key", "k", "--random-range-ratio", "2"], "--random-range-ratio"),
    ] {
        let line = refused(&[&bench[..], &load, flags].concat());
        assert!(line.contains(word), "{flags:?}: {line}");
    }
    assert!(refused(&["bench", "serve", "--url", "https://x"]).contains("http://"));
    assert!(refused(&["bench", "gemm", "--url", "http://x"]).contains("--url"));
    server.signal("-TERM");
    assert_eq!(server.ended().0, Some(0));
}

#[test]
fn a_server_listens_at_a_file_or_behind_a_certificate() {
    let path = server_file("serve.sock");
    let _absent = fs::remove_file(&path);
    let args = ["serve", text(model()), "--json", "--unix-socket", text(&path)];
    let ask = || {
        let mut stream = UnixStream::connect(&path).unwrap();
        stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
        let mut got = String::new();
        stream.read_to_string(&mut got).unwrap();
        assert!(got.starts_with("HTTP/1.1 200"), "{got}");
    };
    let server = Server::spawn(program(&args));
    assert_eq!(server.ready["url"], format!("unix:{}", text(&path)));
    ask();
    assert!(refused(&args).contains("another server"));
    // It is killed, and leaves its file.
    drop(server);
    assert!(path.exists());
    let mut server = Server::spawn(program(&args));
    ask();
    server.signal("-TERM");
    assert_eq!(server.ended().0, Some(0));
    assert!(!path.exists());
    fs::write(&path, "mine").unwrap();
    assert!(refused(&args).contains("serve.sock"));
    assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
    let tls = Path::new(env!("CARGO_MANIFEST_DIR")).join("serve/src/http/tests/tls");
    let [certificate, key] = ["cert.pem", "key.pem"].map(|name| tls.join(name));
    let server = Server::start(model(), &["--tls-cert", text(&certificate), "--tls-key", text(&key)]);
    assert!(server.url.starts_with("https://127.0.0.1:"), "{}", server.url);
    let both = ["serve", text(model()), "--tls-cert", text(&key), "--tls-key", text(&key)];
    assert!(refused(&both).contains("has no certificate"));
}

/// A file of a test's own.
fn server_file(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

#[test]
fn many_are_answered_at_once_as_if_each_were_alone() {
    let mut server = Server::start(model(), &["--max-seqs", "4"]);
    assert_eq!((&server.ready["model"], &server.ready["context"]), (&json!("short"), &json!(128)));
    assert_eq!(server.get("/health").0, 200);
    assert!(server.get("/v1/models").1.contains("\"short\""));
    thread::scope(|scope| {
        let asked: Vec<_> = (1..10)
            .map(|i| {
                let (server, words) = (&server, "t11 ".repeat(i));
                (scope.spawn(move || server.complete(&prompt(words.trim(), 9))), "t11 ".repeat(i))
            })
            .collect();
        for (got, words) in asked {
            assert_eq!(got.join().unwrap(), greedy(words.trim(), 9), "{words}");
        }
    });
    let chat = json!({"model": "short", "messages": [{"role": "system", "content": "t8"}, {"role": "user", "content": "t12"}],
        "max_tokens": 6, "temperature": 0});
    let want = greedy("t7 t8 t4 t12 t6", 6);
    let (status, got) = server.post("/v1/chat/completions", &chat);
    assert_eq!((status, &got["choices"][0]["message"]["content"]), (200, &json!(want)), "{got}");
    let mut streamed = chat.clone();
    streamed["stream"] = json!(true);
    let sent = agent().post(server.at("/v1/chat/completions")).send(streamed.to_string());
    let (status, events) = answer(sent);
    let pieces = events.lines().filter_map(|l| serde_json::from_str::<Value>(l.strip_prefix("data: ")?).ok());
    let joined: String =
        pieces.filter_map(|v| v["choices"][0]["delta"]["content"].as_str().map(str::to_string)).collect();
    assert_eq!((status, joined), (200, want), "{events}");
    assert!(events.trim_end().ends_with("[DONE]"), "{events}");
    let (status, got) = server.post("/v1/completions", &prompt(&"t9 ".repeat(200), 3));
    assert!(status == 400 && got["error"]["message"].as_str().unwrap().contains("128"), "{got}");
    server.signal("-TERM");
    let (code, told) = server.ended();
    assert_eq!(code, Some(0), "{told}");
    let number =
        |l: &str| l.strip_prefix("astrai: ")?.split_once(" requests answered")?.0.parse::<u32>().ok();
    let answered: Vec<Option<u32>> = told.lines().map(number).collect();
    assert_eq!(answered.into_iter().sum::<Option<u32>>(), Some(11), "{told}");
}

#[test]
fn keys_names_and_recommendations() {
    let folder = make("served", |_| {});
    fs::write(folder.join("generation_config.json"), r#"{"temperature": 0}"#).unwrap();
    let flags = ["--api-key", "one", "--api-key", "two", "--served-name", "a", "--served-name", "b"];
    let server = Server::start(&folder, &flags);
    assert_eq!((server.get("/health").0, server.get("/v1/models").0), (200, 401));
    for key in ["one", "two"] {
        let body = json!({"model": "b", "prompt": "t9 t8", "max_tokens": 9});
        let sent = agent()
            .post(server.at("/v1/completions"))
            .header("authorization", format!("Bearer {key}"))
            .send(body.to_string());
        let (status, got) = answer(sent);
        let got: Value = serde_json::from_str(&got).unwrap();
        assert_eq!(status, 200, "{got}");
        assert_eq!(got["choices"][0]["text"], greedy("t9 t8", 9), "the recommended temperature");
    }
    let flags = ["--cors-origin", "https://a.example", "--body-limit", "300"];
    let mut c = program(&[&["serve", text(model()), "--port", "0", "--json"], &flags[..]].concat());
    c.env("ASTRAI_API_KEY", "secret");
    let server = Server::spawn(c);
    assert_eq!(server.get("/v1/models").0, 401, "a key of the environment");
    let page = agent().get(server.at("/health")).header("origin", "https://a.example").call().unwrap();
    assert_eq!(page.headers()["access-control-allow-origin"], "https://a.example");
    let long = json!({"model": "short", "prompt": "t9 ".repeat(200)}).to_string();
    let sent = agent().post(server.at("/v1/completions")).header("authorization", "Bearer secret").send(long);
    assert_eq!(answer(sent).0, 413);
    let help = program(&["serve", "--help"]).env("ASTRAI_API_KEY", "secret").output().unwrap();
    assert!(!utf8(&help.stdout).contains("secret"));
}

/// A request that goes on for longer than any test, sent in the background and begun.
fn endless_request(server: &Server) -> thread::JoinHandle<Option<String>> {
    let url = server.at("/v1/completions");
    let asked = thread::spawn(move || {
        let body = json!({"model": "endless", "prompt": "t9", "max_tokens": 90_000});
        let mut sent = agent().post(url).send(body.to_string()).ok()?;
        sent.body_mut().read_to_string().ok()
    });
    let since = Instant::now();
    while !server.get("/metrics").1.lines().any(|l| l.contains("running") && l.ends_with(" 1")) {
        assert!(since.elapsed() < Duration::from_secs(60), "{}", server.get("/metrics").1);
        thread::sleep(Duration::from_millis(20));
    }
    asked
}

#[test]
fn a_server_leaves_in_order() {
    // What runs is finished.
    let mut server = Server::start(endless(), &[]);
    let url = server.at("/v1/completions");
    let asked = thread::spawn(move || {
        let body = json!({"model": "endless", "prompt": "t9", "max_tokens": 1500});
        answer(agent().post(url).send(body.to_string()))
    });
    thread::sleep(Duration::from_millis(300));
    server.signal("-INT");
    let (status, got) = asked.join().unwrap();
    assert!(status == 200 && got.contains("\"completion_tokens\":1500"), "{status} {got}");
    assert_eq!(server.ended().0, Some(0));
    // What takes too long is told so.
    let mut server = Server::start(endless(), &["--shutdown-timeout", "1"]);
    let asked = endless_request(&server);
    server.signal("-TERM");
    let (code, told) = server.ended();
    assert_eq!(code, Some(0), "{told}");
    assert!(asked.join().unwrap().is_some_and(|text| text.contains("error")), "{told}");
    // A second signal waits for nothing.
    let mut server = Server::start(endless(), &["--shutdown-timeout", "600"]);
    let asked = endless_request(&server);
    server.signal("-TERM");
    thread::sleep(Duration::from_millis(300));
    server.signal("-TERM");
    assert_eq!(server.ended().0, Some(143));
    assert!(asked.join().unwrap().is_none_or(|text| !text.contains("finish_reason")));
}

#[test]
fn what_is_wrong_is_one_line_before_anything_is_loaded() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let run = |flags: &[&str]| refused(&[&["serve", text(model()), "--port", "0"], flags].concat());
    let line = refused(&["serve", text(model()), "--port", &port]);
    assert!(line.contains(&port) && line.contains("--port"), "{line}");
    assert!(run(&["--api-key", ""]).contains("may not be empty"));
    assert!(run(&["--served-name", " "]).contains("may not be empty"));
    assert!(run(&["--cors-origin", ""]).contains("may not be empty"));
    assert!(run(&["--max-seqs", "8", "--max-batch-tokens", "4"]).contains("--max-batch-tokens"));
    assert!(run(&["--max-model-len", "1000"]).contains("128 positions"));
    assert!(run(&["--kv-memory", "1KiB"]).contains("--kv-memory"));
    assert!(refused(&["serve", "no/such", "--port", "0"]).contains("no/such"));
    assert!(run(&["--adapter", "a=no/such"]).contains("no/such"));
    assert!(run(&["--adapter", "a=x", "--adapter", "a=y"]).contains("must differ"));
    assert!(run(&["--adapter", "=x"]).contains("may not be empty"));
    assert!(run(&["--adapter", "a=x", "--adapter", "y"]).contains("NAME=DIR"));
    assert!(run(&["--adapter", "a=x", "--adapter", "b=y", "--max-adapters", "1"]).contains("2 adapters"));
    assert!(refused(&["generate", text(model()), "--prompt", "x", "--adapter", "a=x"]).contains("serve"));
    for usage in [["--port", "70000"], ["--host", "nowhere"], ["--max-seqs", "0"], ["--queue", "0"]] {
        let out = program(&["serve", text(model()), usage[0], usage[1]]).output().unwrap();
        assert_eq!(out.status.code(), Some(2), "{usage:?}");
    }
}
