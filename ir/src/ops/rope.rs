//! `rope`: rotary position embedding (Su et al. 2021) by tables of cosines and sines per token.

use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp, float, same};
use crate::ops::UnaryKind;
use crate::shard::{Label, Propagate, ShardingRule};
use crate::tensor::unravel;
use crate::{Dim, Graph, IrError, NodeId, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// Which elements of a head form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeLayout {
    /// Element `j` with element `j + dim/2`.
    Half,
    /// Element `2j` with element `2j + 1`.
    Interleaved,
}

/// Rotates the first `dim` elements of each head: `x` `[tokens, heads, d]`, `cos` and `sin` `[tokens, dim/2]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rope {
    /// The pairs.
    pub layout: RopeLayout,
    /// Elements that rotate; even, at most `d`.
    pub dim: usize,
}

impl Rope {
    /// (partner, pair) of element `j < dim`: the element it rotates with and the row of the tables.
    pub fn pair(&self, j: usize) -> (usize, usize) {
        let half = self.dim / 2;
        match self.layout {
            RopeLayout::Half if j < half => (j + half, j),
            RopeLayout::Half => (j - half, j - half),
            RopeLayout::Interleaved => (j ^ 1, j / 2),
        }
    }

    /// True for the first element of a pair, whose partner is subtracted.
    pub fn is_first(&self, j: usize) -> bool {
        self.pair(j).0 > j
    }

    /// Pairs as two tensors `[tokens, heads, dim/2]`.
    fn halves(&self, g: &mut Graph, x: NodeId) -> Result<(NodeId, NodeId), IrError> {
        let shape = g.ty(x).shape.clone();
        let (t, h, half) = (shape[0].clone(), shape[1].clone(), Dim::from(self.dim / 2));
        let x = g.slice(x, 2, Dim::from(0), Dim::from(self.dim))?;
        match self.layout {
            RopeLayout::Half => {
                Ok((g.slice(x, 2, Dim::from(0), half.clone())?, g.slice(x, 2, half.clone(), half)?))
            }
            RopeLayout::Interleaved => {
                let pairs = g.reshape(x, vec![t.clone(), h.clone(), half.clone(), Dim::from(2)])?;
                let mut side = |i: usize| {
                    let s = g.slice(pairs, 3, Dim::from(i), Dim::from(1))?;
                    g.reshape(s, vec![t.clone(), h.clone(), half.clone()])
                };
                Ok((side(0)?, side(1)?))
            }
        }
    }

    /// The inverse of `halves`, followed by the elements that do not rotate.
    fn join(&self, g: &mut Graph, a: NodeId, b: NodeId, x: NodeId) -> Result<NodeId, IrError> {
        let shape = g.ty(x).shape.clone();
        let mut rotated = match self.layout {
            RopeLayout::Half => g.push(super::Concat { axis: 2 }, &[a, b])?,
            RopeLayout::Interleaved => {
                let mut wide = g.ty(a).shape.clone();
                wide.push(Dim::from(1));
                let (a, b) = (g.reshape(a, wide.clone())?, g.reshape(b, wide)?);
                let pairs = g.push(super::Concat { axis: 3 }, &[a, b])?;
                g.reshape(pairs, vec![shape[0].clone(), shape[1].clone(), Dim::from(self.dim)])?
            }
        };
        if shape[2] != Dim::from(self.dim) {
            let rest = g.slice(x, 2, Dim::from(self.dim), &shape[2] - &Dim::from(self.dim))?;
            rotated = g.push(super::Concat { axis: 2 }, &[rotated, rest])?;
        }
        Ok(rotated)
    }

    /// Tables broadcast over the heads: `[tokens, heads, dim/2]`.
    fn tables(&self, g: &mut Graph, like: NodeId, tables: [NodeId; 2]) -> Result<[NodeId; 2], IrError> {
        let shape = g.ty(like).shape.clone();
        let mut wide = |t: NodeId| {
            let one = vec![shape[0].clone(), Dim::from(1), shape[2].clone()];
            let t = g.reshape(t, one)?;
            g.broadcast(t, &shape)
        };
        Ok([wide(tables[0])?, wide(tables[1])?])
    }
}

impl Operator for Rope {
    const NAME: &'static str = "rope";
    const FLOPS: usize = 3;

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x, cos, sin] = cx.exactly()?;
        float("x", x)?;
        let d = match x.shape.as_slice() {
            [_, _, d] => d.size().unwrap_or(0),
            _ => return Err(format!("wants x as [tokens, heads, d], got {x}")),
        };
        if self.dim == 0 || !self.dim.is_multiple_of(2) || self.dim > d {
            return Err(format!("cannot rotate {} of {d} elements", self.dim));
        }
        let table = Type::new(x.dtype, [x.shape[0].clone(), Dim::from(self.dim / 2)]);
        same("cos and its place", cos, &table)?;
        same("sin and its place", sin, &table)?;
        Ok(vec![(*x).clone()])
    }

    /// Tokens or heads; the tables have tokens only.
    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        let last = cx.args[0].rank() - 1;
        let labels: Vec<Label> = (0..=last).map(|d| (d < last).then_some(d)).collect();
        cx.labelled(&[labels.clone(), vec![Some(0), None], vec![Some(0), None]], &[labels], &[])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let [x, cos, sin] = cx.args else { return Err("takes 3 arguments".into()) };
        cx.each(|i| {
            let at = unravel(i, cx.shape());
            let j = at[2];
            if j >= self.dim {
                return x.at(i);
            }
            let (partner, pair) = self.pair(j);
            let row = at[0] * (self.dim / 2) + pair;
            let other = x.at(i + partner - j) * sin.at(row);
            x.at(i) * cos.at(row) + if self.is_first(j) { -other } else { other }
        })
    }

    /// The rotation by the opposite angle. No gradient flows to the tables.
    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let g = cx.grad();
        let minus = cx.graph.unary(UnaryKind::Neg, cx.args[2])?;
        Ok(vec![Some(cx.graph.push(self.clone(), &[g, cx.args[1], minus])?), None, None])
    }

    fn decompose(&self, g: &mut Graph, args: &[NodeId]) -> Option<Result<Vec<NodeId>, IrError>> {
        let x = args[0];
        Some((|| {
            let (a, b) = self.halves(g, x)?;
            let [cos, sin] = self.tables(g, a, [args[1], args[2]])?;
            let (ac, bs) = (g.mul(a, cos)?, g.mul(b, sin)?);
            let (bc, as_) = (g.mul(b, cos)?, g.mul(a, sin)?);
            let (first, second) = (g.sub(ac, bs)?, g.add(bc, as_)?);
            Ok(vec![self.join(g, first, second, x)?])
        })())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::apply;

    #[test]
    fn a_quarter_turn_in_both_layouts() {
        let x = Tensor::f32(&[1, 1, 5], &[1.0, 2.0, 3.0, 4.0, 5.0]);
        let (cos, sin) = (Tensor::f32(&[1, 2], &[0.0, 1.0]), Tensor::f32(&[1, 2], &[1.0, 0.0]));
        let run = |layout| apply(Rope { layout, dim: 4 }, &[x.clone(), cos.clone(), sin.clone()])[0].reals();
        assert_eq!(run(RopeLayout::Half), [-3.0, 2.0, 1.0, 4.0, 5.0]);
        assert_eq!(run(RopeLayout::Interleaved), [-2.0, 1.0, 3.0, 4.0, 5.0]);
    }
}
