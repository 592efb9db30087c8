//! Narrow weights as users meet them: what `astrai verify` says of rounded models, `--quantize` on what runs a model, and what is refused.

use crate::cases::case;
use crate::lora::logits;
use crate::train::fixture::{good, program, shared, stderr};
use serde_json::Value;
use std::path::Path;

/// The greatest difference, of the greatest magnitude.
fn off(a: &[f32], b: &[f32]) -> f32 {
    let top = b.iter().fold(0f32, |m, x| m.max(x.abs()));
    a.iter().zip(b).fold(0f32, |m, (a, b)| m.max((a - b).abs())) / top
}

/// A checked folder's rows.
fn verified(folder: &Path, flags: &[&str]) -> Vec<(String, String)> {
    let out = program().arg("verify").arg(folder).arg("--json").args(flags).output().unwrap();
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    let text = |v: &Value| v.as_str().unwrap_or_default().to_string();
    report["checks"].as_array().unwrap().iter().map(|c| (text(&c["check"]), text(&c["verdict"]))).collect()
}

#[test]
fn rounded_weights_and_pages_are_the_references() {
    let Some(folder) = case("rtn") else { return };
    for flags in [&[][..], &["--device", "interpreter"], &["--simd", "plain"]] {
        let rows = verified(&folder, flags);
        assert_eq!(rows.len(), 10, "{rows:?}");
        assert!(rows.iter().all(|(_, verdict)| verdict == "ok"), "{flags:?}: {rows:?}");
    }
}

/// Of other architectures, by llama.cpp's converter, beside transformers.
#[test]
fn gguf_files_of_many_families_are_models() {
    let folder = case("gguf_families").expect("a case of the repository");
    for flags in [&[][..], &["--device", "interpreter"], &["--simd", "plain"]] {
        let rows = verified(&folder, flags);
        assert!(rows.len() >= 28, "{rows:?}");
        assert!(rows.iter().all(|(_, verdict)| verdict == "ok"), "{flags:?}: {rows:?}");
    }
    // What ends a turn is known by its text; Phi-3's tokens take the space behind them.
    let scratch = tempfile::tempdir().unwrap();
    for (name, takes) in [("phi3", true), ("gemma2", false)] {
        let made = scratch.path().join(name);
        let file = folder.join(format!("{name}.gguf"));
        good(program().arg("import").arg(&file).args(["--dtype", "f32", "--out"]).arg(&made));
        let read =
            |of: &str| -> Value { serde_json::from_slice(&std::fs::read(made.join(of)).unwrap()).unwrap() };
        assert_eq!(read("config.json")["eos_token_id"], serde_json::json!([2, 94, 95]), "{name}");
        let tokenizer = read("tokenizer.json");
        let end = tokenizer["added_tokens"].as_array().unwrap().iter().find(|t| t["id"] == 94).unwrap();
        assert_eq!((&end["content"], &end["rstrip"]), (&"<|end|>".into(), &takes.into()), "{name}");
    }
}

/// Files of llama.cpp's, their tokenizer among what is checked; a model directory made of one answers as the file does.
#[test]
fn gguf_files_are_models() {
    let Some(folder) = case("gguf") else { return };
    for flags in [&[][..], &["--device", "interpreter"]] {
        let rows = verified(&folder, flags);
        assert_eq!(rows.len(), 34, "{rows:?}");
        assert!(rows.iter().all(|(_, verdict)| verdict == "ok"), "{flags:?}: {rows:?}");
    }
    let scratch = tempfile::tempdir().unwrap();
    let (file, made) = (folder.join("tiny-b-mixed.gguf"), scratch.path().join("made"));
    good(program().arg("import").arg(&file).args(["--dtype", "f32", "--out"]).arg(&made));
    // Codes stay codes, and what they are multiplied by is rounded where the processor multiplies integers.
    let plain = logits(&made, &[], scratch.path());
    assert!(off(&logits(&file, &["--simd", "plain"], scratch.path()), &plain) < 1e-4);
    assert!(off(&logits(&file, &[], scratch.path()), &plain) < 0.1);
    let text = |model: &Path| {
        let flags = [
            "--prompt",
            "the quick",
            "--chat",
            "--max-tokens",
            "5",
            "--temperature",
            "0",
            "--json",
            "--simd",
            "plain",
        ];
        let out = program().arg("generate").arg(model).args(flags).output().unwrap();
        serde_json::from_slice::<Value>(&out.stdout).unwrap_or_else(|_| panic!("{}", stderr(&out)))["text"]
            .clone()
    };
    assert_eq!(text(&file), text(&made));
}

