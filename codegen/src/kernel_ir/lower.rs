//! From a region's graph to kernel statements: the value of any node at any index, views turned into index arithmetic,
//! every value bound in the outermost scope that knows its indices (so that a row's statistics are computed once a row),
//! reductions as loops with fixed lanes.

pub mod row;
mod segments;

pub use segments::Segment;

use crate::kernel_ir::expr::{Expr, Part, Stmt};
use crate::kernel_ir::index::{Atom, Index, Var};
use astrai_ir::ops::{BinaryKind, CompareKind, Op, ReduceKind};
use astrai_ir::{DType, Dim, Layout, NodeId, Region, Type};
use std::collections::HashMap;
use std::rc::Rc;

/// Statements of one nesting depth and the values already bound there.
#[derive(Default)]
struct Scope {
    body: Vec<Stmt>,
    known: HashMap<(NodeId, u8, Vec<Index>), Expr>,
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
        self.region.graph().ty(id)
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
        let node = self.region.graph().node(id);
        let value = match node.op.is_view() {
            true => value,
            false => self.bind(depth, node.ty().dtype, value),
        };
        let depth = depth.min(self.scopes.len() - 1);
        self.scopes[depth].known.insert((id, 0, at.to_vec()), value.clone());
        Ok(value)
    }

    fn compute(&mut self, id: NodeId, at: &[Index]) -> Lowered {
        let node = self.region.graph().node(id);
        let arg = |i: usize| node.args[i];
        let dtype = node.ty().dtype;
        match &node.op {
            Op::Input(_) => self.load(id, at),
            Op::Const(c) => match c.as_scalar() {
                Some(x) if dtype.is_float() => Ok(Expr::Real(x)),
                Some(_) => Ok(Expr::Int(Index::constant(integer(c.dtype.decode_int(&c.bits))))),
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
                    false => Expr::Int(Index::constant(integer(dtype.wrap(p.value.0 as i64)))),
                };
                self.within(low, high, |l| l.clamped(arg(0), &inner, p.axis), value)
            }
            Op::Unary(u) => {
                let x = self.value(arg(0), at)?;
                Ok(narrow(dtype, Expr::Unary(u.kind, dtype, Box::new(x))))
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
            Op::Random(r) => {
                let mut counter = |i: usize| Ok::<_, String>(Box::new(self.value(arg(i), &[])?));
                let (seed, step, at) = (counter(0)?, counter(1)?, Index::linear(at, &node.ty().shape));
                Ok(Expr::Uniform { seed, step, stream: r.stream, at })
            }
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
            _ => self.row(id, at),
        }
    }

    fn load(&mut self, leaf: NodeId, at: &[Index]) -> Lowered {
        let (piece, ty) = (&self.region.piece, self.ty(leaf));
        let operand = piece.operand(leaf).ok_or("a leaf is no buffer")?;
        let at = match piece.layout(operand) {
            Layout::Rows => Index::linear(at, &ty.shape),
            Layout::Panels { rows, group } => panel_address(ty, at, rows, group),
        };
        Ok(Expr::Load { buf: operand.0, at, dtype: ty.dtype })
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
        let to = below(low, high);
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
            false => vec![Segment::whole(ty.shape[inner].clone())],
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
        let segments = [Segment::whole(n.clone())];
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
}

fn depth_of(at: &[Index]) -> usize {
    at.iter().map(Index::depth).max().unwrap_or(0)
}

fn integer(x: i64) -> Dim {
    let magnitude = Dim::from(x.unsigned_abs() as usize);
    if x < 0 { &Dim::from(0) - &magnitude } else { magnitude }
}

/// True where an index is below a size.
fn below(i: Index, n: Dim) -> Expr {
    let n = Expr::Int(Index::constant(n));
    Expr::Compare(CompareKind::Lt, Box::new(Expr::Int(i)), Box::new(n))
}

fn cast(from: DType, to: DType, x: Expr) -> Expr {
    if from == to { x } else { Expr::Cast(from, to, Box::new(x)) }
}

/// Results of narrow floating types are rounded to them.
pub fn narrow(dtype: DType, x: Expr) -> Expr {
    if dtype.is_float() && dtype != DType::F32 { Expr::Cast(DType::F32, dtype, Box::new(x)) } else { x }
}

/// Position of element `(n, k)`, or of `(group, k, n)` whose `n` is a multiple of `rows`, in panels `[n/rows][k/group][rows][group]`.
fn panel_address(ty: &Type, at: &[Index], rows: usize, group: usize) -> Index {
    let k = ty.shape[1].size().unwrap_or(0);
    let row = match at {
        [matrix, _, n] => matrix.times(&ty.shape[2]).add(n),
        _ => at[0].clone(),
    };
    let (panel, column) = (row.div(&Dim::from(rows)), row.rem(&Dim::from(rows)));
    let group_size = Dim::from(group);
    let line = at[1].div(&group_size).times(&Dim::from(rows * group));
    let whole = panel.times(&Dim::from(k.next_multiple_of(group) * rows));
    whole.add(&line).add(&column.times(&group_size)).add(&at[1].rem(&group_size))
}
