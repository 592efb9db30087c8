//! `all_gather`: the pieces that ranks hold become the whole, which all hold.

use crate::eval::{Eval, Meet};
use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp, axis_in};
use crate::ops::OwnSlice;
use crate::shard::{Axis, Cut, Traffic, Way, Ways};
use crate::{Dim, Tensor, Type};
use serde::{Deserialize, Serialize};

/// The ranks' arguments joined along a dimension, on every rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllGather {
    /// How the whole was cut.
    pub cut: Cut,
    /// The axis along which ranks meet.
    pub over: Axis,
}

impl Operator for AllGather {
    const NAME: &'static str = "all_gather";

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        axis_in(self.cut.dim, x)?;
        let mut ty = (*x).clone();
        ty.shape[self.cut.dim] = &ty.shape[self.cut.dim] * &Dim::from(self.over.size);
        if !self.cut.fits(&ty, self.over.size) {
            return Err(format!("cannot join {} pieces {x} along {:?}", self.over.size, self.cut));
        }
        Ok(vec![ty])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        cx.alone(std::slice::from_ref(&self.over))
    }

    fn meet(&self, ranks: &[Vec<&Tensor>], _: &Meet) -> Result<Vec<Vec<Tensor>>, String> {
        let whole = self.cut.join(&ranks.iter().map(|r| r[0]).collect::<Vec<_>>());
        Ok(vec![vec![whole]; ranks.len()])
    }

    /// The whole's cotangent is whole on every rank: each takes its piece.
    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let (op, grad) = (OwnSlice { cut: self.cut.clone(), over: self.over.clone() }, cx.grad());
        Ok(vec![Some(cx.graph.push(op, &[grad])?)])
    }

    fn ways(&self, cx: &Ways) -> Vec<Way> {
        [cx.beside(&[self.cut.dim]), cx.linear(&[&[0]])].concat()
    }

    fn traffic(&self, _args: &[&Type], outs: &[Type]) -> Option<Traffic> {
        Some(Traffic { bytes: outs[0].bytes(), times: 1, ranks: self.over.size as u64 })
    }

    fn flops(&self, _: &[&Type], _: &[Type]) -> Dim {
        Dim::default()
    }
}
