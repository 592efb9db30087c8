//! `part`: one output of a node with several outputs (get-tuple-element).

use crate::op::{Infer, Inferred, Operator};
use crate::{Tensor, eval::Eval};
use serde::{Deserialize, Serialize};

/// Output `index` of its argument. The graph itself types and evaluates it, since only it sees all outputs of a node.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Which output.
    pub index: u32,
}

impl Operator for Part {
    const NAME: &'static str = "part";
    const FLOPS: usize = 0;

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x] = cx.exactly()?;
        Ok(vec![(*x).clone()])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        Ok(vec![cx.args[0].clone()])
    }
}
