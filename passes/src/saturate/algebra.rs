//! The e-graph of one body and its e-class analysis: type, whether an e-class depends on weights only, the constant that fills
//! it, the bytes that a read of it touches. E-nodes are added here only: types are inferred and views canonicalised on entry, so
//! that no rule has to.

use super::term::{AttrId, Tag, Term};
use astrai_ir::op::Infer;
use astrai_ir::ops::{Cast, Const, Expand, Op, Permute, Reshape, Slice};
use astrai_ir::plan::bound;
use astrai_ir::{DType, Dim, Graph, NodeId, Type};
use egg::{Analysis, DidMerge, Id};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// The e-graph.
pub type EGraph = egg::EGraph<Term, Algebra>;

/// The analysis data of an e-class.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    /// The attributes, for an e-class of attributes.
    pub attr: Option<AttrId>,
    /// Types of the outputs; none for attributes.
    pub types: Vec<Type>,
    /// It depends on weights and constants only, and its sizes are literal.
    pub weight_only: bool,
    /// The number that fills it, for a splat constant.
    pub constant: Option<f64>,
    /// Bytes that a read of it touches: those of the value before widening casts and broadcasts.
    pub bytes: u64,
    /// It is stored as bf16 and widened on read.
    pub narrow: bool,
    /// It views a version of a state that is overwritten later: rules must not move its readers.
    pub pinned: bool,
    /// Where the builder was.
    pub origin: Arc<str>,
}

impl Facts {
    /// Type of the only (or first) output.
    pub fn ty(&self) -> &Type {
        &self.types[0]
    }
}

/// The e-class analysis of a body: the body itself, and the interned attributes of operators.
pub struct Algebra {
    /// The body.
    pub graph: Arc<Graph>,
    /// Leaves that are weights.
    weights: HashSet<NodeId>,
    attrs: Vec<Op>,
    attr_of: HashMap<Op, AttrId>,
    /// Origin of e-nodes that are added now.
    pub here: Arc<str>,
}

impl Algebra {
    /// Of a body whose leaves `weights` are weights.
    pub fn new(graph: Arc<Graph>, weights: HashSet<NodeId>) -> Algebra {
        Algebra { graph, weights, attrs: vec![], attr_of: HashMap::new(), here: "".into() }
    }

    /// The operator with these attributes.
    pub fn attr(&self, id: AttrId) -> &Op {
        &self.attrs[id.0 as usize]
    }

    fn intern(&mut self, op: &Op) -> AttrId {
        if let Some(id) = self.attr_of.get(op) {
            return *id;
        }
        let id = AttrId(self.attrs.len() as u32);
        self.attrs.push(op.clone());
        self.attr_of.insert(op.clone(), id);
        id
    }

    /// A size at the symbols' upper bounds.
    pub fn size(&self, d: &Dim) -> u64 {
        bound(&self.graph.symbols, d).unwrap_or(u64::MAX)
    }

    fn leaf(&self, id: NodeId) -> Facts {
        let node = self.graph.node(id);
        Facts {
            types: node.types.clone(),
            weight_only: self.weights.contains(&id),
            bytes: self.size(&node.ty().bytes()),
            origin: node.origin.clone(),
            ..Facts::default()
        }
    }

    /// Bytes that a read of the value of `op` on `args` touches.
    fn bytes(&self, op: &Op, args: &[&Facts], types: &[Type]) -> u64 {
        let own = types.first().map_or(0, |t| self.size(&t.bytes()));
        match (op, args) {
            (Op::Cast(c), [x]) if c.dtype.represents(x.ty().dtype) => x.bytes,
            (Op::Reshape(_) | Op::Permute(_) | Op::Expand(_), [x]) => x.bytes,
            (Op::Slice(_), [x]) => {
                let whole = self.size(&x.ty().bytes()).max(1) as u128;
                (x.bytes as u128 * own as u128 / whole) as u64
            }
            _ => own,
        }
    }
}

/// The operator of an e-node and its arguments; `None` for attributes and leaves.
pub fn parts(egraph: &EGraph, term: &Term) -> Option<(Op, Vec<Id>)> {
    let Term::Op(tag, children) = term else { return None };
    if let Some(op) = tag.op() {
        return Some((op, children.to_vec()));
    }
    let (attr, args) = children.split_first()?;
    let op = egraph.analysis.attr(egraph[*attr].data.attr?).clone();
    Some((op, args.to_vec()))
}

impl Analysis<Term> for Algebra {
    type Data = Facts;

    fn make(egraph: &mut EGraph, term: &Term, _: Id) -> Facts {
        let a = &egraph.analysis;
        let mut facts = Facts { origin: a.here.clone(), ..Facts::default() };
        match term {
            Term::Attr(id) => facts.attr = Some(*id),
            Term::Leaf(id) => return a.leaf(*id),
            Term::Op(..) => {
                let Some((op, args)) = parts(egraph, term) else { return facts };
                let args: Vec<&Facts> = args.iter().map(|i| &egraph[*i].data).collect();
                facts.types = types(&a.graph, &op, &args).unwrap_or_default();
                let literal = facts.types.iter().all(|t| t.shape.iter().all(|d| d.size().is_some()));
                facts.weight_only = literal && !is_barrier(&op) && args.iter().all(|f| f.weight_only);
                facts.constant = match &op {
                    Op::Const(c) => c.as_scalar(),
                    Op::Reshape(_) | Op::Expand(_) | Op::Permute(_) => args[0].constant,
                    _ => None,
                };
                facts.bytes = a.bytes(&op, &args, &facts.types);
                facts.narrow = match (&op, args.as_slice()) {
                    (Op::Cast(c), [x]) => c.dtype == DType::F32 && x.ty().dtype == DType::BF16,
                    (op, [x]) if op.is_view() => x.narrow,
                    _ => false,
                };
                let shows = op.is_view() || op.is_pointwise();
                facts.pinned = shows && args.iter().any(|f| f.pinned);
            }
        }
        facts
    }

