//! `linear_cross_entropy`: negative log-likelihood of target tokens under softmax(hidden · weightᵀ), the loss fused with the
//! output projection. A composite, because a kernel never stores the logits of more than a few tokens.

use super::gather::local_index;
use crate::front::{Tape, Value};
use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp, float};
use crate::ops::{AllReduce, CompareKind, LinearCrossEntropyGrad, Pvary, ReduceKind, ReduceOp, UnaryKind};
use crate::shard::{Axis, Partition, Placement, Propagate, Shard, ShardingRule};
use crate::{DType, Dim, Graph, IrError, NodeId, Real, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// Arguments: `hidden` `[tokens, k]`, `weight` `[vocab, k]`, `targets` i32 `[tokens]`. Result: f32 `[tokens]`,
/// `(1 - s)·(-log p[target]) + s·mean(-log p)` with the smoothing `s`; with `statistics`, those of [`Statistic`] follow it. All
/// are 0 where the target is negative (ignored).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearCrossEntropy {
    /// Label smoothing (arXiv:1512.00567): the probability that is distributed evenly over the vocabulary, in [0, 1).
    pub label_smoothing: Real,
    /// When set, logits become cap · tanh(logit / cap).
    pub softcap: Option<Real>,
    /// Whether the results of [`Statistic`] follow the losses.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub statistics: bool,
}

/// What objectives read of a token's logits beside its loss; the order is that of the results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Statistic {
    /// Log of the sum of the logits' exponentials.
    LogSumExp,
    /// Mean of the logits over the vocabulary.
    Mean,
    /// Entropy of the distribution, in nats.
    Entropy,
    /// log Σ p², the log of the probability that two draws agree. Has no gradient: objectives take it as a constant.
    LogSumSquare,
    /// 1 where no logit is greater than the target's. Piecewise constant.
    Top,
}

impl Statistic {
    /// All, in the order of the results.
    pub const ALL: [Statistic; 5] =
        [Statistic::LogSumExp, Statistic::Mean, Statistic::Entropy, Statistic::LogSumSquare, Statistic::Top];
    /// Results that have a gradient with `statistics`: the loss and the first statistics.
    pub const DIFFERENTIABLE: usize = 4;
}

/// Nodes that the loss and its gradient share; all are `[tokens, vocab]` except `valid`.
pub(super) struct Parts {
    pub(super) logits: NodeId,
    /// tanh(logit / cap), when there is a cap.
    pub(super) tanh: Option<NodeId>,
    /// True at the target.
    pub(super) hit: NodeId,
    /// `[tokens]`: true where the target counts.
    pub(super) valid: NodeId,
}

/// The reference evaluation of one token.
pub(super) struct Row {
    /// The logits after the cap.
    pub(super) logits: Vec<f64>,
    /// Log of the sum of their exponentials.
    pub(super) lse: f64,
    pub(super) target: usize,
    pub(super) loss: f64,
}

impl Row {
    /// The expected logit, Σ p x.
    pub(super) fn expected(&self) -> f64 {
        self.logits.iter().map(|x| (x - self.lse).exp() * x).sum()
    }

    /// The results of the operator: the loss, then the statistics.
    pub(super) fn results(&self) -> [f64; 1 + Statistic::ALL.len()] {
        let mean = self.logits.iter().sum::<f64>() / self.logits.len() as f64;
        let square = self.logits.iter().map(|x| (2.0 * (x - self.lse)).exp()).sum::<f64>().ln();
        let top = self.logits.iter().all(|x| *x <= self.logits[self.target]);
        let entropy = self.lse - self.expected();
        [self.loss, self.lse, mean, entropy, square, if top { 1.0 } else { 0.0 }]
    }
}

impl LinearCrossEntropy {
    pub(super) fn parts(&self, g: &mut Graph, args: &[NodeId]) -> Result<Parts, IrError> {
        let targets = args[2];
        // Logits are f32 whatever the storage type: products of two short mantissas are exact there.
        let (hidden, weight) = (g.cast(args[0], DType::F32)?, g.cast(args[1], DType::F32)?);
        let logits = g.linear(hidden, weight)?;
        let (logits, tanh) = self.capped(g, logits)?;
        let shape = g.ty(logits).shape.clone();
        let [hit, valid] = Tape::extend(g, [targets], |[targets]| {
            let column = targets.reshape(vec![shape[0].clone(), Dim::from(1)]).expand(shape);
            let hit = column.iota(1).equal(&column);
            [hit, targets.greater_equal(&targets.full_like(0.0))]
        })?;
        Ok(Parts { logits, tanh, hit, valid })
    }

