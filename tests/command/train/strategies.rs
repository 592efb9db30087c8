//! `astrai train --strategy`: the first step is what `astrai run --strategy` says of the same batch, micro-batches add up to it, steps lower the loss,
//! and frozen policies are asked once.

use crate::train::fixture::{command, fails, good, losses, metrics, program, refused, tensors};
use astrai_ir::DType;
use astrai_runtime::weights::{Checkpoint, write};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Records of each kind.
const RECORDS: usize = 8;
/// Answers of a group.
const ANSWERS: usize = 3;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/llama")
}

/// The golden model with other weights.
fn other(folder: &Path, seed: f32) -> PathBuf {
    fs::create_dir_all(folder).unwrap();
    fs::copy(golden().join("config.json"), folder.join("config.json")).unwrap();
    let weights = Checkpoint::open(&golden()).unwrap();
    let moved = |name: &str| {
        let t = weights.get(name).unwrap();
        let mut x = vec![0.0; t.elements()];
        t.to_f32(&mut x).unwrap();
        let bytes =
            x.iter().enumerate().flat_map(|(i, x)| (x * (1.0 + 0.3 * (seed + i as f32).sin())).to_le_bytes());
        (t.shape().to_vec(), bytes.collect::<Vec<u8>>())
    };
    let all: Vec<_> = weights.names().map(|n| (n.to_string(), moved(n))).collect();
    let views =
        all.iter().map(|(n, (shape, bytes))| (n.as_str(), DType::F32, shape.as_slice(), bytes.as_slice()));
    write(&folder.join("model.safetensors"), views, &BTreeMap::new()).unwrap();
    folder.to_path_buf()
}

fn ids(seed: usize, count: usize) -> Vec<i64> {
    // Id 0 is a token like any other.
    (0..count)
        .map(|i| if (seed + i).is_multiple_of(7) { 0 } else { ((seed * 31 + i * 17 + i * i) % 320) as i64 })
        .collect()
}

/// A prompt and an answer, and the mask of the answer.
fn masked(i: usize, answer: usize, tokens: usize) -> (Vec<i64>, Vec<i64>) {
    let prompt = 3 + i % 3;
    ([ids(i, prompt), ids(answer + 50, tokens)].concat(), [vec![0; prompt], vec![1; tokens]].concat())
}

/// Record `i` of a strategy's kind.
fn record(strategy: &str, i: usize) -> Value {
    let (better, worse) = (masked(i, i, 4 + i % 4), masked(i, i + 20, 3 + (i * 2) % 5));
    match strategy {
        "sft" => json!({"sequence": better.0, "loss_mask": better.1}),
        "kto" => json!({"sequence": better.0, "loss_mask": better.1, "label": !i.is_multiple_of(3)}),
        "grpo" => {
            let responses: Vec<_> = (0..ANSWERS).map(|g| ids(i * 5 + g, 2 + (i + g) % 4)).collect();
            let masks: Vec<_> = responses.iter().map(|r| vec![1; r.len()]).collect();
            let rewards: Vec<f64> = (0..ANSWERS).map(|g| ((i + g * g) % 4) as f64 * 0.5).collect();
            json!({"prompts": ids(i, 3 + i % 3), "responses": responses, "masks": masks, "rewards": rewards})
        }
        _ => {
            json!({"chosen": better.0, "chosen_mask": better.1, "rejected": worse.0, "rejected_mask": worse.1})
        }
    }
}

/// A file of prepared records.
pub fn records(folder: &Path, strategy: &str) -> PathBuf {
    fs::create_dir_all(folder).unwrap();
    let path = folder.join(format!("{strategy}.jsonl"));
    let lines: Vec<String> = (0..RECORDS).map(|i| record(strategy, i).to_string()).collect();
    fs::write(&path, lines.join("\n") + "\n").unwrap();
    path
}

fn list(record: &Value, key: &str) -> Vec<i64> {
    record[key].as_array().unwrap().iter().map(|x| x.as_i64().unwrap()).collect()
}

/// Sizes and numbers.
type Matrix = (Vec<usize>, Vec<i64>);

/// Rows padded to a matrix, on the left for prompts.
fn matrix(rows: &[Vec<i64>], left: bool) -> Matrix {
    let width = rows.iter().map(Vec::len).max().unwrap();
    let pad = |row: &Vec<i64>| {
        let zeros = vec![0; width - row.len()];
        if left { [zeros.as_slice(), row].concat() } else { [row.as_slice(), &zeros].concat() }
    };
    (vec![rows.len(), width], rows.iter().flat_map(pad).collect())
}

