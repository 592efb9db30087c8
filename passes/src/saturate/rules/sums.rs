//! Rules of reductions. Backward graphs have many sums over dimensions that the forward graph broadcasts.

use super::Match;
use astrai_ir::ops::{Binary, BinaryKind, Expand, Op, Reduce, ReduceKind, Reshape};
use astrai_ir::{Dim, Shape};
use egg::Id;

fn reduce(s: &Match, name: &str, kinds: &[ReduceKind]) -> Option<Reduce> {
    match s.op(name)? {
        Op::Reduce(r) if kinds.contains(&r.kind) => Some(r),
        _ => None,
    }
}

use ReduceKind::{Max, Mean, Min, Prod, Sum};

/// The reduction of `expand(x)`, all but the factor that repeated elements make: `x` reduced (of one element along axes that
/// were repeated), then repeated along the others.
fn unrepeated(s: &mut Match, r: &Reduce) -> Option<Id> {
    let (own, shape, Op::Expand(e)) = (s.ty("x")?.shape, s.root_ty()?.shape, s.op("e")?) else { return None };
    r.axes.iter().any(|&a| own[a] != e.shape[a]).then_some(())?;
    let y = s.make_of(r.clone(), ["x"])?;
    s.make(Expand { shape }, &[y])
}

/// The maximum (minimum) over a broadcast axis is the element.
pub fn extreme_of_expand(s: &mut Match) -> Option<Id> {
    let r = reduce(s, "r", &[Max, Min])?;
    unrepeated(s, &r)
}

/// The sum over a broadcast axis of `n` elements is `n` times the element; the mean is the element.
pub fn sum_of_expand(s: &mut Match) -> Option<Id> {
    let r = reduce(s, "r", &[Sum, Mean])?;
    let (own, Op::Expand(e)) = (s.ty("x")?, s.op("e")?) else { return None };
    let repeated = r.axes.iter().filter(|&&a| own.shape[a] != e.shape[a]).map(|&a| &e.shape[a]);
    let n = Dim::product(repeated).size()?;
    let one = unrepeated(s, &r)?;
    if r.kind == Mean {
        return Some(one);
    }
    let ty = s.root_ty().filter(|t| t.dtype.is_float())?;
    let n = s.fill(&ty, n as f64)?;
    s.make(Binary { kind: BinaryKind::Mul }, &[one, n])
}

/// A reduction over axes of one element each is a view.
fn of_one(s: &mut Match, kinds: &[ReduceKind]) -> Option<Id> {
    let (r, own) = (reduce(s, "r", kinds)?, s.ty("x")?);
    if r.axes.iter().any(|&a| !own.shape[a].is_one()) {
        return None;
    }
    s.make_of(Reshape { shape: s.root_ty()?.shape }, ["x"])
}

/// The maximum (minimum) over axes of size 1.
pub fn extreme_of_one(s: &mut Match) -> Option<Id> {
    of_one(s, &[Max, Min, Prod])
}

/// The sum over axes of size 1: not exact, since the sum of -0 is 0.
pub fn sum_of_one(s: &mut Match) -> Option<Id> {
    of_one(s, &[Sum, Mean])
}

/// Two nested reductions of one kind as one reduction over both sets of axes.
fn both(s: &mut Match, kinds: &[ReduceKind]) -> Option<Id> {
    let (outer, inner) = (reduce(s, "r", kinds)?, reduce(s, "s", kinds)?);
    if outer.kind != inner.kind {
        return None;
    }
    let kept: Vec<usize> = (0..s.ty("x")?.rank()).filter(|a| !inner.axes.contains(a)).collect();
    let more = outer.axes.iter().map(|&a| kept.get(a).copied()).collect::<Option<Vec<_>>>()?;
    let mut axes = [inner.axes, more].concat();
    axes.sort_unstable();
    s.make_of(Reduce { kind: outer.kind, axes }, ["x"])
}

/// Nested maxima (minima).
pub fn extreme_of_extremes(s: &mut Match) -> Option<Id> {
    both(s, &[Max, Min])
}

/// Nested sums.
pub fn sum_of_sums(s: &mut Match) -> Option<Id> {
    both(s, &[Sum])
}

/// `Σx + Σy` over the same axes is `Σ(x + y)`.
pub fn added(s: &mut Match) -> Option<Id> {
    let (a, b) = (reduce(s, "r", &[Sum])?, reduce(s, "s", &[Sum])?);
    if a != b || s.ty("x")? != s.ty("y")? {
        return None;
    }
    let sum = s.make_of(Binary { kind: BinaryKind::Add }, ["x", "y"])?;
    s.make(a, &[sum])
}

/// `Σ(x·c)` is `(Σx)·c` for a factor that is constant along the reduced axes.
pub fn of_scaled(s: &mut Match) -> Option<Id> {
    let (r, c) = (reduce(s, "r", &[Sum])?, s.ty("c")?);
    if !c.dtype.is_float() || r.axes.iter().any(|&a| !c.shape[a].is_one()) {
        return None;
    }
    let kept: Shape = (0..c.rank()).filter(|a| !r.axes.contains(a)).map(|a| c.shape[a].clone()).collect();
    let sum = s.make_of(r, ["x"])?;
    let c = s.make_of(Reshape { shape: kept }, ["c"])?;
    let c = s.make(Expand { shape: s.root_ty()?.shape }, &[c])?;
    s.make(Binary { kind: BinaryKind::Mul }, &[sum, c])
}
