//! `astrai estimate` on the device at hand, and beside what others measured.

use super::{Estimate, shown};
use crate::failure::{Failure, bail, check_folder, warn};
use crate::flags::DeviceName;
use crate::progress::Progress;
use astrai_engine::machine::Machine;
use astrai_estimate::calibrate::{calibrate, shapes};
use astrai_estimate::check::check;
use astrai_estimate::hardware::Hardware;
use astrai_estimate::{measure, published, report};
use std::io::Write;
use std::path::Path;

/// The machine that is looked at, with these flags.
fn machine(device: Option<DeviceName>, threads: u16) -> Result<Machine, Failure> {
    let device = device.unwrap_or(DeviceName::Auto);
    if device == DeviceName::Interpreter {
        bail!("--device interpreter: how fast it is says nothing; leave it out");
    }
    let kind = device.kind("leave it out")?;
    let machine = Machine::new(kind, threads.into())?;
    warn(&machine.warnings);
    Ok(machine)
}

/// `astrai devices --measure`: the hardware file of this machine.
pub fn measured(
    file: &Path,
    device: Option<DeviceName>,
    threads: u16,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    check_folder(file)?;
    write(file, &measure::here(&machine(device, threads)?.device)?, out)
}

impl Estimate {
    fn machine(&self) -> Result<Machine, Failure> {
        machine(self.here.device, self.here.threads.unwrap_or(0))
    }

    /// The hardware of the flag; without one this machine, measured.
    fn here(&self, machine: &Machine) -> Result<Hardware, Failure> {
        if let Some(name) = &self.hardware {
            return self.here.device.unwrap_or(DeviceName::Auto).hardware(name);
        }
        Ok(measure::here(&machine.device)?)
    }

    pub(super) fn check(&self, model: &Path, out: &mut dyn Write) -> Result<(), Failure> {
        let machine = self.machine()?;
        let hardware = self.here(&machine)?;
        let schedule = self.schedule.schedule();
        let (config, file) = self.config(model)?;
        let found = check(&config, &schedule, &hardware, &machine, self.here.repeat())
            .map_err(|e| if e.starts_with('-') { e } else { format!("{file}: {e}") })?;
        match self.json {
            true => writeln!(out, "{}", report::checked(&found, &schedule, &hardware))?,
            false => write!(out, "{}", shown::checked(&found, &hardware))?,
        }
        Ok(())
    }

    pub(super) fn calibrate(&self, out: &mut dyn Write) -> Result<(), Failure> {
        let (machine, Some(file)) = (self.machine()?, &self.here.calibrate) else { return Ok(()) };
        check_folder(file)?;
        let hardware = self.here(&machine)?;
        let given = self.model.iter().map(|model| Ok(self.config(model)?.0));
        let mut configs = given.collect::<Result<Vec<_>, Failure>>()?;
        if configs.is_empty() {
            configs = shapes()?;
        }
        let repeat = self.here.repeat();
        let run = |set: &mut dyn FnMut(u64, u64)| calibrate(&configs, &hardware, &machine, repeat, set);
        write(file, &Progress::during("calibrating", run)?, out)
    }

    pub(super) fn published(&self, out: &mut dyn Write) -> Result<(), Failure> {
        if self.hardware.is_some() {
            bail!("--published: each measurement names its hardware; leave --hardware out");
        }
        let outcome = published::run()?;
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
