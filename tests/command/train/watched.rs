//! A run that is watched: users' commands at hook points, metrics as a table and for TensorBoard, also across a kill. Event files are decoded
//! here by the formats' own descriptions, and by TensorBoard where it is in the test cache.

use crate::train::fixture::{command, good, metrics, refused, small, stderr};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

const FLAGS: [&str; 8] = ["--batch", "4", "--save-every", "2", "--eval-every", "3", "--steps", "8"];
const FILES: [&str; 3] = ["--metrics", "csv", "tensorboard"];

#[test]
fn commands_hear_a_run_and_files_of_metrics_survive_its_kill() {
    let dir = tempfile::tempdir().unwrap();
    let (straight, out, heard) =
        (dir.path().join("straight"), dir.path().join("killed"), dir.path().join("heard"));
    let hear = format!("cat >> '{}'", heard.display());
    let mut run = small(&straight);
    run.args(FLAGS).args(FILES);
    for when in ["begin", "step:3", "every:4", "eval", "checkpoint", "epoch", "end", "error"] {
        run.args(["--on", when, &hear]);
    }
    let told = good(run.args(["--on", "step:2", "exit 7"]));
    assert!(told.contains("on step:2: `exit 7` failed (exit status: 7), the run goes on"), "{told}");
    let lines = fs::read_to_string(&heard).unwrap();
    let lines: Vec<Value> = lines.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let moments: Vec<(&str, u64)> =
        lines.iter().map(|l| (l["event"].as_str().unwrap(), l["step"].as_u64().unwrap())).collect();
    let want = [
        ("begin", 0),
        ("checkpoint", 2),
        ("step", 3),
        ("eval", 3),
        ("step", 4),
        ("checkpoint", 4),
        ("eval", 6),
        ("checkpoint", 6),
        ("step", 8),
        ("eval", 8),
        ("checkpoint", 8),
        ("end", 8),
    ];
    assert_eq!(moments, want);
    let rows = metrics(&straight);
    let of = |step: u64, key: &str| rows.iter().find(|r| r["step"] == step && r.get(key).is_some()).unwrap();
    assert_eq!((&lines[2]["loss"], &lines[2]["total_steps"]), (&of(3, "loss")["loss"], &json!(8)));
    assert_eq!(lines[3]["val_loss"], of(3, "val_loss")["val_loss"]);
    assert!(lines[1]["checkpoint"].as_str().unwrap().ends_with("step_000002"));
    assert_eq!(
        (&lines[11]["complete"], &lines[0]["out"]),
        (&json!(true), &json!(straight.to_str().unwrap()))
    );

    // Killed by its own command behind the checkpoint of step 4; what is resumed runs none.
    let status =
        small(&out).args(FLAGS).args(FILES).args(["--on", "step:5", "kill -9 $PPID"]).output().unwrap();
    assert_eq!(status.status.code(), None, "{}", stderr(&status));
    good(command(&out).arg("--resume"));
    for (folder, files) in [(&straight, 1), (&out, 2)] {
        let rows = metrics(folder);
        assert_eq!(rows, metrics(&straight));
        assert_eq!(table(&folder.join("metrics.csv")), rows);
        let scalars = events(&folder.join("tensorboard"), files);
        let mut want = BTreeMap::<String, Vec<(u64, f32)>>::new();
        for row in &rows {
            for (tag, x) in row.as_object().unwrap().iter().filter(|(tag, _)| *tag != "step") {
                let at = row["step"].as_u64().unwrap();
                want.entry(tag.clone()).or_default().push((at, x.as_f64().unwrap() as f32));
            }
        }
        assert_eq!(scalars, want);
        read_by_tensorboard(&folder.join("tensorboard"), &want);
    }
}

#[test]
fn moments_that_are_none_and_commands_of_files() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let line = refused(small(&out).args(["--on", "step", "true"]));
    assert!(line.starts_with("on: `step` is no moment; there are begin, step:N,"), "{line}");
    let file = dir.path().join("run.toml");
    let heard = dir.path().join("heard");
    let touch = format!("printf x >> '{}'", heard.display());
    fs::write(&file, format!("batch = 2\nsteps = 2\nmetrics = 'csv'\n[on]\nend = \"{touch}\"\n'every:1' = ['true', \"{touch}\"]\n"))
        .unwrap();
    good(small(&out).arg("--file").arg(&file));
    assert_eq!(
        (fs::read_to_string(heard).unwrap().as_str(), out.join("metrics.csv").exists()),
        ("xxx", true)
    );
    let state = fs::read_to_string(out.join("step_000002/trainer.json")).unwrap();
    assert!(!state.contains("printf") && state.contains("\"csv\""), "{state}");
}

