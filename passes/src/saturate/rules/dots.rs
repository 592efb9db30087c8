//! Rules of dots: transposes become dimension numbers, factors commute with contractions, products and sums of weights are folded
//! or distributed. No rule decides which side is better: extraction does, by the cost at the program's sizes.

use super::{Match, rounded};
use astrai_ir::ops::{Binary, BinaryKind, Dot, Expand, Gather, Op, Permute, Reshape};
use astrai_ir::{Dim, Shape, Type};
use egg::Id;

fn dot(s: &Match, name: &str) -> Option<Dot> {
    if let Op::Dot(d) = s.op(name)? { Some(d) } else { None }
}

/// `x · w` over the last axis of `x` and axis `k` of a matrix.
fn linear(k: usize, rank: usize) -> Dot {
    Dot { batch: vec![], contract: vec![(rank - 1, k)] }
}

/// The axis of the matrix `w` that a plain dot sums over.
fn summed(d: &Dot, x: &Type, w: &Type) -> Option<usize> {
    match d.contract.as_slice() {
        [(last, k)] if d.batch.is_empty() && last + 1 == x.rank() && w.rank() == 2 => Some(*k),
        _ => None,
    }
}

/// [`summed`] of a dot of bound variables.
fn plain(s: &Match, d: &str, x: &str, w: &str) -> Option<usize> {
    summed(&dot(s, d)?, &s.ty(x)?, &s.ty(w)?)
}

fn weights(s: &Match, names: &[&str]) -> Option<()> {
    names.iter().all(|n| s.facts(n).is_some_and(|f| f.weight_only)).then_some(())
}

fn computed(s: &Match, name: &str) -> Option<()> {
    (!s.facts(name)?.weight_only).then_some(())
}

fn mul(s: &mut Match, a: Id, b: Id) -> Option<Id> {
    s.make(Binary { kind: BinaryKind::Mul }, &[a, b])
}

fn add(s: &mut Match, a: Id, b: Id) -> Option<Id> {
    s.make(Binary { kind: BinaryKind::Add }, &[a, b])
}

fn swapped(pairs: &[(usize, usize)]) -> Vec<(usize, usize)> {
    pairs.iter().map(|&(a, b)| (b, a)).collect()
}

/// A dot whose free axes are exchanged by a permute is the dot of the exchanged arguments.
pub fn permuted(s: &mut Match) -> Option<Id> {
    let (Op::Permute(p), d) = (s.op("p")?, dot(s, "d")?) else { return None };
    let (l, r) = (s.ty("x")?.rank(), s.ty("w")?.rank());
    let (batch, left, right) = (d.batch.len(), d.left_free(l).len(), d.right_free(r).len());
    let exchanged: Vec<usize> =
        (0..batch).chain(batch + left..batch + left + right).chain(batch..batch + left).collect();
    if p.axes != exchanged {
        return None;
    }
    s.make_of(Dot { batch: swapped(&d.batch), contract: swapped(&d.contract) }, ["w", "x"])
}

/// A dot of a permuted argument is a dot of the argument itself under other dimension numbers, where its free axes keep their
/// order.
pub fn of_permuted(s: &mut Match) -> Option<Id> {
    let (Op::Permute(p), d) = (s.op("p")?, dot(s, "d")?) else { return None };
    let free: Vec<usize> = d.left_free(p.axes.len()).into_iter().map(|a| p.axes[a]).collect();
    if !free.is_sorted() {
        return None;
    }
    let there = |pairs: &[(usize, usize)]| pairs.iter().map(|&(a, b)| (p.axes[a], b)).collect();
    s.make_of(Dot { batch: there(&d.batch), contract: there(&d.contract) }, ["x", "w"])
}

fn rows(s: &Match) -> Option<Gather> {
    match s.op("g")? {
        Op::Gather(g) if g.axis == 0 && g.batch == 0 && s.ty("w")?.rank() == 2 => Some(g),
        _ => None,
    }
}

