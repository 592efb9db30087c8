//! An estimate as data for others. In: an estimate. Out: one JSON object, comma-separated rows.

mod page;
mod searched;
mod sheets;
mod timeline;

pub use page::page;
pub use searched::{found, found_csv, found_sheets};
pub use sheets::{Sheet, workbook};
pub use timeline::timeline;

use crate::Refused;
use crate::check::{Checked, Operator};
use crate::estimate::{Estimate, Row, computed_in};
use crate::hardware::Hardware;
use crate::published::{Compared, Outcome};
use crate::schedule::{Memory, Purpose, Schedule};
use serde_json::{Map, Value, json};

/// Columns of the comma-separated form and of the table.
pub const COLUMNS: [&str; 26] = [
    "stage",
    "program",
    "layer",
    "operator",
    "kernel",
    "form",
    "m",
    "n",
    "k",
    "batch",
    "launches",
    "left",
    "right",
    "out",
    "computed_in",
    "flops",
    "bytes",
    "compute_us",
    "memory_us",
    "fixed_us",
    "communication_us",
    "overlap_us",
    "total_us",
    "share",
    "bound_by",
    "message",
];

fn micro(seconds: f64) -> f64 {
    seconds * 1e6
}

/// What is sent, in words: algorithm, ranks, bytes, latency and bandwidth terms, link.
pub fn message(row: &Row) -> String {
    let one = |s: &crate::model::Sent| {
        format!(
            "{}, {} over {} ranks: {:.0} bytes in {:.0} messages, {:.2} + {:.2} us, {}",
            s.operator,
            s.algorithm,
            s.ranks,
            s.bytes,
            s.messages,
            micro(s.latency),
            micro(s.bandwidth),
            s.link
        )
    };
    row.time.sent.iter().map(one).collect::<Vec<_>>().join("; ")
}

/// The same as fields, of one launch.
fn messages(row: &Row) -> Value {
    let one = |s: &crate::model::Sent| {
        json!({
            "operator": s.operator, "algorithm": s.algorithm, "ranks": s.ranks, "bytes": s.bytes, "messages": s.messages,
            "latency_us": micro(s.latency), "bandwidth_us": micro(s.bandwidth), "link": s.link,
        })
    };
    row.time.sent.iter().map(one).collect()
}

/// The cells of a row, in the order of [`COLUMNS`]; times are microseconds of all launches together.
pub fn cells(row: &Row) -> Vec<Value> {
    let (w, t, n) = (&row.work, &row.time, row.launches as f64);
    let [m, columns, k, batch] = row.sizes;
    let [left, right, out] = w.types.map(|d| d.name());
    vec![
        json!(row.stage),
        json!(row.program),
        json!(w.layer),
        json!(w.origin),
        json!(w.kernel),
        json!(w.form),
        json!(m),
        json!(columns),
        json!(k),
        json!(batch),
        json!(row.launches),
        json!(left),
        json!(right),
        json!(out),
        json!(computed_in(row)),
        json!(t.flops * n),
        json!(t.bytes * n),
        json!(micro(t.compute) * n),
        json!(micro(t.all_memory()) * n),
        json!(micro(t.fixed) * n),
        json!(micro(t.communication()) * n),
        json!(micro(t.overlap()) * n),
        json!(micro(row.seconds)),
        json!(row.share),
        json!(t.bound()),
        json!(message(row)),
    ]
}

fn memory(m: &Memory) -> Value {
    json!({
        "weights": m.weights, "kv": m.kv, "activations": m.activations, "buffers": m.buffers,
        "gradients": m.gradients, "optimizer": m.optimizer, "process": m.process, "total": m.total(), "kv_per_token": m.kv_per_token,
    })
}

fn schedule(s: &Schedule) -> Value {
    json!({
        "for": s.purpose.name(), "batch": s.batch, "seq": s.seq,
        "mean_seq": s.seq as f64 * s.part(None), "tp": s.ranks.tp, "dp": s.ranks.dp, "ep": s.ranks.ep,
        "pp": s.ranks.pp, "micro_batches": s.micro, "interleave": s.interleave, "zero": s.zero,
        "recompute": format!("{:?}", s.recompute).to_lowercase(), "dtype": s.storage.name(), "devices": s.devices(),
        "proposed": s.server.proposals.as_ref().map_or(0, |p| p.how.proposed()),
        "acceptance": s.server.proposals.as_ref().map(|p| p.acceptance), "chunk": s.server.chunk, "prefix_hit": s.server.cached,
        "expert_imbalance": s.dispatch.imbalance, "dispatch": if s.dispatch.by_nodes { "deepep" } else { "all-to-all" },
        "dispatch_dtype": s.dispatch.dtype.unwrap_or(s.storage).name(),
    })
}

