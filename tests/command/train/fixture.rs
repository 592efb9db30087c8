//! What the tests share. In: a tiny model and this repository's own sources. Out: shards, a tokenizer, runs of the program, and
//! their metrics without times.

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

pub const SMALL: &str = r#"{"model_type": "llama", "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64,
    "tie_word_embeddings": true}"#;

/// A folder with `config.json`, and in `run` a run of one step: shards in `run/data`, a tokenizer in `run/tokenizer`.
pub fn shared() -> &'static Path {
    static SHARED: OnceLock<PathBuf> = OnceLock::new();
    let made = || {
        // Statics are not dropped: a folder of the build's, made anew each time, is one that does not pile up.
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("train");
        let _absent = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        let config = dir.join("config.json");
        fs::write(&config, SMALL).unwrap();
        let mut run = command(&dir.join("run"));
        run.arg("--config").arg(config).arg("--data").arg(text());
        good(run.args(["--vocab", "300", "--steps", "1", "--batch", "4", "--seq", "32"]));
        dir
    };
    SHARED.get_or_init(made)
}

/// Text to learn from.
pub fn text() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("train/src/data")
}

/// `astrai train --out OUT`.
pub fn command(out: &Path) -> Command {
    let mut c = program();
    c.arg("train").arg("--out").arg(out);
    c
}

/// The program; its kernels are optimised little.
pub fn program() -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_astrai"));
    c.env("PATH", crate::quick::path());
    c
}

/// A run of the small model on the shared shards.
pub fn small(out: &Path) -> Command {
    let mut c = command(out);
    c.arg("--config").arg(shared().join("config.json")).arg("--data").arg(shared().join("run/data"));
    c.args(["--seq", "32"]);
    c
}

/// A run on the shared shards that starts from the shared run's model.
pub fn beside(out: &Path) -> Command {
    let mut c = command(out);
    c.arg("--model").arg(shared().join("run/step_000001")).arg("--data").arg(shared().join("run/data"));
    c.args(["--seq", "32"]);
    c
}

pub fn stderr(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

/// Standard error of a command that succeeds.
pub fn good(c: &mut Command) -> String {
    let out = c.output().unwrap();
    assert!(out.status.success(), "{c:?}: {}", stderr(&out));
    stderr(&out)
}

/// The last line of a command that fails, without its `astrai: `, and the lines before it.
pub fn fails(c: &mut Command) -> (String, Vec<String>) {
    let out = c.output().unwrap();
    let text = stderr(&out);
    assert_eq!(out.status.code(), Some(1), "{c:?}: {text}");
    assert!(!text.contains("panicked"), "{c:?}: {text}");
    let mut lines: Vec<String> = text.lines().map(str::to_string).collect();
    let last = lines.pop().unwrap_or_default();
    assert!(
        lines.iter().all(|l| !l.starts_with("astrai: ") || l.starts_with("astrai: warning")),
        "{c:?}: {text}"
    );
    (last.strip_prefix("astrai: ").unwrap_or_else(|| panic!("{c:?}: {text}")).to_string(), lines)
}

/// The one line of a command that fails at once and leaves nothing behind.
pub fn refused(c: &mut Command) -> String {
    let (line, before) = fails(c);
    assert!(before.is_empty(), "{c:?}: {before:?} before {line}");
    line
}

/// Rows of a run's metrics without what depends on the clock.
pub fn metrics(out: &Path) -> Vec<Value> {
    let text = fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let row = |line: &str| {
        let mut row: Value = serde_json::from_str(line).unwrap();
        let fields = row.as_object_mut().unwrap();
        ["tokens_per_s", "seconds", "mfu"].iter().for_each(|key| drop(fields.remove(*key)));
        row
    };
    text.lines().map(row).collect()
}

/// Losses of the steps, each of which must be there once and in order.
pub fn losses(out: &Path) -> Vec<f64> {
    let rows: Vec<Value> = metrics(out).into_iter().filter(|r| r.get("val_loss").is_none()).collect();
    let steps: Vec<u64> = rows.iter().map(|r| r["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (1..=rows.len() as u64).collect::<Vec<_>>());
    rows.iter().map(|r| r["loss"].as_f64().unwrap()).collect()
}

/// A file of a checkpoint.
pub fn tensors(out: &Path, step: u64, file: &str) -> Vec<u8> {
    fs::read(out.join(format!("step_{step:06}")).join(file)).unwrap()
}

/// Two runs that must not differ in a bit after so many steps.
pub fn assert_same(a: &Path, b: &Path, steps: u64, what: &str) {
    assert_eq!(losses(b).len() as u64, steps, "{what}");
    assert_eq!(metrics(a), metrics(b), "{what}: metrics");
    let adapter = a.join(format!("step_{steps:06}/adapter_config.json")).is_file();
    let weights = if adapter { "adapter_model.safetensors" } else { "model.safetensors" };
    for file in [weights, "optimizer.safetensors"] {
        assert!(tensors(a, steps, file) == tensors(b, steps, file), "{what}: {file}");
    }
}