/// A gather of rows of a product is the product of the gathered rows.
pub fn gather_of_dot(s: &mut Match) -> Option<Id> {
    let (g, k) = (rows(s)?, plain(s, "d", "w", "a")?);
    let (a, rank) = (s.var("a")?, s.ty("i")?.rank() + 1);
    let picked = s.make_of(g, ["w", "i"])?;
    s.make(linear(k, rank), &[picked, a])
}

/// The product of gathered rows of a table and a matrix is a gather from the folded product, when that is no larger than the
/// table.
pub fn product_of_table(s: &mut Match) -> Option<Id> {
    weights(s, &["w", "a"])?;
    let (g, a) = (rows(s)?, s.ty("a")?);
    let d = dot(s, "d")?;
    let &[(_, k)] = d.contract.as_slice() else { return None };
    let plain = d.batch.is_empty() && a.rank() == 2 && d.contract[0].0 == s.ty("i")?.rank();
    if !plain || a.shape[1 - k].size()? > a.shape[k].size()? {
        return None;
    }
    let i = s.var("i")?;
    let table = s.make_of(linear(k, 2), ["w", "a"])?;
    s.make(g, &[table, i])
}

/// `dot(x·r, w)` is `dot(x, w)·r` for a factor `r` with one number a row.
pub fn row_scale_out(s: &mut Match) -> Option<Id> {
    let (d, r) = (dot(s, "d")?, s.ty("r")?);
    let right = d.right_free(s.ty("w")?.rank()).len();
    if !d.batch.is_empty() || d.contract.iter().any(|p| !r.shape[p.0].is_one()) {
        return None;
    }
    let own = d.left_free(r.rank()).into_iter().map(|a| r.shape[a].clone());
    let shape: Shape = own.chain(vec![Dim::from(1); right]).collect();
    let y = s.make_of(d, ["x", "w"])?;
    let r = s.make_of(Reshape { shape }, ["r"])?;
    let r = s.make(Expand { shape: s.root_ty()?.shape }, &[r])?;
    mul(s, y, r)
}

/// [`row_scale_out`] from right to left: cheaper where rows of `x` are shorter than rows of the result.
pub fn row_scale_in(s: &mut Match) -> Option<Id> {
    let (d, r, x) = (dot(s, "d")?, s.ty("r")?, s.ty("x")?);
    let free = d.left_free(x.rank());
    if !d.batch.is_empty() || r.shape[free.len()..].iter().any(|n| !n.is_one()) {
        return None;
    }
    let at = |a: usize| free.iter().position(|f| *f == a).map_or(Dim::from(1), |i| r.shape[i].clone());
    let shape: Shape = (0..x.rank()).map(at).collect();
    let (left, w) = (s.var("x")?, s.var("w")?);
    let r = s.make_of(Reshape { shape }, ["r"])?;
    let r = s.make(Expand { shape: x.shape }, &[r])?;
    let scaled = mul(s, left, r)?;
    s.make(d, &[scaled, w])
}

/// `x·(A·B)` is `(x·A)·B`.
pub fn factor(s: &mut Match) -> Option<Id> {
    weights(s, &["a", "b"])?;
    computed(s, "x")?;
    let (d, e, x) = (dot(s, "d")?, dot(s, "e")?, s.ty("x")?);
    let &[(ca, cb)] = e.contract.as_slice() else { return None };
    let matrices = e.batch.is_empty() && s.ty("a")?.rank() == 2 && s.ty("b")?.rank() == 2;
    let &[(last, k)] = d.contract.as_slice() else { return None };
    if !matrices || !d.batch.is_empty() || last + 1 != x.rank() {
        return None;
    }
    let (left, a, b) = (s.var("x")?, s.var("a")?, s.var("b")?);
    // The product's axis 0 is the free one of `a`, its axis 1 that of `b`.
    let ((first, free), (then, sum)) = match k {
        1 => ((b, 1 - cb), (a, ca)),
        _ => ((a, 1 - ca), (b, cb)),
    };
    let low = s.make(linear(free, x.rank()), &[left, first])?;
    s.make(linear(sum, x.rank()), &[low, then])
}

