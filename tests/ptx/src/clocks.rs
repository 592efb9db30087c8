//! What is ordered before what. Each warp of a block has a clock and knows the clocks of the others up to their last common
//! barrier; each lane knows the others of its warp up to their last common `__syncwarp`; a block knows of other blocks what it
//! acquired through atomics. All clocks of a launch are later than those before it, so that shadows need no clearing.

use std::collections::HashMap;
use std::rc::Rc;

/// Clocks of the warps of other blocks, by block.
pub(crate) type Known = HashMap<u32, Rc<Vec<u32>>>;

/// What all lanes of a warp are ordered after.
pub(crate) struct Order<'c> {
    warp: usize,
    /// Its own accesses before this.
    full: u32,
    /// Those of each warp up to this.
    seen: &'c [u32],
}

impl Order<'_> {
    /// True where they are ordered after what the warp v did at this time.
    #[inline(always)]
    pub fn after(&self, v: usize, clock: u32) -> bool {
        if v == self.warp { clock < self.full } else { self.seen[v] >= clock }
    }
}

/// Clocks of a block.
#[derive(Default)]
pub(crate) struct Clocks {
    pub warps: usize,
    /// Accesses before this were before the block.
    pub base: u32,
    own: Vec<u32>,
    /// `seen[w * warps + v]`: w is ordered after what v did up to this.
    seen: Vec<u32>,
    /// Clocks of the last synchronisation of all lanes.
    full: Vec<u32>,
    /// After a synchronisation of some lanes: what each lane knows of each.
    lanes: Vec<Option<Box<[[u32; 32]; 32]>>>,
    /// What fences made ready to be released, and what was acquired, by warp.
    released: Vec<Option<Known>>,
    foreign: Vec<Known>,
    /// True after a barrier of some warps only.
    pub partial: bool,
}

impl Clocks {
    /// Begins a block at a time later than all before.
    pub fn start(&mut self, warps: usize, base: u32) {
        self.warps = warps;
        self.base = base;
        self.partial = false;
        self.own.clear();
        self.own.resize(warps, base);
        self.full.clone_from(&self.own);
        self.seen.clear();
        self.seen.resize(warps * warps, base - 1);
        self.lanes.clear();
        self.lanes.resize(warps, None);
        self.released.clear();
        self.released.resize(warps, None);
        self.foreign.clear();
        self.foreign.resize(warps, Known::new());
    }

    #[inline(always)]
    pub fn now(&self, w: usize) -> u32 {
        self.own[w]
    }

    /// A time after all of this block.
    pub fn end(&self) -> u32 {
        self.own.iter().copied().max().unwrap_or(self.base) + 1
    }

    /// What all lanes of w are ordered after.
    #[inline(always)]
    pub fn order(&self, w: usize) -> Order<'_> {
        Order { warp: w, full: self.full[w], seen: &self.seen[w * self.warps..][..self.warps] }
    }

    /// True where w is ordered after what the warp v did at this time.
    #[inline(always)]
    pub fn after(&self, w: usize, v: usize, clock: u32) -> bool {
        self.seen[w * self.warps + v] >= clock
    }

    /// True where lane l of a warp is ordered after what its lane k did at this time.
    #[inline(always)]
    pub fn lane_after(&self, w: usize, l: usize, k: usize, clock: u32) -> bool {
        clock < self.full[w] || l == k || self.lanes[w].as_ref().is_some_and(|m| k < 32 && m[l][k] >= clock)
    }

    /// True where w acquired what a warp of another block did at this time.
    pub fn acquired(&self, w: usize, block: u32, v: usize, clock: u32) -> bool {
        self.foreign[w].get(&block).is_some_and(|c| c[v] >= clock)
    }

    /// True where w acquired anything at all.
    pub fn acquires(&self, w: usize) -> bool {
        !self.foreign[w].is_empty()
    }

    /// All of w's knowledge of the block's warps, joined into `into`.
    pub fn arrive(&mut self, w: usize, into: &mut Arrivals) {
        into.clocks.resize(self.warps, 0);
        for (v, c) in into.clocks.iter_mut().enumerate() {
            *c = (*c).max(if v == w { self.own[w] } else { self.seen[w * self.warps + v] });
        }
        merge(&mut into.foreign, &self.foreign[w]);
    }

    /// A warp that arrived goes on without waiting: what it does now is later.
    pub fn pass(&mut self, w: usize) {
        self.own[w] += 1;
    }

    /// Warps leave a barrier at which others arrived, too.
    pub fn leave(&mut self, warps: u32, from: &Arrivals) {
        let top = 1 + (0..self.warps).filter(|w| warps >> w & 1 == 1).map(|w| self.own[w]).max().unwrap_or(0);
        for w in (0..self.warps).filter(|w| warps >> w & 1 == 1) {
            for v in 0..self.warps {
                let s = &mut self.seen[w * self.warps + v];
                *s = (*s).max(from.clocks[v]);
            }
            self.own[w] = top;
            self.full[w] = top;
            self.lanes[w] = None;
            merge(&mut self.foreign[w], &from.foreign);
        }
    }

    /// `__syncwarp` of these lanes.
    pub fn sync_lanes(&mut self, w: usize, mask: u32, live: u32) {
        let before = self.own[w];
        self.own[w] += 1;
        if mask & live == live {
            self.full[w] = self.own[w];
            self.lanes[w] = None;
            return;
        }
        let m = self.lanes[w].get_or_insert_with(|| Box::new([[0; 32]; 32]));
        let members = || (0..32).filter(|l| mask >> l & 1 == 1);
        let mut row = [0; 32];
        for l in members() {
            (0..32).for_each(|k| row[k] = row[k].max(m[l][k]));
            row[l] = before;
        }
        members().for_each(|l| m[l] = row);
    }

    /// A fence of the device: what the warp knows may now be released.
    pub fn fence(&mut self, w: usize, block: u32) {
        let mut known = self.foreign[w].clone();
        let mut own: Vec<u32> = self.seen[w * self.warps..(w + 1) * self.warps].to_vec();
        own[w] = self.own[w];
        known.insert(block, Rc::new(own));
        self.released[w] = Some(known);
        self.own[w] += 1;
    }

    /// What the warp releases with an atomic or a strong store.
    pub fn release(&self, w: usize, into: &mut Known) {
        if let Some(k) = &self.released[w] {
            merge(into, k);
        }
    }

    /// The warp read what others released.
    pub fn acquire(&mut self, w: usize, from: &Known) {
        merge(&mut self.foreign[w], from);
    }
}

/// What those who arrived at a barrier know.
#[derive(Default, Clone)]
pub(crate) struct Arrivals {
    clocks: Vec<u32>,
    foreign: Known,
}

fn merge(into: &mut Known, from: &Known) {
    for (block, clocks) in from {
        let have = into.entry(*block).or_insert_with(|| clocks.clone());
        if !Rc::ptr_eq(have, clocks) {
            let both = have.iter().zip(clocks.iter()).map(|(a, b)| *a.max(b)).collect();
            *have = Rc::new(both);
        }
    }
}
