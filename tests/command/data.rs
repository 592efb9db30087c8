//! Prepared data as users meet them: `astrai preprocess` and `astrai data`, h5py on what they write, and `astrai verify` on
//! the golden data, where these are.

use crate::train::fixture::{SMALL, assert_same, command, fails, good, losses, program, shared};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Instant;
use tempfile::TempDir;

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// The golden data, or a word that they are not here.
fn golden() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/golden/data");
    if !folder.exists() {
        println!("skipped: no {}", folder.display());
    }
    folder.exists().then_some(folder)
}

fn astrai(args: &[&str]) -> Command {
    let mut c = program();
    c.args(args);
    c
}

/// Objects, one a line, that a command prints.
fn objects(c: &mut Command) -> Vec<Value> {
    let out = c.output().unwrap();
    assert!(out.status.success(), "{c:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let (path, to) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() { copy(&path, &to) } else { fs::write(to, fs::read(path).unwrap()).unwrap() }
    }
}

#[test]
fn golden_data_are_equal_and_altered_numbers_are_found() {
    let Some(golden) = golden() else { return };
    let report = objects(astrai(&["verify", "--json"]).arg(&golden));
    assert_eq!(report[0]["ok"], true, "{}", report[0]);
    let checks: Vec<&str> =
        report[0]["checks"].as_array().unwrap().iter().map(|c| c["check"].as_str().unwrap()).collect();
    let want = [
        "data.seq",
        "data.sft",
        "data.seq_latest",
        "data.dpo",
        "data.grpo",
        "chat.records",
        "chat.packed",
        "chat.pairs",
        "packing",
    ];
    let sorted = |mut list: Vec<&str>| {
        list.sort_unstable();
        list.join(" ")
    };
    assert_eq!(sorted(checks), sorted(want.to_vec()));

    let dir = folder();
    copy(&golden, &dir.path().join("data"));
    copy(&golden.join("../tokenizer"), &dir.path().join("tokenizer"));
    let data = dir.path().join("data");
    let off = |file: &str, pointer: &str, check: &str| {
        let text = fs::read(golden.join(file)).unwrap();
        let mut value: Value = serde_json::from_slice(&text).unwrap();
        let at = value.pointer_mut(pointer).unwrap_or_else(|| panic!("{pointer}"));
        *at = json!(at.as_f64().unwrap() as i64 + 1);
        fs::write(data.join(file), value.to_string()).unwrap();
        let out = astrai(&["verify", "--json"]).arg(&data).output().unwrap();
        assert_eq!(out.status.code(), Some(1), "{pointer}");
        let report: Value = serde_json::from_slice(&out.stdout).unwrap();
        let off = report["checks"].as_array().unwrap().iter().filter(|c| c["verdict"] == "off");
        assert_eq!(off.map(|c| c["check"].as_str().unwrap()).collect::<Vec<_>>(), [check], "{report}");
        fs::write(data.join(file), text).unwrap();
    };
    off("expected.json", "/sets/seq/stream/sequence/30", "data.seq");
    off("expected.json", "/sets/sft/cases/0/sample_1/loss_mask/2", "data.sft");
    off("expected.json", "/sets/dpo/batch/rejected/3/5", "data.dpo");
    off("expected.json", "/sets/grpo/record/10/rewards/0", "data.grpo");
    off("chat_expected.json", "/records/3/loss_mask/60", "chat.records");
    off("chat_expected.json", "/packed/chat/0/position_ids/9", "chat.packed");
    off("chat_expected.json", "/pairs/1/chosen_mask/0", "chat.pairs");
    off("packing.json", "/cases/10/packed_lengths/1", "packing");
}

