//! Passes over a row of logits. In: logits of one token, `[vocabulary]`. Out: maxima and sums of softmax weights by blocks,
//! which all ways of choosing need first and which let them skip most of the row afterwards. The arithmetic is written so that
//! the compiler makes vectors of it; the results do not depend on how wide these are. [`Drawing`] says what is computed: a device draws
//! the same tokens.

use astrai_ir::ops::Drawing;

/// Logits that a block summarises; a multiple of [`LANES`].
pub const BLOCK: usize = Drawing::BLOCK;

pub const LANES: usize = Drawing::LANES;

/// Why logits are no distribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidLogits {
    /// One is NaN or positive infinity.
    NotFinite,
    /// All are negative infinity.
    Nothing,
}

/// Maxima of a row of logits, and sums of its softmax weights, by block.
#[derive(Clone, Debug, Default)]
pub struct Softmax {
    /// Largest logit of each block.
    pub maxima: Vec<f32>,
    /// Largest logit.
    pub max: f32,
    /// Sum of the weights of all logits that are not below the floor.
    pub total: f64,
    /// The same in steps, and of each block.
    pub steps: u64,
    sums: Vec<f32>,
    /// Logits below it have no weight.
    pub floor: f32,
    /// A logit `x` weighs `exp(x * inverse + shift)`.
    inverse: f32,
    shift: f32,
}

/// The largest of each block; `false` if a logit is NaN or positive infinity.
#[inline(always)]
fn maxima(logits: &[f32], out: &mut Vec<f32>) -> bool {
    // As signed integers positive infinity and positive NaN are the largest, as unsigned ones negative NaN.
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (mut signed, mut unsigned) = ([i32::MIN; LANES], [0u32; LANES]);
    out.resize(logits.len().div_ceil(BLOCK), 0.0);
    for (block, out) in logits.chunks(BLOCK).zip(out) {
        let mut max = [f32::NEG_INFINITY; LANES];
        let mut look = |i: usize, x: f32| {
            max[i] = larger(max[i], x);
            signed[i] = signed[i].max(x.to_bits() as i32);
            unsigned[i] = unsigned[i].max(x.to_bits());
        };
        let (whole, rest) = block.as_chunks::<LANES>();
        for chunk in whole {
            for i in 0..LANES {
                look(i, chunk[i]);
            }
        }
        for (i, &x) in rest.iter().enumerate() {
            look(i, x);
        }
        *out = by_halves(max, larger);
    }
    let finite =
        |i: usize| signed[i] < f32::INFINITY.to_bits() as i32 && unsigned[i] <= f32::NEG_INFINITY.to_bits();
    (0..LANES).all(finite)
}

/// Joins all lanes, by halves, so that it takes four steps of vectors.
#[inline(always)]
fn by_halves(mut of: [f32; LANES], join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut n = LANES / 2;
    while n > 0 {
        for i in 0..n {
            of[i] = join(of[i], of[i + n]);
        }
        n /= 2;
    }
    of[0]
}

/// Weights of the logits of a block added up; with a floor only of those that are not below it.
#[inline(always)]
fn sum<const FLOOR: bool>(block: &[f32], inverse: f32, shift: f32, floor: f32) -> f32 {
    let weight = |x: f32| {
        let weight = Drawing::exp(x.mul_add(inverse, shift));
        if !FLOOR || x >= floor { weight } else { 0.0 }
    };
    let mut sums = [0f32; LANES];
    let (whole, rest) = block.as_chunks::<LANES>();
    for chunk in whole {
        for i in 0..LANES {
            sums[i] += weight(chunk[i]);
        }
    }
    for (i, &x) in rest.iter().enumerate() {
        sums[i] += weight(x);
    }
    by_halves(sums, |a, b| a + b)
}

/// [`sum`] of each block.
#[inline(always)]
fn sums(softmax: &mut Softmax, logits: &[f32]) {
    let Softmax { maxima, sums, floor, inverse, shift, .. } = softmax;
    let (floor, inverse, shift) = (*floor, *inverse, *shift);
    sums.resize(maxima.len(), 0.0);
    for ((block, most), out) in logits.chunks(BLOCK).zip(maxima).zip(sums) {
        *out = if floor <= f32::MIN {
            // What is negative infinity weighs nothing anyway.
            sum::<false>(block, inverse, shift, floor)
        } else if *most >= floor {
            sum::<true>(block, inverse, shift, floor)
        } else {
            0.0
        };
    }
}

/// Weights of all tokens that are likelier than this one: its equals of lower ids are.
#[inline(always)]
fn above(softmax: &Softmax, logits: &[f32], id: usize) -> u64 {
    let (least, own, mut total) = (logits[id], id / BLOCK, 0);
    for (b, block) in logits.chunks(BLOCK).enumerate().filter(|(b, _)| softmax.maxima[*b] >= least) {
        if b == own {
            let first = b * BLOCK;
            let likelier = |(i, x): &(usize, &f32)| **x > least || (**x == least && first + *i < id);
            let weights = block.iter().enumerate().filter(likelier).map(|(_, x)| softmax.weight(*x));
            total += weights.map(Drawing::steps).sum::<u64>();
        } else {
            let floor = if b < own { least } else { least.next_up() };
            total += Drawing::steps(sum::<true>(block, softmax.inverse, softmax.shift, floor));
        }
    }
    total
}

