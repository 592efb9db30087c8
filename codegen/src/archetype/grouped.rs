//! The archetypes `grouped` and `outer`: rows in groups by a matrix of each group's own, and its gradient by the matrices. In: a
//! grouped product. Out: its sides, where each group's rows begin, the bound that these offsets must keep.

use super::dot::{code_layouts, coded, codes_in, in_buffer, rounded, rounds, side};
use super::{Archetype, Limits, integers, memory};
use astrai_ir::backend::{Epilogue, Root, Takes};
use astrai_ir::ops::{GroupedDot, Op};
use astrai_ir::region::{Form, GroupedForm, Guard, OuterForm, Piece};
use astrai_ir::{Dim, Graph, Layout, NodeId, Operand};
use std::collections::HashMap;

pub(super) const ARCHETYPE: Archetype = Archetype {
    of: |op| matches!(op, Op::GroupedDot(_) | Op::GroupedOuter(_)),
    root: Some(root),
    layouts,
    form,
    guard,
    touched,
};

/// What the kernel of a grouped product takes along.
fn root(g: &Graph, id: NodeId, limits: &Limits) -> Root {
    let args = &g.node(id).args;
    let mut takes: Vec<Takes> = args.iter().map(|&a| memory(g, a)).collect();
    if let Some(form) = on_graph(g, id, limits) {
        (takes[0], takes[1]) = (Takes::Prologue, Takes::Memory(form.right.at));
        let scales = form.codes.into_iter().flat_map(|c| [Some(c.scales), c.offsets]);
        takes.extend(scales.flatten().map(Takes::Memory));
    }
    if let Some(form) = outer(g, id) {
        takes.iter_mut().zip(form.sides).for_each(|(take, side)| *take = Takes::Memory(side.at));
    }
    Root { takes, epilogue: Epilogue::Pointwise }
}

/// The form of a piece around a grouped product.
fn form(piece: &Piece, limits: &Limits) -> Option<Form> {
    let g = &piece.graph;
    let grouped = |id| {
        let f = on_graph(g, id, limits)?;
        let (right, offsets) = (in_buffer(piece, f.right)?, piece.operand(f.offsets)?);
        let codes = match f.codes {
            Some(codes) => Some(codes_in(piece, &right, codes, limits)?),
            None => None,
        };
        let (node, rows, groups, n, k, group) = (f.node, f.rows, f.groups, f.n, f.k, f.group);
        Some(Form::Grouped(GroupedForm { node, rows, groups, n, k, right, group, offsets, codes }))
    };
    let outer = |id| {
        let f = outer(g, id)?;
        let [a, b] = f.sides;
        let sides = [in_buffer(piece, a)?, in_buffer(piece, b)?];
        let offsets = piece.operand(f.offsets)?;
        Some(Form::Outer(OuterForm { node: f.node, sides, groups: f.groups, size: f.size, offsets }))
    };
    g.ids().find_map(|id| grouped(id).or_else(|| outer(id)))
}

/// The layout in which the matrices would be read.
fn layouts(g: &Graph, id: NodeId, limits: &Limits) -> Vec<(NodeId, Layout)> {
    let Some(form) = on_graph(g, id, limits) else { return vec![] };
    if let Some(codes) = &form.codes {
        return code_layouts(form.right.at, codes, limits);
    }
    vec![(form.right.at, packed(g, &form, limits).unwrap_or(Layout::Rows))]
}

/// The layout of matrices that are packed ahead into panels, none of which belongs to two: those of a weight `[groups * n, k]` or,
/// transposed, `[groups, k, n]`.
fn packed(g: &Graph, form: &GroupedForm<NodeId>, limits: &Limits) -> Option<Layout> {
    let Op::GroupedDot(GroupedDot { transposed }) = g.node(form.node).op else { return None };
    let mut w = g.node(form.node).args[1];
    while matches!(g.node(w).op, Op::Cast(_)) || transposed && matches!(g.node(w).op, Op::Reshape(_)) {
        w = g.node(w).args[0];
    }
    let matrices = [form.groups, form.k, form.n].map(Dim::from);
    let shaped = !transposed || g.ty(w).shape == matrices;
    let whole = w == form.right.at && matches!(g.node(w).op, Op::Weight(_));
    let layout = limits.panels(g.ty(w).dtype)?;
    let Layout::Panels { rows, .. } = layout else { return None };
    (whole && shaped && form.n.is_multiple_of(rows)).then_some(layout)
}

