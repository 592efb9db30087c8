//! The archetype `dot`: sums of products on the dot core, with a row-wise prologue on the left and a pointwise epilogue. In: a dot.
//! Out: how its sides lie in the buffers they are read from, when views and widening casts leave them regular enough; else loops
//! compute it.

use super::{Archetype, Limits, memory};
use astrai_ir::backend::{Epilogue, Root, Takes};
use astrai_ir::ops::{Dot, Op};
use astrai_ir::region::{DotBatch, DotCodes, DotForm, Form, Piece, Side};
use astrai_ir::strides::{AtCast, View};
use astrai_ir::{DType, Dim, Graph, Layout, Narrow, NodeId, Type};

pub(super) const ARCHETYPE: Archetype =
    Archetype { of: |op| matches!(op, Op::Dot(_)), root: Some(root), layouts, form, ..Archetype::NONE };

/// What a dot's kernel takes along.
fn root(g: &Graph, id: NodeId, limits: &Limits) -> Root {
    let args = &g.node(id).args;
    let form = on_graph(g, id, limits);
    let left = match &form {
        Some(f) if f.rows => Takes::Prologue,
        Some(DotForm { left: Some(side), .. }) => Takes::Memory(side.at),
        _ => memory(g, args[0]),
    };
    let right = match codes(g, id, limits) {
        Some((codes, of)) => {
            let parts = [Some(codes.at), Some(of.scales), of.offsets];
            parts.into_iter().flatten().map(Takes::Memory).collect()
        }
        None => vec![form.map_or_else(|| memory(g, args[1]), |f| Takes::Memory(f.right.at))],
    };
    Root { takes: [vec![left], right].concat(), epilogue: Epilogue::Pointwise }
}

/// The form of a piece around a dot.
fn form(piece: &Piece, limits: &Limits) -> Option<Form> {
    let dot = |id| {
        let form = on_graph(&piece.graph, id, limits)?;
        let left = form.left.and_then(|side| in_buffer(piece, side));
        let right = in_buffer(piece, form.right)?;
        let packed = left.as_ref().is_some_and(|l| piece.layout(l.at).is_packed());
        let codes = match form.codes {
            Some(codes) => Some(codes_in(piece, &right, codes, limits)?),
            None => None,
        };
        let (node, batch, m, n, k, rows) = (form.node, form.batch, form.m, form.n, form.k, form.rows);
        let fits = !packed && (rows || left.is_some());
        fits.then_some(DotForm { node, batch, m, n, k, left, rows, right, codes })
    };
    piece.graph.ids().find_map(dot).map(Form::Dot)
}

/// The form of a dot in a graph, before it is known which values are buffers; `None` when loops have to compute it.
pub(super) fn on_graph(g: &Graph, id: NodeId, limits: &Limits) -> Option<DotForm<NodeId>> {
    let node = g.node(id);
    let Op::Dot(d) = &node.op else { return None };
    if d.batch.len() > 1 || d.contract.is_empty() {
        return None;
    }
    let batch = match d.batch.first() {
        Some(&(a, b)) => Some(batch(g, (node.args[0], a), (node.args[1], b))?),
        None => None,
    };
    let (l, r) = (g.ty(node.args[0]), g.ty(node.args[1]));
    let (lf, rf) = (d.left_free(l.rank()), d.right_free(r.rank()));
    let size = |t: &Type, axes: &[usize]| Dim::product(axes.iter().map(|&a| &t.shape[a]));
    let mut contract = d.contract.clone();
    contract.sort_unstable();
    let (lk, rk): (Vec<usize>, Vec<usize>) = contract.into_iter().unzip();
    let k = size(l, &lk);
    let last = lk == [l.rank() - 1];
    let (right, codes) = match codes(g, id, limits) {
        Some((right, codes)) => (right, Some(codes)),
        None => (side(g, node.args[1], &rf, &rk)?, None),
    };
    let x = left(g, id, &codes);
    let form = DotForm {
        node: id,
        m: size(l, &lf),
        n: size(r, &rf),
        left: side(g, x, &lf, &lk),
        // Rows that are rounded are the core's alone, and those by codes.
        rows: batch.is_none()
            && last
            && !rounds(&g.node(x).op)
            && k.size().is_some_and(|k| (1..=limits.row).contains(&k)),
        right,
        codes,
        batch,
        k,
    };
    let fits = if form.codes.is_some() { form.rows } else { form.rows || form.left.is_some() };
    fits.then_some(form)
}

/// True for what the core does to rows before it multiplies them by integer codes.
pub fn rounds(op: &Op) -> bool {
    matches!(op, Op::FakeQuant(_))
}

/// The left side of a dot, before the core rounds it where it does.
pub fn left(g: &Graph, id: NodeId, codes: &Option<DotCodes<impl Sized>>) -> NodeId {
    let x = g.node(id).args[0];
    if codes.as_ref().is_some_and(|c| c.rounded.is_some()) { g.node(x).args[0] } else { x }
}

