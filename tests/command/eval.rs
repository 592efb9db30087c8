//! `astrai eval`: its numbers are those of `astrai run` and `astrai generate` on the same tokens, and those of `--eval-task`.

use crate::train::fixture::{fails, good, metrics, program, shared, small};
use astrai_ir::DType;
use astrai_runtime::weights::{Checkpoint, write};
use astrai_serve::tokenizer::Tokenizer;
use astrai_train::evaluation::{Encoder, Scored};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn model() -> PathBuf {
    shared().join("run/step_000001")
}

fn put(dir: &Path, name: &str, lines: &[Value]) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, lines.iter().map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    path
}

fn eval(tasks: &[&Path]) -> Command {
    let mut c = program();
    c.arg("eval").arg(model()).arg("--json");
    for task in tasks {
        c.arg("--task").arg(task);
    }
    c
}

fn object(c: &mut Command) -> Value {
    let out = c.output().unwrap();
    assert!(out.status.success(), "{c:?}: {}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).unwrap()
}

/// What `astrai run` gives for one sequence.
fn run(dir: &Path, ids: &[u32], want: &str) -> Vec<f32> {
    let (inputs, outputs) = (dir.join("in.safetensors"), dir.join("out.safetensors"));
    let bytes: Vec<u8> = ids.iter().flat_map(|&id| i64::from(id).to_le_bytes()).collect();
    write(&inputs, [("input_ids", DType::I64, &[1, ids.len()][..], bytes.as_slice())], &Default::default())
        .unwrap();
    let mut c = program();
    c.arg("run").arg(model()).arg("--inputs").arg(&inputs).arg("--outputs").arg(&outputs);
    good(c.args(["--want", want]));
    let file = Checkpoint::open(&outputs).unwrap();
    let bytes = file.get(want).unwrap().bytes().to_vec();
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// The log-likelihood of a scored sequence by its logits, in float64.
fn by_hand(dir: &Path, Scored { ids, from }: &Scored) -> f64 {
    let logits = run(dir, ids, "logits");
    let vocabulary = logits.len() / ids.len();
    let of = |t: usize| {
        let row: Vec<f64> =
            logits[(t - 1) * vocabulary..][..vocabulary].iter().map(|&x| f64::from(x)).collect();
        row[ids[t] as usize] - row.iter().map(|x| x.exp()).sum::<f64>().ln()
    };
    (*from..ids.len()).map(of).sum()
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-5 * b.abs().max(1.0)
}

#[test]
fn numbers_are_those_of_run_and_generate() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = Tokenizer::open(&model()).unwrap();
    let encoder = Encoder::new(&tokenizer, 64).unwrap();
    let (short, long) =
        ("A tokenizer is trained.", "Files are found and read as a stream, line by line. ".repeat(4));
    let texts = put(dir.path(), "texts.jsonl", &[json!({"text": short}), json!({"text": long})]);
    let shown = ["one", "seven and a half", "two"];
    let choice = |gold: usize| json!({"prompt": "What is read is a number or a text of numbers, say", "choices": shown, "gold": gold});
    let choices = put(dir.path(), "choices.jsonl", &[choice(0), choice(1), choice(2)]);
    let mut said = program();
    said.arg("generate").arg(model()).args([
        "--prompt",
        "Files",
        "--max-tokens",
        "6",
        "--temperature",
        "0",
        "--json",
    ]);
    let said = object(&mut said)["text"].as_str().unwrap().to_string();
    let answer = |answer: &str| json!({"prompt": "Files", "answer": answer, "max_tokens": 6});
    let answers = put(dir.path(), "answers.jsonl", &[answer(&said), answer("what it never says")]);
    let samples = dir.path().join("samples.jsonl");
    let made = object(eval(&[&texts, &choices, &answers]).arg("--samples").arg(&samples));
    let samples: Vec<Value> = fs::read_to_string(&samples)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(samples.len(), 7);

    let [one] = encoder.text(short).unwrap().try_into().unwrap_or_else(|w| panic!("{w:?}"));
    let loss = f64::from(run(dir.path(), &one.ids, "loss")[0]);
    let tokens = one.tokens() as f64;
    assert!(close(samples[0]["loglikelihood"].as_f64().unwrap(), -loss * tokens), "{loss} {}", samples[0]);
    let windows = encoder.text(&long).unwrap();
    assert!(windows.len() > 1);
    let sum: f64 = windows.iter().map(|w| by_hand(dir.path(), w)).sum();
    assert!(close(samples[1]["loglikelihood"].as_f64().unwrap(), sum), "{sum} {}", samples[1]);
    let bits = (loss * tokens - sum) / std::f64::consts::LN_2 / (short.len() + long.len()) as f64;
    assert!(close(made["tasks"]["texts"]["bits_per_byte"].as_f64().unwrap(), bits), "{bits} {made}");

    let (scored, _) = encoder
        .choices("What is read is a number or a text of numbers, say", " ", &shown.map(String::from))
        .unwrap();
    let want: Vec<f64> = scored.iter().map(|s| by_hand(dir.path(), s)).collect();
    for sample in &samples[2..5] {
        let got = sample["loglikelihoods"].as_array().unwrap();
        assert!(got.iter().zip(&want).all(|(a, b)| close(a.as_f64().unwrap(), *b)), "{want:?} {sample}");
    }
    // One of three answers is the likeliest, whichever.
    for (metric, value) in
        [("acc", 1.0 / 3.0), ("acc_norm", 1.0 / 3.0), ("acc_stderr", 1.0 / 3.0), ("lines", 3.0)]
    {
        assert!(close(made["tasks"]["choices"][metric].as_f64().unwrap(), value), "{metric} {made}");
    }
    assert_eq!(made["tasks"]["answers"]["exact_match"], 0.5, "{said:?} {}", samples[5]);
    let one = object(eval(&[&choices]).args(["--limit", "1", "--max-seqs", "1"]));
    assert_eq!(
        (&one["tasks"]["choices"]["lines"], &one["tasks"]["choices"]["acc_stderr"]),
        (&json!(1), &Value::Null)
    );
    // 256 tokens are more than the model's 64: an answer has what its prompt leaves, at least half.
    let asks = |prompt: &str| json!({"prompt": prompt, "regex": "^"});
    let open = put(dir.path(), "open.jsonl", &[asks("Files"), asks(&"Files are found. ".repeat(20))]);
    assert_eq!(object(&mut eval(&[&open]))["tasks"]["open"]["lines"], 2);
}

#[test]
fn a_run_scores_its_tasks_at_each_validation() {
    let dir = tempfile::tempdir().unwrap();
    let choice = json!({"prompt": "A row of", "choices": ["ids", "windows of a row"], "gold": 1});
    let both = put(dir.path(), "both.jsonl", &[json!({"text": "Rows of ids."}), choice]);
    let out = dir.path().join("out");
    let mut c = small(&out);
    c.args(["--steps", "4", "--eval-every", "2", "--eval-task"]).arg(&both);
    c.arg("--tokenizer").arg(shared().join("run/tokenizer"));
    let said = good(&mut c);
    assert!(said.contains("eval/both/acc "), "{said}");
    let rows: Vec<Value> = metrics(&out).into_iter().filter(|row| row.get("val_loss").is_some()).collect();
    assert_eq!(rows.len(), 2);
    let mut c = program();
    let made = object(c.arg("eval").arg(out.join("step_000004")).arg("--json").arg("--task").arg(&both));
    for metric in ["perplexity", "bits_per_byte", "acc", "acc_norm"] {
        let (during, after) = (&rows[1][format!("eval/both/{metric}")], &made["tasks"]["both"][metric]);
        assert!(close(during.as_f64().unwrap(), after.as_f64().unwrap()), "{metric}: {during} {after}");
    }
    let asks = put(dir.path(), "asks.jsonl", &[json!({"prompt": "x", "answer": "y"})]);
    let with = |task: &Path, more: &[&str]| {
        let mut c = small(&dir.path().join("other"));
        c.args(["--steps", "1"]).args(more).arg("--eval-task").arg(task);
        fails(&mut c).0
    };
    let tokenizer = shared().join("run/tokenizer");
    let given = ["--eval-every", "1", "--tokenizer", tokenizer.to_str().unwrap()];
    assert!(with(&asks, &given).contains("asks.jsonl: line 1: a generated answer needs"));
    assert!(with(&both, &["--eval-every", "1"]).contains("no tokenizer"));
    assert!(with(&both, &[]).contains("no validations"));
    assert!(with(&dir.path().join("absent"), &given).contains("absent"));
}

#[test]
fn what_is_wrong_is_told_before_the_model_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let bad = put(dir.path(), "bad.jsonl", &[json!({"text": "x"}), json!({"prompt": "x"})]);
    let text = put(dir.path(), "text.jsonl", &[json!({"text": "x"})]);
    let mut absent = program();
    absent.args(["eval", "no-such-model", "--task"]).arg(&bad);
    assert!(fails(&mut absent).0.contains("bad.jsonl: line 2: asks nothing"));
    assert!(fails(&mut eval(&[&text, &text])).0.contains("of the same name as another"));
    let before = std::fs::read(&text).unwrap();
    assert!(fails(eval(&[&text]).arg("--samples").arg(&text)).0.contains("name another file"));
    assert!(std::fs::read(&text).unwrap() == before);
    let long = put(
        dir.path(),
        "long.jsonl",
        &[json!({"prompt": "x", "choices": ["y", "y ".repeat(90)], "gold": 0})],
    );
    assert!(fails(&mut eval(&[&long])).0.contains("long.jsonl: line 1: a choice of"));
    let chat = put(
        dir.path(),
        "chat.jsonl",
        &[json!({"messages": [{"role": "user", "content": "x"}], "answer": "y"})],
    );
    assert!(fails(&mut eval(&[&chat])).0.contains("no chat template"));
}