/// Logits by kernels of every kind and by the interpreter; those of eight bits are near the model's own.
#[test]
fn narrow_weights_give_the_same_logits_everywhere() {
    let model = case("llama").expect("a case of the repository");
    let scratch = tempfile::tempdir().unwrap();
    let plain = logits(&model, &[], scratch.path());
    // Where inputs are rounded, one that lies between two integers may become either.
    for (narrow, near, most) in [
        ("int8:activations=none", 0.05, 1e-5),
        ("int4:activations=none", 1.0, 1e-5),
        ("int4:group=64:asymmetric:head=none:activations=none", 1.0, 1e-5),
        ("fp8", 0.2, 1e-5),
        ("int8:activations=int8", 0.05, 5e-3),
        ("int4:asymmetric:activations=int8", 1.0, 5e-3),
    ] {
        let kernels = logits(&model, &["--quantize", narrow], scratch.path());
        assert!(off(&kernels, &plain) < near && kernels != plain, "{narrow}: {}", off(&kernels, &plain));
        for other in [["--device", "interpreter"], ["--simd", "plain"]] {
            let same = logits(&model, &["--quantize", narrow, other[0], other[1]], scratch.path());
            assert!(off(&kernels, &same) < most, "{narrow} {other:?}: {}", off(&kernels, &same));
        }
    }
    // Rows of experts are rounded as those of dots: gate and up together, and down.
    let shape = Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/shapes/qwen3-moe-tiny.json");
    let flags = ["--for", "decode", "--quantize", "int8:activations=int8", "--dump-after", "quantise"];
    let out = program().arg("compile").arg(shape).args(flags).output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let products = lines.windows(2).filter(|two| two[1].contains("= grouped_dot "));
    assert_eq!(
        products.map(|two| two[0].contains("= fake_quant ")).collect::<Vec<_>>(),
        [true, true],
        "{text}"
    );
}

/// Answers over pages of codes, prompts in several steps or one, beside others or alone; what the plan says of them.
#[test]
fn pages_of_eight_bits_answer_alike() {
    let scratch = tempfile::tempdir().unwrap();
    let lines: String = (0..6).map(|i| format!("{{\"prompt\": \"the quick {i} brown fox\"}}\n")).collect();
    let questions = scratch.path().join("questions.jsonl");
    std::fs::write(&questions, lines).unwrap();
    let model = shared().join("run/step_000001");
    let texts = |flags: &[&str]| {
        let mut run = program();
        run.arg("generate").arg(&model).arg("--batch").arg(&questions);
        let out = run.args(["--max-tokens", "12", "--temperature", "0"]).args(flags).output().unwrap();
        assert!(out.status.success(), "{}", stderr(&out));
        let lines = String::from_utf8(out.stdout).unwrap();
        lines.lines().map(|l| serde_json::from_str::<Value>(l).unwrap()["text"].clone()).collect::<Vec<_>>()
    };
    for code in ["int8", "fp8_e4m3"] {
        let kept = texts(&["--kv-cache-dtype", code]);
        assert_eq!(kept.len(), 6);
        for more in [&["--speculate", "ngram"][..], &["--max-seqs", "1"], &["--kv-memory", "8KiB"]] {
            assert_eq!(texts(&[&["--kv-dtype", code], more].concat()), kept, "{code} {more:?}");
        }
    }
    let planned = |flags: &[&str]| {
        let mut run = program();
        let model = case("llama").expect("a case of the repository");
        run.args(["compile", "--json", "--for", "decode", "--seq", "64", "--dtype", "bf16"]).arg(model);
        serde_json::from_slice::<Value>(&run.args(flags).output().unwrap().stdout).unwrap()
    };
    let [plain, narrow] = [planned(&[]), planned(&["--kv-cache-dtype", "fp8"])];
    // Two layers of two heads of sixteen numbers: a byte each, and four of a scale.
    assert_eq!((&plain["kv_bytes_per_token"], &narrow["kv_bytes_per_token"]), (&256.into(), &160.into()));
    let mut run = program();
    run.arg("generate").arg(&model).args(["--kv-memory", "1KiB", "--kv-cache-dtype", "fp8", "--prompt", "x"]);
    let line = stderr(&run.output().unwrap());
    assert!(line.contains("of keys and values in fp8") && line.contains("give more --kv-memory"), "{line}");
    assert_eq!((&plain["kv_cache_dtype"], &narrow["kv_cache_dtype"]), (&"bf16".into(), &"fp8".into()));
}

