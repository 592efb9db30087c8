//! The likeliest of a row without sorting it. In: logits and their survey. Out: the candidates that min-p, top-k and top-p
//! leave. Logits and ids are joined to one integer that orders by logit and then by lower id, so that every cut is sharp.

use super::survey::{BLOCK, Survey};

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

/// Tokens that usually have almost all the probability.
const FEW: usize = 256;

/// Candidates, by id, and space to work in.
#[derive(Clone, Debug, Default)]
pub struct Candidates {
    /// What is left of the row.
    pub kept: Vec<Rank>,
    space: Vec<Rank>,
}

/// What to keep.
#[derive(Clone, Copy, Debug)]
pub struct Filter {
    /// Positive; the one the survey was taken with.
    pub temperature: f32,
    /// At most so many; 0 for all.
    pub top_k: usize,
    /// At least this probability.
    pub top_p: f32,
    /// At least this fraction of the largest probability.
    pub min_p: f32,
}

impl Candidates {
    /// The `k` likeliest, in no order, into the space; `k` is positive.
    fn likeliest(&mut self, logits: &[f32], survey: &Survey, k: usize, least: f32) {
        self.space.clear();
        let mut least = least;
        for (b, block) in logits.chunks(BLOCK).enumerate() {
            if survey.maxima[b] < least {
                continue;
            }
            for (i, &x) in block.iter().enumerate() {
                // Equal to the least so far but of a higher id: it loses when ranks are compared.
                if x >= least {
                    self.space.push(rank(x, b * BLOCK + i));
                }
            }
            if self.space.len() >= 2 * k.max(BLOCK) {
                self.cut(k);
                least = logit(self.space[k - 1]);
            }
        }
        if self.space.len() > k {
            self.cut(k);
        }
    }

    /// Leaves the `k` likeliest in the space, of which the last is the least.
    fn cut(&mut self, k: usize) {
        self.space.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
        self.space.truncate(k);
    }

    /// The `k` likeliest tokens, likeliest first.
    pub fn top(&mut self, logits: &[f32], survey: &Survey, k: usize) -> &[Rank] {
        self.space.clear();
        if k > 0 {
            self.likeliest(logits, survey, k, f32::NEG_INFINITY);
            self.space.sort_unstable_by(|a, b| b.cmp(a));
        }
        &self.space
    }

    /// Finds the tokens that a filter keeps: at least one.
    pub fn filter(&mut self, logits: &[f32], survey: &Survey, filter: &Filter) {
        let Filter { temperature, top_k, top_p, min_p } = *filter;
        let mut least = f32::MIN;
        if min_p > 0.0 {
            least = survey.max + temperature * min_p.ln();
        }
        let mut cut = 0;
        if top_k > 0 && top_k < logits.len() {
            self.likeliest(logits, survey, top_k, least);
            cut = self.space.iter().copied().min().unwrap_or(0);
            least = least.max(logit(cut));
        } else if top_p < 1.0 && min_p == 0.0 {
            // Tokens of less than half of (1 - p) / vocabulary each are too few to matter together.
            let tail = 0.5 * f64::from(1.0 - top_p) * survey.total / logits.len() as f64;
            least = least.max(survey.max + temperature * tail.ln().min(0.0) as f32);
            // Where the model is sure of anything, a few tokens are enough, and cheap to find.
            let mass = f64::from(top_p) * survey.total;
            if mass <= FEW as f64 {
                self.likeliest(logits, survey, FEW, least);
            }
            if mass <= FEW as f64 && weight(&self.space, survey) >= mass {
                cut = self.space.iter().copied().min().unwrap_or(0);
                least = logit(cut);
            }
        }
        self.kept.clear();
        for (b, block) in logits.chunks(BLOCK).enumerate().filter(|(b, _)| survey.maxima[*b] >= least) {
            let ranks = block.iter().enumerate().filter(|(_, x)| **x >= least);
            self.kept.extend(ranks.map(|(i, &x)| rank(x, b * BLOCK + i)).filter(|r| *r >= cut));
        }
        if top_p < 1.0 {
            let whole = top_k == 0 || top_k >= logits.len();
            let total = if whole && min_p == 0.0 { survey.total } else { weight(&self.kept, survey) };
            let cut = self.nucleus(survey, f64::from(top_p) * total);
            self.kept.retain(|r| *r >= cut);
        }
    }

    /// The least of the fewest likeliest candidates that weigh `mass` together.
    fn nucleus(&mut self, survey: &Survey, mass: f64) -> Rank {
        self.space.clear();
        self.space.extend_from_slice(&self.kept);
        let (mut from, mut to, mut left) = (0, self.space.len(), mass);
        // The answer is in `from..to`; what is before weighs the rest of the mass.
        while to - from > 1 {
            let half = (to - from) / 2;
            self.space[from..to].select_nth_unstable_by(half - 1, |a, b| b.cmp(a));
            let upper = weight(&self.space[from..from + half], survey);
            if upper >= left {
                to = from + half;
            } else {
                left -= upper;
                from += half;
            }
        }
        self.space.get(from).copied().unwrap_or(0)
    }

    /// The candidate at which the running sum of weights exceeds `u` of the total; `u` in [0, 1).
    pub fn at(&self, survey: &Survey, u: f64) -> Option<usize> {
        let mut left = u * weight(&self.kept, survey);
        let mut chosen = None;
        for &r in &self.kept {
            let weight = f64::from(survey.weight(logit(r)));
            if weight > 0.0 {
                chosen = Some(id(r));
                if left < weight {
                    break;
                }
                left -= weight;
            }
        }
        chosen
    }
}

/// In lanes, so that the compiler makes vectors of it.
fn weight(ranks: &[Rank], survey: &Survey) -> f64 {
    let mut sums = [0f64; 8];
    let (whole, rest) = ranks.as_chunks::<8>();
    for chunk in whole {
        for i in 0..8 {
            sums[i] += f64::from(survey.weight(logit(chunk[i])));
        }
    }
    for (i, &r) in rest.iter().enumerate() {
        sums[i] += f64::from(survey.weight(logit(r)));
    }
    sums.iter().sum()
}
