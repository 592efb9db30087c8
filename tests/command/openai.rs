//! Clients, unmodified, against `astrai serve`: the official ones of OpenAI's and Anthropic's APIs in Python and JavaScript, what programs put
//! between (langchain, litellm), and what judges servers (schemathesis, lm-evaluation-harness). They come from the test cache; where that, Python
//! or Node is absent, a word says so; in CI none of Python's may be.

use crate::emulated::checks_everything;
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const KEY: &str = "a key";
/// A model that is quick and has room for requests that last.
const MODEL: &str = r#"{"model_type": "llama", "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 4096,
    "tie_word_embeddings": true}"#;
pub const TEMPLATE: &str = "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}\
    {% if m.content == 'raise' %}{{ raise_exception(\"the template's own words\") }}{% endif %}\
    <|{{ m.role }}|>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";

/// Scripts, the libraries that they want, and what they get besides the server, the model and the key.
const SCRIPTS: [(&str, &[&str], &[&str]); 7] = [
    ("client.py", &["openai"], &[]),
    ("messages.py", &["anthropic"], &[]),
    ("structured.py", &["jsonschema", "openai"], &["../shared/golden/structured/schemas.json", "2"]),
    ("frameworks.py", &["langchain"], &["langchain"]),
    ("frameworks.py", &["litellm"], &["litellm"]),
    ("schema.py", &["schemathesis"], &["EACH"]),
    ("harness.py", &["harness"], &["TASKS"]),
];

#[test]
fn clients_work_unmodified() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut skipped = 0;
    let model = model("openai");
    let wide = Server::start(&model, &["--max-seqs", "16", "--kv-memory", "64MiB", "--embeddings", "last"]);
    let narrow = Server::start(&model, &["--max-seqs", "1", "--queue", "1"]);
    for (script, libraries, more) in SCRIPTS {
        let folders: Option<Vec<PathBuf>> = libraries.iter().map(|name| client(name)).collect();
        assert!(folders.is_some() || !checks_everything(), "{script}: .cache has not {libraries:?}");
        let Some(folders) =
            folders.filter(|_| more.iter().all(|m| !m.contains('/') || root.join(m).exists()))
        else {
            println!("skipped {script}: .cache has not {libraries:?}; scripts/setup-cache.sh puts it there");
            skipped += 1;
            continue;
        };
        let mut python = Command::new("python3");
        python.arg(root.join("tests/openai").join(script)).args([&wide.url, "small", KEY]).current_dir(root);
        python.env("PYTHONPATH", std::env::join_paths(folders).unwrap());
        if more.is_empty() {
            python.arg(&narrow.url)
        } else {
            python.args(more.iter().map(|word| match *word {
                "EACH" => PathBuf::from(if checks_everything() { "50" } else { "3" }),
                "TASKS" => tasks(&model),
                word => word.into(),
            }))
        };
        let out = python.output().expect("python3, with which the client was installed");
        let told = String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success(), "{script}: {told}{}", String::from_utf8_lossy(&out.stderr));
        print!("{told}");
    }
    println!("{} of {} scripts ran, {skipped} were skipped", SCRIPTS.len() - skipped, SCRIPTS.len());
    javascript(&wide);
    wide.stop();
    narrow.stop();
}

/// The clients that npm has, where Node is here.
fn javascript(server: &Server) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders = fs::read_dir(root.join(".cache/npm")).into_iter().flatten().flatten().map(|e| e.path());
    let Some(folder) = folders.find(|path| path.join("node_modules").exists()) else {
        return println!("skipped node.mjs: .cache has no npm; scripts/setup-cache.sh puts it there");
    };
    let script = root.join("tests/openai/node.mjs");
    match Command::new("node").arg(script).args([&server.url, "small", KEY]).arg(folder).output() {
        Err(e) => println!("skipped node.mjs: node: {e}"),
        Ok(out) => {
            let told = String::from_utf8_lossy(&out.stdout);
            assert!(out.status.success(), "node.mjs: {told}{}", String::from_utf8_lossy(&out.stderr));
            print!("{told}");
        }
    }
}

/// A folder with tasks of each kind, and what `astrai eval` says of them.
fn tasks(model: &Path) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("openai/tasks");
    fs::create_dir_all(&dir).unwrap();
    let words: Vec<&str> =
        "the model reads a text of numbers and says what comes next in a line of code".split(' ').collect();
    let text = |from: usize, n: usize| {
        (0..n).map(|i| words[(from * 7 + i * i) % words.len()]).collect::<Vec<_>>().join(" ")
    };
    let choices = |i| json!({"prompt": text(i, 6) + ".", "choices": [text(i + 1, 1), text(i + 2, 3), text(i + 3, 2)], "gold": i % 3});
    let answers = |i| json!({"prompt": text(i, 4), "answer": text(i, 2), "max_tokens": 6});
    let lines = |n: usize, line: &dyn Fn(usize) -> Value| {
        (0..n).map(|i| format!("{}\n", line(i))).collect::<String>()
    };
    let mut eval = astrai();
    eval.arg("eval").arg(model).args(["--max-model-len", "64", "--json"]);
    for (name, lines) in [
        ("choices", lines(40, &choices)),
        ("texts", lines(6, &|i| json!({"text": text(i, 10 + 6 * i)}))),
        ("answers", lines(2, &answers)),
    ] {
        let path = dir.join(format!("{name}.jsonl"));
        fs::write(&path, lines).unwrap();
        eval.arg("--task").arg(path);
    }
    let out = eval.output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    fs::write(dir.join("eval.json"), out.stdout).unwrap();
    dir
}

/// A library's folder for the version of Python that is here.
pub fn client(name: &str) -> Option<PathBuf> {
    let version = "import sys; print('-python%d.%d' % sys.version_info[:2])";
    let out = Command::new("python3").args(["-c", version]).output().ok()?;
    let ending = String::from_utf8(out.stdout).ok()?;
    let folders = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".cache").join(name)).ok()?;
    let mut folders = folders.flatten().map(|entry| entry.path());
    folders.find(|path| path.to_string_lossy().ends_with(ending.trim()))
}

fn astrai() -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_astrai"));
    c.env("PATH", crate::quick::path());
    c
}

/// A model directory with a tokenizer and a chat template, of a test's own.
pub fn model(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _absent = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    let config = dir.join("config.json");
    fs::write(&config, MODEL).unwrap();
    let mut train = astrai();
    train.arg("train").arg("--config").arg(config).arg("--data").arg(root.join("train/src/data"));
    train.args(["--vocab", "320", "--steps", "1", "--seq", "32", "--out"]).arg(dir.join("run"));
    let out = train.output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let model = dir.join("run/step_000001");
    fs::write(model.join("chat_template.jinja"), TEMPLATE).unwrap();
    model
}

/// A server that is there until it is stopped.
struct Server {
    child: Child,
    url: String,
}

impl Server {
    fn start(model: &Path, flags: &[&str]) -> Server {
        let mut c = astrai();
        c.arg("serve").arg(model).args(["--port", "0", "--json", "--served-name", "small", "--api-key", KEY]);
        let mut child = c.args(flags).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let ready: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line:?}"));
        Server { child, url: ready["url"].as_str().unwrap().to_string() }
    }

    /// Tells it to end, which it does in order.
    fn stop(mut self) {
        // SAFETY: a signal to a process that is a child of this one and not yet waited for.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, libc::SIGTERM) }, 0);
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail where it has ended, which is what is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
