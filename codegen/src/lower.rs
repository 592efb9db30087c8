//! From a region's graph to kernel statements: the value of any node at any index, views turned into index arithmetic,
//! every value bound in the outermost scope that knows its indices (so that a row's statistics are computed once a row),
//! reductions as loops with fixed lanes.

use crate::index::{Atom, Index, Var};
use crate::kernel::{Expr, Part, Stmt};
use astrai_ir::ops::{BinaryKind, CompareKind, Op, ReduceKind, Rope, UnaryKind};
use astrai_ir::{DType, Dim, Layout, NodeId, Region, Type};
use std::collections::HashMap;
use std::rc::Rc;

/// Statements of one nesting depth and the values already bound there.
#[derive(Default)]
struct Scope {
    body: Vec<Stmt>,
    known: HashMap<(NodeId, u8, Vec<Index>), Expr>,
}

/// A stretch of an axis in which every piecewise operator stays in one piece: positions `start + step·p + c`.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// First position.
    pub start: Dim,
    /// Number of positions.
    pub len: Dim,
    /// Positions an iteration covers.
    pub step: usize,
}

/// Lowers one region.
pub struct Lower<'a> {
    region: &'a Region,
    scopes: Vec<Scope>,
    names: usize,
    /// A node whose value is given, by the core that computed it.
    given: Option<(NodeId, Expr)>,
}

type Lowered = Result<Expr, String>;

