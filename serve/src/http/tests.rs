//! The server over real connections and a model whose answers are known. The client is written out, byte for byte, so that it
//! can also send what no client would.

mod adapters;
mod anthropic;
mod embeddings;
mod extras;
mod hostile;
mod openai;
mod operations;
mod plain;
mod refusals;
mod responses;
mod streams;
mod structured;
mod talks;
mod tls;
mod traces;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::{Ending, HttpServer, HttpSettings, Keys, Rates, Served};
use crate::engine::{Engine, Handle, Settings};
use crate::template::ChatTemplate;
use crate::tests::alphabet::{Alphabet, SIZES, tokenizer};
use crate::tests::script::Script;

/// Says who speaks, and can raise and loop.
const TEMPLATE: &str = "{% for m in messages %}{% if m.content == 'raise' %}{{ raise_exception('no such thing') }}\
    {% elif m.content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{{ '' }}{% endfor %}{% endfor %}\
    {% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}\
    {{ note }}{% if add_generation_prompt %}:{% endif %}";

struct Server {
    address: SocketAddr,
    engine: Handle,
    stop: Option<oneshot::Sender<Ending>>,
    serving: Option<JoinHandle<()>>,
    runtime: Runtime,
}

impl Server {
    fn new() -> Server {
        Server::with(Alphabet::new(), Settings::default(), HttpSettings::default())
    }

    fn with(model: Alphabet, engine: Settings, settings: HttpSettings) -> Server {
        Server::of(model.start(engine), TEMPLATE, settings)
    }

    /// One that says one text; its template has these marks besides.
    fn saying(text: &str, marks: &str) -> Server {
        let template = format!("{TEMPLATE}{{# {marks} #}}");
        Server::of(Script::start(text), &template, HttpSettings::default())
    }

    fn of(engine: Engine, template: &str, settings: HttpSettings) -> Server {
        let runtime = Runtime::new().unwrap();
        let handle = engine.handle();
        let template = Some(ChatTemplate::parse(template, Map::new()).unwrap());
        let names = vec!["org/alphabet".to_owned(), "alias".to_owned()];
        let served = Served { engine, tokenizer: tokenizer(), template, names, settings };
        let (stop, stopped) = oneshot::channel();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let told = async { stopped.await.unwrap_or(Ending::Leave) };
        let serving = runtime.spawn(HttpServer::new(served).unwrap().serve(listener, told));
        Server { address, engine: handle, stop: Some(stop), serving: Some(serving), runtime }
    }

    /// Settings with these keys.
    fn keyed(keys: &[&str]) -> HttpSettings {
        let keys: Vec<String> = keys.iter().map(|key| key.to_string()).collect();
        HttpSettings { keys: Arc::new(Keys::new(&keys, None).unwrap()), ..HttpSettings::default() }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }

