//! `all_gather`: a sharded value becomes replicated.

use crate::eval::EvalCollective;
use crate::op::{Cotangents, Infer, Inferred, Operator, RankOutputs, Vjp, axis_in};
use crate::ops::LocalSlice;
use crate::shard::{Axis, Propagate, Shard, ShardingRule, Traffic};
use crate::{Dim, Tensor, Type};
use serde::{Deserialize, Serialize};

/// The ranks' arguments concatenated along a dimension, on every rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllGather {
    /// How the value was sharded.
    pub shard: Shard,
    /// The mesh axis whose ranks take part.
    pub over: Axis,
}

impl Operator for AllGather {
    const NAME: &'static str = "all_gather";
    const FLOPS: usize = 0;

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        axis_in(self.shard.dim, x)?;
        let mut ty = (*x).clone();
        ty.shape[self.shard.dim] = &ty.shape[self.shard.dim] * &Dim::from(self.over.size);
        if !self.shard.divides(&ty, self.over.size) {
            return Err(format!("cannot join {} pieces {x} along {:?}", self.over.size, self.shard));
        }
        Ok(vec![ty])
    }

    fn eval_collective(&self, ranks: &[Vec<&Tensor>], _: &EvalCollective) -> RankOutputs {
        let value = self.shard.gather(&ranks.iter().map(|r| r[0]).collect::<Vec<_>>());
        Ok(vec![vec![value]; ranks.len()])
    }

    /// The cotangent is replicated: each rank takes its shard of it.
    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        cx.through(LocalSlice { shard: self.shard.clone(), over: self.over.clone() })
    }

    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        [cx.except(&[self.shard.dim]), cx.linear(&[&[0]])].concat()
    }

    fn traffic(&self, _args: &[&Type], outs: &[Type]) -> Option<Traffic> {
        Some(Traffic { bytes: outs[0].bytes(), times: 1, ranks: self.over.size as u64 })
    }
}
