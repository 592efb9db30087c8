//! `softmax`: exponentials of the last axis, normalised. A composite, because the maximum is subtracted for stability.

use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp, float};
use crate::ops::{ReduceKind, UnaryKind};
use crate::shard::{Propagate, ShardingRule};
use crate::{Dim, Graph, IrError, NodeId, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// Softmax (or its logarithm) over the last axis.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Softmax {
    /// The logarithm of it.
    pub log: bool,
}

impl Operator for Softmax {
    const NAME: &'static str = "softmax";

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        float("its argument", x)?;
        if x.rank() == 0 {
            return Err("needs an axis, got a scalar".into());
        }
        Ok(vec![(*x).clone()])
    }

    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        cx.except(&[cx.args[0].rank() - 1])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let n = *cx.shape().last().unwrap_or(&1);
        let mut out = cx.args[0].reals();
        for row in out.chunks_mut(n.max(1)) {
            let top = row.iter().fold(f64::NEG_INFINITY, |a, &b| ReduceKind::Max.step(a, b));
            let sum: f64 = row.iter().map(|x| (x - top).exp()).sum();
            row.iter_mut()
                .for_each(|x| *x = if self.log { *x - top - sum.ln() } else { (*x - top).exp() / sum });
        }
        cx.real(out)
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let (y, grad) = (cx.outs[0], cx.grad());
        let g = &mut *cx.graph;
        Ok(vec![Some(if self.log {
            let p = g.unary(UnaryKind::Exp, y)?;
            let s = g.reduce_last(ReduceKind::Sum, grad)?;
            let t = g.mul(p, s)?;
            g.sub(grad, t)?
        } else {
            let gy = g.mul(grad, y)?;
            let s = g.reduce_last(ReduceKind::Sum, gy)?;
            let d = g.sub(grad, s)?;
            g.mul(d, y)?
        })])
    }

    fn decompose(&self, g: &mut Graph, args: &[NodeId]) -> Option<Result<Vec<NodeId>, IrError>> {
        Some((|| {
            let top = g.reduce_last(ReduceKind::Max, args[0])?;
            let x = g.sub(args[0], top)?;
            let e = g.unary(UnaryKind::Exp, x)?;
            let sum = g.reduce_last(ReduceKind::Sum, e)?;
            Ok(vec![if self.log {
                let l = g.unary(UnaryKind::Log, sum)?;
                g.sub(x, l)?
            } else {
                g.div(e, sum)?
            }])
        })())
    }

    fn flops(&self, _: &[&Type], outs: &[Type]) -> Dim {
        &outs[0].elements() * &Dim::from(5)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{apply, close};

    #[test]
    fn two_rows_by_hand() {
        let x = Tensor::f32(&[2, 2], &[3f32.ln(), 0.0, 1000.0, 1000.0]);
        close(&apply(Softmax { log: false }, std::slice::from_ref(&x))[0], &[0.75, 0.25, 0.5, 0.5]);
        let (a, b) = (0.75f64.ln(), 0.25f64.ln());
        close(&apply(Softmax { log: true }, &[x])[0], &[a, b, -2f64.ln(), -2f64.ln()]);
    }
}
