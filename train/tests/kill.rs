//! Saves ended by SIGKILL, on real processes: this binary runs itself as the child that saves until it is killed.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use astrai_ir::DType;
use astrai_runtime::weights::{Checkpoint, Entry};
use astrai_train::FileError;
use astrai_train::checkpoint::{Attachment, Contents, Opened, Part, RunFolder, Sink, TrainerState};
use astrai_train::settings::Settings;

const CHILD: &str = "ASTRAI_TEST_KILL_CHILD";
const ROWS: usize = 3000;
const KILLS: u64 = 20;

struct Run {
    step: u64,
}

/// Row `row` of a tensor at a step.
fn row(part: Part, step: u64, row: usize) -> Vec<u8> {
    let seed = step * 7 + u64::from(part == Part::Optimizer);
    (0..64).flat_map(|i| ((seed + (row * 64 + i) as u64) as f32).to_le_bytes()).collect()
}

impl Contents for Run {
    fn config(&self) -> String {
        format!("{{\"step\": {}}}", self.step)
    }

    fn tokenizer(&self) -> &[Attachment] {
        &[]
    }

    fn trainer(&self) -> TrainerState {
        let mut state = TrainerState::new(Settings::default(), 1 << 40, String::new(), String::new());
        state.step = self.step;
        state
    }

    fn entries(&self, part: Part) -> Vec<Entry> {
        let name = if part == Part::Model { "w" } else { "exp_avg.w" };
        vec![Entry { name: name.to_string(), dtype: DType::F32, shape: vec![ROWS, 64] }]
    }

    fn write(&mut self, part: Part, _: &Entry, sink: &mut Sink) -> Result<(), FileError> {
        (0..ROWS).try_for_each(|i| sink(&row(part, self.step, i)))
    }
}

fn assert_whole(checkpoint: &Opened) {
    let step = checkpoint.trainer.step;
    assert_eq!(checkpoint.config, Run { step }.config());
    let holds = |weights: &Checkpoint, part: Part| {
        let name = &Run { step }.entries(part)[0].name;
        let bytes = weights.get(name).expect("the tensor").bytes();
        assert!((0..ROWS).all(|i| bytes[i * 256..][..256] == row(part, step, i)), "step {step}");
    };
    holds(&checkpoint.model, Part::Model);
    holds(&checkpoint.optimizer, Part::Optimizer);
}

/// Not a test of its own: the child's program.
#[test]
fn child() {
    let Ok(out) = std::env::var(CHILD) else { return };
    let resumed = RunFolder::resume(Path::new(&out)).expect("resumed");
    assert!(resumed.notes.is_empty(), "{:?}", resumed.notes);
    let start = resumed.checkpoint.map_or(0, |checkpoint| checkpoint.trainer.step);
    for step in start + 1.. {
        resumed.folder.save(step, &mut Run { step }, 2).expect("saved");
    }
}

#[test]
fn a_kill_at_any_moment_leaves_a_whole_checkpoint() {
    if std::env::var(CHILD).is_ok() {
        return;
    }
    let out = tempfile::tempdir().expect("a temporary folder");
    let (mut newest, mut unfinished, mut slowness) = (0, 0, 1);
    for kill in 0..KILLS {
        let mut child = Command::new(std::env::current_exe().expect("this binary"))
            .args(["child", "--exact", "--nocapture"])
            .env(CHILD, out.path())
            .stdout(Stdio::null())
            .spawn()
            .expect("a child");
        // Spread over the length of several saves, at moments that share no rhythm with them.
        std::thread::sleep(Duration::from_millis((20 + (kill * 7919) % 61) * slowness));
        child.kill().expect("killed");
        assert!(child.wait().expect("ended").code().is_none(), "the child ended by itself");
        let names = std::fs::read_dir(out.path()).expect("listed").map(|e| e.expect("an entry").file_name());
        unfinished += names.filter(|name| name.to_string_lossy().starts_with(".tmp-")).count();
        let resumed = RunFolder::resume(out.path()).expect("sound");
        assert!(resumed.notes.is_empty(), "{:?}", resumed.notes);
        if let Some(checkpoint) = resumed.checkpoint {
            assert_whole(&checkpoint);
            let step = checkpoint.trainer.step;
            assert!(step >= newest, "a published checkpoint is lost");
            // A busy machine may need longer for one save.
            slowness = if step > newest { 1 } else { (2 * slowness).min(16) };
            newest = step;
        }
    }
    println!("{newest} saves, {unfinished} of {KILLS} kills in the middle of one");
    assert!(newest > 0, "no save was ever finished");
}
