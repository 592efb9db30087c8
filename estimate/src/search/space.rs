//! What a search looks at. In: a configuration, devices, axes that are fixed. Out: groups of ranks, and for each the schedules that the
//! rules of its pipeline and its batch allow.

use super::Search;
use crate::Refused;
use crate::schedule::{Dispatch, Purpose, Schedule};
use crate::server::Server;
use astrai_builders::{ModelConfig, Ranks};
use astrai_runtime::Recompute;
use std::collections::BTreeSet;

/// Devices of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Devices {
    /// So many.
    Exactly(usize),
    /// One, two, four and so on, up to so many.
    UpTo(usize),
}

/// Axes that are not searched, each with its value.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Fixed {
    /// Ranks that share tensors.
    pub tp: Option<usize>,
    /// Ranks with sequences of their own.
    pub dp: Option<usize>,
    /// Ranks that share experts.
    pub ep: Option<usize>,
    /// Stages.
    pub pp: Option<usize>,
    /// Pieces of a rank's sequences.
    pub micro: Option<u64>,
    /// Groups of layers of a stage.
    pub interleave: Option<u64>,
    /// What data-parallel ranks share.
    pub zero: Option<u8>,
    /// Activations that are computed again.
    pub recompute: Option<Recompute>,
}

impl Fixed {
    /// The flags that say how many ranks there are, and how many these are together.
    pub(super) fn ranks(&self) -> (String, usize) {
        let axes = [("--tp", self.tp), ("--dp", self.dp), ("--ep", self.ep), ("--pp", self.pp)];
        let given: Vec<(&str, usize)> = axes.into_iter().filter_map(|(flag, n)| Some((flag, n?))).collect();
        let flags: Vec<String> = given.iter().map(|(flag, n)| format!("{flag} {n}")).collect();
        (flags.join(" "), given.iter().fold(1, |all, (_, n)| all.saturating_mul(*n)))
    }

    /// Whether no axis of ranks is left to search.
    fn every_axis(&self) -> bool {
        [self.tp, self.dp, self.ep, self.pp].iter().all(Option::is_some)
    }
}

/// Most ranks that share tensors that are tried.
const MOST: usize = 64;

/// Most stages that are tried, of training and of other programs: stages are planned one by one.
const STAGES: [usize; 2] = [64, 16];

/// Ways to interleave a pipeline that are tried, at most.
const WAYS: usize = 8;

/// Tokens of prompts in a step that are tried beside whole prompts.
const CHUNKS: [u64; 3] = [512, 2048, 8192];

/// Sequences of a rank that are tried.
const BATCHES: [u64; 18] = [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768];

/// Powers of two up to a number.
fn powers(most: usize) -> impl Iterator<Item = usize> {
    (0..usize::BITS - 1).map(|i| 1usize << i).take_while(move |n| *n <= most)
}

impl Search {
    /// Numbers of devices, ascending: those that the ranks which are fixed divide.
    ///
    /// # Errors
    /// There is none; the line names the flags.
    pub(super) fn counts(&self) -> Result<Vec<usize>, Refused> {
        let (flags, ranks) = self.fixed.ranks();
        let all = self.fixed.every_axis();
        match self.devices {
            Devices::Exactly(n) if all && n != ranks => {
                Err(format!("{flags}: these are {ranks} ranks, not as many as --devices {n}"))
            }
            Devices::Exactly(n) if !n.is_multiple_of(ranks) => {
                Err(format!("{flags}: these are {ranks} ranks, which do not divide --devices {n}"))
            }
            Devices::UpTo(n) if ranks > n => {
                Err(format!("{flags}: these are {ranks} ranks, more than --max-devices {n}"))
            }
            Devices::Exactly(n) => Ok(vec![n]),
            Devices::UpTo(_) if all => Ok(vec![ranks]),
            Devices::UpTo(n) => Ok(powers(n / ranks).map(|times| times * ranks).collect()),
        }
    }

    /// Why so few devices hold no rank of the model, whatever they share.
    pub(super) fn too_few(&self, config: &ModelConfig, devices: usize, memory: f64) -> Option<String> {
        let parameters = config.parameter_count() as f64;
        // Codes have four bits at least; beside a weight training has two moments in f32.
        let each = match self.base.purpose {
            Purpose::Train => self.base.storage.bytes() as f64 + 8.0,
            _ if config.narrow.is_some() => 0.5,
            _ => self.base.storage.bytes() as f64,
        };
        let need = parameters * each / devices as f64;
        let what = if self.base.purpose == Purpose::Train { "weights and moments" } else { "weights" };
        (need > memory).then(|| {
            format!(
                "needs {:.1} GB of {:.1} GB of each of {devices} devices for {what} alone",
                need / 1e9,
                memory / 1e9
            )
        })
    }

