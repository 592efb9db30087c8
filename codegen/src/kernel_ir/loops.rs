//! The archetype `loops`: every element of the result is computed where the loops stand, rows one after another or spread
//! over threads, reductions inside as loops of their own. In: a region. Out: its statements, arranged by row and by last
//! axis.

use crate::kernel_ir::expr::Stmt;
use crate::kernel_ir::index::{Atom, Index, Var};
use crate::kernel_ir::lower::{Lower, Segment};
use astrai_ir::ops::Reduce;
use astrai_ir::{Dim, NodeId, Region};
use std::rc::Rc;

/// Elements of a one-dimensional result that make a row.
const CHUNK: usize = 4096;

/// A region as loops over rows.
pub struct Loops {
    /// Number of rows.
    pub rows: Dim,
    /// For a one-dimensional result: rows are pieces of this many elements of `rows` elements in all.
    pub chunk: Option<usize>,
    /// The row's loop variable.
    pub row: Var,
    /// Statements before all rows.
    pub before: Vec<Stmt>,
    /// Indices of the leading axes, from the row: (variable, divisor, size).
    pub leading: Vec<(Var, Dim, Dim)>,
    /// Statements of a row.
    pub body: Vec<Stmt>,
}

/// Lowers a region whose outputs have one shape; `nested`: a loop over the last axis may be two.
pub fn loops(region: &Region, nested: bool) -> Result<Loops, String> {
    let g = region.graph();
    let shape = g.ty(g.outputs()[0].1).shape.clone();
    if g.outputs().iter().any(|(_, id)| g.ty(*id).shape != shape) {
        return Err("outputs of one kernel must have one shape".into());
    }
    let mut lower = Lower::new(region);
    let (lead, last) = match shape.split_last() {
        // A sum for each element: the elements are the rows.
        Some(_) if shape.len() == 1 && sums_elements(region) => (shape.clone(), Dim::from(1)),
        Some((last, lead)) => (lead.to_vec(), last.clone()),
        None => (vec![], Dim::from(1)),
    };
    let whole = lead.len() == shape.len();
    let (row, leading, at) = row_of(&lead);
    lower.open();
    let chunk = (lead.is_empty() && !shape.is_empty() && !has_statistics(region)).then_some(CHUNK);
    let segments: Vec<Segment> = match chunk {
        // Positions of a piece are `first + i`, piecewise operators decide at run time.
        Some(_) => vec![Segment::whole(last.clone())],
        None if whole => vec![Segment::whole(last.clone())],
        None if nested => lower.blocks(g.outputs()[0].1),
        None => lower.segments(g.outputs()[0].1),
    };
    for s in &segments {
        stores(&mut lower, region, &at, s, whole)?;
    }
    let body = lower.close();
    let rows = if chunk.is_some() { last } else { row.extent.clone() };
    Ok(Loops { rows, chunk, row, before: lower.close(), leading, body })
}

/// One loop over a segment of the last axis.
fn stores(lower: &mut Lower, region: &Region, at: &[Index], s: &Segment, whole: bool) -> Result<(), String> {
    let (vars, positions) = lower.nest(s);
    lower.open();
    for p in &positions {
        let mut at = at.to_vec();
        if !whole {
            at.push(p.clone());
        }
        // A result may lie where another's argument does: all are computed before the first is written.
        let mut made = Vec::new();
        for (buf, (_, id)) in region.graph().outputs().iter().enumerate() {
            let ty = region.graph().ty(*id);
            let value = lower.value(*id, &at)?;
            made.push(Stmt::Store { buf, at: Index::linear(&at, &ty.shape), dtype: ty.dtype, value });
        }
        made.into_iter().for_each(|s| lower.push(s));
    }
    let body = lower.close();
    let nest = |body, var| vec![Stmt::Loop { var, body }];
    vars.into_iter().rev().fold(body, nest).into_iter().for_each(|s| lower.push(s));
    Ok(())
}

/// The row's variable, variables of the leading axes with how they follow from the row (`row / divisor % size`), and these as
/// indices.
pub fn row_of(lead: &[Dim]) -> (Var, Vec<(Var, Dim, Dim)>, Vec<Index>) {
    let row = Var { name: "row".into(), extent: Dim::product(lead), depth: 1 };
    let axis = |i: usize| match lead.len() {
        1 => row.clone(),
        _ => Var { name: Rc::from(format!("a{i}")), extent: lead[i].clone(), depth: 1 },
    };
    let leading: Vec<_> =
        (0..lead.len()).map(|i| (axis(i), Dim::product(&lead[i + 1..]), lead[i].clone())).collect();
    let at = leading.iter().map(|(v, ..)| Index::var(v)).collect();
    (row, leading, at)
}

/// Where the argument of a reduction is read: at `summed` along the axes that it sums, at `kept` along the others, in order.
pub fn summed_at(r: &Reduce, rank: usize, summed: &[Var], kept: Vec<Index>) -> Vec<Index> {
    let mut kept = kept.into_iter();
    let at = |a: usize| match r.axes.iter().position(|x| *x == a) {
        Some(i) => Index::var(&summed[i]),
        None => kept.next().unwrap_or_default(),
    };
    (0..rank).map(at).collect()
}

/// True when each element of the result has reductions of its own, and nothing else walks an axis.
fn sums_elements(region: &Region) -> bool {
    use astrai_ir::ops::Op;
    let g = region.graph();
    let shape = &g.ty(g.outputs()[0].1).shape;
    let other = |op: &Op| matches!(op, Op::Dot(_)) || op.reduces() && !matches!(op, Op::Reduce(_));
    let own = |n: &astrai_ir::Node| !matches!(n.op, Op::Reduce(_)) || n.ty().shape == *shape;
    has_statistics(region) && g.nodes().iter().all(|n| own(n) && !other(&n.op))
}

/// True when something is computed once for a whole row.
fn has_statistics(region: &Region) -> bool {
    use astrai_ir::ops::Op;
    let whole = |op: &Op| matches!(op, Op::Dot(_)) || op.reduces();
    region.graph().nodes().iter().any(|n| whole(&n.op))
}

/// The elements of row `from` of the value at `axes`, written to row `hit` of the state, a number that loops of this depth know.
pub fn store_row(
    lower: &mut Lower,
    region: &Region,
    [root, value]: [NodeId; 2],
    from: &Var,
    axes: &[Index],
    depth: usize,
) -> Result<(), String> {
    let ty = region.graph().ty(root);
    let hit = Index::atom(Atom::Local("hit".into(), depth, ty.shape[0].clone()));
    let store = |lower: &mut Lower, last: Option<&Index>| -> Result<Stmt, String> {
        let at = |first: Index| -> Vec<Index> { [first].iter().chain(axes).chain(last).cloned().collect() };
        let made = lower.value(value, &at(Index::var(from)))?;
        let at = Index::linear(&at(hit.clone()), &ty.shape);
        Ok(Stmt::Store { buf: 0, at, dtype: ty.dtype, value: made })
    };
    if ty.rank() == 1 {
        let only = store(lower, None)?;
        lower.push(only);
        return Ok(());
    }
    for s in lower.segments(value) {
        let (var, positions) = lower.positions(&s);
        lower.open();
        for p in &positions {
            let one = store(lower, Some(p))?;
            lower.push(one);
        }
        let body = lower.close();
        lower.push(Stmt::Loop { var, body });
    }
    Ok(())
}
