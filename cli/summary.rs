//! What a compiled program costs, as one JSON object and as lines for people.

use crate::failure::Failure;
use crate::table::{bytes, count, table};
use astrai_ir::Graph;
use astrai_ir::ops::Op;
use astrai_runtime::{Compiled, Stage};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// The fields of an object, for more to be added.
pub fn fields(object: Value) -> Map<String, Value> {
    if let Value::Object(fields) = object { fields } else { Map::new() }
}

/// Parameters of a graph: elements of its weights, each once.
pub fn graph_parameters(graph: &Graph) -> Result<u64, Failure> {
    let mut sizes = BTreeMap::new();
    for node in graph.nodes() {
        if let Op::Weight(w) = &node.op {
            let shape = w.ty.shape.iter().map(|d| d.size().unwrap_or(0) as u64);
            sizes.insert(&w.name, shape.fold(1u64, u64::saturating_mul));
        }
    }
    let sum = sizes.values().try_fold(0u64, |sum, &n| sum.checked_add(n));
    sum.ok_or_else(|| "the weights have more elements than can be counted; correct their shapes".into())
}

/// The summary of a program: sizes at the upper bounds of its symbols, `seconds` of compiling it.
pub fn summary(program: &Compiled, parameters: u64, seconds: f64) -> Result<Map<String, Value>, Failure> {
    let cost = program.cost()?;
    Ok(fields(json!({
        "parameters": parameters, "kernels": program.kernels.iter().flatten().count(), "launches": cost.launches,
        "flops": cost.flops, "bytes": cost.bytes, "weight_bytes": cost.weight_bytes,
        "planned_bytes": cost.weight_bytes.saturating_add(cost.arena_bytes),
        "kv_bytes_per_token": cost.kv_bytes_per_token, "compile_seconds": seconds,
        "passes": stages("", program).collect::<Vec<_>>(),
    })))
}

/// Kernels, launches, flops and bytes of programs that run one after another.
pub fn sum_costs(programs: &[(&'static str, Compiled)]) -> Result<Map<String, Value>, Failure> {
    let mut kernels = BTreeSet::new();
    let [mut launches, mut flops, mut bytes] = [0u64; 3];
    for (_, program) in programs {
        let cost = program.cost()?;
        kernels.extend(program.kernels.iter().flatten().map(|k| &k.identity));
        launches += cost.launches;
        flops = flops.saturating_add(cost.flops);
        bytes = bytes.saturating_add(cost.bytes);
    }
    let sums = json!({"kernels": kernels.len(), "launches": launches, "flops": flops, "bytes": bytes});
    Ok(fields(sums))
}

/// What each pass did, program by program.
pub fn passes(programs: &[(&'static str, Compiled)]) -> Value {
    programs.iter().flat_map(|(of, program)| stages(of, program)).collect()
}

fn stages<'a>(of: &'a str, program: &'a Compiled) -> impl Iterator<Item = Value> + 'a {
    let row =
        move |s: &Stage| json!({"name": format!("{of}{}", s.name), "seconds": s.seconds, "nodes": s.nodes});
    program.report.stages.iter().map(row)
}

/// The summary for people.
pub fn describe(summary: &Map<String, Value>) -> String {
    let number = |key: &str| summary.get(key).and_then(Value::as_u64).unwrap_or(0);
    let with_bytes = |key: &str| format!("{} ({})", number(key), bytes(number(key)));
    let seconds = |v: &Value| v.as_f64().unwrap_or(0.0);
    let total = summary.get("compile_seconds").map_or(0.0, seconds);
    let lines = [
        ("parameters", format!("{} ({})", number("parameters"), count(number("parameters")))),
        ("rank_parameters", format!("{} ({})", number("rank_parameters"), count(number("rank_parameters")))),
        ("kernels", format!("{} distinct, {} launches a run", number("kernels"), number("launches"))),
        ("flops", format!("{} ({}) a run", number("flops"), count(number("flops")))),
        ("bytes", with_bytes("bytes") + " a run"),
        ("weight_bytes", with_bytes("weight_bytes")),
        ("state_bytes", with_bytes("state_bytes") + ": gradients, optimiser"),
        ("planned_bytes", with_bytes("planned_bytes")),
        ("kv_bytes_per_token", with_bytes("kv_bytes_per_token")),
        (
            "registers",
            format!("{} of a thread at most, {} bytes spilled", number("registers"), number("spill_bytes")),
        ),
        ("nvrtc_absent", summary.get("nvrtc_absent").and_then(Value::as_str).unwrap_or_default().to_string()),
        ("compile_seconds", format!("{total:.3}")),
    ];
    let mut text = String::new();
    if let Some(stage) = summary.get("stage") {
        text += &format!("{:<20}{} of {}, from 0\n", "stage", stage["number"], stage["stages"]);
    }
    for (key, value) in lines.iter().filter(|(key, _)| summary.contains_key(*key)) {
        text += &format!("{:<20}{value}\n", key.replace('_', " "));
    }
    for (kind, sent) in summary.get("collectives").and_then(Value::as_object).into_iter().flatten() {
        let (n, sent) = (&sent["count"], sent["bytes"].as_u64().unwrap_or(0));
        text +=
            &format!("{:<20}{n} a run, {sent} ({}) sent by a rank\n", kind.replace('_', " "), bytes(sent));
    }
    text.push('\n');
    let passes = summary.get("passes").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let row = |p: &Value| {
        let name = p["name"].as_str().unwrap_or_default().to_string();
        vec![name, format!("{:.2}", seconds(&p["seconds"]) * 1e3), p["nodes"].to_string()]
    };
    text + &table(&["pass", "ms", "nodes"], &passes.iter().map(row).collect::<Vec<_>>())
}
