//! `reduce_scatter`: the ranks' partial sums become their sum, sharded.

use crate::eval::EvalCollective;
use crate::op::{Cotangents, Infer, Inferred, Operator, RankOutputs, Vjp};
use crate::ops::{AllGather, AllReduce, ReduceOp};
use crate::shard::{Axis, Propagate, Shard, ShardingRule, Traffic};
use crate::{Dim, Tensor, Type};
use serde::{Deserialize, Serialize};

/// The rank's shard of the sum of the ranks' arguments.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReduceScatter {
    /// How the sum is sharded.
    pub shard: Shard,
    /// The mesh axis whose ranks take part.
    pub over: Axis,
}

impl Operator for ReduceScatter {
    const NAME: &'static str = "reduce_scatter";

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        Ok(vec![self.shard.checked_local_type(x, self.over.size)?])
    }

    fn eval_collective(&self, ranks: &[Vec<&Tensor>], cx: &EvalCollective) -> RankOutputs {
        let sum =
            AllReduce { kind: ReduceOp::Sum, over: vec![self.over.clone()] }.eval_collective(ranks, cx)?;
        let n = ranks.len();
        Ok(sum.iter().enumerate().map(|(i, s)| vec![self.shard.slice(&s[0], i, n)]).collect())
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        cx.through(AllGather { shard: self.shard.clone(), over: self.over.clone() })
    }

    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        [cx.except(&[self.shard.dim]), cx.linear(&[&[0]])].concat()
    }

    fn traffic(&self, args: &[&Type], _outs: &[Type]) -> Option<Traffic> {
        Some(Traffic { bytes: args[0].bytes(), times: 1, ranks: self.over.size as u64 })
    }

    fn flops(&self, args: &[&Type], _: &[Type]) -> Dim {
        args[0].elements()
    }
}
