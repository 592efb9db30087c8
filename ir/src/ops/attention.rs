//! `attention`: softmax(scale · q kᵀ) v over ragged sequences, with grouped query heads, causal or not, with sliding window,
//! soft-cap and attention sinks; keys and values are contiguous beside the queries, or paged (a paged KV cache). A composite,
//! because a kernel never stores the scores (FlashAttention, arXiv:2205.14135).

use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp, float};
use crate::shard::{Label, Propagate, ShardingRule};
use crate::{DType, Dim, Real, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Arguments: `q` `[tokens, heads, d]`, `k` `[tokens, kv_heads, d]`, `v` `[tokens, kv_heads, dv]`, `starts` i32
/// `[sequences + 1]` (cumulative sequence lengths: where each sequence begins, and the end), and `sinks` `[heads]` when `sinks` is
/// set. Outputs: the result `[tokens, heads, dv]` and the log-sum-exp of the scores, f32 `[tokens, heads]`.
///
/// With `page` set, `k` and `v` are `[rows, kv_heads, ..]` of whole pages, and behind `starts` (which then divides the queries
/// only) stand `tables` i32 `[sequences, table]` (the page table of each sequence) and `lens` i32 `[sequences]` (its number of
/// keys; its last query has the position of its last key). Key `j` lies in row `tables[s][j / page] * page + j % page`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attention {
    /// Factor of the scores.
    pub scale: Real,
    /// Key j is visible to query i only when j <= i.
    pub causal: bool,
    /// Sliding window: when set, only when also i - j < window.
    pub window: Option<usize>,
    /// When set, scores become cap · tanh(score / cap).
    pub softcap: Option<Real>,
    /// Attention sinks: a last argument holds one score per head that is added to the softmax's denominator only.
    pub sinks: bool,
    /// Bound on the keys of a sequence, for the cost only.
    pub span: Dim,
    /// Rows of a page, when keys and values lie in pages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page: Option<usize>,
}

/// Query heads, key heads, elements of a query's and of a value's head.
type Sizes = [usize; 4];

impl Attention {
    /// True when key `j` is visible to query `i`, both counted from the start of their sequence.
    pub fn visible(&self, i: usize, j: usize) -> bool {
        (!self.causal || j <= i) && self.window.is_none_or(|w| i.abs_diff(j) < w)
    }

    /// Which argument the sinks are.
    pub fn sinks_at(&self) -> usize {
        if self.page.is_some() { 6 } else { 4 }
    }

    /// One (query, head): the result row and its log-sum-exp.
    fn row(&self, cx: &Eval, sizes: Sizes, seq: &Sequence, token: usize, head: usize) -> (Vec<f64>, f64) {
        let (q, k, v) = (cx.args[0], cx.args[1], cx.args[2]);
        let [heads, kv_heads, d, dv] = sizes;
        let kv = head / (heads / kv_heads);
        let i = seq.keys.len() - seq.queries.len() + token - seq.queries.start;
        let keys: Vec<usize> =
            (0..seq.keys.len()).filter(|&j| self.visible(i, j)).map(|j| seq.keys[j]).collect();
        let mut scores: Vec<f64> = keys
            .iter()
            .map(|j| {
                let dot: f64 = (0..d)
                    .map(|e| q.at((token * heads + head) * d + e) * k.at((j * kv_heads + kv) * d + e))
                    .sum();
                let x = dot * self.scale.0;
                self.softcap.map_or(x, |c| c.0 * (x / c.0).tanh())
            })
            .collect();
        let sink = if self.sinks { cx.args[self.sinks_at()].at(head) } else { f64::NEG_INFINITY };
        let top = scores.iter().fold(sink, |a, &b| a.max(b));
        let sum: f64 = scores.iter().map(|x| (x - top).exp()).sum::<f64>() + (sink - top).exp();
        scores.iter_mut().for_each(|x| *x = (*x - top).exp() / sum);
        let out = (0..dv)
            .map(|e| keys.iter().zip(&scores).map(|(j, p)| p * v.at((j * kv_heads + kv) * dv + e)).sum())
            .collect();
        (out, top + sum.ln())
    }

