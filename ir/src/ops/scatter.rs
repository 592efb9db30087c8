//! `scatter`: slices written or added at integer indices along one axis; the inverse of `gather`.

use crate::op::{Cotangents, Infer, Inferred, Operator, Vjp, same};
use crate::ops::{CompareKind, Gather, Iota};
use crate::tensor::{ravel, unravel};
use crate::{DType, Dim, IrError, NodeId, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// How an update changes an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScatterKind {
    /// The update replaces the element; of several updates of one element the last in row-major order wins.
    Set,
    /// The update is added to the element, in row-major order of the updates.
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

    /// A mask of the updates that win, those that are the last at their place: every update scatters its number, and wins if it
    /// gathers the same number back.
    fn winners(&self, cx: &mut Vjp) -> Result<NodeId, IrError> {
        let (x, indices, updates) = (cx.args[0], cx.args[1], cx.args[2]);
        let g = &mut *cx.graph;
        let shape = g.ty(updates).shape.clone();
        let flat = Type::new(DType::I32, [Dim::product(&shape)]);
        let number = g.push(Iota { ty: flat, axis: 0 }, &[])?;
        let number = g.reshape(number, shape)?;
        let ty = g.ty(x).with(DType::I32);
        let none = g.constant(ty, -1.0)?;
        let last = g.push(self.clone(), &[none, indices, number])?;
        let last = g.push(self.gather(), &[last, indices])?;
        g.compare(CompareKind::Eq, last, number)
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
        let mut ints: Vec<i64> =
            if x.dtype.is_float() { vec![] } else { (0..x.len()).map(|i| x.int_at(i)).collect() };
        let mut out = x.reals();
        for i in 0..updates.len() {
            let (mut at, index) = self.gather().split(&unravel(i, &updates.shape), indices.shape.len());
            let v = indices.int_at(ravel(&index, &indices.shape));
            if v < 0 || v as usize >= n {
                return Err(format!("index {v} is outside axis {} of size {n}", self.axis));
            }
            at[self.axis] = v as usize;
            let o = ravel(&at, &x.shape);
            let add = self.kind == ScatterKind::Add;
            if x.dtype.is_float() {
                out[o] = if add { out[o] + updates.at(i) } else { updates.at(i) };
            } else {
                ints[o] = if add { ints[o].wrapping_add(updates.int_at(i)) } else { updates.int_at(i) };
            }
        }
        if x.dtype.is_float() { cx.real(out) } else { Ok(vec![Tensor::int(x.dtype, cx.shape(), ints)]) }
    }

    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        let (indices, updates, g) = (cx.args[1], cx.args[2], cx.grad());
        let du = cx.graph.push(self.gather(), &[g, indices])?;
        if self.kind == ScatterKind::Add {
            return Ok(vec![Some(g), None, Some(du)]);
        }
        let zero = cx.graph.fill(updates, 0.0)?;
        let dx = cx.graph.push(self.clone(), &[g, indices, zero])?;
        let stayed = self.winners(cx)?;
        Ok(vec![Some(dx), None, Some(cx.graph.select(stayed, du, zero)?)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::apply;

    #[test]
    fn set_keeps_the_last_and_add_sums() {
        let x = Tensor::f32(&[3], &[1.0, 2.0, 3.0]);
        let (at, u) = (Tensor::int(DType::I32, &[3], vec![2, 0, 2]), Tensor::f32(&[3], &[10.0, 20.0, 30.0]));
        let run =
            |kind| apply(Scatter { axis: 0, batch: 0, kind }, &[x.clone(), at.clone(), u.clone()])[0].reals();
        assert_eq!(run(ScatterKind::Set), [20.0, 2.0, 30.0]);
        assert_eq!(run(ScatterKind::Add), [21.0, 2.0, 43.0]);
    }
}
