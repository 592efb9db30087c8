//! `cumsum`: cumulative sums (a scan) along one axis.

use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp, axis_in};
use crate::shard::{Propagate, ShardingRule};
use crate::tensor::strides;
use crate::{DType, Tensor, eval::Eval};
use serde::{Deserialize, Serialize};

/// Element `j` along `axis` is the sum of the elements up to `j`. Integers wrap.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cumsum {
    /// The axis.
    pub axis: usize,
    /// Element `j` itself is left out.
    pub exclusive: bool,
    /// Sums run from the last element to the first.
    pub reverse: bool,
}

impl Cumsum {
    /// Cumulative sums of every line of `values` along the axis.
    fn run<T: Copy + Default>(&self, values: &mut [T], shape: &[usize], add: impl Fn(T, T) -> T) {
        let (n, step) = (shape[self.axis], strides(shape)[self.axis]);
        for start in (0..values.len()).filter(|i| (i / step) % n == 0) {
            let mut sum = T::default();
            for j in 0..n {
                let at = start + step * if self.reverse { n - 1 - j } else { j };
                let before = sum;
                sum = add(sum, values[at]);
                values[at] = if self.exclusive { before } else { sum };
            }
        }
    }
}

impl Operator for Cumsum {
    const NAME: &'static str = "cumsum";
    const TOLERANCE: [f64; 2] = [16.0, 1e-5];

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        axis_in(self.axis, x)?;
        if x.dtype == DType::Bool {
            return Err(format!("takes numbers, got {x}; cast it"));
        }
        Ok(vec![(*x).clone()])
    }

    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        [cx.except(&[self.axis]), cx.linear(&[&[0]])].concat()
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let x = cx.args[0];
        if x.dtype.is_float() {
            let mut values = x.reals();
            self.run(&mut values, &x.shape, |a, b| a + b);
            return cx.real(values);
        }
        let mut values: Vec<i64> = (0..x.len()).map(|i| x.int_at(i)).collect();
        self.run(&mut values, &x.shape, i64::wrapping_add);
        Ok(vec![Tensor::int(x.dtype, &x.shape, values)])
    }

    /// The cumulative sum of the cotangents in the opposite direction: an element is a term of its own sum and of later ones.
    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        cx.through(Cumsum { reverse: !self.reverse, ..self.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::apply;

    #[test]
    fn all_four_ways() {
        let x = Tensor::f32(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let run = |axis, exclusive, reverse| {
            apply(Cumsum { axis, exclusive, reverse }, std::slice::from_ref(&x))[0].reals()
        };
        assert_eq!(run(1, false, false), [1.0, 3.0, 6.0, 4.0, 9.0, 15.0]);
        assert_eq!(run(1, true, false), [0.0, 1.0, 3.0, 0.0, 4.0, 9.0]);
        assert_eq!(run(1, false, true), [6.0, 5.0, 3.0, 15.0, 11.0, 6.0]);
        assert_eq!(run(0, true, true), [4.0, 5.0, 6.0, 0.0, 0.0, 0.0]);
    }
}
