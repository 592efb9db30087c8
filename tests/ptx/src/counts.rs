//! What a launch did, in numbers: instructions by class, sectors of global memory and passes of shared memory beside the least
//! that the same bytes could have taken.

use crate::kernel::{Class, Kernel};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Counts of one instruction.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Count {
    /// Times that a warp came to it.
    pub warps: u64,
    /// Lanes that executed it.
    pub lanes: u64,
    /// Sectors of 32 bytes of global memory, or passes of shared memory.
    pub units: u64,
    /// The least units for the same bytes.
    pub ideal: u64,
}

impl Count {
    pub(crate) fn add(&mut self, o: &Count) {
        self.warps += o.warps;
        self.lanes += o.lanes;
        self.units += o.units;
        self.ideal += o.ideal;
    }
}

/// Counts of a kernel's instructions over one or more launches.
#[derive(Clone, Default, Debug)]
pub struct Counts {
    /// By number of the instruction.
    pub each: Vec<Count>,
    /// Launches.
    pub launches: u64,
}

impl Counts {
    /// Adds the counts of another launch of the same kernel.
    pub fn add(&mut self, other: &[Count]) {
        self.each.resize(self.each.len().max(other.len()), Count::default());
        self.each.iter_mut().zip(other).for_each(|(a, b)| a.add(b));
        self.launches += 1;
    }

    /// Instructions that lanes executed.
    pub fn lanes(&self) -> u64 {
        self.each.iter().map(|c| c.lanes).sum()
    }

    /// Instructions that warps executed, by class.
    pub fn classes(&self, k: &Kernel) -> BTreeMap<Class, u64> {
        let mut out = BTreeMap::new();
        for (pc, c) in self.each.iter().enumerate().filter(|(_, c)| c.lanes > 0) {
            *out.entry(k.class(pc)).or_insert(0) += c.warps;
        }
        out
    }

    /// Units and ideal of accesses of a class.
    pub fn units(&self, k: &Kernel, class: Class) -> (u64, u64) {
        let of = self.each.iter().enumerate().filter(|(pc, _)| k.class(*pc) == class);
        of.fold((0, 0), |(u, i), (_, c)| (u + c.units, i + c.ideal))
    }

    /// Instructions that no lane executed.
    pub fn never(&self, k: &Kernel) -> Vec<usize> {
        // The last instruction is the exit that every text gets.
        (0..k.instructions() - 1).filter(|pc| self.each.get(*pc).is_none_or(|c| c.lanes == 0)).collect()
    }

    /// As JSON: totals, classes, and each access to memory.
    pub fn json(&self, k: &Kernel) -> Value {
        let name = |c: Class| Class::ALL.iter().find(|a| a.0 == c).map_or("", |a| a.1);
        let classes: serde_json::Map<String, Value> =
            self.classes(k).into_iter().map(|(c, n)| (name(c).to_string(), json!(n))).collect();
        let over = |class| {
            let (units, ideal) = self.units(k, class);
            json!({"units": units, "ideal": ideal})
        };
        let accesses: Vec<Value> = (self.each.iter().enumerate().filter(|(_, c)| c.ideal > 0))
            .map(|(pc, c)| json!({"instruction": k.text(pc), "warps": c.warps, "units": c.units, "ideal": c.ideal}))
            .collect();
        json!({
            "kernel": k.name,
            "launches": self.launches,
            "warp_instructions": self.each.iter().map(|c| c.warps).sum::<u64>(),
            "lane_instructions": self.lanes(),
            "classes": classes,
            "global_sectors": over(Class::Global),
            "shared_passes": over(Class::Shared),
            "accesses": accesses,
            "never_executed": self.never(k).len(),
        })
    }
}

/// Sectors that lanes' accesses of `n` bytes touch, and how many the same bytes need at least.
pub(crate) fn sectors(at: &[u64; 32], m: u32, n: u64) -> (u64, u64) {
    let mut seen = [0u64; 64];
    let (mut have, mut last) = (0usize, u64::MAX);
    let mut bytes: Vec<(u64, u64)> = Vec::with_capacity(32);
    for l in (0..32).filter(|l| m >> l & 1 == 1) {
        bytes.push((at[l], at[l] + n));
        for s in at[l] / 32..=(at[l] + n - 1) / 32 {
            if s != last && !seen[..have].contains(&s) && have < 64 {
                seen[have] = s;
                have += 1;
            }
            last = s;
        }
    }
    (have as u64, distinct(&mut bytes).div_ceil(32))
}

/// Bytes in a union of ranges.
fn distinct(ranges: &mut [(u64, u64)]) -> u64 {
    if !ranges.is_sorted() {
        ranges.sort_unstable();
    }
    let (mut end, mut sum) = (0, 0);
    for (a, b) in ranges.iter() {
        let from = end.max(*a);
        sum += b.saturating_sub(from);
        end = end.max(*b);
    }
    sum
}

/// Passes of shared memory, and the least that lanes' accesses of `n` bytes take. It serves a word of each of 32 banks a pass, to as
/// many neighbouring lanes as make 128 bytes; lanes that want the same word share it.
pub(crate) fn passes(at: &[u64; 32], m: u32, n: u64) -> (u64, u64) {
    let group = (128 / n.max(4)).min(32) as usize;
    let (mut passes, mut least) = (0, 0);
    for first in (0..32).step_by(group) {
        let lanes = (first..first + group).filter(|l| m >> l & 1 == 1);
        let mut words: Vec<u64> = lanes.flat_map(|l| at[l] / 4..=(at[l] + n - 1) / 4).collect();
        words.sort_unstable();
        words.dedup();
        let mut banks = [0u64; 32];
        words.iter().for_each(|w| banks[(w % 32) as usize] += 1);
        passes += banks.into_iter().max().unwrap_or(0);
        least += words.len().div_ceil(32) as u64;
    }
    (passes, least)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sectors_and_passes_are_counted_by_hand() {
        let line: [u64; 32] = std::array::from_fn(|l| 4096 + 4 * l as u64);
        assert_eq!(sectors(&line, !0, 4), (4, 4));
        let strided: [u64; 32] = std::array::from_fn(|l| 4096 + 128 * l as u64);
        assert_eq!(sectors(&strided, !0, 4), (32, 4));
        assert_eq!(sectors(&[4096; 32], !0, 4), (1, 1));
        assert_eq!(passes(&line, !0, 4), (1, 1));
        assert_eq!(passes(&strided, !0, 4), (32, 1));
        assert_eq!(passes(&[64; 32], !0, 4), (1, 1));
        assert_eq!(passes(&strided, 0, 4), (0, 0));
        assert_eq!(passes(&std::array::from_fn(|l| 16 * l as u64), !0, 16), (4, 4));
        // Eight lanes at a time, each time one place; and every second lane, which use four banks.
        assert_eq!(passes(&std::array::from_fn(|l| 512 * (l as u64 / 8)), !0, 16), (4, 4));
        assert_eq!(passes(&std::array::from_fn(|l| 16 * l as u64), 0x5555_5555, 4), (4, 1));
    }
}
