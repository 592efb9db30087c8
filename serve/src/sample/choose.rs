//! What min-p, top-k and top-p leave of a row, without sorting it. In: logits and their softmax. Out: a draw. Few candidates are
//! listed; where many are left, tokens are drawn from the whole and those that the filters drop are drawn again, which gives the
//! same distribution for one pass a draw. Logits and ids are joined to one integer that orders by logit and then by lower id, so
//! that every cut is sharp.

use super::softmax::{BLOCK, LANES, Softmax, multiversion, select_by_weight};
use crate::request::Sampling;

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

/// Draws from the whole row before what is left is listed after all: with the smallest `top_p` they may all miss.
const DRAWS: u32 = 8;

/// What the filters keep.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kept {
    /// The candidates that are listed.
    Listed,
    /// Of the weighed row the tokens above which there is less weight than this.
    Below(f64),
}

/// Candidates, and space to work in.
#[derive(Clone, Debug, Default)]
pub struct Candidates {
    /// In no order.
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
            self.listed.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
            self.listed.truncate(k);
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
        let &Sampling { temperature, top_p, min_p, .. } = sampling;
        let top_k = sampling.top_k as usize;
        let floor = if min_p > 0.0 { softmax.max + temperature * min_p.ln() } else { f32::MIN };
        if top_k > 0 && top_k < logits.len() {
            softmax.set_temperature(temperature);
            self.likeliest(logits, softmax, top_k, floor);
            if top_p < 1.0 {
                self.narrow(softmax, f64::from(top_p) * weight(&self.listed, softmax));
            }
            return Kept::Listed;
        }
        softmax.sum_weights(logits, temperature, floor);
        if top_p == 1.0 {
            return Kept::Below(f64::INFINITY);
        }
        let mass = f64::from(top_p) * softmax.total;
        // None weighs more than 1; and few are those of a small part of the blocks.
        let few = FEW.min(softmax.maxima.len() / 4);
        if mass <= few as f64
            && let Some(bound) = self.bound(softmax, few)
        {
            self.list(logits, softmax, bound.max(floor));
            if weight(&self.listed, softmax) >= mass {
                self.narrow(softmax, mass);
                return Kept::Listed;
            }
        }
        Kept::Below(mass)
    }

    /// Draws one of what the filters keep; `uniform` gives independent numbers in [0, 1).
    pub fn draw(
        &mut self,
        logits: &[f32],
        softmax: &Softmax,
        kept: Kept,
        uniform: impl Fn(u32) -> f64,
    ) -> Option<usize> {
        let Kept::Below(mass) = kept else { return self.at(softmax, uniform(0)) };
        for i in 0..DRAWS {
            let id = softmax.at(logits, uniform(i));
            if mass == f64::INFINITY || softmax.above(logits, id) < mass {
                return Some(id);
            }
        }
        self.list_below(logits, softmax, mass);
        self.at(softmax, uniform(DRAWS))
    }

    /// Lists what a weighed row keeps.
    pub fn list_below(&mut self, logits: &[f32], softmax: &Softmax, mass: f64) {
        self.list(logits, softmax, softmax.floor);
        self.narrow(softmax, mass);
    }

    /// Leaves the fewest likeliest of the list that weigh `mass` together.
    fn narrow(&mut self, softmax: &Softmax, mass: f64) {
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

    /// The candidate at which the running sum of weights exceeds `u` of the total; `u` in [0, 1).
    fn at(&self, softmax: &Softmax, u: f64) -> Option<usize> {
        walk_widest(&self.listed, softmax, u * weight(&self.listed, softmax)).map(id)
    }
}

/// Weight of all, in lanes, so that the compiler makes vectors of it.
#[inline(always)]
fn sum(ranks: &[Rank], softmax: &Softmax) -> f64 {
    let mut sums = [0f64; 8];
    let (whole, rest) = ranks.as_chunks::<8>();
    for chunk in whole {
        for i in 0..8 {
            sums[i] += f64::from(softmax.weight(logit(chunk[i])));
        }
    }
    for (i, &r) in rest.iter().enumerate() {
        sums[i] += f64::from(softmax.weight(logit(r)));
    }
    sums.iter().sum()
}

/// The rank at which the running sum of weights exceeds `left`, or the last that weighs anything.
#[inline(always)]
fn walk(ranks: &[Rank], softmax: &Softmax, left: f64) -> Option<Rank> {
    let weights = ranks.iter().map(|r| f64::from(softmax.weight(logit(*r))));
    select_by_weight(weights, left).map(|(i, _)| ranks[i])
}

multiversion!(sum, sum_avx2, weight, (ranks: &[Rank], softmax: &Softmax) -> f64);
multiversion!(walk, walk_avx2, walk_widest, (ranks: &[Rank], softmax: &Softmax, left: f64) -> Option<Rank>);
