//! `expand`: broadcast of axes of size one.

use crate::op::{Cotangents, Infer, Inferred, Operator, Simpler, Vjp};
use crate::ops::{Reduce, ReduceKind, Reshape};
use crate::shard::{Label, Partition, Propagate, ShardingRule};
use crate::tensor::{ravel, unravel};
use crate::ty::show;
use crate::{Dim, Graph, IrError, NodeId, Shape, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// Axes of size one broadcast to `shape`; the rank stays.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expand {
    /// Sizes of the result.
    pub shape: Shape,
}

impl Operator for Expand {
    const NAME: &'static str = "expand";
    const FLOPS: usize = 0;

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        let fits = |(a, b): (&Dim, &Dim)| a == b || a.is_one();
        if x.rank() != self.shape.len() || !x.shape.iter().zip(&self.shape).all(fits) {
            return Err(format!("cannot repeat {x} up to {}; only axes of size 1 repeat", show(&self.shape)));
        }
        Ok(vec![Type { dtype: x.dtype, shape: self.shape.clone() }])
    }

    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        let kept = |d: usize| (cx.args[0].shape[d] == self.shape[d]).then_some(d);
        let labels: [Vec<Label>; 1] = [(0..self.shape.len()).map(kept).collect()];
        [cx.labelled(&labels, &labels, &[]), cx.linear(&[&[0]])].concat()
    }

    fn partition(&self, graph: &mut Graph, args: &[NodeId], cx: &Partition) -> Result<NodeId, IrError> {
        graph.push(Expand { shape: cx.local_type(0).shape }, args)
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let x = cx.args[0];
        Ok(vec![x.gather_with(cx.shape(), |i| {
            let at = unravel(i, cx.shape());
            let at: Vec<usize> = at.iter().zip(&x.shape).map(|(&a, &n)| if n == 1 { 0 } else { a }).collect();
            ravel(&at, &x.shape)
        })])
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let shape = cx.graph.ty(cx.args[0]).shape.clone();
        let axes = (0..shape.len()).filter(|&a| shape[a] != self.shape[a]).collect();
        let g = cx.grad();
        let sum = cx.graph.push(Reduce { kind: ReduceKind::Sum, axes }, &[g])?;
        Ok(vec![Some(cx.graph.push(Reshape { shape }, &[sum])?)])
    }

    fn simplify(&self, graph: &Graph, args: &[NodeId]) -> Option<Simpler> {
        let &[x] = args else { return None };
        (graph.ty(x).shape == self.shape).then_some(Simpler::Node(x))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::apply;

    #[test]
    fn a_column_repeats() {
        let x = Tensor::f32(&[2, 1], &[1.0, 2.0]);
        let op = Expand { shape: vec![Dim::from(2), Dim::from(3)] };
        assert_eq!(apply(op, &[x])[0].reals(), [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
    }
}