/// Weights that were kept as kernels read them are read again, by whoever stores them alike, until one of the model's files is another.
#[test]
fn weights_are_kept_until_their_files_change() {
    let scratch = tempfile::tempdir().unwrap();
    let (model, cache) = (scratch.path().join("model"), scratch.path().join("cache"));
    std::fs::create_dir(&model).unwrap();
    for entry in std::fs::read_dir(shared().join("run/step_000001")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), model.join(entry.file_name())).unwrap();
    }
    let generate = |flags: &[&str]| {
        let mut run = program();
        run.env("ASTRAI_CACHE", &cache).arg("generate").arg(&model).args(flags);
        run.args(["--prompt", "the quick", "--max-tokens", "24", "--temperature", "0"]).output().unwrap()
    };
    let text = |flags: &[&str]| {
        let out = generate(flags);
        assert!(out.status.success(), "{}", stderr(&out));
        out.stdout
    };
    let files = || -> Vec<_> {
        let all = std::fs::read_dir(cache.join("kernels")).unwrap().map(|entry| entry.unwrap().path());
        all.filter(|path| path.extension().is_some_and(|end| end == "weights")).collect()
    };
    // Weights that mean nothing, in the place of those kept: whoever reads them gives another answer.
    let spoil = |file: &Path| {
        let mut bytes = std::fs::read(file).unwrap();
        let end = bytes.len() - 40;
        bytes[..end].fill(0);
        std::fs::write(file, bytes).unwrap();
    };
    let plain = text(&[]);
    assert!(files().is_empty());
    assert_eq!(text(&["--keep-weights"]), plain);
    let [file] = &files()[..] else { panic!("{:?}", files()) };
    assert_eq!(text(&[]), plain);
    spoil(file);
    assert_ne!(text(&[]), plain);
    // Rounded weights are others; threads and room make no difference.
    let narrow = text(&["--quantize", "int8", "--threads", "1"]);
    assert_eq!(text(&["--quantize", "int8", "--keep-weights"]), narrow);
    assert_eq!(files().len(), 2);
    assert_ne!(text(&["--threads", "1", "--max-model-len", "64"]), plain);
    // The checkpoint is another: what was kept of it is not read, and goes with the next that is kept.
    let weights = model.join("model.safetensors");
    std::fs::create_dir(model.join("beside")).unwrap();
    std::fs::write(model.join("beside/shard.safetensors"), "").unwrap();
    assert_eq!(text(&[]), plain);
    std::fs::remove_dir_all(model.join("beside")).unwrap();
    assert_ne!(text(&[]), plain);
    std::fs::copy(&weights, scratch.path().join("again")).unwrap();
    std::fs::rename(scratch.path().join("again"), &weights).unwrap();
    assert_eq!((text(&[]), text(&["--quantize", "int8"])), (plain.clone(), narrow));
    assert_eq!(text(&["--keep-weights"]), plain);
    assert_eq!(files().len(), 2);
    spoil(file);
    assert_ne!(text(&[]), plain);
    std::fs::write(file, b"short").unwrap();
    assert_eq!(text(&[]), plain);
    let line = stderr(&generate(&["--keep-weights", "--device", "interpreter"]));
    assert!(line.contains("leave --keep-weights out") && line.lines().count() == 1, "{line}");
}