impl<'a> Lower<'a> {
    /// Starts with the scope outside all loops.
    pub fn new(region: &'a Region) -> Lower<'a> {
        Lower { region, scopes: vec![Scope::default()], names: 0, given: None }
    }

    /// From here on `node` has this value.
    pub fn give(&mut self, node: NodeId, value: Expr) {
        self.given = Some((node, value));
    }

    /// A fresh loop variable one deeper than the open scopes.
    pub fn var(&mut self, extent: Dim) -> Var {
        self.names += 1;
        Var { name: format!("i{}", self.names).into(), extent, depth: self.scopes.len() }
    }

    /// Opens a scope for the body of a loop.
    pub fn open(&mut self) {
        self.scopes.push(Scope::default());
    }

    /// Closes the innermost scope and takes its statements.
    pub fn close(&mut self) -> Vec<Stmt> {
        self.scopes.pop().map(|s| s.body).unwrap_or_default()
    }

    /// Adds a statement to the innermost scope.
    pub fn push(&mut self, s: Stmt) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.body.push(s);
        }
    }

    fn ty(&self, id: NodeId) -> &'a Type {
        self.region.graph.ty(id)
    }

    fn bind(&mut self, depth: usize, dtype: DType, value: Expr) -> Expr {
        if matches!(value, Expr::Real(_) | Expr::Local(..)) {
            return value;
        }
        self.names += 1;
        let name: Rc<str> = format!("v{}", self.names).into();
        let depth = depth.min(self.scopes.len() - 1);
        self.scopes[depth].body.push(Stmt::Let { name: name.clone(), dtype, value });
        Expr::Local(name, dtype)
    }

    /// Value of a node at an index; bound where the index is known.
    pub fn value(&mut self, id: NodeId, at: &[Index]) -> Lowered {
        if let Some((node, value)) = &self.given
            && *node == id
        {
            return Ok(value.clone());
        }
        let depth = depth_of(at);
        if let Some(known) = self.scopes.get(depth).and_then(|s| s.known.get(&(id, 0, at.to_vec()))) {
            return Ok(known.clone());
        }
        let value = self.compute(id, at)?;
        let node = self.region.graph.node(id);
        let value = match node.op.is_view() {
            true => value,
            false => self.bind(depth, node.ty().dtype, value),
        };
        let depth = depth.min(self.scopes.len() - 1);
        self.scopes[depth].known.insert((id, 0, at.to_vec()), value.clone());
        Ok(value)
    }

    fn compute(&mut self, id: NodeId, at: &[Index]) -> Lowered {
        let node = self.region.graph.node(id);
        let arg = |i: usize| node.args[i];
        let dtype = node.ty().dtype;
        match &node.op {
            Op::Input(i) => self.load(&i.name, node.ty(), at),
            Op::Const(c) => match c.as_scalar() {
                Some(x) if dtype.is_float() => Ok(Expr::Real(x)),
                Some(x) => Ok(Expr::Int(Index::constant(integer(x)))),
                None => Err("a table of numbers inside a region".into()),
            },
            Op::Iota(i) => Ok(cast(DType::I64, dtype, Expr::Int(at[i.axis].clone()))),
            Op::Reshape(_) => {
                let flat = Index::linear(at, &node.ty().shape);
                let inner = flat.unravel(&self.ty(arg(0)).shape);
                self.value(arg(0), &inner)
            }
            Op::Permute(p) => {
                let mut inner = vec![Index::default(); at.len()];
                p.axes.iter().enumerate().for_each(|(i, &a)| inner[a] = at[i].clone());
                self.value(arg(0), &inner)
            }
            Op::Expand(_) => {
                let shape = &self.ty(arg(0)).shape;
                let pick = |(i, n): (&Index, &Dim)| if n.is_one() { Index::default() } else { i.clone() };
                let inner: Vec<Index> = at.iter().zip(shape).map(pick).collect();
                self.value(arg(0), &inner)
            }
            Op::Slice(s) => {
                let mut inner = at.to_vec();
                inner[s.axis] = inner[s.axis].plus(&s.start);
                self.value(arg(0), &inner)
            }
            Op::Concat(c) => self.concat(&node.args, c.axis, at),
            Op::Pad(p) => {
                let pad = Expr::Real(dtype.round(p.value.0));
                let n = self.ty(arg(0)).shape[p.axis].clone();
                let mut inner = at.to_vec();
                inner[p.axis] = inner[p.axis].plus(&(&Dim::from(0) - &p.before));
                let (low, high) = (inner[p.axis].clone(), n.clone());
                let value = match dtype.is_float() {
                    true => pad,
                    false => Expr::Int(Index::constant(integer(p.value.0))),
                };
                self.within(low, high, |l| l.clamped(arg(0), &inner, p.axis), value)
            }
            Op::Unary(u) => {
                let x = self.value(arg(0), at)?;
                Ok(match dtype.is_float() || dtype == DType::Bool {
                    true => narrow(dtype, Expr::Unary(u.kind, Box::new(x))),
                    false => integer_unary(u.kind, dtype, x),
                })
            }
            Op::Binary(b) => {
                let (x, y) = (self.value(arg(0), at)?, self.value(arg(1), at)?);
                Ok(narrow(dtype, Expr::Binary(b.kind, dtype, Box::new(x), Box::new(y))))
            }
            Op::Compare(c) => {
                let (x, y) = (self.value(arg(0), at)?, self.value(arg(1), at)?);
                Ok(Expr::Compare(c.kind, Box::new(x), Box::new(y)))
            }
            Op::Select(_) => {
                let (c, x, y) = (self.value(arg(0), at)?, self.value(arg(1), at)?, self.value(arg(2), at)?);
                Ok(Expr::Select(Box::new(c), Box::new(x), Box::new(y)))
            }
            Op::Cast(c) => {
                let x = self.value(arg(0), at)?;
                Ok(cast(self.ty(arg(0)).dtype, c.dtype, x))
            }
            Op::GatedAct(g) => {
                let (x, y) = (self.value(arg(0), at)?, self.value(arg(1), at)?);
                let a = Expr::Act(g.act, Box::new(x));
                Ok(narrow(dtype, Expr::Binary(BinaryKind::Mul, DType::F32, Box::new(a), Box::new(y))))
            }
            Op::Rope(r) => self.rope(r, &node.args, at),
            Op::Gather(g) => {
                let picks = self.ty(arg(1)).rank() - g.batch;
                let index: Vec<Index> =
                    at[..g.batch].iter().chain(&at[g.axis..g.axis + picks]).cloned().collect();
                let n = self.ty(arg(0)).shape[g.axis].clone();
                let row = self.picked(arg(1), &index, n)?;
                let mut inner = at[..g.axis].to_vec();
                inner.push(row);
                inner.extend(at[g.axis + picks..].iter().cloned());
                self.value(arg(0), &inner)
            }
            Op::Reduce(r) => self.reduce(r.kind, &r.axes, arg(0), at),
            Op::Dot(d) => self.dot(d, &node.args, at),
            Op::RmsNorm(n) => self.rms_norm(n.eps.0, id, at),
            Op::Softmax(s) => self.softmax(s.log, id, at),
            op => Err(format!("`{}` has no loop form", op.name())),
        }
    }

    fn load(&mut self, name: &str, ty: &Type, at: &[Index]) -> Lowered {
        let buf: usize = name.strip_prefix('r').and_then(|s| s.parse().ok()).ok_or("a leaf is no buffer")?;
        let at = match self.region.layouts[buf] {
            Layout::Rows => Index::linear(at, &ty.shape),
            Layout::Panels => panel_address(ty, at),
        };
        Ok(Expr::Load { buf, at, dtype: ty.dtype })
    }

    /// The integer at `index`, held inside `0 .. n`, as an index.
    fn picked(&mut self, indices: NodeId, index: &[Index], n: Dim) -> Result<Index, String> {
        let depth = depth_of(index).min(self.scopes.len() - 1);
        let raw = self.value(indices, index)?;
        let zero = Expr::Int(Index::default());
        let last = Expr::Int(Index::constant(&n - &Dim::from(1)));
        let low = Expr::Binary(BinaryKind::Max, DType::I64, Box::new(raw), Box::new(zero));
        let held = Expr::Binary(BinaryKind::Min, DType::I64, Box::new(low), Box::new(last));
        match self.bind(depth, DType::I64, held) {
            Expr::Local(name, _) => Ok(Index::atom(Atom::Local(name, depth, n))),
            _ => Err("an index is no local".into()),
        }
    }

    /// `inside` where `0 <= low < high`, else `outside`; decided now when the ranges prove it.
    fn within(
        &mut self,
        low: Index,
        high: Dim,
        inside: impl FnOnce(&mut Self) -> Lowered,
        outside: Expr,
    ) -> Lowered {
        if let (Some((a, b)), Some(n)) = (low.range(), high.literal()) {
            if a >= 0 && b < n {
                return inside(self);
            }
            if b < 0 || a >= n {
                return Ok(outside);
            }
        }
        let x = inside(self)?;
        let zero = Expr::Int(Index::default());
        let from = Expr::Compare(CompareKind::Ge, Box::new(Expr::Int(low.clone())), Box::new(zero));
        let to = Expr::Compare(
            CompareKind::Lt,
            Box::new(Expr::Int(low)),
            Box::new(Expr::Int(Index::constant(high))),
        );
        let both = Expr::Binary(BinaryKind::And, DType::Bool, Box::new(from), Box::new(to));
        Ok(Expr::Select(Box::new(both), Box::new(x), Box::new(outside)))
    }

    /// Value at an index that may lie outside along `axis`; then at the nearest that is inside.
    fn clamped(&mut self, id: NodeId, at: &[Index], axis: usize) -> Lowered {
        let mut at = at.to_vec();
        at[axis] = at[axis].hold(&self.ty(id).shape[axis]);
        self.value(id, &at)
    }

    fn concat(&mut self, args: &[NodeId], axis: usize, at: &[Index]) -> Lowered {
        let mut pieces = Vec::new();
        let mut start = Dim::from(0);
        for &a in args {
            let mut inner = at.to_vec();
            inner[axis] = inner[axis].plus(&(&Dim::from(0) - &start));
            let n = self.ty(a).shape[axis].clone();
            start = &start + &n;
            pieces.push((a, inner, n));
        }
        let Some((last, inner, _)) = pieces.pop() else { return Err("an empty concat".into()) };
        // The last piece is what remains; it is only looked at when no earlier piece is certain.
        for (a, inner, n) in &pieces {
            if let (Some((lo, hi)), Some(n)) = (inner[axis].range(), n.literal())
                && lo >= 0
                && hi < n
            {
                return self.value(*a, inner);
            }
        }
        let mut value = self.clamped(last, &inner, axis)?;
        for (a, inner, n) in pieces.into_iter().rev() {
            let low = inner[axis].clone();
            value = self.within(low, n, |l| l.clamped(a, &inner, axis), value)?;
        }
        Ok(value)
    }

    fn rope(&mut self, r: &Rope, args: &[NodeId], at: &[Index]) -> Lowered {
        let (dim, half) = (Dim::from(r.dim), Dim::from(r.dim / 2));
        let dtype = self.ty(args[0]).dtype;
        let j = at[2].clone();
        let x = self.value(args[0], at)?;
        if j.range().is_some_and(|(lo, _)| lo >= r.dim as i64) {
            return Ok(x);
        }
        let sides: [(Index, Index, bool); 2] = match r.layout {
            astrai_ir::ops::RopeLayout::Half => {
                let back = j.plus(&(&Dim::from(0) - &half));
                [(j.plus(&half), j.clone(), true), (back.clone(), back, false)]
            }
            astrai_ir::ops::RopeLayout::Interleaved => {
                let (pair, two) = (j.div(&Dim::from(2)), Dim::from(2));
                let even = pair.times(&two);
                [(even.plus(&Dim::from(1)), pair.clone(), true), (even, pair, false)]
            }
        };
        let (decided, test) = match r.layout {
            astrai_ir::ops::RopeLayout::Half => {
                let first = j.range().and_then(|(lo, hi)| {
                    let h = (r.dim / 2) as i64;
                    if hi < h {
                        Some(true)
                    } else if lo >= h {
                        Some(false)
                    } else {
                        None
                    }
                });
                (first, (j.clone(), half.clone()))
            }
            astrai_ir::ops::RopeLayout::Interleaved => {
                let rest = j.rem(&Dim::from(2));
                (rest.range().filter(|(lo, hi)| lo == hi).map(|(lo, _)| lo == 0), (rest, Dim::from(1)))
            }
        };
        let rotated = match decided {
            Some(first) => self.rotate(args, at, &x, &sides[usize::from(!first)], &half)?,
            None => {
                let a = self.rotate(args, at, &x, &sides[0], &half)?;
                let b = self.rotate(args, at, &x, &sides[1], &half)?;
                let (i, n) = test;
                let first = Expr::Compare(
                    CompareKind::Lt,
                    Box::new(Expr::Int(i)),
                    Box::new(Expr::Int(Index::constant(n))),
                );
                Expr::Select(Box::new(first), Box::new(a), Box::new(b))
            }
        };
        self.within(j, dim, |_| Ok(narrow(dtype, rotated)), x)
    }

    /// x·cos ∓ partner·sin.
    fn rotate(
        &mut self,
        args: &[NodeId],
        at: &[Index],
        x: &Expr,
        (partner, pair, first): &(Index, Index, bool),
        half: &Dim,
    ) -> Lowered {
        let mut other = at.to_vec();
        other[2] = partner.clone();
        let other = self.clamped(args[0], &other, 2)?;
        let row = [at[0].clone(), pair.hold(half)];
        let (cos, sin) = (self.value(args[1], &row)?, self.value(args[2], &row)?);
        let mul =
            |a: &Expr, b: Expr| Expr::Binary(BinaryKind::Mul, DType::F32, Box::new(a.clone()), Box::new(b));
        let kind = if *first { BinaryKind::Sub } else { BinaryKind::Add };
        Ok(Expr::Binary(kind, DType::F32, Box::new(mul(x, cos)), Box::new(mul(&other, sin))))
    }

    fn rms_norm(&mut self, eps: f64, id: NodeId, at: &[Index]) -> Lowered {
        let args = self.region.graph.node(id).args.clone();
        let dtype = self.ty(id).dtype;
        let row = &at[..at.len() - 1];
        let scale = self.statistic(id, 1, row, |l| {
            let mean = l.fold(ReduceKind::Mean, args[0], row, |l, k| {
                let x = l.value(args[0], k)?;
                Ok(Expr::Binary(BinaryKind::Mul, DType::F32, Box::new(x.clone()), Box::new(x)))
            })?;
            let m = Expr::Binary(BinaryKind::Add, DType::F32, Box::new(mean), Box::new(Expr::Real(eps)));
            Ok(Expr::Unary(UnaryKind::Rsqrt, Box::new(m)))
        })?;
        let x = self.value(args[0], at)?;
        let w = self.value(args[1], &at[at.len() - 1..])?;
        let n = Expr::Binary(BinaryKind::Mul, DType::F32, Box::new(x), Box::new(scale));
        Ok(narrow(dtype, Expr::Binary(BinaryKind::Mul, DType::F32, Box::new(n), Box::new(w))))
    }

    fn softmax(&mut self, log: bool, id: NodeId, at: &[Index]) -> Lowered {
        let x = self.region.graph.node(id).args[0];
        let dtype = self.ty(id).dtype;
        let row = &at[..at.len() - 1];
        let sub = |a: Expr, b: Expr| Expr::Binary(BinaryKind::Sub, DType::F32, Box::new(a), Box::new(b));
        let top = self.statistic(id, 1, row, |l| l.fold(ReduceKind::Max, x, row, |l, k| l.value(x, k)))?;
        let sum = self.statistic(id, 2, row, |l| {
            let sum = l.fold(ReduceKind::Sum, x, row, |l, k| {
                let v = l.value(x, k)?;
                Ok(Expr::Unary(UnaryKind::Exp, Box::new(sub(v, top.clone()))))
            })?;
            let one = Expr::Real(1.0);
            Ok(match log {
                true => Expr::Unary(UnaryKind::Log, Box::new(sum)),
                false => Expr::Binary(BinaryKind::Div, DType::F32, Box::new(one), Box::new(sum)),
            })
        })?;
        let v = self.value(x, at)?;
        let shifted = sub(v, top);
        Ok(narrow(
            dtype,
            match log {
                true => sub(shifted, sum),
                false => {
                    let e = Expr::Unary(UnaryKind::Exp, Box::new(shifted));
                    Expr::Binary(BinaryKind::Mul, DType::F32, Box::new(e), Box::new(sum))
                }
            },
        ))
    }

    /// A value of one row, bound once for the row.
    fn statistic(
        &mut self,
        id: NodeId,
        tag: u8,
        row: &[Index],
        f: impl FnOnce(&mut Self) -> Lowered,
    ) -> Lowered {
        let depth = depth_of(row).min(self.scopes.len() - 1);
        let key = (id, tag, row.to_vec());
        if let Some(known) = self.scopes[depth].known.get(&key) {
            return Ok(known.clone());
        }
        let value = self.at_depth(depth, f)?;
        let value = self.bind(depth, DType::F32, value);
        self.scopes[depth].known.insert(key, value.clone());
        Ok(value)
    }

    /// Runs `f` with the scopes deeper than `depth` put aside.
    fn at_depth<R>(&mut self, depth: usize, f: impl FnOnce(&mut Self) -> R) -> R {
        let aside = self.scopes.split_off(depth + 1);
        let r = f(self);
        self.scopes.extend(aside);
        r
    }

    /// A reduction over the last axis of `over`, whose other indices are `row`.
    fn fold(
        &mut self,
        kind: ReduceKind,
        over: NodeId,
        row: &[Index],
        mut f: impl FnMut(&mut Self, &[Index]) -> Lowered,
    ) -> Lowered {
        let shape = &self.ty(over).shape;
        let segments = self.segments(over);
        let n = shape[shape.len() - 1].clone();
        self.accumulate(kind, DType::F32, &[], &segments, n, |l, _, last| {
            let mut at = row.to_vec();
            at.push(last.clone());
            f(l, &at)
        })
    }

    fn reduce(&mut self, kind: ReduceKind, axes: &[usize], x: NodeId, at: &[Index]) -> Lowered {
        let ty = self.ty(x);
        let depth = depth_of(at).min(self.scopes.len() - 1);
        let (&inner, outer) = axes.split_last().ok_or("a reduction over no axis")?;
        let segments = match inner + 1 == ty.rank() {
            true => self.segments(x),
            false => vec![Segment { start: Dim::from(0), len: ty.shape[inner].clone(), step: 1 }],
        };
        let sizes: Vec<Dim> = outer.iter().map(|&a| ty.shape[a].clone()).collect();
        let count = Dim::product(axes.iter().map(|&a| &ty.shape[a]));
        let (rank, dtype) = (ty.rank(), ty.dtype);
        self.at_depth(depth, |l| {
            l.accumulate(kind, dtype, &sizes, &segments, count, |l, vars, last| {
                let mut kept = at.iter();
                let index: Vec<Index> = (0..rank)
                    .map(|a| match outer.iter().position(|&o| o == a) {
                        Some(i) => vars[i].clone(),
                        None if a == inner => last.clone(),
                        None => kept.next().cloned().unwrap_or_default(),
                    })
                    .collect();
                l.value(x, &index)
            })
        })
    }

    fn dot(&mut self, d: &astrai_ir::ops::Dot, args: &[NodeId], at: &[Index]) -> Lowered {
        let (l, r) = (self.ty(args[0]), self.ty(args[1]));
        let depth = depth_of(at).min(self.scopes.len() - 1);
        let (lf, rf) = (d.left_free(l.rank()), d.right_free(r.rank()));
        let (mut left, mut right) = (vec![Index::default(); l.rank()], vec![Index::default(); r.rank()]);
        for (i, (a, b)) in d.batch.iter().enumerate() {
            left[*a] = at[i].clone();
            right[*b] = at[i].clone();
        }
        lf.iter().enumerate().for_each(|(i, &a)| left[a] = at[d.batch.len() + i].clone());
        rf.iter().enumerate().for_each(|(i, &a)| right[a] = at[d.batch.len() + lf.len() + i].clone());
        let Some(((last_l, last_r), outer)) = d.contract.split_last() else {
            let (x, y) = (self.value(args[0], &left)?, self.value(args[1], &right)?);
            return Ok(Expr::Binary(BinaryKind::Mul, DType::F32, Box::new(x), Box::new(y)));
        };
        let sizes: Vec<Dim> = outer.iter().map(|p| l.shape[p.0].clone()).collect();
        let n = l.shape[*last_l].clone();
        let segments = [Segment { start: Dim::from(0), len: n.clone(), step: 1 }];
        let sum = self.at_depth(depth, |s| {
            s.accumulate(ReduceKind::Sum, DType::F32, &sizes, &segments, n, |s, vars, last| {
                let (mut left, mut right) = (left.clone(), right.clone());
                for (p, v) in outer.iter().zip(vars) {
                    left[p.0] = v.clone();
                    right[p.1] = v.clone();
                }
                left[*last_l] = last.clone();
                right[*last_r] = last.clone();
                let (x, y) = (s.value(args[0], &left)?, s.value(args[1], &right)?);
                Ok(Expr::Binary(BinaryKind::Mul, DType::F32, Box::new(x), Box::new(y)))
            })
        })?;
        Ok(narrow(l.dtype, sum))
    }

    /// A reduction in the innermost scope: loops over `outer` sizes around loops over the segments of the last axis.
    fn accumulate(
        &mut self,
        kind: ReduceKind,
        dtype: DType,
        outer: &[Dim],
        segments: &[Segment],
        count: Dim,
        mut f: impl FnMut(&mut Self, &[Index], &Index) -> Lowered,
    ) -> Lowered {
        let vars: Vec<Var> = outer.iter().map(|n| self.var(n.clone())).collect();
        let around: Vec<Index> = vars.iter().map(Index::var).collect();
        let mut parts = Vec::new();
        for s in segments {
            let (var, positions) = self.positions(s);
            self.open();
            let mut values = Vec::new();
            for p in &positions {
                values.push(f(self, &around, p)?);
            }
            parts.push(Part { var, body: self.close(), values });
        }
        self.names += 1;
        let name: Rc<str> = format!("s{}", self.names).into();
        let count = Index::constant(count);
        self.push(Stmt::Reduce { name: name.clone(), kind, dtype, outer: vars, parts, count });
        Ok(Expr::Local(name, dtype))
    }

    /// The loop variable of a segment and the positions an iteration covers.
    pub fn positions(&mut self, s: &Segment) -> (Var, Vec<Index>) {
        let step = Dim::from(s.step);
        let var = self.var(s.len.div_exact(&step).unwrap_or(s.len.clone()));
        let first = Index::var(&var).times(&step).plus(&s.start);
        let positions = (0..s.step).map(|c| first.plus(&Dim::from(c))).collect();
        (var, positions)
    }

    /// Segments of the last axis of a node, from the piecewise operators below it.
    pub fn segments(&self, id: NodeId) -> Vec<Segment> {
        let n = self.ty(id).shape.last().cloned().unwrap_or(Dim::from(1));
        let Some(len) = n.size() else { return vec![Segment { start: Dim::from(0), len: n, step: 1 }] };
        let (mut cuts, mut paired) = (vec![0, len], 0);
        self.cuts(id, 0, len, &mut cuts, &mut paired, 0);
        cuts.sort_unstable();
        cuts.dedup();
        let step = |a: usize, b: usize| {
            if b <= paired && (b - a).is_multiple_of(2) && a.is_multiple_of(2) { 2 } else { 1 }
        };
        let segment =
            |w: &[usize]| Segment { start: w[0].into(), len: (w[1] - w[0]).into(), step: step(w[0], w[1]) };
        cuts.windows(2).map(segment).collect()
    }

    /// Collects piece boundaries inside `0 .. len`, for values read at `position + shift`.
    fn cuts(
        &self,
        id: NodeId,
        shift: usize,
        len: usize,
        cuts: &mut Vec<usize>,
        paired: &mut usize,
        deep: usize,
    ) {
        let node = self.region.graph.node(id);
        let mut add = |at: usize| {
            if at > shift && at < shift + len {
                cuts.push(at - shift);
            }
        };
        let last = node.ty().rank().saturating_sub(1);
        let same_last = |a: &NodeId| self.ty(*a).shape.last() == node.ty().shape.last();
        match &node.op {
            Op::Rope(r) => {
                add(r.dim);
                match r.layout {
                    astrai_ir::ops::RopeLayout::Half => add(r.dim / 2),
                    astrai_ir::ops::RopeLayout::Interleaved if shift == 0 => *paired = r.dim,
                    astrai_ir::ops::RopeLayout::Interleaved => {}
                }
            }
            Op::Concat(c) if c.axis == last => {
                let mut end = 0;
                for a in &node.args {
                    end += self.ty(*a).shape[last].size().unwrap_or(0);
                    add(end);
                }
            }
            Op::Pad(p) if p.axis == last => {
                if let (Some(before), Some(n)) = (p.before.size(), self.ty(node.args[0]).shape[last].size()) {
                    add(before);
                    add(before + n);
                }
            }
            Op::Slice(s) if s.axis == last && deep < 32 => {
                if let Some(start) = s.start.size() {
                    self.cuts(node.args[0], shift + start, len, cuts, paired, deep + 1);
                }
            }
            Op::Input(_) | Op::Gather(_) | Op::Reduce(_) | Op::Dot(_) => {}
            _ if deep < 32 => {
                for a in node.args.iter().filter(|a| same_last(a)) {
                    self.cuts(*a, shift, len, cuts, paired, deep + 1);
                }
            }
            _ => {}
        }
    }
}