    /// The results from their parts.
    pub(super) fn results(&self, g: &mut Graph, parts: &Parts) -> Result<Vec<NodeId>, IrError> {
        let s = self.label_smoothing.0;
        let loss = |logp: &Value, hit: &Value| {
            let picked = hit.where_(logp, &logp.full_like(0.0)).sum(&[1], false);
            match s {
                0.0 => -picked,
                _ => picked * (s - 1.0) + logp.mean(&[1], false) * -s,
            }
        };
        let nodes = [parts.logits, parts.hit, parts.valid];
        let counted = |valid: &Value, x: Value| valid.where_(&x, &x.full_like(0.0));
        if !self.statistics {
            let made = Tape::extend(g, nodes, |[logits, hit, valid]| {
                [counted(&valid, loss(&logits.log_softmax(-1), &hit))]
            });
            return made.map(|ids| ids.to_vec());
        }
        let made = Tape::extend(g, nodes, |[logits, hit, valid]| {
            let logp = logits.log_softmax(-1);
            let lse = (&logits - &logp).max(&[1], false);
            let entropy = -(logp.exp() * &logp).sum(&[1], false);
            let square = (&logp * 2.0).exp().sum(&[1], false).log();
            let aim = hit.where_(&logits, &logits.full_like(0.0)).sum(&[1], false);
            let top = aim.greater_equal(&logits.max(&[1], false)).cast(DType::F32);
            let mean = logits.mean(&[1], false);
            [loss(&logp, &hit), lse, mean, entropy, square, top].map(|x| counted(&valid, x))
        });
        made.map(|ids| ids.to_vec())
    }

    /// cap · tanh(z / cap) and the tanh, when there is a cap; else `z`.
    fn capped(&self, g: &mut Graph, z: NodeId) -> Result<(NodeId, Option<NodeId>), IrError> {
        let Some(cap) = self.softcap else { return Ok((z, None)) };
        let c = g.fill(z, cap.0)?;
        let t = g.div(z, c)?;
        let t = g.unary(UnaryKind::Tanh, t)?;
        Ok((g.mul(t, c)?, Some(t)))
    }

    /// Token `t` of an evaluation; `None` where the target is ignored.
    pub(super) fn row(&self, cx: &Eval, t: usize) -> Result<Option<Row>, String> {
        let [hidden, weight, targets] = cx.args[..3] else {
            return Err("takes hidden, weight, targets".into());
        };
        let (k, vocab, s) = (hidden.shape[1], weight.shape[0], self.label_smoothing.0);
        let Ok(target) = usize::try_from(targets.int_at(t)) else { return Ok(None) };
        if target >= vocab {
            return Err(format!("target {target} is outside the vocabulary of {vocab}"));
        }
        let logits: Vec<f64> = (0..vocab)
            .map(|v| {
                let x: f64 = (0..k).map(|e| hidden.at(t * k + e) * weight.at(v * k + e)).sum();
                self.softcap.map_or(x, |c| c.0 * (x / c.0).tanh())
            })
            .collect();
        let top = logits.iter().fold(f64::NEG_INFINITY, |a, &b| ReduceKind::Max.step(a, b));
        let lse = top + logits.iter().map(|x| (x - top).exp()).sum::<f64>().ln();
        let mean = logits.iter().sum::<f64>() / vocab as f64;
        let loss = (1.0 - s) * (lse - logits[target]) + s * (lse - mean);
        Ok(Some(Row { logits, lse, target, loss }))
    }

