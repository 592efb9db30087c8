//! Shorthands for adding nodes: arithmetic, broadcasting, reductions that keep dimensions. Builders and gradient rules use
//! them; each is one or a few calls of `push`.

use crate::graph::{Graph, IrError, NodeId};
use crate::ops::*;
use crate::ty::show;
use crate::{DType, Dim, Real, Shape, Type};

type Made = Result<NodeId, IrError>;

impl Graph {
    /// A value given at each run.
    pub fn input(&mut self, name: &str, dtype: DType, shape: Shape) -> Made {
        self.push(Input { name: name.to_string(), ty: Type { dtype, shape } }, &[])
    }

    /// A trainable tensor of literal shape.
    pub fn weight(&mut self, name: &str, dtype: DType, shape: &[usize]) -> Made {
        let ty = Type::new(dtype, shape.iter().map(|&n| Dim::from(n)));
        self.push(Weight::new(name, ty), &[])
    }

    /// `x` everywhere, with the type of `like`.
    pub fn fill(&mut self, like: NodeId, x: f64) -> Made {
        let ty = self.ty(like).clone();
        self.constant(ty, x)
    }

    /// `x` everywhere.
    pub fn constant(&mut self, ty: Type, x: f64) -> Made {
        let c = self.push(Const::scalar(ty.dtype, x), &[])?;
        self.broadcast(c, &ty.shape)
    }

    /// A pointwise function of one argument.
    pub fn unary(&mut self, kind: UnaryKind, x: NodeId) -> Made {
        self.push(Unary { kind }, &[x])
    }

    /// A pointwise function of two arguments, each broadcast to the other.
    pub fn binary(&mut self, kind: BinaryKind, a: NodeId, b: NodeId) -> Made {
        let (a, b) = self.broadcast_pair(a, b)?;
        self.push(Binary { kind }, &[a, b])
    }

    /// `a + b`.
    pub fn add(&mut self, a: NodeId, b: NodeId) -> Made {
        self.binary(BinaryKind::Add, a, b)
    }

    /// `a - b`.
    pub fn sub(&mut self, a: NodeId, b: NodeId) -> Made {
        self.binary(BinaryKind::Sub, a, b)
    }

    /// `a * b`.
    pub fn mul(&mut self, a: NodeId, b: NodeId) -> Made {
        self.binary(BinaryKind::Mul, a, b)
    }

    /// `a / b`.
    pub fn div(&mut self, a: NodeId, b: NodeId) -> Made {
        self.binary(BinaryKind::Div, a, b)
    }

    /// `x * factor`.
    pub fn scale(&mut self, x: NodeId, factor: f64) -> Made {
        let f = self.fill(x, factor)?;
        self.mul(x, f)
    }

    /// Truth of a comparison, each side broadcast to the other.
    pub fn compare(&mut self, kind: CompareKind, a: NodeId, b: NodeId) -> Made {
        let (a, b) = self.broadcast_pair(a, b)?;
        self.push(Compare { kind }, &[a, b])
    }

    /// `a` where `condition`, else `b`.
    pub fn select(&mut self, condition: NodeId, a: NodeId, b: NodeId) -> Made {
        self.push(Select {}, &[condition, a, b])
    }

    /// The same numbers as another type.
    pub fn cast(&mut self, x: NodeId, dtype: DType) -> Made {
        self.push(Cast { dtype }, &[x])
    }

    /// The same elements under other sizes.
    pub fn reshape(&mut self, x: NodeId, shape: Shape) -> Made {
        self.push(Reshape { shape }, &[x])
    }

    /// The axes permuted.
    pub fn permute(&mut self, x: NodeId, axes: &[usize]) -> Made {
        self.push(Permute { axes: axes.to_vec() }, &[x])
    }

    /// Elements `start .. start + len` of an axis.
    pub fn slice(&mut self, x: NodeId, axis: usize, start: Dim, len: Dim) -> Made {
        self.push(Slice { axis, start, len }, &[x])
    }

    /// `x` broadcast to `shape`: along axes of size one, and along new leading axes.
    pub fn broadcast(&mut self, x: NodeId, shape: &[Dim]) -> Made {
        let own = self.ty(x).shape.clone();
        if own.len() > shape.len() {
            return self.push(Expand { shape: shape.to_vec() }, &[x]);
        }
        let mut full = vec![Dim::from(1); shape.len() - own.len()];
        full.extend(own);
        let x = self.reshape(x, full)?;
        self.push(Expand { shape: shape.to_vec() }, &[x])
    }

    /// Reduction that drops the axes.
    pub fn reduce(&mut self, kind: ReduceKind, x: NodeId, axes: &[usize]) -> Made {
        self.push(Reduce { kind, axes: axes.to_vec() }, &[x])
    }

    /// Reduction over the last axis, broadcast back to the shape of `x`.
    pub fn reduce_last(&mut self, kind: ReduceKind, x: NodeId) -> Made {
        let op = Reduce { kind, axes: vec![self.ty(x).rank().saturating_sub(1)] };
        let r = self.push(op.clone(), &[x])?;
        op.broadcast_back(self, r, x)
    }

    /// `x · wᵀ` for `x` `[…, k]` and `w` `[n, k]`: `[…, n]`.
    pub fn linear(&mut self, x: NodeId, w: NodeId) -> Made {
        let k = self.ty(x).rank().saturating_sub(1);
        self.push(Dot { batch: vec![], contract: vec![(k, 1)] }, &[x, w])
    }

    /// `x[i]` along `axis` for every integer in `indices`.
    pub fn gather(&mut self, x: NodeId, indices: NodeId, axis: usize) -> Made {
        self.push(Gather { axis, batch: 0 }, &[x, indices])
    }

    /// `x / sqrt(mean(x²) + eps) · w` over the last axis.
    pub fn rms_norm(&mut self, x: NodeId, w: NodeId, eps: f64) -> Made {
        self.push(RmsNorm { eps: Real(eps) }, &[x, w])
    }

    /// Both values broadcast to the broadcast of their shapes.
    pub(crate) fn broadcast_pair(&mut self, a: NodeId, b: NodeId) -> Result<(NodeId, NodeId), IrError> {
        let (sa, sb) = (self.ty(a).shape.clone(), self.ty(b).shape.clone());
        if sa == sb {
            return Ok((a, b));
        }
        let shape = self.broadcast_shapes(&sa, &sb)?;
        Ok((self.broadcast(a, &shape)?, self.broadcast(b, &shape)?))
    }

    /// The broadcast of two shapes: aligned at their ends, sizes equal or one of them 1.
    pub(crate) fn broadcast_shapes(&self, a: &[Dim], b: &[Dim]) -> Result<Shape, IrError> {
        let rank = a.len().max(b.len());
        let at = |s: &[Dim], i: usize| (i + s.len()).checked_sub(rank).map_or(Dim::from(1), |i| s[i].clone());
        let mut shape = Vec::with_capacity(rank);
        for i in 0..rank {
            let (x, y) = (at(a, i), at(b, i));
            if x != y && !x.is_one() && !y.is_one() {
                let (a, b) = (show(a), show(b));
                return Err(self.error(format!("{a} and {b} do not broadcast: {x} and {y} differ")));
            }
            shape.push(if x.is_one() { y } else { x });
        }
        Ok(shape)
    }
}
