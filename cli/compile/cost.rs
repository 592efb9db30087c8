//! `astrai compile --explain cost`. In: planned programs, a target, what NVRTC made of their kernels. Out: for each kernel its launches,
//! work and predicted seconds at the upper bounds of the symbols; on a CUDA device for each phase its blocks, registers, spills, shared
//! memory, occupancy, and the instructions of its hot loop.

use super::cuda::Machined;
use crate::failure::Failure;
use crate::table::{bytes, count, table};
use astrai_ir::kernel::Grid;
use astrai_ir::{IrError, Kernel, Plan, Target};
use astrai_runtime::Compiled;
use astrai_runtime::device::cuda::{hot_loop, resident};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// What every launch of one kernel costs together.
struct Row<'a> {
    kernel: Option<&'a Kernel>,
    origin: String,
    form: &'static str,
    launches: u64,
    flops: u64,
    bytes: u64,
    seconds: f64,
    phases: Vec<Value>,
}

/// Kernels as objects, those that take longest first.
pub fn costs(
    programs: &[(&'static str, Compiled)],
    machined: Option<&Machined>,
    target: &Target,
) -> Result<Vec<Value>, Failure> {
    let mut rows: BTreeMap<String, Row> = BTreeMap::new();
    for (_, program) in programs {
        let plan = &program.plan;
        for (origin, id) in plan.each_launch() {
            let (region, kernel) = (&plan.regions[id], program.kernels[id.0].as_ref());
            let (flops, bytes) = (plan.bound(region.flops())?, plan.bound(region.bytes())?);
            let busy = kernel.map_or(Ok(1.0), |k| busy(plan, k, target))?;
            // A GPU is asked for every phase of every round by itself; threads of a processor go through all of them.
            let asked = match kernel.filter(|_| target.warp > 1) {
                Some(k) => k.entries.len() as u64 * plan.bound(&k.rounds)?,
                None => 1,
            };
            let seconds = target.seconds(flops as f64, bytes as f64, region.product(kernel)) / busy
                + target.launch * asked as f64;
            let form = region.form().name();
            let key = kernel.map_or_else(|| format!("{form} {origin}"), |k| k.identity.clone());
            let row = match rows.entry(key) {
                std::collections::btree_map::Entry::Occupied(row) => row.into_mut(),
                std::collections::btree_map::Entry::Vacant(free) => {
                    let phases = kernel.zip(machined).map(|(k, made)| phases(plan, k, made, target));
                    let (launches, flops, bytes, seconds) = (0, 0, 0, 0.0);
                    let (origin, phases) = (origin.to_string(), phases.transpose()?.unwrap_or_default());
                    free.insert(Row { kernel, origin, form, launches, flops, bytes, seconds, phases })
                }
            };
            row.launches += 1;
            row.flops = row.flops.saturating_add(flops);
            row.bytes = row.bytes.saturating_add(bytes);
            row.seconds += seconds;
        }
    }
    let mut rows: Vec<Row> = rows.into_values().collect();
    rows.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    let one = |r: Row| {
        json!({
            "kernel": r.kernel.map(|k| &k.identity), "origin": r.origin, "form": r.form, "launches": r.launches,
            "flops": r.flops, "bytes": r.bytes, "predicted_seconds": r.seconds, "phases": r.phases,
        })
    };
    Ok(rows.into_iter().map(one).collect())
}

/// The part of a device's multiprocessors that a kernel keeps busy: that with most blocks ends last. 1 where threads come in no blocks.
fn busy(plan: &Plan, kernel: &Kernel, target: &Target) -> Result<f64, IrError> {
    if target.warp == 1 {
        return Ok(1.0);
    }
    let mut most = 0;
    for e in &kernel.entries {
        if let Grid::Units(blocks) = &e.grid {
            most = most.max(plan.bound(blocks)?);
        }
    }
    let units = u64::from(target.units.max(1));
    let rounds = most.div_ceil(units).max(1);
    Ok(most.max(1) as f64 / (rounds * units) as f64)
}

/// Each phase of a kernel as machine code.
fn phases(plan: &Plan, kernel: &Kernel, made: &Machined, target: &Target) -> Result<Vec<Value>, IrError> {
    let Some(cubin) = made.cubin(&kernel.identity) else { return Ok(vec![]) };
    let mut found = vec![];
    for e in &kernel.entries {
        let Some(usage) = cubin.usage.iter().find(|u| u.name == e.symbol) else { continue };
        let blocks = match &e.grid {
            Grid::Units(blocks) => Some(plan.bound(blocks)?),
            Grid::Counted(_) => None,
        };
        let shared = u64::from(usage.shared) + plan.bound(&e.shared)?;
        let (resident, occupancy) = resident(target, usage.registers, e.block, shared);
        found.push(json!({
            "blocks": blocks, "threads": e.block, "registers": usage.registers,
            "spill_bytes": usage.spill_stores + usage.spill_loads, "shared_bytes": shared,
            "resident_blocks": resident, "occupancy": occupancy, "hot_loop": hot_loop(&cubin.ptx, &e.symbol),
        }));
    }
    Ok(found)
}

/// The objects for people: a line a kernel, and one for each further phase.
pub fn shown(costs: &[Value], target: &Target) -> String {
    let number = |v: &Value| v.as_u64().unwrap_or(0);
    let mut lines = vec![];
    for row in costs {
        let text = |key: &str| row[key].as_str().unwrap_or("-").to_string();
        let seconds = row["predicted_seconds"].as_f64().unwrap_or(0.0);
        let first = [
            text("kernel"),
            text("origin"),
            text("form"),
            row["launches"].to_string(),
            count(number(&row["flops"])),
            bytes(number(&row["bytes"])),
            format!("{:.1}", seconds * 1e6),
        ];
        let none = vec![];
        let phases = row["phases"].as_array().unwrap_or(&none);
        for at in 0..phases.len().max(1) {
            let mut line = if at == 0 { first.to_vec() } else { vec![String::new(); first.len()] };
            line.extend(phases.get(at).into_iter().flat_map(phase));
            lines.push(line);
        }
    }
    let head = ["kernel", "origin", "form", "launches", "flops", "bytes", "predicted us"];
    let of_phase = ["blocks", "threads", "registers", "spilled", "shared", "occupancy", "hot loop"];
    let machined = lines.iter().any(|line| line.len() > head.len());
    let head: Vec<&str> = head.into_iter().chain(of_phase.into_iter().filter(|_| machined)).collect();
    let sum: f64 = costs.iter().filter_map(|row| row["predicted_seconds"].as_f64()).sum();
    let model =
        "the roofline of each kernel over the part of the device that its blocks keep busy, and its launch";
    format!(
        "{}\npredicted, not measured: {:.1} us a run on {}; {model}\n",
        table(&head, &lines),
        sum * 1e6,
        target.name
    )
}

/// Cells of a phase.
fn phase(p: &Value) -> Vec<String> {
    let hot = p["hot_loop"].as_object().into_iter().flatten();
    let hot: Vec<String> = hot.map(|(class, n)| format!("{class} {n}")).collect();
    let plain =
        ["blocks", "threads", "registers", "spill_bytes", "shared_bytes"].map(|key| p[key].to_string());
    let occupancy = format!("{:.0} %", p["occupancy"].as_f64().unwrap_or(0.0) * 100.0);
    plain.into_iter().chain([occupancy, hot.join(", ")]).collect()
}