    /// The sequences of the arguments.
    fn sequences(&self, cx: &Eval) -> Result<Vec<Sequence>, String> {
        let (tokens, bounds) = (cx.args[0].shape[0], ints(cx.args[3]));
        if bounds.first() != Some(&0) || bounds.last() != Some(&(tokens as i64)) || !bounds.is_sorted() {
            return Err(format!("starts {bounds:?} do not divide {tokens} tokens into sequences"));
        }
        let queries = bounds.windows(2).map(|w| w[0] as usize..w[1] as usize);
        let Some(page) = self.page else {
            return Ok(queries.map(|q| Sequence { keys: q.clone().collect(), queries: q }).collect());
        };
        let (tables, lens, pages) = (ints(cx.args[4]), ints(cx.args[5]), cx.args[1].shape[0] / page);
        let width = cx.args[4].shape[1];
        let keys = |(s, queries): (usize, Range<usize>)| {
            let (least, most) = (queries.len(), width * page);
            let len = usize::try_from(lens[s]).ok().filter(|n| (least..=most).contains(n));
            let len = len.ok_or_else(|| {
                format!(
                    "{} keys of sequence {s} are not between its {least} queries and the table's {most}",
                    lens[s]
                )
            })?;
            let table = &tables[s * width..][..len.div_ceil(page)];
            if let Some(bad) = table.iter().find(|p| !(0..pages as i64).contains(*p)) {
                return Err(format!("page {bad} of sequence {s} is outside the {pages} pages"));
            }
            let row = |j: usize| table[j / page] as usize * page + j % page;
            Ok(Sequence { queries, keys: (0..len).map(row).collect() })
        };
        queries.enumerate().map(keys).collect()
    }

    /// Checks that keys and values are whole pages, and the types of page tables and lengths.
    fn check_pages(
        &self,
        page: usize,
        [q, k, v, starts]: [&Type; 4],
        tables: &Type,
        lens: &Type,
    ) -> Result<(), String> {
        let whole = page > 0 && k.shape[0].div_exact(&Dim::from(page)).is_some();
        if !whole || k.shape[0] != v.shape[0] {
            return Err(format!("wants k and v as whole pages of {page} rows for {q}, got {k} and {v}"));
        }
        let sequences = &starts.shape[0] - &Dim::from(1);
        let [of, width] = tables.shape.as_slice() else {
            return Err(format!("wants tables as i32[sequences, table], got {tables}"));
        };
        let literal = width.size().is_some() && tables.dtype == DType::I32;
        if *of != sequences || !literal || *lens != Type::new(DType::I32, [sequences]) {
            return Err(format!(
                "wants tables as i32[sequences, table] and lens as i32[sequences], got {tables} and {lens}"
            ));
        }
        Ok(())
    }
}

/// Query rows of a sequence, and the row of each of its keys.
struct Sequence {
    queries: Range<usize>,
    keys: Vec<usize>,
}

fn ints(t: &Tensor) -> Vec<i64> {
    (0..t.len()).map(|i| t.int_at(i)).collect()
}

impl Operator for Attention {
    const NAME: &'static str = "attention";
    const TOLERANCE: [f64; 2] = [16.0, 2e-5];

    fn infer(&self, cx: &Infer) -> Inferred {
        let count = self.sinks_at() + self.sinks as usize;
        if cx.args.len() != count {
            return Err(format!("takes {count} arguments, got {}", cx.args.len()));
        }
        let [q, k, v, starts] = [0, 1, 2, 3].map(|i| cx.args[i]);
        if self.sinks {
            let sinks = cx.args[self.sinks_at()];
            float("sinks", sinks)?;
            if sinks.shape != q.shape.get(1).cloned().into_iter().collect::<Vec<_>>() {
                return Err(format!("wants one sink a head of {q}, got {sinks}"));
            }
        }
        float("q", q)?;
        let ([t, h, d], [tk, hk, dk], [tv, hv, dv]) =
            (q.shape.as_slice(), k.shape.as_slice(), v.shape.as_slice())
        else {
            return Err(format!("wants [tokens, heads, d] for q, k and v, got {q}, {k}, {v}"));
        };
        let beside = self.page.is_some() || (t, t) == (tk, tv);
        if (d, hk) != (dk, hv) || !beside || k.dtype != q.dtype || v.dtype != q.dtype {
            return Err(format!("q {q}, k {k} and v {v} do not go together"));
        }
        match (h.size(), hk.size()) {
            (Some(h), Some(hk)) if hk > 0 && h % hk == 0 => {}
            _ => return Err(format!("{h} query heads cannot share {hk} key heads")),
        }
        if starts.dtype != DType::I32 || starts.rank() != 1 {
            return Err(format!("wants starts as i32[sequences + 1], got {starts}"));
        }
        if let Some(page) = self.page {
            self.check_pages(page, [q, k, v, starts], cx.args[4], cx.args[5])?;
        }
        if self.window == Some(0) || (self.window.is_some() && !self.causal) {
            return Err("a window must be positive and causal".into());
        }
        let out = Type::new(q.dtype, [t.clone(), h.clone(), dv.clone()]);
        Ok(vec![out, Type::new(DType::F32, [t.clone(), h.clone()])])
    }

