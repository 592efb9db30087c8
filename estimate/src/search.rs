//! The best schedules. In: a configuration, devices, axes that are fixed, limits. Out: the frontier of latency and throughput, the winner,
//! and why each other schedule was rejected. Every group of ranks that share tensors and experts is planned once, with two layers of each
//! kind; what other batches, stages and recomputation cost follows from its symbolic sizes. A batch of training that does not fit rejects
//! all greater ones without being looked at, and devices that cannot hold the weights reject all of their ranks. Those on the frontier are then
//! planned whole.

mod layers;
mod space;

pub use space::{Devices, Fixed};

use crate::Refused;
use crate::estimate::{Estimate, estimate, step};
use crate::hardware::Hardware;
use crate::schedule::{Memory, Purpose, Schedule};
use astrai_builders::{ModelConfig, Ranks};
use astrai_ir::Backend;
use layers::Layers;
use std::collections::BTreeMap;
use std::sync::Mutex;

/// What is best.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objective {
    /// The least time of a step.
    Latency,
    /// The most tokens per second of a device.
    Throughput,
    /// The fewest dollars for a token; where the hardware has no price, the fewest device seconds.
    Cost,
    /// The most tokens per second of a device within the limit of latency.
    Goodput,
}

/// What is searched.
#[derive(Clone, Debug)]
pub struct Search {
    /// Program, sequence length and type of every schedule; its batch is used where `fixed_batch` is set.
    pub base: Schedule,
    /// What is best.
    pub objective: Objective,
    /// Devices of a schedule.
    pub devices: Devices,
    /// Axes that are given.
    pub fixed: Fixed,
    /// Whether the batch is given.
    pub fixed_batch: bool,
    /// Most seconds of a step.
    pub most_seconds: Option<f64>,
    /// Most bytes that a rank holds, where these are fewer than the hardware has.
    pub most_memory: Option<f64>,
}

/// Schedules that fit, and those that do not.
type Looked = (Vec<Candidate>, Vec<Rejected>);

/// A schedule and what it would do, by the coarse plan.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The schedule.
    pub schedule: Schedule,
    /// Seconds of a step.
    pub step: f64,
    /// Tokens per second of all devices.
    pub tokens_per_s: f64,
    /// Memory of the fullest rank.
    pub memory: Memory,
}

impl Candidate {
    /// Tokens per second of a device: what a schedule of few devices leaves idle, others like it use.
    fn each(&self) -> f64 {
        self.tokens_per_s / self.schedule.devices() as f64
    }
}

/// A schedule that is not on the frontier, with what is known of it.
#[derive(Clone, Debug)]
pub struct Rejected {
    /// The schedule; where `whole` is set, its ranks stand for all schedules that these ranks, or so many devices, would have.
    pub schedule: Schedule,
    /// Whether none of the schedules of its ranks is possible.
    pub whole: bool,
    /// Why, in one line.
    pub why: String,
    /// Bytes of the fullest rank.
    pub memory: Option<u64>,
    /// Seconds of a step.
    pub step: Option<f64>,
    /// Tokens per second of all devices.
    pub tokens_per_s: Option<f64>,
}

impl Rejected {
    fn unseen(schedule: Schedule, why: String) -> Rejected {
        Rejected { schedule, whole: false, why, memory: None, step: None, tokens_per_s: None }
    }

    fn seen(c: Candidate, why: String) -> Rejected {
        Rejected {
            memory: Some(c.memory.total()),
            step: Some(c.step),
            tokens_per_s: Some(c.tokens_per_s),
            ..Rejected::unseen(c.schedule, why)
        }
    }
}

/// What was found.
#[derive(Debug)]
pub struct Found {
    /// Schedules that were looked at, rejected ones among them; ranks that are refused whole count once.
    pub considered: usize,
    /// No other is both faster and has more tokens per second of a device; the fastest first, planned whole.
    pub frontier: Vec<Estimate>,
    /// Which of the frontier is best.
    pub winner: usize,
    /// Others on the frontier of the coarse plans, between those that were planned whole.
    pub between: Vec<Candidate>,
    /// The others, each with the reason.
    pub rejected: Vec<Rejected>,
}

/// Most schedules on the frontier that are planned whole.
const WHOLE: usize = 8;

