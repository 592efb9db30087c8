//! The best schedules. In: a configuration, a number of devices, limits. Out: the frontier of latency and throughput, the winner, and why
//! each other schedule was rejected. Every group of ranks that share tensors and experts is planned once, with two layers of each kind;
//! what other batches, stages and recomputation cost follows from its symbolic sizes. A batch that does not fit rejects all greater
//! ones without being looked at. Those on the frontier are then planned whole.

mod layers;

use crate::Refused;
use crate::estimate::{Estimate, estimate, step};
use crate::hardware::Hardware;
use crate::schedule::{Memory, Purpose, Schedule};
use astrai_builders::{ModelConfig, Ranks};
use astrai_ir::Backend;
use astrai_runtime::Recompute;
use layers::Layers;
use std::collections::BTreeMap;
use std::sync::Mutex;

/// What is best.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objective {
    /// The least time of a step.
    Latency,
    /// The most tokens per second.
    Throughput,
    /// The fewest dollars for a token; where the hardware has no price, the fewest device seconds.
    Cost,
    /// The most tokens per second within the limit of latency.
    Goodput,
}

/// What is searched.
#[derive(Clone, Debug)]
pub struct Search {
    /// Program, sequence length and type of every schedule; its batch is used where `batch` is set.
    pub base: Schedule,
    /// What is best.
    pub objective: Objective,
    /// Devices of every schedule.
    pub devices: usize,
    /// Whether the batch is given.
    pub fixed_batch: bool,
    /// Most seconds of a step.
    pub most_seconds: Option<f64>,
}

/// Schedules that fit, and those that do not with the reason.
type Looked = (Vec<Candidate>, Vec<(Schedule, String)>);

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

/// What was found.
#[derive(Debug)]
pub struct Found {
    /// Schedules that were looked at, rejected ones among them.
    pub considered: usize,
    /// No other is both faster and has more tokens per second; the fastest first, planned whole.
    pub frontier: Vec<Estimate>,
    /// Which of the frontier is best.
    pub winner: usize,
    /// The others, each with the reason.
    pub rejected: Vec<(Schedule, String)>,
}

/// Most schedules on the frontier that are planned whole.
const WHOLE: usize = 8;

/// Most rounds of whole plans.
const TRIES: usize = 16;

/// Sequences of a rank that are tried.
const BATCHES: [u64; 18] = [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768];

fn powers(most: usize) -> impl Iterator<Item = usize> {
    (0..).map(|i| 1usize << i).take_while(move |n| *n <= most)
}

impl Search {
    /// Groups of ranks whose product is the number of devices.
    fn meshes(&self, config: &ModelConfig) -> Vec<Ranks> {
        let experts = config.layers.iter().any(|l| l.mlp.router().is_some());
        let mut found = Vec::new();
        for tp in powers(self.devices.min(64)) {
            for pp in powers(self.devices.min(16)) {
                for ep in powers(if experts { self.devices } else { 1 }) {
                    let product = tp * pp * ep;
                    if self.devices.is_multiple_of(product) {
                        found.push(Ranks { pp, dp: self.devices / product, ep, tp });
                    }
                }
            }
        }
        found
    }

    /// Sequences of a rank in a step, in how many pieces, with what shared and recomputed.
    fn variants(&self, ranks: Ranks) -> Vec<Schedule> {
        let shares = (ranks.dp * ranks.ep) as u64;
        let batches: Vec<u64> = match self.fixed_batch {
            true => vec![self.base.batch / shares],
            false => BATCHES.to_vec(),
        };
        let train = self.base.purpose == Purpose::Train;
        let mut found = Vec::new();
        for here in batches {
            let micros: Vec<u64> = if train || ranks.pp > 1 {
                powers(here.max(1) as usize).map(|n| n as u64).collect()
            } else {
                vec![1]
            };
            for micro in micros.into_iter().filter(|m| here.is_multiple_of(*m) && here > 0) {
                let zeros: &[u8] = if train && shares > 1 { &[0, 1, 2, 3] } else { &[0] };
                let again: &[Recompute] = match train {
                    true => &[Recompute::None, Recompute::Selective, Recompute::Full],
                    false => &[Recompute::Selective],
                };
                for (&zero, &recompute) in zeros.iter().flat_map(|z| again.iter().map(move |r| (z, r))) {
                    let batch = if self.fixed_batch { self.base.batch } else { here * shares };
                    found.push(Schedule { batch, ranks, micro, zero, recompute, ..self.base.clone() });
                }
            }
        }
        found
    }

