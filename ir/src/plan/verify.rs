//! What must hold of a plan, whoever made it: steps read what was written before them, kernels get as many buffers as their regions
//! have, and in a placed plan no two values share memory while both are needed.

use super::{Body, BufferId, Place, Plan, Step, bound};
use crate::graph::IrError;
use crate::region::Form;
use std::collections::BTreeMap;

impl Plan {
    /// `Ok` when the plan can run. `placed`: its buffers have offsets, which are checked, too.
    pub fn verify(&self, placed: bool) -> Result<(), IrError> {
        for body in self.bodies.iter().chain([&self.main]) {
            let wrong = |message: String| IrError { origin: format!("body `{}`", body.name), message };
            let last = self.steps(body).map_err(wrong)?;
            if placed {
                self.overlaps(body, &last)?.map_or(Ok(()), |message| Err(wrong(message)))?;
            }
        }
        Ok(())
    }

    /// For each buffer the last step that needs it.
    fn steps(&self, body: &Body) -> Result<Vec<usize>, String> {
        let given = |b: BufferId| {
            matches!(body.buffers[b].place, Place::Param(_) | Place::Weight(_) | Place::Const(_))
        };
        let mut written: Vec<bool> = (0..body.buffers.len()).map(|b| given(BufferId(b))).collect();
        let mut last = vec![0; body.buffers.len()];
        for (at, step) in body.steps.iter().enumerate() {
            let (reads, writes) = match step {
                Step::Run { region, reads, writes, .. } => {
                    let piece = &self.regions[*region].piece;
                    if [reads.len(), writes.len()] != [piece.reads.len(), piece.graph.outputs().len()] {
                        return Err(format!("step {at} binds other buffers than region {region} has"));
                    }
                    (reads, writes)
                }
                Step::Call { body, args, results, .. } => {
                    let called = &self.bodies[*body];
                    if [args.len(), results.len()] != [called.params.len(), called.results.len()] {
                        return Err(format!("step {at} binds other values than `{}` has", called.name));
                    }
                    (args, results)
                }
            };
            if let Some(b) = reads.iter().find(|b| !written[b.0]) {
                return Err(format!("step {at} reads buffer {b}, which nothing wrote"));
            }
            writes.iter().for_each(|b| written[b.0] = true);
            reads.iter().chain(writes).for_each(|b| last[b.0] = at);
        }
        Ok(last)
    }

    /// A line about two values that share bytes of the arena at one step.
    fn overlaps(&self, body: &Body, last: &[usize]) -> Result<Option<String>, IrError> {
        let mut live: BTreeMap<u64, (u64, BufferId)> = BTreeMap::new();
        let mut made = vec![false; body.buffers.len()];
        for (at, step) in body.steps.iter().enumerate() {
            let (Step::Run { reads, writes, .. } | Step::Call { args: reads, results: writes, .. }) = step;
            for &b in writes {
                let Place::Arena(offset) = body.buffers[b].place else { continue };
                if std::mem::replace(&mut made[b.0], true) {
                    continue;
                }
                let end = offset + bound(&self.symbols, &body.buffers[b].ty.bytes())?;
                if end > body.arena {
                    return Ok(Some(format!("buffer {b} ends at {end} of an arena of {}", body.arena)));
                }
                let below = live.range(..end.max(offset + 1)).next_back();
                if let Some((_, (until, other))) = below.filter(|(_, (until, _))| *until > offset) {
                    return Ok(Some(format!(
                        "buffers {b} and {other}, until {until}, share memory at step {at}"
                    )));
                }
                live.insert(offset, (end.max(offset + 1), b));
            }
            for &b in reads.iter().chain(writes).filter(|b| last[b.0] == at) {
                if let Place::Arena(offset) = body.buffers[b].place
                    && live.get(&offset).is_some_and(|(_, there)| *there == b)
                {
                    live.remove(&offset);
                }
            }
        }
        Ok(None)
    }

    /// True when a step of the plan has no kernel, because ranks exchange values there.
    pub fn has_collectives(&self) -> bool {
        self.regions.iter().any(|r| *r.form() == Form::Collective)
    }
}
