//! Saves and loads in which nothing goes wrong, and refusals of what cannot be saved or continued.

use std::fs;

use super::*;
use astrai_runtime::weights::Checkpoint;

#[test]
fn a_checkpoint_comes_back_bit_for_bit() {
    let out = run(&[20]);
    assert_eq!(names(out.path()), ["latest", "step_000020"]);
    let files = names(&out.path().join("step_000020"));
    let all = [
        "config.json",
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "tokenizer.json",
        "trainer.json",
    ];
    assert_eq!(files, all);
    assert_eq!(fs::read_to_string(out.path().join("latest")).expect("latest"), "step_000020\n");
    let Latest { checkpoint, notes } = open_latest(out.path()).expect("sound").expect("one");
    assert_whole(&checkpoint, 20);
    assert!(notes.is_empty(), "{notes:?}");
    assert_eq!(checkpoint.model.metadata().get("format").map(String::as_str), Some("pt"));
    let model = Checkpoint::open(&checkpoint.path).expect("a model directory");
    assert!(model.names().eq(checkpoint.model.names()));
    assert_eq!(fs::read_to_string(checkpoint.path.join("config.json")).expect("read"), LLAMA);
}

#[test]
fn the_newest_are_kept() {
    let out = tempfile::tempdir().expect("a temporary folder");
    let folder = RunFolder::create(out.path()).expect("created");
    for step in [5, 10, 15, 1_000_000] {
        folder.save(step, &mut toy(step), 2).expect("saved");
    }
    assert_eq!(names(out.path()), ["latest", "step_000015", "step_1000000"]);
    folder.save(1_000_001, &mut toy(1_000_001), 1).expect("saved");
    assert_eq!(names(out.path()), ["latest", "step_1000001"]);
    for step in [1_000_010, 1_000_020, 1_000_030, 1_000_040] {
        folder.save(step, &mut toy(step), Keep { newest: 1, every: Some(20) }).expect("saved");
    }
    assert_eq!(names(out.path()), ["latest", "step_1000020", "step_1000040"]);
    folder.save(1_000_041, &mut toy(1_000_041), 1).expect("saved");
    assert_whole(&open_latest(out.path()).expect("sound").expect("one").checkpoint, 1_000_041);
}

#[test]
fn one_run_a_folder_and_no_run_over_another() {
    let out = tempfile::tempdir().expect("a temporary folder");
    let deep = out.path().join("a/b");
    let folder = RunFolder::create(&deep).expect("created");
    let line = RunFolder::create(&deep).expect_err("held").to_string();
    assert!(line.contains("another run writes here"), "{line}");
    folder.save(3, &mut toy(3), 0).expect("saved");
    drop(folder);
    let line = RunFolder::create(&deep).expect_err("used").to_string();
    assert!(line.contains("has checkpoints up to step_000003: continue with --resume"), "{line}");
    let resumed = RunFolder::resume(&deep).expect("resumed");
    assert_whole(&resumed.checkpoint.expect("one"), 3);
    assert!(resumed.notes.is_empty());
}

#[test]
fn a_run_that_ended_before_its_first_checkpoint_begins_again() {
    let out = run(&[]);
    assert!(RunFolder::resume(out.path()).expect("resumed").checkpoint.is_none());
    assert!(open_latest(&out.path().join("absent")).expect("nothing").is_none());
}

#[test]
fn saving_a_step_again_changes_nothing() {
    let out = run(&[7]);
    let resumed = RunFolder::resume(out.path()).expect("resumed");
    fs::write(out.path().join("latest"), "other").expect("written");
    let saved = resumed.folder.save(7, &mut toy(7), 1).expect("saved");
    assert!(saved.notes.is_empty() && saved.path.ends_with("step_000007"));
    assert_eq!(fs::read_to_string(out.path().join("latest")).expect("latest"), "step_000007\n");
}