    /// Groups of ranks whose product is a number of devices.
    pub(super) fn meshes(&self, config: &ModelConfig, devices: usize) -> Vec<Ranks> {
        let experts = config.layers.iter().any(|l| l.mlp.router().is_some());
        let axis = |fixed: Option<usize>, searched: Vec<usize>| match fixed {
            Some(n) => vec![n],
            None => searched,
        };
        let layers = config.layers.len();
        let most = STAGES[usize::from(self.base.purpose != Purpose::Train)].min(devices).min(layers);
        // Stages of equally many layers, too, where they are no power of two.
        let even = (1..=most).filter(|n| layers.is_multiple_of(*n));
        let stages: BTreeSet<usize> = powers(most).chain(even).collect();
        let tps = axis(self.fixed.tp, powers(devices.min(MOST)).collect());
        let pps = axis(self.fixed.pp, stages.into_iter().collect());
        let eps = axis(self.fixed.ep, powers(if experts { devices } else { 1 }).collect());
        let mut found = Vec::new();
        for tp in tps {
            for &pp in &pps {
                for &ep in &eps {
                    let product = tp.saturating_mul(pp).saturating_mul(ep);
                    if devices.is_multiple_of(product)
                        && self.fixed.dp.is_none_or(|dp| dp == devices / product)
                    {
                        found.push(Ranks { pp, dp: devices / product, ep, tp });
                    }
                }
            }
        }
        found
    }

    /// Ways to interleave a pipeline of so many pieces: as many layers in every group, and as many pieces at a time as there are stages.
    fn interleaves(&self, config: &ModelConfig, ranks: Ranks, micro: u64) -> Vec<u64> {
        if let Some(n) = self.fixed.interleave {
            return vec![n];
        }
        let (layers, stages) = (config.layers.len(), ranks.pp);
        let train = self.base.purpose == Purpose::Train && stages > 1;
        if !train || !micro.is_multiple_of(stages as u64) || !layers.is_multiple_of(stages) {
            return vec![1];
        }
        let each = (layers / stages) as u64;
        (1..=each).filter(|n| each.is_multiple_of(*n)).take(WAYS).collect()
    }

    /// Sequences of a rank in a step, in how many pieces, with what shared and recomputed; or why there is no schedule of these ranks.
    ///
    /// # Errors
    /// The mesh, the batch or the pieces do not divide; one line.
    pub(super) fn variants(&self, config: &ModelConfig, ranks: Ranks) -> Result<Vec<Schedule>, Refused> {
        let dispatch = if ranks.ep > 1 { self.base.dispatch } else { Dispatch::default() };
        let of = Schedule { ranks, dispatch, ..self.base.clone() };
        of.mesh(config)?;
        let pieces = self.base.purpose == Purpose::Prefill && config.encoder.is_none();
        let searched = CHUNKS.iter().filter(|_| pieces && self.base.server.chunk.is_none());
        let chunks: Vec<Option<u64>> =
            [self.base.server.chunk].into_iter().chain(searched.map(|n| Some(*n))).collect();
        let shares = (ranks.dp * ranks.ep) as u64;
        let batches: Vec<u64> = match self.fixed_batch {
            true => vec![of.rank_batch()?],
            false => BATCHES.to_vec(),
        };
        let train = self.base.purpose == Purpose::Train;
        let stages = ranks.pp as u64;
        let zeros: Vec<u8> = match self.fixed.zero {
            Some(zero) => vec![zero],
            None if train && shares > 1 => (0..=3).collect(),
            None => vec![0],
        };
        let again: Vec<Recompute> = match self.fixed.recompute {
            Some(which) => vec![which],
            None if train => vec![Recompute::None, Recompute::Selective, Recompute::Full],
            None => vec![self.base.recompute],
        };
        let (mut found, mut refused) = (Vec::new(), None);
        for here in batches {
            let micros: BTreeSet<u64> = match self.fixed.micro {
                Some(n) => [n].into(),
                // As many pieces as there are stages, or a multiple, fill a pipeline evenly.
                None if train || stages > 1 => {
                    powers(here as usize).map(|n| n as u64).flat_map(|n| [n, n * stages]).collect()
                }
                None => [1].into(),
            };
            let searched = self.fixed.micro.is_none();
            for micro in micros.into_iter().filter(|m| !searched || here.is_multiple_of(*m)) {
                for interleave in self.interleaves(config, ranks, micro) {
                    let one = Schedule { batch: here * shares, micro, interleave, ..of.clone() };
                    if let Err(line) = one.rank_batch().and_then(|_| one.mesh(config)) {
                        refused = refused.or(Some(line));
                        continue;
                    }
                    for (&zero, &recompute) in zeros.iter().flat_map(|z| again.iter().map(move |r| (z, r))) {
                        // Pieces are parts of the prompts, unless a flag has told their size.
                        let parts = |n: &u64| n * micro < here * one.fresh();
                        let tried =
                            |n: &&Option<u64>| **n == self.base.server.chunk || n.is_some_and(|n| parts(&n));
                        for &chunk in chunks.iter().filter(tried) {
                            let server = Server { chunk, ..one.server.clone() };
                            found.push(Schedule { zero, recompute, server, ..one.clone() });
                        }
                    }
                }
            }
        }
        match refused {
            Some(line) if found.is_empty() => Err(line),
            _ => Ok(found),
        }
    }
}
