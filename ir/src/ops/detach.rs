//! `detach`: an identity through which no gradient flows (stop-gradient). Differentiation reads it; canonicalisation removes it.

use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp};
use crate::shard::{Label, Propagate, ShardingRule};
use crate::{Graph, IrError, NodeId, Tensor, eval::Eval};
use serde::{Deserialize, Serialize};

/// The argument, whose cotangent is nothing.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Detach {}

impl Operator for Detach {
    const NAME: &'static str = "detach";
    const FLOPS: usize = 0;

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        Ok(vec![x.clone()])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        Ok(vec![cx.args[0].clone()])
    }

    fn vjp(&self, _: &mut Vjp) -> Cotangents {
        Ok(vec![None])
    }

    fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
        let labels: [Vec<Label>; 1] = [(0..cx.args[0].rank()).map(Some).collect()];
        cx.labelled(&labels, &labels, &[])
    }

    fn decompose(&self, _: &mut Graph, args: &[NodeId]) -> Option<Result<Vec<NodeId>, IrError>> {
        Some(Ok(vec![args[0]]))
    }
}
