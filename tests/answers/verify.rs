//! `astrai verify --only greedy`: for every family the engine gives the reference's tokens over its pages, in both types, and
//! with the interpreter in the kernels' place.

use crate::fixture::{program, text, utf8};
use serde_json::Value;
use std::path::Path;

const FAMILIES: [&str; 8] =
    ["llama", "qwen3", "astrai_gqa", "llama3_rope", "qwen2", "mistral", "astrai_gqa_older", "gpt_oss"];

#[test]
fn the_engine_gives_the_references_tokens() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for name in FAMILIES {
        let places = [root.join("tests/golden"), root.join("../shared/golden")];
        let Some(case) = places.into_iter().map(|p| p.join(name)).find(|p| p.is_dir()) else {
            println!("skipped: golden case {name} is not here");
            continue;
        };
        for flags in [["--dtype", "f32"], ["--dtype", "bf16"], ["--device", "interpreter"]] {
            let verify = ["verify", text(&case), "--only", "greedy", "--json"];
            let out = program(&[&verify[..], &flags].concat()).output().unwrap();
            assert!(out.status.success(), "{name} {flags:?}: {} {}", utf8(&out.stdout), utf8(&out.stderr));
            let report: Value = serde_json::from_slice(&out.stdout).unwrap();
            assert_eq!(report["checks"][0]["verdict"], "ok", "{name} {flags:?}");
        }
    }
}
