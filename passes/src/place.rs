//! Gives every buffer its memory. In: a plan whose steps are ordered. Out: offsets in one arena, evaluated at the symbols'
//! upper bounds: a value's bytes are free again after its last reader. Values are placed in the order in which they are made,
//! each in the smallest gap that fits, or, where that leaves a smaller arena, the largest first.

use astrai_ir::plan::{Body, BufferId, Place, Step, bound};
use astrai_ir::{IrError, Plan, Symbol};
use std::cmp::Reverse;

/// Offsets are multiples of this, the width of a cache line.
const ALIGN: u64 = 64;

/// The plan with offsets; its arenas are as large as they have to be.
pub fn place(plan: &Plan) -> Result<Plan, IrError> {
    let mut plan = plan.clone();
    for body in plan.bodies.iter_mut().chain([&mut plan.main]) {
        place_body(body, &plan.symbols)?;
    }
    plan.scratch = plan.bodies.iter().map(|b| b.arena).max().unwrap_or(0);
    Ok(plan)
}

/// A value of the arena: its bytes, and the steps from the one that makes it to the last that needs it.
struct Value {
    buffer: BufferId,
    bytes: u64,
    from: usize,
    until: usize,
}

fn place_body(body: &mut Body, symbols: &[Symbol]) -> Result<(), IrError> {
    let mut values = values(body, symbols)?;
    let made = offsets(&values);
    values.sort_by_key(|v| Reverse(v.bytes));
    let largest = offsets(&values);
    let (places, arena) = if largest.1 < made.1 { largest } else { made };
    places.into_iter().for_each(|(b, offset)| body.buffers[b].place = Place::Arena(offset));
    body.arena = body.arena.max(arena);
    Ok(())
}

/// The values of the arena in the order in which they are made.
fn values(body: &Body, symbols: &[Symbol]) -> Result<Vec<Value>, IrError> {
    let last = last_uses(body);
    let mut values: Vec<Value> = Vec::new();
    let mut seen = vec![false; body.buffers.len()];
    for from in 0..body.steps.len() {
        for buffer in writes(&body.steps[from]) {
            if seen[buffer] || !matches!(body.buffers[buffer].place, Place::Arena(_)) {
                continue;
            }
            seen[buffer] = true;
            let bytes = bound(symbols, &body.buffers[buffer].ty.bytes())?.next_multiple_of(ALIGN).max(ALIGN);
            values.push(Value { buffer, bytes, from, until: last[buffer].max(from) });
        }
    }
    Ok(values)
}

/// Offsets of values that are placed in this order, and the arena's size: each takes the smallest gap between those that are
/// needed at any of its steps; the end of the last when there is none.
fn offsets(values: &[Value]) -> (Vec<(BufferId, u64)>, u64) {
    let mut placed: Vec<(u64, &Value)> = Vec::with_capacity(values.len()); // by offset
    let mut arena = 0;
    for v in values {
        let (mut end, mut best) = (0, None);
        // Values read in a step are still needed while it writes.
        for &(offset, o) in placed.iter().filter(|(_, o)| o.from <= v.until && v.from <= o.until) {
            let gap = offset.saturating_sub(end);
            if gap >= v.bytes && best.is_none_or(|(g, _)| gap < g) {
                best = Some((gap, end));
            }
            end = end.max(offset + o.bytes);
        }
        let offset = best.map_or(end, |(_, offset)| offset);
        arena = arena.max(offset + v.bytes);
        placed.insert(placed.partition_point(|(o, _)| *o <= offset), (offset, v));
    }
    (placed.into_iter().map(|(offset, v)| (v.buffer, offset)).collect(), arena)
}

/// For each buffer the last step that reads or writes it.
fn last_uses(body: &Body) -> Vec<usize> {
    let mut last = vec![0; body.buffers.len()];
    for (at, step) in body.steps.iter().enumerate() {
        let (Step::Run { reads, writes, .. } | Step::Call { args: reads, results: writes, .. }) = step;
        reads.iter().chain(writes).for_each(|b| last[*b] = at);
    }
    last
}

fn writes(step: &Step) -> Vec<BufferId> {
    match step {
        Step::Run { writes, .. } => writes.clone(),
        Step::Call { results, .. } => results.clone(),
    }
}