    /// Sends a request and leaves the answer to be read.
    fn send(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> TcpStream {
        let mut stream = self.connect();
        let n = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: {n}\r\n{headers}\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        // A server that refuses the head need not read the body.
        let _ = stream.write_all(body);
        stream
    }

    fn ask(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> Reply {
        let mut bytes = Vec::new();
        // Nor need it close politely.
        let _ = self.send(method, path, headers, body).read_to_end(&mut bytes);
        Reply::parse(&bytes)
    }

    fn get(&self, path: &str) -> Reply {
        self.ask("GET", path, "", b"")
    }

    fn post(&self, path: &str, body: &Value) -> Reply {
        self.ask("POST", path, "", body.to_string().as_bytes())
    }

    /// A chat of one message, at temperature 0, with these fields besides.
    fn chat(&self, said: &str, fields: Value) -> Reply {
        self.post("/v1/chat/completions", &chat(said, fields))
    }

    fn complete(&self, prompt: Value, fields: Value) -> Reply {
        self.post("/v1/completions", &with(json!({"prompt": prompt, "temperature": 0}), fields))
    }

    /// Tells the server to stop, without waiting.
    fn stop(&mut self) {
        self.stop.take().map(|stop| stop.send(Ending::Leave));
    }

    /// Waits until the server has returned.
    fn join(mut self) {
        self.stop();
        let serving = self.serving.take().unwrap();
        self.runtime
            .block_on(async { tokio::time::timeout(Duration::from_secs(20), serving).await })
            .expect("the server does not return")
            .unwrap();
    }

    /// Waits until nothing runs, and holds the pages to be free.
    fn settle(&self) {
        until("nothing runs", || {
            let stats = self.engine.stats();
            (stats.queued, stats.running, stats.waiting) == (0, 0, 0)
                && stats.pages_free + stats.pages_cached == SIZES.pages
        });
    }
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < Duration::from_secs(20), "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn with(mut body: Value, fields: Value) -> Value {
    let fields = fields.as_object().cloned().unwrap_or_default();
    body.as_object_mut().unwrap().extend(fields);
    body
}

fn chat(said: &str, fields: Value) -> Value {
    let body =
        json!({"model": "org/alphabet", "messages": [{"role": "user", "content": said}], "temperature": 0});
    with(body, fields)
}

/// A response.
#[derive(Debug)]
struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Reply {
    fn parse(bytes: &[u8]) -> Reply {
        let end = bytes.windows(4).position(|w| w == b"\r\n\r\n").expect("a response has a head");
        let head = std::str::from_utf8(&bytes[..end]).unwrap();
        let mut lines = head.split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let header = |line: &str| line.split_once(": ").map(|(k, v)| (k.to_owned(), v.to_owned()));
        let headers: Vec<(String, String)> = lines.filter_map(header).collect();
        let mut body = bytes[end + 4..].to_vec();
        if headers.iter().any(|(k, v)| k == "transfer-encoding" && v == "chunked") {
            body = joined(&body);
        }
        Reply { status, headers, body }
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(k, _)| k == name).map(|(_, v)| v.as_str())
    }

    fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {:?}", self.text()))
    }

    /// The body of a response that is no error.
    fn good(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text());
        self.json()
    }

    /// Status, parameter and code of an error, which has the form of one.
    fn error(&self) -> (u16, Option<String>, String) {
        let body = self.json();
        let error = body["error"].as_object().unwrap();
        assert_eq!(error.keys().collect::<Vec<_>>(), ["message", "type", "param", "code"]);
        let message = error["message"].as_str().unwrap();
        assert!(!message.is_empty() && !message.contains('\n') && error["type"].is_string(), "{error:?}");
        let code = error["code"].as_str().unwrap_or("").to_owned();
        (self.status, error["param"].as_str().map(str::to_owned), code)
    }

    /// The events of a stream, without comments.
    fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.text());
        assert_eq!(self.header("content-type"), Some("text/event-stream"));
        events(self.text())
    }
}

fn joined(mut chunked: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = chunked.windows(2).position(|w| w == b"\r\n") {
        let size = std::str::from_utf8(&chunked[..end]).unwrap();
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            break;
        }
        body.extend_from_slice(&chunked[end + 2..][..size]);
        chunked = &chunked[end + 2 + size + 2..];
    }
    body
}

/// What the frames hold; the last is `[DONE]` or an error, and no other is.
fn events(text: &str) -> Vec<Value> {
    let frames = text.strip_suffix("\n\n").expect("the last frame is whole").split("\n\n");
    let frames: Vec<&str> = frames.filter(|frame| *frame != ": ping").collect();
    let data = |frame: &&str| match frame.strip_prefix("data: ") {
        Some("[DONE]") => json!("[DONE]"),
        Some(data) => serde_json::from_str(data).unwrap(),
        None => panic!("{frame:?} is no frame"),
    };
    let events: Vec<Value> = frames.iter().map(data).collect();
    let terminal = |e: &Value| e == "[DONE]" || e.get("error").is_some();
    assert_eq!(events.iter().filter(|e| terminal(e)).count(), 1, "{text}");
    assert!(terminal(events.last().unwrap()), "{text}");
    events
}