/// The form of a grouped dot in a graph; `None` when it has no kernel.
fn on_graph(g: &Graph, id: NodeId, limits: &Limits) -> Option<GroupedForm<NodeId>> {
    let node = g.node(id);
    let Op::GroupedDot(op) = &node.op else { return None };
    let (x, w) = (g.ty(node.args[0]), node.args[1]);
    let (free, along) = if op.transposed { (1, 0) } else { (0, 1) };
    let groups = groups(g, node.args[2])?;
    let (n, k) = (node.ty().shape[1].size()?, x.shape[1].size()?);
    // No panel belongs to two matrices.
    let whole = limits.panels.is_none_or(|[(rows, _), _]| n.is_multiple_of(rows));
    let (right, codes) = match coded(g, w, limits).filter(|_| !op.transposed && whole) {
        Some((right, codes)) => (right, Some(rounded(g, node.args[0], codes))),
        None => (side(g, w, &[free], &[along])?, None),
    };
    let (matrix, step) = if op.transposed { (k, &right.along) } else { (n, &right.free) };
    let group = step * &Dim::from(matrix);
    let (rows, offsets) = (x.shape[0].clone(), node.args[2]);
    // Rows that are rounded are the core's alone, and those by codes.
    let plain = !rounds(&g.node(node.args[0]).op) || codes.as_ref().is_some_and(|c| c.rounded.is_some());
    let fits = plain && limits.has("grouped") && n > 0 && (1..=limits.row).contains(&k);
    fits.then_some(GroupedForm { node: id, rows, groups, n, k, group, right, offsets, codes })
}

/// Both sides of a sum of outer products by groups, as sides of a dot that sums over rows.
fn outer(g: &Graph, id: NodeId) -> Option<OuterForm<NodeId>> {
    let node = g.node(id);
    let Op::GroupedOuter(_) = &node.op else { return None };
    let sides = [side(g, node.args[0], &[1], &[0])?, side(g, node.args[1], &[1], &[0])?];
    let width = |arg: usize| g.ty(node.args[arg]).shape[1].size().filter(|n| *n > 0);
    let (size, offsets) = ([width(0)?, width(1)?], node.args[2]);
    let dense = sides.iter().all(|s| s.free.is_one());
    dense.then_some(OuterForm { node: id, sides, groups: groups(g, offsets)?, size, offsets })
}

/// The number of groups, where their offsets lie in memory as they are.
fn groups(g: &Graph, id: NodeId) -> Option<usize> {
    let plain = !g.node(id).op.is_view() && !matches!(g.node(id).op, Op::Cast(_) | Op::Iota(_));
    g.ty(id).shape[0].size().filter(|_| plain).map(|n| n - 1)
}

/// Offsets of groups ascend to the rows.
fn guard(piece: &Piece, id: NodeId) -> Option<Guard> {
    let args = &piece.graph.node(id).args;
    let rows = piece.graph.ty(args[0]).shape[0].clone();
    Some(Guard::Groups { offsets: integers(piece, args[2])?, rows })
}

/// Bytes of the matrices that rows can reach: one for each row at most.
fn touched(_: &Piece, form: &Form) -> HashMap<Operand, Dim> {
    let Form::Grouped(f) = form else { return HashMap::new() };
    let matrices = f.rows.at_most(&Dim::from(f.groups));
    let of = |numbers: usize, width: usize| &matrices * &Dim::from(f.n * numbers * width);
    let per = f.codes.as_ref().map_or(1, |c| c.code.per_element());
    let scales = f.codes.iter().flat_map(|c| {
        let all = [Some(c.scales), c.offsets].into_iter().flatten();
        all.map(|at| (at, of(f.k / c.group, c.dtype.bytes())))
    });
    scales.chain([(f.right.at, of(f.k / per, f.right.dtype.bytes()))]).collect()
}
