//! What the tests share. In: a golden model. Out: model directories with a tokenizer whose words are the model's ids, so that
//! every token can be read in the text; and runs of the program.

use astrai_runtime::weights::Checkpoint;
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

/// Ids of the golden models.
const VOCABULARY: u32 = 320;

/// A token before each message and before an answer, so that a conversation is a list of words.
const TEMPLATE: &str = "{% for m in messages %}{{ {'system': 't7 ', 'user': 't4 ', 'assistant': 't5 '}[m.role] }}{{ m.content }} {% endfor %}\
     {% if add_generation_prompt %}t6{% endif %}";

pub fn golden(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/llama").join(file)
}

/// The golden llama with a tokenizer and a chat template: 128 positions, id 2 ends a text.
pub fn model() -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| make("short", |_| {}))
}

/// The same without an end: no id ends a text, and there is room for a hundred thousand tokens.
pub fn endless() -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        make("endless", |config| {
            config["max_position_embeddings"] = json!(100_000);
            config["eos_token_id"] = Value::Null;
        })
    })
}

/// A model directory among the build's files, made anew each time.
pub fn make(name: &str, change: impl FnOnce(&mut Value)) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("answers").join(name);
    let _absent = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    let mut config: Value = serde_json::from_slice(&fs::read(golden("config.json")).unwrap()).unwrap();
    change(&mut config);
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    fs::copy(golden("model.safetensors"), dir.join("model.safetensors")).unwrap();
    fs::write(dir.join("tokenizer.json"), tokenizer(VOCABULARY).to_string()).unwrap();
    fs::write(dir.join("chat_template.jinja"), TEMPLATE).unwrap();
    dir
}

/// A tokenizer of so many words, `t0` and on.
pub fn tokenizer(words: u32) -> Value {
    let vocabulary: serde_json::Map<String, Value> =
        (0..words).map(|i| (format!("t{i}"), json!(i))).collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t3"},
    })
}

/// Words of ids.
pub fn words(ids: &[i64]) -> String {
    ids.iter().map(|i| format!("t{i}")).collect::<Vec<_>>().join(" ")
}

/// The golden prompt, and how the reference goes on, up to the end of its text.
pub fn reference() -> (String, String) {
    let file = Checkpoint::open(&golden("golden.safetensors")).unwrap();
    let ids = |name: &str| file.get(name).unwrap().to_i64().unwrap();
    let answer = ids("greedy.output_ids");
    let end = answer.iter().position(|id| *id == 2).unwrap_or(answer.len());
    (words(&ids("greedy.prompt_ids")), words(&answer[..end]))
}

/// The program, with nothing of this machine's settings; its kernels are optimised little.
pub fn program(args: &[&str]) -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_astrai"));
    c.args(args).env("PATH", crate::quick::path()).env_remove("ASTRAI_API_KEY");
    c
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

pub fn utf8(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs with this on standard input.
pub fn feed(mut c: Command, input: &str) -> Output {
    let mut child = c.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

/// Standard output of a run that succeeds and says nothing else.
pub fn good(args: &[&str]) -> String {
    let out = program(args).stdin(Stdio::null()).output().unwrap();
    assert!(out.status.success() && out.stderr.is_empty(), "{args:?}: {}", utf8(&out.stderr));
    utf8(&out.stdout)
}

/// The one line of a run that is refused, without its `astrai: `.
pub fn refused(args: &[&str]) -> String {
    let out = program(args).stdin(Stdio::null()).output().unwrap();
    let line = utf8(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{args:?}: {line}");
    assert!(out.stdout.is_empty(), "{args:?}: {}", utf8(&out.stdout));
    assert_eq!(line.lines().count(), 1, "{args:?}: {line}");
    line.strip_prefix("astrai: ").expect(&line).trim_end().to_string()
}

/// The continuation of a text by the likeliest tokens.
pub fn greedy(prompt: &str, most: u32) -> String {
    let most = most.to_string();
    let flags = ["--prompt", prompt, "--temperature", "0", "--max-tokens", &most];
    good(&[&["generate", text(model())][..], &flags].concat()).trim_end().to_string()
}
