//! A run. In: inputs by name. Out: results in the session's memory, states in their next versions.

use super::guards::Integers;
use super::sizes::value;
use super::{Session, Spot};
use crate::device::{Executable, Launch, interpret};
use crate::profile::{LaunchCost, ProfileRow};
use crate::{Error, Value};
use astrai_ir::Op;
use std::sync::Arc;
use std::time::Instant;

/// Most bytes of an input that are copied although kernels could read them where they are.
const MOVED: usize = 1 << 20;

impl Session {
    /// Runs once; the results stay in the session's memory until the next run.
    ///
    /// # Errors
    /// Inputs do not fit the program; the device failed, and the session is of no more use.
    pub fn execute(&mut self, inputs: &[(&str, &Value)]) -> Result<(), Error> {
        self.execute_rows(inputs, None)
    }

    /// The same, where of the first result only the rows are of use for which this says so: others are not copied from a device whose memory
    /// this process does not see, and hold anything then.
    ///
    /// # Errors
    /// As [`execute`](Self::execute).
    pub fn execute_rows(
        &mut self,
        inputs: &[(&str, &Value)],
        rows: Option<&dyn Fn(usize) -> bool>,
    ) -> Result<(), Error> {
        if let Some(why) = &self.poisoned {
            return Err(Error::Input(format!("an earlier run failed ({why}); open the session again")));
        }
        self.order.clear();
        for (name, _) in &self.inputs {
            let found = inputs.iter().position(|(n, _)| n == name);
            self.order.push(found.ok_or_else(|| Error::Input(format!("input `{name}` is missing")))?);
        }
        if let Some((extra, _)) = inputs.iter().find(|(n, _)| !self.inputs.iter().any(|(x, _)| x == n)) {
            return Err(Error::Input(format!("input `{extra}` is not one of the program's")));
        }
        self.measure(inputs)?;
        // Sessions over the same memory run one after another.
        let turn = self.buffers.turns();
        let _turn = turn.lock().unwrap_or_else(|e| e.into_inner());
        self.take(inputs)?;
        for i in 0..self.guarded.len() {
            let launch = self.guarded[i];
            self.point(launch);
            let spots = &self.launches[launch].spots;
            let given = |at: usize| match spots[at] {
                Spot::Input(i) => Some(&*inputs[self.order[i]].1.bytes),
                _ => None,
            };
            self.check(launch, &given)?;
        }
        self.runs += 1;
        let done = self.launch_all().and_then(|()| self.device.synchronise());
        done.and_then(|()| self.fetch_results(rows)).map_err(|e| self.poison(e))
    }

    /// Copies parts of the states of the program of which this says so, each divided along its rows into so many equal `parts`: of each
    /// pair the first to the second, pair after pair, after the runs before and before those after.
    ///
    /// # Errors
    /// A pair names no part, rows do not divide, or the device failed.
    pub fn copy_parts(
        &self,
        these: &dyn Fn(&str) -> bool,
        parts: usize,
        pairs: &[(usize, usize)],
    ) -> Result<(), Error> {
        let turn = self.buffers.turns();
        let _turn = turn.lock().unwrap_or_else(|e| e.into_inner());
        for node in self.program.graph.nodes() {
            let Op::State(state) = &node.op else { continue };
            let Some(state) = self.buffers.get(&state.name).filter(|_| these(&state.name)) else { continue };
            let rows = state.shape.first().copied().unwrap_or(0);
            let inside = pairs.iter().all(|&(from, to)| from.max(to) < parts && from != to);
            if !inside || !rows.is_multiple_of(parts) {
                let line = format!("{pairs:?} are not pairs of {parts} parts of {rows} rows");
                return Err(Error::Input(line));
            }
            let len = state.shape.iter().product::<usize>() / parts * state.dtype.bytes();
            let at = |part: usize| state.block.at().offset((part * len) as u64);
            pairs.iter().try_for_each(|&(from, to)| self.device.copy(at(from), at(to), len))?;
        }
        Ok(())
    }

    /// A wrong input leaves nothing behind that the next run would read; whatever else failed does.
    fn poison(&mut self, mut e: Error) -> Error {
        if let Error::Device { message, .. } = &mut e {
            *message += &format!("; it was run {} of this session", self.runs);
        }
        if !matches!(e, Error::Input(_)) {
            self.poisoned = Some(e.to_string());
        }
        e
    }

    /// Pointers to the inputs. Elements that kernels can read where they are, on their own alignment, are not copied.
    fn take(&mut self, inputs: &[(&str, &Value)]) -> Result<(), Error> {
        self.given.clear();
        for i in 0..self.order.len() {
            let v = inputs[self.order[i]].1;
            // What is small is copied where runs are recorded: its place stays the same then.
            let moves = self.device.resizes() && v.bytes.len() <= MOVED;
            let aligned = !moves && v.bytes.as_ptr().align_offset(v.dtype.bytes()) == 0;
            if let Some(at) = self.device.import(&v.bytes).filter(|_| aligned) {
                self.given.push(at);
                continue;
            }
            self.grow(i, v.bytes.len(), |s| &mut s.staged)?;
            self.device.write(self.staged[i].at(), &v.bytes)?;
            self.given.push(self.staged[i].at());
        }
        Ok(())
    }

