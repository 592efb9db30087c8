//! Views as strides. In: a value behind reshapes, permutations, slices and casts. Out: the value in memory below them, and where
//! each element lies in its buffer: an offset and a stride for every axis. The only place where a view becomes strides: archetypes
//! match by it, emission prints what it found.

use crate::ops::Op;
use crate::{DType, Dim, Graph, NodeId};

/// A value in memory as an archetype's kernel reads it: element `(i, j, …)` lies at `offset + i·stride₀ + j·stride₁ + …`, counted
/// in elements of `dtype`.
#[derive(Clone, Debug, PartialEq)]
pub struct View {
    /// The value whose buffer is read.
    pub base: NodeId,
    /// Type of the buffer's elements.
    pub dtype: DType,
    /// Position of the first element.
    pub offset: Dim,
    /// (size, stride) of every axis of the value that is looked at, outermost first.
    pub axes: Vec<(Dim, Dim)>,
}

/// What a walk does at a cast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtCast {
    /// The load converts: the walk goes on below.
    Through,
    /// The cast's own value lies in memory: the walk ends there.
    Stop,
    /// Nothing in memory holds the value.
    Refuse,
}

impl View {
    /// The view of `id`; `at_cast` says which casts the kernel's loads carry out. `None` where an axis would have no single
    /// stride.
    pub fn of(g: &Graph, id: NodeId, at_cast: &dyn Fn(NodeId) -> AtCast) -> Option<View> {
        let node = g.node(id);
        let below = || View::of(g, node.args[0], at_cast);
        match &node.op {
            Op::Cast(_) => match at_cast(id) {
                AtCast::Through => below(),
                AtCast::Stop => Some(View::whole(g, id)),
                AtCast::Refuse => None,
            },
            Op::Permute(p) => {
                let v = below()?;
                Some(View { axes: p.axes.iter().map(|&a| v.axes[a].clone()).collect(), ..v })
            }
            Op::Slice(cut) => {
                let mut v = below()?;
                v.offset = &v.offset + &(&cut.start * &v.axes[cut.axis].1);
                v.axes[cut.axis].0 = node.ty().shape[cut.axis].clone();
                Some(v)
            }
            Op::Reshape(_) => {
                let v = below()?;
                let axes = reshaped(runs(&v.axes), &node.ty().shape)?;
                Some(View { axes, ..v })
            }
            Op::Expand(_) => None,
            _ => Some(View::whole(g, id)),
        }
    }

    /// A value as it lies, row-major.
    fn whole(g: &Graph, id: NodeId) -> View {
        let ty = g.ty(id);
        let stride = |i: usize| Dim::product(&ty.shape[i + 1..]);
        let axes = ty.shape.iter().enumerate().map(|(i, n)| (n.clone(), stride(i))).collect();
        View { base: id, dtype: ty.dtype, offset: Dim::from(0), axes }
    }

    /// The one stride with which these axes, as a single axis, are walked; 1 for axes of one element.
    pub fn stride(&self, axes: &[usize]) -> Option<Dim> {
        match runs(axes.iter().map(|&a| &self.axes[a])).as_slice() {
            [] => Some(Dim::from(1)),
            [(_, stride)] => Some(stride.clone()),
            _ => None,
        }
    }

    /// True when the elements lie one after another from the buffer's beginning.
    pub fn is_dense(&self) -> bool {
        let dense = matches!(runs(&self.axes).as_slice(), [] | [(_, _)]);
        let last = runs(&self.axes).last().is_none_or(|(_, stride)| stride.is_one());
        dense && last && self.offset.literal() == Some(0)
    }
}

/// Neighbouring axes joined where the stride of one covers the next; axes of one element are left out.
fn runs<'a>(axes: impl IntoIterator<Item = &'a (Dim, Dim)>) -> Vec<(Dim, Dim)> {
    let mut runs: Vec<(Dim, Dim)> = Vec::new();
    for (n, stride) in axes.into_iter().filter(|(n, _)| !n.is_one()) {
        match runs.last_mut() {
            Some((m, outer)) if *outer == n * stride => (*m, *outer) = (&*m * n, stride.clone()),
            _ => runs.push((n.clone(), stride.clone())),
        }
    }
    runs
}

/// Sizes and strides of a shape laid over runs, innermost first; `None` when an axis would straddle two runs.
fn reshaped(mut runs: Vec<(Dim, Dim)>, shape: &[Dim]) -> Option<Vec<(Dim, Dim)>> {
    let mut axes = vec![(Dim::from(1), Dim::from(1)); shape.len()];
    for (n, axis) in shape.iter().zip(&mut axes).rev().filter(|(n, _)| !n.is_one()) {
        let (left, stride) = runs.pop()?;
        let rest = if left == *n { Dim::from(1) } else { left.div_exact(n)? };
        if !rest.is_one() {
            runs.push((rest, &stride * n));
        }
        *axis = (n.clone(), stride);
    }
    runs.is_empty().then_some(axes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Symbol;

    #[test]
    fn slices_and_heads_are_strides_over_the_joined_rows() {
        let mut g = Graph::new(vec![Symbol { name: "t".into(), min: 1, max: 64, multiple_of: 1 }]);
        let t = Dim::symbol("t");
        let x = g.input("x", DType::BF16, vec![t.clone(), 12.into()]).unwrap();
        let wide = g.cast(x, DType::F32).unwrap();
        let cut = g.slice(wide, 1, 4.into(), 6.into()).unwrap();
        let heads = g.reshape(cut, vec![t.clone(), 2.into(), 3.into()]).unwrap();
        let v = View::of(&g, heads, &|_| AtCast::Through).unwrap();
        let strides: Vec<Dim> = v.axes.iter().map(|a| a.1.clone()).collect();
        assert_eq!((v.base, v.dtype, v.offset.clone()), (x, DType::BF16, 4.into()));
        assert_eq!(strides, [12.into(), 3.into(), 1.into()]);
        assert_eq!((v.stride(&[1, 2]), v.stride(&[0, 1]), v.is_dense()), (Some(1.into()), None, false));
        assert_eq!(View::of(&g, heads, &|_| AtCast::Stop).unwrap().base, wide);
        assert!(View::of(&g, heads, &|_| AtCast::Refuse).is_none());
        // Axes in another order, joined again, straddle.
        let turned = g.permute(heads, &[0, 2, 1]).unwrap();
        let flat = g.reshape(turned, vec![t, 6.into()]).unwrap();
        assert!(View::of(&g, flat, &|_| AtCast::Through).is_none());
    }
}