    /// Searches.
    ///
    /// # Errors
    /// No schedule fits; the line names the commonest reason.
    pub fn run(&self, config: &ModelConfig, hardware: &Hardware) -> Result<Found, Refused> {
        let planner = hardware.planner();
        let backend = planner.backend();
        let near = hardware.links.first().map_or(1, |l| l.devices as usize);
        let mut rejected: Vec<(Schedule, String)> = Vec::new();
        let mut groups: BTreeMap<(usize, usize, u8), Vec<Schedule>> = BTreeMap::new();
        let mut considered = 0;
        for ranks in self.meshes(config) {
            let all = self.variants(ranks);
            considered += all.len().max(1);
            let refused = match (Schedule { ranks, ..self.base.clone() }).mesh(config) {
                Err(line) => Some(line),
                Ok(_) if ranks.tp > near => {
                    Some(format!("tp={} is more than the {near} devices of the nearest link", ranks.tp))
                }
                Ok(_) if all.is_empty() => {
                    Some(format!("--batch {} has no sequence for each of dp and ep", self.base.batch))
                }
                Ok(_) => None,
            };
            if let Some(line) = refused {
                let of = Schedule { ranks, ..self.base.clone() };
                let list = if all.is_empty() { vec![of] } else { all };
                rejected.extend(list.into_iter().map(|s| (s, line.clone())));
                continue;
            }
            for s in all {
                groups.entry((s.ranks.tp, s.ranks.ep, s.recompute as u8)).or_default().push(s);
            }
        }
        let (candidates, others) = self.look(config, hardware, backend, groups)?;
        rejected.extend(others);
        let mut whole: Vec<Estimate> = Vec::new();
        let mut candidates = candidates;
        // Whom the whole plan refuses makes room for the next best.
        for _ in 0..TRIES {
            let (best, dominated) = frontier(candidates.clone());
            let mut refused = Vec::new();
            for c in spread(best) {
                if whole.iter().any(|e| e.schedule == c.schedule) {
                    continue;
                }
                match estimate(config, &c.schedule, hardware, backend) {
                    Ok(e) if e.summary.left >= 0 => whole.push(e),
                    Ok(e) => refused
                        .push((c.schedule, format!("planned whole it lacks {} bytes", -e.summary.left))),
                    Err(line) => refused.push((c.schedule, line)),
                }
            }
            if refused.is_empty() {
                rejected.extend(dominated);
                break;
            }
            candidates.retain(|c| refused.iter().all(|(s, _)| *s != c.schedule));
            rejected.extend(refused);
        }
        whole.sort_by(|a, b| a.summary.step.total_cmp(&b.summary.step));
        let winner =
            (0..whole.len()).max_by(|a, b| self.score(&whole[*a]).total_cmp(&self.score(&whole[*b])));
        let none = || {
            // Reasons of the same words count as one.
            let mut counts: BTreeMap<String, (usize, &str)> = BTreeMap::new();
            for (_, why) in &rejected {
                let words = why.split(|c: char| !c.is_alphabetic()).collect();
                counts.entry(words).or_insert((0, why)).0 += 1;
            }
            let mut most: Vec<_> = counts.into_values().collect();
            most.sort_by_key(|(n, _)| std::cmp::Reverse(*n));
            let most: Vec<String> =
                most.iter().take(3).map(|(n, why)| format!("{why} ({n} times)")).collect();
            format!(
                "none of {considered} schedules on {} devices is possible: {}",
                self.devices,
                most.join("; ")
            )
        };
        Ok(Found { considered, winner: winner.ok_or_else(none)?, frontier: whole, rejected })
    }

    /// Greater is better.
    fn score(&self, e: &Estimate) -> f64 {
        match self.objective {
            Objective::Latency => -e.summary.step,
            Objective::Throughput | Objective::Goodput => e.summary.tokens_per_s,
            Objective::Cost => -e.summary.cost.unwrap_or(e.summary.devices as f64 / e.summary.tokens_per_s),
        }
    }

