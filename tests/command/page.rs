//! The page of `astrai compile --html` in a real browser, with real clicks and keys: what it says of a node, a kernel, a pass
//! and a value in memory; in a small window and in the dark; no error, no message, no request. Where there is no browser, a
//! word says so; what the file itself must be is tested without one.

use crate::browser::Browser;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Bytes of the page of any published shape at most, whatever its depth.
const MOST: usize = 2 << 20;

/// A small model with experts.
const EXPERTS: &str = r#"{"model_type": "mixtral", "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64,
    "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 2, "num_local_experts": 4,
    "num_experts_per_tok": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "vocab_size": 50}"#;

/// Writes the page of a model, or of a graph.
fn page(dir: &Path, model: &Path, flags: &[&str]) -> (PathBuf, String) {
    let file = dir.join("page.html");
    let out = Command::new(env!("CARGO_BIN_EXE_astrai"))
        .arg("compile")
        .arg(model)
        .args(flags)
        .args(["--device", "null", "--html"])
        .arg(&file)
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert!(String::from_utf8_lossy(&out.stdout).contains("page.html"), "says where it is");
    let text = fs::read_to_string(&file).unwrap();
    (file, text)
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn data(page: &str) -> Value {
    let (_, rest) = page.split_once("type=\"application/json\">").unwrap();
    serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
}

#[test]
fn a_page_fetches_nothing_and_no_name_ends_its_script() {
    let dir = tempfile::tempdir().unwrap();
    let (_, text) = page(dir.path(), &golden("qwen3"), &["--for", "decode"]);
    assert!(text.contains("default-src 'none'"));
    let (before, rest) = text.split_once("type=\"application/json\">").unwrap();
    let shell = format!("{before}{}", rest.split_once("</script>").unwrap().1);
    for outside in ["src=", "@import", "url(", "fetch(", "import "] {
        assert!(!shell.contains(outside), "{outside}");
    }
    let (_, hostile) = page(dir.path(), &hostile(dir.path()), &[]);
    assert_eq!(hostile.matches("</script>").count(), text.matches("</script>").count());
    let names = data(&hostile)["strings"].to_string();
    assert!(names.contains("</script><script>throw 1</script>"), "{names}");
}

/// A graph whose input has a name that would be a script.
fn hostile(dir: &Path) -> PathBuf {
    let name = "</script><script>throw 1</script><img src=x onerror=throw>";
    let node = |id: u32, op: &str, attributes: Value, args: &[u32]| json!({"id": id, "op": op, "attributes": attributes, "args": args, "type": ["f32[4]"], "origin": name});
    let input = json!({"name": name, "ty": {"dtype": "f32", "shape": ["4"]}});
    let graph = json!({
        "astrai_ir": 1, "symbols": [], "blocks": [],
        "nodes": [node(0, "input", input, &[]), node(1, "unary", json!({"kind": "exp"}), &[0])],
        "outputs": [{"name": name, "node": 1}],
    });
    let path = dir.join("hostile.json");
    fs::write(&path, graph.to_string()).unwrap();
    path
}

#[test]
fn the_size_of_a_page_follows_the_kinds_of_layers() {
    let dir = tempfile::tempdir().unwrap();
    let config = |layers: usize| {
        let path = dir.path().join(format!("{layers}.json"));
        let text = json!({"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": layers,
            "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64});
        fs::write(&path, text.to_string()).unwrap();
        path
    };
    for program in ["prefill", "decode", "train"] {
        let size = |layers: usize| page(dir.path(), &config(layers), &["--for", program]).1.len();
        let (few, many) = (size(4), size(64));
        println!("{program}: {few} bytes with 4 layers, {many} with 64");
        // What is left for each layer are names on the axis of time and values that live between layers; in training also what
        // the kernel that adds up the norms of all gradients reads.
        let layer = if program == "train" { 8000 } else { 80 };
        assert!(many < few + 60 * layer, "{program}: {few} bytes with 4 layers, {many} with 64");
    }
    let shapes = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/configs");
    for name in ["llama-3.1-405b", "qwen3-30b-a3b"] {
        let path = shapes.join(format!("{name}.json"));
        if !path.is_file() {
            println!("skipped: {name} is not here");
            continue;
        }
        for program in ["decode", "train"] {
            let size = page(dir.path(), &path, &["--for", program, "--dtype", "bf16"]).1.len();
            println!("{name} {program}: {size} bytes");
            assert!(size < MOST, "{name} {program}: {size} bytes");
        }
    }
}

fn started() -> Option<Browser> {
    let browser = Browser::start();
    if browser.is_none() {
        println!("skipped: no chromium in PATH");
    }
    browser
}

#[test]
fn a_page_answers_clicks_and_keys() {
    let Some(mut b) = started() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (file, _) = page(dir.path(), &golden("qwen3"), &["--for", "decode", "--dtype", "bf16"]);
    b.look(1280, 800, false);
    b.open(&file);
    assert!(b.text("#title").contains("qwen3"));
    finds_a_node(&mut b);
    draws_a_graph(&mut b);
    tells_what_passes_did(&mut b);
    shows_memory(&mut b);
    lists_the_plan(&mut b);
    assert!(b.bad.is_empty(), "{:#?}", b.bad);
}

fn finds_a_node(b: &mut Browser) {
    b.key("/");
    b.write("down_proj dot");
    assert!(b.text("#found").contains("mlp.down_proj"));
    b.key("Enter");
    assert!(b.text("#details .of-origin").contains("mlp.down_proj"));
    assert!(b.text("#details .of-type").starts_with("f32[tokens, "), "{}", b.text("#details"));
    let source = b.text("#details pre");
    assert!(source.contains("mlp.down_proj") && source.contains("bufs"), "{source}");
    for word in ["flops", "bytes", "predicted", "kernel"] {
        assert!(b.text("#details").contains(word), "{word}");
    }
    // Of the graph around the layers one node stands for that of every layer.
    b.click("#search");
    b.value("document.activeElement.select()");
    b.write("layers.1.mlp.down");
    assert!(b.text("#found").contains("layers.{0–1}"), "{}", b.text("#found"));
    b.key("Escape");
}

fn draws_a_graph(b: &mut Browser) {
    b.click("#zoom-fit");
    b.click("#graph .node.dot");
    let dot = b.text("#details h2");
    assert!(dot.contains("dot"), "{dot}");
    b.click("#graph .node.attention");
    assert!(b.text("#details h2").contains("attention"));
    b.key("ArrowUp");
    assert!(!b.text("#details h2").contains("attention"), "up the edges");
    let scale = |b: &mut Browser| {
        b.value("Number(document.querySelector('#graph > g').getAttribute('transform').match(/scale\\((.*)\\)/)[1])")
    };
    let before = scale(b).as_f64().unwrap();
    b.click("#zoom-in");
    assert!(scale(b).as_f64().unwrap() > before);
    b.click("#zoom-fit");
    let nodes =
        |b: &mut Browser| b.value("document.querySelectorAll('#graph .node').length").as_u64().unwrap();
    let few = nodes(b);
    b.click("#show-views");
    b.click("#zoom-fit");
    assert!(nodes(b) > few && few > 5, "casts and views come when asked for");
    b.click("#show-views");
}

fn tells_what_passes_did(b: &mut Browser) {
    b.click("#tab-passes");
    b.click("[data-pass=merge]");
    let table = b.text(".diff");
    assert!(table.contains("self_attn.{q_proj,k_proj,v_proj}"), "{table}");
    assert_eq!(b.value("document.querySelectorAll('.diff .lines:not([hidden])').length"), 0);
    b.click("[data-origin='self_attn.{q_proj,k_proj,v_proj}']");
    assert!(b.text(".diff .lines:not([hidden])").contains("+ dot"), "{}", b.text(".diff"));
    b.click("[data-pass=flatten]");
    assert!(b.text("#view-passes").contains("Nothing in layer differs"));
    b.click("[data-pass=precision]");
    b.click(".diff [data-origin]");
    b.click(".diff .line.came");
    assert!(b.text("#details h2").contains('%'), "a line leads to its node");
    b.click("#mark-changes");
    assert!(b.value("document.querySelectorAll('#graph .node.came').length").as_u64() > Some(0));
}

fn shows_memory(b: &mut Browser) {
    b.click("#tab-memory");
    b.hover("#arena .slot");
    let tip = b.text("#tip");
    assert!(tip.contains("steps") && tip.contains("in use"), "{tip}");
    b.click("#arena .slot");
    assert!(b.text("#details h2").contains("value"));
    b.click("#values tbody tr");
    assert!(b.text("#details").contains("bytes"));
}

fn lists_the_plan(b: &mut Browser) {
    b.click("#tab-plan");
    b.click("[data-kind=main]");
    b.click("#steps .call");
    assert!(b.text("#steps caption").starts_with("layer"), "a call leads to its kind");
    b.click("#steps [data-step='0']");
    assert!(b.text("#details pre").contains("bufs"));
}

#[test]
fn a_training_page_fits_a_small_window_in_the_dark() {
    let Some(mut b) = started() else { return };
    let dir = tempfile::tempdir().unwrap();
    let flags = ["--for", "train", "--batch", "2", "--seq", "32", "--dtype", "bf16"];
    let config = dir.path().join("mixtral.json");
    fs::write(&config, EXPERTS).unwrap();
    let (file, _) = page(dir.path(), &config, &flags);
    b.look(600, 800, true);
    b.open(&file);
    let ground = b.value("getComputedStyle(document.body).backgroundColor");
    assert_eq!(ground, "rgb(21, 24, 28)", "dark");
    for program in 0..2 {
        let choose = format!(
            "(s => {{ s.value = {program}; s.dispatchEvent(new Event('change')); }})(document.querySelector('#program'))"
        );
        b.value(&choose);
        for tab in ["plan", "graph", "passes", "memory"] {
            b.click(&format!("#tab-{tab}"));
            let wide = b.value("document.documentElement.scrollWidth - innerWidth").as_i64().unwrap();
            assert!(wide <= 0, "{tab} is {wide} pixels too wide");
            assert!(b.text(&format!("#view-{tab}")).len() > 10, "{tab}");
        }
    }
    assert!(b.bad.is_empty(), "{:#?}", b.bad);
    let (file, _) = page(dir.path(), &hostile(dir.path()), &[]);
    b.open(&file);
    b.click("#tab-graph");
    b.click("#graph .node.point");
    assert!(b.text("#details .of-origin").contains("</script><script>throw 1"));
    assert!(b.bad.is_empty(), "{:#?}", b.bad);
}

/// The page of `astrai estimate --html`, of a search: what its charts say to the mouse, a table that sorts, the dark.
#[test]
fn an_estimate_in_a_browser() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("estimate.html");
    let shape = Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/shapes/qwen3-moe-tiny.json");
    let args = ["--for", "decode", "--seq", "512", "--search", "throughput", "--devices", "4", "--html"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_astrai"));
    let out = command.arg("estimate").arg(shape).args(args).arg(&file).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains("default-src 'none'") && text.matches("</script>").count() == 2);
    let rows = data(&text)["rows"].as_array().unwrap().len();
    let Some(mut b) = started() else { return };
    b.look(1280, 900, false);
    b.open(&file);
    assert!(b.text("#title").contains("4 × NVIDIA H100 SXM") && b.text("#facts").contains("TPOT"));
    b.hover("#roofline circle");
    assert!(b.text("#tip").contains("operations a byte"), "{}", b.text("#tip"));
    b.hover("#search circle[r='8']");
    assert!(b.text("#tip").starts_with("best: tp="), "{}", b.text("#tip"));
    assert!(b.text("#search .reasons").contains("more tokens per second"));
    for id in ["time", "memory", "timeline", "sensitivity"] {
        assert!(
            b.value(&format!("document.querySelectorAll('#{id} .mark').length")).as_u64().unwrap() > 1,
            "{id}"
        );
    }
    assert_eq!(b.value("document.querySelectorAll('#operators tbody tr').length"), json!(rows));
    let first = b.text("#operators tbody td.name");
    b.click("#operators th[aria-sort=descending] button");
    assert_ne!(b.text("#operators tbody td.name"), first, "the shortest comes first");
    b.look(700, 900, true);
    assert_eq!(b.value("document.documentElement.scrollWidth <= 700"), json!(true));
    assert!(b.bad.is_empty(), "{:#?}", b.bad);
}