/// Rows of a table without what depends on the clock, as the lines of JSON have them.
fn table(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    let mut lines = text.lines();
    let columns: Vec<&str> = lines.next().unwrap().split(',').collect();
    let row = |line: &str| {
        let cells: Vec<&str> = line.split(',').collect();
        assert_eq!(cells.len(), columns.len(), "{line}");
        let there = columns.iter().zip(cells).filter(|(_, cell)| !cell.is_empty());
        let timed = ["tokens_per_s", "seconds", "mfu"];
        let fields = there.filter(|(key, _)| !timed.contains(key));
        fields.map(|(k, cell)| (k.to_string(), serde_json::from_str(cell).unwrap())).collect()
    };
    lines.map(row).map(Value::Object).collect()
}

/// Records of a file, whose checksums must hold.
fn records(bytes: &[u8]) -> Vec<&[u8]> {
    let table: Vec<u32> = (0..256u32)
        .map(|i| (0..8).fold(i, |c, _| if c % 2 == 1 { (c / 2) ^ 0x82f6_3b78 } else { c / 2 }))
        .collect();
    let crc = |data: &[u8]| {
        let crc = !data.iter().fold(!0u32, |c, b| (c >> 8) ^ table[(c as u8 ^ b) as usize]);
        crc.rotate_right(15).wrapping_add(0xa282ead8)
    };
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let (mut at, mut all) = (0, vec![]);
    while at < bytes.len() {
        let length = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
        let data = &bytes[at + 12..at + 12 + length];
        assert_eq!((word(at + 8), word(at + 12 + length)), (crc(&bytes[at..at + 8]), crc(data)));
        all.push(data);
        at += 16 + length;
    }
    all
}

/// Fields of a message: number, and what stands there: a number's bytes, or those of a length.
fn fields(mut m: &[u8]) -> Vec<(u64, Vec<u8>)> {
    fn varint(m: &mut &[u8]) -> u64 {
        let (mut x, mut shift) = (0, 0);
        loop {
            let (byte, rest) = m.split_first().unwrap();
            (x, *m) = (x | u64::from(byte & 127) << shift, rest);
            if byte & 128 == 0 {
                return x;
            }
            shift += 7;
        }
    }
    let mut all = vec![];
    while !m.is_empty() {
        let key = varint(&mut m);
        let n = match key & 7 {
            0 => {
                all.push((key >> 3, varint(&mut m).to_le_bytes().to_vec()));
                continue;
            }
            1 => 8,
            5 => 4,
            2 => varint(&mut m) as usize,
            kind => panic!("wire type {kind}"),
        };
        all.push((key >> 3, m[..n].to_vec()));
        m = &m[n..];
    }
    all
}

/// Scalars of all event files of a folder, those dropped of which a later file says that it starts before them.
fn events(folder: &Path, files: usize) -> BTreeMap<String, Vec<(u64, f32)>> {
    let mut paths: Vec<_> = fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    paths.sort();
    assert_eq!(paths.len(), files, "{paths:?}");
    let number = |x: &[u8]| u64::from_le_bytes(x.try_into().unwrap());
    let mut scalars = BTreeMap::<String, Vec<(u64, f32)>>::new();
    for path in paths {
        let bytes = fs::read(&path).unwrap();
        for (i, event) in records(&bytes).into_iter().enumerate() {
            let event: BTreeMap<u64, Vec<u8>> = fields(event).into_iter().collect();
            let (time, step) = (f64::from_le_bytes(event[&1][..].try_into().unwrap()), number(&event[&2]));
            assert!(time > 1.7e9, "{time}");
            match i {
                0 => assert_eq!(event[&3], b"brain.Event:2"),
                1 => {
                    assert_eq!(fields(&event[&7]), [(1, 1u64.to_le_bytes().to_vec())]);
                    scalars.values_mut().for_each(|list| list.retain(|(at, _)| *at < step));
                }
                _ => {
                    for (one, value) in fields(&event[&5]) {
                        let value: BTreeMap<u64, Vec<u8>> = fields(&value).into_iter().collect();
                        let x = f32::from_le_bytes(value[&2][..].try_into().unwrap());
                        assert_eq!(one, 1);
                        scalars
                            .entry(String::from_utf8(value[&1].clone()).unwrap())
                            .or_default()
                            .push((step, x));
                    }
                }
            }
        }
    }
    ["tokens_per_s", "seconds", "mfu"].iter().for_each(|tag| drop(scalars.remove(*tag)));
    scalars
}

