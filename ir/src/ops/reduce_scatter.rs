//! `reduce_scatter`: the summands that ranks hold become their sum, of which each holds a piece.

use crate::eval::{Eval, Meet};
use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp};
use crate::ops::{AllGather, AllReduce, Joint};
use crate::shard::{Axis, Cut, Traffic, Way, Ways};
use crate::{Dim, Tensor, Type};
use serde::{Deserialize, Serialize};

/// The rank's piece of the sum of the ranks' arguments.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReduceScatter {
    /// How the sum is cut.
    pub cut: Cut,
    /// The axis along which ranks meet.
    pub over: Axis,
}

impl Operator for ReduceScatter {
    const NAME: &'static str = "reduce_scatter";

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        Ok(vec![self.cut.one_of(x, self.over.size)?])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        cx.alone(std::slice::from_ref(&self.over))
    }

    fn meet(&self, ranks: &[Vec<&Tensor>], cx: &Meet) -> Result<Vec<Vec<Tensor>>, String> {
        let sum = AllReduce { kind: Joint::Sum, over: vec![self.over.clone()] }.meet(ranks, cx)?;
        let n = ranks.len();
        Ok(sum.iter().enumerate().map(|(i, s)| vec![self.cut.take(&s[0], i, n)]).collect())
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let (op, grad) = (AllGather { cut: self.cut.clone(), over: self.over.clone() }, cx.grad());
        Ok(vec![Some(cx.graph.push(op, &[grad])?)])
    }

    fn ways(&self, cx: &Ways) -> Vec<Way> {
        [cx.beside(&[self.cut.dim]), cx.linear(&[&[0]])].concat()
    }

    fn traffic(&self, args: &[&Type], _outs: &[Type]) -> Option<Traffic> {
        Some(Traffic { bytes: args[0].bytes(), times: 1, ranks: self.over.size as u64 })
    }

    fn flops(&self, args: &[&Type], _: &[Type]) -> Dim {
        args[0].elements()
    }
}
