//! Training objectives: what `astrai verify` says of folders with `strategies.json`, and `astrai run --strategy` of anyone's batch.

use crate::cases::case;
use astrai_engine::golden::Row;
use astrai_engine::golden::objectives::Objectives;
use astrai_engine::machine::{Kind, Machine};
use astrai_engine::unheard;
use astrai_ir::DType;
use astrai_runtime::weights::{Checkpoint, write};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

fn check(folder: &Path, kind: Kind, only: &[usize]) -> Vec<Row> {
    let machine = Machine::new(kind, 1).unwrap();
    Objectives::open(folder, &machine).unwrap().check(Some(only), &mut unheard).unwrap()
}

/// By the interpreter a run of every strategy and kind of sum; by kernels those with the most different loss kernels.
#[test]
fn the_references_numbers() {
    for (name, interpreted, compiled) in [
        ("objectives", &[9, 16, 20, 21, 28, 31, 35, 38, 46, 49, 52][..], &[45][..]),
        // Run 6's loss is 0.05582856 in f64; the reference, in f32, says 0.0558271, whose log-probabilities of 31 round by as much.
        ("astrai_strategies", &[1, 5, 6], &[5, 6]),
    ] {
        let Some(folder) = case(name) else { continue };
        for (kind, only) in [(Kind::Interpreter, interpreted), (Kind::Cpu, compiled)] {
            let rows = check(&folder, kind, only);
            assert!(rows.len() >= 3 && rows.iter().all(|r| r.verdict == "ok"), "{name}: {rows:#?}");
        }
    }
}

/// A copy of a folder whose runs' text is changed.
fn altered(folder: &Path, change: impl Fn(String) -> String) -> tempfile::TempDir {
    let to = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), to.path().join(entry.file_name())).unwrap();
    }
    let list = to.path().join("strategies.json");
    let text = std::fs::read_to_string(&list).unwrap();
    let changed = change(text.clone());
    assert_ne!(text, changed);
    std::fs::remove_file(&list).unwrap();
    std::fs::write(&list, changed).unwrap();
    to
}

#[test]
fn other_numbers_are_off() {
    let Some(folder) = case("objectives") else { return };
    let off = |to: &tempfile::TempDir, run: usize| -> Vec<String> {
        let rows = check(to.path(), Kind::Interpreter, &[run]);
        rows.iter().filter(|r| r.verdict != "ok").map(|r| r.check.clone()).collect()
    };
    // Another temperature: the loss, its gradient, and rewards.
    let other = altered(&folder, |t| t.replacen("\"beta\": 0.1", "\"beta\": 0.1002", 1));
    assert_eq!(off(&other, 0), ["losses", "grads", "metrics"]);
    let metric = altered(&folder, |t| t.replacen("\"entropy\": 3.388", "\"entropy\": 3.394", 1));
    assert_eq!(off(&metric, 0), ["metrics"]);
    let unknown = altered(&folder, |t| t.replacen("\"entropy\"", "\"enthalpy\"", 1));
    assert_eq!(off(&unknown, 0), ["metrics"]);
    let option = altered(&folder, |t| t.replacen("\"beta\"", "\"gamma\"", 1));
    let machine = Machine::new(Kind::Interpreter, 1).unwrap();
    let e = Objectives::open(option.path(), &machine).unwrap().check(Some(&[0]), &mut unheard).unwrap_err();
    assert!(e.to_string().contains("unknown field `gamma`"), "{e}");
}

#[test]
fn a_batch_of_ones_own() {
    let Some(folder) = case("objectives") else { return };
    let all = Checkpoint::open(&folder.join("strategies.safetensors")).unwrap();
    let here = tempfile::tempdir().unwrap();
    let (batch, made) = (here.path().join("batch.safetensors"), here.path().join("out.safetensors"));
    let names: Vec<&str> = all.names().filter(|n| n.starts_with("batch.dpo.")).collect();
    let views = names.iter().map(|n| (n.trim_start_matches("batch.dpo."), all.get(n).unwrap()));
    write(&batch, views.map(|(n, t)| (n, DType::I64, t.shape(), t.bytes())), &BTreeMap::new()).unwrap();
    let run = |more: &[&str]| {
        let path = |p: &Path| p.to_str().unwrap().to_string();
        let mut args = vec!["run".to_string(), path(&folder), "--inputs".into(), path(&batch)];
        args.extend(["--outputs".into(), path(&made), "--strategy".into(), "dpo".into()]);
        args.extend(["--device", "interpreter"].iter().chain(more).map(ToString::to_string));
        let out = Command::new(env!("CARGO_BIN_EXE_astrai")).args(&args).output().unwrap();
        (String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap())
    };
    let reference = folder.join("ref_model.safetensors");
    let with = [
        "--set",
        "loss_type=ipo",
        "--reference",
        reference.to_str().unwrap(),
        "--want",
        "loss,grads",
        "--json",
    ];
    let (said, complaint) = run(&with);
    let report: serde_json::Value = serde_json::from_str(&said).unwrap_or_else(|_| panic!("{complaint}"));
    let number = |t: &Checkpoint, name: &str| {
        let mut x = [0.0];
        t.get(name).unwrap().to_f32(&mut x).unwrap();
        f64::from(x[0])
    };
    let want = number(&all, "run.3.loss");
    assert!((report["loss"].as_f64().unwrap() / want - 1.0).abs() < 1e-5, "{said}");
    assert!((report["metrics"]["rewards/margins"].as_f64().unwrap() - 0.14113660).abs() < 1e-4, "{said}");
    let out = Checkpoint::open(&made).unwrap();
    assert!(out.get("grad.model.norm.weight").is_some() && out.get("metric.entropy").is_some());
    for (more, says) in [
        (&["--set", "loss_type=ppo"][..], "unknown variant `ppo`"),
        (&["--set", "beta"], "KEY=VALUE"),
        (&[], "needs a reference"),
        (&["--old", "x"], "reads none"),
        (&["--want", "logits"], "loss and grads"),
        (&["--micro-batches", "3"], "3 equal micro-batches"),
    ] {
        let (_, complaint) = run(more);
        assert!(complaint.starts_with("astrai: ") && complaint.contains(says), "{more:?}: {complaint}");
    }
}
