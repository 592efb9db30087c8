//! `all_reduce`: the ranks' partial sums become their sum, replicated; or their maximum.

use crate::eval::EvalCollective;
use crate::op::{Cotangents, Infer, Inferred, Operator, RankOutputs, Simpler, Vjp};
use crate::shard::{Axis, Propagate, ShardingRule, Traffic};
use crate::{Graph, NodeId, Op, Tensor, Type};
use serde::{Deserialize, Serialize};

/// The reduction of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReduceOp {
    /// Their sum.
    Sum,
    /// Their maximum, element by element.
    Max,
}

/// The sum or maximum of the ranks' arguments, on every rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllReduce {
    /// The reduction.
    pub kind: ReduceOp,
    /// The mesh axes whose ranks take part.
    pub over: Vec<Axis>,
}

impl Operator for AllReduce {
    const NAME: &'static str = "all_reduce";

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        Ok(vec![(*x).clone()])
    }

    fn eval_collective(&self, ranks: &[Vec<&Tensor>], cx: &EvalCollective) -> RankOutputs {
        let first = ranks[0][0];
        let mut sum = first.reals();
        for r in &ranks[1..] {
            for (s, x) in sum.iter_mut().zip(r[0].reals()) {
                *s = match self.kind {
                    ReduceOp::Sum => *s + x,
                    ReduceOp::Max => super::ReduceKind::Max.step(*s, x),
                };
            }
        }
        let sum = match (first.dtype.is_float(), cx.exact) {
            (false, _) => Tensor::int(first.dtype, &first.shape, sum.into_iter().map(|x| x as i64).collect()),
            (_, true) => Tensor::exact(first.dtype, &first.shape, sum),
            _ => Tensor::float(first.dtype, &first.shape, sum),
        };
        Ok(vec![vec![sum]; ranks.len()])
    }

    /// Every summand has the cotangent of the sum. A maximum is a shift that cancels and has no gradient.
    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        Ok(vec![(self.kind == ReduceOp::Sum).then(|| cx.grad())])
    }

    fn simplify(&self, graph: &Graph, args: &[NodeId]) -> Option<Simpler> {
        let Op::AllReduce(inner) = &graph.node(args[0]).op else { return None };
        if inner.kind != self.kind {
            return None;
        }
        let over = [&inner.over[..], &self.over].concat();
        let op = AllReduce { kind: self.kind, over };
        Some(Simpler::Op(Box::new(op.into()), graph.node(args[0]).args.clone()))
    }

    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        let sums: &[&[usize]] = if self.kind == ReduceOp::Sum { &[&[0]] } else { &[] };
        [cx.pointwise(), cx.linear(sums)].concat()
    }

    fn traffic(&self, _args: &[&Type], outs: &[Type]) -> Option<Traffic> {
        Some(Traffic {
            bytes: outs[0].bytes(),
            times: 2,
            ranks: self.over.iter().map(|a| a.size as u64).product(),
        })
    }
}
