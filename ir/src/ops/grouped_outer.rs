//! `grouped_outer`: for each group of rows the sum of their outer products: the gradient of `grouped_dot` by its matrices.

use super::grouped_dot::{groups, groups_node, groups_of};
use crate::front::Tape;
use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp, float};
use crate::ops::{Dot, GroupedDot};
use crate::{Dim, Graph, IrError, NodeId, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// Arguments: `a` `[rows, n]`, `b` `[rows, k]`, `offsets` i32 `[groups + 1]` as in [`GroupedDot`]. The result is
/// `[groups * n, k]`, for each group `Σ a[r] ⊗ b[r]` over its rows; zero for a group without rows.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupedOuter {}

impl Operator for GroupedOuter {
    const NAME: &'static str = "grouped_outer";
    const TOLERANCE: [f64; 2] = [16.0, 1e-5];

    fn infer(&self, cx: &Infer) -> Inferred {
        let [a, b, offsets] = cx.exactly()?;
        float("rows", a)?;
        if a.rank() != 2 || b.rank() != 2 || a.dtype != b.dtype || a.shape[0] != b.shape[0] {
            return Err(format!("takes [rows, n] and [rows, k] of one type, got {a} and {b}"));
        }
        let n = &Dim::from(groups(offsets)?) * &a.shape[1];
        Ok(vec![Type::new(a.dtype, [n, b.shape[1].clone()])])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let [a, b, offsets] = cx.args else { return Err("takes 3 arguments".into()) };
        let (rows, n, k) = (a.shape[0], a.shape[1], b.shape[1]);
        let mut sums = vec![0.0; cx.shape().iter().product()];
        for (r, e) in groups_of(offsets, rows)?.into_iter().enumerate() {
            for i in 0..n {
                let x = a.at(r * n + i);
                for j in 0..k {
                    sums[(e * n + i) * k + j] += x * b.at(r * k + j);
                }
            }
        }
        cx.real(sums)
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let (a, b, offsets, grad) = (cx.args[0], cx.args[1], cx.args[2], cx.grad());
        let da = cx.graph.push(GroupedDot { transposed: false }, &[b, grad, offsets])?;
        let db = cx.graph.push(GroupedDot { transposed: true }, &[a, grad, offsets])?;
        Ok(vec![Some(da), Some(db), None])
    }

    fn decompose(&self, g: &mut Graph, args: &[NodeId]) -> Option<Result<Vec<NodeId>, IrError>> {
        Some((|| {
            let ty = g.ty(args[0]).clone();
            let (rows, n) = (ty.shape[0].clone(), ty.shape[1].clone());
            let groups = &g.ty(args[2]).shape[0] - &Dim::from(1);
            let group = groups_node(g, args[2], &rows)?;
            let one = Dim::from(1);
            let whole = [rows.clone(), groups.clone(), n.clone()];
            let [a] = Tape::extend(g, [args[0], group], |[a, group]| {
                let group = group.reshape(vec![rows.clone(), one.clone()]).expand(&whole[..2]);
                let own = group.equal(&group.iota(1)).cast(ty.dtype);
                let own = own.reshape(vec![rows.clone(), groups, one.clone()]).expand(&whole[..]);
                [own * a.reshape(vec![rows, one, n]).expand(&whole[..])] // [rows, groups, n]
            })?;
            let sums = g.push(Dot { batch: vec![], contract: vec![(0, 0)] }, &[a, args[1]])?;
            let shape = vec![&whole[1] * &whole[2], g.ty(args[1]).shape[1].clone()];
            Ok(vec![g.reshape(sums, shape)?])
        })())
    }

    fn flops(&self, args: &[&Type], _: &[Type]) -> Dim {
        &(&args[0].elements() * &args[1].shape[1]) * &Dim::from(2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::check::apply;

    #[test]
    fn a_group_without_rows_is_zero() {
        let a = Tensor::f32(&[3, 1], &[1.0, 2.0, 3.0]);
        let b = Tensor::f32(&[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let offsets = Tensor::int(DType::I32, &[4], vec![0, 2, 2, 3]);
        let y = apply(GroupedOuter {}, &[a, b, offsets]);
        assert_eq!(y[0].reals(), [7.0, 10.0, 0.0, 0.0, 15.0, 18.0]);
    }
}
