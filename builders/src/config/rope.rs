//! Rotary position embedding as numbers. In: the resolved parameters of one layer. Out: the angle per position of each
//! rotated pair and the factor on cos and sin. The formulas are those of transformers' `modeling_rope_utils`, in f64.

use std::f64::consts::PI;

/// Rotary embedding of one layer: position `p` turns pair `j` by `p * inv_freq[j]`, and cos and sin are multiplied by
/// [`attention_factor`](Self::attention_factor).
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// Base of the geometric series of frequencies, > 1.
    pub theta: f64,
    /// Rotated components of a head; even.
    pub dim: usize,
    /// Which components form a pair.
    pub layout: RopeLayout,
    /// How the frequencies are stretched beyond the trained context.
    pub scaling: RopeScaling,
}

/// Which two components of a head are turned together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeLayout {
    /// `j` and `j + dim/2` (transformers' `rotate_half`).
    Half,
    /// `2j` and `2j + 1` (complex numbers, as in AstrAI and the RoFormer paper).
    Interleaved,
}

/// Context extension.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// As trained.
    None,
    /// All frequencies divided by `factor` (position interpolation, arXiv 2306.15595).
    Linear {
        /// Stretch, >= 1.
        factor: f64,
    },
    /// Base multiplied by `factor^(dim/(dim-2))` (AstrAI's `ntk`).
    Ntk {
        /// Stretch, >= 1.
        factor: f64,
    },
    /// Long wavelengths stretched, short ones kept, a linear blend between (Llama 3.1).
    Llama3 {
        /// Stretch of the long wavelengths, >= 1.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are stretched.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are kept; > `low_freq_factor`.
        high_freq_factor: f64,
        /// Context of the original training, tokens.
        original_max_positions: usize,
    },
    /// YaRN (arXiv 2309.00071).
    Yarn(Yarn),
    /// LongRoPE (arXiv 2402.13753).
    LongRope(LongRope),
}

/// Parameters of LongRoPE, which turns slower by a factor of each pair's own: other factors in long contexts than in those of
/// the original training. Which of them counts is decided by the longest sequence that a program is built for, so that no
/// result depends on what else is in a batch, and keys in a cache stay what they are.
#[derive(Clone, Debug, PartialEq)]
pub struct LongRope {
    /// Divisors of the frequencies in contexts up to `original_max_positions`, `[dim/2]`.
    pub short: Vec<f64>,
    /// Those in longer ones, `[dim/2]`.
    pub long: Vec<f64>,
    /// Context of the original training, tokens; at least 2.
    pub original_max_positions: usize,
    /// Longest context, tokens.
    pub max_positions: usize,
    /// The stretch when the file states it; else the quotient of the two contexts.
    pub factor: Option<f64>,
    /// Factor on cos and sin when the file states it; else it follows from the stretch.
    pub attention_factor: Option<f64>,
}

/// Parameters of YaRN.
#[derive(Clone, Debug, PartialEq)]
pub struct Yarn {
    /// Stretch, >= 1.
    pub factor: f64,
    /// Context of the original training, tokens.
    pub original_max_positions: usize,
    /// Factor on cos and sin when the file states it.
    pub attention_factor: Option<f64>,
    /// Rotations over the original context above which a pair is kept (32 unless stated).
    pub beta_fast: f64,
    /// Rotations below which a pair is stretched (1 unless stated).
    pub beta_slow: f64,
    /// With `mscale_all_dim`: the attention factor is the quotient of the two scales (DeepSeek).
    pub mscale: Option<f64>,
    /// See `mscale`.
    pub mscale_all_dim: Option<f64>,
    /// The blend's bounds are rounded outwards to whole pairs (true unless stated).
    pub truncate: bool,
}

/// `0.1 * mscale * ln(factor) + 1`, and 1 where nothing is stretched: the magnitude rule of YaRN.
pub fn yarn_mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

