//! `astrai estimate`: its output for scripts, LLMSim's records and graphs, and one line for whatever is wrong.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn astrai(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_astrai")).args(args).output().unwrap()
}

fn good(args: &[&str]) -> String {
    let out = astrai(args);
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

fn object(args: &[&str]) -> Value {
    serde_json::from_str(&good(args)).unwrap()
}

fn refused(args: &[&str]) -> String {
    let out = astrai(args);
    let line = String::from_utf8(out.stderr).unwrap();
    assert!(!out.status.success() && line.lines().count() == 1, "{args:?}: {line}");
    line
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Hardware of which programs of the processor are predicted.
fn two_cores(folder: &Path) -> PathBuf {
    let file = folder.join("cores.json");
    let text = "{name: 'two cores', kind: 'cpu', units: 2, memory: {size: '24 GB', bandwidth: '33 GB/s'},
        compute: {fp32: '0.2 TFLOP/s', bf16: '0.2 TFLOP/s'}}";
    std::fs::write(&file, text).unwrap();
    file
}

#[test]
fn other_commands_predict_by_hardware_too() {
    let (model, dir) = (root("tests/golden/llama/config.json"), tempfile::tempdir().unwrap());
    let cores = two_cores(dir.path());
    let slow = dir.path().join("slow.json");
    let text_of = std::fs::read_to_string(&cores).unwrap();
    std::fs::write(&slow, text_of.replace("33 GB", "33 MB").replace("0.2 TFLOP", "0.2 GFLOP")).unwrap();
    let compile = |file: &Path| {
        let args = ["compile", text(&model), "--explain", "cost", "--json", "--hardware", text(file)];
        let costs = object(&args)["costs"].as_array().unwrap().clone();
        costs.iter().map(|c| c["predicted_seconds"].as_f64().unwrap()).sum::<f64>()
    };
    let out = dir.path().join("plan");
    let sizes = ["--vocab", "320", "--batch", "4", "--seq", "64", "--out", text(&out)];
    let run = [&["train", "--config", text(&model), "--data", "docs"][..], &sizes].concat();
    let train = |file: &Path| {
        let plan = object(&[&run[..], &["--dry-run", "--json", "--hardware", text(file)]].concat());
        let [least, predicted] =
            ["least_seconds", "predicted_seconds"].map(|key| plan[key].as_f64().unwrap());
        assert!(predicted > least, "{plan}");
        predicted
    };
    // A thousandth of the speed, beside launches.
    assert!(compile(&slow) > 100.0 * compile(&cores) && train(&slow) > 100.0 * train(&cores));
    for (args, words) in [
        (&["compile", text(&model), "--hardware", "h100-sxm"][..], "is no processor"),
        (&["compile", text(&model), "--device", "cuda", "--hardware", text(&cores)], "is a processor"),
        (&[&run[..], &["--hardware", text(&cores)]].concat(), "--hardware goes with --dry-run"),
        (&["devices", "--device", "null", "--measure", text(&slow)], "runs nothing"),
        (&["devices", "--measure", "none/here.json"], "the folder does not exist"),
    ] {
        assert!(refused(args).contains(words), "{args:?}");
    }
}

#[test]
fn an_estimate_adds_up() {
    let model = root("bench/shapes/qwen3-0.6b.json");
    let dir = tempfile::tempdir().unwrap();
    let csv = dir.path().join("rows.csv");
    let args = [
        "estimate",
        text(&model),
        "--for",
        "decode",
        "--batch",
        "4",
        "--tp",
        "2",
        "--json",
        "--csv",
        text(&csv),
    ];
    let found = object(&args);
    let (sum, rows) = (&found["summary"], found["operators"].as_array().unwrap());
    let us = |key: &str| rows.iter().map(|r| r[key].as_f64().unwrap()).sum::<f64>();
    assert!((us("total_us") / 1e6 / sum["tpot_seconds"].as_f64().unwrap() - 1.0).abs() < 1e-9);
    assert!((us("share") - 1.0).abs() < 1e-9 && us("communication_us") > 0.0);
    let sent = rows.iter().flat_map(|r| Some((r, r["messages"].as_array()?.first()?)));
    for (row, message) in sent.clone() {
        let [latency, bytes] = ["latency_us", "bandwidth_us"].map(|key| message[key].as_f64().unwrap());
        let all = (latency + bytes) * row["launches"].as_f64().unwrap();
        assert!((all / row["communication_us"].as_f64().unwrap() - 1.0).abs() < 1e-9, "{row}");
    }
    assert!(sent.clone().any(|(_, m)| m["operator"] == "all_reduce" && m["bytes"].as_f64() > Some(0.0)));
    assert_eq!(sum["fits"], true);
    let beside = ["--chunk", "512", "--speculate", "ngram:3", "--acceptance", "0.5"];
    let beside = object(&[&args[..9], &beside].concat());
    let tokens = &beside["summary"]["tokens_per_step"];
    assert!(*tokens == 1.875 && beside["summary"]["prompts_ttft_seconds"].is_f64(), "{beside}");
    let [timeline, book] = ["timeline.json", "rows.xlsx"].map(|name| dir.path().join(name));
    good(&["estimate", text(&model), "--pp", "2", "--timeline", text(&timeline), "--xlsx", text(&book)]);
    let timeline: Value = serde_json::from_slice(&std::fs::read(timeline).unwrap()).unwrap();
    let events = timeline["traceEvents"].as_array().unwrap();
    let lasts: f64 = events.iter().filter_map(|e| e["dur"].as_f64()).sum();
    let plan = object(&["estimate", text(&model), "--pp", "2", "--json"]);
    assert!((lasts / 1e6 / plan["summary"]["ttft_seconds"].as_f64().unwrap() - 1.0).abs() < 1e-9);
    assert!(std::fs::read(book).unwrap().starts_with(b"PK"));
    let lines = std::fs::read_to_string(csv).unwrap();
    assert_eq!(lines.lines().count(), rows.len() + 1);
    let train = object(&[
        "estimate",
        text(&model),
        "--for",
        "train",
        "--batch",
        "8",
        "--seq",
        "256",
        "--dp",
        "2",
        "--json",
    ]);
    let memory = &train["summary"]["memory"];
    assert_eq!(memory["optimizer"].as_u64().unwrap(), 3 * memory["gradients"].as_u64().unwrap());
    for preset in ["h100-sxm", "P800", "mi300x"] {
        assert!(good(&["estimate", text(&model), "--hardware", preset]).contains("TTFT"), "{preset}");
    }
}

/// Every schedule that a search looked at is a line; axes that are given are the same in all of them.
#[test]
fn a_search_says_what_it_looked_at() {
    let model = root("bench/shapes/qwen3-moe-tiny.json");
    let dir = tempfile::tempdir().unwrap();
    let [csv, book] = ["all.csv", "all.xlsx"].map(|name| dir.path().join(name));
    let asked = ["--for", "decode", "--search", "cost", "--max-devices", "4", "--tp", "1", "--pp", "1"];
    let limits = ["--max-memory", "60GB", "--context-dist", "uniform:1..512"];
    let files = ["--csv", text(&csv), "--xlsx", text(&book), "--json"];
    let found = object(&[&["estimate", text(&model)][..], &asked, &limits, &files].concat());
    let considered = found["considered"].as_u64().unwrap() as usize;
    let counted = ["frontier", "between", "rejected"].map(|key| found[key].as_array().unwrap().len());
    assert_eq!(counted.iter().sum::<usize>(), considered);
    assert_eq!(found["winner"]["summary"]["device_memory"], 60e9);
    let lines = std::fs::read_to_string(csv).unwrap();
    let rows: Vec<Vec<&str>> = lines.lines().map(|line| line.split(',').collect()).collect();
    let column = |name: &str| rows[0].iter().position(|cell| *cell == name).unwrap();
    let cells = |name: &str| rows[1..].iter().map(|row| row[column(name)]).collect::<Vec<_>>();
    assert_eq!(rows.len(), considered + 1);
    assert!(cells("tp").iter().all(|n| *n == "1") && cells("devices").contains(&"4"));
    assert_eq!(cells("status").iter().filter(|status| **status == "best").count(), 1);
    let known = cells("step_ms").into_iter().zip(cells("status")).filter(|(ms, _)| !ms.is_empty());
    assert!(known.clone().any(|(_, status)| status == "rejected") && known.count() > counted[0]);
    assert!(std::fs::read(book).unwrap().starts_with(b"PK"));
}

/// Codes as `quantization_config` says, or as a flag says instead; in training there are none. A GPU's weights lie in memory once.
#[test]
fn weights_are_planned_as_they_are_stored() {
    let (model, dir) = (root("tests/golden/llama/config.json"), tempfile::tempdir().unwrap());
    let packed = dir.path().join("config.json");
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&model).unwrap()).unwrap();
    config["quantization_config"] = serde_json::json!({"quant_method": "fp8", "weight_block_size": [32, 32]});
    std::fs::write(&packed, config.to_string()).unwrap();
    let bytes = |model: &Path, flags: &[&str]| {
        let args = [&["estimate", text(model), "--seq", "64", "--json"][..], flags].concat();
        object(&args)["summary"]["memory"]["weights"].as_u64().unwrap()
    };
    let parameters = object(&["compile", text(&model), "--json"])["parameters"].as_u64().unwrap();
    assert_eq!(bytes(&model, &[]), 2 * parameters);
    // A byte each, and four for each 32 of them, but for the embedding, the norms, and rows of 112, which 32 does not divide.
    let plain = 320 * 64 + 5 * 64 + 2 * 64 * 112;
    assert_eq!(bytes(&packed, &[]), 2 * plain + (parameters - plain) * 9 / 8);
    assert_eq!(bytes(&packed, &["--quantize", "int4"]), bytes(&model, &["--quantize", "int4"]));
    assert_eq!(bytes(&packed, &["--for", "train"]), 2 * parameters);
    // Codes are multiplied as bf16: where products are all that takes time, they take as long.
    let shape = root("bench/shapes/qwen3-0.6b.json");
    let seconds = |flags: &[&str]| {
        let args =
            [&["estimate", text(&shape), "--batch", "16", "--seq", "2048", "--json"][..], flags].concat();
        object(&args)["summary"]["ttft_seconds"].as_f64().unwrap()
    };
    let of = seconds(&["--quantize", "int8"]) / seconds(&[]);
    assert!((0.9..1.01).contains(&of), "{of}");
    // Blocks that no row has: the weights are widened when they are loaded.
    let wide = config.to_string().replace("[32,32]", "[128,128]");
    let wider = dir.path().join("wide.json");
    std::fs::write(&wider, wide).unwrap();
    assert_eq!(bytes(&wider, &[]), 2 * parameters);
    let compiled = object(&["compile", text(&packed), "--json"]);
    assert_eq!(compiled["weights"], "fp8:group=32:head=none");
}

