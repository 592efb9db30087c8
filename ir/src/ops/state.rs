//! `state`: a value that outlives a run (KV pages, moments); `store` makes its next version.

use crate::op::{Infer, Inferred, Operator};
use crate::{Dim, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// A value that outlives a run, by name; this is its version on entry.
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

    fn infer(&self, cx: &Infer) -> Inferred {
        let [] = cx.exactly()?;
        Ok(vec![self.ty.clone()])
    }

    fn eval(&self, _: &Eval) -> Result<Vec<Tensor>, String> {
        Err(format!("`{}` has no value", self.name))
    }

    fn flops(&self, _: &[&Type], _: &[Type]) -> Dim {
        Dim::default()
    }
}
