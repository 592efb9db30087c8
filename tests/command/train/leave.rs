//! Leaving in order: SIGINT and SIGTERM finish the step, save and end the program with success.

use crate::train::fixture::{assert_same, good, small};
use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;

/// Long enough that a signal after the first step comes before the end.
const STEPS: &str = "4000";

#[test]
fn a_signal_ends_a_run_with_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    for (name, signal) in [("int", libc::SIGINT), ("term", libc::SIGTERM)] {
        let out = dir.path().join(name);
        let mut run = small(&out);
        run.args(["--steps", STEPS, "--batch", "4", "--save-every", "0", "--json"]);
        let mut child = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut rows = BufReader::new(child.stdout.take().unwrap());
        let mut row = String::new();
        rows.read_line(&mut row).unwrap();
        // SAFETY: a signal to a child that has not been waited for.
        assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
        let mut told = String::new();
        rows.read_to_string(&mut row).unwrap();
        child.stderr.take().unwrap().read_to_string(&mut told).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(0), "{told}");
        assert!(told.contains("go on with --resume"), "{told}");
        let last: serde_json::Value = serde_json::from_str(row.lines().last().unwrap()).unwrap();
        let made = last["steps"].as_u64().unwrap();
        assert!((1..4000).contains(&made), "{last}");
        let newest = format!("step_{made:06}");
        assert!(last["checkpoint"].as_str().unwrap().ends_with(&newest), "{last}");

        // Goes on, with no more than --out and a nearer end, as a run that was never stopped.
        let end = (made + 3).to_string();
        let constant = ["--schedule", "constant", "--warmup", "0"];
        good(small(&out).args(["--resume", "--batch", "4", "--steps", &end]).args(constant));
        assert!(out.join(format!("step_{:06}/model.safetensors", made + 3)).exists());
    }
}

#[test]
fn a_run_does_not_end_because_nobody_reads() {
    let dir = tempfile::tempdir().unwrap();
    for json in [false, true] {
        let out = dir.path().join(format!("{json}"));
        let mut run = small(&out);
        run.args(["--steps", "30", "--batch", "2", "--save-every", "1", "--keep", "1"]);
        if json {
            run.arg("--json");
        }
        let mut child = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop((child.stdout.take(), child.stderr.take()));
        assert_eq!(child.wait().unwrap().code(), Some(0));
        assert_eq!(crate::train::fixture::losses(&out).len(), 30);
        assert!(out.join("step_000030/manifest.json").exists());
    }
}

#[test]
fn a_stopped_run_resumed_is_the_run_that_was_not_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let (straight, out) = (dir.path().join("straight"), dir.path().join("stopped"));
    let flags = ["--batch", "4", "--lr", "1e-3", "--schedule", "constant", "--warmup", "2"];
    good(small(&straight).args(["--steps", "12"]).args(flags));
    good(small(&out).args(["--steps", "5"]).args(flags));
    // What is not given again is as it was.
    let told = good(crate::train::fixture::command(&out).args(["--resume", "--steps", "12"]));
    assert!(told.contains("steps was 5, is now 12"), "{told}");
    assert_same(&straight, &out, 12, "resumed");
}