#[test]
fn a_load_that_is_served_is_replayed_beside_it() {
    let model = root("tests/golden/qwen3/config.json");
    let load = ["bench", "serve", "--shape", text(&model), "--batch", "2", "--seq", "16", "--new", "4"];
    let dir = tempfile::tempdir().unwrap();
    let file = two_cores(dir.path());
    let asked = ["--requests", "4", "--repeat", "1", "--hardware", text(&file)];
    let line = object(&[&load[..], &asked].concat());
    let [seconds, error, first] =
        ["predicted_seconds", "error", "predicted_first_token_ms"].map(|key| line[key].as_f64().unwrap());
    assert!(seconds > 0.0 && first > 0.0 && first < 1e3 * seconds, "{line}");
    // Both stand rounded beside the run.
    assert!((seconds / line["run_seconds"].as_f64().unwrap() - 1.0 - error).abs() < 0.01, "{line}");
    assert!(line["first_token_error"].is_number() && line["read_gb_per_s"].as_f64() > Some(0.0), "{line}");
    assert!(refused(&[&load[..], &asked, &["--n", "2"]].concat()).contains("single answers"));
}

#[test]
fn llmsim_is_reproduced_and_its_graph_read_again() {
    let model = root("tests/golden/qwen3/config.json");
    let dir = tempfile::tempdir().unwrap();
    let [graph, csv] = ["graph.json", "rows.csv"].map(|name| dir.path().join(name));
    let legacy =
        ["estimate", text(&model), "--legacy", "llmsim", "--seq", "64", "--csv", text(&csv), "--json"];
    let report = object(&legacy);
    assert!(report["summary"]["ttft_ms"].as_f64().unwrap() > 0.0 && report["plan"]["ttft_seconds"].is_f64());
    assert_eq!(report["differences"].as_array().unwrap().len(), 12);
    let rows = std::fs::read_to_string(&csv).unwrap();
    assert!(
        rows.starts_with("Operator Name,Type,m,n,k,batch,layers,Input,Output,Weight,Compute(us)"),
        "{rows}"
    );
    assert_eq!(rows.lines().count(), report["rows"].as_array().unwrap().len() + 1);
    std::fs::write(&graph, good(&["compile", text(&model), "--form", "llmsim"])).unwrap();
    let again = good(&["compile", text(&graph), "--form", "llmsim"]);
    assert_eq!(again, std::fs::read_to_string(&graph).unwrap());
    let parameters =
        |path: &Path| object(&["compile", text(path), "--seq", "32", "--json"])["parameters"].clone();
    assert_eq!(parameters(&graph), parameters(&model));
    let records = root("../shared/golden/llmsim");
    if !records.is_dir() {
        println!("skipped: there is no ../shared/golden/llmsim");
        return;
    }
    let found = object(&["verify", text(&records), "--json"]);
    assert!(found["ok"] == true && found["checks"].as_array().unwrap().len() == 7, "{found}");
}

