//! Whatever is wrong with a run's input: one clear line, exit code 1, nothing lost.

use crate::fixture::{assert_same, command, fails, good, refused, shared, small, text};
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
    let twice = given(&text()).arg("--data").arg(text().join("bpe.rs")).output().unwrap();
    says(&crate::fixture::stderr(&twice), &["bpe.rs", "given twice"]);
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
    says(&refused(small(&out).args(["--seq", "65", "--steps", "2"])), &["65 tokens", "at most 64 positions"]);
    let line = refused(on_text(&out, &text()).args(["--steps", "2", "--vocab", "321"]));
    says(&line, &["--vocab 321", "vocabulary is 320"]);
    let config = dir.path().join("config.json");
    fs::write(&config, crate::fixture::SMALL.replace("320", "280")).unwrap();
    let mut c = command(&out);
    c.arg("--config").arg(&config).arg("--data").arg(text()).arg("--tokenizer").arg(tokenizer());
    says(&refused(c.args(["--seq", "32", "--steps", "2"])), &["has 300 tokens", "vocabulary 280"]);
    let mut c = command(&out);
    c.arg("--config").arg(&config).arg("--data").arg(shared().join("run/data"));
    let (line, _) = fails(c.args(["--seq", "32", "--steps", "2"]));
    says(&line, &["280"]);
    assert!(!out.exists(), "a run that was refused left its folder");
}

#[test]
fn a_checkpoint_that_is_of_another_run() {
    let dir = folder();
    let out = dir.path().join("out");
    good(small(&out).args(["--steps", "4", "--batch", "4", "--save-every", "2"]));
    let again = |flags: &[&str]| fails(small(&out).args(["--batch", "4"]).args(flags)).0;
    says(&again(&["--steps", "8"]), &["checkpoints up to step_000004", "--resume"]);
    says(&again(&["--resume", "--steps", "3"]), &["complete at step 4", "--steps"]);
    says(&again(&["--resume", "--steps", "8", "--dtype", "bf16"]), &["dtype", "cannot change"]);
    let eval = again(&["--resume", "--steps", "8", "--eval-every", "2"]);
    says(&eval, &["eval_every"]);
    let config = dir.path().join("config.json");
    fs::write(&config, crate::fixture::SMALL.replace("64,", "96,")).unwrap();
    let mut c = command(&out);
    c.args(["--resume", "--steps", "8", "--config"]).arg(&config);
    says(&fails(&mut c).0, &["of another model", "intermediate_size"]);
    let mut c = command(&out);
    let other =
        fails(c.args(["--resume", "--steps", "8", "--tokenizer"]).arg(tokenizer()).arg("--data").arg(text()));
    // The shared shards are of the same text and tokenizer: these are the same data under another name.
    says(&other.0, &["data"]);
    assert!(!again(&["--resume", "--steps", "4"]).is_empty());

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
        assert!(done.status.success(), "{}", crate::fixture::stderr(&done));
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