/// What is shown are the numbers of the contract and, beside them, what training makes of them.
#[test]
fn windows_and_records_are_shown_as_training_sees_them() {
    let Some(golden) = golden() else { return };
    let expected: Value = serde_json::from_slice(&fs::read(golden.join("expected.json")).unwrap()).unwrap();
    let flags = ["data", "windows", "--strategy", "sft", "--window", "8", "--stride", "8", "--json"];
    let windows = objects(astrai(&flags).arg(golden.join("sft")));
    assert_eq!(windows.len(), 9);
    let want = &expected["sets"]["sft"]["cases"][0]["sample_1"];
    for key in ["begin", "input_ids", "target_ids", "loss_mask", "position_ids"] {
        assert_eq!(windows[1][key], want[key], "{key}");
    }
    // Positions 1 0 1 2 0 1 2 3 and then 0: documents of one, three and four tokens; borders are not learnt whatever the mask says.
    assert_eq!(windows[1]["starts"], json!([0, 1, 4, 8]));
    assert_eq!(windows[1]["labels"], json!([-100, 130, 241, -100, -100, -100, -100, -100]));
    let shown = objects(astrai(&["data", "show", "--limit", "2", "--json"]).arg(golden.join("dpo")));
    assert_eq!(shown.len(), 2);
    for key in ["chosen", "chosen_mask", "rejected", "rejected_mask"] {
        assert_eq!(shown[1][key], expected["sets"]["dpo"]["record"]["1"][key], "{key}");
    }
    assert_eq!(shown[0]["chosen_labels"], json!([-100, 182, 337, 338, -100]));
    let groups =
        objects(astrai(&["data", "show", "--from", "2", "--limit", "1", "--json"]).arg(golden.join("grpo")));
    assert_eq!(groups[0]["responses"], expected["sets"]["grpo"]["record"]["2"]["responses"]);
    let out = astrai(&["data", "show", "--from", "2000"]).arg(golden.join("grpo")).output().unwrap();
    assert!(
        !out.status.success() && String::from_utf8_lossy(&out.stderr).contains("the first of which is 0")
    );
    let info = objects(astrai(&["data", "info", "--json"]).arg(golden.join("sft")));
    assert_eq!((&info[0]["layout"], &info[0]["strategy"]), (&json!("hdf5"), &json!("sft")));
    assert_eq!(info[0]["keys"].as_array().unwrap().len(), 3);
}

/// Every layout gives every other the same numbers, and h5py reads ours.
#[test]
fn layouts_convert_into_each_other_and_h5py_reads_them() {
    let Some(golden) = golden() else { return };
    let dir = folder();
    let at = |name: &str| dir.path().join(name);
    let show = |path: &Path| objects(astrai(&["data", "show", "--limit", "99", "--json"]).arg(path));
    for set in ["seq", "dpo", "grpo"] {
        let mut from = golden.join(set);
        let want = show(&from);
        assert!(want.len() > 10);
        for (i, name) in ["a.jsonl", "b.h5", "c", "d.h5", "e.jsonl"].iter().enumerate() {
            let to = at(&format!("{set}-{name}"));
            let mut c = astrai(&["data", "convert"]);
            c.arg(&from).arg(&to).args((i == 3).then_some("--gzip"));
            good(&mut c);
            assert_eq!(show(&to), want, "{set} to {name}");
            from = to;
        }
    }
    let (line, _) = fails(astrai(&["data", "convert"]).arg(golden.join("seq")).arg(at("seq-c")));
    assert!(line.contains("exists"), "{line}");
    let Some(h5py) = h5py() else {
        return println!("skipped: no h5py in .cache/h5py; scripts/setup-cache.sh puts it there");
    };
    let read = "import h5py, json, sys\nf = h5py.File(sys.argv[1], 'r')\n\
        print(json.dumps({k: [[str(g[f'data_{i}'].dtype), g[f'data_{i}'][...].tolist()] for i in range(len(g))] for k, g in f.items()}))";
    for set in ["seq", "dpo", "grpo"] {
        let [plain, packed] = ["b.h5", "d.h5"].map(|name| {
            let mut python = Command::new("python3");
            python.args(["-c", read]).arg(at(&format!("{set}-{name}"))).env("PYTHONPATH", &h5py);
            objects(&mut python).remove(0)
        });
        let numbers = |v: &Value| -> Vec<(String, Vec<Value>)> {
            let of = |list: &Value| list.as_array().unwrap().iter().map(|pair| pair[1].clone()).collect();
            v.as_object().unwrap().iter().map(|(k, list)| (k.clone(), of(list))).collect()
        };
        let (a, b) = (numbers(&plain), numbers(&packed));
        assert_eq!(a, b, "{set}");
        let want = objects(astrai(&["data", "show", "--limit", "99", "--json"]).arg(golden.join(set)));
        for (key, list) in a.iter().filter(|(key, _)| key != "rewards") {
            let want: Vec<&Value> = want.iter().map(|record| &record[key.as_str()]).collect();
            assert_eq!(list.iter().collect::<Vec<_>>(), want, "{set}, {key}");
        }
    }
    // What h5py writes of NumPy's types is golden/data itself, and this, packed and in its newest format.
    let write = "import h5py, numpy as np, sys\nwith h5py.File(sys.argv[1], 'w', libver='latest') as f:\n\
        \x20   for i in range(12):\n        f.create_dataset(f'sequence/data_{i}', data=np.arange(i, i + 70000, dtype=np.int64) % 251, chunks=True, compression='gzip', shuffle=True)\n\
        \x20       f.create_dataset(f'loss_mask/data_{i}', data=np.arange(70000) % 7 == 0)";
    let path = at("theirs.h5");
    good(Command::new("python3").args(["-c", write]).arg(&path).env("PYTHONPATH", &h5py));
    let info = objects(astrai(&["data", "info", "--json"]).arg(&path));
    assert_eq!(info[0]["keys"][1]["numbers"], 840_000, "{}", info[0]);
    let flags = ["data", "windows", "--strategy", "sft", "--window", "3", "--stride", "70001", "--json"];
    let windows = objects(astrai(&flags).arg(&path));
    assert_eq!((windows.len(), &windows[1]["input_ids"]), (12, &json!([2, 3, 4])));
    assert_eq!(windows[1]["loss_mask"], json!([0, 0, 0]));
}