fn depth_of(at: &[Index]) -> usize {
    at.iter().map(Index::depth).max().unwrap_or(0)
}

/// Functions of one integer, wrapping as subtraction does.
fn integer_unary(kind: UnaryKind, dtype: DType, x: Expr) -> Expr {
    let zero = Expr::Int(Index::default());
    let minus = Expr::Binary(BinaryKind::Sub, dtype, Box::new(zero), Box::new(x.clone()));
    match kind {
        UnaryKind::Abs if dtype == DType::U8 => x,
        UnaryKind::Abs => Expr::Binary(BinaryKind::Max, dtype, Box::new(x), Box::new(minus)),
        _ => minus,
    }
}

fn integer(x: f64) -> Dim {
    let magnitude = Dim::from(x.abs() as usize);
    if x < 0.0 { &Dim::from(0) - &magnitude } else { magnitude }
}

fn cast(from: DType, to: DType, x: Expr) -> Expr {
    if from == to { x } else { Expr::Cast(from, to, Box::new(x)) }
}

/// Results of narrow floating types are rounded to them.
fn narrow(dtype: DType, x: Expr) -> Expr {
    if dtype.is_float() && dtype != DType::F32 { Expr::Cast(DType::F32, dtype, Box::new(x)) } else { x }
}

/// Position of element `(n, k)` in packed panels: f32 `[n/32][k][32]`, bf16 `[n/32][k/2][32][2]`.
fn panel_address(ty: &Type, at: &[Index]) -> Index {
    let (lanes, two) = (Dim::from(32), Dim::from(2));
    let k = ty.shape[1].size().unwrap_or(0);
    let (panel, column) = (at[0].div(&lanes), at[0].rem(&lanes));
    if ty.dtype == DType::BF16 {
        let words = Dim::from(k.div_ceil(2) * 64);
        let pair = at[1].div(&two).times(&Dim::from(64));
        return panel.times(&words).add(&pair).add(&column.times(&two)).add(&at[1].rem(&two));
    }
    panel.times(&Dim::from(k * 32)).add(&at[1].times(&lanes)).add(&column)
}
