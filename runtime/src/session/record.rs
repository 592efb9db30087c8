//! Runs as recordings, on devices where launching many kernels takes longer than the smallest of them. In: the launches of a session. Out:
//! the same launches, run at once where a run on the same memory with the same sizes was recorded before. The first such run is
//! launched kernel by kernel, the second is recorded, so that sizes that come once cost nothing. Where recordings are run with any sizes, the first is
//! recorded. The numbers are the same.

use super::Session;
use crate::Error;
use crate::device::{Pointer, Recording};

/// Most recordings that a session keeps: decode steps of as many sequences, say. Of runs that came once it knows as many.
const MOST: usize = 64;

/// The same where one recording does for all sizes.
const FEW: usize = 4;

/// Fewest launches in a row that are recorded.
const FEWEST: usize = 2;

/// On what a run depends beside the session's fixed memory: sizes where a recording has its own, where inputs and results lie, and whether each
/// launch is timed.
#[derive(Clone, Default, PartialEq, Eq)]
struct Key {
    sizes: Vec<i64>,
    at: Vec<Pointer>,
    timed: bool,
}

/// Some launches of a run.
enum Part {
    /// One by its number: it computes on the host, or reads integers of the device's first.
    One(usize),
    /// From one of this number on.
    Several(usize, Box<dyn Recording>),
}

/// Runs that came before, the latest last. Those that came once are apart: however many there are, no recording goes for them.
#[derive(Default)]
pub(super) struct Recordings {
    once: Vec<Key>,
    recorded: Vec<(Key, Vec<Part>)>,
    /// That of the newest run, whose memory the next has.
    asked: Key,
}

/// Adds to a list of at most so many, of which the oldest goes.
fn keep<T>(list: &mut Vec<T>, one: T, most: usize) {
    if list.len() == most {
        list.remove(0);
    }
    list.push(one);
}

impl Session {
    /// Launches everything.
    pub(super) fn launch_all(&mut self) -> Result<(), Error> {
        if !self.device.records() {
            return (0..self.launches.len()).try_for_each(|i| self.launch(i));
        }
        let mut key = std::mem::take(&mut self.recordings.asked);
        key.at.clear();
        key.at.extend(self.given.iter().copied().chain(self.result_memory.iter().map(|block| block.at())));
        key.sizes.clear();
        if !self.device.resizes() {
            key.sizes.extend_from_slice(&self.dims);
        }
        key.timed = self.profile.is_some();
        let done = self.launch_as(&key);
        self.recordings.asked = key;
        done
    }

    fn launch_as(&mut self, key: &Key) -> Result<(), Error> {
        let Recordings { once, recorded, .. } = &mut self.recordings;
        // Out of the list while it runs: a run that fails leaves nothing to run again.
        let found = recorded.iter().position(|(known, _)| known == key).map(|i| recorded.remove(i));
        let second = once.iter().position(|known| known == key).map(|i| once.remove(i));
        // What is timed was run before: launched one by one, small kernels would take as long as their launches.
        let known = second.is_some() || key.timed && self.runs > 1 || self.device.resizes();
        let (key, parts) = match found {
            Some(found) => found,
            None if known => (key.clone(), self.record_all()?),
            None => {
                keep(once, key.clone(), MOST);
                return (0..self.launches.len()).try_for_each(|i| self.launch(i));
            }
        };
        for part in &parts {
            match part {
                Part::One(i) => self.launch(*i)?,
                Part::Several(first, recording) => {
                    recording.replay(&self.dims)?;
                    if key.timed {
                        self.device.synchronise()?;
                        let mut launches = (*first..).zip(recording.seconds()?);
                        launches.try_for_each(|(i, seconds)| self.record(i, seconds))?;
                    }
                }
            }
        }
        keep(&mut self.recordings.recorded, (key, parts), if self.device.resizes() { FEW } else { MOST });
        Ok(())
    }

    /// All launches, kernels in a row as recordings.
    fn record_all(&mut self) -> Result<Vec<Part>, Error> {
        let (mut parts, mut first) = (Vec::new(), 0);
        while first < self.launches.len() {
            let rest = &self.launches[first..];
            let count = rest
                .iter()
                .take_while(|l| l.kernel.is_some() && (l.checked || !self.reads_guards(l.region)))
                .count();
            let recording = if count >= FEWEST { self.record_some(first, count)? } else { None };
            match recording {
                Some(recording) => parts.push(Part::Several(first, recording)),
                None => parts.extend((first..first + count.max(1)).map(Part::One)),
            }
            first += count.max(1);
        }
        Ok(parts)
    }

    fn reads_guards(&self, region: astrai_ir::plan::RegionId) -> bool {
        !self.program.plan.regions[region].matched.guards.is_empty()
    }

    fn record_some(&mut self, first: usize, count: usize) -> Result<Option<Box<dyn Recording>>, Error> {
        let (device, timed) = (self.device.clone(), self.profile.is_some());
        let mut launches = || {
            for i in first..first + count {
                self.point(i);
                let (kernel, origin) = (self.launches[i].kernel.clone(), self.launches[i].origin.clone());
                kernel.map_or(Ok(()), |kernel| self.launch_kernel(&kernel, &origin))?;
            }
            Ok(())
        };
        device.record(&mut launches, timed)
    }
}
