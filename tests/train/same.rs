//! What must not change a run: the number of threads, and how a step's sequences are dealt to micro-batches.

use crate::fixture::{assert_same, good, losses, small};
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