#[test]
fn what_cannot_be_is_said() {
    let model = case("llama").expect("a case of the repository");
    for (args, says) in [
        (&["generate", "--quantize", "int3", "--prompt", "x"][..], "give int8, int4 or fp8"),
        (&["generate", "--quantize", "int4:group=33", "--prompt", "x"], "multiple of 32"),
        (&["generate", "--quantize", "fp8:asymmetric", "--prompt", "x"], "group=N"),
        (
            &["quantize", "--to", "int8:activations=none", "--out", "none"],
            "activations are no part of a file",
        ),
        (&["compile", "--for", "train", "--quantize", "int8"], "leave --quantize out"),
        (&["estimate", "--for", "train", "--quantize", "int8"], "leave --quantize out"),
        (&["compile", "--quantize", "int4:group=128"], "has rows that groups of 128 divide"),
        (&["compile", "--kv-cache-dtype", "int8"], "leave --kv-cache-dtype out"),
        (&["estimate", "--kv-cache-dtype", "int8"], "leave --kv-cache-dtype out"),
        (&["generate", "--kv-cache-dtype", "int4", "--prompt", "x"], "possible values: auto, int8, fp8"),
        (&["compile", "--device", "null", "--mesh", "tp=2", "--quantize", "int8"], "leave --quantize out"),
    ] {
        let out = program().arg(args[0]).arg(&model).args(&args[1..]).output().unwrap();
        assert!(!out.status.success() && stderr(&out).contains(says), "{args:?}: {}", stderr(&out));
    }
    // Nothing reads this family in the form that would be written.
    let scratch = tempfile::tempdir().unwrap();
    let oss = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/gguf_families/gpt-oss.gguf");
    let to = scratch.path().join("oss");
    let out = program().arg("quantize").arg(oss).args(["--to", "int8", "--out"]).arg(&to).output().unwrap();
    assert!(!out.status.success() && stderr(&out).contains("could not be read again"), "{}", stderr(&out));
    assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 0);
}

/// A model is no way from itself; one that is rounded is a little.
#[test]
fn rounded_models_are_held_to_a_reference() {
    let (model, scratch) = (shared().join("run/step_000001"), tempfile::tempdir().unwrap());
    let task = scratch.path().join("texts.jsonl");
    std::fs::write(&task, "{\"text\": \"the quick brown fox jumps over the lazy dog\"}\n".repeat(3)).unwrap();
    let eval = |task: &Path, flags: &[&str]| {
        let mut run = program();
        run.arg("eval").arg(&model).arg("--task").arg(task).arg("--compare").arg(&model).arg("--json");
        run.args(flags).output().unwrap()
    };
    let compared = |flags: &[&str]| serde_json::from_slice::<Value>(&eval(&task, flags).stdout).unwrap();
    let same = compared(&[]);
    assert_eq!((&same["kl_max"], &same["top1_agreement"]), (&0.0.into(), &1.0.into()), "{same}");
    assert_eq!(same["perplexity"], same["reference_perplexity"]);
    for flags in [["--quantize", "int8"], ["--kv-cache-dtype", "fp8"]] {
        let off = compared(&flags);
        let [mean, p95, max] = ["kl_mean", "kl_p95", "kl_max"].map(|name| off[name].as_f64().unwrap());
        assert!(0.0 < mean && mean <= max && p95 <= max && max < 0.1, "{flags:?}: {off}");
    }
    let quantize = |out: &str| {
        let mut run = program();
        run.arg("quantize").arg(&model).args(["--to", "int4", "--calibrate"]).arg(&task);
        run.arg("--out").arg(scratch.path().join(out)).output().unwrap()
    };
    let made = quantize("calibrated");
    assert!(made.status.success(), "{}", stderr(&made));
    let mut run = program();
    run.arg("eval").arg(scratch.path().join("calibrated")).arg("--task").arg(&task).arg("--json");
    let off: Value =
        serde_json::from_slice(&run.arg("--compare").arg(&model).output().unwrap().stdout).unwrap();
    assert!((0.0..0.5).contains(&off["kl_mean"].as_f64().unwrap()), "{off}");
    for (text, says) in [
        ("", "asks nothing"),
        ("{\"text\": 3}\n", "line 1"),
        ("{\"text\": \"\"}\n", "`text` is empty"),
        ("{\"prompt\": \"a\", \"choices\": [\"b\", \"c\"], \"gold\": 0}\n", "--calibrate takes texts alone"),
    ] {
        std::fs::write(&task, text).unwrap();
        let line = stderr(&quantize("refused"));
        assert!(line.contains(says) && line.lines().count() == 1, "{line}");
        assert!(!scratch.path().join("refused").exists());
    }
    std::fs::write(&task, "{\"prompt\": \"a\", \"choices\": [\"b\", \"c\"], \"gold\": 0}\n").unwrap();
    assert!(stderr(&eval(&task, &[])).contains("line 1: --compare takes texts alone"));
}
