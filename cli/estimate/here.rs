//! `astrai estimate` on the device at hand, and beside what others measured.

use super::{Estimate, shown};
use crate::failure::{Failure, bail};
use crate::flags::DeviceName;
use astrai_engine::machine::{Kind, Machine};
use astrai_estimate::calibrate::{calibrate, shapes};
use astrai_estimate::check::check;
use astrai_estimate::hardware::Hardware;
use astrai_estimate::{measure, published, report};
use std::io::Write;
use std::path::Path;

impl Estimate {
    fn machine(&self) -> Result<Machine, Failure> {
        let device = self.here.device.unwrap_or(DeviceName::Auto);
        if device == DeviceName::Interpreter {
            bail!("--device interpreter: how fast it is says nothing; leave it out");
        }
        let kind = device.kind("give --hardware without --check, --measure and --calibrate")?;
        let machine = Machine::new(kind, self.here.threads.into())?;
        crate::failure::warn(&machine.warnings);
        Ok(machine)
    }

    /// The hardware of the flag; without one this machine, measured.
    fn here(&self, machine: &Machine) -> Result<Hardware, Failure> {
        if let Some(name) = &self.hardware {
            let hardware = Hardware::open(name)?;
            let (processor, here) = (hardware.kind == "cpu", !machine.device.records());
            if processor && !here {
                bail!("--hardware {name} is a processor; --device runs the program on something else");
            }
            if !processor && here {
                bail!(
                    "--hardware {name} is no processor, and the program runs on one; --device cuda runs it on a GPU"
                );
            }
            return Ok(hardware);
        }
        Ok(measure::here(&machine.device)?)
    }

    pub(super) fn measure(&self, out: &mut dyn Write) -> Result<(), Failure> {
        let (machine, Some(file)) = (self.machine()?, &self.here.measure) else { return Ok(()) };
        if self.hardware.is_some() {
            bail!("--measure writes what is here; leave --hardware out");
        }
        write(file, &self.here(&machine)?, out)
    }

    pub(super) fn check(&self, model: &Path, out: &mut dyn Write) -> Result<(), Failure> {
        let machine = self.machine()?;
        let hardware = self.here(&machine)?;
        let schedule = self.schedule.schedule();
        let (config, file) = self.config(model)?;
        let found = check(&config, &schedule, &hardware, &machine, self.here.repeat as usize)
            .map_err(|e| if e.starts_with('-') { e } else { format!("{file}: {e}") })?;
        match self.json {
            true => writeln!(out, "{}", report::checked(&found, &schedule, &hardware))?,
            false => write!(out, "{}", shown::checked(&found, &hardware))?,
        }
        Ok(())
    }

    pub(super) fn calibrate(&self, out: &mut dyn Write) -> Result<(), Failure> {
        let (machine, Some(file)) = (self.machine()?, &self.here.calibrate) else { return Ok(()) };
        let hardware = self.here(&machine)?;
        let given = self.model.iter().map(|model| Ok(self.config(model)?.0));
        let mut configs = given.collect::<Result<Vec<_>, Failure>>()?;
        if configs.is_empty() {
            configs = shapes()?;
        }
        write(file, &calibrate(&configs, &hardware, &machine, self.here.repeat as usize)?, out)
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
