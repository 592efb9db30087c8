//! `pvary`: a replicated value that every rank uses differently from here on. It is the identity and sends nothing; its gradient
//! is the all-reduce of the ranks' cotangents (JAX's `pvary`, `copy_to_tensor_model_parallel_region` in Megatron-LM,
//! arXiv:1909.08053).

use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp};
use crate::ops::{AllReduce, ReduceOp};
use crate::shard::{Axis, Propagate, ShardingRule};
use crate::{Tensor, eval::Eval};
use serde::{Deserialize, Serialize};

/// The argument, unchanged.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pvary {
    /// The mesh axis along which the uses differ.
    pub over: Axis,
}

impl Operator for Pvary {
    const NAME: &'static str = "pvary";
    const FLOPS: usize = 0;

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        Ok(vec![(*x).clone()])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        Ok(vec![cx.args[0].clone()])
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        cx.through(AllReduce { kind: ReduceOp::Sum, over: vec![self.over.clone()] })
    }

    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        [cx.pointwise(), cx.linear(&[&[0]])].concat()
    }
}