    /// Query heads together with key heads; a single key head (multi-query attention) is replicated.
    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        let heads = vec![None, Some(1), None];
        let mut args: Vec<Vec<Label>> = cx.args.iter().map(|t| vec![None; t.rank()]).collect();
        args[0] = heads.clone();
        if self.sinks {
            args[self.sinks_at()] = vec![Some(1)];
        }
        let shared = args.clone();
        (args[1], args[2]) = (heads.clone(), heads.clone());
        let outs = [heads, vec![None, Some(1)]];
        let mut rules = cx.labelled(&args, &outs, &[]);
        if cx.args[1].shape[1].is_one() {
            rules.extend(cx.labelled(&shared, &outs, &[]));
        }
        rules
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let (q, k) = (cx.args[0], cx.args[1]);
        let (tokens, heads, dv) = (q.shape[0], q.shape[1], cx.outs[0].1[2]);
        let mut out = vec![0.0; tokens * heads * dv];
        let mut lse = vec![0.0; tokens * heads];
        for seq in self.sequences(cx)? {
            for token in seq.queries.clone() {
                for head in 0..heads {
                    let (row, l) = self.row(cx, [heads, k.shape[1], q.shape[2], dv], &seq, token, head);
                    let at = token * heads + head;
                    out[at * dv..(at + 1) * dv].copy_from_slice(&row);
                    lse[at] = l;
                }
            }
        }
        Ok(vec![cx.make(0, out), cx.make(1, lse)])
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        if self.page.is_some() {
            let message = "attention over pages has no gradient; build the program without a cache";
            return Err(cx.graph.error(message.into()));
        }
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
        // A window shorter than the sequence is full for nearly every query, so causality saves nothing.
        let short = self.window.is_some() && seen != self.span;
        // Two products of 2·d (and 2·dv) operations a visible key. Causal attention sees half of the keys, except of paged keys,
        // which may all be older than the queries.
        let both = &q + &outs[0].elements();
        let work = &both * &seen;
        if self.causal && !short && self.page.is_none() { work } else { &work * &Dim::from(2) }
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
            page: None,
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
            &apply(Attention { sinks: true, ..op.clone() }, &with_sink)[0].gather_with(&[2], |i| i),
            &[6.0, 28.0 / 5.0],
        );
        let bad = [&args[..3], &[Tensor::int(DType::I32, &[2], vec![0, 2])]].concat();
        assert!(try_apply(op, &bad).is_err());
    }

    /// Pages of two rows: a sequence of three keys in pages 2 and 0 with one query, and one of two in page 1 with both.
    #[test]
    fn keys_in_pages_are_those_beside_the_queries() {
        let op = Attention {
            scale: Real(1.0),
            causal: true,
            window: None,
            softcap: None,
            sinks: false,
            span: Dim::from(4),
            page: Some(2),
        };
        let ints = |shape: &[usize], v: &[i64]| Tensor::int(DType::I32, shape, v.to_vec());
        let t = |v: &[f32]| Tensor::f32(&[v.len(), 1, 1], v);
        let (k, v) = ([0.5, 9.0, 1.0, 2.0, 0.25, -1.0], [1.0, 9.0, 2.0, 3.0, 4.0, 5.0]);
        let (starts, lens) = (ints(&[3], &[0, 1, 3]), ints(&[2], &[3, 2]));
        let args = vec![t(&[1.0, 2.0, 3.0]), t(&k), t(&v), starts, ints(&[2, 2], &[2, 0, 1, -7]), lens];
        let paged = apply(op.clone(), &args);
        let beside =
            [t(&[0.0, 0.0, 1.0, 2.0, 3.0]), t(&[0.25, -1.0, 0.5, 1.0, 2.0]), t(&[4.0, 5.0, 1.0, 2.0, 3.0])];
        let want =
            apply(Attention { page: None, ..op.clone() }, &[&beside[..], &[ints(&[3], &[0, 3, 5])]].concat());
        for i in 0..2 {
            close(&paged[i], &want[i].reals()[2..]);
        }
        let with = |i: usize, t: Tensor| {
            let mut args = args.clone();
            args[i] = t;
            try_apply(op.clone(), &args).unwrap_err().to_string()
        };
        assert!(with(4, ints(&[2, 2], &[2, 3, 1, 0])).contains("page 3 of sequence 0"));
        assert!(with(4, ints(&[2, 2], &[-1, 0, 1, 0])).contains("page -1 of sequence 0"));
        assert!(with(5, ints(&[2], &[5, 2])).contains("5 keys of sequence 0"));
        assert!(with(5, ints(&[2], &[3, 1])).contains("1 keys of sequence 1"));
        assert!(with(2, t(&k[..4])).contains("whole pages"));
        assert!(with(5, ints(&[1], &[3])).contains("lens as i32[sequences]"));
        let plain = Attention { page: None, ..op };
        let old = serde_json::to_string(&plain).unwrap();
        assert!(!old.contains("page"), "{old}");
        assert_eq!(serde_json::from_str::<Attention>(&old).unwrap(), plain);
    }
}