fn h5py() -> Option<PathBuf> {
    let version = "import sys; print('-python%d.%d' % sys.version_info[:2])";
    let out = Command::new("python3").args(["-c", version]).output().ok()?;
    let ending = String::from_utf8(out.stdout).ok()?;
    let folders = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".cache/h5py")).ok()?;
    folders.flatten().map(|entry| entry.path()).find(|path| path.to_string_lossy().ends_with(ending.trim()))
}

const TEMPLATE: &str = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|assistant|>{% endif %}";

/// A tokenizer with a template, and chats of uneven length in two domains, in two files.
fn chats(dir: &Path, records: usize) -> [PathBuf; 3] {
    let (tokenizer, input, config) = (dir.join("tokenizer"), dir.join("chats"), dir.join("chat.json"));
    copy(&shared().join("run/tokenizer"), &tokenizer);
    fs::write(tokenizer.join("chat_template.jinja"), TEMPLATE).unwrap();
    fs::create_dir(&input).unwrap();
    let line = |i: usize| {
        let answer = format!("answer {i} ").repeat(1 + i * 7 % 9);
        let messages = json!([{"role": "user", "content": format!("question {i}")}, {"role": "assistant", "content": answer}]);
        json!({"messages": messages, "domain": if i.is_multiple_of(3) { "a" } else { "b" }}).to_string()
            + "\n"
    };
    let half = |range: std::ops::Range<usize>| range.map(line).collect::<String>();
    fs::write(input.join("0.jsonl"), half(0..records / 2)).unwrap();
    fs::write(input.join("1.jsonl"), half(records / 2..records)).unwrap();
    let section = json!({"field": "messages", "action": "$role", "template": true});
    let made = json!({"input": {"sections": [section]}, "mask": {"assistant": "train"},
        "preprocessing": {"max_seq_len": 64, "packing": "bfd", "max_packed_len": 64},
        "output": {"domain_key": "domain", "max_tokens_per_shard": 3000, "weights": {"a": 1, "b": 2}}});
    fs::write(&config, made.to_string()).unwrap();
    [tokenizer, input, config]
}

fn preprocess([tokenizer, input, config]: &[PathBuf; 3], out: &Path) -> Command {
    let mut c = astrai(&["preprocess", "--json", "--config"]);
    c.arg(config).arg("--tokenizer").arg(tokenizer).arg("--input").arg(input).arg("--out").arg(out);
    c
}

/// Files of a folder by path, with what they hold.
fn contents(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let (mut todo, mut all) = (vec![folder.to_path_buf()], vec![]);
    while let Some(at) = todo.pop() {
        for path in fs::read_dir(&at).unwrap().map(|e| e.unwrap().path()) {
            if path.is_dir() {
                todo.push(path)
            } else {
                all.push((path.strip_prefix(folder).unwrap().into(), fs::read(&path).unwrap()))
            }
        }
    }
    all.sort();
    all
}

#[test]
fn a_killed_preprocess_goes_on_without_a_lost_or_doubled_record() {
    let dir = folder();
    let sources = chats(dir.path(), 1500);
    let config = fs::read_to_string(&sources[2]).unwrap();
    let mut died = 0;
    for (format, kills) in [("bin", 10), ("h5", 5), ("jsonl", 5)] {
        let set = format!("\"storage_format\":\"{format}\",\"max_tokens_per_shard\"");
        fs::write(&sources[2], config.replace("\"max_tokens_per_shard\"", &set)).unwrap();
        let [whole, killed] = ["whole", "killed"].map(|name| dir.path().join(format!("{name}-{format}")));
        let since = Instant::now();
        let made = objects(&mut preprocess(&sources, &whole));
        let took = since.elapsed();
        assert_eq!(made[0]["dataset"]["records"], 1500);
        assert!(made[0]["dataset"]["domains"]["b"]["shards"].as_u64().unwrap() > 5);
        for i in 0..kills {
            let mut run =
                preprocess(&sources, &killed).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            // Later each time, so that kills fall everywhere.
            sleep(took * (i + 1) / (2 * kills));
            died += u32::from(run.try_wait().unwrap().is_none());
            run.kill().unwrap();
            run.wait().unwrap();
            if !killed.join("dataset.json").exists() && killed.join("progress.json").exists() {
                for part in [killed.clone(), killed.join("a")].iter().filter(|part| part.exists()) {
                    let (line, _) = fails(astrai(&["data", "info"]).arg(part));
                    assert!(line.contains("has not finished"), "{line}");
                }
            }
        }
        good(&mut preprocess(&sources, &killed));
        assert!(contents(&whole) == contents(&killed), "{format}: killed runs differ from one run");
        let again = objects(&mut preprocess(&sources, &killed));
        assert_eq!(again[0]["cached"], true);
    }
    println!("{died} of 20 kills came before the end");
    fs::remove_file(dir.path().join("killed-jsonl/b/data_0001.jsonl")).unwrap();
    let (line, _) = fails(&mut preprocess(&sources, &dir.path().join("killed-jsonl")));
    assert!(line.contains("data_0001.jsonl: is gone"), "{line}");
}

