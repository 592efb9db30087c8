//! `attention`: softmax(scale · q kᵀ) v over ragged sequences, grouped heads, causal or not, with window, soft-cap and
//! sinks. Kept whole because a kernel never stores the scores.

use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp, float};
use crate::{DType, Dim, Real, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// Arguments: `q` `[tokens, heads, d]`, `k` `[tokens, kv_heads, d]`, `v` `[tokens, kv_heads, dv]`, `starts` i32
/// `[sequences + 1]` (where each sequence begins, and the end), and `sinks` `[heads]` when `sinks` is set. Outputs: the
/// result `[tokens, heads, dv]` and the log-sum-exp of the scores, f32 `[tokens, heads]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attention {
    /// Factor of the scores.
    pub scale: Real,
    /// Key j is visible to query i only when j <= i.
    pub causal: bool,
    /// When set, only when also i - j < window.
    pub window: Option<usize>,
    /// When set, scores become cap · tanh(score / cap).
    pub softcap: Option<Real>,
    /// A fifth argument holds one score per head that joins the denominator only.
    pub sinks: bool,
    /// Bound on the length of a sequence, for the cost only.
    pub span: Dim,
}

struct Sizes {
    heads: usize,
    kv_heads: usize,
    d: usize,
    dv: usize,
}

impl Attention {
    /// True when key `j` is visible to query `i`, both counted from the start of their sequence.
    pub fn visible(&self, i: usize, j: usize) -> bool {
        (!self.causal || j <= i) && self.window.is_none_or(|w| i.abs_diff(j) < w)
    }

    /// One (query, head): the result row and its log-sum-exp.
    fn row(&self, cx: &Eval, s: &Sizes, seq: (usize, usize), token: usize, head: usize) -> (Vec<f64>, f64) {
        let (q, k, v) = (cx.args[0], cx.args[1], cx.args[2]);
        let kv = head / (s.heads / s.kv_heads);
        let keys: Vec<usize> = (seq.0..seq.1).filter(|&j| self.visible(token - seq.0, j - seq.0)).collect();
        let mut scores: Vec<f64> = keys
            .iter()
            .map(|j| {
                let dot: f64 = (0..s.d)
                    .map(|e| q.at((token * s.heads + head) * s.d + e) * k.at((j * s.kv_heads + kv) * s.d + e))
                    .sum();
                let x = dot * self.scale.0;
                self.softcap.map_or(x, |c| c.0 * (x / c.0).tanh())
            })
            .collect();
        let sink = if self.sinks { cx.args[4].at(head) } else { f64::NEG_INFINITY };
        let top = scores.iter().fold(sink, |a, &b| a.max(b));
        let sum: f64 = scores.iter().map(|x| (x - top).exp()).sum::<f64>() + (sink - top).exp();
        scores.iter_mut().for_each(|x| *x = (*x - top).exp() / sum);
        let out = (0..s.dv)
            .map(|e| keys.iter().zip(&scores).map(|(j, p)| p * v.at((j * s.kv_heads + kv) * s.dv + e)).sum())
            .collect();
        (out, top + sum.ln())
    }
}

impl Operator for Attention {
    const NAME: &'static str = "attention";

