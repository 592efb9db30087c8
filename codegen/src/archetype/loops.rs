//! The archetype `loops`: every element of the result is computed where the loops stand, with all that leads to it. In: a piece.
//! Out: how the loops stand: by rows of the result, by columns of what is summed, by rows at integer indices.

use super::{Archetype, Limits, integers};
use crate::kernel_ir::lower::row;
use astrai_ir::ops::{Op, RandomKind, Reduce, ReduceKind, ScatterKind};
use astrai_ir::region::{Form, Guard, LoopsForm, Piece};
use astrai_ir::{DType, Graph, NodeId};

pub(super) const ARCHETYPE: Archetype =
    Archetype { of: |op| matches!(op, Op::Store(_)), form, guard, ..Archetype::NONE };

/// True for operators that loops compute element by element, with their arguments.
pub fn computes(op: &Op) -> bool {
    op.is_pointwise()
        || op.is_view()
        || row::computes(op)
        || draws(op)
        || matches!(op, Op::Concat(_) | Op::Pad(_) | Op::Gather(_) | Op::Reduce(_))
}

/// True for the random numbers that loops draw.
fn draws(op: &Op) -> bool {
    matches!(op, Op::Random(r) if r.kind == RandomKind::Uniform && r.ty.dtype == DType::F32)
}

/// True for a scatter that adds rows to an f32 matrix.
pub fn adds_rows(g: &Graph, id: NodeId) -> bool {
    let node = g.node(id);
    let Op::Scatter(s) = &node.op else { return false };
    let plain = s.axis == 0 && s.batch == 0 && s.kind == ScatterKind::Add;
    plain && node.ty().rank() == 2 && node.ty().dtype == DType::F32 && g.ty(node.args[1]).rank() == 1
}

/// The form of a piece whose every operator loops compute; of one with ranks in it, that of an exchange.
fn form(piece: &Piece, _: &Limits) -> Option<Form> {
    let g = &piece.graph;
    if g.nodes().iter().any(|n| n.op.collective_axes().is_some()) {
        return Some(Form::Collective);
    }
    let known = |id: NodeId| {
        let node = g.node(id);
        let whole = matches!(node.op, Op::Store(_)) && node.args.len() == 2;
        let leaf = matches!(node.op, Op::Input(_) | Op::Const(_) | Op::Iota(_) | Op::Dot(_));
        computes(&node.op) || whole || leaf || adds_rows(g, id) || g.stores_rows(id)
    };
    g.ids().all(known).then(|| Form::Loops(order(g)))
}

fn order(g: &Graph) -> LoopsForm {
    let Some(&(_, root)) = g.outputs().first() else { return LoopsForm::Rows };
    if g.stores_rows(root) {
        return LoopsForm::StoreRows(root);
    }
    if adds_rows(g, root) {
        return LoopsForm::ScatterAdd(root);
    }
    column_reduce(g).map_or(LoopsForm::Rows, |(id, r)| LoopsForm::Columns(id, r))
}

/// The reduction of a piece that is better walked by rows: it keeps the last axis, and what follows it is pointwise.
fn column_reduce(g: &Graph) -> Option<(NodeId, Reduce)> {
    let [(_, root)] = g.outputs() else { return None };
    let mut at = *root;
    // Whether a reduction lies above each node, behind pointwise ones alone.
    let mut reduces = vec![false; g.nodes().len()];
    for id in g.ids() {
        let node = g.node(id);
        let above = || node.op.is_pointwise() && node.args.iter().any(|a| reduces[a.index()]);
        reduces[id.index()] = matches!(node.op, Op::Reduce(_)) || above();
    }
    loop {
        let node = g.node(at);
        match &node.op {
            Op::Reduce(r) => {
                let rank = g.ty(node.args[0]).rank();
                let wide = node.ty().shape.last()?.size().is_none_or(|n| n >= 8);
                let sums = matches!(r.kind, ReduceKind::Sum | ReduceKind::Max | ReduceKind::Min);
                let keeps = !r.axes.contains(&(rank - 1)) && node.ty().dtype.is_float();
                return (wide && sums && keeps).then(|| (at, r.clone()));
            }
            op if op.is_pointwise() => {
                let above = |a: &&NodeId| g.ty(**a).shape == node.ty().shape && reduces[a.index()];
                at = *node.args.iter().find(above)?;
            }
            _ => return None,
        }
    }
}

/// Rows that are stored lie inside the state.
fn guard(piece: &Piece, id: NodeId) -> Option<Guard> {
    let g = &piece.graph;
    let &[state, rows, _] = g.node(id).args.as_slice() else { return None };
    Some(Guard::Rows { list: integers(piece, rows)?, rows: g.ty(state).shape[0].size()? })
}
