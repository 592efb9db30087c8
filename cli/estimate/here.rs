//! `astrai estimate` on the device at hand, and beside what others measured.

use super::{Estimate, shown};
use crate::failure::{Failure, bail};
use astrai_engine::machine::{Kind, Machine};
use astrai_estimate::check::{Checked, calibrate, check};
use astrai_estimate::hardware::{Hardware, Precision};
use astrai_estimate::schedule::{Purpose, Schedule};
use astrai_estimate::{measure, published, report};
use astrai_ir::DType;
use astrai_runtime::device::cpu::peaks::Peaks;
use std::io::Write;
use std::path::Path;

impl Estimate {
    fn machine(&self) -> Result<Machine, Failure> {
        let machine = Machine::new(Kind::Cpu, self.here.threads.into())?;
        crate::failure::warn(&machine.warnings);
        Ok(machine)
    }

    /// The hardware of the flag; without one this machine, measured.
    fn here(&self, machine: &Machine) -> Result<Hardware, Failure> {
        if let Some(name) = &self.hardware {
            return Ok(Hardware::open(name)?);
        }
        let device = &*machine.device;
        let Some(peaks) = Peaks::measure(device, &[]) else {
            bail!("the peaks of this processor cannot be measured; give --hardware FILE");
        };
        let rows = [(Precision::F32, DType::F32), (Precision::Bf16, DType::BF16)];
        let compute = rows.map(|(p, dtype)| (p, peaks.arithmetic(dtype).rate)).to_vec();
        Ok(measure::hardware(device, compute, peaks.reading.rate))
    }

    pub(super) fn measure(&self, out: &mut dyn Write) -> Result<(), Failure> {
        let (machine, Some(file)) = (self.machine()?, &self.here.measure) else { return Ok(()) };
        if self.hardware.is_some() {
            bail!("--measure writes what is here; leave --hardware out");
        }
        write(file, &self.here(&machine)?, out)
    }

    fn one(&self, model: &Path, s: &Schedule, h: &Hardware, machine: &Machine) -> Result<Checked, Failure> {
        let (config, file) = self.config(model)?;
        let found = check(&config, s, h, machine, self.here.repeat as usize);
        Ok(found.map_err(|e| if e.starts_with('-') { e } else { format!("{file}: {e}") })?)
    }

    pub(super) fn check(&self, model: &Path, out: &mut dyn Write) -> Result<(), Failure> {
        let machine = self.machine()?;
        let hardware = self.here(&machine)?;
        let schedule = self.schedule.schedule();
        let found = self.one(model, &schedule, &hardware, &machine)?;
        match self.json {
            true => writeln!(out, "{}", report::checked(&found, &schedule, &hardware))?,
            false => write!(out, "{}", shown::checked(&found, &hardware))?,
        }
        Ok(())
    }

    pub(super) fn calibrate(&self, out: &mut dyn Write) -> Result<(), Failure> {
        let (machine, Some(file)) = (self.machine()?, &self.here.calibrate) else { return Ok(()) };
        let hardware = self.here(&machine)?;
        let mut steps = Vec::new();
        for model in &self.model {
            for purpose in [Purpose::Train, Purpose::Prefill, Purpose::Decode] {
                let schedule = Schedule { purpose, ..self.schedule.schedule() };
                steps.push(self.one(model, &schedule, &hardware, &machine)?);
            }
        }
        write(file, &calibrate(&hardware, &steps)?, out)
    }

    pub(super) fn published(&self, out: &mut dyn Write) -> Result<(), Failure> {
        if self.hardware.is_some() {
            bail!("--published: each measurement names its hardware; leave --hardware out");
        }
        let outcome = published::run(Machine::new(Kind::Null, 1)?.backend())?;
        match self.json {
            true => writeln!(out, "{}", report::published(&outcome))?,
            false => write!(out, "{}", shown::published(&outcome))?,
        }
        Ok(())
    }
}

fn write(file: &Path, hardware: &Hardware, out: &mut dyn Write) -> Result<(), Failure> {
    let text = format!("{:#}\n", hardware.save());
    std::fs::write(file, &text).map_err(|e| format!("{}: {e}", file.display()))?;
    Ok(writeln!(out, "{text}\nwritten to {}", file.display())?)
}
