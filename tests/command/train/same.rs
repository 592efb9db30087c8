//! What must not change a run: the number of threads, and how a step's sequences are dealt to micro-batches.

use crate::train::fixture::{SMALL, assert_same, command, fails, good, losses, small};
use astrai_runtime::weights::Checkpoint;
use std::path::Path;

#[test]
fn one_thread_trains_as_two_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    for dtype in ["f32", "bf16"] {
        let out = |threads: &str| dir.path().join(format!("{dtype}{threads}"));
        for threads in ["1", "2"] {
            let flags = [
                "--steps",
                "20",
                "--batch",
                "4",
                "--dtype",
                dtype,
                "--threads",
                threads,
                "--eval-every",
                "10",
            ];
            good(small(&out(threads)).args(flags));
        }
        assert_same(&out("1"), &out("2"), 20, dtype);
    }
}

/// Overlapping windows whose documents are masked, and a tokenizer with a special token that the text spells.
#[test]
fn windows_overlap_documents_are_masked_and_special_tokens_are_one_token() {
    let dir = tempfile::tempdir().unwrap();
    let (text, config) = (dir.path().join("text.txt"), dir.path().join("config.json"));
    std::fs::write(&text, "<|user|> what is the time <|user|> half past nine\n".repeat(60)).unwrap();
    std::fs::write(&config, SMALL).unwrap();
    let start = |name: &str, flags: &[&str]| {
        let mut c = command(&dir.path().join(name));
        c.arg("--config").arg(&config).arg("--data").arg(&text);
        c.args(["--vocab", "300", "--seq", "16", "--batch", "2", "--epochs", "1"]).args(flags);
        c
    };
    good(&mut start("plain", &[]));
    good(&mut start("special", &["--special-tokens", "<|user|>", "--stride", "4", "--packing", "masked"]));
    let meta = |name: &str| -> serde_json::Value {
        let meta = std::fs::read(dir.path().join(name).join("data/meta.json")).unwrap();
        serde_json::from_slice(&meta).unwrap()
    };
    assert_eq!((&meta("plain")["recognise"], &meta("special")["recognise"]), (&false.into(), &true.into()));
    let tokens = meta("special")["tokens"].as_u64().unwrap();
    assert_eq!(losses(&dir.path().join("special")).len() as u64, ((tokens - 17) / 4 + 1).div_ceil(2));
    let out = dir.path().join("special");
    let (line, _) = fails(command(&out).args(["--resume", "--epochs", "2", "--stride", "8"]));
    assert!(line.contains("stride was 4, is now 8: it cannot change"), "{line}");
}

/// Every tensor of a run's last checkpoint.
fn weights(out: &Path) -> Vec<(String, Vec<f32>)> {
    let file = Checkpoint::open(&out.join("step_000020/model.safetensors")).unwrap();
    let read = |name: &str| {
        let t = file.get(name).unwrap();
        let mut values = vec![0.0; t.elements()];
        t.to_f32(&mut values).unwrap();
        (name.to_string(), values)
    };
    file.names().map(read).collect()
}

#[test]
fn four_micro_batches_of_one_are_a_batch_of_four() {
    let dir = tempfile::tempdir().unwrap();
    let (one, four) = (dir.path().join("one"), dir.path().join("four"));
    good(small(&one).args(["--steps", "20", "--batch", "1", "--accum", "4"]));
    good(small(&four).args(["--steps", "20", "--batch", "4"]));
    let apart = |a: f64, b: f64| (a - b).abs() / b.abs();
    let worst = losses(&one).into_iter().zip(losses(&four)).map(|(a, b)| apart(a, b)).fold(0.0, f64::max);
    println!("losses apart by {worst:e}");
    assert!(worst <= 1e-5, "losses differ by {worst:e}");
    let (mut off, mut moved) = (0f32, 0f32);
    for ((name, a), (same, b)) in weights(&one).into_iter().zip(weights(&four)) {
        assert_eq!(name, same);
        for (a, b) in a.iter().zip(&b) {
            off = off.max((a - b).abs());
            moved = moved.max(b.abs());
        }
    }
    println!("weights apart by {off:e} of {moved}");
    // 20 steps of at most 3e-4 each: what rounding turns around must be a small part of that.
    assert!(off <= 1e-4, "weights differ by {off:e}");
}