    fn infer(&self, cx: &Infer) -> Inferred {
        let (q, k, v, starts) = match cx.args {
            [q, k, v, s] if !self.sinks => (*q, *k, *v, *s),
            [q, k, v, s, sinks] if self.sinks => {
                float("sinks", sinks)?;
                if sinks.shape != q.shape.get(1).cloned().into_iter().collect::<Vec<_>>() {
                    return Err(format!("wants one sink a head of {q}, got {sinks}"));
                }
                (*q, *k, *v, *s)
            }
            a => return Err(format!("takes {} arguments, got {}", 4 + self.sinks as usize, a.len())),
        };
        float("q", q)?;
        let ([t, h, d], [tk, hk, dk], [tv, hv, dv]) =
            (q.shape.as_slice(), k.shape.as_slice(), v.shape.as_slice())
        else {
            return Err(format!("wants [tokens, heads, d] for q, k and v, got {q}, {k}, {v}"));
        };
        if (t, d, hk) != (tk, dk, hv) || t != tv || k.dtype != q.dtype || v.dtype != q.dtype {
            return Err(format!("q {q}, k {k} and v {v} do not go together"));
        }
        match (h.size(), hk.size()) {
            (Some(h), Some(hk)) if hk > 0 && h % hk == 0 => {}
            _ => return Err(format!("{h} query heads cannot share {hk} key heads")),
        }
        if starts.dtype != DType::I32 || starts.rank() != 1 {
            return Err(format!("wants starts as i32[sequences + 1], got {starts}"));
        }
        if self.window == Some(0) || (self.window.is_some() && !self.causal) {
            return Err("a window must be positive and causal".into());
        }
        let out = Type::new(q.dtype, [t.clone(), h.clone(), dv.clone()]);
        Ok(vec![out, Type::new(DType::F32, [t.clone(), h.clone()])])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let (q, k, starts) = (cx.args[0], cx.args[1], cx.args[3]);
        let s = Sizes { heads: q.shape[1], kv_heads: k.shape[1], d: q.shape[2], dv: cx.outs[0].1[2] };
        let tokens = q.shape[0];
        let mut out = vec![0.0; tokens * s.heads * s.dv];
        let mut lse = vec![0.0; tokens * s.heads];
        let bounds: Vec<i64> = (0..starts.len()).map(|i| starts.int_at(i)).collect();
        if bounds.first() != Some(&0) || bounds.last() != Some(&(tokens as i64)) || !bounds.is_sorted() {
            return Err(format!("starts {bounds:?} do not divide {tokens} tokens into sequences"));
        }
        for w in bounds.windows(2) {
            let seq = (w[0] as usize, w[1] as usize);
            for token in seq.0..seq.1 {
                for head in 0..s.heads {
                    let (row, l) = self.row(cx, &s, seq, token, head);
                    let at = token * s.heads + head;
                    out[at * s.dv..(at + 1) * s.dv].copy_from_slice(&row);
                    lse[at] = l;
                }
            }
        }
        Ok(vec![cx.make(0, out), cx.make(1, lse)])
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        if cx.grads[1].is_some() {
            return Err(cx.graph.error("the log-sum-exp of `attention` has no gradient".into()));
        }
        let mut args = vec![cx.args[0], cx.args[1], cx.args[2], cx.args[3]];
        args.extend([cx.outs[0], cx.outs[1], cx.grad()]);
        args.extend(cx.args.get(4));
        let back = cx.graph.push(super::AttentionGrad { forward: self.clone() }, &args)?;
        let mut grads = Vec::new();
        for i in 0..3 + self.sinks as u32 {
            grads.push(Some(cx.graph.part(back, i)?));
        }
        grads.insert(3, None);
        Ok(grads)
    }

    fn flops(&self, args: &[&Type], outs: &[Type]) -> Dim {
        let q = args[0].elements();
        let seen = self
            .window
            .map_or(self.span.clone(), |w| self.span.size().map_or(Dim::from(w), |s| Dim::from(s.min(w))));
        // A window shorter than the sequence is full for nearly every query.
        let short = self.window.is_some() && seen != self.span;
        // Two products of 2·d (and 2·dv) a visible key; causal sees half of the keys.
        let both = &q + &outs[0].elements();
        let work = &both * &seen;
        if self.causal && !short { work } else { &work * &Dim::from(2) }
    }

    fn tolerance(&self, dtype: DType) -> f64 {
        (16.0 * dtype.epsilon()).max(2e-5)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{apply, close, try_apply};

    /// Two sequences, of two tokens and of one; one head of size 1.
    #[test]
    fn ragged_rows_by_hand() {
        let t = |v: &[f32]| Tensor::f32(&[3, 1, 1], v);
        let op = Attention {
            scale: Real(1.0),
            causal: true,
            window: None,
            softcap: None,
            sinks: false,
            span: Dim::from(2),
        };
        let (q, k, v) = (t(&[1.0, 1.0, 1.0]), t(&[3f32.ln(), 0.0, 5.0]), t(&[8.0, 4.0, 2.0]));
        let starts = Tensor::int(DType::I32, &[3], vec![0, 2, 3]);
        let args = vec![q, k, v, starts];
        let out = apply(op.clone(), &args);
        // Token 1 weighs its keys 3 : 1.
        close(&out[0], &[8.0, 7.0, 2.0]);
        close(&out[1], &[3f64.ln(), 4f64.ln(), 5.0]);
        close(&apply(Attention { window: Some(1), ..op.clone() }, &args)[0], &[8.0, 4.0, 2.0]);
        close(&apply(Attention { causal: false, ..op.clone() }, &args)[0], &[7.0, 7.0, 2.0]);
        let with_sink = [args.clone(), vec![Tensor::f32(&[1], &[0.0])]].concat();
        close(
            &apply(Attention { sinks: true, ..op.clone() }, &with_sink)[0].pick(&[2], |i| i),
            &[6.0, 28.0 / 5.0],
        );
        let bad = [&args[..3], &[Tensor::int(DType::I32, &[2], vec![0, 2])]].concat();
        assert!(try_apply(op, &bad).is_err());
    }
}
