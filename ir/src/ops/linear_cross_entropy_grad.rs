//! `linear_cross_entropy_grad`: both products of the gradient of `linear_cross_entropy`, and its losses, from one computation of
//! the logits. A composite, because a kernel turns the logits of a few tokens into their gradient in place.

use super::linear_cross_entropy::Row;
use crate::front::{Tape, Value};
use crate::op::{Infer, Inferred, Operator};
use crate::ops::{Dot, LinearCrossEntropy, Statistic};
use crate::{DType, Dim, Graph, IrError, NodeId, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// Arguments: `hidden` `[tokens, k]`, `weight` `[vocab, k]`, `targets` i32 `[tokens]` as in [`LinearCrossEntropy`], then
/// `grad` f32 `[tokens]`, the cotangent of the losses, and with statistics those of the first three of them. Outputs, all f32: the
/// cotangents of `hidden` and `weight`, and the forward operator's results, each `[tokens]`. The logits' gradient is rounded to the type of `hidden` before the two products, which add in f32: in
/// bf16 both sides of every product are bf16. A token whose target is negative has loss 0 and gives no gradient.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearCrossEntropyGrad {
    /// The forward operator.
    pub forward: LinearCrossEntropy,
}

impl LinearCrossEntropyGrad {
    /// For one token the gradient of its logits x, with p = softmax(x), E = Σ p x and the cotangents of the loss `a`, the
    /// log-sum-exp `b`, the mean `c` and the entropy `d`:
    /// p·(a + b - d·(x - E)) - a·(1 - s)·onehot + (c - a·s) / vocab, times the slope of the cap.
    fn logits_gradient(&self, cx: &Eval, t: usize) -> Result<Option<(Vec<f64>, Row)>, String> {
        let Some(row) = self.forward.row(cx, t)? else { return Ok(None) };
        let (s, dtype) = (self.forward.label_smoothing.0, cx.args[0].dtype);
        let of = |i: usize| cx.args.get(3 + i).map_or(0.0, |x| x.at(t));
        let [a, b, c, d] = [of(0), of(1), of(2), of(3)];
        let narrow = dtype != DType::F32 && !cx.exact;
        let (even, expected) = ((c - a * s) / row.logits.len() as f64, row.expected());
        let gradient = |(v, x): (usize, &f64)| {
            let hit = if v == row.target { a * (1.0 - s) } else { 0.0 };
            let slope = self.forward.softcap.map_or(1.0, |c| 1.0 - (x / c.0) * (x / c.0));
            let p = (x - row.lse).exp();
            let d = (p * (a + b - d * (x - expected)) - hit + even) * slope;
            if narrow { dtype.round(d) } else { d }
        };
        Ok(Some((row.logits.iter().enumerate().map(gradient).collect(), row)))
    }

    /// The logits' gradient as nodes, `[tokens, vocab]` f32 before its rounding; and the forward operator's results.
    fn logits_gradient_parts(
        &self,
        g: &mut Graph,
        args: &[NodeId],
    ) -> Result<(NodeId, Vec<NodeId>), IrError> {
        let (f, grads) = (&self.forward, &args[3..]);
        let parts = f.parts(g, args)?;
        let shape = g.ty(parts.logits).shape.clone();
        let (s, vocab) = (f.label_smoothing.0, shape[1].size().unwrap_or(1));
        let even = s / vocab as f64;
        let wide = |x: &Value| x.reshape(vec![shape[0].clone(), Dim::from(1)]).expand(shape.clone());
        let nodes = [parts.logits, parts.tanh.unwrap_or(parts.logits), parts.hit, parts.valid, grads[0]];
        let [mut d] = Tape::extend(g, nodes, |[logits, tanh, hit, valid, grad]| {
            let wanted = hit.where_(&logits.full_like(1.0 - s + even), &logits.full_like(even));
            let mut d = logits.softmax(-1) - wanted;
            if f.softcap.is_some() {
                let one = tanh.full_like(1.0);
                d = d * (one - &tanh * &tanh);
            }
            let grad = valid.where_(&grad, &grad.full_like(0.0));
            [d * wide(&grad)]
        })?;
        if let [_, lse, mean, entropy] = *grads {
            let nodes =
                [parts.logits, parts.tanh.unwrap_or(parts.logits), parts.valid, d, lse, mean, entropy];
            [d] = Tape::extend(g, nodes, |[logits, tanh, valid, d, lse, mean, entropy]| {
                let [lse, mean, entropy] =
                    [lse, mean, entropy].map(|x| wide(&valid.where_(&x, &x.full_like(0.0))));
                let p = logits.softmax(-1);
                let expected = wide(&(&p * &logits).sum(&[1], false));
                let mut more = p * (lse - entropy * (logits - expected)) + mean * (1.0 / vocab as f64);
                if f.softcap.is_some() {
                    let one = tanh.full_like(1.0);
                    more = more * (one - &tanh * &tanh);
                }
                [d + more]
            })?;
        }
        Ok((d, f.results(g, &parts)?))
    }
}

impl Operator for LinearCrossEntropyGrad {
    const NAME: &'static str = "linear_cross_entropy_grad";
    const TOLERANCE: [f64; 2] = [32.0, 5e-5];

