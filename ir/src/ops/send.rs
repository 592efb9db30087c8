//! `send`: point-to-point send of a value to another pipeline stage, whose program has the `recv` of the same label.

use crate::op::{Infer, Inferred, Operator};
use crate::shard::{Axis, Traffic};
use crate::{DType, Type};
use serde::{Deserialize, Serialize};

/// Sends the argument to a stage. The result, an f32 scalar 0, is declared an output of the graph, which keeps the send alive.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SendTo {
    /// The axis whose ranks are the stages.
    pub over: Axis,
    /// The stage that receives.
    pub to: usize,
    /// Name of the value, once for each pair of stages.
    pub label: String,
}

/// Refuses a stage that the axis does not have.
pub(super) fn check(over: &Axis, stage: usize) -> Result<(), String> {
    if stage < over.size { Ok(()) } else { Err(format!("names stage {stage} of {over}")) }
}

impl Operator for SendTo {
    const NAME: &'static str = "send";
    const FLOPS: usize = 0;

    fn infer(&self, cx: &Infer) -> Inferred {
        let [_] = cx.exactly()?;
        check(&self.over, self.to)?;
        Ok(vec![Type::scalar(DType::F32)])
    }

    fn traffic(&self, args: &[&Type], _: &[Type]) -> Option<Traffic> {
        Some(Traffic::point_to_point(args[0].bytes()))
    }
}
