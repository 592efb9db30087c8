//! `scatter`: slices written or added at integer indices along one axis; the inverse of `gather`.

use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp, same};
use crate::ops::Gather;
use crate::tensor::{ravel, unravel};
use crate::{Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// What happens to the element that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScatterKind {
    /// Replaced; of several updates of one element the last in row-major order stays.
    Set,
    /// Added to, in row-major order of the updates.
    Add,
}

/// `scatter(x, indices, updates)`: `x` with `updates`, shaped as the `gather` at `indices` would be, set or added there.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scatter {
    /// The axis of `x` that is indexed.
    pub axis: usize,
    /// Leading axes that `x` and `indices` share; at most `axis`.
    pub batch: usize,
    /// Set or add.
    pub kind: ScatterKind,
}

impl Scatter {
    fn gather(&self) -> Gather {
        Gather { axis: self.axis, batch: self.batch }
    }
}

impl Operator for Scatter {
    const NAME: &'static str = "scatter";

    fn infer(&self, cx: &Infer) -> Inferred {
        let [x, indices, updates] = cx.exactly()?;
        let shape = self.gather().shape(x, indices)?;
        same("updates and the gather they invert", updates, &Type { dtype: x.dtype, shape })?;
        Ok(vec![(*x).clone()])
    }

    fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
        let [x, indices, updates] = cx.args else { return Err("takes 3 arguments".into()) };
        let n = x.shape[self.axis];
        let mut out = x.reals();
        for i in 0..updates.len() {
            let (mut at, index) = self.gather().split(&unravel(i, &updates.shape), indices.shape.len());
            let v = indices.int_at(ravel(&index, &indices.shape));
            if v < 0 || v as usize >= n {
                return Err(format!("index {v} is outside axis {} of size {n}", self.axis));
            }
            at[self.axis] = v as usize;
            let o = ravel(&at, &x.shape);
            out[o] = if self.kind == ScatterKind::Add { out[o] + updates.at(i) } else { updates.at(i) };
        }
        cx.real(out)
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let (indices, updates, g) = (cx.args[1], cx.args[2], cx.grad());
        let du = cx.graph.push(self.gather(), &[g, indices])?;
        let dx = match self.kind {
            ScatterKind::Add => g,
            // Several updates of one element: which one stayed is not known from the gradient alone.
            ScatterKind::Set => {
                let zero = cx.graph.fill(updates, 0.0)?;
                cx.graph.push(self.clone(), &[g, indices, zero])?
            }
        };
        Ok(vec![Some(dx), None, Some(du)])
    }
}
