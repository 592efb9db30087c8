//! Every launch of a run with its buffers. In: a plan and the session's memory. Out: kernels in order, each with addresses
//! or with the number of the input or output that it reads or writes.

use super::{Launch, Session, Spot};
use crate::Error;
use crate::memory::Memory;
use astrai_ir::plan::{Body, Buffer, Place, Step};
use std::sync::Arc;

impl Session {
    pub(crate) fn bind(&mut self) -> Result<(), Error> {
        let program = self.program.clone();
        let plan = &program.plan;
        let base = self.arena.address();
        let params: Vec<Spot> = plan.main.params.iter().map(|(name, _)| self.param(name)).collect();
        let main: Vec<Spot> = self.spots(&plan.main, &|p| match p {
            Place::Param(i) => params[*i],
            Place::Result(i) => Spot::Output(*i),
            // SAFETY: `place` keeps every offset and length inside the arena.
            Place::Arena(o) => Spot::Fixed(unsafe { base.add(*o as usize) }),
            Place::Weight(_) | Place::Const(_) => Spot::Fixed(base),
        })?;
        // SAFETY: the shared scratch follows the main body's part of the arena.
        let shared = unsafe { base.add(plan.main.arena as usize) };
        let consts: Vec<Vec<Option<*mut u8>>> =
            plan.bodies.iter().map(|b| self.const_spots(b)).collect::<Result<_, Error>>()?;
        for step in &plan.main.steps {
            match step {
                Step::Run { region, reads, writes, origin, .. } => {
                    let spots = reads.iter().chain(writes).map(|b| main[*b]).collect();
                    self.add(*region, spots, origin.clone());
                }
                Step::Call { body, args, results, origin } => {
                    let inner = &plan.bodies[*body];
                    let spot = |i: usize, b: &Buffer| match &b.place {
                        Place::Param(p) => main[args[*p]],
                        Place::Result(r) => main[results[*r]],
                        // SAFETY: `place` keeps every offset and length inside the shared scratch.
                        Place::Arena(o) => Spot::Fixed(unsafe { shared.add(*o as usize) }),
                        Place::Weight(_) | Place::Const(_) => Spot::Fixed(consts[*body][i].unwrap_or(shared)),
                    };
                    let spots: Vec<Spot> =
                        inner.buffers.iter().enumerate().map(|(i, b)| spot(i, b)).collect();
                    for s in &inner.steps {
                        if let Step::Run { region, reads, writes, origin: at, .. } = s {
                            let bound = reads.iter().chain(writes).map(|b| spots[*b]).collect();
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
            None => Spot::Fixed(self.buffers.get(name).map_or(self.arena.address(), |b| b.address())),
        }
    }

    fn add(&mut self, region: usize, spots: Vec<Spot>, origin: Arc<str>) {
        let kernel = self.program.kernels[region].as_ref().and_then(|k| self.loaded.get(&k.name).cloned());
        let led_by = |spots: &[Spot]| -> Vec<Spot> {
            let buffers = self.bounds[region].iter().flat_map(|b| b.buffers());
            buffers.map(|b| spots[b]).collect()
        };
        let by = led_by(&spots);
        let checked = !by.is_empty() && by.iter().all(|s| matches!(s, Spot::Input(_)));
        let known = |&i: &usize| self.launches[i].region == region && led_by(&self.launches[i].spots) == by;
        if checked && !self.guards.iter().any(known) {
            self.guards.push(self.launches.len());
        }
        self.launches.push(Launch { region, kernel, spots, origin, checked });
    }

    fn spots(&mut self, body: &Body, place: &dyn Fn(&Place) -> Spot) -> Result<Vec<Spot>, Error> {
        let consts = self.const_spots(body)?;
        let spot = |(i, b): (usize, &Buffer)| match (&b.place, consts[i]) {
            (_, Some(p)) => Spot::Fixed(p),
            (Place::Weight(w), _) => Spot::Fixed(self.weights[*w]),
            (p, _) => place(p),
        };
        Ok(body.buffers.iter().enumerate().map(spot).collect())
    }

    /// Copies of a body's literal numbers.
    fn const_spots(&mut self, body: &Body) -> Result<Vec<Option<*mut u8>>, Error> {
        let mut spots = Vec::with_capacity(body.buffers.len());
        for b in &body.buffers {
            spots.push(match &b.place {
                Place::Const(bits) => {
                    let mut m = Memory::zeroed(bits.len())?;
                    m.bytes_mut()[..bits.len()].copy_from_slice(bits);
                    let at = m.address();
                    self.owned.push(m);
                    Some(at)
                }
                _ => None,
            });
        }
        Ok(spots)
    }
}
