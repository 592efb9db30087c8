//! `grouped_dot`: grouped matrix product: rows in groups, each group times a matrix of its own. One operator computes all experts
//! of a layer; the numbers of rows are data.

use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp, float};
use crate::ops::{CompareKind, Dot, Gather, GroupedOuter, Iota, ReduceKind};
use crate::shard::{Placement, Propagate, Shard, ShardingRule};
use crate::{DType, Dim, Graph, IrError, NodeId, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// Arguments: `x` `[rows, k]`, `w` `[groups * n, k]` (the matrices one after another), `offsets` i32 `[groups + 1]`, ascending
/// from 0 to the rows. Row `r` of group `e`, `offsets[e] <= r < offsets[e + 1]`, becomes `x[r] · w[e]ᵀ`: `[rows, n]`.
/// Transposed, `x` is `[rows, n]` and the result `x[r] · w[e]`, `[rows, k]`. Sums are f32.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupedDot {
    /// The rows of a group's matrix are contracted instead of its columns.
    pub transposed: bool,
}

/// The number of groups that these offsets divide rows into.
pub(super) fn groups(offsets: &Type) -> Result<usize, String> {
    match (offsets.dtype, offsets.shape.as_slice()) {
        (DType::I32, [n]) if n.size().is_some_and(|n| n > 1) => Ok(n.size().unwrap_or(2) - 1),
        _ => Err(format!("wants offsets i32[groups + 1], got {offsets}")),
    }
}

/// The group of each row.
pub(super) fn groups_of(offsets: &Tensor, rows: usize) -> Result<Vec<usize>, String> {
    let at: Vec<i64> = (0..offsets.len()).map(|i| offsets.int_at(i)).collect();
    if at.first() != Some(&0) || at.last() != Some(&(rows as i64)) || !at.is_sorted() {
        return Err(format!("wants offsets that ascend from 0 to the {rows} rows"));
    }
    Ok(at.windows(2).enumerate().flat_map(|(e, w)| std::iter::repeat_n(e, (w[1] - w[0]) as usize)).collect())
}

/// The group of each row as a node: the number of groups that end before it.
pub(super) fn groups_node(g: &mut Graph, offsets: NodeId, rows: &Dim) -> Result<NodeId, IrError> {
    let one = Dim::from(1);
    let groups = &g.ty(offsets).shape[0] - &one;
    let shape = vec![rows.clone(), groups.clone()];
    let ends = g.slice(offsets, 0, one, groups)?;
    let ends = g.broadcast(ends, &shape)?;
    let row = g.push(Iota { ty: Type { dtype: DType::I32, shape }, axis: 0 }, &[])?;
    let passed = g.compare(CompareKind::Ge, row, ends)?;
    let passed = g.cast(passed, DType::I32)?;
    g.reduce(ReduceKind::Sum, passed, &[1])
}

