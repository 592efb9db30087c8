//! `local_slice`: a replicated value becomes sharded: each rank slices its shard out of it. Nothing is sent. It is the inverse of
//! `all_gather`.

use crate::eval::EvalCollective;
use crate::op::{Cotangents, Infer, Inferred, Operator, RankOutputs, Simpler, Vjp};
use crate::ops::{AllGather, ReduceOp, ReduceScatter};
use crate::shard::{Axis, Propagate, Shard, ShardingRule};
use crate::{Graph, NodeId, Op, Tensor};
use serde::{Deserialize, Serialize};

/// The rank's shard of its argument.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LocalSlice {
    /// How the result is sharded.
    pub shard: Shard,
    /// The mesh axis over whose ranks it is sharded.
    pub over: Axis,
}

impl Operator for LocalSlice {
    const NAME: &'static str = "local_slice";
    const FLOPS: usize = 0;

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        Ok(vec![self.shard.checked_local_type(x, self.over.size)?])
    }

    fn eval_collective(&self, ranks: &[Vec<&Tensor>], _: &EvalCollective) -> RankOutputs {
        let n = ranks.len();
        Ok(ranks.iter().enumerate().map(|(i, r)| vec![self.shard.slice(r[0], i, n)]).collect())
    }

    /// The argument is replicated, so its cotangent must be too.
    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        cx.through(AllGather { shard: self.shard.clone(), over: self.over.clone() })
    }

    /// A slice of an all-reduce is a reduce-scatter.
    fn simplify(&self, graph: &Graph, args: &[NodeId]) -> Option<Simpler> {
        let Op::AllReduce(sum) = &graph.node(args[0]).op else { return None };
        if sum.kind != ReduceOp::Sum || sum.over != [self.over.clone()] {
            return None;
        }
        let op = ReduceScatter { shard: self.shard.clone(), over: self.over.clone() };
        Some(Simpler::Op(Box::new(op.into()), graph.node(args[0]).args.clone()))
    }

    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        [cx.except(&[self.shard.dim]), cx.linear(&[&[0]])].concat()
    }
}
