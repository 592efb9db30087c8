//! `local_slice`: a replicated value becomes sharded: each rank slices its shard out of it. Nothing is sent. It is the inverse of
//! `all_gather`.

use crate::eval::{Eval, EvalCollective};
use crate::op::{Cotangents, Infer, Inferred, Operator, Simpler, Vjp};
use crate::ops::{AllGather, ReduceOp, ReduceScatter};
use crate::shard::{Axis, Propagate, Shard, ShardingRule};
use crate::{Dim, Graph, NodeId, Op, Tensor, Type};
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

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        Ok(vec![self.shard.checked_local_type(x, self.over.size)?])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        cx.without_group(std::slice::from_ref(&self.over))
    }

    fn eval_collective(
        &self,
        ranks: &[Vec<&Tensor>],
        _: &EvalCollective,
    ) -> Result<Vec<Vec<Tensor>>, String> {
        let n = ranks.len();
        Ok(ranks.iter().enumerate().map(|(i, r)| vec![self.shard.slice(r[0], i, n)]).collect())
    }

    /// The argument is replicated, so its cotangent must be too.
    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let (op, grad) = (AllGather { shard: self.shard.clone(), over: self.over.clone() }, cx.grad());
        Ok(vec![Some(cx.graph.push(op, &[grad])?)])
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

    fn flops(&self, _: &[&Type], _: &[Type]) -> Dim {
        Dim::default()
    }
}