/// The place of the weight at which their running sum exceeds `left`, or of the last that is not 0; and what of `left` it has to
/// make up.
#[inline(always)]
pub(super) fn select_by_weight(weights: impl Iterator<Item = u64>, mut left: u64) -> Option<(usize, u64)> {
    let mut chosen = None;
    for (i, weight) in weights.enumerate().filter(|(_, w)| *w > 0) {
        chosen = Some((i, left));
        if left < weight {
            break;
        }
        left -= weight;
    }
    chosen
}

/// The place in a block at which the running sum of weights exceeds `left`, or the last that weighs anything.
#[inline(always)]
fn walk(softmax: &Softmax, block: &[f32], left: u64) -> Option<usize> {
    let mut weights = [0f32; BLOCK];
    for (weight, &x) in weights.iter_mut().zip(block) {
        let w = softmax.weight(x);
        *weight = if x >= softmax.floor { w } else { 0.0 };
    }
    select_by_weight(weights.iter().map(|w| Drawing::steps(*w)), left).map(|(i, _)| i)
}

/// Compiles a pass for wider vectors as well, and takes that where the processor has them.
macro_rules! multiversion {
    ($pass:ident, $wide:ident, $chosen:ident, ($($arg:ident: $ty:ty),*) -> $out:ty) => {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        fn $wide($($arg: $ty),*) -> $out {
            $pass($($arg),*)
        }

        fn $chosen($($arg: $ty),*) -> $out {
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                // SAFETY: the processor has what the function is compiled for.
                return unsafe { $wide($($arg),*) };
            }
            $pass($($arg),*)
        }
    };
}

pub(super) use multiversion;

multiversion!(maxima, maxima_avx2, maxima_widest, (logits: &[f32], out: &mut Vec<f32>) -> bool);
multiversion!(sums, sums_avx2, sums_widest, (softmax: &mut Softmax, logits: &[f32]) -> ());
multiversion!(above, above_avx2, above_widest, (softmax: &Softmax, logits: &[f32], id: usize) -> u64);
multiversion!(walk, walk_avx2, walk_widest, (softmax: &Softmax, block: &[f32], left: u64) -> Option<usize>);

impl Softmax {
    /// Scans a row: its maxima.
    ///
    /// # Errors
    /// There is no distribution.
    pub fn find_maxima(&mut self, logits: &[f32]) -> Result<(), InvalidLogits> {
        let finite = maxima_widest(logits, &mut self.maxima);
        self.max = self.maxima.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        match finite {
            false => Err(InvalidLogits::NotFinite),
            true if self.max == f32::NEG_INFINITY => Err(InvalidLogits::Nothing),
            true => Ok(()),
        }
    }

    /// Sets the temperature of the weights: a logit `x` has `exp((x - max) / temperature)`. One rounding of the shift, which
    /// is the same for all, changes no probability.
    pub fn set_temperature(&mut self, temperature: f32) {
        self.inverse = 1.0 / temperature;
        self.shift = -(self.max * self.inverse);
    }

    /// Sums the weights of a row at a temperature; logits below the floor have none.
    pub fn sum_weights(&mut self, logits: &[f32], temperature: f32, floor: f32) {
        self.set_temperature(temperature);
        self.floor = floor;
        sums_widest(self, logits);
        self.total = self.sums.iter().map(|s| f64::from(*s)).sum();
        self.steps = self.sums.iter().map(|s| Drawing::steps(*s)).sum();
    }

    /// Weight of a logit, where the likeliest has 1.
    #[inline(always)]
    pub fn weight(&self, x: f32) -> f32 {
        Drawing::exp(x.mul_add(self.inverse, self.shift))
    }

    /// Weight together of all tokens that are likelier than this one, in steps.
    pub fn above(&self, logits: &[f32], id: usize) -> u64 {
        above_widest(self, logits, id)
    }

    /// The first of the largest.
    pub fn argmax(&self, logits: &[f32]) -> usize {
        let block = self.maxima.iter().position(|&m| m == self.max).unwrap_or(0) * BLOCK;
        block + logits[block..].iter().position(|&x| x == self.max).unwrap_or(0)
    }

    /// The token at which the running sum of weights exceeds the part of the total that a word is of all. The row was weighed.
    pub fn at(&self, logits: &[f32], word: u64) -> usize {
        let sums = self.sums.iter().map(|sum| Drawing::steps(*sum));
        let (block, left) = select_by_weight(sums, Drawing::part(word, self.steps)).unwrap_or((0, 0));
        let start = block * BLOCK;
        let block = &logits[start..logits.len().min(start + BLOCK)];
        walk_widest(self, block, left).map_or_else(|| self.argmax(logits), |i| start + i)
    }
}