    fn merge(&mut self, to: &mut Facts, from: Facts) -> DidMerge {
        assert_eq!(to.types, from.types, "a rule equated two types at `{}`", to.origin);
        let before = to.clone();
        to.weight_only |= from.weight_only;
        // Two constants of one e-class are equal up to rounding; taking the smaller is independent of the order.
        to.constant = match (to.constant, from.constant) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        to.bytes = to.bytes.min(from.bytes);
        to.narrow |= from.narrow;
        to.pinned |= from.pinned;
        let known = |f: &Facts| (f.weight_only, f.constant.map(f64::to_bits), f.bytes, f.narrow, f.pinned);
        let same = |a: &Facts, b: &Facts| known(a) == known(b);
        DidMerge(!same(to, &before), !same(to, &from))
    }
}

/// Operators that are not expressions of their arguments alone: leaves, effects, random numbers, calls.
fn is_barrier(op: &Op) -> bool {
    matches!(op, Op::Call(_) | Op::Store(_) | Op::State(_) | Op::Random(_) | Op::Input(_) | Op::Weight(_))
}

fn types(graph: &Graph, op: &Op, args: &[&Facts]) -> Result<Vec<Type>, String> {
    if let (Op::Part(p), [x]) = (op, args) {
        let ty = x.types.get(p.index as usize);
        return ty.map(|t| vec![t.clone()]).ok_or_else(|| "asks for an output that is not there".into());
    }
    let first: Option<Vec<&Type>> = args.iter().map(|f| f.types.first()).collect();
    let first = first.ok_or("takes attributes for a value")?;
    if args.iter().any(|f| f.types.len() != 1) {
        return Err("takes a value of several outputs".into());
    }
    op.infer(&Infer { args: &first, graph })
}

/// The e-class of `op` on `args`; `None` where the types do not fit.
pub fn make(g: &mut EGraph, op: impl Into<Op>, args: &[Id]) -> Option<Id> {
    let op = op.into();
    if let Some(simpler) = canonical_view(g, &op, args) {
        return simpler;
    }
    let facts: Vec<&Facts> = args.iter().map(|a| &g[*a].data).collect();
    types(&g.analysis.graph, &op, &facts).ok()?;
    Some(add(g, &op, args))
}

/// The operator and arguments of an e-node of the e-class with this tag; the smallest of several.
fn find_op(g: &EGraph, class: Id, tag: &str) -> Option<(Op, Vec<Id>)> {
    let has = |t: &&Term| matches!(t, Term::Op(x, _) if x.0 == tag);
    parts(g, g[class].nodes.iter().filter(has).min()?)
}

/// `x` everywhere.
pub fn fill(g: &mut EGraph, ty: &Type, x: f64) -> Option<Id> {
    let c = make(g, Const::scalar(ty.dtype, x), &[])?;
    let c = make(g, Reshape { shape: vec![Dim::from(1); ty.rank()] }, &[c])?;
    make(g, Expand { shape: ty.shape.clone() }, &[c])
}

/// Adds an e-node without canonicalisation.
pub fn add(egraph: &mut EGraph, op: &Op, args: &[Id]) -> Id {
    let tag = Tag::of(op);
    let mut children = Vec::with_capacity(args.len() + 1);
    if tag.op().is_none() {
        let attr = egraph.analysis.intern(op);
        children.push(egraph.add(Term::Attr(attr)));
    }
    children.extend(args);
    egraph.add(Term::Op(tag, children.into()))
}

/// Canonicalises views of views, and views and casts that are identities: `Some` when there is a simpler term (`Some(None)`: an
/// ill-typed one).
fn canonical_view(g: &mut EGraph, op: &Op, args: &[Id]) -> Option<Option<Id>> {
    let &[x] = args else { return None };
    let ty = g[x].data.types.first()?.clone();
    let inner = |g: &EGraph| find_op(g, x, op.name()).filter(|_| op.is_view());
    match op {
        Op::Cast(Cast { dtype }) if *dtype == ty.dtype => Some(Some(x)),
        Op::Reshape(Reshape { shape }) | Op::Expand(Expand { shape }) if *shape == ty.shape => Some(Some(x)),
        Op::Permute(p) if p.axes.len() == ty.rank() && p.axes.is_sorted() => Some(Some(x)),
        Op::Slice(s) if s.start == Dim::from(0) && ty.shape.get(s.axis) == Some(&s.len) => Some(Some(x)),
        Op::Reshape(_) | Op::Expand(_) => inner(g).map(|(_, y)| make(g, op.clone(), &y)),
        Op::Permute(outer) => match inner(g)? {
            (Op::Permute(p), y) if outer.axes.len() == p.axes.len() => {
                let axes: Option<Vec<usize>> = outer.axes.iter().map(|&a| p.axes.get(a).copied()).collect();
                Some(axes.and_then(|axes| make(g, Permute { axes }, &y)))
            }
            _ => None,
        },
        Op::Slice(outer) => match inner(g)? {
            (Op::Slice(s), y) if s.axis == outer.axis => {
                let start = &s.start + &outer.start;
                Some(make(g, Slice { axis: s.axis, start, len: outer.len.clone() }, &y))
            }
            _ => None,
        },
        _ => None,
    }
}
