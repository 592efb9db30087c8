//! Which item comes when. In: a seed and the number of an item in the order of training, counted from the first step over all
//! epochs and ranks. Out: the item. Nothing is remembered: a run resumes by going on counting, and any number of ranks share
//! the same order. Each epoch is a permutation of its own, computed rather than stored: a Feistel network (Luby and Rackoff
//! 1988) whose rounds are Philox, walked until it falls inside the range (Black and Rogaway 2002).

use super::DataError;
use astrai_ir::ops::philox;
use std::ops::Range;

/// Rounds of the network; four are enough against an adversary, of whom there is none.
const ROUNDS: u32 = 6;

/// The order of training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampler {
    items: u64,
    key: [u32; 2],
    /// Bits of half an index.
    half: u32,
}

impl Sampler {
    /// A new order of `items` items in each epoch.
    ///
    /// # Errors
    /// There are no items.
    pub fn new(items: u64, seed: u64) -> Result<Sampler, DataError> {
        if items == 0 || items > 1 << 62 {
            return Err(DataError::Options(format!("{items} items cannot be put in order; add data")));
        }
        let bits = u64::BITS - (items - 1).leading_zeros();
        let half = bits.div_ceil(2).max(1);
        Ok(Sampler { items, key: [seed as u32, (seed >> 32) as u32], half })
    }

    /// Items of an epoch.
    pub fn items(&self) -> u64 {
        self.items
    }

    /// The epoch to which number `global` belongs, from 0.
    pub fn epoch(&self, global: u64) -> u64 {
        global / self.items
    }

    /// The item that comes as number `global`. A batch that reaches beyond an epoch goes on with the next one.
    pub fn item(&self, global: u64) -> u64 {
        self.place(self.epoch(global), global % self.items)
    }

    /// The item at place `index` of an epoch.
    pub fn place(&self, epoch: u64, index: u64) -> u64 {
        debug_assert!(index < self.items, "place {index} of {}", self.items);
        // The network permutes less than four times as many numbers: a walk from one inside always comes back inside.
        let mut at = self.mix(epoch, index);
        while at >= self.items {
            at = self.mix(epoch, at);
        }
        at
    }

    /// The items that come as these numbers.
    pub fn range(&self, globals: Range<u64>) -> impl Iterator<Item = u64> + use<> {
        let sampler = *self;
        globals.map(move |global| sampler.item(global))
    }

    fn mix(&self, epoch: u64, index: u64) -> u64 {
        let mask = (1_u64 << self.half) - 1;
        let (mut left, mut right) = (index >> self.half, index & mask);
        for round in 0..ROUNDS {
            let drawn = philox([right as u32, round, epoch as u32, (epoch >> 32) as u32], self.key);
            (left, right) = (right, left ^ (u64::from(drawn[0]) & mask));
        }
        left << self.half | right
    }
}
