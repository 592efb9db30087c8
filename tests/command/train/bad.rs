//! Whatever is wrong with a run's input: one clear line, exit code 1, nothing lost.

use crate::train::fixture::{assert_same, command, fails, good, refused, shared, small, text};
use std::fs;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn says(line: &str, parts: &[&str]) {
    assert!(parts.iter().all(|p| line.contains(p)), "{line:?} does not say {parts:?}");
}

/// The small model on the shared shards, in windows of this length.
fn sized(out: &Path, seq: &str) -> Command {
    let mut c = command(out);
    c.arg("--config").arg(shared().join("config.json")).arg("--data").arg(shared().join("run/data"));
    c.args(["--seq", seq]);
    c
}

/// The small model on text in a folder.
fn on_text(out: &Path, data: &Path) -> Command {
    let mut c = command(out);
    c.arg("--config").arg(shared().join("config.json")).args(["--seq", "32"]).arg("--data").arg(data);
    c
}

fn tokenizer() -> std::path::PathBuf {
    shared().join("run/tokenizer")
}

#[test]
fn data_that_cannot_be_learnt_from() {
    let dir = folder();
    let (out, empty, binary) = (dir.path().join("out"), dir.path().join("empty"), dir.path().join("binary"));
    [&empty, &binary].iter().for_each(|d| fs::create_dir(d).unwrap());
    fs::write(binary.join("a.dat"), [0u8, 255, 1, 254].repeat(999)).unwrap();
    let given = |data: &Path| {
        let mut c = on_text(&out, data);
        c.args(["--steps", "2", "--tokenizer"]).arg(tokenizer());
        c
    };
    says(&refused(&mut given(&empty)), &["empty", "no text found"]);
    says(&refused(&mut given(&binary)), &["binary", "no text found", "1 binary"]);
    says(&refused(&mut given(&binary.join("a.dat"))), &["a.dat", "no UTF-8 text"]);
    says(&refused(&mut given(&dir.path().join("absent"))), &["absent", "No such file"]);
    let short = dir.path().join("short.txt");
    fs::write(&short, "a b c").unwrap();
    says(&fails(&mut given(&short)).0, &["tokens of data do not fill one window of 32"]);
    says(&refused(given(&text()).arg("--data").arg(text().join("bpe.rs"))), &["bpe.rs", "given twice"]);
    let none = refused(command(&out).args(["--steps", "2", "--config"]).arg(shared().join("config.json")));
    says(&none, &["no data", "--data"]);
    let mut bare = on_text(&out, &text());
    says(&refused(bare.args(["--steps", "2"])), &["--tokenizer FILE", "--vocab N"]);
    assert!(!out.join("step_000002").exists());
}

#[test]
fn sizes_that_do_not_fit_the_model() {
    let dir = folder();
    let out = dir.path().join("out");
    says(&refused(sized(&out, "65").args(["--steps", "2"])), &["65 tokens", "at most 64 positions"]);
    let line = refused(on_text(&out, &text()).args(["--steps", "2", "--vocab", "321"]));
    says(&line, &["--vocab 321", "vocabulary is 320"]);
    let config = dir.path().join("config.json");
    fs::write(&config, crate::train::fixture::SMALL.replace("320", "280")).unwrap();
    let mut c = command(&out);
    c.arg("--config").arg(&config).arg("--data").arg(text()).arg("--tokenizer").arg(tokenizer());
    says(&refused(c.args(["--seq", "32", "--steps", "2"])), &["has 300 tokens", "vocabulary 280"]);
    assert!(!out.exists(), "a run that was refused left its folder");
    let mut c = command(&out);
    c.arg("--config").arg(&config).arg("--data").arg(shared().join("run/data"));
    let (line, _) = fails(c.args(["--seq", "32", "--steps", "2"]));
    says(&line, &["data_00000.bin", "280"]);
}