#[test]
fn leftovers_of_dead_runs_are_removed() {
    let out = run(&[1]);
    fs::create_dir(out.path().join(".tmp-step_000002-77")).expect("made");
    fs::write(out.path().join(".tmp-step_000002-77/config.json"), "x").expect("written");
    fs::write(out.path().join(".tmp-latest-77"), "x").expect("written");
    let _resumed = RunFolder::resume(out.path()).expect("resumed");
    assert_eq!(names(out.path()), ["latest", "step_000001"]);
}

#[test]
fn contents_that_make_no_checkpoint_are_refused() {
    struct Wrong(Toy, usize);
    impl Contents for Wrong {
        fn config(&self) -> String {
            self.0.config()
        }
        fn tokenizer(&self) -> &[Attachment] {
            self.0.tokenizer()
        }
        fn trainer(&self) -> TrainerState {
            self.0.trainer()
        }
        fn entries(&self, part: Part) -> Vec<Entry> {
            self.0.entries(part)
        }
        fn write(&mut self, _: Part, _: &Entry, sink: &mut Sink) -> Result<(), FileError> {
            sink(&vec![0; self.1])
        }
    }
    let out = run(&[4]);
    let folder = RunFolder::resume(out.path()).expect("resumed").folder;
    for (given, says) in [(239, "\"w\": 239 bytes given, its shape takes 240"), (241, "241 bytes given")] {
        let line = folder.save(5, &mut Wrong(toy(5), given), 1).expect_err("refused").to_string();
        assert!(line.contains(says), "{line}");
    }
    let line = folder.save(6, &mut toy(5), 1).expect_err("refused").to_string();
    assert!(line.contains("the state is of step 5, not 6"), "{line}");
    for name in ["config.json", "../x", "", ".hidden"] {
        let tokenizer = vec![Attachment { name: name.to_string(), bytes: Vec::new() }];
        let line = folder.save(5, &mut Toy { tokenizer, ..toy(5) }, 1).expect_err("refused").to_string();
        assert!(line.contains("a tokenizer's file cannot be called"), "{line}");
    }
    assert_eq!(names(out.path()), ["latest", "step_000004"]);
}

#[test]
fn another_run_is_not_continued() {
    let out = run(&[4]);
    let checkpoint = open_latest(out.path()).expect("sound").expect("one").checkpoint;
    let agreed = |config: &str, settings: &Settings| check_compatible(&checkpoint, config, settings);
    assert_eq!(agreed(LLAMA, &settings()).expect("the same"), Vec::<String>::new());
    let spelled = LLAMA.replace("\"hidden_act\": \"silu\",", "").replace("10000.0", "10000");
    assert!(agreed(&spelled, &settings()).is_ok());
    let other = LLAMA.replace("\"hidden_size\": 16", "\"hidden_size\": 32");
    let line = agreed(&other, &settings()).expect_err("another").to_string();
    assert!(line.contains("of another model: hidden_size is 16 there, 32 here"), "{line}");
    check_same_data(&checkpoint, "data-1").expect("the same");
    let line = check_same_data(&checkpoint, "data-2").expect_err("other data").to_string();
    assert!(line.contains("the data are not those"), "{line}");
    let line = agreed(LLAMA, &Settings { batch: 9, ..settings() }).expect_err("other").to_string();
    assert!(line.contains("trainer.json: batch was 8, is now 9: it cannot change on --resume"), "{line}");
    let line = agreed(LLAMA, &Settings { eval_every: 5, ..settings() }).expect_err("other").to_string();
    assert!(line.contains("eval_every was 0, is now 5: it cannot change between 0 and more"), "{line}");
    let notes = agreed(LLAMA, &Settings { lr: 1e-3, keep: 1, ..settings() }).expect("allowed");
    assert_eq!(notes, ["lr was 0.0003, is now 0.001"]);
    let record = serde_json::to_value(settings()).expect("JSON");
    for key in compatible::FIXED.iter().chain(&compatible::CURVE) {
        assert!(record.get(key).is_some(), "{key} is no setting");
    }
}
