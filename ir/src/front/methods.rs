//! Methods of values: pointwise functions, contractions, reductions, views and indexing. Axes may be counted from the end (-1 is
//! the last); each method adds one or a few nodes.

use super::{IntoShape, Made, Value, axes_of, axis_of, start_and_len};
use crate::graph::{Graph, NodeId};
use crate::ops::*;
use crate::{DType, Dim, Type};
use std::ops::Range;

macro_rules! unary {
    ($($(#[$doc:meta])* $method:ident $kind:ident)*) => {
        impl Value { $(
            $(#[$doc])*
            pub fn $method(&self) -> Value {
                self.with(|g, x| g.unary(UnaryKind::$kind, x))
            }
        )* }
    };
}

unary! {
    /// Absolute value.
    abs Abs
    /// e to the power of x.
    exp Exp
    /// Natural logarithm.
    log Log
    /// Square root.
    sqrt Sqrt
    /// 1 / sqrt(x).
    rsqrt Rsqrt
    /// Sine.
    sin Sin
    /// Cosine.
    cos Cos
    /// Hyperbolic tangent.
    tanh Tanh
    /// Error function.
    erf Erf
    /// 1 / (1 + e⁻ˣ).
    sigmoid Sigmoid
    /// The largest integer not above x.
    floor Floor
    /// Logical not, of bool.
    logical_not Not
}

macro_rules! compare {
    ($($(#[$doc:meta])* $method:ident $kind:ident)*) => {
        impl Value { $(
            $(#[$doc])*
            pub fn $method(&self, o: &Value) -> Value {
                self.with2(o, |g, a, b| g.compare(CompareKind::$kind, a, b))
            }
        )* }
    };
}

compare! {
    /// Truth of `self == o`, element by element.
    equal Eq
    /// Truth of `self != o`.
    not_equal Ne
    /// Truth of `self < o`.
    less Lt
    /// Truth of `self <= o`.
    less_equal Le
    /// Truth of `self > o`.
    greater Gt
    /// Truth of `self >= o`.
    greater_equal Ge
}

/// Pointwise functions, contractions and reductions.
impl Value {
    /// x · sigmoid(x).
    pub fn silu(&self) -> Value {
        Activation::Silu.of(self)
    }

    /// x · Φ(x), with the error function.
    pub fn gelu(&self) -> Value {
        Activation::Gelu.of(self)
    }

    /// x · Φ(x), Φ by tanh.
    pub fn gelu_tanh(&self) -> Value {
        Activation::GeluTanh.of(self)
    }

    /// Another element type.
    pub fn cast(&self, dtype: DType) -> Value {
        self.with(|g, x| g.cast(x, dtype))
    }

    /// `a` where this is true, else `b`; all three broadcast together.
    pub fn where_(&self, a: &Value, b: &Value) -> Value {
        self.tape.make_from(&[self, a, b], |g, v| {
            let (a, b) = g.broadcast_pair(v[1], v[2])?;
            let (c, a) = g.broadcast_pair(v[0], a)?;
            let (c, b) = g.broadcast_pair(c, b)?;
            g.select(c, a, b)
        })
    }

    /// Matrix product over the last two axes, `[…, m, k]` and `[…, k, n]`; the axes in front broadcast. `o` may be a
    /// vector `[k]`.
    pub fn matmul(&self, o: &Value) -> Value {
        self.with2(o, matmul)
    }

    /// Exponentials along an axis, normalised.
    pub fn softmax(&self, axis: isize) -> Value {
        self.with(|g, x| along_last(g, x, axis, |g, x| g.push(Softmax { log: false }, &[x])))
    }

    /// Logarithm of [`softmax`](Self::softmax).
    pub fn log_softmax(&self, axis: isize) -> Value {
        self.with(|g, x| along_last(g, x, axis, |g, x| g.push(Softmax { log: true }, &[x])))
    }

    /// Root-mean-square normalisation over the last axis, times `w`.
    pub fn rms_norm(&self, w: &Value, eps: f64) -> Value {
        self.with2(w, |g, x, w| g.rms_norm(x, w, eps))
    }

    /// Layer normalisation over the last axis, times `w` plus `b`.
    pub fn layer_norm(&self, w: &Value, b: &Value, eps: f64) -> Value {
        self.tape.make_from(&[self, w, b], |g, a| g.push(LayerNorm { eps: crate::Real(eps) }, a))
    }

    fn reduce(&self, kind: ReduceKind, axes: &[isize], keep: bool) -> Value {
        self.with(|g, x| {
            let axes = axes_of(g, x, axes)?;
            let mut shape = g.ty(x).shape.clone();
            let r = g.reduce(kind, x, &axes)?;
            if !keep {
                return Ok(r);
            }
            axes.iter().for_each(|&a| shape[a] = Dim::from(1));
            g.reshape(r, shape)
        })
    }

    /// Sum over the axes (all of them for none), which stay with size 1 when `keep` is set.
    pub fn sum(&self, axes: &[isize], keep: bool) -> Value {
        self.reduce(ReduceKind::Sum, axes, keep)
    }

    /// Mean, as [`sum`](Self::sum).
    pub fn mean(&self, axes: &[isize], keep: bool) -> Value {
        self.reduce(ReduceKind::Mean, axes, keep)
    }

    /// Largest element, as [`sum`](Self::sum).
    pub fn max(&self, axes: &[isize], keep: bool) -> Value {
        self.reduce(ReduceKind::Max, axes, keep)
    }

    /// Smallest element, as [`sum`](Self::sum).
    pub fn min(&self, axes: &[isize], keep: bool) -> Value {
        self.reduce(ReduceKind::Min, axes, keep)
    }

    /// Reduction over the last axis, broadcast back.
    pub(crate) fn reduce_last(&self, kind: ReduceKind) -> Value {
        self.with(|g, x| g.reduce_last(kind, x))
    }

    /// Sum over all axes but the last.
    pub(crate) fn sum_rows(&self) -> Value {
        self.with(|g, x| g.reduce(ReduceKind::Sum, x, &(0..g.ty(x).rank() - 1).collect::<Vec<_>>()))
    }

    /// Cumulative sums along an axis.
    pub fn cumsum(&self, axis: isize) -> Value {
        self.with(|g, x| {
            let axis = axis_of(g, x, axis)?;
            g.push(Cumsum { axis, exclusive: false, reverse: false }, &[x])
        })
    }

    /// Position (i32) of the largest element along an axis, which is dropped; the first of equals.
    pub fn argmax(&self, axis: isize) -> Value {
        self.with(|g, x| {
            let axis = axis_of(g, x, axis)?;
            g.push(Argmax { axis }, &[x])
        })
    }

    /// The `k` largest elements of the last axis, descending, and their positions (i32).
    pub fn topk(&self, k: usize) -> (Value, Value) {
        let part = |i| {
            self.with(|g, x| {
                let both = g.push(Topk { k }, &[x])?;
                g.part(both, i)
            })
        };
        (part(0), part(1))
    }
}

/// Views and indexing.
impl Value {
    /// The same elements under other sizes.
    pub fn reshape(&self, shape: impl IntoShape) -> Value {
        let shape = shape.into_shape();
        self.with(|g, x| g.reshape(x, shape))
    }

    /// Broadcast to `shape`: along axes of size one, and along new leading axes.
    pub fn expand(&self, shape: impl IntoShape) -> Value {
        let shape = shape.into_shape();
        self.with(|g, x| g.broadcast(x, &shape))
    }

    /// Axis `i` of the result is axis `axes[i]` of this.
    pub fn permute(&self, axes: &[usize]) -> Value {
        self.with(|g, x| g.permute(x, axes))
    }

    /// Two axes exchanged.
    pub fn transpose(&self, a: isize, b: isize) -> Value {
        self.with(|g, x| {
            let (a, b) = (axis_of(g, x, a)?, axis_of(g, x, b)?);
            swap(g, x, a, b)
        })
    }

    /// A slice of one axis.
    pub fn slice(&self, axis: isize, range: Range<usize>) -> Value {
        self.with(|g, x| {
            let axis = axis_of(g, x, axis)?;
            let (start, len) = start_and_len(range);
            g.slice(x, axis, start, len)
        })
    }

    /// The concatenation of this and the others along an axis.
    pub fn concat(&self, others: &[&Value], axis: isize) -> Value {
        let mut all = vec![self];
        all.extend(others);
        self.tape.make_from(&all, |g, ids| {
            let axis = axis_of(g, ids[0], axis)?;
            g.push(Concat { axis }, ids)
        })
    }

    /// Consecutive slices of an axis of these lengths, which must add up to its size.
    pub fn split(&self, axis: isize, lens: &[usize]) -> Vec<Value> {
        let total: usize = lens.iter().sum();
        let whole = self.with(|g, x| {
            let axis = axis_of(g, x, axis)?;
            match &g.ty(x).shape[axis] {
                size if *size == Dim::from(total) => Ok(x),
                size => Err(g.error(format!("{lens:?} do not add up to axis {axis} of size {size}"))),
            }
        });
        let mut start = 0;
        let mut next = |len: &usize| {
            start += len;
            whole.slice(axis, start - len..start)
        };
        lens.iter().map(&mut next).collect()
    }

    /// `self[indices]` along an axis, which becomes the axes of `indices`.
    pub fn gather(&self, indices: &Value, axis: isize) -> Value {
        self.with2(indices, |g, x, i| {
            let axis = axis_of(g, x, axis)?;
            g.gather(x, i, axis)
        })
    }

    /// This with `updates`, shaped as the [`gather`](Self::gather) at `indices`, added at `indices`.
    pub fn scatter_add(&self, indices: &Value, updates: &Value, axis: isize) -> Value {
        self.tape.make_from(&[self, indices, updates], |g, a| {
            let axis = axis_of(g, a[0], axis)?;
            g.push(Scatter { axis, batch: 0, kind: ScatterKind::Add }, a)
        })
    }

    /// One-hot encoding of integers along a new last axis of size `n`; all 0 for values outside 0 .. `n`.
    pub fn one_hot(&self, n: usize, dtype: DType) -> Value {
        self.with(|g, x| {
            let ty = g.ty(x).clone();
            let (mut column, mut wide) = (ty.shape.clone(), ty.shape);
            let axis = column.len();
            column.push(Dim::from(1));
            wide.push(Dim::from(n));
            let x = g.reshape(x, column)?;
            let iota = g.push(Iota { ty: Type { dtype: ty.dtype, shape: wide }, axis }, &[])?;
            let hit = g.compare(CompareKind::Eq, x, iota)?;
            g.cast(hit, dtype)
        })
    }
}

fn swap(g: &mut Graph, x: NodeId, a: usize, b: usize) -> Made {
    let mut axes: Vec<usize> = (0..g.ty(x).rank()).collect();
    axes.swap(a, b);
    g.permute(x, &axes)
}

/// Applies `f`, which works on the last axis, to another axis.
fn along_last(g: &mut Graph, x: NodeId, axis: isize, f: impl FnOnce(&mut Graph, NodeId) -> Made) -> Made {
    let axis = axis_of(g, x, axis)?;
    let last = g.ty(x).rank() - 1;
    let moved = swap(g, x, axis, last)?;
    let y = f(g, moved)?;
    swap(g, y, axis, last)
}

fn matmul(g: &mut Graph, a: NodeId, b: NodeId) -> Made {
    let (sa, sb) = (g.ty(a).shape.clone(), g.ty(b).shape.clone());
    if sa.is_empty() || sb.is_empty() {
        return Err(g.error(format!("matmul needs axes, got {} and {}", g.ty(a), g.ty(b))));
    }
    if sb.len() <= 2 {
        return g.push(Dot { batch: vec![], contract: vec![(sa.len() - 1, 0)] }, &[a, b]);
    }
    if sa.len() < 2 {
        return Err(g.error(format!("matmul of the vector {} wants a matrix, got {}", g.ty(a), g.ty(b))));
    }
    let (fa, fb) = (&sa[..sa.len() - 2], &sb[..sb.len() - 2]);
    let front = g.broadcast_shapes(fa, fb)?;
    let n = front.len();
    let whole = |own: &[Dim]| front.iter().chain(&own[own.len() - 2..]).cloned().collect::<Vec<_>>();
    let (a, b) = (g.broadcast(a, &whole(&sa))?, g.broadcast(b, &whole(&sb))?);
    g.push(Dot { batch: (0..n).map(|i| (i, i)).collect(), contract: vec![(n + 1, n)] }, &[a, b])
}