#[test]
fn records_that_are_wrong_are_named_by_file_and_line() {
    let dir = folder();
    let sources = chats(dir.path(), 4);
    let out = dir.path().join("out");
    let file = sources[1].join("1.jsonl");
    let good_lines = fs::read_to_string(&file).unwrap();
    let says = |line: &str, parts: &[&str]| {
        fs::write(&file, format!("{good_lines}\n{line}\n")).unwrap();
        let (said, _) = fails(&mut preprocess(&sources, &out));
        assert!(said.contains("1.jsonl: line 4") && parts.iter().all(|p| said.contains(p)), "{said}");
    };
    says("{\"messages\": [", &["is no JSON object"]);
    says(r#"{"messages": "hi"}"#, &["messages", "must be a list"]);
    says(r#"{"messages": [{"role": "user", "content": "alone"}]}"#, &["none of its", "degenerate"]);
    let outside = json!({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "domain": "../x"});
    says(&outside.to_string(), &["no name of a folder"]);
    says(&outside.to_string().replace("\"../x\"", "3"), &["`domain` is no text"]);
    let long = json!({"messages": [{"role": "user", "content": "x".repeat(400)}, {"role": "assistant", "content": "y"}]});
    says(&long.to_string(), &["none of its 64 tokens", "max_seq_len 64"]);
    // A record that is mended is prepared into the same folder, where nothing whole is yet.
    fs::write(&file, good_lines).unwrap();
    good(&mut preprocess(&sources, &out));
    let text = fs::read_to_string(&sources[2]).unwrap();
    fs::write(&sources[2], text.replace("3000", "3001")).unwrap();
    let (said, _) = fails(&mut preprocess(&sources, &out));
    assert!(said.contains("holds data of another configuration"), "{said}");
    fs::write(&sources[2], text.replace("\"bfd\"", "\"bdf\"")).unwrap();
    let (said, _) = fails(&mut preprocess(&sources, &out));
    assert!(said.contains("chat.json") && said.contains("bdf"), "{said}");
}

/// Chats as they come, and as they were prepared with weights, are learnt and resumed bit for bit.
#[test]
fn chats_are_learnt_by_their_answers() {
    let dir = folder();
    let sources = chats(dir.path(), 60);
    let config = dir.path().join("config.json");
    fs::write(&config, SMALL).unwrap();
    let prepared = dir.path().join("prepared");
    good(&mut preprocess(&sources, &prepared));
    let run = |out: &Path, data: &Path, steps: &str| {
        let mut c = command(out);
        c.arg("--config").arg(&config).arg("--tokenizer").arg(&sources[0]).arg("--data").arg(data);
        c.args([
            "--strategy",
            "sft",
            "--seq",
            "64",
            "--batch",
            "4",
            "--lr",
            "1e-2",
            "--eval-every",
            "8",
            "--steps",
            steps,
        ]);
        c
    };
    for (name, data) in [("raw", &sources[1]), ("prepared", &prepared)] {
        let (whole, halved) = (dir.path().join(name), dir.path().join(format!("{name}-halved")));
        good(&mut run(&whole, data, "12"));
        let all = losses(&whole);
        assert!(all[11] < all[0] - 0.5, "{name}: {all:?}");
        good(run(&halved, data, "12").args(["--save-every", "6"]));
        fs::remove_dir_all(halved.join("step_000012")).unwrap();
        good(command(&halved).arg("--resume"));
        assert_same(&whole, &halved, 12, name);
        assert!(whole.join("step_000012/chat_template.jinja").exists());
    }
    let (line, _) = fails(run(&dir.path().join("none"), &sources[1], "2").args(["--data-weights", "1"]));
    assert!(line.contains("data_weights"), "{line}");
}
