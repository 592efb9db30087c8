//! A step over time, as events of Chrome's trace viewers. In: an estimate. Out: for every stage its pieces in the order in which it
//! computes them (1F1B, perhaps interleaved), each with its kernels, and the update.

use crate::Refused;
use crate::estimate::{Estimate, Rank};
use crate::schedule::Purpose;
use serde_json::{Value, json};
use std::collections::VecDeque;

/// Most launches that are written; of a longer step a piece on a stage is one event.
const MOST: usize = 200_000;

/// A group of a stage's layers that computes a piece, forward or backward.
#[derive(Clone, Copy)]
struct Slot {
    backward: bool,
    piece: usize,
    group: usize,
}

/// The slots of a stage, in their order.
fn order(e: &Estimate, stage: usize) -> VecDeque<Slot> {
    let (p, v, m) = (e.ranks.len(), e.schedule.interleave as usize, e.schedule.pieces() as usize);
    let all = m * v;
    // Pieces come as many at a time as there are stages, through one group of layers after another.
    let slot = |k: usize, backward: bool| {
        let group = k % (p * v) / p;
        let group = if backward { v - 1 - group } else { group };
        Slot { backward, piece: k / (p * v) * p + k % p, group }
    };
    if e.schedule.purpose != Purpose::Train {
        return (0..all).map(|k| slot(k, false)).collect();
    }
    let ahead = e.schedule.ahead(stage);
    let after = |k: usize| [k.checked_sub(ahead).map(|k| slot(k, true)), (k < all).then(|| slot(k, false))];
    // A stage that is ahead as much as it may be computes one forward, one backward.
    (0..all + ahead).flat_map(|k| after(k).into_iter().rev().flatten()).collect()
}

/// Seconds of a piece on a stage, forward and backward.
fn seconds(rank: &Rank, interleave: f64) -> [f64; 2] {
    let of = |phase: usize| {
        let launches = rank.launches.iter().filter(|l| l.phase == phase).map(|l| &rank.rows[l.row]);
        launches.map(|r| r.time.total() * if r.work.is_sent() { interleave } else { 1.0 }).sum()
    };
    [of(0), of(1)]
}

/// The launches of a step as events; times are microseconds.
///
/// # Errors
/// There are too many pieces.
pub fn timeline(e: &Estimate) -> Result<Value, Refused> {
    let (p, s) = (e.ranks.len(), &e.schedule);
    let (v, m) = (s.interleave as usize, s.pieces() as usize);
    let slots = p.saturating_mul(m).saturating_mul(v);
    if slots > MOST {
        return Err(format!(
            "--timeline: {slots} pieces on all stages are too many; give fewer --micro-batches, or a greater --chunk"
        ));
    }
    let launches: usize = e.ranks.iter().map(|r| r.launches.len() * m).sum();
    let whole = v == 1 && launches <= MOST;
    let own: Vec<[f64; 2]> = e.ranks.iter().map(|r| seconds(r, v as f64).map(|s| s / v as f64)).collect();
    // In training all go at the pace of the slowest, as the step's time says; interleaved, forward and backward each.
    let whole_of = |s: &[f64; 2]| s[0] + s[1];
    let slowest = own.iter().copied().max_by(|a, b| whole_of(a).total_cmp(&whole_of(b))).unwrap_or_default();
    let pace = |[forward, backward]: [f64; 2]| match s.purpose {
        Purpose::Train if v > 1 => slowest,
        Purpose::Train => [forward, whole_of(&slowest) - forward],
        _ => [forward, backward],
    };
    let mut events = Events { list: vec![], whole };
    let mut left: Vec<VecDeque<Slot>> = (0..p).map(|stage| order(e, stage)).collect();
    // When each slot ends, none where it has not begun; and when each stage is free.
    let mut ends = vec![None; 2 * slots];
    let at = |slot: Slot, stage: usize| {
        ((usize::from(slot.backward) * m + slot.piece) * v + slot.group) * p + stage
    };
    let mut free = vec![0.0f64; p];
    let before = |slot: Slot, stage: usize| match (slot.backward, slot.group) {
        (false, _) if stage > 0 => Some((slot, stage - 1)),
        (false, 0) => None,
        (false, group) => Some((Slot { group: group - 1, ..slot }, p - 1)),
        (true, _) if stage + 1 < p => Some((slot, stage + 1)),
        (true, group) if group + 1 < v => Some((Slot { group: group + 1, ..slot }, 0)),
        (true, _) => Some((Slot { backward: false, ..slot }, stage)),
    };
    e.ranks.iter().enumerate().for_each(|(stage, _)| events.name(stage));
    loop {
        let mut moved = false;
        for stage in 0..p {
            while let Some(slot) = left[stage].front().copied() {
                let ready = before(slot, stage).map_or(Some(0.0), |(slot, stage)| ends[at(slot, stage)]);
                let Some(ready) = ready else { break };
                let (start, phase) = (free[stage].max(ready), usize::from(slot.backward));
                let pace = pace(own[stage])[phase];
                events.piece(&e.ranks[stage], stage, slot, start, own[stage][phase].min(pace));
                free[stage] = start + pace;
                ends[at(slot, stage)] = Some(free[stage]);
                left[stage].pop_front();
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    let through = free.iter().copied().fold(0.0, f64::max);
    for (stage, rank) in e.ranks.iter().enumerate().filter(|(_, r)| r.update() > 0.0) {
        events.run(rank, stage, 2, through, ("update".into(), rank.update()));
    }
    Ok(json!({"displayTimeUnit": "ms", "traceEvents": events.list}))
}

/// Events, of kernels or of pieces.
struct Events {
    list: Vec<Value>,
    whole: bool,
}

impl Events {
    fn name(&mut self, stage: usize) {
        let name = json!({"name": format!("stage {stage}")});
        self.list.push(json!({"name": "process_name", "ph": "M", "pid": stage, "args": name}));
    }

    fn piece(&mut self, rank: &Rank, stage: usize, slot: Slot, start: f64, seconds: f64) {
        let way = if slot.backward { "backward" } else { "forward" };
        let of_group = if self.whole { String::new() } else { format!(", group {}", slot.group) };
        let name = format!("{way}, piece {}{of_group}", slot.piece);
        self.run(rank, stage, usize::from(slot.backward), start, (name, seconds));
    }

    /// The kernels of a phase, or all of it.
    fn run(&mut self, rank: &Rank, stage: usize, phase: usize, start: f64, (name, all): (String, f64)) {
        let mut now = start * 1e6;
        if !self.whole {
            let event = json!({"name": name, "ph": "X", "ts": now, "dur": all * 1e6, "pid": stage, "tid": 0});
            return self.list.push(event);
        }
        for l in rank.launches.iter().filter(|l| l.phase == phase) {
            let row = &rank.rows[l.row];
            let (work, time, us) = (&row.work, &row.time, row.time.total() * 1e6);
            self.list.push(json!({
                "name": work.origin, "cat": work.form, "ph": "X", "ts": now, "dur": us, "pid": stage, "tid": 0,
                "args": {"program": row.program, "run": name, "layer": work.layer, "flops": time.flops,
                    "bytes": time.bytes, "bound_by": time.bound()},
            }));
            let live = json!({"bytes": l.live});
            self.list.push(
                json!({"name": "values between kernels", "ph": "C", "ts": now, "pid": stage, "args": live}),
            );
            now += us;
        }
    }
}
