//! `astrai estimate --search`: its flags, and the best schedules with the reasons of the others.

use super::{Estimate, Purpose, shown, write};
use crate::failure::{Failure, bail};
use astrai_engine::serving::Speculation;
use astrai_estimate::estimate::Planned;
use astrai_estimate::hardware::Hardware;
use astrai_estimate::quantity::Kind;
use astrai_estimate::report;
use astrai_estimate::search::{self, Devices, Fixed};
use clap::{Args, ValueEnum};
use std::io::Write;
use std::path::Path;

/// Values of `--search`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Objective {
    /// The least time of a step
    Latency,
    /// The most tokens per second of a device
    Throughput,
    /// The fewest dollars for a token, or device seconds where the hardware has no price
    Cost,
    /// The most tokens per second of a device within --max-latency
    Goodput,
}

/// What is searched, and its limits.
#[derive(Args, Clone, Debug)]
pub(super) struct SearchFlags {
    /// Look for the best tp, dp, ep, pp, pieces, --batch, of prompts --chunk, and in training --interleave, --zero and --recompute: a flag that is
    /// given fixes its axis, even at 1
    #[arg(long, value_enum, value_name = "BEST", conflicts_with_all = ["legacy", "list"])]
    pub(super) search: Option<Objective>,
    /// Devices of a schedule (--search)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    devices: Option<u32>,
    /// Most devices of a schedule: 1, 2, 4 and so on are looked at, and schedules of different numbers compared by step time and
    /// tokens per second of a device (--search)
    #[arg(long, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    max_devices: Option<u32>,
    /// Most milliseconds of a step (--search)
    #[arg(long, value_name = "MS")]
    max_latency: Option<f64>,
    /// Most that a rank may hold, 60GB or 64GiB say; no more than the hardware has (--search)
    #[arg(long, value_name = "SIZE")]
    max_memory: Option<String>,
}

impl SearchFlags {
    /// A flag that only a search has.
    pub(super) fn given(&self) -> Option<&'static str> {
        let given = [
            ("--devices", self.devices.is_some()),
            ("--max-devices", self.max_devices.is_some()),
            ("--max-latency", self.max_latency.is_some()),
            ("--max-memory", self.max_memory.is_some()),
        ];
        given.into_iter().find(|(_, given)| *given).map(|(flag, _)| flag)
    }
}

/// Sequences whose longest stands for that of every batch, with `--context-dist`.
const SEQUENCES: u64 = 1 << 20;

impl Estimate {
    /// The best schedules.
    pub(super) fn search(&self, model: &Path, out: &mut dyn Write) -> Result<(), Failure> {
        let (flags, limits) = (&self.schedule, &self.searched);
        let objective = match limits.search {
            Some(Objective::Latency) => search::Objective::Latency,
            Some(Objective::Cost) => search::Objective::Cost,
            Some(Objective::Goodput) => search::Objective::Goodput,
            _ => search::Objective::Throughput,
        };
        if let Some(ms) = limits.max_latency.filter(|ms| !(ms.is_finite() && *ms > 0.0)) {
            bail!("--max-latency {ms} must be a number above 0");
        }
        if objective == search::Objective::Goodput && limits.max_latency.is_none() {
            bail!("--search goodput: give the limit, --max-latency MS");
        }
        let devices = match (limits.devices, limits.max_devices) {
            (Some(_), Some(_)) => bail!("--devices and --max-devices: give one of them"),
            (Some(n), _) => Devices::Exactly(n as usize),
            (None, Some(n)) => Devices::UpTo(n as usize),
            (None, None) => bail!("--search: say on how many devices, --devices N or --max-devices N"),
        };
        let fixed_batch = flags.batch.is_some();
        if flags.purpose == Purpose::Train && !fixed_batch {
            bail!("--search of training: give the sequences of a step, --batch N");
        }
        let [tp, dp, ep, pp] = [flags.tp, flags.dp, flags.ep, flags.pp].map(|n| n.map(|n| n as usize));
        let fixed = Fixed {
            tp,
            dp,
            ep,
            pp,
            micro: flags.micro_batches,
            interleave: flags.interleave,
            zero: flags.zero,
            recompute: flags.recomputed(),
        };
        let mut base = flags.schedule();
        flags.contexts(&mut base, SEQUENCES)?;
        base.server = flags.server.server()?;
        let drafts = base.server.proposals.as_ref().filter(|p| !matches!(p.how, Speculation::NGram(_)));
        if drafts.is_some() {
            bail!(
                "--search: models that propose tokens are not searched with; leave --draft and --speculate mtp out"
            );
        }
        let (config, file) = self.config(model)?;
        // Ranks of experts are searched where there are experts, unless a flag says that there is one.
        let experts = config.layers.iter().any(|l| l.mlp.router().is_some());
        base.dispatch = flags.experts.dispatch(if experts { ep.unwrap_or(usize::MAX) } else { 1 })?;
        let size = |text: &String| Kind::Size.parse(text).map_err(|e| format!("--max-memory {e}"));
        let most_memory = limits.max_memory.as_ref().map(size).transpose()?;
        let most_seconds = limits.max_latency.map(|ms| ms / 1e3);
        let asked =
            search::Search { base, objective, devices, fixed, fixed_batch, most_seconds, most_memory };
        let hardware = asked.limited(&Hardware::open(self.hardware())?);
        let named = |e: String| if e.starts_with('-') { e } else { format!("{file}: {e}") };
        let started = std::time::Instant::now();
        let found = asked.run(&config, &hardware).map_err(named)?;
        let seconds = started.elapsed().as_secs_f64();
        if let Some(path) = &self.csv {
            write(path, report::found_csv(&found).as_bytes())?;
        }
        if let Some(path) = &self.xlsx {
            write(path, &report::found_sheets(&found)?)?;
        }
        if let (Some(path), Some(best)) = (&self.html, found.frontier.get(found.winner)) {
            let planned = Planned::new(&config, &best.schedule, hardware.planner().backend())?;
            write(path, report::page(&file, &planned, &hardware, Some(&found))?.as_bytes())?;
        }
        match self.json {
            true => writeln!(out, "{}", report::found(&found, seconds))?,
            false => write!(out, "{}", shown::found(&found, seconds))?,
        }
        Ok(())
    }
}