/// Most rounds of whole plans.
const TRIES: usize = 16;

/// Schedules by the ranks that share tensors and experts, and by what is computed again: what a plan depends on.
type Groups = BTreeMap<(usize, usize, u8, Option<u64>), Vec<Schedule>>;

impl Search {
    /// The hardware with no more memory than may be used.
    pub fn limited(&self, hardware: &Hardware) -> Hardware {
        let memory = self.most_memory.map_or(hardware.memory, |most| most.min(hardware.memory));
        Hardware { memory, ..hardware.clone() }
    }

    /// What is fixed and no schedule of this program may have.
    fn check(&self) -> Result<(), Refused> {
        let train = self.base.purpose == Purpose::Train;
        if let Some(zero) = self.fixed.zero.filter(|zero| *zero > 0 && !train) {
            return Err(format!("--zero {zero}: only training has states to share; leave it out"));
        }
        let piped = train && self.fixed.pp != Some(1);
        match self.fixed.interleave.filter(|n| *n > 1 && !piped) {
            Some(n) => Err(format!(
                "--interleave {n}: only training over several stages (--pp) interleaves; leave it out"
            )),
            None => Ok(()),
        }
    }

    /// Searches.
    ///
    /// # Errors
    /// What is fixed does not go together, or no schedule fits; the line names the flags, or the commonest reasons.
    pub fn run(&self, config: &ModelConfig, hardware: &Hardware) -> Result<Found, Refused> {
        self.check()?;
        let hardware = &self.limited(hardware);
        let ranks = Ranks { pp: 1, dp: 1, ep: 1, tp: 1 };
        // What is searched starts from nothing.
        let base = Schedule { ranks, micro: 1, interleave: 1, zero: 0, ..self.base.clone() };
        let searched = Search { base, ..self.clone() };
        let (groups, mut rejected) = searched.space(config, hardware)?;
        let considered = rejected.len() + groups.values().map(Vec::len).sum::<usize>();
        let planner = hardware.planner();
        let backend = planner.backend();
        let (mut candidates, others) = searched.look(config, hardware, backend, groups)?;
        rejected.extend(others);
        let mut whole: Vec<Estimate> = Vec::new();
        // Whom the whole plan refuses makes room for the next best.
        for _ in 0..TRIES {
            let mut refused = Vec::new();
            for c in spread(frontier(candidates.clone()).0) {
                if whole.iter().any(|e| e.schedule == c.schedule) {
                    continue;
                }
                match estimate(config, &c.schedule, hardware, backend) {
                    Ok(e) if e.summary.left >= 0 => whole.push(e),
                    Ok(e) => {
                        refused.push((c, format!("planned whole it lacks {} bytes", -e.summary.left)));
                    }
                    Err(line) => refused.push((c, line)),
                }
            }
            if refused.is_empty() {
                break;
            }
            candidates.retain(|c| refused.iter().all(|(r, _)| r.schedule != c.schedule));
            rejected.extend(refused.into_iter().map(|(c, why)| Rejected::seen(c, why)));
        }
        whole.sort_by(|a, b| a.summary.step.total_cmp(&b.summary.step));
        let (mut between, dominated) = frontier(candidates);
        rejected.extend(dominated);
        between.retain(|c| whole.iter().all(|e| e.schedule != c.schedule));
        let winner =
            (0..whole.len()).max_by(|a, b| self.score(&whole[*a]).total_cmp(&self.score(&whole[*b])));
        let none = || self.none(considered, &rejected);
        Ok(Found { considered, winner: winner.ok_or_else(none)?, frontier: whole, between, rejected })
    }