/// The codes of weights in the place of a dot's right side `[n, k]`.
fn codes(g: &Graph, id: NodeId, limits: &Limits) -> Option<(Side<NodeId>, DotCodes<NodeId>)> {
    let node = g.node(id);
    let Op::Dot(Dot { batch, contract }) = &node.op else { return None };
    let plain = batch.is_empty() && *contract == [(g.ty(node.args[0]).rank() - 1, 1)];
    let (right, codes) = coded(g, node.args[1], limits).filter(|_| plain)?;
    Some((right, rounded(g, node.args[0], codes)))
}

/// The same codes with how this left side is rounded, where it is.
pub(super) fn rounded(g: &Graph, x: NodeId, codes: DotCodes<NodeId>) -> DotCodes<NodeId> {
    let rounded = match &g.node(x).op {
        Op::FakeQuant(q) if q.group.is_multiple_of(32) && codes.group.is_multiple_of(q.group) => {
            Some(q.group)
        }
        _ => None,
    };
    // A kernel keeps a group at hand.
    let rounded = rounded.filter(|group| codes.code.is_integer() && *group <= Narrow::ROUNDED);
    DotCodes { rounded, ..codes }
}

/// The matrix `[n, k]` that this node is, where kernels read its codes.
pub(super) fn coded(g: &Graph, w: NodeId, limits: &Limits) -> Option<(Side<NodeId>, DotCodes<NodeId>)> {
    let right = g.node(w);
    let (Op::Dequant(op), &[codes, scales, ref offsets @ ..]) = (&right.op, right.args.as_slice()) else {
        return None;
    };
    let [_, k, group] = op.sizes(g.ty(codes), g.ty(scales)).ok()?;
    let whole = (group.is_multiple_of(32) || group == 16) && k <= limits.row;
    let per = op.code.per_element();
    let (dtype, free) = (g.ty(codes).dtype, Dim::from(k / per));
    let right = Side { at: codes, dtype, offset: Dim::from(0), free, along: Dim::from(1) };
    let (dtype, offsets) = (g.ty(scales).dtype, offsets.first().copied());
    let of = DotCodes { code: op.code, group, scales, dtype, offsets, rounded: None };
    (limits.codes && whole).then_some((right, of))
}

/// Codes in the buffers that they are; none unless all of them lie as this device's dots read them: in panels where it has panels, else in
/// rows.
pub(super) fn codes_in(
    piece: &Piece,
    right: &Side,
    of: DotCodes<NodeId>,
    limits: &Limits,
) -> Option<DotCodes> {
    let DotCodes { code, group, scales, dtype, offsets, rounded } = of;
    let scales = piece.operand(scales)?;
    let offsets = match offsets {
        Some(offsets) => Some(piece.operand(offsets)?),
        None => None,
    };
    let lies = |at| piece.layout(at).is_packed() == limits.panels.is_some();
    let read = lies(right.at) && lies(scales) && offsets.is_none_or(lies);
    read.then_some(DotCodes { code, group, scales, dtype, offsets, rounded })
}

/// The layouts in which codes, their scales and offsets would be read.
pub(super) fn code_layouts(right: NodeId, of: &DotCodes<NodeId>, limits: &Limits) -> Vec<(NodeId, Layout)> {
    let [codes, scales] = limits.code_panels(of.code, of.rounded.is_some()).unwrap_or([Layout::Rows; 2]);
    let scaled = [Some(of.scales), of.offsets].into_iter().flatten().map(|at| (at, scales));
    [(right, codes)].into_iter().chain(scaled).collect()
}

/// The layouts in which both sides would be read: a weight `[n, k]` of a dot `[…, k] · [n, k]ᵀ` is packed ahead.
fn layouts(g: &Graph, id: NodeId, limits: &Limits) -> Vec<(NodeId, Layout)> {
    let Some(form) = on_graph(g, id, limits) else { return vec![] };
    if let Some(of) = &form.codes {
        return code_layouts(form.right.at, of, limits);
    }
    let packed = weight(g, &form, limits);
    let layout = |base: NodeId| match packed {
        Some((weight, layout)) if weight == base => (base, layout),
        _ => (base, Layout::Rows),
    };
    [Some(form.right.at), form.left.map(|l| l.at)].into_iter().flatten().map(layout).collect()
}

fn weight(g: &Graph, form: &DotForm<NodeId>, limits: &Limits) -> Option<(NodeId, Layout)> {
    let Op::Dot(Dot { contract, .. }) = &g.node(form.node).op else { return None };
    let mut w = g.node(form.node).args[1];
    while let Op::Cast(_) = g.node(w).op {
        w = g.node(w).args[0];
    }
    let plain = form.batch.is_none() && w == form.right.at && g.ty(w).rank() == 2 && contract[0].1 == 1;
    let layout = limits.panels(g.ty(w).dtype)?;
    (form.rows && plain && matches!(g.node(w).op, Op::Weight(_))).then_some((w, layout))
}

