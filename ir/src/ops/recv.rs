//! `recv`: point-to-point receive of a value from another pipeline stage.

use super::send::check;
use crate::eval::Eval;
use crate::op::{Infer, Inferred, Operator};
use crate::shard::Axis;
use crate::{Dim, Tensor, Type};
use serde::{Deserialize, Serialize};

/// The argument of the `send` of the same label.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecvFrom {
    /// The axis whose ranks are the stages.
    pub over: Axis,
    /// The stage that sends.
    pub from: usize,
    /// Name of the value, once for each pair of stages.
    pub label: String,
    /// Type of the value.
    pub ty: Type,
}

impl Operator for RecvFrom {
    const NAME: &'static str = "recv";

    fn infer(&self, cx: &Infer) -> Inferred {
        let [] = cx.exactly()?;
        check(&self.over, self.from)?;
        Ok(vec![self.ty.clone()])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        cx.without_group(std::slice::from_ref(&self.over))
    }

    fn flops(&self, _: &[&Type], _: &[Type]) -> Dim {
        Dim::default()
    }
}
