//! Rules of attention: repeated key heads (grouped-query attention), factors of the queries, and weight absorption for keys and
//! values that are projections of one latent (multi-head latent attention, DeepSeek-V2, arXiv:2405.04434).

use super::{Match, Rounding, rounded};
use astrai_ir::ops::{Attention, Concat, Dot, Gather, Op, Part, Permute, Reshape, Slice};
use astrai_ir::{Dim, Real};
use egg::Id;

fn attention(s: &Match) -> Option<Attention> {
    if let Op::Attention(a) = s.op("a")? { Some(a) } else { None }
}

/// Attention on `q`, `k`, `v` and the trailing arguments of the match.
fn attend(s: &mut Match, a: Attention, q: Id, k: Id, v: Id) -> Option<Id> {
    let args = [vec![q, k, v], s.rest()].concat();
    s.make(a, &args)
}

/// `n`, when the match repeats each head of `x` `[rows, kv, d]` `n` times: by a reshape to `[rows, kv, 1, d]`, an expand to
/// `[rows, kv, n, d]` and a reshape to `[rows, kv·n, d]`.
fn repeated(s: &Match, x: &str, [first, then, last]: [&str; 3]) -> Option<Dim> {
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

/// Attention over repeated key heads is grouped-query attention over the heads that are repeated.
pub fn grouped(s: &mut Match) -> Option<Id> {
    let n = repeated(s, "k", ["s", "e", "r"])?;
    if repeated(s, "v", ["u", "f", "t"])? != n {
        return None;
    }
    let (a, q, k, v) = (attention(s)?, s.var("q")?, s.var("k")?, s.var("v")?);
    attend(s, a, q, k, v)
}

/// A factor of every query is a factor of every score.
pub fn scaled_query(s: &mut Match) -> Option<Id> {
    let (a, factor) = (attention(s)?, s.facts("s")?.constant?);
    // The kernels want a positive scale.
    let scale = a.scale.0 * factor;
    if factor <= 0.0 || !scale.is_normal() {
        return None;
    }
    let (q, k, v) = (s.var("q")?, s.var("k")?, s.var("v")?);
    attend(s, Attention { scale: Real(scale), ..a }, q, k, v)
}

/// A projection of the latent `l` `[rows, latent]` to heads: its weight with an axis of heads, and the axes of head, width and
/// latent.
struct Projection {
    weight: Id,
    axes: [usize; 3],
}

/// The projection `reshape(dot(l, w))` `[rows, heads, width]`.
fn projection(s: &mut Match, d: &str, w: &str, view: &str) -> Option<Projection> {
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

/// Per head `x` `[t, heads, a]` times the projection over its axis `over`, rounded: `[t, heads, b]`.
fn by_heads(s: &mut Match, x: Id, p: &Projection, over: usize, rounding: &Rounding) -> Option<Id> {
    let d = Dot { batch: vec![(1, p.axes[0])], contract: vec![(2, p.axes[over])] };
    let y = s.make(d, &[x, p.weight])?;
    let y = rounded(s, y, rounding)?;
    s.make(Permute { axes: vec![1, 0, 2] }, &[y])
}

/// Attention whose keys and values are projections of a latent.
struct Latent {
    keys: Projection,
    values: Projection,
    /// Components of a key head before those that all heads share.
    nope: Dim,
    /// The shared components, `[rows, 1, rope]`.
    shared: Id,
    rounded: Rounding,
}

/// Weight absorption: the matched attention as multi-query attention over the latent `l` itself. Queries go through the keys'
/// projection before it, results through the values' projection after it. Scores, and so their log-sum-exp, keep their values.
/// Where keys and values were rounded, the projected queries and results are rounded instead: between a query and its scores,
/// and between a value and the result, the number of roundings stays the same.
fn absorb(s: &mut Match, of: Latent) -> Option<Id> {
    let (Op::Part(part), a, l) = (s.op("p")?, attention(s)?, s.ty("l")?) else { return None };
    let (rows, latent) = (l.shape[0].clone(), l.shape[1].clone());
    let rope = s.g[of.shared].data.ty().shape[2].clone();
    let (whole, latents) = (s.var("q")?, s.var("l")?);
    let plain = s.make(Slice { axis: 2, start: Dim::from(0), len: of.nope.clone() }, &[whole])?;
    let turned = s.make(Slice { axis: 2, start: of.nope, len: rope }, &[whole])?;
    let absorbed = by_heads(s, plain, &of.keys, 1, &of.rounded)?;
    let q = s.make(Concat { axis: 2 }, &[absorbed, turned])?;
    let apart = s.make(Reshape { shape: vec![rows, Dim::from(1), latent.clone()] }, &[latents])?;
    let k = s.make(Concat { axis: 2 }, &[apart, of.shared])?;
    let k = rounded(s, k, &of.rounded)?;
    let v = s.make(Slice { axis: 2, start: Dim::from(0), len: latent }, &[k])?;
    let both = attend(s, a, q, k, v)?;
    let y = s.make(Part { index: part.index }, &[both])?;
    if part.index > 0 {
        return Some(y);
    }
    let y = rounded(s, y, &of.rounded)?;
    by_heads(s, y, &of.values, 2, &None)
}

/// The components of keys that all heads share, `[rows, 1, rope]`, which `x` broadcasts to all heads.
fn shared(s: &Match, x: Id, rows: &Dim, heads: &Dim) -> Option<()> {
    let (own, Op::Expand(e)) = (&s.g[x].data.ty().shape, s.op("x")?) else { return None };
    let [n, one, rope] = own.as_slice() else { return None };
    let wide = [rows.clone(), heads.clone(), rope.clone()];
    (n == rows && one.is_one() && e.shape == wide).then_some(())
}

/// Weight absorption where keys (but for components shared by the heads) and values are separate projections of one latent: see
/// [`absorb`].
pub fn latent(s: &mut Match) -> Option<Id> {
    let (Op::Concat(c), q, l) = (s.op("c")?, s.ty("q")?, s.ty("l")?) else { return None };
    let (keys, values) = (projection(s, "d", "wk", "r")?, projection(s, "e", "wv", "t")?);
    let heads_of = |s: &Match, view: &str| match s.op(view) {
        Some(Op::Reshape(r)) => r.shape.get(1..3).map(|d| (d[0].clone(), d[1].clone())),
        _ => None,
    };
    let ((heads, nope), (of_values, _)) = (heads_of(s, "r")?, heads_of(s, "t")?);
    let turned = s.var("kr")?;
    shared(s, turned, &l.shape[0], &heads)?;
    if c.axis != 2 || q.shape[1] != heads || heads != of_values {
        return None;
    }
    absorb(s, Latent { keys, values, nope, shared: turned, rounded: None })
}

/// Weight absorption where one projection gives, for every head, its key's components and then its value.
pub fn joint_latent(s: &mut Match) -> Option<Id> {
    let (Op::Concat(c), q, l) = (s.op("c")?, s.ty("q")?, s.ty("l")?) else { return None };
    let (Op::Slice(k), Op::Slice(v), Op::Reshape(apart)) = (s.op("u")?, s.op("v")?, s.op("r")?) else {
        return None;
    };
    let rounded = match (s.op("b"), s.op("f")) {
        (Some(Op::Cast(narrow)), Some(Op::Cast(wide))) => Some([narrow, wide]),
        (None, None) => None,
        _ => return None,
    };
    let both = projection(s, "d", "w", "r")?;
    let heads = apart.shape[1].clone();
    let turned = s.var("kr")?;
    shared(s, turned, &l.shape[0], &heads)?;
    if [c.axis, k.axis, v.axis] != [2; 3] || k.start != Dim::from(0) || q.shape[1] != heads {
        return None;
    }
    let mut rows = |start: &Dim, len: &Dim| {
        let cut = Slice { axis: both.axes[1], start: start.clone(), len: len.clone() };
        Some(Projection { weight: s.make(cut, &[both.weight])?, axes: both.axes })
    };
    let (keys, values) = (rows(&k.start, &k.len)?, rows(&v.start, &v.len)?);
    absorb(s, Latent { keys, values, nope: k.len, shared: turned, rounded })
}

/// Paged attention over pages gathered into a contiguous list is paged attention over the pages in place, with page tables
/// translated by the list.
pub fn pages_in_place(s: &mut Match) -> Option<Id> {
    let (a, Op::Gather(g), Op::Slice(v)) = (attention(s)?, s.op("g")?, s.op("v")?) else { return None };
    let (Op::Reshape(by_pages), Op::Reshape(rows)) = (s.op("s")?, s.op("r")?) else { return None };
    let (page, x, list) = (Dim::from(a.page?), s.ty("x")?, s.ty("i")?);
    let [all, one, width] = x.shape.as_slice() else { return None };
    let pages = all.div_exact(&page)?;
    let [used] = list.shape.as_slice() else { return None };
    let plain = g.axis == 0 && g.batch == 0 && one.is_one() && v.axis == 2;
    let there = [pages, page.clone(), width.clone()];
    if !plain || by_pages.shape != there || rows.shape != [used * &page, Dim::from(1), width.clone()] {
        return None;
    }
    let mut keys = s.var("x")?;
    if s.var("c").is_some() {
        let Op::Cast(c) = s.op("c")? else { return None };
        keys = s.make(c, &[keys])?;
    }
    let (q, list) = (s.var("q")?, s.var("i")?);
    let (starts, tables, lens) = (s.var("0")?, s.var("1")?, s.var("2")?);
    let tables = s.make(Gather { axis: 0, batch: 0 }, &[list, tables])?;
    let values = s.make(v, &[keys])?;
    s.make(a, &[q, keys, values, starts, tables, lens])
}
