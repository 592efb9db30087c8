//! `permute`: transposition of axes.

use crate::op::{Cotangents, Infer, Inferred, Operator, Simpler, Vjp};
use crate::shard::{Propagate, ShardingRule};
use crate::tensor::{ravel, unravel};
use crate::{Graph, NodeId, Op, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// Axis `i` of the result is axis `axes[i]` of the argument.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Permute {
    /// Source axis of each result axis.
    pub axes: Vec<usize>,
}

impl Permute {
    pub(super) fn inverse(&self) -> Permute {
        let mut axes = vec![0; self.axes.len()];
        self.axes.iter().enumerate().for_each(|(i, &a)| axes[a] = i);
        Permute { axes }
    }
}

impl Operator for Permute {
    const NAME: &'static str = "permute";
    const FLOPS: usize = 0;

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        let mut sorted = self.axes.clone();
        sorted.sort_unstable();
        if sorted != (0..x.rank()).collect::<Vec<_>>() {
            return Err(format!("{:?} is no order of the axes of {x}", self.axes));
        }
        Ok(vec![Type::new(x.dtype, self.axes.iter().map(|&a| x.shape[a].clone()))])
    }

    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        let from = (0..self.axes.len()).map(Some).collect();
        let to = self.axes.iter().copied().map(Some).collect();
        [cx.labelled(&[from], &[to], &[]), cx.linear(&[&[0]])].concat()
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let x = cx.args[0];
        let inverse = self.inverse().axes;
        Ok(vec![x.gather_with(cx.shape(), |i| {
            let at = unravel(i, cx.shape());
            ravel(&inverse.iter().map(|&a| at[a]).collect::<Vec<_>>(), &x.shape)
        })])
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        cx.through(self.inverse())
    }

    fn simplify(&self, graph: &Graph, args: &[NodeId]) -> Option<Simpler> {
        let &[x] = args else { return None };
        if self.axes.iter().enumerate().all(|(i, &a)| i == a) && graph.ty(x).rank() == self.axes.len() {
            return Some(Simpler::Node(x));
        }
        match &graph.node(x).op {
            Op::Permute(p)
                if p.axes.len() == self.axes.len() && self.axes.iter().all(|&a| a < p.axes.len()) =>
            {
                let axes = self.axes.iter().map(|&a| p.axes[a]).collect();
                Some(Simpler::Op(Box::new(Permute { axes }.into()), graph.node(x).args.clone()))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::apply;

    #[test]
    fn a_transpose() {
        let x = Tensor::f32(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let y = apply(Permute { axes: vec![1, 0] }, &[x]);
        assert_eq!((y[0].shape.as_slice(), y[0].reals()), (&[3, 2][..], vec![1.0, 4.0, 2.0, 5.0, 3.0, 6.0]));
    }
}
