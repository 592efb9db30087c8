//! The text of a tiny llama after every stage, and its plan, as files. `BLESS=1` writes them anew.

use crate::stages::families::{FAMILIES, config, machine, program};
use astrai_builders::build;
use astrai_ir::DType;
use astrai_runtime::{Dump, Options, compile};
use std::path::Path;

#[test]
fn a_tiny_llama_after_every_stage() {
    let text = FAMILIES.iter().find(|(n, _)| *n == "llama").unwrap().1;
    let graph = build(&config(text), &program(64)).unwrap();
    let options = Options { storage: DType::BF16, dump: Dump::All, ..Options::default() };
    let program = compile(&graph, machine().backend(), &options).unwrap();
    let mut before = String::new();
    for stage in &program.report.stages {
        let Some(g) = &stage.graph else { continue };
        let after = g.to_string();
        // A stage that changes nothing needs no file of its own.
        let shown = if after == before { "unchanged\n".to_string() } else { after.clone() };
        before = after;
        same(&format!("llama_{}.txt", stage.name), &shown);
    }
    same("llama_plan.txt", &program.plan.to_string());
}

fn same(file: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots").join(file);
    if std::env::var_os("BLESS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        return;
    }
    let want = std::fs::read_to_string(&path).unwrap_or_default();
    if let Some((i, (a, b))) = text.lines().zip(want.lines()).enumerate().find(|(_, (a, b))| a != b) {
        panic!("{file} line {}: got\n{a}\nwant\n{b}\nBLESS=1 accepts what is made now", i + 1);
    }
    assert_eq!(text.lines().count(), want.lines().count(), "{file}; BLESS=1 accepts what is made now");
}