#[test]
fn a_server_is_replayed() {
    let model = root("bench/shapes/smollm2-135m.json");
    let dir = tempfile::tempdir().unwrap();
    let [csv, trace] = ["series.csv", "trace.jsonl"].map(|name| dir.path().join(name));
    let load =
        ["--num-prompts", "40", "--random-input-len", "64", "--random-output-len", "8", "--max-seqs", "4"];
    let replay = |more: &[&str]| {
        let args = [&["estimate", text(&model), "--replay", "--json"], &load[..], more].concat();
        object(&args)
    };
    let found = replay(&["--goodput", "ttft:100000", "--csv", text(&csv)]);
    assert_eq!((&found["completed"], &found["total_output_tokens"]), (&40.into(), &320.into()));
    assert_eq!(found["request_goodput"], found["request_throughput"]);
    assert_eq!(found["server"]["running_most"], 4.0);
    let rows = std::fs::read_to_string(&csv).unwrap();
    assert!(
        rows.starts_with("seconds,busy,running,")
            && found["series"].as_array().unwrap().len() + 1 == rows.lines().count()
    );
    // A step has as many tokens as fill the device; two cores with a matrix unit, whose kernels are planned where there is one, are filled by more.
    let cores = two_cores(dir.path());
    let of_two = if object(&["devices", "--json"])["cpu"]["isa"] == "amx" { 512 } else { 128 };
    let few = replay(&["--hardware", text(&cores)]);
    let tokens = [&found, &few].map(|of| of["server"]["max_batch_tokens"].as_u64());
    assert_eq!(tokens, [Some(512), Some(of_two)], "{}", few["server"]);
    // Alone each is answered sooner, all later.
    let alone = replay(&["--max-concurrency", "1"]);
    let number = |of: &Value, key: &str| of[key].as_f64().unwrap();
    assert!(number(&alone, "median_ttft_ms") < number(&found, "median_ttft_ms"));
    assert!(number(&alone, "duration") > number(&found, "duration"));
    let lines =
        "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 3, \"hash_ids\": [1, 2]}\n".repeat(3);
    std::fs::write(&trace, &lines).unwrap();
    let args = ["estimate", text(&model), "--replay", "--trace", text(&trace), "--max-concurrency", "1"];
    assert!(good(&args).contains("1184 of prompts, in the prefix cache"), "{}", good(&args));
    let long = [&args[..], &["--max-model-len", "512"]].concat();
    assert!(refused(&long).contains("trace.jsonl, line 1: a prompt of 600"), "{}", refused(&long));
    std::fs::write(&trace, lines + "{}").unwrap();
    assert!(refused(&args).contains("trace.jsonl, line 4: `timestamp`"));
}

