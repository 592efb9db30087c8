//! What operators do to a server that runs: adapters come and go over HTTP, and another process takes its place while clients are
//! answered.

use crate::answers::fixture::{endless, make, model, program, text};
use crate::answers::serve::Server;
use astrai_ir::DType;
use serde_json::{Value, json};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// An adapter of a model's output of attention in its first two layers, of this rank, input and output, whose factors are about this large.
pub fn adapter(folder: &Path, base: &Path, [rank, k, n]: [usize; 3], value: f32) {
    fs::create_dir_all(folder).unwrap();
    let config = json!({"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["o_proj"], "bias": "none",
        "base_model_name_or_path": text(base)});
    fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
    let bytes: Vec<u8> =
        (0..rank * k.max(n)).flat_map(|i| (value * (i as i32 % 7 - 3) as f32).to_le_bytes()).collect();
    let layer =
        |i| ["A", "B"].map(|f| format!("base_model.model.model.layers.{i}.self_attn.o_proj.lora_{f}.weight"));
    let names: Vec<String> = (0..2).flat_map(layer).collect();
    let shapes = [&[rank, k][..], &[n, rank]];
    let tensors = names.iter().enumerate().map(|(i, name)| {
        let shape = shapes[i % 2];
        (name.as_str(), DType::F32, shape, &bytes[..4 * shape.iter().product::<usize>()])
    });
    let file = folder.join("adapter_model.safetensors");
    astrai_runtime::weights::write(&file, tensors, &Default::default()).unwrap();
}

/// A body with more fields.
pub fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// A number that a server measures.
pub fn metric(server: &Server, name: &str) -> f64 {
    let (_, text) = server.get("/metrics");
    let line = text.lines().find_map(|l| l.strip_prefix(&format!("astrai_{name} "))?.parse().ok());
    line.unwrap_or_else(|| panic!("no {name}: {text}"))
}

#[test]
fn adapters_come_and_go_over_http() {
    let open = Path::new(env!("CARGO_TARGET_TMPDIR")).join("answers/adapters");
    let _absent = fs::remove_dir_all(&open);
    adapter(&open.join("loud"), model(), [2, 64, 64], 0.5);
    adapter(&open.join("silent"), model(), [2, 64, 64], 0.0);
    let flags = ["--max-adapters", "2", "--max-adapter-rank", "4", "--adapter-folder", text(&open)];
    let server = Server::start(model(), &flags);
    let says = |name: &str| {
        let body = json!({"model": name, "prompt": "t9 t8", "max_tokens": 8, "temperature": 0});
        let (status, answer) = server.post("/v1/completions", &body);
        (status, answer["choices"][0]["text"].clone())
    };
    let load = |name: &str, path: &str| {
        server.post("/v1/load_lora_adapter", &json!({"lora_name": name, "lora_path": path})).0
    };
    let base = says("short");
    assert_eq!((base.0, says("a").0), (200, 404));
    assert_eq!((load("a", "loud"), load("b", "silent")), (200, 200));
    for (path, name) in [("../adapters/loud/..", "c"), ("nowhere", "c"), ("/", "c"), ("loud", "short")] {
        assert_eq!(load(name, path), 400, "{name} {path}");
    }
    let listed = server.get("/v1/models").1;
    assert!(listed.contains("\"a\"") && listed.contains("\"b\""), "{listed}");
    let merged = program(&[
        "generate",
        text(model()),
        "--adapter",
        text(&open.join("loud")),
        "--prompt",
        "t9 t8",
        "--max-tokens",
        "8",
        "--temperature",
        "0",
        "--json",
    ])
    .output()
    .unwrap();
    let merged: Value = serde_json::from_slice(&merged.stdout).unwrap();
    assert_ne!(says("a").1, base.1);
    assert_eq!((says("a").1, says("b"), says("short")), (merged["text"].clone(), base.clone(), base));
    assert_eq!(server.post("/v1/unload_lora_adapter", &json!({"lora_name": "a"})).0, 200);
    assert_eq!(says("a").0, 404);
}

/// A request on a connection of its own: what comes back, or why none does.
fn ask(address: &str, most: u32) -> Result<String, String> {
    let told = |e: std::io::Error| e.to_string();
    let mut stream = TcpStream::connect(address).map_err(told)?;
    stream.set_read_timeout(Some(Duration::from_secs(60))).map_err(told)?;
    let body = json!({"prompt": "t9", "max_tokens": most, "temperature": 0}).to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).map_err(told)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).map_err(told)?;
    match answer.contains(&format!("\"completion_tokens\":{most}")) {
        true => Ok(answer),
        false => Err(format!("{answer:?}")),
    }
}

/// Ends clients, also where the test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn another_process_takes_over_and_nobody_is_refused() {
    let mut server = Server::start(endless(), &["--max-seqs", "8", "--shutdown-timeout", "300"]);
    let address = server.at("").trim_start_matches("http://").to_owned();
    let over = AtomicBool::new(false);
    let next = thread::scope(|scope| {
        let ends = Over(&over);
        let clients: Vec<_> = (0..3)
            .map(|_| {
                scope.spawn(|| {
                    let mut answered = 0;
                    while !over.load(Ordering::Relaxed) {
                        ask(&address, 5).unwrap();
                        answered += 1;
                    }
                    answered
                })
            })
            .collect();
        // One that the old process has, and that goes on beyond the change.
        let long = scope.spawn(|| ask(&address, 6_000));
        thread::sleep(Duration::from_millis(300));
        server.signal("-USR2");
        let next = server.next_line();
        assert_eq!(long.join().unwrap().err(), None);
        assert_eq!(server.ended().0, Some(0));
        thread::sleep(Duration::from_millis(100));
        drop(ends);
        let answered: Vec<u32> = clients.into_iter().map(|client| client.join().unwrap()).collect();
        assert!(answered.iter().all(|n| *n > 5), "{answered:?}");
        next
    });
    assert_eq!(next["url"], server.at(""));
    let pid = next["pid"].as_u64().unwrap();
    assert_ne!(pid, u64::from(server.process()));
    assert!(ask(&address, 3).is_ok());
    let end = |name: &str| {
        std::process::Command::new("kill").args([name, &pid.to_string()]).status().unwrap().success()
    };
    assert!(end("-TERM"));
    let gone = (0..600).any(|_| {
        thread::sleep(Duration::from_millis(20));
        TcpStream::connect(&address).is_err()
    });
    assert!(gone, "the second process does not end");
}

/// One that cannot start changes nothing; and what is passed must be a socket.
#[test]
fn a_process_that_does_not_start_takes_nothing_over() {
    let folder = make("fleeting", |_| {});
    let mut server = Server::start(&folder, &[]);
    fs::remove_file(folder.join("model.safetensors")).unwrap();
    let address = server.at("").trim_start_matches("http://").to_owned();
    server.signal("-USR2");
    let failed = (0..1000).any(|_| {
        thread::sleep(Duration::from_millis(10));
        server.told().contains("this one goes on")
    });
    assert!(failed);
    assert!(ask(&address, 3).is_ok());
    server.signal("-TERM");
    assert_eq!(server.ended().0, Some(0));
    for (count, word) in [("1", "no socket"), ("2", "pass one")] {
        let out =
            program(&["serve", text(model()), "--port", "0"]).env("LISTEN_FDS", count).output().unwrap();
        let told = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.code() == Some(1) && told.contains(word) && told.lines().count() == 1, "{told}");
    }
}