    /// The losses of a weight sharded along the vocabulary over `axis`: the log-sum-exp of each shard is reduced over the ranks,
    /// and the logit of the target comes from the rank whose shard has it. A shard's log-sum-exp is this operator's loss with
    /// token 0 of the shard as the target, plus that token's logit; so no rank ever holds all logits of its shard either.
    fn vocabulary_parallel(&self, g: &mut Graph, args: &[NodeId], axis: &Axis) -> Result<NodeId, IrError> {
        let [_, weight, targets] = *args else { return Err(g.error("takes 3 arguments".into())) };
        let hidden = g.push(Pvary { over: axis.clone() }, &[args[0]])?;
        let each = g.ty(weight).shape[0].size().unwrap_or(0);
        let first = g.fill(targets, 0.0)?;
        let from_first = g.push(self.clone(), &[hidden, weight, first])?;
        let at_first = self.logit(g, hidden, weight, first)?;
        let lse = g.add(from_first, at_first)?; // [tokens], of the shard
        let (row, here) = local_index(g, targets, each, axis)?;
        let picked = self.logit(g, hidden, weight, row)?;
        let zero = g.fill(picked, 0.0)?;
        let picked = g.select(here, picked, zero)?;
        let over = || vec![axis.clone()];
        let picked = g.push(AllReduce { kind: ReduceOp::Sum, over: over() }, &[picked])?;
        let top = g.push(AllReduce { kind: ReduceOp::Max, over: over() }, &[lse])?;
        let below = g.sub(lse, top)?;
        let part = g.unary(UnaryKind::Exp, below)?;
        let sum = g.push(AllReduce { kind: ReduceOp::Sum, over: over() }, &[part])?;
        let sum = g.unary(UnaryKind::Log, sum)?;
        let lse = g.add(top, sum)?;
        let loss = g.sub(lse, picked)?;
        let none = g.fill(targets, 0.0)?;
        let valid = g.compare(CompareKind::Ge, targets, none)?;
        g.select(valid, loss, zero)
    }

    /// `hidden[t] · weight[rows[t]]` for each token, with the cap.
    fn logit(&self, g: &mut Graph, hidden: NodeId, weight: NodeId, rows: NodeId) -> Result<NodeId, IrError> {
        let (hidden, weight) = (g.cast(hidden, DType::F32)?, g.cast(weight, DType::F32)?);
        let rows = g.gather(weight, rows, 0)?; // [tokens, k]
        let products = g.mul(hidden, rows)?;
        let z = g.reduce(ReduceKind::Sum, products, &[1])?;
        Ok(self.capped(g, z)?.0)
    }
}

impl Operator for LinearCrossEntropy {
    const NAME: &'static str = "linear_cross_entropy";
    const TOLERANCE: [f64; 2] = [16.0, 2e-5];

    fn infer(&self, cx: &Infer) -> Inferred {
        let [hidden, weight, targets] = cx.exactly()?;
        float("hidden", hidden)?;
        let ([tokens, k], [vocab, kw]) = (hidden.shape.as_slice(), weight.shape.as_slice()) else {
            return Err(format!("wants hidden [tokens, k] and weight [vocab, k], got {hidden} and {weight}"));
        };
        if k != kw || hidden.dtype != weight.dtype || vocab.size().is_none_or(|v| v == 0) {
            return Err(format!("hidden {hidden} and weight {weight} do not go together"));
        }
        if *targets != Type::new(DType::I32, [tokens.clone()]) {
            return Err(format!("wants targets as i32[{tokens}], got {targets}"));
        }
        if !(0.0..1.0).contains(&self.label_smoothing.0) {
            return Err(format!("wants a label smoothing in [0, 1), got {}", self.label_smoothing.0));
        }
        if self.softcap.is_some_and(|c| c.0.is_nan() || c.0 <= 0.0) {
            return Err("wants a positive soft-cap".into());
        }
        let results = if self.statistics { 1 + Statistic::ALL.len() } else { 1 };
        Ok(vec![Type::new(DType::F32, [tokens.clone()]); results])
    }

