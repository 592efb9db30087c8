//! `topk`: the largest elements of the last axis, and where they were.

use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp};
use crate::ops::{Scatter, ScatterKind};
use crate::{DType, Dim, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// Outputs: the `k` largest elements of the last axis, descending, and their positions (i32). Equal elements come in
/// the order of their positions; NaN is larger than every number.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topk {
    /// How many.
    pub k: usize,
}

impl Operator for Topk {
    const NAME: &'static str = "topk";

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        let last = x.shape.last().ok_or("needs an axis, got a scalar")?;
        if self.k == 0 || last.size().is_some_and(|n| self.k > n) {
            return Err(format!("cannot take the {} largest of {last} elements", self.k));
        }
        let mut values = (*x).clone();
        values.shape[x.rank() - 1] = Dim::from(self.k);
        let indices = values.with(DType::I32);
        Ok(vec![values, indices])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let x = cx.args[0];
        let n = *x.shape.last().unwrap_or(&1);
        if self.k > n {
            return Err(format!("cannot take the {} largest of {n} elements", self.k));
        }
        let rows: usize = x.shape[..x.shape.len() - 1].iter().product();
        let mut from = Vec::with_capacity(rows * self.k);
        for row in 0..rows {
            let mut order: Vec<usize> = (row * n..(row + 1) * n).collect();
            // A stable sort keeps equal elements by position.
            order.sort_by(|&a, &b| super::argmax::rank(x.at(b), x.at(a)));
            from.extend(&order[..self.k]);
        }
        let indices = from.iter().map(|i| (i % n) as i64).collect();
        Ok(vec![x.gather_with(cx.shape(), |i| from[i]), Tensor::int(DType::I32, cx.shape(), indices)])
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let (x, indices, grad) = (cx.args[0], cx.outs[1], cx.grad());
        let last = cx.graph.ty(x).rank() - 1;
        let zero = cx.graph.fill(x, 0.0)?;
        let op = Scatter { axis: last, batch: last, kind: ScatterKind::Add };
        Ok(vec![Some(cx.graph.push(op, &[zero, indices, grad])?)])
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
    fn descending_and_ties_by_position() {
        let x = Tensor::f32(&[2, 4], &[1.0, 3.0, 2.0, 3.0, 0.0, -1.0, f32::NAN, 7.0]);
        let out = apply(Topk { k: 3 }, &[x]);
        assert_eq!(out[1], Tensor::int(DType::I32, &[2, 3], vec![1, 3, 2, 2, 3, 0]));
        assert_eq!(out[0].reals()[..3], [3.0, 3.0, 2.0]);
        assert!(out[0].at(3).is_nan());
        assert_eq!(out[0].reals()[4..], [7.0, 0.0]);
    }
}
