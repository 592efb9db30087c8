//! What the cores of attention and of cross-entropy read in place. In: an argument. Out: the value in memory that holds it, when
//! the views and casts between the two leave literal strides over the heads; else the argument wants memory of its own.

use crate::regions::keeps;
use astrai_ir::ops::Op;
use astrai_ir::{DType, Dim, Graph, NodeId};

/// The value below the views of `id` if the core can walk them as strides.
pub fn read_in_place(g: &Graph, id: NodeId) -> Option<NodeId> {
    let mut chain = Vec::new();
    let mut at = id;
    let float = |id| g.ty(id).dtype.is_float();
    while matches!(g.node(at).op, Op::Reshape(_) | Op::Slice(_) | Op::Permute(_))
        || keeps(g, at) && float(g.node(at).args[0])
    {
        chain.push(at);
        at = g.node(at).args[0];
    }
    // A number everywhere has no memory.
    let in_memory = !matches!(&g.node(at).op, Op::Const(c) if c.as_scalar().is_some());
    let axes = walk(g, at, &chain)?;
    let inner = axes.last().is_none_or(|(size, stride)| size.is_one() || stride.is_one());
    let literal = axes.iter().all(|(_, stride)| stride.literal().is_some());
    // Vectors (starts, sinks) are read whole.
    let whole = axes.len() == 3 || g.ty(at).shape == g.ty(id).shape;
    (in_memory && inner && literal && whole).then_some(at)
}

/// The value below reshapes, and below casts from bf16 to f32, if its memory holds the elements of `id` in order; what a
/// kernel that takes whole matrices reads.
pub fn read_whole(g: &Graph, id: NodeId) -> Option<NodeId> {
    let mut at = id;
    loop {
        let node = g.node(at);
        match &node.op {
            Op::Reshape(_) => {}
            Op::Cast(_) if node.ty().dtype == DType::F32 && g.ty(node.args[0]).dtype == DType::BF16 => {}
            Op::Const(c) if c.as_scalar().is_some() => return None,
            op if op.is_view() || matches!(op, Op::Iota(_)) => return None,
            _ => return Some(at),
        }
        at = node.args[0];
    }
}

/// (size, stride) of every axis after the views of `chain`, innermost view last in it, over `base`.
fn walk(g: &Graph, base: NodeId, chain: &[NodeId]) -> Option<Vec<(Dim, Dim)>> {
    let mut axes = rows(&g.ty(base).shape, Dim::from(1));
    for &id in chain.iter().rev() {
        match &g.node(id).op {
            Op::Slice(s) => {
                (&s.start * &axes[s.axis].1).literal()?;
                axes[s.axis].0 = s.len.clone();
            }
            Op::Permute(p) => axes = p.axes.iter().map(|&a| axes[a].clone()).collect(),
            Op::Reshape(r) => axes = regroup(axes, &r.shape)?,
            _ => {}
        }
    }
    Some(axes)
}

/// Row-major axes whose elements are `step` apart.
fn rows(shape: &[Dim], step: Dim) -> Vec<(Dim, Dim)> {
    let mut stride = step;
    let mut axes = Vec::with_capacity(shape.len());
    for n in shape.iter().rev() {
        axes.push((n.clone(), stride.clone()));
        stride = &stride * n;
    }
    axes.reverse();
    axes
}

/// The axes under another shape: what differs between the common first and last axes must lie row-major.
fn regroup(axes: Vec<(Dim, Dim)>, shape: &[Dim]) -> Option<Vec<(Dim, Dim)>> {
    let (n, m) = (axes.len(), shape.len());
    let first = axes.iter().zip(shape).take_while(|(a, d)| a.0 == **d).count();
    let rest = n.min(m) - first;
    let last = axes.iter().rev().zip(shape.iter().rev()).take(rest).take_while(|(a, d)| a.0 == **d).count();
    let middle = &axes[first..n - last];
    let dense = middle.windows(2).all(|w| w[0].1 == &w[1].0 * &w[1].1);
    let step = middle.last().map_or(Dim::from(1), |a| a.1.clone());
    let mut out = axes[..first].to_vec();
    out.extend(rows(&shape[first..m - last], step));
    out.extend_from_slice(&axes[n - last..]);
    dense.then_some(out)
}
