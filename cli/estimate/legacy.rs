//! `astrai estimate --legacy`: the view of another simulator beside the plan's numbers.

use super::{Estimate, shown, write};
use crate::compile::{Purpose, config_value};
use crate::failure::{Failure, bail};
use astrai_estimate::estimate::estimate;
use astrai_estimate::hardware::Hardware;
use astrai_estimate::llmsim::{self, DIFFERENCES};
use astrai_estimate::report;
use serde_json::json;
use std::io::Write;
use std::path::Path;

impl Estimate {
    /// LLMSim's report.
    pub(super) fn llmsim(&self, model: &Path, out: &mut dyn Write) -> Result<(), Failure> {
        let (config, file) = config_value(model)?;
        if self.schedule.purpose == Purpose::Train {
            bail!("--for train: LLMSim knows prefill and decode");
        }
        let flags = &self.schedule;
        let unread = [
            ("--pp", flags.pp.is_some_and(|n| n > 1)),
            ("--micro-batches", flags.micro_batches.is_some()),
            ("--interleave", flags.interleave.is_some_and(|n| n > 1)),
            ("--zero", flags.zero.is_some_and(|n| n > 0)),
        ];
        if let Some((flag, _)) = unread.into_iter().find(|(_, given)| *given) {
            bail!("{flag}: LLMSim has no such schedules; leave it out");
        }
        let schedule = llmsim::Schedule {
            batch: flags.batch.unwrap_or(1),
            seq: flags.seq,
            decode: flags.purpose == Purpose::Decode,
            tp: flags.tp.unwrap_or(1).into(),
            dp: flags.dp.unwrap_or(1).into(),
            ep: flags.ep.unwrap_or(1).into(),
            mtp: self.mtp,
            deepep: self.deepep,
            dense_dp: self.dense_dp,
        };
        let machine = match llmsim::Machine::named(self.hardware()) {
            Some(own) => own,
            None => llmsim::Machine::of(&Hardware::open(self.hardware())?),
        };
        let report = llmsim::report(&config, &schedule, &machine).map_err(|e| format!("{file}: {e}"))?;
        // LLMSim knows schedules that cannot be planned; then its view stands alone.
        let truth = || {
            let (config, _) = self.config(model).ok()?;
            let hardware = Hardware::open(self.hardware()).ok()?;
            estimate(&config, &self.schedule.schedule(), &hardware, hardware.planner().backend()).ok()
        };
        let truth = truth();
        if let Some(path) = &self.csv {
            write(path, report.csv().as_bytes())?;
        }
        if let Some(path) = &self.xlsx {
            write(path, &report.workbook()?)?;
        }
        if self.json {
            let mut all = report.json();
            all["hardware"] = json!(machine.name);
            all["differences"] = json!(DIFFERENCES);
            all["plan"] =
                truth.as_ref().map_or(serde_json::Value::Null, |e| report::to_json(e)["summary"].clone());
            return Ok(writeln!(out, "{all}")?);
        }
        write!(out, "{}", shown::llmsim(&report, &machine, truth.as_ref()))?;
        Ok(())
    }
}
