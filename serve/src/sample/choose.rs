//! What min-p, top-k and top-p leave of a row, without sorting it. In: logits and their softmax. Out: a draw, that of
//! [`Drawing::token`]. What top-k keeps is listed, in the order of ids; with top-p alone tokens are drawn from the whole and those that it drops
//! are drawn again, which gives the same distribution for one pass a draw. Logits and ids are joined to one integer that orders by
//! logit and then by lower id, so that every cut is sharp.

use super::softmax::{BLOCK, LANES, Softmax, multiversion, select_by_weight};
use crate::request::Sampling;
use astrai_ir::ops::Drawing;

/// Larger is likelier; no two tokens of a row are equal.
pub type Rank = u64;

/// Rank of a token.
pub fn rank(x: f32, id: usize) -> Rank {
    // Zero has one sign, so that equal logits have equal upper halves.
    let bits = (x + 0.0).to_bits();
    let ordered = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(ordered) << 32 | u64::from(!(id as u32))
}

/// Id of a rank.
pub fn id(rank: Rank) -> usize {
    !(rank as u32) as usize
}

/// Logit of a rank.
pub fn logit(rank: Rank) -> f32 {
    let ordered = (rank >> 32) as u32;
    f32::from_bits(if ordered >> 31 == 1 { ordered & !(1 << 31) } else { !ordered })
}

/// Tokens that have almost all the probability where the model is sure of anything.
const FEW: usize = 64;

/// What the filters keep.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kept {
    /// The candidates that are listed.
    Listed,
    /// Of the weighed row the tokens above which there is less weight than this, in steps.
    Below(u64),
}

/// Candidates, and space to work in.
#[derive(Clone, Debug, Default)]
pub struct Candidates {
    /// In the order of ids, unless they were ranked.
    pub listed: Vec<Rank>,
    space: Vec<Rank>,
    maxima: Vec<f32>,
}

impl Candidates {
    /// Lists the `k` likeliest that are not below `least`; `k` is positive.
    fn likeliest(&mut self, logits: &[f32], softmax: &Softmax, k: usize, least: f32) {
        let bound = self.bound(softmax, k).unwrap_or(least);
        self.list(logits, softmax, if bound > least { bound } else { least });
        if self.listed.len() > k {
            self.space.clone_from(&self.listed);
            let cut = *self.space.select_nth_unstable_by(k - 1, |a, b| b.cmp(a)).1;
            self.listed.retain(|r| *r >= cut);
        }
    }

    /// What `k` tokens reach at least, one in each of as many blocks, where there are so many.
    fn bound(&mut self, softmax: &Softmax, k: usize) -> Option<f32> {
        if k > softmax.maxima.len() {
            return None;
        }
        self.maxima.clear();
        self.maxima.extend_from_slice(&softmax.maxima);
        Some(*self.maxima.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1)
    }

    /// Lists all that are not below `least`.
    fn list(&mut self, logits: &[f32], softmax: &Softmax, least: f32) {
        self.listed.clear();
        for (b, block) in logits.chunks(BLOCK).enumerate().filter(|(b, _)| softmax.maxima[*b] >= least) {
            for (c, chunk) in block.chunks(LANES).enumerate() {
                // One test of vectors: most chunks of most rows have none.
                if !chunk.iter().fold(false, |any, x| any | (*x >= least)) {
                    continue;
                }
                let first = b * BLOCK + c * LANES;
                let ranks = chunk.iter().enumerate().filter(|(_, x)| **x >= least);
                self.listed.extend(ranks.map(|(i, &x)| rank(x, first + i)));
            }
        }
    }

    /// The `k` likeliest tokens, likeliest first.
    pub fn top(&mut self, logits: &[f32], softmax: &Softmax, k: usize) -> &[Rank] {
        self.listed.clear();
        if k > 0 {
            self.likeliest(logits, softmax, k, f32::NEG_INFINITY);
            self.listed.sort_unstable_by(|a, b| b.cmp(a));
        }
        &self.listed
    }

