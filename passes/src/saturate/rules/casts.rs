//! Rules of casts. Only widening casts are moved or dropped; narrowing casts (roundings) stay where they are.

use super::Match;
use astrai_ir::ops::{Cast, Op};
use egg::Id;

/// `cast(cast(x: a → b) → c)` is `cast(x: a → c)` when b represents every value of a.
pub fn of_cast(s: &mut Match) -> Option<Id> {
    let (Op::Cast(outer), Op::Cast(inner)) = (s.op("c")?, s.op("d")?) else { return None };
    inner.dtype.represents(s.ty("x")?.dtype).then_some(())?;
    s.make_of(outer, ["x"])
}

/// The operator of a cast, when it is exact on the type of its argument.
fn widening(s: &Match, cast: &str, of: &str) -> Option<Cast> {
    let Op::Cast(c) = s.op(cast)? else { return None };
    c.dtype.represents(s.ty(of)?.dtype).then_some(c)
}

/// `cast(view(x))` is `view(cast(x))`.
pub fn into_view(s: &mut Match) -> Option<Id> {
    let (c, view) = (widening(s, "c", "x")?, s.op("v")?);
    let wide = s.make_of(c, ["x"])?;
    s.make(view, &[wide])
}

/// `cast(view(cast(x: a → b)) → a)` is `view(x)` when b represents every value of a.
pub fn of_widened_view(s: &mut Match) -> Option<Id> {
    let (Op::Cast(narrow), Op::Cast(wide)) = (s.op("c")?, s.op("d")?) else { return None };
    let own = s.ty("x")?.dtype;
    if narrow.dtype != own || !wide.dtype.represents(own) {
        return None;
    }
    s.make_of(s.op("v")?, ["x"])
}

/// `slice(cast(x))` is `cast(slice(x))`.
pub fn out_of_view(s: &mut Match) -> Option<Id> {
    let c = widening(s, "c", "x")?;
    let part = s.make_of(s.op("v")?, ["x"])?;
    s.make(c, &[part])
}

/// Rows are gathered before they are widened.
pub fn out_of_gather(s: &mut Match) -> Option<Id> {
    let c = widening(s, "c", "x")?;
    let rows = s.make_of(s.op("v")?, ["x", "i"])?;
    s.make(c, &[rows])
}

/// Two values are concatenated before they are widened.
pub fn out_of_concat(s: &mut Match) -> Option<Id> {
    let (c, d) = (widening(s, "c", "x")?, widening(s, "d", "y")?);
    if c != d || s.ty("x")?.dtype != s.ty("y")?.dtype {
        return None;
    }
    let joined = s.make_of(s.op("v")?, ["x", "y"])?;
    s.make(c, &[joined])
}