#[test]
fn whatever_is_wrong_is_said_in_one_line() {
    let model = root("bench/shapes/qwen3-0.6b.json");
    let dir = tempfile::tempdir().unwrap();
    let (file, nothing) = (dir.path().join("x.json5"), dir.path().join("nothing.jsonl"));
    let tiny = root("tests/golden/qwen3/config.json");
    let copy = dir.path().join("config.json");
    std::fs::copy(&tiny, &copy).unwrap();
    std::fs::write(&nothing, "").unwrap();
    std::fs::write(
        &file,
        "{name: 'x', memory: {size: '80 GB', bandwidth: 3350}, compute: {bf16: '900 TFLOP/s'}}",
    )
    .unwrap();
    for (args, part) in [
        (vec!["--tp", "3"], "num_attention_heads"),
        (vec!["--ep", "2", "--batch", "2"], "ep=2"),
        (vec!["--dp", "3"], "--batch 1 does not divide"),
        (vec!["--micro-batches", "3"], "--micro-batches 3"),
        (vec!["--zero", "1"], "--zero 1"),
        (vec!["--for", "prefill", "--interleave", "4"], "--interleave 4"),
        (
            vec!["--for", "train", "--pp", "2", "--batch", "2", "--interleave", "3"],
            "--interleave 3: num_hidden_layers 28",
        ),
        (
            vec!["--for", "train", "--pp", "4", "--batch", "6", "--micro-batches", "6", "--interleave", "7"],
            "--micro-batches 6 is no",
        ),
        (vec!["--for", "decode", "--recompute", "full"], "--recompute"),
        (vec!["--context-dist", "uniform:1..9"], "give --for decode"),
        (vec!["--for", "decode", "--context-dist", "uniform:9..1"], "--context-dist uniform:9..1: write"),
        (vec!["--for", "decode", "--context-dist", "none.txt"], "none.txt"),
        (vec!["--for", "train", "--chunk", "64"], "--chunk: only a server"),
        (vec!["--chunk", "64", "--check"], "--chunk goes with the plan"),
        (vec!["--prefix-hit", "1"], "--prefix-hit 1: a part from 0 to less than 1"),
        (vec!["--for", "decode", "--prefix-hit", "0.5"], "give --chunk N"),
        (vec!["--speculate", "ngram", "--acceptance", "0.5"], "give --for decode"),
        (vec!["--for", "decode", "--speculate", "ngram"], "give --acceptance"),
        (vec!["--for", "decode", "--acceptance", "0.5"], "nothing is proposed"),
        (vec!["--for", "decode", "--speculate", "mtp", "--acceptance", "0.5"], "no module"),
        (vec!["--for", "decode", "--draft", text(&tiny), "--acceptance", "nan"], "--acceptance NaN"),
        (vec!["--for", "decode", "--draft", text(&tiny), "--acceptance", "1"], "--draft: vocab_size"),
        (vec!["--dispatch", "deepep"], "--dispatch: only ranks of experts"),
        (
            vec!["--for", "decode", "--search", "cost", "--devices", "2", "--expert-imbalance", "2"],
            "--expert-imbalance: only ranks of experts",
        ),
        (vec!["--ep", "2", "--expert-imbalance", "nan"], "--expert-imbalance NaN"),
        (vec!["--check", "--xlsx", "no.xlsx"], "--xlsx writes what is planned"),
        (vec!["--replay", "--max-memory", "x"], "--max-memory goes with --search"),
        (
            vec!["--for", "decode", "--draft", text(&copy), "--acceptance", "0.5", "--csv", text(&copy)],
            "is read, or part of what is",
        ),
        (vec!["--ep", "2", "--expert-imbalance", "3"], "--expert-imbalance 3: from 1"),
        (vec!["--repeat", "3"], "--repeat goes with --check"),
        (vec!["--hardware", text(&file), "--csv", text(&file)], "is read, or part of what is"),
        (vec!["--csv", "same", "--xlsx", "same"], "--xlsx: same is --csv's"),
        (vec!["--hardware", "h1000"], "there is no such preset"),
        (vec!["--hardware", text(&file)], "memory.bandwidth: 3350 has no unit"),
        (vec!["--hardware", "none.json5"], "none.json5"),
        (vec!["--seq", "2000000000"], "positions"),
        (vec!["--seed", "1"], "go with --replay"),
        (vec!["--replay", "--request-rate", "0"], "--request-rate 0"),
        (vec!["--replay", "--request-rate", "-3"], "--request-rate -3"),
        (vec!["--search", "latency", "--devices", "8", "--max-latency", "-1"], "--max-latency -1"),
        (vec!["--search", "latency"], "--devices N or --max-devices N"),
        (vec!["--search", "latency", "--devices", "8", "--max-devices", "8"], "--max-devices: give one"),
        (
            vec!["--search", "latency", "--devices", "8", "--max-memory", "60"],
            "--max-memory `60` has no unit",
        ),
        (vec!["--search", "latency", "--devices", "8", "--tp", "3"], "--tp 3: these are 3 ranks"),
        (vec!["--search", "latency", "--max-devices", "2", "--pp", "4"], "more than --max-devices 2"),
        (vec!["--search", "latency", "--devices", "8", "--zero", "1"], "--zero 1"),
        (vec!["--search", "latency", "--devices", "8", "--interleave", "2"], "--interleave 2"),
        (
            vec!["--search", "latency", "--devices", "8", "--context-dist", "uniform:1..9"],
            "give --for decode",
        ),
        (vec!["--replay", "--ep", "2"], "leave --pp, --dp and --ep out"),
        (vec!["--replay", "--random-input-len", "50000"], "--max-model-len"),
        (vec!["--replay", "--hardware", "l20", "--max-model-len", "50000"], "--max-model-len 50000"),
        (vec!["--replay", "--max-seqs", "64", "--max-batch-tokens", "8"], "--max-batch-tokens 8"),
        (vec!["--replay", "--max-model-len", "10"], "--max-model-len 10: no more than a page"),
        (vec!["--replay", "--trace", "none.jsonl"], "none.jsonl"),
        (vec!["--replay", "--trace", text(&nothing)], "has no requests"),
        (vec!["--replay", "--trace", "none.jsonl", "--seed", "1"], "leave --request-rate"),
        (vec!["--legacy", "llmsim", "--for", "train"], "prefill and decode"),
        (vec!["--legacy", "llmsim", "--tp", "7"], "num_attention_heads"),
        (vec!["--tp", "0"], "error: invalid value '0' for '--tp <N>': 0 is not in 1..=1048576"),
        (
            vec!["--for", "trian"],
            "error: invalid value 'trian' for '--for <PROGRAM>' [possible values: prefill, decode, train]; tip: a similar value exists: 'train'",
        ),
        (vec!["--no\nsuch"], "error: unexpected argument '--no"),
        (vec!["--legacy", "llmsim", "--pp", "2"], "--pp: LLMSim has no such schedules"),
        (vec!["--legacy", "llmsim", "--micro-batches", "2"], "--micro-batches: LLMSim"),
        (vec!["--legacy", "llmsim", "--interleave", "2"], "--interleave: LLMSim"),
        (vec!["--legacy", "llmsim", "--zero", "1"], "--zero: LLMSim"),
    ] {
        let args: Vec<&str> = ["estimate", text(&model)].into_iter().chain(args).collect();
        let line = refused(&args);
        assert!(line.contains(part), "{args:?}: {line}");
    }
    assert!(
        refused(&["compile", text(&model), "--form", "llmsim", "--dump-after", "build"])
            .contains("--form llmsim")
    );
    assert!(
        refused(&["estimate"])
            .starts_with("error: the following required arguments were not provided: <MODEL>...")
    );
    let llama = root("tests/golden/llama/config.json");
    assert!(refused(&["compile", text(&llama), "--form", "llmsim"]).contains("LLMSim has no graph"));
    assert!(
        refused(&["estimate", text(&llama), "--legacy", "llmsim"])
            .contains("LLMSim has no builder of `llama`")
    );
}
