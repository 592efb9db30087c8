//! Rules of attention: heads that are repeated in vain, factors of the queries, and keys and values that are products of one
//! latent (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434).

use super::Site;
use astrai_ir::ops::{Attention, Concat, Dot, Op, Part, Permute, Reshape, Slice};
use astrai_ir::{Dim, Real};
use egg::Id;

fn attention(s: &Site) -> Option<Attention> {
    if let Op::Attention(a) = s.op("a")? { Some(a) } else { None }
}

/// Attention on `q`, `k`, `v` and what the pattern bound behind them.
fn attend(s: &mut Site, a: Attention, q: Id, k: Id, v: Id) -> Option<Id> {
    let args = [vec![q, k, v], s.rest()].concat();
    s.make(a, &args)
}

/// `[rows, kv, d]`, when the pattern repeats each of its heads `[rows, kv, 1, d]`, `[rows, kv, n, d]`, `[rows, kv·n, d]`; with `n`.
fn repeated(s: &Site, x: &str, [first, then, last]: [&str; 3]) -> Option<Dim> {
    let (Op::Reshape(a), Op::Expand(b), Op::Reshape(c)) = (s.op(first)?, s.op(then)?, s.op(last)?) else {
        return None;
    };
    let ty = s.ty(x)?;
    let [rows, kv, d] = ty.shape.as_slice() else { return None };
    let n = b.shape.get(2)?.clone();
    let apart = [rows.clone(), kv.clone(), Dim::from(1), d.clone()];
    let wide = [rows.clone(), kv.clone(), n.clone(), d.clone()];
    let joined = [rows.clone(), kv * &n, d.clone()];
    (a.shape == apart && b.shape == wide && c.shape == joined).then_some(n)
}

/// Query heads share key heads that are there once: attention's own grouping.
pub fn grouped(s: &mut Site) -> Option<Id> {
    let n = repeated(s, "k", ["s", "e", "r"])?;
    if repeated(s, "v", ["u", "f", "t"])? != n {
        return None;
    }
    let (a, q, k, v) = (attention(s)?, s.var("q")?, s.var("k")?, s.var("v")?);
    attend(s, a, q, k, v)
}

/// A factor of every query is a factor of every score.
pub fn scaled_query(s: &mut Site) -> Option<Id> {
    let (a, factor) = (attention(s)?, s.facts("s")?.constant?);
    // The kernels want a positive scale.
    let scale = a.scale.0 * factor;
    if factor <= 0.0 || !scale.is_normal() {
        return None;
    }
    let (q, k, v) = (s.var("q")?, s.var("k")?, s.var("v")?);
    attend(s, Attention { scale: Real(scale), ..a }, q, k, v)
}

/// A projection of the latent `l` `[rows, latent]` to heads: its weight apart by heads, and the axes of head, width and latent.
struct Projection {
    weight: Id,
    axes: [usize; 3],
}

/// The projection `reshape(dot(l, w))` `[rows, heads, width]`.
fn projection(s: &mut Site, d: &str, w: &str, view: &str) -> Option<Projection> {
    let (Op::Dot(d), Op::Reshape(view), l, ty) = (s.op(d)?, s.op(view)?, s.ty("l")?, s.ty(w)?) else {
        return None;
    };
    let [rows, latent] = l.shape.as_slice() else { return None };
    let [own, heads, width] = view.shape.as_slice() else { return None };
    let &[(1, k)] = d.contract.as_slice() else { return None };
    if !d.batch.is_empty() || ty.rank() != 2 || own != rows {
        return None;
    }
    let (shape, axes) = match k {
        1 => (vec![heads.clone(), width.clone(), latent.clone()], [0, 1, 2]),
        _ => (vec![latent.clone(), heads.clone(), width.clone()], [1, 2, 0]),
    };
    let weight = s.var(w)?;
    Some(Projection { weight: s.make(Reshape { shape }, &[weight])?, axes })
}

/// Per head `x` `[t, heads, a]` times the projection over its axis `over`: `[t, heads, b]`.
fn by_heads(s: &mut Site, x: Id, p: &Projection, over: usize) -> Option<Id> {
    let d = Dot { batch: vec![(1, p.axes[0])], contract: vec![(2, p.axes[over])] };
    let y = s.make(d, &[x, p.weight])?;
    s.make(Permute { axes: vec![1, 0, 2] }, &[y])
}

/// Attention whose keys are products of a latent (and a part shared by the heads) and whose values are products of the same
/// latent is attention of one head of keys over the latent itself: queries go through the keys' projection first, results
/// through the values' projection afterwards. Scores, and so their log-sum-exp, stay what they are.
pub fn latent(s: &mut Site) -> Option<Id> {
    let (Op::Part(part), a, Op::Concat(c)) = (s.op("p")?, attention(s)?, s.op("c")?) else { return None };
    let (Op::Reshape(shared), q) = (s.op("s")?, s.ty("q")?) else { return None };
    let (keys, values) = (projection(s, "d", "wk", "r")?, projection(s, "e", "wv", "t")?);
    let heads_of = |s: &Site, view: &str| match s.op(view) {
        Some(Op::Reshape(r)) => r.shape.get(1..3).map(|d| (d[0].clone(), d[1].clone())),
        _ => None,
    };
    let ((heads, nope), (of_values, _)) = (heads_of(s, "r")?, heads_of(s, "t")?);
    let l = s.ty("l")?;
    let (rows, latent) = (l.shape[0].clone(), l.shape[1].clone());
    let [own, one, rope] = shared.shape.as_slice() else { return None };
    if c.axis != 2 || *own != rows || !one.is_one() || q.shape[1] != heads || heads != of_values {
        return None;
    }
    let (whole, kr, latents) = (s.var("q")?, s.var("kr")?, s.var("l")?);
    let plain = s.make(Slice { axis: 2, start: Dim::from(0), len: nope.clone() }, &[whole])?;
    let turned = s.make(Slice { axis: 2, start: nope, len: rope.clone() }, &[whole])?;
    let absorbed = by_heads(s, plain, &keys, 1)?;
    let q = s.make(Concat { axis: 2 }, &[absorbed, turned])?;
    let v = s.make(Reshape { shape: vec![rows, Dim::from(1), latent] }, &[latents])?;
    let kr = s.make(shared, &[kr])?;
    let k = s.make(Concat { axis: 2 }, &[v, kr])?;
    let both = attend(s, a, q, k, v)?;
    let y = s.make(Part { index: part.index }, &[both])?;
    match part.index {
        0 => by_heads(s, y, &values, 2),
        _ => Some(y),
    }
}