    /// Finds out what the filters keep, at a positive temperature: at least one token.
    pub fn filter(&mut self, logits: &[f32], softmax: &mut Softmax, sampling: &Sampling) -> Kept {
        let &Sampling { temperature, top_p, .. } = sampling;
        let top_k = sampling.top_k as usize;
        let floor = (softmax.max + sampling.reach()).max(f32::MIN);
        if top_k > 0 && top_k < logits.len() {
            softmax.set_temperature(temperature);
            self.likeliest(logits, softmax, top_k, floor);
            if top_p < 1.0 {
                self.narrow(softmax, Drawing::mass(top_p, weight(&self.listed, softmax)));
            }
            return Kept::Listed;
        }
        softmax.sum_weights(logits, temperature, floor);
        Kept::Below(if top_p < 1.0 { Drawing::mass(top_p, softmax.steps) } else { u64::MAX })
    }

    /// Draws one of what the filters keep; `word` gives independent random bits.
    pub fn draw(
        &mut self,
        logits: &[f32],
        softmax: &Softmax,
        kept: Kept,
        word: impl Fn(usize) -> u64,
    ) -> Option<usize> {
        let Kept::Below(mass) = kept else { return self.at(softmax, word(0)) };
        for i in 0..Drawing::DRAWS {
            let id = softmax.at(logits, word(i));
            if mass == u64::MAX || softmax.above(logits, id) < mass {
                return Some(id);
            }
        }
        self.list_below(logits, softmax, mass);
        self.at(softmax, word(Drawing::DRAWS))
    }

    /// Lists what a weighed row keeps: a few of the likeliest, where they weigh enough.
    pub fn list_below(&mut self, logits: &[f32], softmax: &Softmax, mass: u64) {
        // Few are those of a small part of the blocks.
        let few = FEW.min(softmax.maxima.len() / 4);
        let bound = if few > 0 { self.bound(softmax, few) } else { None };
        if let Some(bound) = bound {
            self.list(logits, softmax, bound.max(softmax.floor));
        }
        if bound.is_none() || weight(&self.listed, softmax) < mass {
            self.list(logits, softmax, softmax.floor);
        }
        self.narrow(softmax, mass);
    }

    /// Leaves the fewest likeliest of the list that weigh `mass` together.
    fn narrow(&mut self, softmax: &Softmax, mass: u64) {
        self.space.clear();
        self.space.extend_from_slice(&self.listed);
        let (mut from, mut to, mut left) = (0, self.space.len(), mass);
        // The least to keep is in `from..to`; what is before weighs the rest of the mass.
        while to - from > 1 {
            let half = (to - from) / 2;
            self.space[from..to].select_nth_unstable_by(half - 1, |a, b| b.cmp(a));
            let upper = weight(&self.space[from..from + half], softmax);
            if upper >= left {
                to = from + half;
            } else {
                left -= upper;
                from += half;
            }
        }
        let cut = self.space.get(from).copied().unwrap_or(0);
        self.listed.retain(|r| *r >= cut);
    }

    /// The candidate at which the running sum of weights exceeds the part of the total that a word is of all.
    fn at(&self, softmax: &Softmax, word: u64) -> Option<usize> {
        let left = Drawing::part(word, weight(&self.listed, softmax));
        walk_widest(&self.listed, softmax, left).map(id)
    }
}

/// Weight of all, in steps.
#[inline(always)]
fn sum(ranks: &[Rank], softmax: &Softmax) -> u64 {
    ranks.iter().map(|r| Drawing::steps(softmax.weight(logit(*r)))).sum()
}

/// The rank at which the running sum of weights exceeds `left`, or the last that weighs anything.
#[inline(always)]
fn walk(ranks: &[Rank], softmax: &Softmax, left: u64) -> Option<Rank> {
    let weights = ranks.iter().map(|r| Drawing::steps(softmax.weight(logit(*r))));
    select_by_weight(weights, left).map(|(i, _)| ranks[i])
}

multiversion!(sum, sum_avx2, weight, (ranks: &[Rank], softmax: &Softmax) -> u64);
multiversion!(walk, walk_avx2, walk_widest, (ranks: &[Rank], softmax: &Softmax, left: u64) -> Option<Rank>);