    /// Pointers to a launch's buffers.
    pub(super) fn point(&mut self, i: usize) {
        self.bound.clear();
        self.bound.extend(self.launches[i].spots.iter().map(|s| match s {
            Spot::Fixed(p) => *p,
            Spot::Input(i) => self.given[*i],
            Spot::Output(i) => self.result_memory[*i].at(),
        }));
    }

    /// Looks at the integers that say where the launch whose buffers these are reads and writes; of inputs at what was given.
    fn check<'a>(&'a self, i: usize, given: &'a dyn Fn(usize) -> Option<&'a [u8]>) -> Result<(), Error> {
        let integers = Integers { device: &*self.device, buffers: &self.bound, given, sizes: &self.sizes };
        let guards = &self.program.plan.regions[self.launches[i].region].matched.guards;
        guards.iter().try_for_each(|g| integers.check(g))
    }

    pub(super) fn launch(&mut self, i: usize) -> Result<(), Error> {
        self.point(i);
        if !self.launches[i].checked {
            self.check(i, &|_| None)?;
        }
        let launch = &self.launches[i];
        let started = Instant::now();
        match &launch.kernel {
            Some(k) => self.launch_kernel(k, &launch.origin)?,
            None => {
                let region = &self.program.plan.regions[launch.region];
                interpret(&*self.device, region, &self.bound, &self.sizes)?
            }
        }
        if self.profile.is_some() {
            self.device.synchronise()?;
            self.record(i, started.elapsed().as_secs_f64())?;
        }
        Ok(())
    }

    /// Launches a kernel on the buffers that were pointed to.
    pub(super) fn launch_kernel(&self, kernel: &Arc<dyn Executable>, origin: &Arc<str>) -> Result<(), Error> {
        let (buffers, sizes, workspace) = (&*self.bound, &*self.dims, &self.workspace);
        kernel.launch(&Launch { buffers, symbols: &self.program.plan.symbols, sizes, workspace, origin })
    }

    /// Copies of results that this process does not see where they are.
    fn fetch_results(&mut self, mut wanted: Option<&dyn Fn(usize) -> bool>) -> Result<(), Error> {
        for r in &mut self.results {
            let (at, wanted) = (self.result_memory[r.at].at(), wanted.take());
            if self.device.host(at).is_some() {
                continue;
            }
            let count = r.shape.first().copied().unwrap_or(1);
            let row = r.shape.iter().skip(1).product::<usize>() * r.ty.dtype.bytes();
            r.copy.resize(count * row, 0);
            let is_wanted = |i: usize| wanted.is_none_or(|wanted| wanted(i));
            let mut first = 0;
            // Rows beside one another come together.
            while let Some(begin) = (first..count).find(|i| is_wanted(*i)) {
                let end = (begin..count).find(|i| !is_wanted(*i)).unwrap_or(count);
                let from = at.offset((begin * row) as u64);
                self.device.read(from, &mut r.copy[begin * row..end * row])?;
                first = end;
            }
        }
        Ok(())
    }

    /// What launch `i` costs at the sizes at hand; kept, for evaluating that takes longer than a small kernel.
    fn cost(&mut self, i: usize) -> Result<LaunchCost, Error> {
        if self.costed.0 != self.sizes || self.costed.1.is_empty() {
            self.costed = (self.sizes.clone(), vec![None; self.launches.len()]);
        }
        if let Some(cost) = self.costed.1[i] {
            return Ok(cost);
        }
        let at = self.launches[i].region;
        let (region, kernel) = (&self.program.plan.regions[at], self.program.kernels[at.0].as_ref());
        let (bytes, flops) = (value(region.bytes(), &self.sizes)?, value(region.flops(), &self.sizes)?);
        let target = self.device.backend().target();
        let seconds = target.seconds(flops as f64, bytes as f64, region.product(kernel));
        let cost = LaunchCost { bytes, flops, seconds };
        self.costed.1[i] = Some(cost);
        Ok(cost)
    }

    pub(super) fn record(&mut self, i: usize, measured: f64) -> Result<(), Error> {
        let LaunchCost { bytes, flops, seconds: predicted } = self.cost(i)?;
        let launch = &self.launches[i];
        let form = self.program.plan.regions[launch.region].form().name();
        let kernel = self.program.kernels[launch.region.0].as_ref();
        let row = ProfileRow {
            origin: launch.origin.clone(),
            kernel: kernel.map_or("interpreter".into(), |k| k.identity.clone()),
            form,
            bytes,
            flops,
            predicted,
            measured,
            runs: 1,
        };
        let Some(profile) = &mut self.profile else { return Ok(()) };
        match profile.rows.get_mut(i) {
            Some(old) => old.add(&row),
            None => profile.rows.push(row),
        }
        Ok(())
    }
}
