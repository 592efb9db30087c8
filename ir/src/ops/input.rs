//! `input`: a value given at each run.

use crate::Type;
use crate::op::{Infer, Inferred, Operator};
use serde::{Deserialize, Serialize};

/// A value given at each run, by name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Input {
    /// Name of the value.
    pub name: String,
    /// Its type.
    pub ty: Type,
}

impl Operator for Input {
    const NAME: &'static str = "input";
    const FLOPS: usize = 0;

    fn infer(&self, cx: &Infer) -> Inferred {
        let [] = cx.exactly()?;
        Ok(vec![self.ty.clone()])
    }
}
