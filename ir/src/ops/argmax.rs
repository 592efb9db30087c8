//! `argmax`: position of the largest element along one axis.

use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp, axis_in};
use crate::tensor::{ravel, unravel};
use crate::{DType, Dim, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;

/// Position (i32) of the largest element along `axis`, which the result no longer has. Of equal elements the first
/// counts; NaN is larger than every number.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Argmax {
    /// The axis.
    pub axis: usize,
}

/// Order of numbers in `argmax` and `topk`: NaN is the largest, the two zeros are equal.
pub(super) fn rank(a: f64, b: f64) -> Ordering {
    a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}

impl Operator for Argmax {
    const NAME: &'static str = "argmax";

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        axis_in(self.axis, x)?;
        if x.shape[self.axis].literal() == Some(0) {
            return Err(format!("needs an element along axis {} of {x}", self.axis));
        }
        let mut shape = x.shape.clone();
        shape.remove(self.axis);
        Ok(vec![Type { dtype: DType::I32, shape }])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let x = cx.args[0];
        let n = x.shape[self.axis];
        if n == 0 {
            return Err(format!("needs an element along axis {}", self.axis));
        }
        cx.each(|i| {
            let mut at = unravel(i, cx.shape());
            at.insert(self.axis, 0);
            let mut value = |j: usize| {
                at[self.axis] = j;
                x.at(ravel(&at, &x.shape))
            };
            let mut best = (0, value(0));
            for j in 1..n {
                let v = value(j);
                if rank(v, best.1) == Ordering::Greater {
                    best = (j, v);
                }
            }
            best.0 as f64
        })
    }

    /// A position is piecewise constant: it has no gradient.
    fn vjp(&self, _: &mut Vjp) -> Cotangents {
        Ok(vec![None])
    }

    fn flops(&self, args: &[&Type], _: &[Type]) -> Dim {
        args[0].elements()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::apply;

    #[test]
    fn first_of_equals_and_nan_wins() {
        let x = Tensor::f32(&[2, 3], &[1.0, 5.0, 5.0, 2.0, f32::NAN, 9.0]);
        assert_eq!(
            apply(Argmax { axis: 1 }, std::slice::from_ref(&x))[0],
            Tensor::int(DType::I32, &[2], vec![1, 1])
        );
        assert_eq!(apply(Argmax { axis: 0 }, &[x])[0], Tensor::int(DType::I32, &[3], vec![1, 1, 1]));
    }
}
