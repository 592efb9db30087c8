//! `sample`: a token drawn from each row of logits, by temperature, top-k, top-p and min-p. Every device draws the same token: weights are
//! f32 by one polynomial, added up in an order that is fixed, or as integers, whose sum has no order.
//!
//! A logit `x` weighs `exp((x - max) / temperature)`. A row is taken in blocks of [`BLOCK`](Drawing::BLOCK); the sum of a block's weights is that of
//! [`LANES`](Drawing::LANES) lanes, each of which adds every so manieth, joined by halves. Sums of blocks, and weights that are added up one
//! by one, are integers in steps of 1 / [`STEPS`](Drawing::STEPS). Likelier is the larger logit, of equals the lower id.

use crate::op::{Infer, Inferred, Operator, float, integer};
use crate::{DType, Dim, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// How the token of a row is drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drawing {
    /// One over the temperature; 0 takes the likeliest.
    pub inverse: f32,
    /// Added to the largest logit, the least that a token may have: temperature times the logarithm of min-p, or negative infinity.
    pub reach: f32,
    /// Keeps the fewest likeliest that have this probability together, in (0, 1].
    pub top_p: f32,
    /// Keeps so many likeliest; 0, or as many as there are, keeps all.
    pub top_k: u32,
    /// Random bits of each draw.
    pub words: [u64; Drawing::DRAWS + 1],
}

impl Drawing {
    /// Logits of a block; a multiple of [`LANES`](Drawing::LANES).
    pub const BLOCK: usize = 128;
    /// Lanes in which a block's weights are added up.
    pub const LANES: usize = 16;
    /// Steps in which sums are counted, so many to the weight of the likeliest token; a power of two.
    pub const STEPS: f32 = (1u64 << 34) as f32;
    /// Draws from the whole row before what top-p keeps is listed after all: with the smallest they may all miss.
    pub const DRAWS: usize = 8;

    /// Adding this rounds to an integer and leaves it in the low bits.
    pub const ROUND: f32 = 12_582_912.0;
    /// ln 2 as two numbers: the upper has few bits, so that its products with small integers are exact.
    pub const LN_2: [f32; 2] = [0.693_359_4, (std::f64::consts::LN_2 - 0.693_359_375) as f32];
    /// Coefficients of the exponential, highest first. Within 1e-8 for |r| <= ln 2 / 2: fitted there, with 1 and r as they are.
    pub const EXP: [f32; 7] = [0.001_390_502, 0.008_366_279, 0.041_666_865, 0.166_665_45, 0.5, 1.0, 1.0];
    /// Below this the exponential is 0: the numbers end.
    pub const LEAST: f32 = -87.0;