    fn infer(&self, cx: &Infer) -> Inferred {
        let with = if self.forward.statistics { Statistic::DIFFERENTIABLE } else { 1 };
        let [hidden, weight, targets, grads @ ..] = cx.args else {
            return Err(format!("takes {} arguments, got {}", 3 + with, cx.args.len()));
        };
        if grads.len() != with {
            return Err(format!("takes {} arguments, got {}", 3 + with, cx.args.len()));
        }
        let results = self.forward.infer(&Infer { args: &[hidden, weight, targets], graph: cx.graph })?;
        if let Some(grad) = grads.iter().find(|g| ***g != results[0]) {
            return Err(format!("wants cotangents of the results as {}, got {grad}", results[0]));
        }
        Ok([vec![hidden.with(DType::F32), weight.with(DType::F32)], results].concat())
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let [hidden, weight, ..] = cx.args else { return Err("takes 4 arguments".into()) };
        let (tokens, k) = (hidden.shape[0], hidden.shape[1]);
        let (mut dh, mut dw) = (vec![0.0; hidden.len()], vec![0.0; weight.len()]);
        let mut results = vec![vec![0.0; tokens]; cx.outs.len() - 2];
        for t in 0..tokens {
            let Some((gradient, row)) = self.logits_gradient(cx, t)? else { continue };
            results.iter_mut().zip(row.results()).for_each(|(all, x)| all[t] = x);
            for (v, d) in gradient.into_iter().enumerate() {
                for e in 0..k {
                    dh[t * k + e] += d * weight.at(v * k + e);
                    dw[v * k + e] += d * hidden.at(t * k + e);
                }
            }
        }
        let all = [vec![dh, dw], results].concat();
        Ok(all.into_iter().enumerate().map(|(i, x)| cx.make(i, x)).collect())
    }

    fn decompose(&self, g: &mut Graph, args: &[NodeId]) -> Option<Result<Vec<NodeId>, IrError>> {
        Some((|| {
            let (d, results) = self.logits_gradient_parts(g, args)?;
            let d = g.cast(d, g.ty(args[0]).dtype)?;
            let d = g.cast(d, DType::F32)?;
            let against = |g: &mut Graph, axis: usize, other: NodeId| {
                let wide = g.cast(other, DType::F32)?;
                g.push(Dot { batch: vec![], contract: vec![(axis, 0)] }, &[d, wide])
            };
            Ok([vec![against(g, 1, args[1])?, against(g, 0, args[0])?], results].concat())
        })())
    }

    fn flops(&self, args: &[&Type], _: &[Type]) -> Dim {
        // Three products, and about ten operations a logit.
        let (products, logits) =
            (&args[0].elements() * &args[1].shape[0], &args[0].shape[0] * &args[1].shape[0]);
        &(&products * &Dim::from(6)) + &(&logits * &Dim::from(10))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Real;
    use crate::check::{apply, close, try_apply};

    fn op(s: f64, cap: Option<f64>) -> LinearCrossEntropyGrad {
        let forward =
            LinearCrossEntropy { label_smoothing: Real(s), softcap: cap.map(Real), statistics: false };
        LinearCrossEntropyGrad { forward }
    }

    fn args(targets: [i64; 3]) -> [Tensor; 4] {
        [
            Tensor::f32(&[3, 1], &[1.0, 2.0, 1.0]),
            Tensor::f32(&[2, 1], &[3f32.ln(), 0.0]),
            Tensor::int(DType::I32, &[3], targets.to_vec()),
            Tensor::f32(&[3], &[1.0, -0.5, f32::NAN]),
        ]
    }

    #[test]
    fn two_classes_by_hand() {
        // logits (ln 3, 0) and (2 ln 3, 0): p = (3/4, 1/4) and (9/10, 1/10); the third token is ignored.
        let (a, b, w) = ((4.0f64 / 3.0).ln(), 10f64.ln(), 3f64.ln());
        let got = apply(op(0.0, None), &args([0, 1, -1]));
        close(&got[0], &[-0.25 * w, -0.45 * w, 0.0]);
        close(&got[1], &[-0.25 - 0.9, 0.25 + 0.9]);
        close(&got[2], &[a, b, 0.0]);
        // Smoothed by 0.2 the targets are 0.9 and 0.1.
        let got = apply(op(0.2, None), &args([0, 1, -1]));
        close(&got[0], &[-0.15 * w, -0.5 * 0.8 * w, 0.0]);
        close(&got[2], &[0.9 * a + 0.1 * 4f64.ln(), 0.9 * b + 0.1 * (10.0f64 / 9.0).ln(), 0.0]);
        let got = apply(op(0.0, Some(0.5)), &args([0, -7, -1]));
        let t = (w / 0.5).tanh();
        let p = 1.0 / (1.0 + (-0.5 * t).exp());
        close(&got[0], &[(p - 1.0) * (1.0 - t * t) * w, 0.0, 0.0]);
        let e = try_apply(op(0.0, None), &args([0, 2, 0])).unwrap_err();
        assert!(e.to_string().contains("target 2"), "{e}");
    }

    #[test]
    fn narrow_arguments_round_the_gradient_of_the_logits() {
        let narrow = |t: &Tensor| Tensor::float(DType::BF16, &t.shape, t.reals());
        let [h, w, t, g] = args([0, 1, -1]);
        let got = apply(op(0.0, None), &[narrow(&h), narrow(&w), t, g]);
        let w = DType::BF16.round(3f64.ln());
        let p = 1.0 / (1.0 + (-w).exp());
        let d = DType::BF16.round(p - 1.0);
        close(&got[0].gather_with(&[1], |_| 0), &[d * w]);
        assert!((d - (p - 1.0)).abs() > 1e-5, "the case shows no rounding");
        assert_eq!(got[1].dtype, DType::F32);
    }
}
