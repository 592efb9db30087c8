//! Rules of pointwise arithmetic: signs, neutral elements, chains of constants, sums of biases.

use super::Match;
use astrai_ir::ops::{Binary, BinaryKind, Unary, UnaryKind};
use astrai_ir::{DType, Tensor};
use egg::Id;

/// `-(-x)` is `x`.
pub fn itself(s: &mut Match) -> Option<Id> {
    s.var("x")
}

/// `x + (-y)` is `x - y`.
pub fn difference(s: &mut Match) -> Option<Id> {
    s.make_of(Binary { kind: BinaryKind::Sub }, ["x", "y"])
}

/// `x · 1` and `x / 1` are `x`.
pub fn times_one(s: &mut Match) -> Option<Id> {
    if s.facts("c")?.constant? != 1.0 {
        return None;
    }
    s.var("x")
}

/// `x · -1` is `-x`.
pub fn times_minus_one(s: &mut Match) -> Option<Id> {
    if s.facts("c")?.constant? != -1.0 || !s.ty("x")?.dtype.is_float() {
        return None;
    }
    s.make_of(Unary { kind: UnaryKind::Neg }, ["x"])
}

/// The number rounded to the dtype; `None` where it overflows or underflows to zero, so that it is not folded.
fn kept(dtype: DType, x: f64) -> Option<f64> {
    let x = Tensor::float(dtype, &[1], vec![x]).at(0);
    (dtype.is_float() && x.is_normal()).then_some(x)
}

/// `(x · c) · d` is `x · (c·d)`.
pub fn chain(s: &mut Match) -> Option<Id> {
    let (c, d, ty) = (s.facts("c")?.constant?, s.facts("d")?.constant?, s.ty("x")?);
    if s.facts("x")?.constant.is_some() {
        return None;
    }
    let (x, both) = (s.var("x")?, s.fill(&ty, kept(ty.dtype, c * d)?)?);
    s.make(Binary { kind: BinaryKind::Mul }, &[x, both])
}

/// `x / c` is `x · (1/c)`.
pub fn reciprocal(s: &mut Match) -> Option<Id> {
    let (c, ty) = (s.facts("c")?.constant?, s.ty("x")?);
    let (x, factor) = (s.var("x")?, s.fill(&ty, kept(ty.dtype, 1.0 / c)?)?);
    s.make(Binary { kind: BinaryKind::Mul }, &[x, factor])
}

/// `(y + a) + b` is `y + (a + b)` for weights `a` and `b` that are broadcast alike.
pub fn biases_ahead(s: &mut Match) -> Option<Id> {
    let weights = s.facts("a")?.weight_only && s.facts("b")?.weight_only;
    let (e, f) = (s.op("e")?, s.op("f")?);
    if !weights || s.facts("y")?.weight_only || e != f || s.ty("a")? != s.ty("b")? {
        return None;
    }
    let y = s.var("y")?;
    let sum = s.make_of(Binary { kind: BinaryKind::Add }, ["a", "b"])?;
    let sum = s.make(e, &[sum])?;
    s.make(Binary { kind: BinaryKind::Add }, &[y, sum])
}
