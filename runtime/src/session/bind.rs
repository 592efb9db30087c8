//! Every launch of a run with its buffers. In: a plan and the session's memory. Out: kernels in order, each with pointers
//! or with the number of the input or output that it reads or writes.

use super::{BoundLaunch, Session, Spot};
use crate::Error;
use crate::device::{Block, Pointer};
use astrai_ir::plan::{Body, Buffer, Place, RegionId, Step};
use std::sync::Arc;

impl Session {
    pub(crate) fn bind(&mut self) -> Result<(), Error> {
        let program = self.program.clone();
        let plan = &program.plan;
        let base = self.arena.at();
        let params: Vec<Spot> = plan.main.params.iter().map(|(name, _)| self.param(name)).collect();
        let main_consts = self.constants(&plan.main)?;
        let spot = |(i, b): (usize, &Buffer)| match &b.place {
            Place::Param(i) => params[*i],
            Place::Result(i) => Spot::Output(*i),
            Place::Arena(o) => Spot::Fixed(base.offset(*o)),
            Place::Weight(w) => Spot::Fixed(self.weights[w.0]),
            Place::Const(_) => Spot::Fixed(main_consts[i].unwrap_or(base)),
        };
        let main: Vec<Spot> = plan.main.buffers.iter().enumerate().map(spot).collect();
        // The scratch that calls share follows the main body's part of the arena.
        let shared = base.offset(plan.main.arena);
        let consts: Vec<Vec<Option<Pointer>>> =
            plan.bodies.iter().map(|b| self.constants(b)).collect::<Result<_, Error>>()?;
        for step in &plan.main.steps {
            match step {
                Step::Run { region, reads, writes, origin, .. } => {
                    let spots = reads.iter().chain(writes).map(|b| main[b.0]).collect();
                    self.add(*region, spots, origin.clone());
                }
                Step::Call { body, args, results, origin } => {
                    let inner = &plan.bodies[*body];
                    let spot = |(i, b): (usize, &Buffer)| match &b.place {
                        Place::Param(p) => main[args[*p].0],
                        Place::Result(r) => main[results[*r].0],
                        Place::Arena(o) => Spot::Fixed(shared.offset(*o)),
                        Place::Weight(_) | Place::Const(_) => {
                            Spot::Fixed(consts[body.0][i].unwrap_or(shared))
                        }
                    };
                    let spots: Vec<Spot> = inner.buffers.iter().enumerate().map(spot).collect();
                    for s in &inner.steps {
                        if let Step::Run { region, reads, writes, origin: at, .. } = s {
                            let bound = reads.iter().chain(writes).map(|b| spots[b.0]).collect();
                            self.add(*region, bound, format!("{origin}.{at}").into());
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// An input of the run, or the memory of a state.
    fn param(&self, name: &str) -> Spot {
        match self.inputs.iter().position(|(n, _)| n == name) {
            Some(i) => Spot::Input(i),
            None => Spot::Fixed(self.buffers.get(name).map_or(self.arena.at(), |b| b.block.at())),
        }
    }

    fn add(&mut self, region: RegionId, spots: Vec<Spot>, origin: Arc<str>) {
        let kernel = self.kernels[region.0].clone();
        let guards = &self.program.plan.regions[region].matched.guards;
        let led_by = |spots: &[Spot]| -> Vec<Spot> {
            guards.iter().flat_map(|g| g.operands()).map(|at| spots[at.0]).collect()
        };
        let by = led_by(&spots);
        let checked = !by.is_empty() && by.iter().all(|s| matches!(s, Spot::Input(_)));
        let known = |&i: &usize| self.launches[i].region == region && led_by(&self.launches[i].spots) == by;
        if checked && !self.guarded.iter().any(known) {
            self.guarded.push(self.launches.len());
        }
        self.launches.push(BoundLaunch { region, kernel, spots, origin, checked });
    }

    /// Copies of a body's literal numbers.
    fn constants(&mut self, body: &Body) -> Result<Vec<Option<Pointer>>, Error> {
        let mut spots = Vec::with_capacity(body.buffers.len());
        for b in &body.buffers {
            let Place::Const(bits) = &b.place else {
                spots.push(None);
                continue;
            };
            let block = self.alloc(bits.len())?;
            self.device.write(block.at(), bits)?;
            spots.push(Some(block.at()));
            self.owned.push(block);
        }
        Ok(spots)
    }

    /// One block of zero bytes.
    pub(super) fn alloc(&self, len: usize) -> Result<Block, Error> {
        let block = self.device.alloc(&[len])?.pop();
        block.ok_or_else(|| Error::Input("the device gave no memory".into()))
    }
}