/// The same records as a batch for `astrai run`.
fn batch(folder: &Path, strategy: &str) -> PathBuf {
    let all: Vec<Value> = (0..RECORDS).map(|i| record(strategy, i)).collect();
    let column = |key: &str| all.iter().map(|r| list(r, key)).collect::<Vec<_>>();
    let mut made: Vec<(&str, Matrix)> = Vec::new();
    let mut rewards: Vec<f32> = Vec::new();
    match strategy {
        "sft" => {
            let shifted =
                column("loss_mask").into_iter().map(|m| [&m[1..], &[0]].concat()).collect::<Vec<_>>();
            made = vec![
                ("input_ids", matrix(&column("sequence"), false)),
                ("loss_mask", matrix(&shifted, false)),
            ];
        }
        "kto" => {
            let (own, masks) = (column("sequence"), column("loss_mask"));
            let prompt = |i: usize| masks[i].iter().take_while(|m| **m == 0).count();
            let with = |rows: &[Vec<i64>], i: usize| {
                let next = (i + 1) % RECORDS;
                [&rows[i][..prompt(i)], &rows[next][prompt(next)..]].concat()
            };
            let mixed = |rows: &[Vec<i64>]| (0..RECORDS).map(|i| with(rows, i)).collect::<Vec<_>>();
            let label = all.iter().map(|r| i64::from(r["label"].as_bool().unwrap())).collect();
            made.push(("kl_input_ids", matrix(&mixed(&own), false)));
            made.push(("kl_mask", matrix(&mixed(&masks), false)));
            made.extend([("input_ids", matrix(&own, false)), ("mask", matrix(&masks, false))]);
            made.push(("label", (vec![RECORDS], label)));
        }
        "grpo" => {
            let answers = |key: &str| {
                let rows: Vec<Vec<i64>> = all
                    .iter()
                    .flat_map(|r| r[key].as_array().unwrap().iter())
                    .map(|row| row.as_array().unwrap().iter().map(|x| x.as_i64().unwrap()).collect())
                    .collect();
                let (shape, values) = matrix(&rows, false);
                (vec![RECORDS, ANSWERS, shape[1]], values)
            };
            let ones: Vec<Vec<i64>> = column("prompts").iter().map(|p| vec![1; p.len()]).collect();
            made = vec![
                ("prompts", matrix(&column("prompts"), true)),
                ("prompt_mask", matrix(&ones, true)),
                ("responses", answers("responses")),
                ("masks", answers("masks")),
            ];
            rewards = all
                .iter()
                .flat_map(|r| r["rewards"].as_array().unwrap())
                .map(|x| x.as_f64().unwrap() as f32)
                .collect();
        }
        _ => {
            for key in ["chosen", "chosen_mask", "rejected", "rejected_mask"] {
                made.push((key, matrix(&column(key), false)));
            }
        }
    }
    let bytes = |x: &[i64]| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let mut tensors: Vec<_> = made.iter().map(|(n, (s, x))| (*n, DType::I64, s.clone(), bytes(x))).collect();
    if !rewards.is_empty() {
        let bytes = rewards.iter().flat_map(|x| x.to_le_bytes()).collect();
        tensors.push(("rewards", DType::F32, vec![RECORDS, ANSWERS], bytes));
    }
    let path = folder.join(format!("{strategy}.safetensors"));
    write(&path, tensors.iter().map(|(n, d, s, b)| (*n, *d, s.as_slice(), b.as_slice())), &BTreeMap::new())
        .unwrap();
    path
}

/// A run of so many steps on records.
pub fn train(out: &Path, strategy: &str, data: &Path, steps: u64) -> Command {
    let mut c = command(out);
    c.arg("--model").arg(golden()).arg("--data").arg(data).args(["--strategy", strategy]);
    c.args(["--seq", "16", "--warmup", "0", "--schedule", "constant", "--lr", "3e-3"]);
    c.args(["--steps", &steps.to_string(), "--threads", "2"]);
    c
}

fn near(a: &Value, b: &Value, by: f64, what: &str) {
    let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
    assert!((a - b).abs() <= by * a.abs().max(1.0), "{what}: {a} against {b}");
}

/// Strategy, options, frozen policies, and whether micro-batches add up exactly: kto estimates the divergence, bnpo a mean, of each by itself.
const RUNS: [(&str, &[&str], &[&str], bool); 11] = [
    ("sft", &["label_smoothing_factor=0.1", "z_loss=0.01"], &[], true),
    ("dpo", &[], &["--reference"], true),
    ("dpo", &["loss_type=ipo,sft", "beta=0.5", "ld_alpha=0.5"], &["--reference"], true),
    ("grpo", &["beta=0.05"], &["--reference", "--old"], true),
    ("grpo", &["loss_type=grpo", "importance_sampling_level=sequence"], &["--old"], true),
    ("grpo", &["preset=seed"], &["--reference", "--old"], false),
    ("kto", &[], &["--reference"], false),
    ("kto", &["loss_type=apo_zero_unpaired"], &["--reference"], true),
    ("orpo", &[], &[], true),
    ("cpo", &["loss_type=simpo"], &[], true),
    ("simpo", &["simpo_gamma=1"], &[], true),
];