/// The estimate as one object.
pub fn to_json(e: &Estimate) -> Value {
    let (s, sum) = (&e.schedule, &e.summary);
    let operator = |r: &Row| {
        let mut fields: Map<String, Value> = COLUMNS.iter().map(|c| c.to_string()).zip(cells(r)).collect();
        fields.remove("message");
        fields.insert("messages".into(), messages(r));
        Value::Object(fields)
    };
    let rows: Vec<Value> = e.ranks.iter().flat_map(|r| &r.rows).map(operator).collect();
    let latency = match s.purpose {
        Purpose::Train => "step_seconds",
        Purpose::Prefill => "ttft_seconds",
        Purpose::Decode => "tpot_seconds",
    };
    let [palm, causal] = sum.mfu;
    let [compute, bytes, communication, fixed] = sum.parts;
    let ranks: Vec<Value> = e.ranks.iter().map(|r| memory(&r.memory)).collect();
    json!({
        "hardware": e.hardware.name, "parameters": e.parameters,
        "schedule": schedule(s),
        "summary": {
            latency: sum.step, "period_seconds": sum.period, "tokens_per_s": sum.tokens_per_s,
            "tokens_per_s_per_device": sum.tokens_per_s / sum.devices as f64, "tokens_per_step": s.server.tokens(),
            "prompts_ttft_seconds": sum.beside.map(|b| b[0]), "prompts_tokens_per_s": sum.beside.map(|b| b[1]), "bubble": sum.bubble,
            "mfu": palm, "mfu_causal": causal,
            "seconds": {"compute": compute, "memory": bytes, "communication": communication, "fixed": fixed},
            "memory": memory(&sum.memory), "memory_of_stages": ranks, "device_memory": e.hardware.memory,
            "fits": sum.left >= 0, "bytes_left": sum.left, "largest_batch": sum.largest[0], "largest_context": sum.largest[1],
            "usd_per_million_tokens": sum.cost, "joules_per_token": sum.energy,
        },
        "operators": rows,
    })
}

/// Rows as comma-separated text, a line a row under their names.
pub fn to_csv(e: &Estimate) -> String {
    csv(&COLUMNS, e.ranks.iter().flat_map(|r| &r.rows).map(cells))
}

/// Lines of comma-separated values under their names; what is not known is empty.
fn csv(head: &[&str], rows: impl Iterator<Item = Vec<Value>>) -> String {
    let cell = |v: &Value| match v {
        Value::Null => String::new(),
        Value::String(text) => astrai_files::csv_cell(text),
        other => other.to_string(),
    };
    let rows = rows.map(|row| row.iter().map(cell).collect::<Vec<_>>().join(","));
    let mut lines: Vec<String> = std::iter::once(head.join(",")).chain(rows).collect();
    lines.push(String::new());
    lines.join("\n")
}

/// A workbook with the rows and the summary.
///
/// # Errors
/// There are more rows than a sheet may have.
pub fn sheets_of(e: &Estimate) -> Result<Vec<u8>, Refused> {
    let head = COLUMNS.map(str::to_string).to_vec();
    let rows = e.ranks.iter().flat_map(|r| &r.rows).map(cells).collect();
    let mut whole = to_json(e);
    if let Some(fields) = whole.as_object_mut() {
        fields.remove("operators");
    }
    workbook(&[Sheet { name: "operators", head, rows }, Sheet::of_fields("summary", &whole)])
}

/// A step measured, with each of its kernels.
pub fn checked(c: &Checked, s: &Schedule, hardware: &Hardware) -> Value {
    let operator = |o: &Operator| {
        let w = &o.work;
        let sizes = w.sizes.each_ref().map(|d| d.literal());
        let [m, n, k, batch] = sizes;
        json!({
            "program": o.program, "layer": w.layer, "operator": w.origin, "kernel": w.kernel, "form": w.form, "m": m, "n": n,
            "k": k, "batch": batch, "launches": w.launches, "computed_in": o.time.precision.name(),
            "flops": o.time.flops, "bytes": o.time.bytes, "compute_seconds": o.time.compute,
            "memory_seconds": o.time.all_memory(), "predicted_seconds": o.predicted, "measured_seconds": o.measured,
        })
    };
    json!({
        "hardware": hardware.name, "schedule": schedule(s), "predicted_seconds": c.predicted, "predicted_as_told_seconds": c.as_told,
        "measured_seconds": c.measured, "mean_seconds": c.mean, "error": c.error(), "spread": c.spread,
        "planned_bytes": c.memory.map(|m| m[0]), "peak_bytes": c.memory.map(|m| m[1]),
        "read_bytes_per_s": c.now.map(|now| now.read), "told_bytes_per_s": c.now.map(|_| hardware.bandwidth),
        "exchanged_bytes_per_s": c.now.and_then(|now| now.exchange),
        "product_flops_per_s": c.now.and_then(|now| now.product), "told_flops_per_s": c.now.and(hardware.product),
        "operators": c.operators.iter().map(operator).collect::<Vec<_>>(),
    })
}

/// Published measurements beside their predictions.
pub fn published(outcome: &Outcome) -> Value {
    let row = |r: &Compared| {
        let c = &r.case;
        json!({
            "what": c.what, "source": c.source, "hardware": c.hardware.name, "half": if c.fitted { "fitted" } else { "tested" },
            "measured_seconds": c.measured, "predicted_seconds": r.predicted, "error": r.error(), "reason": c.reason,
        })
    };
    let (median, worst) = outcome.tested();
    json!({
        "measurements": outcome.rows.iter().map(row).collect::<Vec<_>>(), "tested_median_error": median,
        "tested_worst_error": worst, "kernels": outcome.fitted.kernels.save(),
    })
}