    /// Every schedule in its group, and what is refused before anything is planned.
    fn space(&self, config: &ModelConfig, hardware: &Hardware) -> Result<(Groups, Vec<Rejected>), Refused> {
        let near = hardware.links.first().map_or(1, |l| l.devices as usize);
        let (mut groups, mut rejected) = (Groups::new(), Vec::new());
        let refused = |ranks: Ranks, why: String| {
            let of = Schedule { ranks, ..self.base.clone() };
            Rejected { whole: true, ..Rejected::unseen(of, why) }
        };
        for devices in self.counts()? {
            if let Some(why) = self.too_few(config, devices, hardware.memory) {
                rejected.push(refused(Ranks { dp: devices, ..self.base.ranks }, why));
                continue;
            }
            for ranks in self.meshes(config, devices) {
                let all = match ranks.tp > near && self.fixed.tp.is_none() {
                    true => {
                        Err(format!("tp={} is more than the {near} devices of the nearest link", ranks.tp))
                    }
                    false => self.variants(config, ranks),
                };
                match all {
                    Ok(list) => list.into_iter().for_each(|s| {
                        let key = (ranks.tp, ranks.ep, s.recompute as u8, s.server.chunk);
                        groups.entry(key).or_default().push(s);
                    }),
                    Err(line) => rejected.push(refused(ranks, line)),
                }
            }
        }
        Ok((groups, rejected))
    }

    /// Why nothing is possible: the commonest reasons.
    fn none(&self, considered: usize, rejected: &[Rejected]) -> Refused {
        // Reasons of the same words count as one.
        let mut counts: BTreeMap<String, (usize, &str)> = BTreeMap::new();
        for r in rejected {
            let words = r.why.split(|c: char| !c.is_alphabetic()).collect();
            counts.entry(words).or_insert((0, &r.why)).0 += 1;
        }
        let mut most: Vec<_> = counts.into_values().collect();
        most.sort_by_key(|(n, _)| std::cmp::Reverse(*n));
        let most: Vec<String> = most.iter().take(3).map(|(n, why)| format!("{why} ({n} times)")).collect();
        let devices = match self.devices {
            Devices::Exactly(n) => format!("{n} devices"),
            Devices::UpTo(n) => format!("up to {n} devices"),
        };
        match most.is_empty() {
            true => format!("no ranks that are looked at are {devices} with {}", self.fixed.ranks().0),
            false => {
                format!("none of {considered} schedules on {devices} is possible: {}", most.join("; "))
            }
        }
    }

    /// Greater is better.
    fn score(&self, e: &Estimate) -> f64 {
        let each = e.summary.tokens_per_s / e.summary.devices as f64;
        match self.objective {
            Objective::Latency => -e.summary.step,
            Objective::Throughput | Objective::Goodput => each,
            Objective::Cost => -e.summary.cost.unwrap_or(1.0 / each),
        }
    }

