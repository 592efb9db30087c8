//! The examples of `docs/extending.md`, an operator and a model family, as they stand there: put into a copy of the sources, two files
//! and two lines, compiled and tried.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Uses of the operator: its meaning, its gradient, what it is made of, its form as JSON, what it refuses.
const OPERATOR: &str = r#"//! The operator of the page.
use astrai_ir::ops::{Clamp, Op};
use astrai_ir::{DType, Dim, Graph, Real, Sizes, Tensor, eval, gradient, json, text};
use std::collections::HashMap;

fn clamp(low: f64, high: f64) -> Clamp {
    Clamp { low: Real(low), high: Real(high) }
}

fn run(g: &Graph) -> Vec<Vec<f64>> {
    let x = Tensor::float(DType::F32, &[5], vec![-2.0, -0.5, 0.25, 0.75, 3.0]);
    let leaves = HashMap::from([("x".to_string(), x)]);
    let outputs = eval(g, &leaves, &Sizes::new(), Default::default()).unwrap();
    outputs.iter().map(|(_, t)| t.reals().to_vec()).collect()
}

#[test]
fn the_operator_is_whole() {
    let mut g = Graph::new(vec![]);
    let x = g.input("x", DType::F32, vec![Dim::from(5)]).unwrap();
    let y = g.push(clamp(-1.0, 0.5), &[x]).unwrap();
    g.set_output("y", y).unwrap();
    let parts = Op::from(clamp(-1.0, 0.5)).decompose(&mut g, &[x]).unwrap().unwrap();
    g.set_output("parts", parts[0]).unwrap();
    let one = g.fill(y, 1.0).unwrap();
    let d = gradient(&mut g, &[(y, one)], &[x]).unwrap();
    g.set_output("d", d[0].unwrap()).unwrap();
    let got = run(&g);
    assert_eq!(got[0], [-1.0, -0.5, 0.25, 0.5, 0.5]);
    assert_eq!(got[1], got[0]);
    assert_eq!(got[2], [0.0, 1.0, 1.0, 0.0, 0.0]);
    assert_eq!(run(&json::from_json(&json::to_json(&g)).unwrap()), got);
    assert_eq!(text::head(&g, g.node(y)), "clamp low=-1.0 high=0.5");
    assert!(g.push(clamp(1.0, 0.0), &[x]).unwrap_err().message.contains("bounds"));
}
"#;

/// Uses of the family: found by its names, its parameters, its graph, and what it saves.
const FAMILY: &str = r##"//! The family of the page.
use astrai_builders::{ModelConfig, Program, build};

#[test]
fn the_family_is_whole() {
    let text = r#"{"architectures": ["MarbleForCausalLM"], "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64, NORM}"#;
    let read = |norm: &str| {
        let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("marble.json");
        std::fs::write(&path, text.replace("NORM", norm)).unwrap();
        let reading = ModelConfig::read(&path).unwrap();
        assert!(reading.warnings.is_empty(), "{:?}", reading.warnings);
        reading.config
    };
    let (plain, normed) = (read("\"norm_heads\": false"), read("\"norm_heads\": true"));
    assert_eq!(normed.model_type, "marble");
    assert_eq!(normed.parameter_count(), plain.parameter_count() + 2 * 2 * 8, "a norm of 8 for q and k in 2 layers");
    assert_eq!(normed.save()["norm_heads"], true);
    let saved = ModelConfig::parse(&normed.save().to_string(), "saved").unwrap();
    assert!(saved.warnings.is_empty() && saved.config == normed, "{:?}", saved.warnings);
    let norms = |c| build(c, &Program::full(1, 8)).unwrap().blocks()[0].graph.to_string().matches("= rms_norm").count();
    assert_eq!(norms(&normed), norms(&plain) + 2);
    assert!(astrai_builders::registry::known().contains("marble"));
}
"##;

/// Code of the page by what stands behind its `rust`: a path, or `line of` one.
fn examples(page: &str) -> Vec<(&str, &str)> {
    let mut found = Vec::new();
    for block in page.split("\n```rust ").skip(1) {
        let (what, rest) = block.split_once('\n').unwrap();
        let code = rest.find("\n```").expect("the block ends");
        found.push((what, &rest[..=code]));
    }
    found
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(|e| e.unwrap()) {
        let (path, to) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() { copy(&path, &to) } else { fs::write(&to, fs::read(&path).unwrap()).unwrap() }
    }
}

/// The manifest of a workspace of the two crates that are extended, everything else as in the real one.
fn manifest(root: &Path) -> String {
    let text = fs::read_to_string(root.join("Cargo.toml")).unwrap();
    let (workspace, _) = text.split_once("[package]").unwrap();
    let lines = workspace.lines().map(|line| match line.split_once(" = [") {
        Some((key @ ("members" | "default-members"), _)) => format!("{key} = [\"ir\", \"builders\"]\n"),
        _ => format!("{line}\n"),
    });
    lines.collect()
}

/// Adds the line to the table, behind its last entry.
fn add_line(path: &Path, line: &str) {
    let text = fs::read_to_string(path).unwrap();
    let end = text.rfind(",\n}").expect("a table") + 2;
    fs::write(path, format!("{}{line}{}", &text[..end], &text[end..])).unwrap();
}

#[test]
fn the_pages_examples_work_as_they_stand() {
    if !crate::emulated::checks_everything() {
        println!(
            "skipped: the examples of docs/extending.md are compiled in continuous integration, CI=true"
        );
        return;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("docs/extending.md")).unwrap();
    let work = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("extend");
    for part in ["files", "ir", "builders"] {
        let _absent = fs::remove_dir_all(work.join(part));
        copy(&root.join(part), &work.join(part));
    }
    fs::write(work.join("Cargo.toml"), manifest(root)).unwrap();
    fs::copy(root.join("Cargo.lock"), work.join("Cargo.lock")).unwrap();
    let all = examples(&page);
    let told: Vec<&str> = all.iter().map(|(what, _)| *what).collect();
    assert_eq!(
        told,
        [
            "builders/src/families/marble.rs",
            "line of builders/src/families/mod.rs",
            "ir/src/ops/clamp.rs",
            "line of ir/src/ops.rs"
        ]
    );
    for (what, code) in all {
        match what.strip_prefix("line of ") {
            Some(table) => add_line(&work.join(table), code),
            None => fs::write(work.join(what), code).unwrap(),
        }
    }
    fs::write(work.join("ir/tests/example.rs"), OPERATOR).unwrap();
    fs::write(work.join("builders/tests/example.rs"), FAMILY).unwrap();
    // A folder of its own for what is built: the lock of the other one may be held by whoever runs this test.
    let out = Command::new(env!("CARGO"))
        .args(["test", "--offline", "-p", "astrai-ir", "-p", "astrai-builders", "--test", "example"])
        .args(["--config", "profile.dev.opt-level=0", "--config", "profile.dev.package.\"*\".opt-level=0"])
        .current_dir(&work)
        .env("CARGO_TARGET_DIR", work.join("target"))
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .output()
        .unwrap();
    let heard = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{heard}");
    for test in ["the_operator_is_whole ... ok", "the_family_is_whole ... ok"] {
        assert!(heard.contains(test), "{heard}");
    }
    assert!(!heard.contains("warning: "), "{heard}");
}
