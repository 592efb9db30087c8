//! What a dot asks of memory. In: a dot in a graph. Out: how its sides lie in the buffers they are read from, when views and
//! widening casts leave them regular enough for the dot core; passes choose by it what is stored, codegen what is loaded.

use crate::ops::{Dot, GroupedDot, Op};
use crate::{DType, Dim, Graph, NodeId, Type};

/// Longest sum whose left side may be an expression: its row is staged on the stack.
const LONGEST_ROW: usize = 1 << 17;

/// A side of a dot in memory: element `(i, k)` of buffer `base` lies at `offset + i·free + k·along`, in elements. One of the
/// steps is 1.
#[derive(Clone, Debug, PartialEq)]
pub struct DotSide {
    /// The value whose memory is read.
    pub base: NodeId,
    /// Its element type, f32 or bf16.
    pub dtype: DType,
    /// Position of the first element.
    pub offset: Dim,
    /// Step from one row (left) or column (right) of the result to the next.
    pub free: Dim,
    /// Step along the sum.
    pub along: Dim,
}

/// Dots side by side.
#[derive(Clone, Debug, PartialEq)]
pub struct DotBatch {
    /// How many.
    pub count: Dim,
    /// Step from one left side to the next, in elements.
    pub left: Dim,
    /// Step from one right side to the next.
    pub right: Dim,
}

/// A dot `[m, k] · [k, n]`, or several side by side.
#[derive(Clone, Debug, PartialEq)]
pub struct DotForm {
    /// Where there are several; both sides then lie in memory.
    pub batch: Option<DotBatch>,
    /// Rows of the result: all free axes of the left side.
    pub m: Dim,
    /// Columns of the result: all free axes of the right side.
    pub n: Dim,
    /// Length of the sums.
    pub k: Dim,
    /// The left side, where it lies in memory.
    pub left: Option<DotSide>,
    /// True when the left side may be an expression, computed a row at a time.
    pub rows: bool,
    /// The right side.
    pub right: DotSide,
}

impl DotForm {
    /// The form of a dot; `None` when loops have to compute it.
    pub fn of(g: &Graph, dot: NodeId) -> Option<DotForm> {
        let node = g.node(dot);
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
        Some(DotForm {
            m: size(l, &lf),
            n: size(r, &rf),
            left: side(g, node.args[0], &lf, &lk),
            rows: batch.is_none() && last && k.size().is_some_and(|k| (1..=LONGEST_ROW).contains(&k)),
            right: side(g, node.args[1], &rf, &rk)?,
            batch,
            k,
        })
        .filter(|f| f.rows || f.left.is_some())
    }

    /// The weight `[n, k]` of a dot `[…, k] · [n, k]ᵀ` that can be packed ahead into panels.
    pub fn packed_weight(g: &Graph, dot: NodeId) -> Option<NodeId> {
        let form = DotForm::of(g, dot)?;
        let Op::Dot(Dot { contract, .. }) = &g.node(dot).op else { return None };
        let mut w = g.node(dot).args[1];
        while let Op::Cast(_) = g.node(w).op {
            w = g.node(w).args[0];
        }
        let plain = form.batch.is_none() && w == form.right.base && g.ty(w).rank() == 2 && contract[0].1 == 1;
        (form.rows && plain && matches!(g.node(w).op, Op::Weight(_))).then_some(w)
    }
}

/// A grouped dot `[rows, k]` by matrices `[n, k]` or, transposed, a dot `[rows, n]` by `[n, k]`. Its left side is computed a
/// row at a time.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupedForm {
    /// Rows of all groups together.
    pub rows: Dim,
    /// Matrices.
    pub groups: usize,
    /// Columns of the result.
    pub n: usize,
    /// Length of the sums.
    pub k: usize,
    /// The first matrix as a right side.
    pub right: DotSide,
    /// Step from one matrix to the next.
    pub group: Dim,
}

impl GroupedForm {
    /// The form of a grouped dot; `None` when it has no kernel.
    pub fn of(g: &Graph, id: NodeId) -> Option<GroupedForm> {
        let node = g.node(id);
        let Op::GroupedDot(op) = &node.op else { return None };
        let (x, w) = (g.ty(node.args[0]), node.args[1]);
        let (free, along) = if op.transposed { (1, 0) } else { (0, 1) };
        let right = side(g, w, &[free], &[along])?;
        let groups = whole_offsets(g, node.args[2])?;
        let (n, k) = (node.ty().shape[1].size()?, x.shape[1].size()?);
        let (matrix, step) = if op.transposed { (k, &right.along) } else { (n, &right.free) };
        let group = step * &Dim::from(matrix);
        let fits = n > 0 && (1..=LONGEST_ROW).contains(&k);
        fits.then(|| GroupedForm { rows: x.shape[0].clone(), groups, n, k, group, right })
    }

