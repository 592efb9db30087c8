//! The server under attack: requests whose bodies, or whose very bytes, nobody should send, to `astrai serve` on a golden model. Each
//! must be answered or the connection closed, and the server must go on.

use crate::answers;
use crate::mutate::{Draws, bytes, object};
use crate::targets::Run;
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const PATHS: [&str; 12] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/tokenize",
    "/detokenize",
];

fn framed(path: &str, body: &[u8], d: &mut Draws) -> Vec<u8> {
    let mut made = format!("POST {path} HTTP/1.1\r\nhost: fuzz\r\nconnection: close\r\n").into_bytes();
    if d.below(3) > 0 {
        made.extend(format!("content-length: {}\r\n\r\n", body.len()).bytes());
        made.extend(body);
        return made;
    }
    made.extend(b"transfer-encoding: chunked\r\n\r\n");
    for chunk in body.chunks(1 + d.below(200)) {
        made.extend(format!("{:x}\r\n", chunk.len()).bytes());
        made.extend(chunk);
        made.extend(b"\r\n");
    }
    made.extend(b"0\r\n\r\n");
    made
}

/// A request with a strange body.
pub fn request(d: &mut Draws) -> Vec<u8> {
    let mut sound = json!({"model": "fuzz", "prompt": "t1 t2", "messages": [{"role": "system", "content": "t3"},
        {"role": "user", "content": [{"type": "text", "text": "t4"}]}], "max_tokens": 2, "temperature": 0.5, "top_p": 0.9,
        "top_k": 5, "min_p": 0.1, "n": 2, "stop": ["t9"], "stream": true, "stream_options": {"include_usage": true},
        "logit_bias": {"5": -100}, "seed": 1, "repetition_penalty": 1.1, "tokens": [1, 2], "stop_token_ids": [3],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "chat_template_kwargs": {"a": 1}, "return_token_strs": true, "tool_choice": "auto", "system": "t5", "bad_words": ["t6"],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "maxItems": 1}}},
        "structured_outputs": null, "stop_sequences": ["t7"], "thinking": {"type": "disabled"}, "max_output_tokens": 2,
        "input": [{"role": "user", "content": "t8"}, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "t1"}]});
    let of_vectors = json!({"text_1": "t1", "text_2": ["t2", "t3"], "query": "t4", "documents": ["t5", {"text": "t6"}], "top_n": 1,
        "dimensions": 8, "encoding_format": "base64", "truncate_prompt_tokens": 4});
    if let (Value::Object(sound), Value::Object(more)) = (&mut sound, of_vectors) {
        sound.extend(more);
        if d.below(2) == 0 {
            sound.insert("input".into(), json!(["t8", "t9"]));
        }
        if d.below(3) == 0 {
            sound.insert("response_format".into(), structural_tag());
        }
    }
    let path = d.of(&PATHS);
    let body = object(&sound, d);
    framed(path, &body, d)
}

/// An answer with tags in it.
fn structural_tag() -> Value {
    let either = json!([{"type": "const_string", "value": "t1"}, {"type": "regex", "pattern": "[ab/]{2}"}]);
    let text = json!({"type": "any_text", "excludes": ["t5"]});
    let tag = json!({"type": "tag", "begin": "<a>", "content": text, "end": ["</a>", "t9"]});
    let tags =
        json!({"type": "triggered_tags", "triggers": ["<a"], "tags": [tag], "stop_after_first": false});
    let elements = json!([{"type": "or", "elements": either}, tags]);
    json!({"type": "structural_tag", "format": {"type": "sequence", "elements": elements}})
}

/// A request whose bytes are strange.
pub fn wire(d: &mut Draws) -> Vec<u8> {
    let path = d.of(&PATHS);
    let made = framed(
        path,
        br#"{"prompt": "t1", "max_tokens": 1, "messages": [{"role": "user", "content": "t1"}]}"#,
        d,
    );
    bytes(made, d)
}

pub struct Server {
    child: Child,
    address: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _status = self.child.wait();
    }
}

impl Server {
    pub fn start(model: &Path) -> Server {
        let mut child = Command::new(env!("CARGO_BIN_EXE_astrai"))
            .arg("serve")
            .arg(model)
            .args([
                "--port",
                "0",
                "--json",
                "--threads",
                "2",
                "--served-name",
                "fuzz",
                "--embeddings",
                "mean",
            ])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the server starts");
        let mut line = String::new();
        let out = child.stdout.take().expect("its output");
        BufReader::new(out).read_line(&mut line).expect("its first line");
        let ready: Value = serde_json::from_str(&line).expect("JSON");
        let url = ready["url"].as_str().expect("its address");
        Server { child, address: url.trim_start_matches("http://").to_string() }
    }

    /// Asks the server to end; its exit code.
    pub fn stop(&mut self) -> i32 {
        let asked = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status();
        assert!(asked.expect("kill").success());
        self.child.wait().expect("the process is ours").code().unwrap_or(-1)
    }

    /// What comes back for these bytes.
    pub fn send(&self, request: &[u8], whole: bool) -> std::io::Result<Vec<u8>> {
        let mut stream = TcpStream::connect(&self.address)?;
        // Of half a request the server waits for the rest, for as long as it is patient.
        let patience = if whole { Duration::from_secs(10) } else { Duration::from_millis(200) };
        stream.set_read_timeout(Some(patience))?;
        // A server that has refused need not read the rest.
        let _sent = stream.write_all(request);
        let mut got = vec![];
        match stream.read_to_end(&mut got) {
            Err(e) if e.kind() == ErrorKind::ConnectionReset => Ok(got),
            Err(e) if e.kind() == ErrorKind::WouldBlock && !whole => Ok(got),
            read => read.map(|_| got),
        }
    }
}

/// A model directory: the golden llama, whose every token is a word.
pub fn model(folder: &Path) -> PathBuf {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let model = answers::make(&format!("fuzz-{name}"), |_| {});
    let template = "{% for m in messages %}{{ m.content }} {% endfor %}{{ tools | tojson }}";
    fs::write(model.join("chat_template.jinja"), template).expect("written");
    model
}

/// Sends inputs to a server that must live on.
pub fn run(folder: &Path, whole: bool) -> Run {
    let mut server = Server::start(&model(folder));
    Box::new(move |input| {
        let got = server.send(input, whole).unwrap_or_else(|e| panic!("no answer: {e}"));
        let ended = server.child.try_wait().expect("the process is ours");
        assert!(ended.is_none(), "the server has ended: {ended:?}");
        let status = got.get(9..12).and_then(|code| std::str::from_utf8(code).ok()?.parse::<u16>().ok());
        match status {
            Some(200 | 204) => Ok(()),
            Some(code @ (500..=599)) => {
                let answer = String::from_utf8_lossy(&got).into_owned();
                // What is refused because there is no room is no failure.
                assert!(code == 503, "status {code}: {answer:.500}");
                Err("503".into())
            }
            Some(code) => Err(code.to_string()),
            None => Err("closed without an answer".into()),
        }
    })
}
