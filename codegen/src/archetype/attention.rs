//! The archetypes `attention` and `attention_grad`: softmax over the keys of ragged sequences, dense or over pages, and its gradient.
//! In: a node, a piece. Out: queries, keys and values, or codes of these in pages, as strides over their buffers, where sequences
//! begin, the bounds that starts, tables of pages and lengths must keep.

use super::{Archetype, Limits, integers, results, whole};
use astrai_ir::backend::{Epilogue, Root, Takes};
use astrai_ir::ops::{Attention, Op};
use astrai_ir::region::{AttentionForm, AttentionGradForm, Form, Guard, Heads, PageGuard, Piece, Whole};
use astrai_ir::strides::{AtCast, View};
use astrai_ir::{Code, DType, Dim, Graph, Node, NodeId, Operand};
use std::collections::HashMap;

pub(super) const ARCHETYPE: Archetype = Archetype {
    of: |op| matches!(op, Op::Attention(_) | Op::AttentionGrad(_)),
    root: Some(root),
    form,
    guard,
    touched,
    ..Archetype::NONE
};

/// Arguments are read in place where views of them are strides. The output may be rounded, and so may the gradient's cotangents.
fn root(g: &Graph, id: NodeId, limits: &Limits) -> Root {
    let node = g.node(id);
    let rounded = if let Op::Attention(_) = node.op { 1 } else { u32::MAX };
    let coded = codes(g, node, limits);
    let read = |(i, &a): (usize, &NodeId)| match &coded {
        Some((_, parts)) if i == 1 || i == 2 => parts[i - 1][0],
        _ => in_place(g, a).unwrap_or(a),
    };
    let scales = coded.iter().flat_map(|(_, parts)| parts.iter().map(|p| p[1]));
    let takes = node.args.iter().enumerate().map(read).chain(scales).map(Takes::Memory);
    Root { takes: takes.collect(), epilogue: Epilogue::Rounded(rounded) }
}

/// What keys and values in pages are codes of, where the kernels read them so: codes and scales of each.
fn codes(g: &Graph, node: &Node, limits: &Limits) -> Option<(Code, [[NodeId; 2]; 2])> {
    let Op::Attention(Attention { page: Some(_), .. }) = &node.op else { return None };
    let of = |id: NodeId| {
        let (Op::Dequant(op), &[codes, scales]) = (&g.node(id).op, g.node(id).args.as_slice()) else {
            return None;
        };
        let scale = g.ty(scales);
        let each = scale.shape.last().is_some_and(Dim::is_one) && scale.dtype == DType::F32;
        (limits.pages && each && op.code.per_element() == 1).then_some((op.code, [codes, scales]))
    };
    let ((k, of_keys), (v, of_values)) = (of(node.args[1])?, of(node.args[2])?);
    (k == v).then_some((k, [of_keys, of_values]))
}

/// The view of an argument; loads convert whatever keeps the values.
fn view(g: &Graph, id: NodeId) -> Option<View> {
    View::of(g, id, &|cast| {
        let float = g.ty(g.node(cast).args[0]).dtype.is_float();
        if g.keeps_values(cast) && float { AtCast::Through } else { AtCast::Stop }
    })
}

/// The value below the views of `id` if the core can walk them: literal strides, the elements of a head one after another.
fn in_place(g: &Graph, id: NodeId) -> Option<NodeId> {
    let v = view(g, id)?;
    let inner = v.axes.last().is_none_or(|(size, stride)| size.is_one() || stride.is_one());
    let literal = v.axes.iter().all(|(_, stride)| stride.literal().is_some());
    // Vectors (starts, sinks) are read whole.
    let whole = v.axes.len() == 3 && v.offset.literal().is_some() || g.ty(v.base).shape == g.ty(id).shape;
    // A number everywhere has no memory.
    (!g.is_scalar(v.base) && inner && literal && whole).then_some(v.base)
}

/// A `[tokens, heads, d]` argument of a piece.
fn heads(piece: &Piece, id: NodeId) -> Option<Heads> {
    let v = view(&piece.graph, id)?;
    let [row, head, inner] = <[(Dim, Dim); 3]>::try_from(v.axes).ok()?;
    // An axis of one element stands at its beginning, whatever views make of it.
    let stride = |(n, stride): (Dim, Dim)| if n.is_one() { Dim::from(0) } else { stride };
    let dense = inner.0.is_one() || inner.1.is_one();
    let at = piece.operand(v.base).filter(|_| dense)?;
    Some(Heads { at, dtype: v.dtype, offset: v.offset, row: stride(row), head: stride(head) })
}

/// A vector or a table that lies whole.
fn vector(piece: &Piece, id: NodeId) -> Option<Whole> {
    whole(piece, view(&piece.graph, id))
}

