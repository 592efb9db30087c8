//! Gives every buffer its memory. In: a plan whose steps are ordered. Out: offsets in one arena, evaluated at the symbols'
//! upper bounds: a value's bytes are free again after its last reader. Values are placed in the order in which they are made,
//! each in the smallest gap that fits, or, where that leaves a smaller arena, the largest first; and as long as more is taken than
//! is ever in use at once, the value at the arena's end is placed first and the rest again.

use astrai_ir::plan::{Body, BufferId, Place, Step, bound};
use astrai_ir::{Backend, IrError, Plan, Symbol};
use std::cmp::Reverse;

/// The plan with offsets, multiples of what the backend's kernels want; its arenas are as large as they have to be.
pub fn place(plan: &Plan, backend: &dyn Backend) -> Result<Plan, IrError> {
    let mut plan = plan.clone();
    for body in plan.bodies.iter_mut().chain([&mut plan.main]) {
        place_body(body, &plan.symbols, backend.alignment())?;
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

/// Orders tried beyond the first two.
const TRIES: usize = 32;

fn place_body(body: &mut Body, symbols: &[Symbol], align: u64) -> Result<(), IrError> {
    let mut values = values(body, symbols, align)?;
    let least = most_in_use(&values, body.steps.len());
    let mut best = offsets(&values);
    values.sort_by_key(|v| Reverse(v.bytes));
    let mut last = offsets(&values);
    for _ in 0..TRIES {
        let (places, arena) = &last;
        let at_end =
            |v: &Value| places.iter().any(|(b, offset)| *b == v.buffer && offset + v.bytes == *arena);
        let highest = values.iter().position(at_end);
        if last.1 < best.1 {
            best = last;
        }
        let Some(highest) = highest.filter(|at| *at > 0 && best.1 > least) else { break };
        values[..=highest].rotate_right(1);
        last = offsets(&values);
    }
    let (places, arena) = best;
    places.into_iter().for_each(|(b, offset)| body.buffers[b].place = Place::Arena(offset));
    body.arena = body.arena.max(arena);
    Ok(())
}

/// Most bytes of values that one of the steps needs.
fn most_in_use(values: &[Value], steps: usize) -> u64 {
    let (mut made, mut free) = (vec![0; steps], vec![0; steps + 1]);
    for v in values {
        made[v.from] += v.bytes;
        free[v.until + 1] += v.bytes;
    }
    let mut now = 0;
    let after = |(made, free): (u64, u64)| {
        now = now + made - free;
        now
    };
    made.into_iter().zip(free).map(after).max().unwrap_or(0)
}

/// The values of the arena in the order in which they are made.
fn values(body: &Body, symbols: &[Symbol], align: u64) -> Result<Vec<Value>, IrError> {
    let last = last_uses(body);
    let mut values: Vec<Value> = Vec::new();
    let mut seen = vec![false; body.buffers.len()];
    for from in 0..body.steps.len() {
        let (Step::Run { writes, .. } | Step::Call { results: writes, .. }) = &body.steps[from];
        for &buffer in writes {
            if seen[buffer.0] || !matches!(body.buffers[buffer].place, Place::Arena(_)) {
                continue;
            }
            seen[buffer.0] = true;
            let bytes = bound(symbols, &body.buffers[buffer].ty.bytes())?.next_multiple_of(align).max(align);
            values.push(Value { buffer, bytes, from, until: last[buffer.0].max(from) });
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
        reads.iter().chain(writes).for_each(|b| last[b.0] = at);
    }
    last
}
