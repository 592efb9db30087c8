//! An estimate as one page of HTML that fetches nothing. In: planned stages, hardware, and, after a search, what was found. Out: its text.

use super::searched::rejected;
use super::{COLUMNS, cells, to_json};
use crate::Refused;
use crate::estimate::{Estimate, Planned};
use crate::hardware::{Hardware, Precision};
use crate::search::Found;
use astrai_engine::page::Page;
use serde_json::{Value, json};

const BODY: &str = include_str!("page/page.html");
const STYLE: &str = include_str!("page/page.css");
const SCRIPT: &str = include_str!("page/page.js");

/// By what the numbers of the hardware are multiplied to see what the step waits for.
const FACTORS: [f64; 7] = [0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0];

/// Launches that the page draws, at most.
const DRAWN: usize = 6000;

/// Makes a part of a machine so many times as fast.
type Change = fn(&mut Hardware, f64);

/// What may be changed of a machine.
const CHANGES: [(&str, Change); 4] = [
    ("arithmetic", |h, by| h.compute.iter_mut().for_each(|(_, peak)| *peak *= by)),
    ("memory bandwidth", |h, by| {
        h.bandwidth *= by;
        h.caches.iter_mut().for_each(|(_, bandwidth)| *bandwidth *= by);
    }),
    ("links", |h, by| {
        h.links.iter_mut().for_each(|l| (l.bandwidth, l.latency) = (l.bandwidth * by, l.latency / by));
    }),
    ("starting kernels", |h, by| h.launch /= by),
];

/// The page of a schedule.
///
/// # Errors
/// One line that names the flag or key.
pub fn page(
    model: &str,
    planned: &Planned,
    hardware: &Hardware,
    found: Option<&Found>,
) -> Result<String, Refused> {
    let e = planned.on(hardware)?;
    let mut sensitivity = Vec::new();
    for (what, change) in CHANGES {
        if what == "links" && e.schedule.devices() == 1 {
            continue;
        }
        let mut steps = Vec::new();
        for by in FACTORS {
            let mut other = hardware.clone();
            change(&mut other, by);
            steps.push(planned.on(&other)?.summary.step);
        }
        sensitivity.push(json!({"what": what, "seconds": steps}));
    }
    let whole = to_json(&e);
    let data = json!({
        "model": model, "hardware": hardware.name, "schedule": whole["schedule"], "summary": whole["summary"],
        "parameters": e.parameters, "columns": COLUMNS,
        "rows": e.ranks.iter().flat_map(|r| &r.rows).map(cells).collect::<Vec<_>>(),
        "peaks": peaks(&e), "bandwidth": hardware.bandwidth, "factors": FACTORS, "sensitivity": sensitivity,
        "stages": e.ranks.iter().map(|r| launches(r, DRAWN / e.ranks.len().max(1))).collect::<Vec<_>>(),
        "search": found.map(|f| candidates(f, hardware)),
    });
    Ok(Page { title: "astrai estimate", style: STYLE, body: BODY, script: SCRIPT }.text(&data))
}

/// Peaks of the types that rows compute in.
fn peaks(e: &Estimate) -> Value {
    let rows = || e.ranks.iter().flat_map(|r| &r.rows);
    let met = |p: &Precision| rows().any(|r| super::computed_in(r) == p.name());
    Precision::ALL.iter().filter(|p| met(p)).map(|p| json!([p.name(), e.hardware.peak(*p)])).collect()
}

/// Launches as numbers of rows and bytes kept, the first of them only where there are too many.
fn launches(rank: &crate::estimate::Rank, most: usize) -> Value {
    let m = &rank.memory;
    let held = m.weights + m.kv + m.gradients + m.optimizer + m.process;
    let list: Vec<[u64; 2]> = rank.launches.iter().take(most).map(|l| [l.row as u64, l.live]).collect();
    json!({"held": held, "launches": list, "left_out": rank.launches.len().saturating_sub(most)})
}

/// A search's frontier and reasons.
fn candidates(found: &Found, hardware: &Hardware) -> Value {
    let at = |e: &Estimate| {
        let s = &e.summary;
        json!({"schedule": super::schedule(&e.schedule), "step": s.step, "tokens_per_s": s.tokens_per_s,
            "tokens_per_s_per_device": s.tokens_per_s / s.devices as f64, "memory": s.memory.total(), "device_memory": hardware.memory})
    };
    json!({"considered": found.considered, "winner": found.winner, "rejected": rejected(found),
        "frontier": found.frontier.iter().map(at).collect::<Vec<_>>()})
}
