//! `slice`: a range of one axis.

use crate::op::{Cotangents, Infer, Inferred, Operator, Simpler, Vjp, axis_in};
use crate::ops::Pad;
use crate::shard::{Partition, Placement, Propagate, Shard, ShardingRule};
use crate::tensor::{ravel, unravel};
use crate::{Dim, Graph, IrError, NodeId, Op, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// Elements `start .. start + len` of one axis.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slice {
    /// The axis.
    pub axis: usize,
    /// First element.
    pub start: Dim,
    /// Number of elements.
    pub len: Dim,
}

impl Operator for Slice {
    const NAME: &'static str = "slice";
    const FLOPS: usize = 0;

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        axis_in(self.axis, x)?;
        let rest = &(&x.shape[self.axis] - &self.start) - &self.len;
        if [&rest, &self.start, &self.len].into_iter().any(|d| d.literal().is_some_and(|v| v < 0)) {
            return Err(format!(
                "{} .. {} + {} is outside axis {} of {x}",
                self.start, self.start, self.len, self.axis
            ));
        }
        let mut shape = x.shape.clone();
        shape[self.axis] = self.len.clone();
        Ok(vec![Type { dtype: x.dtype, shape }])
    }

    /// Any other dimension; along the sliced one, where the range is some of the sections in which it is sharded.
    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        let mut rules = [cx.except(&[self.axis]), cx.linear(&[&[0]])].concat();
        if let Some(shard) = cx.shard(0)
            && shard.dim == self.axis
            && let (Some(start), Some(len)) = (self.start.size(), self.len.size())
        {
            let end = |i: usize| shard.sections[..i].iter().sum::<usize>();
            let at = |x: usize| (0..=shard.sections.len()).find(|&i| end(i) == x);
            if let (Some(a), Some(b)) = (at(start), at(start + len)) {
                let kept = Shard::sections(self.axis, shard.sections[a..b].to_vec());
                let args = vec![Placement::Shard(shard.clone())];
                rules.push(ShardingRule { args, outs: vec![Placement::Shard(kept)] });
            }
        }
        rules
    }

    fn partition(&self, graph: &mut Graph, args: &[NodeId], cx: &Partition) -> Result<NodeId, IrError> {
        let mut op = self.clone();
        if cx.shard(0).is_some_and(|shard| shard.dim == self.axis) {
            let n = cx.axis.size;
            [op.start, op.len] = [&self.start, &self.len].map(|d| Dim::from(d.size().unwrap_or(0) / n));
        }
        graph.push(op, args)
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let (x, start) = (cx.args[0], cx.dim(&self.start)?);
        if start + cx.shape()[self.axis] > x.shape[self.axis] {
            return Err(format!("reads past axis {} of size {}", self.axis, x.shape[self.axis]));
        }
        Ok(vec![x.gather_with(cx.shape(), |i| {
            let mut at = unravel(i, cx.shape());
            at[self.axis] += start;
            ravel(&at, &x.shape)
        })])
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let full = cx.graph.ty(cx.args[0]).shape[self.axis].clone();
        let after = &(&full - &self.start) - &self.len;
        cx.through(Pad { axis: self.axis, before: self.start.clone(), after, value: crate::Real(0.0) })
    }

    fn simplify(&self, graph: &Graph, args: &[NodeId]) -> Option<Simpler> {
        let &[x] = args else { return None };
        let node = graph.node(x);
        if self.start == Dim::from(0) && node.ty().shape.get(self.axis) == Some(&self.len) {
            return Some(Simpler::Node(x));
        }
        match &node.op {
            Op::Slice(s) if s.axis == self.axis => {
                let start = &s.start + &self.start;
                let op = Slice { axis: self.axis, start, len: self.len.clone() };
                let inside = self.start.literal().is_none_or(|v| v >= 0)
                    && self.len.literal().is_none_or(|v| v >= 0)
                    && (&(&s.len - &self.start) - &self.len).literal().is_some_and(|v| v >= 0);
                inside.then(|| Simpler::Op(Box::new(op.into()), node.args.clone()))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{apply, try_apply};

    #[test]
    fn a_range_of_columns() {
        let x = Tensor::f32(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let op = |start: usize, len: usize| Slice { axis: 1, start: Dim::from(start), len: Dim::from(len) };
        assert_eq!(apply(op(1, 2), std::slice::from_ref(&x))[0].reals(), [2.0, 3.0, 5.0, 6.0]);
        assert!(try_apply(op(2, 2), &[x]).is_err());
    }
}
