//! `softmax`: exponentials of the last axis, normalised. A composite, because the maximum is subtracted for stability.

use crate::front::Tape;
use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp, float};
use crate::ops::ReduceKind;
use crate::shard::{Propagate, ShardingRule};
use crate::{Graph, IrError, NodeId, Tensor, eval::Eval};
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
    const FLOPS: usize = 5;
    const REDUCES: bool = true;

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
        let grads = Tape::extend(cx.graph, [cx.outs[0], cx.grad()], |[y, grad]| {
            [match self.log {
                true => &grad - y.exp() * grad.reduce_last(ReduceKind::Sum),
                false => (&grad - (&grad * &y).reduce_last(ReduceKind::Sum)) * y,
            }]
        })?;
        Ok(grads.map(Some).to_vec())
    }

    fn decompose(&self, g: &mut Graph, args: &[NodeId]) -> Option<Result<Vec<NodeId>, IrError>> {
        let made = Tape::extend(g, [args[0]], |[x]| {
            let x = &x - x.reduce_last(ReduceKind::Max);
            let e = x.exp();
            let sum = e.reduce_last(ReduceKind::Sum);
            [if self.log { x - sum.log() } else { e / sum }]
        });
        Some(made.map(|y| y.to_vec()))
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