/// `(x·A)·B` is `x·(A·B)`, with the product of weights folded.
pub fn product_ahead(s: &mut Match) -> Option<Id> {
    weights(s, &["a", "b"])?;
    computed(s, "x")?;
    let (d, e, x) = (dot(s, "d")?, dot(s, "e")?, s.ty("x")?);
    let ka = summed(&d, &x, &s.ty("a")?)?;
    let kb = summed(&e, &x, &s.ty("b")?)?;
    let (left, a, b) = (s.var("x")?, s.var("a")?, s.var("b")?);
    // [n, k]: the layout that weight packing expects.
    let both = s.make(Dot { batch: vec![], contract: vec![(kb, 1 - ka)] }, &[b, a])?;
    s.make(linear(1, x.rank()), &[left, both])
}

/// `x·A + x·B` is `x·(A + B)`, with the sum of weights folded.
pub fn sum_ahead(s: &mut Match) -> Option<Id> {
    weights(s, &["a", "b"])?;
    computed(s, "x")?;
    let (ka, kb) = (plain(s, "d", "x", "a")?, plain(s, "e", "x", "b")?);
    let (d, x, a, mut b) = (dot(s, "d")?, s.var("x")?, s.var("a")?, s.var("b")?);
    if ka != kb {
        b = s.make(Permute { axes: vec![1, 0] }, &[b])?;
    }
    let both = add(s, a, b)?;
    s.make(d, &[x, both])
}

/// `x·(A + B)` is `x·A + x·B`.
pub fn distribute(s: &mut Match) -> Option<Id> {
    weights(s, &["a", "b"])?;
    computed(s, "x")?;
    let d = dot(s, "d")?;
    let (p, q) = (s.make_of(d.clone(), ["x", "a"])?, s.make_of(d, ["x", "b"])?);
    add(s, p, q)
}

/// `x·(s·w)` is `s·(x·w)`.
pub fn scale_out(s: &mut Match) -> Option<Id> {
    weights(s, &["w"])?;
    computed(s, "x")?;
    let (d, factor, ty) = (dot(s, "d")?, s.facts("s")?.constant?, s.root_ty()?);
    let y = s.make_of(d, ["x", "w"])?;
    let factor = s.fill(&ty, factor)?;
    mul(s, y, factor)
}

/// `(s·x)·w` and `s·(x·w)` are `x·(s·w)`, the factor folded into the weight.
pub fn scale_into_weight(s: &mut Match) -> Option<Id> {
    weights(s, &["w"])?;
    computed(s, "x")?;
    let (d, factor, ty) = (dot(s, "d")?, s.facts("s")?.constant?, s.ty("w")?);
    let (x, w, factor) = (s.var("x")?, s.var("w")?, s.fill(&ty, factor)?);
    let scaled = mul(s, w, factor)?;
    s.make(d, &[x, scaled])
}

/// `dot(norm(x)·g, w)` is `dot(norm(x), g·w)`. If the norm is rounded before the dot, it stays rounded, and the folded weight is
/// rounded alike.
pub fn norm_into_dot(s: &mut Match) -> Option<Id> {
    weights(s, &["g", "w"])?;
    computed(s, "x")?;
    let (Op::RmsNorm(norm), x, w, g) = (s.op("n")?, s.ty("x")?, s.ty("w")?, s.ty("g")?) else { return None };
    if s.facts("g")?.constant == Some(1.0) {
        return None;
    }
    let d = dot(s, "d")?;
    let k = summed(&d, &x, &w)?;
    let (left, weight, gain) = (s.var("x")?, s.var("w")?, s.var("g")?);
    let ones = s.fill(&g, 1.0)?;
    let mut n = s.make(norm, &[left, ones])?;
    let mut shape = vec![Dim::from(1); 2];
    shape[k] = g.shape[0].clone();
    let gain = s.make(Reshape { shape }, &[gain])?;
    let gain = s.make(Expand { shape: w.shape.clone() }, &[gain])?;
    let mut folded = mul(s, weight, gain)?;
    if s.pattern == 1 {
        let (Op::Cast(narrow), Op::Cast(wide)) = (s.op("b")?, s.op("c")?) else { return None };
        let rounding = Some([narrow, wide]);
        (n, folded) = (rounded(s, n, &rounding)?, rounded(s, folded, &rounding)?);
    }
    s.make(d, &[n, folded])
}
