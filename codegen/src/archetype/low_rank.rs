//! The archetype `low_rank`: what adapters add to linear layers. In: a piece around it. Out: the factors, whole as they lie, the lists
//! that say which rows are whose, the bound that offsets must keep.

use super::{Archetype, Limits, integers, memory, whole};
use astrai_ir::backend::{Epilogue, Root, Takes};
use astrai_ir::ops::Op;
use astrai_ir::region::{Form, Guard, LowRankForm, Piece, Whole};
use astrai_ir::strides::{AtCast, View};
use astrai_ir::{Dim, Graph, NodeId, Operand};
use std::collections::HashMap;

pub(super) const ARCHETYPE: Archetype = Archetype {
    of: |op| matches!(op, Op::LowRank(_)),
    root: Some(root),
    form,
    guard,
    touched,
    ..Archetype::NONE
};

/// Rows that a kernel keeps at once.
const KEPT: usize = 4;

/// Rows are computed one at a time, factors are read below what widens them.
fn root(g: &Graph, id: NodeId, _: &Limits) -> Root {
    let args = &g.node(id).args;
    let mut takes: Vec<Takes> = args.iter().map(|&a| memory(g, a)).collect();
    takes[0] = Takes::Prologue;
    for (take, &factor) in takes[1..3].iter_mut().zip(&args[1..3]) {
        *take = stored(g, factor).map_or_else(|| memory(g, factor), |v| Takes::Memory(v.base));
    }
    Root { takes, epilogue: Epilogue::None }
}

/// A factor in memory, which the kernel widens.
fn stored(g: &Graph, id: NodeId) -> Option<View> {
    let widens = |cast| if g.keeps_values(cast) { AtCast::Through } else { AtCast::Stop };
    View::of(g, id, &widens).filter(View::is_dense)
}

/// The form of a piece around what adapters add, of rows that fit.
fn form(piece: &Piece, limits: &Limits) -> Option<Form> {
    let g = &piece.graph;
    let node = g.ids().find(|id| matches!(g.node(*id).op, Op::LowRank(_)))?;
    let (Op::LowRank(op), args) = (&g.node(node).op, &g.node(node).args) else { return None };
    let types: Vec<_> = args.iter().map(|a| g.ty(*a)).collect();
    let sizes = op.sizes(&types).ok().filter(|s| s[1] <= limits.row / KEPT)?;
    let rows = [0, 4].map(|arg| types[arg].shape[0].clone());
    let factor = |arg: usize| whole(piece, stored(g, args[arg]));
    let list = |arg: usize| Some(factor(arg)?.0);
    let (factors, lists) = ([factor(1)?, factor(2)?], [list(3)?, list(4)?, list(6)?]);
    Some(Form::LowRank(LowRankForm { node, rows, sizes, factors, columns: op.columns.clone(), lists }))
}

/// Offsets of slots ascend to the rows.
fn guard(piece: &Piece, id: NodeId) -> Option<Guard> {
    let args = &piece.graph.node(id).args;
    let rows = piece.graph.ty(args[4]).shape[0].clone();
    Some(Guard::Groups { offsets: integers(piece, args[6])?, rows })
}

/// Bytes of the factors of slots that rows can reach: one for each row at most.
fn touched(_: &Piece, form: &Form) -> HashMap<Operand, Dim> {
    let Form::LowRank(LowRankForm { rows: [_, rows], sizes: [slots, k, rank, n], factors, columns, .. }) =
        form
    else {
        return HashMap::new();
    };
    let reached = rows.at_most(&Dim::from(*slots));
    let sizes = [k * columns.len() * rank, rank * n];
    let bytes = |(factor, size): (&Whole, usize)| (factor.0, &reached * &Dim::from(size * factor.1.bytes()));
    factors.iter().zip(sizes).map(bytes).collect()
}
