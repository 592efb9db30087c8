//! `attention_grad`: gradient of `attention` from the saved result and log-sum-exp, so that the scores are never stored.

use crate::op::{Infer, Inferred, Operator};
use crate::ops::Attention;
use crate::{Dim, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// Arguments: `q`, `k`, `v`, `starts` as in [`Attention`], then its two outputs, the cotangent of the first output, and the
/// sinks if it has them. Outputs: the cotangents of `q`, `k`, `v` (and of the sinks).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionGrad {
    /// The forward operator.
    pub forward: Attention,
}

impl AttentionGrad {
    /// Adds the contribution of query `token` of `head` to the cotangents.
    fn add_row(&self, cx: &Eval, sums: &mut [Vec<f64>], seq: (usize, usize), token: usize, head: usize) {
        let [q, k, v, _, out, lse, grad] = cx.args[..7] else { return };
        let [to_q, to_k, to_v, to_sinks @ ..] = sums else { return };
        let (heads, d, kv_heads, dv) = (q.shape[1], q.shape[2], k.shape[1], v.shape[2]);
        let (at, kv, f) = (token * heads + head, head / (heads / kv_heads), &self.forward);
        // The gradient of softmax subtracts delta = Σ grad · out from every score's cotangent.
        let delta: f64 = (0..dv).map(|e| grad.at(at * dv + e) * out.at(at * dv + e)).sum();
        if let [to_sinks] = to_sinks {
            to_sinks[head] -= (cx.args[7].at(head) - lse.at(at)).exp() * delta;
        }
        for j in (seq.0..seq.1).filter(|&j| f.visible(token - seq.0, j - seq.0)) {
            let key = j * kv_heads + kv;
            let dot: f64 = (0..d).map(|e| q.at(at * d + e) * k.at(key * d + e)).sum();
            let (s, slope) = match f.softcap {
                Some(c) => {
                    let t = (dot * f.scale.0 / c.0).tanh();
                    (c.0 * t, 1.0 - t * t)
                }
                None => (dot * f.scale.0, 1.0),
            };
            let p = (s - lse.at(at)).exp();
            let dp: f64 = (0..dv).map(|e| grad.at(at * dv + e) * v.at(key * dv + e)).sum();
            let ds = p * (dp - delta) * slope * f.scale.0;
            for e in 0..d {
                to_q[at * d + e] += ds * k.at(key * d + e);
                to_k[key * d + e] += ds * q.at(at * d + e);
            }
            for e in 0..dv {
                to_v[key * dv + e] += p * grad.at(at * dv + e);
            }
        }
    }
}

impl Operator for AttentionGrad {
    const NAME: &'static str = "attention_grad";
    const TOLERANCE: [f64; 2] = [32.0, 5e-5];

    fn infer(&self, cx: &Infer) -> Inferred {
        if self.forward.page.is_some() {
            return Err("attention over pages has no gradient".into());
        }
        let n = 7 + self.forward.sinks as usize;
        if cx.args.len() != n {
            return Err(format!("takes {n} arguments, got {}", cx.args.len()));
        }
        let mut forward = cx.args[..4].to_vec();
        forward.extend(cx.args.get(7));
        let outs = self.forward.infer(&Infer { args: &forward, graph: cx.graph })?;
        if [cx.args[4], cx.args[5], cx.args[6]] != [&outs[0], &outs[1], &outs[0]] {
            return Err(format!(
                "wants the outputs {} and {} and a cotangent like the first",
                outs[0], outs[1]
            ));
        }
        let mut types: Vec<Type> = cx.args[..3].iter().map(|t| (*t).clone()).collect();
        types.extend(cx.args.get(7).map(|t| (*t).clone()));
        Ok(types)
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let starts = cx.args[3];
        let mut sums: Vec<Vec<f64>> = cx.outs.iter().map(|o| vec![0.0; o.1.iter().product()]).collect();
        let tokens = cx.args[0].shape[0];
        for i in 1..starts.len() {
            let seq = (starts.int_at(i - 1), starts.int_at(i));
            if seq.0 < 0 || seq.1 < seq.0 || seq.1 as usize > tokens {
                return Err(format!("starts do not divide {tokens} tokens into sequences"));
            }
            let seq = (seq.0 as usize, seq.1 as usize);
            for token in seq.0..seq.1 {
                (0..cx.args[0].shape[1]).for_each(|head| self.add_row(cx, &mut sums, seq, token, head));
            }
        }
        Ok(sums.into_iter().enumerate().map(|(i, sum)| cx.make(i, sum)).collect())
    }

    fn flops(&self, args: &[&Type], _: &[Type]) -> Dim {
        let outs = [args[4].clone(), args[5].clone()];
        // Five products against the forward's two.
        let forward = self.forward.flops(args, &outs);
        let twice = &forward * &Dim::from(5);
        twice.div_exact(&Dim::from(2)).unwrap_or(twice)
    }
}