impl Operator for GroupedDot {
    const NAME: &'static str = "grouped_dot";
    const TOLERANCE: [f64; 2] = [16.0, 1e-5];

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x, w, offsets] = cx.exactly()?;
        float("rows", x)?;
        if x.rank() != 2 || w.rank() != 2 || x.dtype != w.dtype {
            return Err(format!("takes [rows, k] and [groups * n, k] of one type, got {x} and {w}"));
        }
        let groups = groups(offsets)?;
        let n = w.shape[0].div_exact(&Dim::from(groups));
        let n = n.ok_or_else(|| format!("{groups} groups do not divide the rows of {w}"))?;
        let (k, columns) = if self.transposed { (n, w.shape[1].clone()) } else { (w.shape[1].clone(), n) };
        if x.shape[1] != k {
            return Err(format!("rows of {x} meet matrices of {k} in {w} of {groups} groups"));
        }
        Ok(vec![Type::new(x.dtype, [x.shape[0].clone(), columns])])
    }

    /// The contracted dimension; or the rows of every group's matrix, sharded alike in each.
    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        let mut rules = cx.linear(&[&[0], &[1]]);
        let columns = vec![None, Some(1)];
        let groups = cx.args[2].shape[0].size().unwrap_or(1) - 1;
        if self.transposed {
            rules.extend(cx.labelled(&[vec![None; 2], columns.clone(), vec![None]], &[columns], &[]));
            // The rows of every group's matrix are sharded, as are the columns of `x`.
            if let Some(shard) = cx.shard(1).filter(|shard| shard.dim == 0 && shard.sections.len() == groups)
            {
                let args = vec![
                    Placement::Shard(Shard::of(1)),
                    Placement::Shard(shard.clone()),
                    Placement::Replicate,
                ];
                rules.push(ShardingRule { args, outs: vec![Placement::Partial] });
            }
            return rules;
        }
        rules.extend(cx.labelled(&[columns.clone(), columns, vec![None]], &[vec![None, None]], &[1]));
        if let Some(shard) =
            cx.shard(1).filter(|shard| shard.dim == 0 && shard.sections.len().is_multiple_of(groups))
        {
            let one = &shard.sections[..shard.sections.len() / groups];
            if !one.is_empty() && shard.sections.chunks(one.len()).all(|c| c == one) {
                let out = Placement::Shard(Shard::sections(1, one.to_vec()));
                let args = vec![Placement::Replicate, Placement::Shard(shard.clone()), Placement::Replicate];
                rules.push(ShardingRule { args, outs: vec![out] });
            }
        }
        rules
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let [x, w, offsets] = cx.args else { return Err("takes 3 arguments".into()) };
        let (rows, k, n) = (x.shape[0], x.shape[1], cx.shape()[1]);
        let groups = groups_of(offsets, rows)?;
        let (xv, wv) = (x.reals(), w.reals());
        let (step, next) = if self.transposed { (n, 1) } else { (1, k) };
        cx.each(|i| {
            let (r, c) = (i / n, i % n);
            let at = groups[r] * n * k + c * next;
            (0..k).map(|s| xv[r * k + s] * wv[at + s * step]).sum()
        })
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let (x, w, offsets, grad) = (cx.args[0], cx.args[1], cx.args[2], cx.grad());
        let back = GroupedDot { transposed: !self.transposed };
        let dx = cx.graph.push(back, &[grad, w, offsets])?;
        let sides = if self.transposed { [x, grad] } else { [grad, x] };
        let dw = cx.graph.push(GroupedOuter {}, &[sides[0], sides[1], offsets])?;
        Ok(vec![Some(dx), Some(dw), None])
    }

    fn decompose(&self, g: &mut Graph, args: &[NodeId]) -> Option<Result<Vec<NodeId>, IrError>> {
        Some((|| {
            let rows = g.ty(args[0]).shape[0].clone();
            let group = groups_node(g, args[2], &rows)?;
            let groups = &g.ty(args[2]).shape[0] - &Dim::from(1);
            let [n, k] = [0, 1].map(|axis| g.ty(args[1]).shape[axis].clone());
            let n = n.div_exact(&groups).unwrap_or(n);
            let each = g.reshape(args[1], vec![groups, n, k])?;
            let own = g.push(Gather { axis: 0, batch: 0 }, &[each, group])?; // [rows, n, k]
            let along = if self.transposed { 1 } else { 2 };
            let dot = Dot { batch: vec![(0, 0)], contract: vec![(1, along)] };
            Ok(vec![g.push(dot, &[args[0], own])?])
        })())
    }

    fn flops(&self, args: &[&Type], outs: &[Type]) -> Dim {
        &(&outs[0].elements() * &args[0].shape[1]) * &Dim::from(2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{apply, try_apply};

    #[test]
    fn each_row_meets_the_matrix_of_its_group() {
        let x = Tensor::f32(&[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let w = Tensor::f32(&[3, 2], &[1.0, 0.0, 7.0, 7.0, 0.0, 10.0]);
        let offsets = |v: &[i64]| Tensor::int(DType::I32, &[4], v.to_vec());
        let op = GroupedDot { transposed: false };
        let y = apply(op.clone(), &[x.clone(), w.clone(), offsets(&[0, 1, 1, 3])]);
        assert_eq!(y[0].reals(), [1.0, 40.0, 60.0]);
        let back = GroupedDot { transposed: true };
        let y = apply(back, &[Tensor::f32(&[2, 1], &[2.0, 3.0]), w.clone(), offsets(&[0, 0, 1, 2])]);
        assert_eq!(y[0].reals(), [14.0, 14.0, 0.0, 30.0]);
        for bad in [[0, 2, 1, 3], [0, 1, 2, 4], [1, 1, 2, 3], [0, 1, 2, 2], [-1, 0, 0, 3]] {
            assert!(try_apply(op.clone(), &[x.clone(), w.clone(), offsets(&bad)]).is_err(), "{bad:?}");
        }
    }
}
