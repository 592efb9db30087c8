//! Runs killed at random moments and resumed: what is left at the end is what one run leaves that nobody disturbed.

use crate::emulated::checks_everything;
use crate::train::fixture::{assert_same, beside, command, shared, small, stderr, text};
use crate::train::strategies::records;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const STEPS: u64 = 20;

/// Kills of one run; then it may finish.
fn each() -> usize {
    if checks_everything() { 20 } else { 2 }
}

/// What a run starts from, or is on.
#[derive(Clone, Copy, Debug)]
enum On {
    Text,
    Shards,
    /// An adapter beside a trained model.
    Model,
    /// Preferences against a reference, which scores them first.
    Pairs,
}

/// Half precision, some weights frozen, noise on embeddings.
const HALVES: [&str; 12] = [
    "--save-every",
    "2",
    "--batch",
    "2",
    "--accum",
    "2",
    "--dtype",
    "f16",
    "--neftune-alpha",
    "5",
    "--freeze",
    "*layers.0.mlp*",
];

/// Weights of bf16 alone, rounded at random when they are updated; some operators and weights in f32.
const AT_RANDOM: [&str; 14] = [
    "--save-every",
    "1",
    "--batch",
    "2",
    "--accum",
    "2",
    "--keep",
    "0",
    "--rounding",
    "stochastic",
    "--dtype",
    "bf16",
    "--precision",
    "*norm*=f32",
];

/// What kinds of runs are killed: their flags, and on what they are.
const KINDS: [(&[&str], On); 6] = [
    (&["--save-every", "1", "--batch", "4", "--eval-every", "3", "--moments", "8bit"], On::Text),
    (&HALVES, On::Shards),
    (&["--save-every", "1", "--batch", "4", "--optimizer", "sgd", "--keep", "1", "--async-save"], On::Shards),
    (&AT_RANDOM, On::Shards),
    (&["--save-every", "1", "--batch", "4", "--dtype", "bf16", "--lora-rank", "4", "--dora"], On::Model),
    (&["--save-every", "1", "--batch", "2", "--accum", "2", "--eval-every", "3"], On::Pairs),
];

fn run(out: &Path, (flags, on): (&[&str], On)) -> Command {
    let mut c = match on {
        On::Text => {
            let mut c = command(out);
            c.arg("--config").arg(shared().join("config.json")).arg("--data").arg(text());
            c.args(["--vocab", "300", "--seq", "32"]);
            c
        }
        On::Shards => small(out),
        On::Model => beside(out),
        On::Pairs => {
            let mut c = command(out);
            c.arg("--config").arg(shared().join("config.json")).args(["--strategy", "dpo", "--seq", "16"]);
            c.arg("--data").arg(records(&shared().join("pairs"), "dpo"));
            c
        }
    };
    c.args(flags).args(["--threads", "2", "--steps", &STEPS.to_string()]);
    c
}

/// SplitMix64: the same moments in every run of the test, as far as the machine's pace allows.
struct Draws(u64);

impl Draws {
    fn below(&mut self, top: Duration) -> Duration {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        top.mul_f64(((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64)
    }
}

/// Starts a run and kills it after `delay`, counted from the start or from its first step. False if it was done before.
fn kill(mut c: Command, delay: Duration, from_first_step: bool) -> bool {
    let mut child =
        c.arg("--resume").arg("--json").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut rows = BufReader::new(child.stdout.take().unwrap());
    if from_first_step {
        rows.read_line(&mut String::new()).unwrap();
    }
    std::thread::sleep(delay);
    child.kill().unwrap();
    let out = child.wait_with_output().unwrap();
    // The kill before it may have come behind the last save.
    let done = out.status.success() || stderr(&out).contains("the run is complete at step 20");
    assert!(done || out.status.code().is_none(), "{c:?}: {}", stderr(&out));
    !done
}

/// Seconds from the first step of a run to its end.
fn training(mut c: Command) -> Duration {
    let mut child = c.arg("--json").stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut rows = BufReader::new(child.stdout.take().unwrap());
    rows.read_line(&mut String::new()).unwrap();
    let started = Instant::now();
    rows.lines().for_each(|line| drop(line.unwrap()));
    assert!(child.wait().unwrap().success(), "{c:?}");
    started.elapsed()
}

/// Names of what a save that was cut short leaves.
fn unfinished(out: &Path) -> usize {
    let names = std::fs::read_dir(out).into_iter().flatten().map(|e| e.unwrap().file_name());
    names.filter(|n| n.to_string_lossy().starts_with(".tmp-")).count()
}

#[test]
fn a_run_killed_at_any_moment_goes_on_as_if_it_had_not_been() {
    let dir = tempfile::tempdir().unwrap();
    let (mut draws, mut kills, mut in_a_save, each) = (Draws(20), 0, 0, each());
    for (i, kind) in KINDS.into_iter().enumerate() {
        let (straight, out) =
            (dir.path().join(format!("straight{i}")), dir.path().join(format!("killed{i}")));
        let mut top = training(run(&straight, kind)).div_f64(3.0);
        let (mut here, mut missed) = (0, 0);
        while here < each && missed < 20 {
            // Every fifth falls anywhere after the start, be it into the text's tokens.
            let early = here == 1;
            let delay = draws.below(if early { Duration::from_millis(300) } else { top });
            if kill(run(&out, kind), delay, !early) {
                here += 1;
                in_a_save += usize::from(unfinished(&out) > 0);
            } else {
                // It was done: another beginning, and less patience.
                std::fs::remove_dir_all(&out).unwrap();
                (top, missed) = (top / 2, missed + 1);
            }
        }
        kills += here;
        // After a kill behind the last save there is nothing left to do.
        let resumed = run(&out, kind).arg("--resume").output().unwrap();
        let said = stderr(&resumed);
        assert!(resumed.status.success() || said.contains("the run is complete at step 20"), "{said}");
        assert_same(&straight, &out, STEPS, &format!("{kind:?}"));
        assert_eq!(unfinished(&out), 0);
        assert_eq!(std::fs::read_to_string(out.join("latest")).unwrap(), "step_000020\n");
    }
    println!("{kills} kills, {in_a_save} of them in a save");
    assert_eq!(kills, each * KINDS.len());
}
