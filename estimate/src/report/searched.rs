//! A search as data for others. In: what was found. Out: one JSON object, or a line for every schedule that was looked at.

use super::{Sheet, csv, schedule, to_json, workbook};
use crate::Refused;
use crate::estimate::Estimate;
use crate::schedule::Schedule;
use crate::search::{Candidate, Found, Rejected};
use serde_json::{Value, json};

/// Columns of the comma-separated form and of the workbook.
const COLUMNS: [&str; 19] = [
    "for",
    "batch",
    "seq",
    "devices",
    "tp",
    "dp",
    "ep",
    "pp",
    "micro_batches",
    "chunk",
    "interleave",
    "zero",
    "recompute",
    "step_ms",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "memory_bytes",
    "status",
    "reason",
];

/// Those of them in which schedules of the same ranks differ.
const VARIED: [&str; 6] = ["batch", "micro_batches", "chunk", "interleave", "zero", "recompute"];

/// A schedule that was rejected: of ranks that are refused whole no more than these.
fn of(r: &Rejected) -> Value {
    let mut all = schedule(&r.schedule);
    if let Some(fields) = all.as_object_mut().filter(|_| r.whole) {
        VARIED.iter().for_each(|key| drop(fields.remove(*key)));
    }
    all
}

/// Rejected schedules with the reasons.
pub(super) fn rejected(found: &Found) -> Value {
    found.rejected.iter().map(|r| json!({"schedule": of(r), "reason": r.why})).collect()
}

/// What a search found, each rejected schedule with its reason.
pub fn found(found: &Found, seconds: f64) -> Value {
    let kept = |e: &Estimate| {
        let mut one = to_json(e);
        if let Some(fields) = one.as_object_mut() {
            fields.remove("operators");
        }
        one
    };
    let frontier: Vec<Value> = found.frontier.iter().map(kept).collect();
    let coarse = |c: &Candidate| {
        json!({"schedule": schedule(&c.schedule), "step_seconds": c.step, "tokens_per_s": c.tokens_per_s,
            "memory_bytes": c.memory.total()})
    };
    json!({
        "considered": found.considered, "seconds": seconds, "winner": frontier.get(found.winner), "frontier": frontier,
        "between": found.between.iter().map(coarse).collect::<Vec<_>>(), "rejected": rejected(found),
    })
}

/// The cells of every schedule: the frontier, then the rejected.
fn rows(found: &Found) -> impl Iterator<Item = Vec<Value>> + '_ {
    let line =
        |s: &Schedule, whole: bool, known: [Option<f64>; 2], memory: Option<u64>, status: &str, why: &str| {
            let all = schedule(s);
            let cell =
                |key: &&str| if whole && VARIED.contains(key) { Value::Null } else { all[*key].clone() };
            let [step, rate] = known;
            let each = rate.map(|rate| rate / s.devices() as f64);
            let numbers = [json!(step.map(|s| s * 1e3)), json!(rate), json!(each), json!(memory)];
            let last = [json!(status), json!(why)];
            COLUMNS
                .iter()
                .take_while(|name| **name != "step_ms")
                .map(cell)
                .chain(numbers)
                .chain(last)
                .collect::<Vec<_>>()
        };
    let whole = move |(i, e): (usize, &Estimate)| {
        let (t, status) = (&e.summary, if i == found.winner { "best" } else { "frontier" });
        line(&e.schedule, false, [t.step, t.tokens_per_s].map(Some), Some(t.memory.total()), status, "")
    };
    let coarse = move |c: &Candidate| {
        let known = [c.step, c.tokens_per_s].map(Some);
        line(&c.schedule, false, known, Some(c.memory.total()), "frontier", "by the coarse plan")
    };
    let refused = move |r: &Rejected| {
        line(&r.schedule, r.whole, [r.step, r.tokens_per_s], r.memory, "rejected", &r.why)
    };
    let frontier = found.frontier.iter().enumerate().map(whole).chain(found.between.iter().map(coarse));
    frontier.chain(found.rejected.iter().map(refused))
}

/// A line for every schedule that was looked at, as comma-separated text.
pub fn found_csv(found: &Found) -> String {
    csv(&COLUMNS, rows(found))
}

/// The same as a workbook.
///
/// # Errors
/// There are more schedules than a sheet has rows.
pub fn found_sheets(found: &Found) -> Result<Vec<u8>, Refused> {
    let head = COLUMNS.map(str::to_string).to_vec();
    workbook(&[Sheet { name: "schedules", head, rows: rows(found).collect() }])
}
