//! `layer_norm`: (x - mean) / sqrt(variance + eps) · w + b over the last axis (Ba, Kiros and Hinton 2016).

use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp, float, same};
use crate::ops::{ReduceKind, UnaryKind};
use crate::shard::{Label, Propagate, ShardingRule};
use crate::{Dim, Graph, IrError, NodeId, Real, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// Layer normalisation over the last axis; arguments `x` `[…, n]`, `w` `[n]` and `b` `[n]`. The variance is the mean of
/// the squared deviations.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerNorm {
    /// Added to the variance.
    pub eps: Real,
}

impl LayerNorm {
    /// (x - mean) / sqrt(variance + eps), and the factor 1 / sqrt(variance + eps), both shaped as `x`.
    fn normal(&self, g: &mut Graph, x: NodeId) -> Result<(NodeId, NodeId), IrError> {
        let mean = g.reduce_last(ReduceKind::Mean, x)?;
        let d = g.sub(x, mean)?;
        let dd = g.mul(d, d)?;
        let var = g.reduce_last(ReduceKind::Mean, dd)?;
        let eps = g.fill(var, self.eps.0)?;
        let v = g.add(var, eps)?;
        let r = g.unary(UnaryKind::Rsqrt, v)?;
        Ok((g.mul(d, r)?, r))
    }
}

impl Operator for LayerNorm {
    const NAME: &'static str = "layer_norm";

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x, w, b] = cx.exactly()?;
        float("x", x)?;
        let last = Type::new(x.dtype, [x.shape.last().ok_or("needs an axis, got a scalar")?.clone()]);
        same("the last axis of x and w", &last, w)?;
        same("the last axis of x and b", &last, b)?;
        Ok(vec![(*x).clone()])
    }

    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        let last = cx.args[0].rank() - 1;
        let labels: Vec<Label> = (0..=last).map(|d| (d < last).then_some(d)).collect();
        let mut args = vec![vec![None]; cx.args.len()];
        args[0] = labels.clone();
        cx.labelled(&args, &[labels], &[])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let [x, w, b] = cx.args else { return Err("takes 3 arguments".into()) };
        let n = w.len().max(1);
        let mut out = x.reals();
        for row in out.chunks_mut(n) {
            let mean = row.iter().sum::<f64>() / n as f64;
            let var = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n as f64;
            let r = 1.0 / (var + self.eps.0).sqrt();
            row.iter_mut().enumerate().for_each(|(j, x)| *x = (*x - mean) * r * w.at(j) + b.at(j));
        }
        cx.real(out)
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let (x, w, grad) = (cx.args[0], cx.args[1], cx.grad());
        let g = &mut *cx.graph;
        let (n, r) = self.normal(g, x)?;
        // dx = r·(gw - mean(gw) - n·mean(gw·n)),  dw = Σ grad·n,  db = Σ grad
        let gw = g.mul(grad, w)?;
        let gn = g.mul(gw, n)?;
        let (along, mean) = (g.reduce_last(ReduceKind::Mean, gn)?, g.reduce_last(ReduceKind::Mean, gw)?);
        let t = g.mul(n, along)?;
        let d = g.sub(gw, mean)?;
        let d = g.sub(d, t)?;
        let dx = g.mul(d, r)?;
        let dn = g.mul(grad, n)?;
        let axes: Vec<usize> = (0..g.ty(x).rank() - 1).collect();
        let dw = g.reduce(ReduceKind::Sum, dn, &axes)?;
        let db = g.reduce(ReduceKind::Sum, grad, &axes)?;
        Ok(vec![Some(dx), Some(dw), Some(db)])
    }

    fn decompose(&self, g: &mut Graph, args: &[NodeId]) -> Option<Result<Vec<NodeId>, IrError>> {
        let (x, w, b) = (args[0], args[1], args[2]);
        Some((|| {
            let (n, _) = self.normal(g, x)?;
            let y = g.mul(n, w)?;
            Ok(vec![g.add(y, b)?])
        })())
    }

    fn flops(&self, _: &[&Type], outs: &[Type]) -> Dim {
        &outs[0].elements() * &Dim::from(7)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{apply, close};

    #[test]
    fn a_row_by_hand() {
        let x = Tensor::f32(&[1, 4], &[1.0, 3.0, 5.0, 7.0]);
        let w = Tensor::f32(&[4], &[1.0, 2.0, 1.0, 1.0]);
        let b = Tensor::f32(&[4], &[0.0, 0.0, 1.0, 0.0]);
        // mean 4, variance 5; with eps 4 the root is 3
        let y = apply(LayerNorm { eps: Real(4.0) }, &[x, w, b]);
        close(&y[0], &[-1.0, -2.0 / 3.0, 1.0 + 1.0 / 3.0, 1.0]);
    }
}
