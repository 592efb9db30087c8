//! Checkpoints that were whole once: cut, with a bit turned, with a file lost. The run falls back and says what was wrong.

use std::fs;

use super::*;

fn damage(change: impl Fn(&Path)) -> Vec<String> {
    let out = run(&[10, 20]);
    change(&out.path().join("step_000020"));
    let resumed = RunFolder::resume(out.path()).expect("falls back");
    assert_whole(&resumed.checkpoint.expect("the older one"), 10);
    assert_eq!(names(out.path()), ["latest", "step_000010", "step_000020.aside-1"]);
    assert_eq!(fs::read_to_string(out.path().join("latest")).expect("latest"), "step_000010\n");
    assert!(resumed.notes.iter().any(|note| note.contains("set aside as ")), "{:?}", resumed.notes);
    // Reaching the step again publishes it anew.
    resumed.folder.save(20, &mut toy(20), 0).expect("saved");
    assert_whole(&open_latest(out.path()).expect("sound").expect("one").checkpoint, 20);
    resumed.notes
}

#[test]
fn every_file_is_guarded() {
    let out = run(&[20]);
    let files = names(&out.path().join("step_000020"));
    assert_eq!(files.len(), 6);
    for name in &files {
        let lost = damage(|step| fs::remove_file(step.join(name)).expect("removed"));
        let says = if name == MANIFEST { "incomplete: it has no manifest.json" } else { "missing" };
        assert!(lost[0].contains(name) && lost[0].contains(says), "{lost:?}");
        let cut = damage(|step| {
            let bytes = fs::read(step.join(name)).expect("read");
            fs::write(step.join(name), &bytes[..bytes.len() - 3]).expect("written");
        });
        assert!(cut[0].contains(name) && cut[0].contains("damaged: "), "{cut:?}");
        let empty = damage(|step| fs::write(step.join(name), "").expect("written"));
        assert!(empty[0].contains(name) && empty[0].contains("damaged: "), "{empty:?}");
        if name != MANIFEST {
            let turned = damage(|step| {
                let mut bytes = fs::read(step.join(name)).expect("read");
                let middle = bytes.len() / 2;
                bytes[middle] ^= 4;
                fs::write(step.join(name), bytes).expect("written");
            });
            assert!(turned[0].contains(name) && turned[0].contains("its hash is not"), "{turned:?}");
        }
    }
}

#[test]
fn no_bit_of_the_manifest_can_turn_unnoticed_to_harm() {
    let out = run(&[20]);
    let path = out.path().join("step_000020/manifest.json");
    let sound = fs::read(&path).expect("read");
    for at in (0..sound.len()).step_by(7) {
        let mut bytes = sound.clone();
        bytes[at] ^= 1 << (at % 7);
        fs::write(&path, bytes).expect("written");
        // White space and the case of nothing else may change.
        if let Ok(opened) = open(&out.path().join("step_000020")) {
            assert!(sound[at].is_ascii_whitespace(), "byte {at}");
            assert_whole(&opened, 20);
        }
    }
}

#[test]
fn a_folder_of_another_step_is_not_believed() {
    let notes = damage(|step| {
        fs::remove_dir_all(step).expect("removed");
        fs::create_dir(step).expect("made");
        for name in names(&step.with_file_name("step_000010")) {
            fs::copy(step.with_file_name("step_000010").join(&name), step.join(name)).expect("copied");
        }
    });
    assert!(notes[0].contains("manifest.json: damaged: of step 10, in the folder of step 20"), "{notes:?}");
}

#[test]
fn nothing_sound_is_an_error_with_every_reason() {
    let out = run(&[10, 20]);
    fs::remove_file(out.path().join("step_000010/config.json")).expect("removed");
    fs::write(out.path().join("step_000020/trainer.json"), "{}").expect("written");
    let line = RunFolder::resume(out.path()).err().expect("refused").to_string();
    for part in ["no checkpoint here is sound", "config.json: missing", "trainer.json: damaged: 2 bytes"] {
        assert!(line.contains(part), "{line}");
    }
    // Nothing was touched.
    assert_eq!(names(out.path()), ["latest", "step_000010", "step_000020"]);
}

#[test]
fn a_wrong_pointer_is_said_and_mended() {
    for text in ["step_000099\n", "", "\u{0}\u{1}", "../x"] {
        let out = run(&[10]);
        fs::write(out.path().join("latest"), text).expect("written");
        let resumed = RunFolder::resume(out.path()).expect("resumed");
        assert_whole(&resumed.checkpoint.expect("one"), 10);
        assert!(resumed.notes[0].contains("latest: names no checkpoint that is here"), "{:?}", resumed.notes);
        assert_eq!(fs::read_to_string(out.path().join("latest")).expect("latest"), "step_000010\n");
    }
}