#[test]
fn a_checkpoint_that_is_of_another_run() {
    let dir = folder();
    let out = dir.path().join("out");
    good(small(&out).args(["--steps", "4", "--batch", "4", "--save-every", "2"]));
    let again = |flags: &[&str]| fails(small(&out).args(["--batch", "4"]).args(flags)).0;
    let nowhere = dir.path().join("nowhere");
    says(&refused(command(&nowhere).arg("--resume")), &["nowhere", "no run here"]);
    assert!(!nowhere.exists());
    says(&again(&["--steps", "8"]), &["checkpoints up to step_000004", "--resume"]);
    says(&again(&["--resume", "--steps", "3"]), &["complete at step 4", "--steps"]);
    says(&again(&["--resume", "--steps", "8", "--dtype", "bf16"]), &["dtype", "cannot change"]);
    let eval = again(&["--resume", "--steps", "8", "--eval-every", "2"]);
    says(&eval, &["eval_every"]);
    let config = dir.path().join("config.json");
    fs::write(
        &config,
        crate::train::fixture::SMALL.replace("\"intermediate_size\": 64", "\"intermediate_size\": 96"),
    )
    .unwrap();
    let mut c = command(&out);
    c.args(["--resume", "--steps", "8", "--config"]).arg(&config);
    says(&fails(&mut c).0, &["of another model", "intermediate_size"]);
    // The same text with another tokenizer.
    let texts =
        fails(on_text(&out, &text()).args(["--resume", "--batch", "4", "--steps", "8", "--vocab", "290"]));
    says(&texts.0, &["not what the run was trained on", "restore it"]);

    // Damage: the newest is set aside, the one before goes on, and that is said.
    let newest = out.join("step_000004/model.safetensors");
    let mut bytes = fs::read(&newest).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&newest, bytes).unwrap();
    let told = good(small(&out).args(["--batch", "4", "--resume", "--steps", "4", "--save-every", "2"]));
    says(&told, &["step_000004/model.safetensors", "damaged", "set aside"]);
    let straight = dir.path().join("straight");
    good(small(&straight).args(["--steps", "4", "--batch", "4"]));
    assert_same(&straight, &out, 4, "after damage");
}

#[test]
fn text_that_changes_under_a_run_does_not_cost_its_tokens() {
    let dir = folder();
    let (out, straight, texts) =
        (dir.path().join("out"), dir.path().join("straight"), dir.path().join("texts"));
    fs::create_dir(&texts).unwrap();
    fs::copy(text().join("shards.rs"), texts.join("a.rs")).unwrap();
    let flags = ["--vocab", "300", "--batch", "2", "--schedule", "constant", "--warmup", "0"];
    good(on_text(&straight, &texts).args(["--steps", "4"]).args(flags));
    good(on_text(&out, &texts).args(["--steps", "2"]).args(flags));
    fs::copy(text().join("windows.rs"), texts.join("b.rs")).unwrap();
    let again = on_text(&out, &texts).args(["--resume", "--steps", "4"]).args(flags).output().unwrap();
    let line = crate::train::fixture::stderr(&again);
    let remedy = line.trim_end().split("made then: ").nth(1).unwrap_or_else(|| panic!("{line}"));
    let remedy: Vec<&str> = remedy.split(' ').collect();
    assert_eq!(remedy.len(), 4, "{line}");
    let line = fails(command(&out).args(["--resume", "--vocab", "310", "--steps", "4"])).0;
    says(&line, &["vocab was 300, is now 310"]);
    good(command(&out).args(["--resume", "--steps", "4"]).args(remedy));
    assert_same(&straight, &out, 4, "the tokens made then");

    // Without a checkpoint nothing is to be kept: another wish makes another tokenizer.
    let fresh = dir.path().join("fresh");
    fs::create_dir(&fresh).unwrap();
    fs::rename(out.join("tokenizer"), fresh.join("tokenizer")).unwrap();
    let told = good(on_text(&fresh, &texts).args(["--vocab", "280", "--steps", "1", "--batch", "2"]));
    assert!(!told.contains("using the tokenizer"), "{told}");
    assert!(fresh.join("step_000001").exists());
}

#[test]
fn one_folder_is_for_one_run_at_a_time() {
    let dir = folder();
    let out = dir.path().join("out");
    fs::create_dir(&out).unwrap();
    let lock = fs::File::create(out.join(".lock")).unwrap();
    lock.lock().unwrap();
    for resume in [&[][..], &["--resume"]] {
        says(&refused(small(&out).args(["--steps", "2"]).args(resume)), &["another run writes here"]);
    }
    drop(lock);
    good(small(&out).args(["--steps", "2", "--batch", "2"]));
}

