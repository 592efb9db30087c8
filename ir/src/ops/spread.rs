//! `spread`: a value that all ranks hold, from here on used by each in its own way. It changes and sends nothing; it is there
//! for its gradient, the sum of what the ranks' uses give.

use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp};
use crate::ops::{AllReduce, Joint};
use crate::shard::{Axis, Way, Ways};
use crate::{Dim, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// The argument.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spread {
    /// The axis whose ranks use it differently.
    pub over: Axis,
}

impl Operator for Spread {
    const NAME: &'static str = "spread";

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        Ok(vec![(*x).clone()])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        Ok(vec![cx.args[0].clone()])
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let (op, grad) = (AllReduce { kind: Joint::Sum, over: vec![self.over.clone()] }, cx.grad());
        Ok(vec![Some(cx.graph.push(op, &[grad])?)])
    }

    fn ways(&self, cx: &Ways) -> Vec<Way> {
        [cx.pointwise(), cx.linear(&[&[0]])].concat()
    }

    fn flops(&self, _: &[&Type], _: &[Type]) -> Dim {
        Dim::default()
    }
}
