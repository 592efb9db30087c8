//! `state`: a value that persists between runs (KV cache pages, optimiser moments, gradient accumulators); `store` gives its next
//! version.

use crate::Type;
use crate::op::{Infer, Inferred, Operator};
use serde::{Deserialize, Serialize};

/// A value that persists between runs, by name: its version at the start of a run.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Name of the value.
    pub name: String,
    /// Its type.
    pub ty: Type,
}

impl Operator for State {
    const NAME: &'static str = "state";
    const FLOPS: usize = 0;

    fn infer(&self, cx: &Infer) -> Inferred {
        let [] = cx.exactly()?;
        Ok(vec![self.ty.clone()])
    }
}
