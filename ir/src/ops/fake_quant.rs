//! `fake_quant`: numbers rounded to what integers of eight bits stand for, with a scale for each group of neighbours. The kernels of a dot
//! by integer codes compute the integers and multiply those; there the rounded numbers never exist.

use crate::op::{Infer, Inferred, Operator};
use crate::shard::{Label, Propagate, ShardingRule};
use crate::{DType, Dim, Tensor, eval::Eval};
use serde::{Deserialize, Serialize};

/// `s · round(x / s)`, ties to even, f32 `[…, k]`: `s` is the greatest magnitude of the group over 127. All in f32, so that every device
/// finds the same integers. A group whose magnitudes are all below 2⁻¹⁰⁰ is zero; one with a number that is none, or is infinite, is none.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FakeQuant {
    /// Neighbours along the last axis that share a scale.
    pub group: usize,
}

impl FakeQuant {
    /// Magnitudes below this are nothing beside any that matter; its inverse is finite.
    const LEAST: f32 = f32::from_bits((127 - 100) << 23);

    /// The scale of a group and its integers.
    fn of(numbers: &[f32]) -> (f32, Vec<f32>) {
        let top =
            numbers.iter().fold(0f32, |top, x| if x.is_nan() { f32::INFINITY } else { top.max(x.abs()) });
        let scale = match top {
            top if !top.is_finite() => f32::NAN,
            top if top < FakeQuant::LEAST => 0.0,
            top => top / 127.0,
        };
        let by = if scale > 0.0 { 127.0 / top } else { 0.0 };
        let whole = |x: &f32| if by > 0.0 { (x * by).round_ties_even() } else { 0.0 };
        (scale, numbers.iter().map(whole).collect())
    }
}

impl Operator for FakeQuant {
    const NAME: &'static str = "fake_quant";
    const FLOPS: usize = 4;
    const REDUCES: bool = true;

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        let k = x.shape.last().and_then(Dim::size).filter(|k| *k > 0);
        match k {
            Some(k) if x.dtype == DType::F32 && self.group > 0 && k % self.group == 0 => {
                Ok(vec![(*x).clone()])
            }
            _ => Err(format!("takes f32 rows of whole groups of {}, got {x}", self.group)),
        }
    }

    /// Rows apart, each whole.
    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        let rank = cx.args[0].rank();
        let labels: Vec<Label> = (0..rank).map(|d| (d + 1 < rank).then_some(d)).collect();
        cx.labelled(std::slice::from_ref(&labels), std::slice::from_ref(&labels), &[])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let [x] = cx.args else { return Err("takes 1 argument".into()) };
        let numbers: Vec<f32> = x.reals().into_iter().map(|x| x as f32).collect();
        let mut out = Vec::with_capacity(numbers.len());
        for group in numbers.chunks(self.group) {
            let (scale, whole) = FakeQuant::of(group);
            out.extend(whole.into_iter().map(|q| f64::from(scale) * f64::from(q)));
        }
        cx.real(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::apply;

    #[test]
    fn groups_are_rounded_by_their_greatest() {
        let x = Tensor::f32(&[2, 4], &[127.0, -0.5, 1.5, 63.4, 0.0, -1e-35, 254.0, -3.0]);
        let out = &apply(FakeQuant { group: 2 }, &[x])[0];
        assert_eq!(out.reals()[..2], [127.0, 0.0]);
        assert_eq!(out.reals()[4..], [0.0, 0.0, 254.0, -4.0]);
        let x = Tensor::f32(&[1, 4], &[f32::NAN, 1.0, f32::INFINITY, 1.0]);
        assert!(apply(FakeQuant { group: 2 }, &[x])[0].reals().iter().all(|x| x.is_nan()));
    }
}
