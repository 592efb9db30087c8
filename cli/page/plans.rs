//! The plan as the page has it. In: a compiled program. Out: its kernels with their source and cost, its steps in order, what is
//! repeated once, and for every body which value has which bytes of the arena from which step to which.

use super::Strings;
use super::bodies::{Bodies, MAIN};
use super::fold::{ranges, repeats, star};
use crate::failure::Failure;
use crate::summary::fields;
use astrai_ir::plan::{Body, Place, Step};
use astrai_ir::{Plan, Region, Target};
use astrai_runtime::Compiled;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Kernels, steps and memory of a program. `planned` are the bodies of the graph that was planned.
pub fn plan(
    program: &Compiled,
    target: &Target,
    planned: &[(String, usize)],
    strings: &mut Strings,
    bodies: &Bodies,
) -> Result<Map<String, Value>, Failure> {
    let plan = &program.plan;
    let mut regions = Vec::with_capacity(plan.regions.len());
    for (region, kernel) in plan.regions.iter().zip(&program.kernels) {
        let mut row = costs(plan, region, target)?;
        row.insert("kernel".into(), json!(kernel.as_ref().map(|k| &k.identity)));
        row.insert("source".into(), json!(kernel.as_ref().map(|k| &k.source)));
        regions.push(row);
    }
    let mut shown = Vec::new();
    for ((kind, of), body) in planned.iter().zip([&plan.main].into_iter().chain(&plan.bodies)) {
        let mut view = View { plan, body, of: *of, strings: &mut *strings, bodies };
        let groups = view.groups();
        shown.push(json!({
            "kind": if kind.is_empty() { MAIN } else { kind }, "graph": of, "arena": body.arena, "groups": groups,
            "memory": view.memory()?, "labels": view.labels(),
        }));
    }
    Ok(fields(json!({"regions": regions, "plans": shown, "scratch": plan.scratch})))
}

/// What a kernel reads, writes and costs at the symbols' upper bounds; seconds by the target's roofline, as the profiler
/// predicts them.
fn costs(plan: &Plan, region: &Region, target: &Target) -> Result<Map<String, Value>, Failure> {
    let (flops, bytes) = (plan.bound(region.flops())?, plan.bound(region.bytes())?);
    let types = |all: Vec<astrai_ir::Type>| all.iter().map(ToString::to_string).collect::<Vec<_>>();
    Ok(fields(json!({
        "form": region.form().name(),
        "origin": region.origin,
        "reads": types(region.piece.read_types()),
        "writes": types(region.piece.write_types()),
        "flops": flops,
        "bytes": bytes,
        "flops_of": region.flops().to_string(),
        "bytes_of": region.bytes().to_string(),
        "seconds": target.seconds(flops as f64, bytes as f64, region.product(None)),
    })))
}

/// One body of a plan.
struct View<'a, 'b> {
    plan: &'a Plan,
    body: &'a Body,
    /// Its graph.
    of: usize,
    strings: &'b mut Strings,
    bodies: &'b Bodies<'a>,
}

impl View<'_, '_> {
    /// Steps in order as groups: how often, the step with which the first begins, and its steps: kernel or body, origin,
    /// nodes, and which layers the group goes through.
    fn groups(&mut self) -> Vec<Value> {
        let steps = &self.body.steps;
        let key = |s: &Step| match s {
            Step::Run { region, origin, .. } => (0, region.0, star(origin).0),
            Step::Call { body, origin, .. } => (1, body.0, star(origin).0),
        };
        let keys: Vec<_> = steps.iter().map(key).collect();
        let mut groups = Vec::new();
        for (times, from, len) in repeats(&keys) {
            let mut rows = Vec::new();
            for at in from..from + len {
                let all = (0..times).map(|n| star(origin(&steps[at + n * len])).1);
                let which = if times > 1 { ranges(&all.collect::<Vec<_>>()) } else { String::new() };
                let name = if times > 1 { keys[at].2.clone() } else { origin(&steps[at]).to_string() };
                let (name, which) = (self.strings.of(&name), self.strings.of(&which));
                rows.push(match &steps[at] {
                    Step::Run { region, nodes, .. } => {
                        json!({"run": region.0, "o": name, "i": which, "n": self.bodies.nodes(self.of, nodes)})
                    }
                    Step::Call { body, .. } => json!({"call": body.0, "o": name, "i": which}),
                });
            }
            groups.push(json!([times, from, rows]));
        }
        groups
    }

    /// Values in the arena: offset, bytes, first and last step, origin, type.
    fn memory(&mut self) -> Result<Vec<Value>, Failure> {
        let mut used: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
        for (at, step) in self.body.steps.iter().enumerate() {
            let (Step::Run { reads, writes, .. } | Step::Call { args: reads, results: writes, .. }) = step;
            for b in reads.iter().chain(writes) {
                used.entry(b.0).or_insert((at, at)).1 = at;
            }
        }
        let mut rows = Vec::new();
        for (b, (first, last)) in used {
            let buffer = &self.body.buffers[b];
            let Place::Arena(offset) = buffer.place else { continue };
            let bytes = self.plan.bound(&buffer.ty.bytes())?;
            let (origin, ty) = (self.strings.of(&buffer.origin), self.strings.of(&buffer.ty.to_string()));
            rows.push(json!([offset, bytes, first, last, origin, ty]));
        }
        Ok(rows)
    }

    /// What every step is called, for the axis of time; none where the arena is empty.
    fn labels(&mut self) -> Vec<usize> {
        let steps = if self.body.arena > 0 { self.body.steps.as_slice() } else { &[] };
        steps.iter().map(|s| self.strings.of(origin(s))).collect()
    }
}

fn origin(step: &Step) -> &str {
    match step {
        Step::Run { origin, .. } | Step::Call { origin, .. } => origin,
    }
}