    /// The weight of a grouped dot that can be packed ahead into panels, none of which belongs to two matrices: `[groups * n, k]`
    /// or, of a transposed one, `[groups, k, n]`.
    pub fn packed_weight(g: &Graph, id: NodeId) -> Option<NodeId> {
        let form = GroupedForm::of(g, id)?;
        let Op::GroupedDot(GroupedDot { transposed }) = g.node(id).op else { return None };
        let mut w = g.node(id).args[1];
        while matches!(g.node(w).op, Op::Cast(_)) || transposed && matches!(g.node(w).op, Op::Reshape(_)) {
            w = g.node(w).args[0];
        }
        let matrices = [form.groups, form.k, form.n].map(Dim::from);
        let shaped = !transposed || g.ty(w).shape == matrices;
        let whole = w == form.right.base && matches!(g.node(w).op, Op::Weight(_));
        (whole && shaped && form.n.is_multiple_of(32)).then_some(w)
    }

    /// Both sides of a sum of outer products by groups, as sides of a dot that sums over rows, and the number of groups.
    pub fn outer(g: &Graph, id: NodeId) -> Option<([DotSide; 2], usize)> {
        let node = g.node(id);
        let Op::GroupedOuter(_) = &node.op else { return None };
        let [a, b] = [side(g, node.args[0], &[1], &[0])?, side(g, node.args[1], &[1], &[0])?];
        let literal = |arg: usize| g.ty(node.args[arg]).shape[1].size().is_some_and(|n| n > 0);
        let rows = a.free.is_one() && b.free.is_one() && literal(0) && literal(1);
        Some(([a, b], whole_offsets(g, node.args[2])?)).filter(|_| rows)
    }
}

/// The number of groups, where their offsets lie in memory as they are.
fn whole_offsets(g: &Graph, id: NodeId) -> Option<usize> {
    let plain = !g.node(id).op.is_view() && !matches!(g.node(id).op, Op::Cast(_) | Op::Iota(_));
    g.ty(id).shape[0].size().filter(|_| plain).map(|n| n - 1)
}

/// Dots along an axis of each side.
fn batch(g: &Graph, (l, a): (NodeId, usize), (r, b): (NodeId, usize)) -> Option<DotBatch> {
    let step = |id, axis: usize| Some(strided(g, id)?.axes[axis].1.clone());
    Some(DotBatch { count: g.ty(l).shape[a].clone(), left: step(l, a)?, right: step(r, b)? })
}

/// Sizes and steps of the axes of a value behind views.
struct Strided {
    base: NodeId,
    offset: Dim,
    axes: Vec<(Dim, Dim)>,
}

fn side(g: &Graph, id: NodeId, free: &[usize], along: &[usize]) -> Option<DotSide> {
    let s = strided(g, id)?;
    let dtype = g.ty(s.base).dtype;
    let literal = matches!(&g.node(s.base).op, Op::Iota(_)) || is_scalar(g, s.base);
    if literal || !matches!(dtype, DType::F32 | DType::BF16) {
        return None;
    }
    let step = |axes: &[usize]| match runs(axes.iter().map(|&a| &s.axes[a])).as_slice() {
        [] => Some(Dim::from(1)),
        [(_, step)] => Some(step.clone()),
        _ => None,
    };
    let (free, along) = (step(free)?, step(along)?);
    (free.is_one() || along.is_one()).then_some(DotSide {
        base: s.base,
        dtype,
        offset: s.offset,
        free,
        along,
    })
}

fn is_scalar(g: &Graph, id: NodeId) -> bool {
    matches!(&g.node(id).op, Op::Const(c) if c.as_scalar().is_some())
}

fn strided(g: &Graph, id: NodeId) -> Option<Strided> {
    let node = g.node(id);
    let inner = || strided(g, node.args[0]);
    match &node.op {
        Op::Cast(c) => {
            // Widening to f32 is what a load does; other casts that cost nothing are no memory to read.
            let from = g.ty(node.args[0]).dtype;
            match c.dtype == DType::F32 && matches!(from, DType::F32 | DType::BF16) {
                true => inner(),
                false => (c.dtype.bytes() < from.bytes()).then(|| whole(id, node.ty())),
            }
        }
        Op::Permute(p) => {
            let s = inner()?;
            Some(Strided { axes: p.axes.iter().map(|&a| s.axes[a].clone()).collect(), ..s })
        }
        Op::Slice(cut) => {
            let mut s = inner()?;
            s.offset = &s.offset + &(&cut.start * &s.axes[cut.axis].1);
            s.axes[cut.axis].0 = node.ty().shape[cut.axis].clone();
            Some(s)
        }
        Op::Reshape(_) => {
            let s = inner()?;
            let axes = reshape(runs(&s.axes), &node.ty().shape)?;
            Some(Strided { axes, ..s })
        }
        Op::Expand(_) => None,
        _ => Some(whole(id, node.ty())),
    }
}