#[test]
fn every_strategy_learns_what_its_objective_says() {
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path();
    let policies = BTreeMap::from([
        ("--reference", other(&here.join("reference"), 1.0)),
        ("--old", other(&here.join("old"), 2.0)),
    ]);
    for (i, (strategy, options, frozen, exact)) in RUNS.into_iter().enumerate() {
        let what = format!("{strategy} {options:?}");
        let (data, batch) = (records(here, strategy), batch(here, strategy));
        let with = |mut c: Command| {
            options.iter().for_each(|o| _ = c.args(["--set", o]));
            frozen.iter().for_each(|p| _ = c.arg(p).arg(&policies[p]));
            c
        };
        let mut run = program();
        run.arg("run")
            .arg(golden())
            .arg("--inputs")
            .arg(batch)
            .arg("--outputs")
            .arg(here.join("x.safetensors"));
        run.args(["--strategy", strategy, "--json"]);
        let said = with(run).output().unwrap();
        assert!(said.status.success(), "{what}: {}", String::from_utf8_lossy(&said.stderr));
        let want: Value = serde_json::from_slice(&said.stdout).unwrap();

        let out = here.join(format!("whole{i}"));
        good(with(train(&out, strategy, &data, 8)).args(["--batch", "8"]));
        let rows = metrics(&out);
        let first = &rows[0];
        near(&first["loss"], &want["loss"], 1e-5, &what);
        let wanted: &Map<String, Value> = want["metrics"].as_object().unwrap();
        assert!(!wanted.is_empty());
        wanted.iter().for_each(|(name, x)| near(&first[name], x, 1e-4, &format!("{what} {name}")));
        let steps = losses(&out);
        assert!(steps[7] < steps[0], "{what}: {steps:?}");

        let out = here.join(format!("dealt{i}"));
        good(with(train(&out, strategy, &data, 1)).args(["--batch", "2", "--accum", "4"]));
        if exact {
            let dealt = &metrics(&out)[0];
            near(&dealt["loss"], &first["loss"], 1e-5, &what);
            near(&dealt["grad_norm"], &first["grad_norm"], 1e-5, &what);
        }
    }
}

