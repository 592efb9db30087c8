//! `random`: numbers from Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), the same on
//! every device because each element is a function of (seed, step, stream, element) alone.
//!
//! Element `i` (row-major) is made from the four words `w = philox(counter, key)` with
//!
//! * key = (seed low, seed high), counter = (i / 4, stream, step low, step high), each a 32-bit half of the i64;
//! * uniform: the upper `p` bits of `w[i % 4]`, times 2⁻ᵖ, where `p` is the number of significant bits of the element
//!   type (24 for f32, 11 for f16, 8 for bf16); so every value is exact in its type and 1 does not occur;
//! * normal (Box and Muller 1958), with `a = w[(i % 4) & 2]`, `b = w[(i % 4) | 1]`: radius `r = sqrt(-2 ln u)` for
//!   `u = ((a >> 8) + 1)·2⁻²⁴`, angle `t = 2π·(b >> 8)·2⁻²⁴`; the value is `r cos t` for even `i` and `r sin t` for odd.

use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp, same};
use crate::{DType, Dim, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// Distribution of the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RandomKind {
    /// Uniform on [0, 1).
    Uniform,
    /// Normal of mean 0 and variance 1.
    Normal,
}

/// Random numbers. Arguments: `seed` and `step`, both i64 scalars.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Random {
    /// Distribution.
    pub kind: RandomKind,
    /// Type of the result; floating.
    pub ty: Type,
    /// The random stream of this seed and step; nodes whose numbers must be independent have different streams.
    pub stream: u32,
}

/// Elements one (seed, step, stream) has: four for each value of the counter's first word.
const ELEMENTS: u64 = 1 << 34;

/// Ten rounds of Philox4x32.
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (mut c, mut k) = (counter, key);
    for _ in 0..10 {
        let (a, b) = (0xD251_1F53 * u64::from(c[0]), 0xCD9E_8D57 * u64::from(c[2]));
        c = [(b >> 32) as u32 ^ c[1] ^ k[0], b as u32, (a >> 32) as u32 ^ c[3] ^ k[1], a as u32];
        k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
    }
    c
}

impl Random {
    /// Element `i` of the sequence of (seed, step).
    pub fn draw(&self, seed: i64, step: i64, i: usize) -> f64 {
        let halves = |x: i64| [x as u32, (x >> 32) as u32];
        let [low, high] = halves(step);
        let w = philox([(i / 4) as u32, self.stream, low, high], halves(seed));
        match self.kind {
            RandomKind::Uniform => {
                let unit = self.ty.dtype.epsilon();
                (f64::from(w[i % 4]) / 2f64.powi(32) / unit).floor() * unit
            }
            RandomKind::Normal => {
                let scale = 2f64.powi(-24);
                let (a, b) = (w[(i % 4) & 2] >> 8, w[(i % 4) | 1] >> 8);
                let r = (-2.0 * (f64::from(a + 1) * scale).ln()).sqrt();
                let t = std::f64::consts::TAU * f64::from(b) * scale;
                r * if i.is_multiple_of(2) { t.cos() } else { t.sin() }
            }
        }
    }
}

impl Operator for Random {
    const NAME: &'static str = "random";

    fn infer(&self, cx: &Infer) -> Inferred {
        let [seed, step] = cx.exactly()?;
        same("seed and i64 scalar", seed, &Type::scalar(DType::I64))?;
        same("step and i64 scalar", step, &Type::scalar(DType::I64))?;
        if !self.ty.dtype.is_float() {
            return Err(format!("makes floating-point numbers, not {}", self.ty));
        }
        Ok(vec![self.ty.clone()])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let n: usize = cx.shape().iter().product();
        if n as u64 > ELEMENTS {
            return Err(format!(
                "has {n} elements, more than the {ELEMENTS} of one stream; split it into streams"
            ));
        }
        let (seed, step) = (cx.args[0].int_at(0), cx.args[1].int_at(0));
        cx.each(|i| self.draw(seed, step, i))
    }

    /// Random numbers have no gradient.
    fn vjp(&self, _: &mut Vjp) -> Cotangents {
        Ok(vec![None, None])
    }

    fn flops(&self, _: &[&Type], outs: &[Type]) -> Dim {
        &outs[0].elements() * &Dim::from(if self.kind == RandomKind::Uniform { 1 } else { 8 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::apply;

    /// The known answers that come with the authors' Random123 library.
    #[test]
    fn philox_matches_the_published_vectors() {
        let all = u32::MAX;
        let zero = [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8];
        let ones = [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd];
        let pi = [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1];
        assert_eq!(philox([0; 4], [0; 2]), zero);
        assert_eq!(philox([all; 4], [all; 2]), ones);
        let counter = [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344];
        assert_eq!(philox(counter, [0xa4093822, 0x299f31d0]), pi);
    }

    fn draws(kind: RandomKind, dtype: DType, n: usize, stream: u32, step: i64) -> Vec<f64> {
        let scalar = |v| Tensor::int(DType::I64, &[], vec![v]);
        let op = Random { kind, ty: Type::new(dtype, [Dim::from(n)]), stream };
        apply(op, &[scalar(0), scalar(step)])[0].reals()
    }

    #[test]
    fn elements_are_the_words_in_order() {
        let x = draws(RandomKind::Uniform, DType::F32, 5, 0, 0);
        assert_eq!(x[0], f64::from(0x6627e8d5u32 >> 8) / 16777216.0);
        assert_eq!(x[3], f64::from(0x9b00dbd8u32 >> 8) / 16777216.0);
        let (u, t) =
            (f64::from((0x6627e8d5u32 >> 8) + 1) / 16777216.0, f64::from(0xe169c58du32 >> 8) / 16777216.0);
        let y = draws(RandomKind::Normal, DType::F32, 2, 0, 0);
        let r = (-2.0 * u.ln()).sqrt();
        assert_eq!(y[0], (r * (std::f64::consts::TAU * t).cos()) as f32 as f64);
        assert_eq!(y[1], (r * (std::f64::consts::TAU * t).sin()) as f32 as f64);
    }

    #[test]
    fn moments_are_right_and_streams_differ() {
        let n = 20_000;
        let moments = |v: &[f64]| {
            let mean = v.iter().sum::<f64>() / n as f64;
            (mean, v.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64)
        };
        for dtype in [DType::F32, DType::BF16] {
            let x = draws(RandomKind::Uniform, dtype, n, 1, 7);
            assert!(x.iter().all(|&v| (0.0..1.0).contains(&v) && dtype.round(v) == v));
            let (mean, var) = moments(&x);
            assert!((mean - 0.5).abs() < 0.01 && (var - 1.0 / 12.0).abs() < 0.003, "{mean} {var}");
        }
        let (mean, var) = moments(&draws(RandomKind::Normal, DType::F32, n, 1, 7));
        assert!(mean.abs() < 0.03 && (var - 1.0).abs() < 0.03, "{mean} {var}");
        let a = draws(RandomKind::Normal, DType::F32, 8, 1, 7);
        assert_ne!(a, draws(RandomKind::Normal, DType::F32, 8, 2, 7));
        assert_ne!(a, draws(RandomKind::Normal, DType::F32, 8, 1, 8));
        assert_ne!(a, draws(RandomKind::Normal, DType::F32, 8, 1, 7 + (1 << 32)));
    }
}
