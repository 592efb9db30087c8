//! `rms_norm`: x / sqrt(mean(x²) + eps) · w over the last axis (Zhang and Sennrich 2019).

use crate::front::{Tape, Value};
use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp, float, same};
use crate::ops::{AllReduce, Pvary, ReduceKind, ReduceOp};
use crate::shard::{Label, Partition, Placement, Propagate, Shard, ShardingRule};
use crate::{Dim, Graph, IrError, NodeId, Real, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// Root-mean-square normalisation over the last axis; arguments `x` `[…, n]` and `w` `[n]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RmsNorm {
    /// Added to the mean square.
    pub eps: Real,
}

impl RmsNorm {
    /// 1 / sqrt(mean(x²) + eps), broadcast over the last axis.
    fn scale(&self, x: &Value) -> Value {
        ((x * x).reduce_last(ReduceKind::Mean) + self.eps.0).rsqrt()
    }
}

impl Operator for RmsNorm {
    const NAME: &'static str = "rms_norm";
    const FLOPS: usize = 4;
    const REDUCES: bool = true;

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x, w] = cx.exactly()?;
        float("x", x)?;
        let last = x.shape.last().ok_or("needs an axis, got a scalar")?;
        same("the last axis of x and w", &Type::new(x.dtype, [last.clone()]), w)?;
        Ok(vec![(*x).clone()])
    }

    /// Any dimension but the last; or the last, with an all-reduce of the sums of squares.
    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        let last = cx.args[0].rank() - 1;
        let labels: Vec<Label> = (0..=last).map(|d| (d < last).then_some(d)).collect();
        let mut rules = cx.labelled(&[labels.clone(), vec![None]], &[labels], &[]);
        if let Some(shard) = cx.shard(0).filter(|shard| shard.dim == last) {
            let x = Placement::Shard(shard.clone());
            let w = Placement::Shard(Shard { dim: 0, sections: shard.sections.clone() });
            rules.push(ShardingRule { args: vec![x.clone(), w], outs: vec![x] });
        }
        rules
    }

    fn partition(&self, g: &mut Graph, args: &[NodeId], cx: &Partition) -> Result<NodeId, IrError> {
        let last = cx.args[0].rank() - 1;
        if cx.shard(0).is_none_or(|shard| shard.dim != last) {
            return g.push(self.clone(), args);
        }
        let shape = g.ty(args[0]).shape.clone();
        let n = cx.args[0].shape[last].size().unwrap_or(1);
        let xx = g.mul(args[0], args[0])?;
        let sum = g.reduce(ReduceKind::Sum, xx, &[last])?;
        let over = vec![cx.axis.clone()];
        let sum = g.push(AllReduce { kind: ReduceOp::Sum, over }, &[sum])?;
        let mean = g.scale(sum, 1.0 / n as f64)?;
        let [r] = Tape::extend(g, [mean], |[mean]| [(mean + self.eps.0).rsqrt()])?;
        let r = g.push(Pvary { over: cx.axis.clone() }, &[r])?;
        let mut column = shape.clone();
        column[last] = Dim::from(1);
        let r = g.reshape(r, column)?;
        let y = g.mul(args[0], r)?;
        g.mul(y, args[1])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let [x, w] = cx.args else { return Err("takes 2 arguments".into()) };
        let n = w.len().max(1);
        let mut out = x.reals();
        for row in out.chunks_mut(n) {
            let mean = row.iter().map(|x| x * x).sum::<f64>() / n as f64;
            let r = 1.0 / (mean + self.eps.0).sqrt();
            row.iter_mut().enumerate().for_each(|(j, x)| *x = *x * r * w.at(j));
        }
        cx.real(out)
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let grads = Tape::extend(cx.graph, [cx.args[0], cx.args[1], cx.grad()], |[x, w, grad]| {
            let r = self.scale(&x);
            let n = x * &r;
            // dx = r·(gw - n·mean(gw·n)),  dw = Σ grad·n
            let gw = &grad * w;
            let mean = (&gw * &n).reduce_last(ReduceKind::Mean);
            let dx = (gw - &n * mean) * r;
            [dx, (grad * n).sum_rows()]
        })?;
        Ok(grads.map(Some).to_vec())
    }

    fn decompose(&self, g: &mut Graph, args: &[NodeId]) -> Option<Result<Vec<NodeId>, IrError>> {
        let made = Tape::extend(g, [args[0], args[1]], |[x, w]| [&x * self.scale(&x) * w]);
        Some(made.map(|y| y.to_vec()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{apply, close};

    #[test]
    fn a_row_by_hand() {
        // mean square 12.5; with eps 3.5 the root is 4
        let (x, w) = (Tensor::f32(&[1, 2], &[3.0, 4.0]), Tensor::f32(&[2], &[1.0, 2.0]));
        close(&apply(RmsNorm { eps: Real(3.5) }, &[x, w])[0], &[0.75, 2.0]);
    }
}
