//! `layer_norm`: (x - mean) / sqrt(variance + eps) · w + b over the last axis (Ba, Kiros and Hinton 2016).

use crate::front::{Tape, Value};
use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp, float, same};
use crate::ops::ReduceKind;
use crate::shard::{Label, Propagate, ShardingRule};
use crate::{Graph, IrError, NodeId, Real, Tensor, Type, eval::Eval};
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
    fn normal(&self, x: &Value) -> (Value, Value) {
        let d = x - x.reduce_last(ReduceKind::Mean);
        let r = ((&d * &d).reduce_last(ReduceKind::Mean) + self.eps.0).rsqrt();
        (d * &r, r)
    }
}

impl Operator for LayerNorm {
    const NAME: &'static str = "layer_norm";
    const FLOPS: usize = 7;

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
        let grads = Tape::extend(cx.graph, [cx.args[0], cx.args[1], cx.grad()], |[x, w, grad]| {
            let (n, r) = self.normal(&x);
            // dx = r·(gw - mean(gw) - n·mean(gw·n)),  dw = Σ grad·n,  db = Σ grad
            let gw = &grad * w;
            let (along, mean) = ((&gw * &n).reduce_last(ReduceKind::Mean), gw.reduce_last(ReduceKind::Mean));
            let t = &n * along;
            let dx = (gw - mean - t) * r;
            [dx, (&grad * n).sum_rows(), grad.sum_rows()]
        })?;
        Ok(grads.map(Some).to_vec())
    }

    fn decompose(&self, g: &mut Graph, args: &[NodeId]) -> Option<Result<Vec<NodeId>, IrError>> {
        let made = Tape::extend(g, [args[0], args[1], args[2]], |[x, w, b]| [self.normal(&x).0 * w + b]);
        Some(made.map(|y| y.to_vec()))
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
