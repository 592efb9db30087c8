//! `reshape`: the same elements in the same order under other sizes.

use crate::op::{Cotangents, Infer, Inferred, Operator, Simpler, Vjp};
use crate::shard::{Label, Partition, Placement, Propagate, Shard, ShardingRule};
use crate::ty::show;
use crate::{Dim, Graph, IrError, NodeId, Op, Shape, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// The same elements, row-major, under other sizes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reshape {
    /// New sizes.
    pub shape: Shape,
}

/// Labels of the dimensions of two shapes of equally many elements: where consecutive dimensions of one shape correspond to
/// consecutive dimensions of the other, the outermost of both have the same label. All other dimensions, and those of size one,
/// have none.
fn outermost(a: &[Dim], b: &[Dim]) -> [Vec<Label>; 2] {
    let mut labels = [vec![None; a.len()], vec![None; b.len()]];
    let (mut i, mut j) = (0, 0);
    loop {
        i += a[i..].iter().take_while(|d| d.is_one()).count();
        j += b[j..].iter().take_while(|d| d.is_one()).count();
        let (Some(x), Some(y)) = (a.get(i), b.get(j)) else { return labels };
        (labels[0][i], labels[1][j]) = (Some(i), Some(i));
        let (mut x, mut y) = (x.clone(), y.clone());
        (i, j) = (i + 1, j + 1);
        while x != y {
            // The smaller product takes in the next dimension of its shape.
            let next = if y.div_exact(&x).is_some() { a.get(i) } else { None };
            match (next, b.get(j)) {
                (Some(d), _) => (x, i) = (&x * d, i + 1),
                (None, Some(d)) => (y, j) = (&y * d, j + 1),
                (None, None) => return labels,
            }
        }
    }
}

/// The sections of the result where the reshape does nothing but merge the sharded dimension into the one before it.
fn merged_sections(from: &[Dim], to: &[Dim], shard: &Shard) -> Option<Vec<usize>> {
    let at = shard.dim.checked_sub(1).filter(|_| shard.sections.is_empty() && from.len() == to.len() + 1)?;
    let beside = from[..at] == to[..at] && from[at + 2..] == to[at + 1..];
    let (count, each) = (from[at].size()?, from[at + 1].size()?);
    (beside && count > 1).then(|| vec![each; count])
}

impl Operator for Reshape {
    const NAME: &'static str = "reshape";
    const FLOPS: usize = 0;

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        if Dim::product(&self.shape) != x.elements() {
            return Err(format!("cannot make {} of {x}: the numbers of elements differ", show(&self.shape)));
        }
        Ok(vec![Type { dtype: x.dtype, shape: self.shape.clone() }])
    }

    /// Of dimensions that are merged or split, the outermost can be sharded.
    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        let [from, to] = outermost(&cx.args[0].shape, &self.shape);
        let mut rules = [cx.labelled(&[from], &[to], &[]), cx.linear(&[&[0]])].concat();
        if let Some(shard) = cx.shard(0)
            && let Some(sections) = merged_sections(&cx.args[0].shape, &self.shape, shard)
        {
            let out = Shard::sections(shard.dim - 1, sections);
            rules.push(ShardingRule {
                args: vec![Placement::Shard(shard.clone())],
                outs: vec![Placement::Shard(out)],
            });
        }
        rules
    }

    fn partition(&self, graph: &mut Graph, args: &[NodeId], cx: &Partition) -> Result<NodeId, IrError> {
        graph.push(Reshape { shape: cx.local_type(0).shape }, args)
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        Ok(vec![cx.args[0].gather_with(cx.shape(), |i| i)])
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let shape = cx.graph.ty(cx.args[0]).shape.clone();
        cx.through(Reshape { shape })
    }

    fn simplify(&self, graph: &Graph, args: &[NodeId]) -> Option<Simpler> {
        let &[x] = args else { return None };
        let node = graph.node(x);
        if node.types.len() == 1 && node.ty().shape == self.shape {
            return Some(Simpler::Node(x));
        }
        match &node.op {
            Op::Reshape(_) => Some(Simpler::Op(Box::new(self.clone().into()), node.args.clone())),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{apply, try_apply};

    #[test]
    fn order_stays() {
        let x = Tensor::f32(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let y = apply(Reshape { shape: vec![Dim::from(6)] }, std::slice::from_ref(&x));
        assert_eq!((y[0].shape.as_slice(), y[0].reals()), (&[6][..], x.reals()));
        assert!(try_apply(Reshape { shape: vec![Dim::from(4)] }, &[x]).is_err());
    }
}