impl RopeSpec {
    /// Angle per position of each pair in sequences of up to `span` tokens, radians. Shape `[dim/2]`.
    pub fn inv_freq_within(&self, span: u64) -> Vec<f64> {
        match &self.scaling {
            RopeScaling::LongRope(l) if span > l.original_max_positions as u64 => divided(self, &l.long),
            _ => self.inv_freq(),
        }
    }

    /// Angle per position of each pair in the context of the original training, radians. Shape `[dim/2]`.
    pub fn inv_freq(&self) -> Vec<f64> {
        match &self.scaling {
            RopeScaling::LongRope(l) => divided(self, &l.short),
            RopeScaling::None => series(self.theta, self.dim),
            RopeScaling::Linear { factor } => {
                series(self.theta, self.dim).iter().map(|f| f / factor).collect()
            }
            RopeScaling::Ntk { factor } => {
                let d = self.dim as f64;
                series(self.theta * factor.powf(d / (d - 2.0)), self.dim)
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
                let context = *original_max_positions as f64;
                let bend = |f: &f64| llama3(*f, *factor, *low_freq_factor, *high_freq_factor, context);
                series(self.theta, self.dim).iter().map(bend).collect()
            }
            RopeScaling::Yarn(y) => y.inv_freq(self.theta, self.dim),
        }
    }

    /// Multiplies cos and sin; 1 except with YaRN and LongRoPE.
    pub fn attention_factor(&self) -> f64 {
        match &self.scaling {
            RopeScaling::Yarn(y) => {
                y.attention_factor.unwrap_or_else(|| match (y.mscale, y.mscale_all_dim) {
                    (Some(m), Some(all)) => yarn_mscale(y.factor, m) / yarn_mscale(y.factor, all),
                    _ => yarn_mscale(y.factor, 1.0),
                })
            }
            RopeScaling::LongRope(l) => l.attention_factor.unwrap_or_else(|| {
                let original = l.original_max_positions as f64;
                match l.factor.unwrap_or(l.max_positions as f64 / original) {
                    factor if factor <= 1.0 => 1.0,
                    factor => (1.0 + factor.ln() / original.ln()).sqrt(),
                }
            }),
            _ => 1.0,
        }
    }
}

/// The plain frequencies of `rope`, each divided by its factor.
fn divided(rope: &RopeSpec, by: &[f64]) -> Vec<f64> {
    series(rope.theta, rope.dim).iter().zip(by).map(|(f, x)| f / x).collect()
}

/// `theta^(-2j/dim)` for `j` in `0..dim/2`.
fn series(theta: f64, dim: usize) -> Vec<f64> {
    (0..dim / 2).map(|j| theta.powf(-((2 * j) as f64) / dim as f64)).collect()
}

fn llama3(freq: f64, factor: f64, low: f64, high: f64, context: f64) -> f64 {
    let wavelength = 2.0 * PI / freq;
    if wavelength > context / low {
        freq / factor
    } else if wavelength < context / high {
        freq
    } else {
        let keep = (context / wavelength - low) / (high - low);
        (1.0 - keep) * freq / factor + keep * freq
    }
}

impl Yarn {
    fn inv_freq(&self, theta: f64, dim: usize) -> Vec<f64> {
        let d = dim as f64;
        let bound = |rotations: f64| {
            d * (self.original_max_positions as f64 / (rotations * 2.0 * PI)).ln() / (2.0 * theta.ln())
        };
        let (mut low, mut high) = (bound(self.beta_fast), bound(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(d - 1.0));
        if low == high {
            high += 0.001; // the reference's own guard against a division by zero
        }
        let blend = |(j, f): (usize, f64)| {
            let stretched = ((j as f64 - low) / (high - low)).clamp(0.0, 1.0);
            f / self.factor * stretched + f * (1.0 - stretched)
        };
        series(theta, dim).into_iter().enumerate().map(blend).collect()
    }
}