#[test]
fn a_disk_that_is_full_loses_nothing() {
    let dir = folder();
    let (out, straight) = (dir.path().join("out"), dir.path().join("straight"));
    let flags = ["--batch", "4", "--schedule", "constant", "--warmup", "0", "--save-every", "2"];
    good(small(&straight).args(["--steps", "8"]).args(flags));
    good(small(&out).args(["--steps", "4"]).args(flags));
    // No file may be longer than 150 KiB: the model fits, its moments do not.
    let run = small(&out);
    let mut c = Command::new("sh");
    c.args(["-c", "ulimit -f $0; exec \"$@\"", "300"]).arg(run.get_program()).args(run.get_args());
    c.envs(run.get_envs().filter_map(|(k, v)| Some((k, v?))));
    let (line, before) = fails(c.args(["--resume", "--steps", "8"]).args(flags));
    says(&line, &["optimizer.safetensors", "File too large"]);
    assert!(before.iter().any(|l| l.contains("not saved, the run goes on")), "{before:?}");
    let names: Vec<String> =
        fs::read_dir(&out).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    assert!(
        names.iter().all(|n| !n.starts_with(".tmp-") && n != "step_000006" && n != "step_000008"),
        "{names:?}"
    );
    good(small(&out).args(["--resume", "--steps", "8"]).args(flags));
    assert_same(&straight, &out, 8, "after a full disk");
}

#[test]
fn a_run_that_diverges_ends_and_keeps_its_good_checkpoints() {
    let dir = folder();
    let out = dir.path().join("out");
    let good_part =
        ["--batch", "4", "--optimizer", "sgd", "--clip", "0", "--warmup", "0", "--schedule", "constant"];
    good(small(&out).args(["--steps", "4", "--lr", "1e-3"]).args(good_part));
    let wild = ["--resume", "--steps", "90", "--lr", "1000", "--save-every", "8", "--keep", "1"];
    let (line, before) = fails(small(&out).args(wild).args(good_part));
    says(&line, &["no finite gradient in the last 20 steps", "lower --lr", "--resume"]);
    assert!(before.iter().any(|l| l.contains("the step was left out")), "{before:?}");
    assert_eq!(fs::read_to_string(out.join("latest")).unwrap(), "step_000004\n");
    good(small(&out).args(["--resume", "--steps", "6", "--lr", "1e-3"]).args(good_part));
    let (line, before) = fails(
        small(&dir.path().join("large")).args(["--steps", "30", "--skip-norm", "1e-6"]).args(good_part),
    );
    says(&line, &["every gradient norm was above --skip-norm in the last 20 steps"]);
    assert!(before.iter().any(|l| l.contains("is above --skip-norm, the step was left out")), "{before:?}");
}

#[test]
fn flags_that_would_do_nothing() {
    let dir = folder();
    let out = dir.path().join("out");
    let dry = |flags: &[&str]| refused(small(&out).args(["--steps", "2", "--dry-run"]).args(flags));
    says(&dry(&["--device", "interpreter"]), &["--device interpreter"]);
    says(&dry(&["--vocab", "300"]), &["--vocab", "shards hold ids already"]);
    says(&refused(small(&out).args(["--steps", "2", "--device", "null"])), &["--device null runs nothing"]);
    says(&refused(small(&out).args(["--steps", "2", "--momentum", "0.5"])), &["momentum: adamw has none"]);
    assert!(!out.exists());
}

#[test]
fn a_dry_run_says_what_would_be_and_writes_nothing() {
    let dir = folder();
    let out = dir.path().join("out");
    let report = |c: &mut Command| {
        let done = c.args(["--dry-run", "--json"]).output().unwrap();
        assert!(done.status.success(), "{}", crate::train::fixture::stderr(&done));
        serde_json::from_slice::<serde_json::Value>(&done.stdout).unwrap()
    };
    let shards = report(small(&out).args(["--epochs", "2", "--batch", "4"]));
    assert!(shards["steps"].as_u64().unwrap() > 100, "{shards}");
    assert_eq!(shards["tokens_per_step"], 128);
    let told = report(on_text(&out, &text()).args(["--steps", "7", "--vocab", "300"]));
    assert_eq!(told["steps"], 7);
    assert!(!out.exists());
    // Of a run that would be resumed: its settings.
    good(small(&out).args(["--steps", "2", "--batch", "4"]));
    let resumed = report(command(&out).args(["--resume", "--steps", "9"]));
    assert_eq!((&resumed["steps"], &resumed["tokens_per_step"]), (&9.into(), &128.into()));
}
