//! A run. In: inputs by name. Out: results in the session's memory, states in their next versions.

use super::execute::{grow, run_kernel, run_region};
use super::{Session, Spot};
use crate::profile::{Cost, ProfileRow};
use crate::{Error, Value};
use astrai_ir::DType;
use std::time::Instant;

impl Session {
    /// Runs once; the results stay in the session's memory until the next run.
    pub fn execute(&mut self, inputs: &[(&str, &Value)]) -> Result<(), Error> {
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
        if self.interpreted.is_some() {
            return self.interpret(inputs);
        }
        self.take(inputs)?;
        for i in 0..self.guards.len() {
            self.address(self.guards[i]);
            self.check(self.guards[i])?;
        }
        for i in 0..self.launches.len() {
            if let Err(e) = self.launch(i) {
                // A wrong input leaves nothing behind that the next run would read.
                if !matches!(e, Error::Input(_)) {
                    self.poisoned = Some(e.to_string());
                }
                return Err(e);
            }
        }
        Ok(())
    }

    /// Addresses of the inputs. Elements that lie on their own alignment are read where they are.
    fn take(&mut self, inputs: &[(&str, &Value)]) -> Result<(), Error> {
        self.given.0.clear();
        for (i, &from) in self.order.iter().enumerate() {
            let v = inputs[from].1;
            grow(&mut self.staged, i, 0)?;
            let at = v.bytes.as_ptr().cast_mut();
            if at.align_offset(v.dtype.bytes()) == 0 {
                self.given.0.push(at);
                continue;
            }
            grow(&mut self.staged, i, v.bytes.len())?;
            self.staged[i].bytes_mut()[..v.bytes.len()].copy_from_slice(&v.bytes);
            self.given.0.push(self.staged[i].address());
        }
        Ok(())
    }

    /// Addresses of a launch's buffers.
    fn address(&mut self, i: usize) {
        self.bound.0.clear();
        self.bound.0.extend(self.launches[i].spots.iter().map(|s| match s {
            Spot::Fixed(p) => *p,
            Spot::Input(i) => self.given.0[*i],
            Spot::Output(i) => self.result_memory[*i].address(),
        }));
    }

    /// Looks at what leads the launch whose addresses these are.
    fn check(&self, i: usize) -> Result<(), Error> {
        match &self.bounds[self.launches[i].region] {
            Some(b) => b.check(&self.bound, &self.sizes),
            None => Ok(()),
        }
    }

    fn launch(&mut self, i: usize) -> Result<(), Error> {
        self.address(i);
        if !self.launches[i].checked {
            self.check(i)?;
        }
        let launch = &self.launches[i];
        let started = Instant::now();
        match &launch.kernel {
            Some(k) => run_kernel(&self.pool, k, &self.bound, &mut self.dims, &self.scratch)?,
            None => run_region(&self.program.plan.regions[launch.region], &self.bound, &self.sizes)?,
        }
        let seconds = started.elapsed().as_secs_f64();
        if self.profile.is_some() {
            self.record(i, seconds)?;
        }
        Ok(())
    }

    /// What launch `i` costs at the sizes at hand; kept, for evaluating that takes longer than a small kernel.
    fn cost(&mut self, i: usize) -> Result<Cost, Error> {
        if self.costed.0 != self.sizes || self.costed.1.is_empty() {
            self.costed = (self.sizes.clone(), vec![None; self.launches.len()]);
        }
        if let Some(cost) = self.costed.1[i] {
            return Ok(cost);
        }
        let size = |s: &str| self.sizes.get(s).copied();
        let region = self.program.plan.regions[self.launches[i].region].within(&size);
        let value = |d: &astrai_ir::Dim| d.eval(&size).map_err(Error::Input);
        let (bytes, flops) = (value(&region.bytes())?, value(&region.flops())?);
        let seconds = self.target.seconds(flops as f64, bytes as f64, DType::F32);
        let cost = Cost { bytes, flops, seconds };
        self.costed.1[i] = Some(cost);
        Ok(cost)
    }

    fn record(&mut self, i: usize, measured: f64) -> Result<(), Error> {
        let Cost { bytes, flops, seconds: predicted } = self.cost(i)?;
        let launch = &self.launches[i];
        let anchor = self.program.plan.regions[launch.region].anchor;
        let kernel = self.program.kernels[launch.region].as_ref();
        let row = ProfileRow {
            origin: launch.origin.clone(),
            kernel: kernel.map_or("interpreter".into(), |k| k.name.clone()),
            anchor,
            bytes,
            flops,
            predicted,
            measured,
            runs: 1,
        };
        let Some(profile) = &mut self.profile else { return Ok(()) };
        match profile.rows.get_mut(i) {
            Some(old) => {
                old.bytes += bytes;
                old.flops += flops;
                old.measured += measured;
                old.predicted += predicted;
                old.runs += 1;
            }
            None => profile.rows.push(row),
        }
        Ok(())
    }
}