    /// Every schedule by the plan of its group, the groups side by side.
    fn look(
        &self,
        config: &ModelConfig,
        hardware: &Hardware,
        backend: &dyn Backend,
        groups: BTreeMap<(usize, usize, u8), Vec<Schedule>>,
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
        let (mut good, bad) = found.into_inner().map_err(|_| "a thread of the search failed".to_string())?;
        // Threads finish as they like, the result does not.
        good.sort_by_key(|c| format!("{:?}", c.schedule));
        Ok((good, bad))
    }

    /// The schedules of one group of ranks, by its plan.
    fn group(
        &self,
        config: &ModelConfig,
        hardware: &Hardware,
        backend: &dyn Backend,
        mut group: Vec<Schedule>,
    ) -> (Vec<Candidate>, Vec<(Schedule, String)>) {
        let (mut good, mut bad) = (Vec::new(), Vec::new());
        let most = group.iter().filter_map(|s| s.rank_batch().ok()).max().unwrap_or(1);
        let layers = match Layers::plan(config, &group[0], most, backend) {
            Ok(layers) => layers,
            Err(line) => return (good, group.into_iter().map(|s| (s, line.clone())).collect()),
        };
        group.sort_by_key(|s| (s.ranks.pp, s.zero, s.batch / s.micro));
        // Of these stages and what is shared, the least piece that did not fit.
        let mut full: Option<(usize, u8, u64, String)> = None;
        for s in group {
            let piece = s.batch / s.micro;
            if let Some((pp, zero, least, why)) = &full
                && (*pp, *zero) == (s.ranks.pp, s.zero)
                && piece >= *least
                && s.purpose == Purpose::Train
            {
                bad.push((s, format!("greater than one that does not fit: {why}")));
                continue;
            }
            match self.one(&s, &layers, hardware) {
                Ok(c) => good.push(c),
                Err(why) => {
                    if why.starts_with("needs") {
                        full = Some((s.ranks.pp, s.zero, piece, why.clone()));
                    }
                    bad.push((s, why));
                }
            }
        }
        (good, bad)
    }

    fn one(&self, s: &Schedule, layers: &Layers, hardware: &Hardware) -> Result<Candidate, String> {
        let batch = s.rank_batch()?;
        let memory = Memory { process: hardware.process as u64, ..layers.memory(s, batch) };
        let (need, have) = (memory.total() as f64, hardware.memory);
        if need > have {
            return Err(format!("needs {:.1} GB of {:.1} GB", need / 1e9, have / 1e9));
        }
        let mesh = layers.mesh(s)?;
        let (pieces, update) = layers.seconds(s, batch, hardware, &mesh)?;
        let [step, period, _] = step(s, &pieces, update);
        if let Some(most) = self.most_seconds.filter(|most| step > *most) {
            return Err(format!("takes {:.2} ms, more than the limit of {:.2} ms", step * 1e3, most * 1e3));
        }
        let tokens = if s.purpose == Purpose::Decode { s.batch } else { s.batch * s.seq } as f64;
        Ok(Candidate { schedule: s.clone(), step, tokens_per_s: tokens / period, memory })
    }
}

/// Those that no other beats in both, the fastest first; and the others, each with one that beats it.
fn frontier(mut all: Vec<Candidate>) -> (Vec<Candidate>, Vec<(Schedule, String)>) {
    all.sort_by(|a, b| a.step.total_cmp(&b.step).then(b.tokens_per_s.total_cmp(&a.tokens_per_s)));
    let (mut best, mut others): (Vec<Candidate>, Vec<_>) = (Vec::new(), Vec::new());
    for c in all {
        match best.last() {
            Some(b) if b.tokens_per_s >= c.tokens_per_s => {
                let r = b.schedule.ranks;
                let by = format!(
                    "tp={} dp={} ep={} pp={} of {} sequences",
                    r.tp, r.dp, r.ep, r.pp, b.schedule.batch
                );
                others.push((c.schedule, format!("{by} is as fast and has more tokens per second")));
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