/// A reference that is not named is the model that the run starts from; one whose numbers the data have is not asked; and what was computed is used again
/// where it fits, and refused where it does not.
#[test]
fn frozen_policies_are_asked_once() {
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path();
    let (data, out) = (records(here, "dpo"), here.join("run"));
    let run = |out: &Path, steps| {
        let mut c = train(out, "dpo", &data, steps);
        c.args(["--batch", "4", "--save-every", "2"]);
        c
    };
    good(&mut run(&out, 2));
    let first = &metrics(&out)[0];
    near(&first["loss"], &json!(2f64.ln()), 1e-5, "its own reference");
    assert_eq!(first["rewards/accuracies"].as_f64().map(|a| a <= 1.0), Some(true));
    let scored = out.join("logps/reference_0.f32");
    let written = fs::metadata(&scored).unwrap().modified().unwrap();
    good(run(&out, 4).arg("--resume"));
    assert_eq!(fs::metadata(&scored).unwrap().modified().unwrap(), written, "scored again");
    let straight = here.join("straight");
    good(&mut run(&straight, 4));
    // The row of step 3 has the schedule of the longer run in both.
    assert!(tensors(&straight, 4, "model.safetensors") == tensors(&out, 4, "model.safetensors"));

    // The same numbers as keys of the data.
    let sums = |reference: &[u8]| -> Vec<[f64; 2]> {
        let mut rest = reference;
        let mut number = || {
            let (own, others) = rest.split_first_chunk::<4>().unwrap();
            rest = others;
            *own
        };
        (0..RECORDS)
            .map(|i| {
                let n = u32::from_le_bytes(number()) as usize;
                let all: Vec<f64> = (0..n).map(|_| f64::from(f32::from_le_bytes(number()))).collect();
                let chosen = list(&record("dpo", i), "chosen").len();
                [all[..chosen].iter().sum(), all[chosen..].iter().sum()]
            })
            .collect()
    };
    let keyed = here.join("keyed.jsonl");
    let line = |(i, [w, l]): (usize, [f64; 2])| {
        let mut r = record("dpo", i);
        (r["ref_chosen_logps"], r["ref_rejected_logps"]) = (json!(w), json!(l));
        r.to_string()
    };
    let lines: Vec<String> = sums(&fs::read(&scored).unwrap()).into_iter().enumerate().map(line).collect();
    fs::write(&keyed, lines.join("\n")).unwrap();
    let by_keys = here.join("by-keys");
    good(train(&by_keys, "dpo", &keyed, 4).args(["--batch", "4"]));
    assert!(!by_keys.join("logps").exists());
    losses(&by_keys).iter().zip(losses(&out)).for_each(|(a, b)| near(&json!(a), &json!(b), 1e-5, "by keys"));

    let reference = other(&here.join("reference"), 1.0);
    let line = refused(train(&here.join("no"), "dpo", &keyed, 4).arg("--reference").arg(&reference));
    assert!(line.contains("the data have ref_chosen_logps and ref_rejected_logps already"), "{line}");
    // Another model, and a byte that is not what was written.
    let again = here.join("again");
    fs::create_dir_all(&again).unwrap();
    fs::create_dir(again.join("logps")).unwrap();
    let copy =
        |name: &str| _ = fs::copy(out.join("logps").join(name), again.join("logps").join(name)).unwrap();
    ["reference_0.f32", "reference_0.json"].iter().for_each(|n| copy(n));
    let (line, _) = fails(run(&again, 2).arg("--reference").arg(&reference));
    assert!(line.contains("is of another model; remove the folder `logps`"), "{line}");
    let mut bytes = fs::read(&scored).unwrap();
    bytes[9] ^= 1;
    fs::write(again.join("logps/reference_0.f32"), bytes).unwrap();
    let (line, _) = fails(&mut run(&again, 2));
    assert!(line.contains("is damaged"), "{line}");
    // Not finished, as a kill leaves it: it goes on from what its note says.
    let note = fs::read_to_string(out.join("logps/reference_0.json")).unwrap();
    let mut note: Value = serde_json::from_str(&note).unwrap();
    (note["records"], note["bytes"], note["sha256"]) = (json!(0), json!(0), Value::Null);
    fs::write(again.join("logps/reference_0.json"), note.to_string()).unwrap();
    good(&mut run(&again, 2));
    assert!(fs::read(again.join("logps/reference_0.f32")).unwrap() == fs::read(&scored).unwrap());
}

#[test]
fn what_a_strategy_has_not_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path();
    let out = here.join("out");
    for (strategy, data, flags, says) in [
        ("dpo", "dpo", &["--set", "betta=0.1"][..], "set: strategy dpo: unknown field `betta`"),
        ("dpo", "dpo", &["--set", "beta"], "KEY=VALUE"),
        ("cpo", "dpo", &["--reference", "x"], "reference: strategy cpo reads none with these options"),
        ("grpo", "grpo", &["--reference", "x"], "reference: strategy grpo reads none"),
        ("dpo", "dpo", &["--old", "x"], "old: strategy dpo has none"),
        ("dpo", "dpo", &["--stride", "4"], "stride: strategy dpo has none"),
        ("kto", "dpo", &[], "has no key `sequence`"),
        ("grpo", "grpo", &["--set", "old_model=true"], "give --old DIR, or `old_logps` in the data"),
    ] {
        let line = refused(train(&out, strategy, &records(here, data), 1).args(flags));
        assert!(line.contains(says), "{flags:?}: {line}");
        assert!(!out.exists(), "{flags:?}");
    }
    // A pair is two sequences of 16 tokens, and the reference is the model itself.
    let mut dry = train(&out, "dpo", &records(here, "dpo"), 1);
    let dry = dry.args(["--batch", "4", "--dry-run", "--json"]).output().unwrap();
    let dry: Value = serde_json::from_slice(&dry.stdout).unwrap();
    assert_eq!(dry["tokens_per_step"], 128, "{dry}");
    assert!(dry["frozen"]["reference"].as_u64().unwrap() > 4 * dry["parameters"].as_u64().unwrap(), "{dry}");
    let uneven = here.join("uneven.jsonl");
    let mut second = record("grpo", 1);
    for key in ["responses", "masks", "rewards"] {
        second[key].as_array_mut().unwrap().pop();
    }
    fs::write(&uneven, format!("{}\n{second}\n", record("grpo", 0))).unwrap();
    let line = refused(&mut train(&out, "grpo", &uneven, 1));
    assert!(line.contains("record 1: 2 answers, the first group has 3"), "{line}");
    // A conversation may be shorter than a sequence, also where there is no other.
    let one = here.join("one.jsonl");
    fs::write(&one, format!("{}\n", record("sft", 0))).unwrap();
    let short = train(&here.join("short"), "sft", &one, 2).output().unwrap();
    assert!(short.status.success(), "{}", String::from_utf8_lossy(&short.stderr));
}