    /// `exp(x)` for `x <= 0`, or above by a rounding, within 2 ulp.
    #[inline(always)]
    pub fn exp(x: f32) -> f32 {
        let shifted = x.mul_add(std::f32::consts::LOG2_E, Drawing::ROUND);
        let n = shifted - Drawing::ROUND;
        let r = n.mul_add(-Drawing::LN_2[1], n.mul_add(-Drawing::LN_2[0], x));
        let mut p = Drawing::EXP[0];
        for c in &Drawing::EXP[1..] {
            p = r.mul_add(p, *c);
        }
        // The bits of ROUND itself leave by the shift; n is added to the exponent.
        let scaled = f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23));
        if x < Drawing::LEAST { 0.0 } else { scaled }
    }

    /// A weight, or the sum of a block's, in steps.
    #[inline(always)]
    pub fn steps(weight: f32) -> u64 {
        (weight * Drawing::STEPS) as u64
    }

    /// The part `word / 2^64` of a sum: less than the sum, if that is not 0.
    pub fn part(word: u64, sum: u64) -> u64 {
        ((u128::from(word) * u128::from(sum)) >> 64) as u64
    }

    /// What top-p keeps of a sum, in steps.
    pub fn mass(top_p: f32, sum: u64) -> u64 {
        // Exact: a power of two. Twice the sum, since 1 is half of all words.
        Drawing::part((top_p * (1u64 << 63) as f32) as u64, 2 * sum)
    }

    /// The likeliest token.
    pub const GREEDY: Drawing = Drawing {
        inverse: 0.0,
        reach: f32::NEG_INFINITY,
        top_p: 1.0,
        top_k: 0,
        words: [0; Drawing::DRAWS + 1],
    };
    /// Numbers of a row of the argument `sampling`, f32.
    pub const REALS: usize = 3;
    /// Numbers of a row of the argument `draws`, i32.
    pub const INTEGERS: usize = 1 + 2 * (Drawing::DRAWS + 1);

    /// A row of `sampling`.
    pub fn reals(&self) -> [f32; Drawing::REALS] {
        [self.inverse, self.reach, self.top_p]
    }

    /// A row of `draws`: top-k, and of each word the lower half and the upper.
    pub fn integers(&self) -> [i32; Drawing::INTEGERS] {
        std::array::from_fn(|i| match i.checked_sub(1) {
            None => self.top_k as i32,
            Some(i) => (self.words[i / 2] >> (32 * (i % 2))) as i32,
        })
    }

    fn of(reals: &[f32], integers: &[i64]) -> Drawing {
        let word = |i: usize| {
            let half = |at: usize| u64::from(integers[at] as u32);
            half(2 * i + 1) | half(2 * i + 2) << 32
        };
        let words = std::array::from_fn(word);
        Drawing { inverse: reals[0], reach: reals[1], top_p: reals[2], top_k: integers[0] as u32, words }
    }

    /// The token of a row; none where the logits are no distribution: NaN, infinite, or all negative infinity.
    pub fn token(&self, logits: &[f32]) -> Option<usize> {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if max == f32::NEG_INFINITY || !logits.iter().all(|x| *x < f32::INFINITY) {
            return None;
        }
        let best = logits.iter().position(|x| *x == max)?;
        if self.inverse == 0.0 {
            return Some(best);
        }
        let row = Row {
            logits,
            inverse: self.inverse,
            shift: -(max * self.inverse),
            floor: (max + self.reach).max(f32::MIN),
        };
        let kept: Vec<usize> = (0..logits.len()).filter(|&i| logits[i] >= row.floor).collect();
        if self.top_k > 0 && (self.top_k as usize) < logits.len() {
            let mut kept = row.likeliest(kept);
            kept.truncate(self.top_k as usize);
            if self.top_p < 1.0 {
                let mass = Drawing::mass(self.top_p, kept.iter().map(|i| row.weight(*i)).sum());
                kept = row.fewest(kept, mass);
            }
            return row.draw(kept, self.words[0]);
        }
        let blocks: Vec<u64> = (0..logits.len().div_ceil(Drawing::BLOCK))
            .map(|b| Drawing::steps(row.sum(b, |i| logits[i] >= row.floor)))
            .collect();
        let sum = blocks.iter().sum();
        let mass = if self.top_p < 1.0 { Drawing::mass(self.top_p, sum) } else { u64::MAX };
        for word in &self.words[..Drawing::DRAWS] {
            let id = row.walk(&blocks, Drawing::part(*word, sum)).unwrap_or(best);
            if row.above(id) < mass {
                return Some(id);
            }
        }
        row.draw(row.fewest(row.likeliest(kept), mass), self.words[Drawing::DRAWS])
    }
}

/// A row whose logits have weights.
struct Row<'a> {
    logits: &'a [f32],
    inverse: f32,
    shift: f32,
    floor: f32,
}