fn attributes(node: &Node) -> Option<(&Attention, bool)> {
    match &node.op {
        Op::Attention(a) => Some((a, false)),
        Op::AttentionGrad(g) => Some((&g.forward, true)),
        _ => None,
    }
}

/// The form of a piece around attention with a positive scale, and heads that its kernels keep.
fn form(piece: &Piece, limits: &Limits) -> Option<Form> {
    let g = &piece.graph;
    let node = g.nodes().iter().find(|n| attributes(n).is_some())?;
    let (a, gradient) = attributes(node)?;
    let size = |arg: usize, axis: usize| g.ty(node.args[arg]).shape[axis].size();
    let sizes = [size(0, 1)?, size(1, 1)?, size(0, 2)?, size(2, 2)?];
    if a.scale.0 <= 0.0 || sizes[2].max(sizes[3]) > limits.head {
        return None;
    }
    let head = |arg: usize| heads(piece, node.args[arg]);
    let tokens = g.ty(node.args[0]).shape[0].clone();
    let sequences = &g.ty(node.args[3]).shape[0] - &Dim::from(1);
    let (starts, results, op) = (vector(piece, node.args[3])?.0, results(g), a.clone());
    if gradient {
        let lse = vector(piece, node.args[5]).filter(|(_, dtype)| *dtype == DType::F32)?.0;
        let sinks = if a.sinks { Some(vector(piece, node.args[7])?) } else { None };
        let heads = [head(0)?, head(1)?, head(2)?, head(4)?, head(6)?];
        let form = AttentionGradForm { op, heads, sizes, tokens, sequences, lse, starts, sinks, results };
        return Some(Form::AttentionGrad(form));
    }
    let pages = match a.page {
        Some(_) => Some((vector(piece, node.args[4])?.0, size(4, 1)?, vector(piece, node.args[5])?.0)),
        None => None,
    };
    let sinks = if a.sinks { Some(vector(piece, node.args[a.sinks_at()])?) } else { None };
    let (qkv, codes) = match codes(g, node, limits) {
        Some((code, [k, v])) => {
            let [k, v, k_scales, v_scales] = [k[0], v[0], k[1], v[1]].map(|id| heads(piece, id));
            ([head(0)?, k?, v?], Some((code, [k_scales?, v_scales?])))
        }
        None => ([head(0)?, head(1)?, head(2)?], None),
    };
    let wanted = results.iter().any(|r| r.0 == 0);
    let form = AttentionForm { op, qkv, codes, sizes, tokens, sequences, starts, pages, sinks, results };
    wanted.then_some(Form::Attention(form))
}

/// Starts ascend to the tokens, pages lie inside the states.
fn guard(piece: &Piece, id: NodeId) -> Option<Guard> {
    let g = &piece.graph;
    let node = g.node(id);
    let pages = match &node.op {
        Op::Attention(Attention { page: Some(page), .. }) => {
            let lists = integers(piece, node.args[4]).zip(integers(piece, node.args[5]));
            let pages = g.ty(node.args[1]).shape[0].div_exact(&Dim::from(*page));
            lists.zip(pages).map(|((tables, lens), pages)| PageGuard { tables, lens, page: *page, pages })
        }
        _ => None,
    };
    let (starts, tokens) = (integers(piece, node.args[3])?, g.ty(node.args[0]).shape[0].clone());
    Some(Guard::Sequences { starts, tokens, pages })
}

/// Of pages the keys or values that the sequences may have there.
fn touched(piece: &Piece, _: &Form) -> HashMap<Operand, Dim> {
    let g = &piece.graph;
    let mut found = HashMap::new();
    for n in g.nodes() {
        let Op::Attention(a) = &n.op else { continue };
        let args = n.args[1..3].iter().filter(|_| a.page.is_some());
        let coded =
            |&arg: &NodeId| matches!(g.node(arg).op, Op::Dequant(_)).then(|| g.node(arg).args.clone());
        for arg in args.flat_map(|arg| coded(arg).unwrap_or_else(|| vec![*arg])) {
            let mut at = arg;
            while g.node(at).op.is_view() || matches!(g.node(at).op, Op::Cast(_)) {
                at = g.node(at).args[0];
            }
            let sequences = &g.ty(n.args[5]).shape[0];
            let rows = match (a.window, a.span.size()) {
                // The first of a sequence's new tokens sees a window, each behind it one key more.
                (Some(w), Some(span)) if w < span => {
                    let seen = &(sequences * &Dim::from(w)) + &g.ty(n.args[0]).shape[0];
                    seen.at_most(&(sequences * &a.span))
                }
                _ => sequences * &a.span,
            };
            let width = &Dim::product(&g.ty(arg).shape[1..]) * &Dim::from(g.ty(at).dtype.bytes());
            found.extend(piece.operand(at).map(|at| (at, &rows * &width)));
        }
    }
    found
}