const READ: &str = "
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
e = EventAccumulator(sys.argv[1], size_guidance={'scalars': 0})
e.Reload()
print(json.dumps({t: [[s.step, s.value] for s in e.Scalars(t)] for t in e.Tags()['scalars']}))
";

fn read_by_tensorboard(folder: &Path, want: &BTreeMap<String, Vec<(u64, f32)>>) {
    let Some(library) = crate::openai::client("tensorboard") else {
        return println!(
            "skipped: no tensorboard in .cache/tensorboard; scripts/setup-cache.sh puts it there"
        );
    };
    let out =
        Command::new("python3").args(["-c", READ]).arg(folder).env("PYTHONPATH", library).output().unwrap();
    assert!(out.status.success(), "{}", stderr(&out));
    let read: BTreeMap<String, Vec<(u64, f32)>> = serde_json::from_slice(&out.stdout).unwrap();
    let timed = BTreeSet::from(["tokens_per_s", "seconds", "mfu"]);
    let read: BTreeMap<_, _> = read.into_iter().filter(|(tag, _)| !timed.contains(tag.as_str())).collect();
    assert_eq!(&read, want);
    println!("TensorBoard reads {} tags in {}", read.len(), folder.display());
}

/// A limit on the size of files stands for a full disk, and goes away again.
#[test]
fn checkpoints_behind_the_run_that_fail_are_told_and_others_are_as_ever() {
    let dir = tempfile::tempdir().unwrap();
    let (waits, out) = (dir.path().join("waits"), dir.path().join("behind"));
    let flags = ["--batch", "4", "--save-every", "2", "--steps", "9", "--keep", "0"];
    good(small(&waits).args(flags));
    let heard = dir.path().join("heard");
    let mut behind = small(&out);
    behind.args(flags).args(["--async-save", "--on", "checkpoint", &format!("cat >> '{}'", heard.display())]);
    let limited = Command::new("prlimit").arg("--version").output().is_ok_and(|o| o.status.success());
    if limited {
        // The one before is there first, and the one that fails has the time to.
        let there = out.join("step_000002/manifest.json");
        let limit = format!(
            "until [ -f '{}' ]; do sleep 0.02; done; prlimit --pid $PPID --fsize=20000:",
            there.display()
        );
        behind.args([
            "--on",
            "step:3",
            &limit,
            "--on",
            "step:6",
            "sleep 0.5; prlimit --pid $PPID --fsize=unlimited:",
        ]);
    }
    let told = good(&mut behind);
    let saved = |out: &Path| {
        let names = fs::read_dir(out).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        names.filter(|n| n.starts_with("step_")).collect::<BTreeSet<_>>()
    };
    let mut all = saved(&waits);
    assert_eq!(all.len(), 5);
    match limited {
        true => {
            assert!(told.contains("not saved, the run goes on: ") && all.remove("step_000004"), "{told}");
        }
        false => println!("without prlimit no checkpoint fails"),
    }
    assert_eq!(saved(&out), all, "{told}");
    for name in &all {
        for file in ["model.safetensors", "optimizer.safetensors"] {
            let read = |out: &Path| fs::read(out.join(name).join(file)).unwrap();
            assert!(read(&waits) == read(&out), "{name}/{file}");
        }
    }
    let heard = fs::read_to_string(heard).unwrap();
    let steps: Vec<u64> =
        heard.lines().map(|l| serde_json::from_str::<Value>(l).unwrap()["step"].as_u64().unwrap()).collect();
    let want: Vec<u64> = all.iter().map(|n| n["step_".len()..].parse().unwrap()).collect();
    assert_eq!(steps, want);
    let plan = |flag: Option<&str>| -> Value {
        let mut c = small(&dir.path().join("plan"));
        let out = c.args(["--batch", "4", "--dry-run", "--json"]).args(flag).output().unwrap();
        assert!(out.status.success(), "{}", stderr(&out));
        serde_json::from_slice(&out.stdout).unwrap()
    };
    let (with, without) = (plan(Some("--async-save")), plan(None));
    assert_eq!(without["copy_bytes"], 0);
    let weights = with["weight_bytes"].as_u64().unwrap();
    assert_eq!(with["copy_bytes"].as_u64().unwrap(), 3 * weights, "weights and two moments");
}
