//! Gives every buffer its memory. In: a plan whose steps are ordered. Out: offsets in one arena, evaluated at the symbols'
//! upper bounds: a value's bytes are free again after its last reader, and the next value takes the smallest gap that fits.

use astrai_ir::plan::{Body, BufferId, Place, Step, bound};
use astrai_ir::{IrError, Plan, Symbol};

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

/// A stretch of the arena in use.
struct Slot {
    offset: u64,
    bytes: u64,
    until: usize,
}

fn place_body(body: &mut Body, symbols: &[Symbol]) -> Result<(), IrError> {
    let last = last_uses(body);
    let mut slots: Vec<Slot> = Vec::new();
    let mut placed = vec![false; body.buffers.len()];
    for at in 0..body.steps.len() {
        // Values read in this step are still needed while it writes.
        slots.retain(|s| s.until >= at);
        for b in writes(&body.steps[at]) {
            if placed[b] || !matches!(body.buffers[b].place, Place::Arena(_)) {
                continue;
            }
            placed[b] = true;
            let bytes = bound(symbols, &body.buffers[b].ty.bytes())?.next_multiple_of(ALIGN).max(ALIGN);
            let offset = fit(&mut slots, bytes);
            slots.push(Slot { offset, bytes, until: last[b].max(at) });
            body.buffers[b].place = Place::Arena(offset);
            body.arena = body.arena.max(offset + bytes);
        }
    }
    Ok(())
}

/// The smallest gap of at least `bytes`; the end of the last slot when there is none.
fn fit(slots: &mut [Slot], bytes: u64) -> u64 {
    slots.sort_by_key(|s| s.offset);
    let (mut end, mut best) = (0, None);
    for s in slots.iter() {
        let gap = s.offset.saturating_sub(end);
        if gap >= bytes && best.is_none_or(|(g, _)| gap < g) {
            best = Some((gap, end));
        }
        end = end.max(s.offset + s.bytes);
    }
    best.map_or(end, |(_, offset)| offset)
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