fn whole(base: NodeId, ty: &Type) -> Strided {
    let step = |i: usize| Dim::product(&ty.shape[i + 1..]);
    let axes = ty.shape.iter().enumerate().map(|(i, n)| (n.clone(), step(i))).collect();
    Strided { base, offset: Dim::from(0), axes }
}

/// Neighbouring axes joined where one's step covers the next; axes of one element are gone.
fn runs<'a>(axes: impl IntoIterator<Item = &'a (Dim, Dim)>) -> Vec<(Dim, Dim)> {
    let mut runs: Vec<(Dim, Dim)> = Vec::new();
    for (n, step) in axes.into_iter().filter(|(n, _)| !n.is_one()) {
        match runs.last_mut() {
            Some((m, outer)) if *outer == n * step => (*m, *outer) = (&*m * n, step.clone()),
            _ => runs.push((n.clone(), step.clone())),
        }
    }
    runs
}

/// Steps of the axes of a shape laid over runs, innermost first; `None` when an axis would straddle two runs.
fn reshape(mut runs: Vec<(Dim, Dim)>, shape: &[Dim]) -> Option<Vec<(Dim, Dim)>> {
    let mut axes = vec![(Dim::from(1), Dim::from(1)); shape.len()];
    for (n, axis) in shape.iter().zip(&mut axes).rev().filter(|(n, _)| !n.is_one()) {
        let (left, step) = runs.pop()?;
        let rest = if left == *n { Dim::from(1) } else { left.div_exact(n)? };
        if !rest.is_one() {
            runs.push((rest, &step * n));
        }
        *axis = (n.clone(), step);
    }
    runs.is_empty().then_some(axes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Symbol;

    fn graph() -> Graph {
        Graph::new(vec![Symbol { name: "t".into(), min: 1, max: 64, multiple_of: 1 }])
    }

    fn dot(g: &mut Graph, a: NodeId, b: NodeId, contract: &[(usize, usize)]) -> NodeId {
        g.push(Dot { batch: vec![], contract: contract.to_vec() }, &[a, b]).unwrap()
    }

    #[test]
    fn slices_and_heads_are_steps_over_the_joined_rows() {
        let mut g = graph();
        let t = Dim::symbol("t");
        let x = g.input("x", DType::BF16, vec![t.clone(), 12.into()]).unwrap();
        let w = g.weight("w", DType::F32, &[6, 5]).unwrap();
        let x = g.cast(x, DType::F32).unwrap();
        let x = g.slice(x, 1, 4.into(), 6.into()).unwrap();
        let x = g.reshape(x, vec![t.clone(), 2.into(), 3.into()]).unwrap();
        let x = g.reshape(x, vec![t.clone(), 6.into()]).unwrap();
        let y = dot(&mut g, x, w, &[(1, 0)]);
        let f = DotForm::of(&g, y).unwrap();
        let left = f.left.unwrap();
        assert_eq!((left.offset, left.free, left.along), (4.into(), 12.into(), 1.into()));
        assert_eq!((f.m.clone(), f.n, f.k), (t, 5.into(), 6.into()));
        assert_eq!((f.right.free, f.right.along), (1.into(), 5.into()));
        assert_eq!((left.dtype, DotForm::packed_weight(&g, y)), (DType::BF16, None));
    }

    #[test]
    fn sums_over_tokens_read_both_sides_down_their_columns() {
        let mut g = graph();
        let t = Dim::symbol("t");
        let a = g.input("a", DType::F32, vec![t.clone(), 3.into()]).unwrap();
        let b = g.input("b", DType::F32, vec![t.clone(), 4.into()]).unwrap();
        let y = dot(&mut g, a, b, &[(0, 0)]);
        let f = DotForm::of(&g, y).unwrap();
        assert_eq!((f.rows, f.k), (false, t.clone()));
        let left = f.left.unwrap();
        assert_eq!((left.free, left.along, f.right.along), (1.into(), 3.into(), 4.into()));
        // Heads apart, joined again in another order, straddle.
        let b3 = g.reshape(b, vec![t.clone(), 2.into(), 2.into()]).unwrap();
        let b3 = g.permute(b3, &[0, 2, 1]).unwrap();
        let b2 = g.reshape(b3, vec![t, 4.into()]).unwrap();
        let y = dot(&mut g, a, b2, &[(0, 0)]);
        assert_eq!(DotForm::of(&g, y), None);
    }
}
