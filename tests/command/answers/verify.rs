//! `astrai verify`: whole, in f32, for every family; and its greedy part, tokens of the engine over its pages, in both types and
//! with the interpreter in the kernels' place.

use crate::answers::fixture::{program, text, utf8};
use crate::cases::{DENSE, EXPERTS, case};
use serde_json::Value;

const FAMILIES: [&str; 8] =
    ["llama", "qwen3", "astrai_gqa", "llama3_rope", "qwen2", "mistral", "astrai_gqa_older", "gpt_oss"];

/// Logits, loss, every gradient, greedy tokens and the curve of a training run.
#[test]
fn every_case_is_verified_whole() {
    for name in DENSE.iter().chain(&EXPERTS) {
        let Some(case) = case(name) else { continue };
        let out = program(&["verify", text(&case), "--json"]).output().unwrap();
        assert!(out.status.success(), "{name}: {} {}", utf8(&out.stdout), utf8(&out.stderr));
        let report: Value = serde_json::from_slice(&out.stdout).unwrap();
        assert_eq!(report["checks"].as_array().unwrap().len(), 6, "{name}: {report}");
    }
}

#[test]
fn the_engine_gives_the_references_tokens() {
    for name in FAMILIES {
        let Some(case) = case(name) else { continue };
        for flags in [["--dtype", "f32"], ["--dtype", "bf16"], ["--device", "interpreter"]] {
            let verify = ["verify", text(&case), "--only", "greedy", "--json"];
            let out = program(&[&verify[..], &flags].concat()).output().unwrap();
            assert!(out.status.success(), "{name} {flags:?}: {} {}", utf8(&out.stdout), utf8(&out.stderr));
            let report: Value = serde_json::from_slice(&out.stdout).unwrap();
            assert_eq!(report["checks"][0]["verdict"], "ok", "{name} {flags:?}");
        }
    }
}

#[test]
fn folders_of_texts_are_verified() {
    for name in ["tools", "structured"] {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/golden").join(name);
        if !folder.exists() {
            println!("skipped: no ../shared/golden/{name}");
            continue;
        }
        let out = program(&["verify", text(&folder), "--json"]).output().unwrap();
        assert!(out.status.success(), "{name}: {} {}", utf8(&out.stdout), utf8(&out.stderr));
        let report: Value = serde_json::from_slice(&out.stdout).unwrap();
        assert!(!report["checks"].as_array().unwrap().is_empty() && report["ok"] == true, "{report}");
    }
}
