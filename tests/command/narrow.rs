//! Narrow weights as users meet them: what `astrai verify` says of rounded models, `--quantize` on what runs a model, and what is refused.

use crate::cases::case;
use crate::train::fixture::{good, program, refused};
use serde_json::Value;
use std::path::Path;

/// A checked folder's rows.
fn verified(folder: &Path, flags: &[&str]) -> Vec<(String, String)> {
    let out = program().arg("verify").arg(folder).arg("--json").args(flags).output().unwrap();
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    let text = |v: &Value| v.as_str().unwrap_or_default().to_string();
    report["checks"].as_array().unwrap().iter().map(|c| (text(&c["check"]), text(&c["verdict"]))).collect()
}

#[test]
fn rounded_weights_are_the_references() {
    let Some(folder) = case("rtn") else { return };
    for flags in [&[][..], &["--device", "interpreter"], &["--simd", "plain"]] {
        let rows = verified(&folder, flags);
        let weights: Vec<_> = rows.iter().filter(|(name, _)| !name.starts_with("kv.")).collect();
        assert_eq!(weights.len(), 6, "{rows:?}");
        assert!(weights.iter().all(|(_, verdict)| verdict == "ok"), "{flags:?}: {rows:?}");
    }
}

/// The greedy text of a model, by the engine over pages: the same by kernels and by the interpreter.
#[test]
fn narrow_weights_answer_alike_everywhere() {
    let model = case("llama").expect("a case of the repository");
    let text = |more: &[&str]| {
        let mut c = program();
        let flags = ["--prompt", "The", "--max-tokens", "6", "--temperature", "0"];
        good(c.arg("generate").arg(&model).args(flags).args(more)).stdout
    };
    for narrow in ["int8", "int4", "int4:group=64:asymmetric:head=none", "fp8"] {
        let kernels = text(&["--quantize", narrow]);
        assert!(!kernels.is_empty());
        assert_eq!(kernels, text(&["--quantize", narrow, "--device", "interpreter"]), "{narrow}");
        assert_eq!(kernels, text(&["--quantize", narrow, "--simd", "plain"]), "{narrow}");
    }
}

#[test]
fn what_cannot_be_is_one_line() {
    let model = case("llama").expect("a case of the repository");
    for (args, says) in [
        (&["generate", "--quantize", "int3", "--prompt", "x"][..], "give int8, int4 or fp8"),
        (&["generate", "--quantize", "int4:group=33", "--prompt", "x"], "multiple of 32"),
        (&["generate", "--quantize", "fp8:asymmetric", "--prompt", "x"], "group=N"),
        (&["bench", "train", "--quantize", "int8"], "leave it out"),
    ] {
        let mut c = program();
        c.arg(args[0]);
        match args[0] {
            "bench" => c.args(&args[1..]).arg("--shape").arg(model.join("config.json")),
            _ => c.arg(&model).args(&args[1..]),
        };
        let line = refused(&mut c);
        assert!(line.contains(says), "{args:?}: {line}");
    }
}