impl Row<'_> {
    fn exp(&self, id: usize) -> f32 {
        Drawing::exp(self.logits[id].mul_add(self.inverse, self.shift))
    }

    fn weight(&self, id: usize) -> u64 {
        Drawing::steps(self.exp(id))
    }

    fn ids(&self, block: usize) -> std::ops::Range<usize> {
        block * Drawing::BLOCK..self.logits.len().min((block + 1) * Drawing::BLOCK)
    }

    /// The sum of the weights of some tokens of a block.
    fn sum(&self, block: usize, counts: impl Fn(usize) -> bool) -> f32 {
        let mut lanes = [0f32; Drawing::LANES];
        for id in self.ids(block).filter(|id| counts(*id)) {
            lanes[id % Drawing::LANES] += self.exp(id);
        }
        let mut n = Drawing::LANES / 2;
        while n > 0 {
            (0..n).for_each(|i| lanes[i] += lanes[i + n]);
            n /= 2;
        }
        lanes[0]
    }

    fn is_likelier(&self, id: usize, than: usize) -> bool {
        let (x, y) = (self.logits[id], self.logits[than]);
        x > y || (x == y && id < than)
    }

    fn likeliest(&self, mut ids: Vec<usize>) -> Vec<usize> {
        ids.sort_unstable_by(|&a, &b| self.is_likelier(b, a).cmp(&self.is_likelier(a, b)));
        ids
    }

    /// Weight of all that are likelier than a token.
    fn above(&self, id: usize) -> u64 {
        let counts = |other: usize| self.is_likelier(other, id);
        let of = |block: usize| match block == id / Drawing::BLOCK {
            true => self.ids(block).filter(|i| counts(*i)).map(|i| self.weight(i)).sum(),
            false => Drawing::steps(self.sum(block, counts)),
        };
        (0..self.logits.len().div_ceil(Drawing::BLOCK)).map(of).sum()
    }

    /// The first of these, one at least, that weigh so much together.
    fn fewest(&self, mut ids: Vec<usize>, mass: u64) -> Vec<usize> {
        let mut sum = 0;
        let more = ids.iter().take_while(|id| {
            let more = sum < mass.max(1);
            sum += self.weight(**id);
            more
        });
        let count = more.count();
        ids.truncate(count);
        ids
    }

    /// The token at which the running sum over ids exceeds a part of the sum.
    fn draw(&self, mut ids: Vec<usize>, word: u64) -> Option<usize> {
        ids.sort_unstable();
        let mut left = Drawing::part(word, ids.iter().map(|id| self.weight(*id)).sum());
        self.find(ids.into_iter(), &mut left)
    }

    /// The same over all tokens, first by blocks: in the block the last that weighs anything where rounding leaves too little.
    fn walk(&self, blocks: &[u64], mut left: u64) -> Option<usize> {
        let block = blocks.iter().position(|sum| {
            let here = left < *sum;
            left -= if here { 0 } else { *sum };
            here
        });
        self.find(self.ids(block?).filter(|id| self.logits[*id] >= self.floor), &mut left)
    }

    fn find(&self, ids: impl Iterator<Item = usize>, left: &mut u64) -> Option<usize> {
        let mut found = None;
        for id in ids {
            let weight = self.weight(id);
            if weight > 0 {
                found = Some(id);
            }
            if *left < weight {
                break;
            }
            *left -= weight;
        }
        found
    }
}

/// Arguments: logits f32 `[rows, vocabulary]`; `sampling` f32 `[rows, 3]` and `draws` i32 `[rows, 19]`, rows of a [`Drawing`]. Output: ids i32
/// `[rows]`, -1 where a row's logits are no distribution.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sample {}

impl Operator for Sample {
    const NAME: &'static str = "sample";