    /// Every schedule by the plan of its group, the groups side by side.
    fn look(
        &self,
        config: &ModelConfig,
        hardware: &Hardware,
        backend: &dyn Backend,
        groups: Groups,
    ) -> Result<Looked, Refused> {
        let todo = Mutex::new(groups.into_values().collect::<Vec<_>>());
        let found = Mutex::new((Vec::new(), Vec::new()));
        let worker = || {
            loop {
                let next = todo.lock().map_or(None, |mut list| list.pop());
                let Some(group) = next else { return };
                let (good, bad) = self.group(config, hardware, backend, group);
                if let Ok(mut all) = found.lock() {
                    all.0.extend(good);
                    all.1.extend(bad);
                }
            }
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(worker))));
        let (mut good, mut bad): Looked =
            found.into_inner().map_err(|_| "a thread of the search failed".to_string())?;
        // Threads finish as they like, the result does not.
        good.sort_by_cached_key(|c| format!("{:?}", c.schedule));
        bad.sort_by_cached_key(|r| format!("{:?}", r.schedule));
        Ok((good, bad))
    }

    /// The schedules of one group of ranks, by its plan.
    fn group(
        &self,
        config: &ModelConfig,
        hardware: &Hardware,
        backend: &dyn Backend,
        mut group: Vec<Schedule>,
    ) -> Looked {
        let (mut good, mut bad) = (Vec::new(), Vec::new());
        let batches = || group.iter().filter_map(|s| s.rank_batch().ok());
        // Of prompts in pieces as few as fill one, so that the plan's kernels are those of few sequences.
        let fill = |s: &Schedule| s.server.chunk.map(|n| n.div_ceil(s.fresh()));
        let few = group.first().filter(|s| s.purpose == Purpose::Prefill).and_then(fill);
        let few = few.and_then(|few| batches().filter(|n| *n >= few).min());
        let most = few.or(batches().max()).unwrap_or(1);
        // Of one data-parallel rank the plan would lack the messages between several.
        let widest = group.iter().max_by_key(|s| s.ranks.dp).unwrap_or(&self.base);
        let layers = match Layers::plan(config, widest, most, backend) {
            Ok(layers) => layers,
            Err(line) => {
                return (good, group.into_iter().map(|s| Rejected::unseen(s, line.clone())).collect());
            }
        };
        let alike = |s: &Schedule| (s.ranks.pp, s.ranks.dp, s.zero, s.interleave);
        group.sort_by_key(|s| (alike(s), s.batch / s.micro));
        // Of schedules that are alike but for their pieces, the least piece that did not fit.
        let mut full: Option<(Schedule, String)> = None;
        for s in group {
            if let Some((least, why)) = &full
                && alike(least) == alike(&s)
                && s.batch / s.micro >= least.batch / least.micro
                && s.purpose == Purpose::Train
            {
                bad.push(Rejected::unseen(s, format!("greater than one that does not fit: {why}")));
                continue;
            }
            match self.one(&s, &layers, hardware) {
                Ok(c) => good.push(c),
                Err(r) => {
                    if r.why.starts_with("needs") {
                        full = Some((s, r.why.clone()));
                    }
                    bad.push(*r);
                }
            }
        }
        (good, bad)
    }

    fn one(&self, s: &Schedule, layers: &Layers, hardware: &Hardware) -> Result<Candidate, Box<Rejected>> {
        let unseen = |line: String| Rejected::unseen(s.clone(), line);
        let batch = s.rank_batch().map_err(unseen)?;
        let memory = Memory { process: hardware.process as u64, ..layers.memory(s, batch) };
        let (need, have) = (memory.total() as f64, hardware.memory);
        if need > have {
            let line = format!("needs {:.1} GB of {:.1} GB", need / 1e9, have / 1e9);
            return Err(Rejected { memory: Some(memory.total()), ..unseen(line) }.into());
        }
        let mesh = layers.mesh(s).map_err(unseen)?;
        let (pieces, update) = layers.seconds(s, batch, hardware, &mesh).map_err(unseen)?;
        let [step, period, _] = step(s, &pieces, update);
        let tokens = s.tokens();
        let found = Candidate { schedule: s.clone(), step, tokens_per_s: tokens / period, memory };
        match self.most_seconds.filter(|most| step > *most) {
            Some(most) => {
                let [takes, most] = [step, most].map(|s| s * 1e3);
                let line = format!("takes {takes:.2} ms, more than the limit of {most:.2} ms");
                Err(Rejected::seen(found, line).into())
            }
            None => Ok(found),
        }
    }
}

/// Those that no other beats in both, the fastest first; and the others, each with one that beats it.
fn frontier(mut all: Vec<Candidate>) -> (Vec<Candidate>, Vec<Rejected>) {
    // Of those that do the same the ones with the fewest devices.
    let devices = |c: &Candidate| c.schedule.devices();
    all.sort_by(|a, b| {
        a.step.total_cmp(&b.step).then(b.each().total_cmp(&a.each())).then(devices(a).cmp(&devices(b)))
    });
    let (mut best, mut others): (Vec<Candidate>, Vec<_>) = (Vec::new(), Vec::new());
    for c in all {
        match best.last() {
            Some(b) if b.each() >= c.each() * (1.0 - 1e-9) => {
                let r = b.schedule.ranks;
                let more = if b.each() > c.each() * (1.0 + 1e-9) { "more" } else { "as many" };
                let each = if devices(b) == devices(&c) { "" } else { " of a device" };
                let why = format!(
                    "tp={} dp={} ep={} pp={} of {} sequences is as fast and has {more} tokens per second{each}",
                    r.tp, r.dp, r.ep, r.pp, b.schedule.batch
                );
                others.push(Rejected::seen(c, why));
            }
            _ => best.push(c),
        }
    }
    (best, others)
}

/// Some of the frontier, both ends among them, evenly.
fn spread(frontier: Vec<Candidate>) -> Vec<Candidate> {
    let n = frontier.len();
    let picked = |i: usize| n <= WHOLE || (0..WHOLE).any(|k| k * (n - 1) / (WHOLE - 1) == i);
    frontier.into_iter().enumerate().filter(|(i, _)| picked(*i)).map(|(_, c)| c).collect()
}

#[cfg(test)]
mod tests;
