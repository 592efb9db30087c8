//! `recv`: point-to-point receive of a value from another pipeline stage.

use super::send::check;
use crate::Type;
use crate::op::{Infer, Inferred, Operator};
use crate::shard::Axis;
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
    const FLOPS: usize = 0;

    fn infer(&self, cx: &Infer) -> Inferred {
        let [] = cx.exactly()?;
        check(&self.over, self.from)?;
        Ok(vec![self.ty.clone()])
    }
}
