//! Rules of views: slices of concatenations, and pointwise functions computed before they are broadcast.

use super::Match;
use astrai_ir::ops::{Binary, BinaryKind, Op, Slice, Unary, UnaryKind};
use egg::Id;

/// A slice that lies within one argument of a concatenation is a slice of that argument.
pub fn slice_of_concat(s: &mut Match) -> Option<Id> {
    let (Op::Slice(cut), Op::Concat(c)) = (s.op("s")?, s.op("c")?) else { return None };
    if cut.axis != c.axis {
        return None;
    }
    let first = s.ty("x")?.shape[c.axis].size()?;
    let (start, len) = (cut.start.size()?, cut.len.size()?);
    if start + len <= first {
        return s.make_of(cut, ["x"]);
    }
    let start = start.checked_sub(first)?.into();
    s.make_of(Slice { start, ..cut }, ["y"])
}

/// The concatenation of two adjacent slices is one slice.
pub fn concat_of_slices(s: &mut Match) -> Option<Id> {
    let (Op::Concat(c), Op::Slice(a), Op::Slice(b)) = (s.op("c")?, s.op("s")?, s.op("t")?) else {
        return None;
    };
    if a.axis != c.axis || b.axis != c.axis || &a.start + &a.len != b.start {
        return None;
    }
    s.make_of(Slice { axis: c.axis, start: a.start, len: &a.len + &b.len }, ["x"])
}

const BINARY: [BinaryKind; 4] = [BinaryKind::Add, BinaryKind::Sub, BinaryKind::Mul, BinaryKind::Div];

/// `f(view x, view y)` is `view f(x, y)` for one view of one shape.
pub fn out_of_binary(s: &mut Match) -> Option<Id> {
    let (v, w) = (s.op("v")?, s.op("w")?);
    if v != w || s.ty("x")? != s.ty("y")? {
        return None;
    }
    let small = s.make_of(Binary { kind: BINARY[s.pattern % BINARY.len()] }, ["x", "y"])?;
    s.make(v, &[small])
}

const UNARY: [UnaryKind; 7] = {
    use UnaryKind::*;
    [Neg, Exp, Log, Sqrt, Rsqrt, Sin, Cos]
};

/// `f(expand x)` is `expand f(x)`.
pub fn out_of_unary(s: &mut Match) -> Option<Id> {
    let (v, kind) = (s.op("v")?, *UNARY.get(s.pattern)?);
    let small = s.make_of(Unary { kind }, ["x"])?;
    s.make(v, &[small])
}