    /// A weight sharded along the vocabulary (vocabulary-parallel cross-entropy).
    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        match cx.shard(1) {
            Some(shard) if *shard == Shard::of(0) && self.label_smoothing.0 == 0.0 && !self.statistics => {
                let args = vec![Placement::Replicate, Placement::Shard(shard.clone()), Placement::Replicate];
                vec![ShardingRule { args, outs: vec![Placement::Replicate] }]
            }
            _ => vec![],
        }
    }

    fn partition(&self, g: &mut Graph, args: &[NodeId], cx: &Partition) -> Result<NodeId, IrError> {
        match cx.shard(1) {
            Some(_) => self.vocabulary_parallel(g, args, cx.axis),
            None => g.push(self.clone(), args),
        }
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let mut results = vec![Vec::new(); cx.outs.len()];
        for t in 0..cx.shape()[0] {
            let row = self.row(cx, t)?.map_or([0.0; 1 + Statistic::ALL.len()], |row| row.results());
            results.iter_mut().zip(row).for_each(|(all, x)| all.push(x));
        }
        Ok(results.into_iter().enumerate().map(|(i, x)| cx.make(i, x)).collect())
    }

    /// One operator gives both products of the logits' gradient; it recomputes the logits a few tokens at a time.
    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let with = if self.statistics { Statistic::DIFFERENTIABLE } else { 1 };
        if cx.grads.get(1 + Statistic::LogSumSquare as usize).is_some_and(Option::is_some) {
            return Err(cx.graph.error("the log of the sum of squares has no gradient; detach it".into()));
        }
        let mut args = cx.args.to_vec();
        for (d, y) in cx.grads[..with].iter().zip(cx.outs) {
            args.push(d.map_or_else(|| cx.graph.fill(*y, 0.0), Ok)?);
        }
        let g = &mut *cx.graph;
        let both = g.push(LinearCrossEntropyGrad { forward: self.clone() }, &args)?;
        let mut back = Vec::with_capacity(3);
        for i in 0..2 {
            let d = g.part(both, i)?;
            back.push(Some(g.cast(d, g.ty(args[i as usize]).dtype)?));
        }
        back.push(None);
        Ok(back)
    }

    fn decompose(&self, g: &mut Graph, args: &[NodeId]) -> Option<Result<Vec<NodeId>, IrError>> {
        Some(self.parts(g, args).and_then(|parts| self.results(g, &parts)))
    }

    fn flops(&self, args: &[&Type], _: &[Type]) -> Dim {
        let (products, logits) =
            (&args[0].elements() * &args[1].shape[0], &args[0].shape[0] * &args[1].shape[0]);
        &(&products * &Dim::from(2)) + &(&logits * &Dim::from(5))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{apply, close, try_apply};

    fn op(s: f64, cap: Option<f64>) -> LinearCrossEntropy {
        LinearCrossEntropy { label_smoothing: Real(s), softcap: cap.map(Real), statistics: false }
    }

    #[test]
    fn two_classes_by_hand() {
        // logits (ln 3, 0): p = (3/4, 1/4)
        let hidden = Tensor::f32(&[3, 1], &[1.0, 1.0, 1.0]);
        let weight = Tensor::f32(&[2, 1], &[3f32.ln(), 0.0]);
        let targets = Tensor::int(DType::I32, &[3], vec![0, 1, -100]);
        let args = [hidden.clone(), weight.clone(), targets];
        let (a, b) = ((4.0f64 / 3.0).ln(), 4f64.ln());
        close(&apply(op(0.0, None), &args)[0], &[a, b, 0.0]);
        let m = 0.5 * (a + b);
        close(&apply(op(0.2, None), &args)[0], &[0.8 * a + 0.2 * m, 0.8 * b + 0.2 * m, 0.0]);
        let z = 0.5 * (3f64.ln() / 0.5).tanh();
        close(&apply(op(0.0, Some(0.5)), &args)[0], &[(1.0 + (-z).exp()).ln(), (1.0 + z.exp()).ln(), 0.0]);
        let all = apply(LinearCrossEntropy { statistics: true, ..op(0.0, None) }, &args);
        let (lse, p, n) = (4f64.ln(), 0.75f64, 0.5 * 3f64.ln());
        let entropy = 0.75 * a + 0.25 * b;
        let square = (p * p + 0.0625).ln();
        for (got, want) in
            all.iter().zip([[a, b], [lse, lse], [n, n], [entropy, entropy], [square, square], [1.0, 0.0]])
        {
            close(got, &[want[0], want[1], 0.0]);
        }
        let bad = Tensor::int(DType::I32, &[3], vec![0, 2, 0]);
        assert!(
            try_apply(op(0.0, None), &[hidden, weight, bad]).unwrap_err().to_string().contains("target 2")
        );
    }
}