    fn infer(&self, cx: &Infer) -> Inferred {
        let [logits, sampling, draws] = cx.exactly()?;
        float("logits", logits)?;
        float("`sampling`", sampling)?;
        integer("`draws`", draws)?;
        let [rows, vocabulary] = &logits.shape[..] else {
            return Err(format!("logits must be [rows, vocabulary], got {logits}"));
        };
        if vocabulary.literal() == Some(0) {
            return Err(format!("needs a logit in each row of {logits}"));
        }
        for (what, ty, count) in
            [("`sampling`", sampling, Drawing::REALS), ("`draws`", draws, Drawing::INTEGERS)]
        {
            if ty.shape != [rows.clone(), Dim::from(count)] {
                return Err(format!("{what} must be [{rows}, {count}], got {ty}"));
            }
        }
        Ok(vec![Type { dtype: DType::I32, shape: vec![rows.clone()] }])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let [logits, sampling, draws] = [0, 1, 2].map(|i| cx.args[i]);
        let of = |t: &Tensor, row: usize, n: usize| -> Vec<f32> {
            (row * n..(row + 1) * n).map(|i| t.at(i) as f32).collect()
        };
        let token = |row: usize| {
            let integers: Vec<i64> = (row * Drawing::INTEGERS..(row + 1) * Drawing::INTEGERS)
                .map(|i| draws.at(i) as i64)
                .collect();
            let drawing = Drawing::of(&of(sampling, row, Drawing::REALS), &integers);
            drawing.token(&of(logits, row, logits.shape[1])).map_or(-1, |id| id as i64)
        };
        Ok(vec![Tensor::int(DType::I32, cx.shape(), (0..logits.shape[0]).map(token).collect())])
    }

    fn flops(&self, args: &[&Type], _: &[Type]) -> Dim {
        args[0].elements()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::apply;

    fn rows(of: &[Drawing]) -> [Tensor; 2] {
        let reals: Vec<f32> = of.iter().flat_map(Drawing::reals).collect();
        let integers = of.iter().flat_map(Drawing::integers).map(i64::from).collect();
        [
            Tensor::f32(&[of.len(), Drawing::REALS], &reals),
            Tensor::int(DType::I32, &[of.len(), Drawing::INTEGERS], integers),
        ]
    }

    #[test]
    fn what_is_no_distribution_gives_no_token_and_of_equals_the_first() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        let of = [[1.0, 3.0, 3.0], [1.0, nan, 0.0], [inf, 0.0, 1.0], [-inf; 3], [-inf, -0.0, 0.0]];
        let [sampling, draws] = rows(&[Drawing::GREEDY; 5]);
        let out = apply(Sample {}, &[Tensor::f32(&[5, 3], &of.concat()), sampling, draws]);
        assert_eq!(out[0], Tensor::int(DType::I32, &[5], vec![1, -1, -1, -1, 1]));
    }

    #[test]
    fn a_draw_is_the_inverse_of_the_running_sum_over_what_is_kept() {
        // Weights 1, 2, 3, 2 of 8.
        let logits = [1f32, 2.0, 3.0, 2.0].map(f32::ln);
        let draw =
            |eighths: u64| Drawing { inverse: 1.0, words: [(2 * eighths + 1) << 60; 9], ..Drawing::GREEDY };
        let tokens = |more: fn(Drawing) -> Drawing| -> Vec<usize> {
            (0..8).filter_map(|i| more(draw(i)).token(&logits)).collect()
        };
        assert_eq!(tokens(|d| d), [0, 1, 1, 2, 2, 2, 3, 3]);
        assert_eq!(tokens(|d| Drawing { top_k: 2, ..d }), [1, 1, 1, 2, 2, 2, 2, 2]);
        assert_eq!(tokens(|d| Drawing { top_k: 1, ..d }), [2; 8]);
        assert_eq!(tokens(|d| Drawing { top_k: 3, top_p: 0.5, ..d }), [1, 1, 1, 2, 2, 2, 2, 2]);
        // The first and the seventh fall on what top-p drops, and come by the last word.
        assert_eq!(tokens(|d| Drawing { top_p: 0.5, ..d }), [1, 1, 1, 2, 2, 2, 2, 2]);
        assert_eq!(tokens(|d| Drawing { reach: 0.6f32.ln(), ..d }), [1, 1, 2, 2, 2, 2, 3, 3]);
    }
}
