//! `own_slice`: each rank takes its piece of what all hold. Nothing is sent; it is the other direction of `all_gather`.

use crate::eval::{Eval, Meet};
use crate::op::{Cotangents, Infer, Inferred, Operator, Simpler, Vjp};
use crate::ops::{AllGather, Joint, ReduceScatter};
use crate::shard::{Axis, Cut, Way, Ways};
use crate::{Dim, Graph, NodeId, Op, Tensor, Type};
use serde::{Deserialize, Serialize};

/// The rank's piece of its argument.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OwnSlice {
    /// How the argument is cut.
    pub cut: Cut,
    /// The axis whose ranks share it.
    pub over: Axis,
}

impl Operator for OwnSlice {
    const NAME: &'static str = "own_slice";

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        Ok(vec![self.cut.one_of(x, self.over.size)?])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        cx.alone(std::slice::from_ref(&self.over))
    }

    fn meet(&self, ranks: &[Vec<&Tensor>], _: &Meet) -> Result<Vec<Vec<Tensor>>, String> {
        let n = ranks.len();
        Ok(ranks.iter().enumerate().map(|(i, r)| vec![self.cut.take(r[0], i, n)]).collect())
    }

    /// All ranks hold the argument, so all need its cotangent whole.
    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let (op, grad) = (AllGather { cut: self.cut.clone(), over: self.over.clone() }, cx.grad());
        Ok(vec![Some(cx.graph.push(op, &[grad])?)])
    }

    /// A piece of a sum is what `reduce_scatter` gives.
    fn simplify(&self, graph: &Graph, args: &[NodeId]) -> Option<Simpler> {
        let Op::AllReduce(sum) = &graph.node(args[0]).op else { return None };
        if sum.kind != Joint::Sum || sum.over != [self.over.clone()] {
            return None;
        }
        let op = ReduceScatter { cut: self.cut.clone(), over: self.over.clone() };
        Some(Simpler::Op(Box::new(op.into()), graph.node(args[0]).args.clone()))
    }

    fn ways(&self, cx: &Ways) -> Vec<Way> {
        [cx.beside(&[self.cut.dim]), cx.linear(&[&[0]])].concat()
    }

    fn flops(&self, _: &[&Type], _: &[Type]) -> Dim {
        Dim::default()
    }
}
