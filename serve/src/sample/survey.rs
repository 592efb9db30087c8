//! One pass over a row of logits: maximum and softmax sum, by blocks. In: logits of one token, `[vocabulary]`. Out: what
//! all ways of choosing need first, and what lets them skip most of the row afterwards. The arithmetic is written so that
//! the compiler makes vectors of it; the results do not depend on how wide these are.

/// Logits that a block summarises; a multiple of [`LANES`].
pub const BLOCK: usize = 512;

const LANES: usize = 16;

/// Block maxima and sums of `exp((x - block maximum) / temperature)`, and the same of the whole.
#[derive(Clone, Debug, Default)]
pub struct Survey {
    /// Largest logit of each block.
    pub maxima: Vec<f32>,
    /// Sum of each block.
    pub sums: Vec<f32>,
    /// Largest logit.
    pub max: f32,
    /// Sum of `exp((x - max) / temperature)`.
    pub total: f64,
    inverse: f32,
}

/// `exp(x)` for `x <= 0`, within 2 ulp; 0 below -87, where the numbers end.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Adding this rounds to an integer and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // The upper part of ln 2 has few bits: its products with small integers are exact.
    const UPPER: f32 = 0.693_359_4;
    const LOWER: f32 = (std::f64::consts::LN_2 - UPPER as f64) as f32;
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * UPPER - n * LOWER;
    let mut p = 1.0 / 5040.0;
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = p * r + c;
    }
    let scale = f32::from_bits(shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23);
    if x < -87.0 { 0.0 } else { p * scale }
}

#[inline(always)]
fn maximum(logits: &[f32]) -> (f32, bool) {
    let (mut max, mut bad) = ([f32::NEG_INFINITY; LANES], [false; LANES]);
    let (whole, rest) = logits.as_chunks::<LANES>();
    for chunk in whole {
        for i in 0..LANES {
            max[i] = if chunk[i] > max[i] { chunk[i] } else { max[i] };
            bad[i] |= chunk[i].is_nan() | (chunk[i] == f32::INFINITY);
        }
    }
    for (i, &x) in rest.iter().enumerate() {
        max[i] = if x > max[i] { x } else { max[i] };
        bad[i] |= x.is_nan() | (x == f32::INFINITY);
    }
    (max.into_iter().fold(f32::NEG_INFINITY, f32::max), bad.contains(&true))
}

#[inline(always)]
fn sum(logits: &[f32], max: f32, inverse: f32) -> f32 {
    let mut sums = [0f32; LANES];
    let (whole, rest) = logits.as_chunks::<LANES>();
    for chunk in whole {
        for i in 0..LANES {
            sums[i] += exp((chunk[i] - max) * inverse);
        }
    }
    for (i, &x) in rest.iter().enumerate() {
        sums[i] += exp((x - max) * inverse);
    }
    sums.iter().sum()
}

/// Fills maxima, and sums if `inverse` is a temperature's; `false` if a logit is NaN or positive infinity.
#[inline(always)]
fn fill(survey: &mut Survey, logits: &[f32], inverse: Option<f32>) -> bool {
    let mut bad = false;
    for block in logits.chunks(BLOCK) {
        let (max, wrong) = maximum(block);
        bad |= wrong;
        survey.maxima.push(max);
        if let Some(inverse) = inverse {
            survey.sums.push(if max == f32::NEG_INFINITY { 0.0 } else { sum(block, max, inverse) });
        }
    }
    !bad
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn fill_avx2(survey: &mut Survey, logits: &[f32], inverse: Option<f32>) -> bool {
    fill(survey, logits, inverse)
}

fn fill_widest(survey: &mut Survey, logits: &[f32], inverse: Option<f32>) -> bool {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has what the function is compiled for.
        return unsafe { fill_avx2(survey, logits, inverse) };
    }
    fill(survey, logits, inverse)
}

impl Survey {
    /// Surveys a row; sums only with a temperature. `false` if a logit is NaN or positive infinity, or if all are negative
    /// infinity: there is no distribution then.
    pub fn take(&mut self, logits: &[f32], temperature: Option<f32>) -> bool {
        self.maxima.clear();
        self.sums.clear();
        self.inverse = temperature.map_or(1.0, |t| 1.0 / t);
        let sound = fill_widest(self, logits, temperature.map(|t| 1.0 / t));
        self.max = self.maxima.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let parts = self.maxima.iter().zip(&self.sums);
        self.total = parts.map(|(max, sum)| f64::from(sum * exp((max - self.max) * self.inverse))).sum();
        sound && self.max > f32::NEG_INFINITY
    }

    /// Weight of a logit, where the likeliest has 1.
    pub fn weight(&self, x: f32) -> f32 {
        exp((x - self.max) * self.inverse)
    }

    /// The first of the largest.
    pub fn argmax(&self, logits: &[f32]) -> usize {
        let block = self.maxima.iter().position(|&m| m == self.max).unwrap_or(0) * BLOCK;
        block + logits[block..].iter().position(|&x| x == self.max).unwrap_or(0)
    }

    /// The token at which the running sum of weights exceeds `u` of the total; `u` in [0, 1).
    pub fn at(&self, logits: &[f32], u: f64) -> usize {
        let (mut left, mut block) = (u * self.total, 0);
        let parts = self.maxima.iter().zip(&self.sums).enumerate();
        for (b, (max, sum)) in parts.filter(|(_, (_, sum))| **sum > 0.0) {
            let weight = f64::from(sum * exp((max - self.max) * self.inverse));
            if weight > 0.0 {
                block = b;
                if left < weight {
                    break;
                }
                left -= weight;
            }
        }
        let (mut chosen, start) = (None, block * BLOCK);
        for (i, &x) in logits[start..].iter().take(BLOCK).enumerate() {
            let weight = f64::from(self.weight(x));
            if weight > 0.0 {
                chosen = Some(start + i);
                if left < weight {
                    break;
                }
                left -= weight;
            }
        }
        chosen.unwrap_or_else(|| self.argmax(logits))
    }
}
