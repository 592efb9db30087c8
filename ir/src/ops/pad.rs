//! `pad`: constant elements before and after one axis.

use crate::op::{Cotangents, Infer, Inferred, Operator, Simpler, Vjp, axis_in};
use crate::ops::Slice;
use crate::tensor::{ravel, unravel};
use crate::{Dim, Graph, NodeId, Real, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// One axis padded with a constant.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pad {
    /// The axis.
    pub axis: usize,
    /// Elements added in front.
    pub before: Dim,
    /// Elements added behind.
    pub after: Dim,
    /// Their value.
    pub value: Real,
}

impl Operator for Pad {
    const NAME: &'static str = "pad";
    const FLOPS: usize = 0;

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        axis_in(self.axis, x)?;
        if [&self.before, &self.after].into_iter().any(|d| d.literal().is_some_and(|v| v < 0)) {
            return Err(format!("cannot pad by {} and {}", self.before, self.after));
        }
        let mut shape = x.shape.clone();
        shape[self.axis] = &(&shape[self.axis] + &self.before) + &self.after;
        Ok(vec![Type { dtype: x.dtype, shape }])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let (x, before) = (cx.args[0], cx.dim(&self.before)?);
        // The padding value is appended to the elements of x as its own type, so that 64-bit integers stay exact.
        let mut bits = Vec::new();
        x.dtype.encode(self.value.0, &mut bits);
        let both = x.append(&Tensor::from_bytes(x.dtype, &[1], &bits)?);
        Ok(vec![both.gather_with(cx.shape(), |i| {
            let mut at = unravel(i, cx.shape());
            if at[self.axis] < before || at[self.axis] >= before + x.shape[self.axis] {
                return x.len();
            }
            at[self.axis] -= before;
            ravel(&at, &x.shape)
        })])
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let len = cx.graph.ty(cx.args[0]).shape[self.axis].clone();
        cx.through(Slice { axis: self.axis, start: self.before.clone(), len })
    }

    fn simplify(&self, graph: &Graph, args: &[NodeId]) -> Option<Simpler> {
        let &[x] = args else { return None };
        let nothing = self.before == Dim::from(0) && self.after == Dim::from(0);
        (nothing && self.axis < graph.ty(x).rank()).then_some(Simpler::Node(x))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::check::apply;

    #[test]
    fn in_front_and_behind() {
        let op = Pad { axis: 1, before: Dim::from(1), after: Dim::from(2), value: Real(9.0) };
        let x = Tensor::int(DType::I64, &[2, 1], vec![i64::MAX, 2]);
        let want = vec![9, i64::MAX, 9, 9, 9, 2, 9, 9];
        assert_eq!(apply(op, &[x])[0], Tensor::int(DType::I64, &[2, 4], want));
    }
}