/// Dots along an axis of each side.
fn batch(g: &Graph, (l, a): (NodeId, usize), (r, b): (NodeId, usize)) -> Option<DotBatch> {
    let stride = |id, axis: usize| Some(loaded(g, id)?.axes[axis].1.clone());
    Some(DotBatch { count: g.ty(l).shape[a].clone(), left: stride(l, a)?, right: stride(r, b)? })
}

/// A side of a dot as its view has it: free axes and those of the sum each with one stride, one of the two 1.
pub(super) fn side(g: &Graph, id: NodeId, free: &[usize], along: &[usize]) -> Option<Side<NodeId>> {
    let v = loaded(g, id)?;
    let known = matches!(&g.node(v.base).op, Op::Iota(_)) || g.is_scalar(v.base);
    if known || !matches!(v.dtype, DType::F32 | DType::BF16) {
        return None;
    }
    let (free, along) = (v.stride(free)?, v.stride(along)?);
    let walks = free.is_one() || along.is_one();
    walks.then_some(Side { at: v.base, dtype: v.dtype, offset: v.offset, free, along })
}

/// What the core's loads convert: bf16 to f32. Numbers of f16 are widened in memory; another widening cast has nothing there to read;
/// a narrowing one is stored.
fn loaded(g: &Graph, id: NodeId) -> Option<View> {
    View::of(g, id, &|cast| {
        let (from, to) = (g.ty(g.node(cast).args[0]).dtype, g.ty(cast).dtype);
        match to {
            DType::F32 if matches!(from, DType::F32 | DType::BF16) => AtCast::Through,
            DType::F32 if from == DType::F16 => AtCast::Stop,
            _ if to.bytes() < from.bytes() => AtCast::Stop,
            _ => AtCast::Refuse,
        }
    })
}

/// The side in the buffer that its base is.
pub(super) fn in_buffer(piece: &Piece, side: Side<NodeId>) -> Option<Side> {
    let Side { at, dtype, offset, free, along } = side;
    Some(Side { at: piece.operand(at)?, dtype, offset, free, along })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::LIMITS;
    use astrai_ir::Symbol;

    fn graph() -> Graph {
        Graph::new(vec![Symbol { name: "t".into(), min: 1, max: 64, multiple_of: 1 }])
    }

    fn dot(g: &mut Graph, a: NodeId, b: NodeId, contract: &[(usize, usize)]) -> NodeId {
        g.push(Dot { batch: vec![], contract: contract.to_vec() }, &[a, b]).unwrap()
    }

    #[test]
    fn slices_and_heads_are_strides_over_the_joined_rows() {
        let mut g = graph();
        let t = Dim::symbol("t");
        let x = g.input("x", DType::BF16, vec![t.clone(), 12.into()]).unwrap();
        let w = g.weight("w", DType::F32, &[6, 5]).unwrap();
        let x = g.cast(x, DType::F32).unwrap();
        let x = g.slice(x, 1, 4.into(), 6.into()).unwrap();
        let x = g.reshape(x, vec![t.clone(), 2.into(), 3.into()]).unwrap();
        let x = g.reshape(x, vec![t.clone(), 6.into()]).unwrap();
        let y = dot(&mut g, x, w, &[(1, 0)]);
        let f = on_graph(&g, y, &LIMITS).unwrap();
        let left = f.left.clone().unwrap();
        assert_eq!((left.offset, left.free, left.along), (4.into(), 12.into(), 1.into()));
        assert_eq!((f.m.clone(), f.n.clone(), f.k.clone()), (t, 5.into(), 6.into()));
        assert_eq!((f.right.free.clone(), f.right.along.clone()), (1.into(), 5.into()));
        assert_eq!((left.dtype, weight(&g, &f, &LIMITS)), (DType::BF16, None));
    }

    #[test]
    fn sums_over_tokens_read_both_sides_down_their_columns() {
        let mut g = graph();
        let t = Dim::symbol("t");
        let a = g.input("a", DType::F32, vec![t.clone(), 3.into()]).unwrap();
        let b = g.input("b", DType::F32, vec![t.clone(), 4.into()]).unwrap();
        let y = dot(&mut g, a, b, &[(0, 0)]);
        let f = on_graph(&g, y, &LIMITS).unwrap();
        assert_eq!((f.rows, f.k), (false, t.clone()));
        let left = f.left.unwrap();
        assert_eq!((left.free, left.along, f.right.along), (1.into(), 3.into(), 4.into()));
        // Heads in another order, concatenated again, have no single stride.
        let b3 = g.reshape(b, vec![t.clone(), 2.into(), 2.into()]).unwrap();
        let b3 = g.permute(b3, &[0, 2, 1]).unwrap();
        let b2 = g.reshape(b3, vec![t, 4.into()]).unwrap();
        let y = dot(&mut g, a, b2, &[(0, 0)]);
        assert_eq!(on_graph(&g, y, &LIMITS), None);
    }
}
