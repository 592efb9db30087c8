//! Gives every buffer its memory. In: a plan whose steps are ordered. Out: offsets in one arena, evaluated at the symbols'
//! upper bounds: a value's bytes are free again after its last reader. Values are placed in the order in which they are made,
//! each in the smallest gap that fits, or, where that leaves a smaller arena, the largest first; and as long as more is taken than
//! is ever in use at once, the value at the arena's end is placed first and the rest again.

use astrai_ir::plan::{Body, BufferId, Place, Step, bound};
use astrai_ir::{Backend, IrError, Plan, Symbol};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// The plan with offsets, multiples of what the backend's kernels want; its arenas are as large as they have to be.
pub fn place(mut plan: Plan, backend: &dyn Backend) -> Result<Plan, IrError> {
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
    let mut best = offsets_in_order(&values);
    if best.1 == least {
        give(body, best);
        return Ok(());
    }
    values.sort_by_key(|v| Reverse(v.bytes));
    let mut last = offsets(&values);
    for _ in 0..TRIES {
        let (places, arena) = &last;
        let offset_of: HashMap<BufferId, u64> = places.iter().copied().collect();
        let highest = values.iter().position(|v| offset_of[&v.buffer] + v.bytes == *arena);
        if last.1 < best.1 {
            best = last;
        }
        let Some(highest) = highest.filter(|at| *at > 0 && best.1 > least) else { break };
        values[..=highest].rotate_right(1);
        last = offsets(&values);
    }
    give(body, best);
    Ok(())
}

/// Gives the buffers these places in an arena of this size.
fn give(body: &mut Body, (places, arena): (Vec<(BufferId, u64)>, u64)) {
    places.into_iter().for_each(|(b, offset)| body.buffers[b].place = Place::Arena(offset));
    body.arena = body.arena.max(arena);
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

/// [`offsets`] of values in the order in which they are made: the gaps between those in use are known from step to step.
fn offsets_in_order(values: &[Value]) -> (Vec<(BufferId, u64)>, u64) {
    let (mut used, mut gaps, mut ends) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
    let (mut places, mut arena) = (Vec::with_capacity(values.len()), 0);
    for v in values {
        while let Some(&(until, offset)) = ends.first().filter(|(until, _)| *until < v.from) {
            ends.remove(&(until, offset));
            release(&mut used, &mut gaps, offset);
        }
        let end = used.last_key_value().map_or(0, |(offset, bytes)| offset + bytes);
        let gap: Option<&(u64, u64)> = gaps.range((v.bytes, 0)..).next();
        let offset = gap.map_or(end, |(_, offset)| *offset);
        if let Some(&(bytes, offset)) = gap {
            gaps.remove(&(bytes, offset));
            if bytes > v.bytes {
                gaps.insert((bytes - v.bytes, offset + v.bytes));
            }
        }
        used.insert(offset, v.bytes);
        ends.insert((v.until, offset));
        arena = arena.max(offset + v.bytes);
        places.push((v.buffer, offset));
    }
    (places, arena)
}

/// Frees the memory at an offset: it joins the gaps beside it, and is none at the end.
fn release(used: &mut BTreeMap<u64, u64>, gaps: &mut BTreeSet<(u64, u64)>, offset: u64) {
    let Some(bytes) = used.remove(&offset) else { return };
    let below = used.range(..offset).next_back().map_or(0, |(at, bytes)| at + bytes);
    let above = used.range(offset..).next().map(|(at, _)| *at);
    gaps.remove(&(offset - below, below));
    if let Some(above) = above {
        gaps.remove(&(above - offset - bytes, offset + bytes));
        gaps.insert((above - below, below));
    }
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
