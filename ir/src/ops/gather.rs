//! `gather`: slices picked by integer indices along one axis.

use super::route::inverse;
use crate::front::Tape;
use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp, axis_in, integer};
use crate::ops::{Iota, LocalSlice, Scatter, ScatterKind};
use crate::shard::{Axis, Label, Partition, Placement, Propagate, Shard, ShardingRule};
use crate::tensor::{ravel, unravel};
use crate::{Dim, Graph, IrError, NodeId, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// `x[indices]` along `axis`. The first `batch` axes of both go together; the result has the axes of `x` with `axis`
/// replaced by the remaining axes of `indices`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gather {
    /// The axis of `x` that is indexed.
    pub axis: usize,
    /// Leading axes that `x` and `indices` share; at most `axis`.
    pub batch: usize,
}

impl Gather {
    /// Types of `x` and `indices` to the shape of the result.
    pub fn shape(&self, x: &Type, indices: &Type) -> Result<Vec<Dim>, String> {
        axis_in(self.axis, x)?;
        integer("indices", indices)?;
        let batch = self.batch;
        if batch > self.axis || batch > indices.rank() || x.shape[..batch] != indices.shape[..batch] {
            return Err(format!(
                "{x} and {indices} do not share {batch} leading axes before axis {}",
                self.axis
            ));
        }
        let (before, after) = (&x.shape[..self.axis], &x.shape[self.axis + 1..]);
        Ok(before.iter().chain(&indices.shape[batch..]).chain(after).cloned().collect())
    }

    /// The index into `x` (0 along the gathered axis) and the index into `indices` of an element of the result.
    pub(super) fn split(&self, at: &[usize], index_rank: usize) -> (Vec<usize>, Vec<usize>) {
        let picks = index_rank - self.batch;
        let index = at[..self.batch].iter().chain(&at[self.axis..self.axis + picks]).copied().collect();
        let mut x: Vec<usize> = at[..self.axis].to_vec();
        x.push(0);
        x.extend(&at[self.axis + picks..]);
        (x, index)
    }
}

/// Global indices into a dimension sharded over `axis`, `each` elements a rank, as local ones: the position on this rank, 0
/// for indices that belong to another rank, and a mask of those that belong to this one.
pub(super) fn local_index(
    g: &mut Graph,
    indices: NodeId,
    each: usize,
    axis: &Axis,
) -> Result<(NodeId, NodeId), IrError> {
    let dtype = g.ty(indices).dtype;
    let ty = Type::new(dtype, [Dim::from(axis.size)]);
    let ranks = g.push(Iota { ty, axis: 0 }, &[])?;
    let rank = g.push(LocalSlice { shard: Shard::of(0), over: axis.clone() }, &[ranks])?;
    let made = Tape::extend(g, [rank, indices], |[rank, indices]| {
        let from_start = &indices - (rank * each as f64).reshape([]);
        let (zero, last) = (indices.full_like(0.0), indices.full_like(each as f64 - 1.0));
        let here = from_start.maximum(&zero).minimum(&last).equal(&from_start);
        [here.where_(&from_start, &zero), here]
    });
    made.map(|[position, here]| (position, here))
}

impl Operator for Gather {
    const NAME: &'static str = "gather";
    const FLOPS: usize = 0;

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x, indices] = cx.exactly()?;
        Ok(vec![Type { dtype: x.dtype, shape: self.shape(x, indices)? }])
    }

    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        let (x, indices) = (cx.args[0], cx.args[1]);
        let of_x: Vec<Label> = (0..x.rank()).map(|d| (d != self.axis).then_some(d)).collect();
        let of_index: Vec<Label> =
            (0..indices.rank()).map(|d| Some(if d < self.batch { d } else { x.rank() + d })).collect();
        let out = [&of_x[..self.axis], &of_index[self.batch..], &of_x[self.axis + 1..]].concat();
        let mut rules = [cx.labelled(&[of_x, of_index], &[out], &[]), cx.linear(&[&[0]])].concat();
        // A rank gives zeros for the rows that it does not hold, so the sum over ranks has them all.
        if let Some(shard) = cx.shard(0)
            && *shard == Shard::of(self.axis)
            && self.batch == 0
            && x.dtype.is_float()
        {
            let args = vec![Placement::Shard(shard.clone()), Placement::Replicate];
            rules.push(ShardingRule { args, outs: vec![Placement::Partial] });
        }
        rules
    }

    fn partition(&self, g: &mut Graph, args: &[NodeId], cx: &Partition) -> Result<NodeId, IrError> {
        if cx.shard(0).is_none_or(|shard| shard.dim != self.axis) {
            return g.push(self.clone(), args);
        }
        let each = g.ty(args[0]).shape[self.axis].size().unwrap_or(0);
        let (row, here) = local_index(g, args[1], each, cx.axis)?;
        let rows = g.push(self.clone(), &[args[0], row])?;
        let shape = g.ty(rows).shape.clone();
        let mut column = vec![Dim::from(1); shape.len()];
        let index = g.ty(here).shape.clone();
        column[self.axis..self.axis + index.len()].clone_from_slice(&index);
        let here = g.reshape(here, column)?;
        let here = g.broadcast(here, &shape)?;
        let zero = g.fill(rows, 0.0)?;
        g.select(here, rows, zero)
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let [x, indices] = cx.args else { return Err("takes 2 arguments".into()) };
        let n = x.shape[self.axis];
        if let Some(bad) = (0..indices.len()).map(|i| indices.int_at(i)).find(|&v| v < 0 || v as usize >= n) {
            return Err(format!("index {bad} is outside axis {} of size {n}", self.axis));
        }
        Ok(vec![x.gather_with(cx.shape(), |i| {
            let (mut at, index) = self.split(&unravel(i, cx.shape()), indices.shape.len());
            at[self.axis] = indices.int_at(ravel(&index, &indices.shape)) as usize;
            ravel(&at, &x.shape)
        })])
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let (x, indices, g) = (cx.args[0], cx.args[1], cx.grad());
        if !cx.graph.ty(x).dtype.is_float() {
            return Ok(vec![None, None]);
        }
        // Where every row of `x` is gathered exactly once (a permutation), the gradient is the inverse gather.
        let back = if (self.axis, self.batch) == (0, 0) { inverse(cx.graph, x, indices)? } else { None };
        if let Some(back) = back {
            return Ok(vec![Some(cx.graph.gather(g, back, 0)?), None]);
        }
        let zero = cx.graph.fill(x, 0.0)?;
        let op = Scatter { axis: self.axis, batch: self.batch, kind: ScatterKind::Add };
        Ok(vec![Some(cx.graph.push(op, &[zero, indices, g])?), None])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::check::{apply, try_apply};

    #[test]
    fn rows_and_batched_columns() {
        let x = Tensor::f32(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let i = |v: Vec<i64>| Tensor::int(DType::I32, &[2], v);
        let rows = apply(Gather { axis: 0, batch: 0 }, &[x.clone(), i(vec![1, 0])]);
        assert_eq!(rows[0].reals(), [4.0, 5.0, 6.0, 1.0, 2.0, 3.0]);
        let picks = apply(Gather { axis: 1, batch: 1 }, &[x.clone(), i(vec![2, 0])]);
        assert_eq!(picks[0].reals(), [3.0, 4.0]);
        for bad in [-1, 2] {
            assert!(try_apply(Gather { axis: 0, batch: 0 }, &[x.clone(), i(vec![0, bad])]).is_err());
        }
    }
}
