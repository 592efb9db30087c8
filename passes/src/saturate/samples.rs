//! An instance of every rule for its property test. In: a source of random numbers. Out: a graph whose only output the rule
//! rewrites, its sizes drawn.

mod dots;

pub use dots::*;

use astrai_ir::ops::*;
use astrai_ir::{DType, Dim, Graph, NodeId, Real, Shape, Symbol};

/// Random sizes and choices.
pub struct Draw(pub u64);

impl Draw {
    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % n
    }

    /// A size: at least 2, so that what is repeated is seen.
    fn size(&mut self) -> usize {
        2 + self.below(4)
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

fn shape(sizes: &[usize]) -> Shape {
    sizes.iter().map(|&n| Dim::from(n)).collect()
}

/// A graph in the making; `tokens` is a symbol.
struct Make<'a> {
    g: Graph,
    draw: &'a mut Draw,
    leaves: usize,
}

impl<'a> Make<'a> {
    fn new(draw: &'a mut Draw) -> Make<'a> {
        let tokens = Symbol { name: "tokens".into(), min: 1, max: 8, multiple_of: 1 };
        Make { g: Graph::new(vec![tokens]), draw, leaves: 0 }
    }

    fn x(&mut self, sizes: &[usize]) -> NodeId {
        self.typed(DType::F32, shape(sizes))
    }

    fn typed(&mut self, dtype: DType, shape: Shape) -> NodeId {
        self.leaves += 1;
        self.g.input(&format!("x{}", self.leaves), dtype, shape).unwrap()
    }

    /// `[tokens, n]`.
    fn rows(&mut self, n: usize) -> NodeId {
        self.typed(DType::F32, vec![Dim::symbol("tokens"), n.into()])
    }

    fn w(&mut self, sizes: &[usize]) -> NodeId {
        self.leaves += 1;
        self.g.weight(&format!("w{}", self.leaves), DType::F32, sizes).unwrap()
    }

    fn push(&mut self, op: impl Into<Op>, args: &[NodeId]) -> NodeId {
        self.g.push(op, args).unwrap()
    }

    fn expand(&mut self, x: NodeId, to: Shape) -> NodeId {
        self.push(Expand { shape: to }, &[x])
    }

    /// Either order of a commutative function.
    fn either(&mut self, kind: BinaryKind, a: NodeId, b: NodeId) -> NodeId {
        let args = if self.draw.below(2) == 0 { [a, b] } else { [b, a] };
        self.push(Binary { kind }, &args)
    }

    fn scaled(&mut self, x: NodeId, factors: &[f64]) -> NodeId {
        let f = self.draw.pick(factors);
        let f = self.g.fill(x, f).unwrap();
        self.either(BinaryKind::Mul, x, f)
    }

    /// `x · w` for a weight `[n, k]` or `[k, n]`.
    fn linear(&mut self, x: NodeId, k: usize, n: usize) -> NodeId {
        let at = self.draw.below(2);
        let w = self.w(&if at == 1 { [n, k] } else { [k, n] });
        self.dot(x, w, at)
    }

    fn dot(&mut self, x: NodeId, w: NodeId, at: usize) -> NodeId {
        let last = self.g.ty(x).rank() - 1;
        self.push(Dot { batch: vec![], contract: vec![(last, at)] }, &[x, w])
    }

    fn done(mut self, y: NodeId) -> Graph {
        self.g.set_output("y", y).unwrap();
        self.g
    }
}

const ADD: BinaryKind = BinaryKind::Add;
const MUL: BinaryKind = BinaryKind::Mul;

// casts

/// A narrow input, widened.
fn widened(m: &mut Make, sizes: &[usize]) -> NodeId {
    let x = m.typed(DType::BF16, shape(sizes));
    m.push(Cast { dtype: DType::F32 }, &[x])
}

pub fn cast_of_cast(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let n = m.draw.size();
    let x = widened(&mut m, &[n]);
    let dtype = m.draw.pick(&[DType::F16, DType::I32, DType::F8E4M3]);
    let y = m.push(Cast { dtype }, &[x]);
    m.done(y)
}

pub fn cast_of_view(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let (a, b) = (m.draw.size(), m.draw.size());
    let x = m.typed(DType::BF16, shape(&[a, 1, b]));
    let v = match m.draw.below(3) {
        0 => m.push(Reshape { shape: shape(&[a * b]) }, &[x]),
        1 => m.push(Permute { axes: vec![2, 0, 1] }, &[x]),
        _ => m.push(Expand { shape: shape(&[a, 3, b]) }, &[x]),
    };
    let y = m.push(Cast { dtype: DType::F32 }, &[v]);
    m.done(y)
}

pub fn cast_of_widened_view(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let (a, b) = (m.draw.size(), m.draw.size());
    let x = widened(&mut m, &[a, b]);
    let x = m.push(Reshape { shape: shape(&[a * b]) }, &[x]);
    let y = m.push(Cast { dtype: DType::BF16 }, &[x]);
    m.done(y)
}

pub fn slice_of_cast(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let x = widened(&mut m, &[3, 5]);
    let start = m.draw.below(3);
    let y = m.push(Slice { axis: 1, start: start.into(), len: 2.into() }, &[x]);
    m.done(y)
}

pub fn gather_of_cast(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let x = widened(&mut m, &[4, 3]);
    let i = m.typed(DType::I32, shape(&[3]));
    let axis = m.draw.below(2);
    let y = m.push(Gather { axis, batch: 0 }, &[x, i]);
    m.done(y)
}

pub fn concat_of_casts(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let (n, k) = (m.draw.size(), m.draw.size());
    let (a, b) = (widened(&mut m, &[2, n]), widened(&mut m, &[2, k]));
    let y = m.push(Concat { axis: 1 }, &[a, b]);
    m.done(y)
}

// views

pub fn slice_of_concat(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let (a, b) = (m.x(&[2, 3]), m.x(&[2, 4]));
    let c = m.push(Concat { axis: 1 }, &[a, b]);
    let (start, len) = m.draw.pick(&[(0, 3), (1, 2), (3, 4), (4, 2)]);
    let y = m.push(Slice { axis: 1, start: Dim::from(start), len: Dim::from(len) }, &[c]);
    m.done(y)
}

pub fn concat_of_slices(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let x = m.x(&[2, 6]);
    let (start, mid) = m.draw.pick(&[(0, 2), (1, 3), (0, 4)]);
    let cut = |from: usize, to: usize| Slice { axis: 1, start: from.into(), len: (to - from).into() };
    let (a, b) = (m.push(cut(start, mid), &[x]), m.push(cut(mid, 5), &[x]));
    let y = m.push(Concat { axis: 1 }, &[a, b]);
    m.done(y)
}

pub fn sum_of_expands(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let n = m.draw.size();
    let (a, b) = (m.x(&[1, n]), m.x(&[1, n]));
    let view: Op = match m.draw.below(2) {
        0 => Expand { shape: shape(&[3, n]) }.into(),
        _ => Reshape { shape: shape(&[n, 1]) }.into(),
    };
    let (a, b) = (m.push(view.clone(), &[a]), m.push(view, &[b]));
    let kind = m.draw.pick(&[ADD, BinaryKind::Sub, MUL, BinaryKind::Div]);
    let y = m.push(Binary { kind }, &[a, b]);
    m.done(y)
}

pub fn cosine_of_expand(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let n = m.draw.size();
    let x = m.x(&[n, 1]);
    let wide = m.expand(x, shape(&[n, 4]));
    use UnaryKind::*;
    let kind = m.draw.pick(&[Cos, Sin, Exp, Neg]);
    let y = m.push(Unary { kind }, &[wide]);
    m.done(y)
}

pub fn permute_of_dot(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    if m.draw.below(2) == 0 {
        let (x, w) = (m.x(&[2, 5, 3]), m.x(&[2, 3, 4]));
        let y = m.push(Dot { batch: vec![(0, 0)], contract: vec![(2, 1)] }, &[x, w]);
        let y = m.push(Permute { axes: vec![0, 2, 1] }, &[y]);
        return m.done(y);
    }
    let (x, w) = (m.x(&[2, 5, 3]), m.x(&[3, 4]));
    let y = m.push(Dot { batch: vec![], contract: vec![(2, 0)] }, &[x, w]);
    let y = m.push(Permute { axes: vec![2, 0, 1] }, &[y]);
    m.done(y)
}

pub fn dot_of_permute(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let (x, w) = (m.x(&[2, 3, 4]), m.x(&[5, 2, 3]));
    let p = m.push(Permute { axes: vec![1, 0, 2] }, &[x]);
    let (batch, contract) =
        m.draw.pick(&[(&[][..], &[(1, 1)][..]), (&[(0, 2)], &[(1, 1)]), (&[], &[(1, 1), (0, 2)])]);
    let y = m.push(Dot { batch: batch.to_vec(), contract: contract.to_vec() }, &[p, w]);
    m.done(y)
}

pub fn gather_of_dot(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let (k, n) = (m.draw.size(), m.draw.size());
    let w = m.x(&[5, k]);
    let table = m.linear(w, k, n);
    let i = m.typed(DType::I32, vec![Dim::symbol("tokens")]);
    let y = m.g.gather(table, i, 0).unwrap();
    m.done(y)
}

// numbers

pub fn negated_twice(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let x = m.rows(3);
    let y = m.g.unary(UnaryKind::Neg, x).unwrap();
    let y = m.g.unary(UnaryKind::Neg, y).unwrap();
    m.done(y)
}

pub fn add_of_negated(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let (x, y) = (m.rows(3), m.rows(3));
    let n = m.g.unary(UnaryKind::Neg, y).unwrap();
    let y = m.either(ADD, x, n);
    m.done(y)
}

pub fn times_one(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let x = m.rows(3);
    let y = m.scaled(x, &[1.0]);
    m.done(y)
}

pub fn times_minus_one(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let x = m.rows(3);
    let y = m.scaled(x, &[-1.0]);
    m.done(y)
}

pub fn constant_chain(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let x = m.rows(3);
    let y = m.scaled(x, &[0.3, -1.7, 1e-3]);
    let y = m.scaled(y, &[0.125, 3.0]);
    m.done(y)
}

pub fn divide_by_constant(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let x = m.rows(3);
    let c = m.draw.pick(&[3.0, -0.7, 8.0]);
    let c = m.g.fill(x, c).unwrap();
    let y = m.g.div(x, c).unwrap();
    m.done(y)
}

pub fn biases_added(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let n = m.draw.size();
    let x = m.rows(n);
    let mut y = x;
    for _ in 0..2 {
        let b = m.w(&[n]);
        let shape = m.g.ty(x).shape.clone();
        let b = m.g.broadcast(b, &shape).unwrap();
        y = m.either(ADD, y, b);
    }
    m.done(y)
}

// sums

/// A reduction over axes 0 and maybe 2 of `[2, n, 3]` made of `[1, n, 3]`.
fn of_repeated(d: &mut Draw, kinds: &[ReduceKind]) -> Graph {
    let mut m = Make::new(d);
    let n = m.draw.size();
    let x = m.x(&[1, n, 3]);
    let x = m.expand(x, shape(&[2, n, 3]));
    let kind = m.draw.pick(kinds);
    let axes = m.draw.pick(&[&[0][..], &[0, 2]]).to_vec();
    let y = m.push(Reduce { kind, axes }, &[x]);
    m.done(y)
}

fn of_single(d: &mut Draw, kinds: &[ReduceKind]) -> Graph {
    let mut m = Make::new(d);
    let n = m.draw.size();
    let x = m.x(&[n, 1, 2]);
    let kind = m.draw.pick(kinds);
    let y = m.push(Reduce { kind, axes: vec![1] }, &[x]);
    m.done(y)
}

fn of_reduced(d: &mut Draw, kinds: &[ReduceKind]) -> Graph {
    let mut m = Make::new(d);
    let x = m.x(&[3, 2, 4, 2]);
    let kind = m.draw.pick(kinds);
    let (first, then) = m.draw.pick(&[(&[1][..], &[0, 2][..]), (&[3], &[1]), (&[0, 2], &[1])]);
    let y = m.push(Reduce { kind, axes: first.to_vec() }, &[x]);
    let y = m.push(Reduce { kind, axes: then.to_vec() }, &[y]);
    m.done(y)
}

use ReduceKind::{Max, Mean, Min, Prod, Sum};

pub fn extreme_of_expand(d: &mut Draw) -> Graph {
    of_repeated(d, &[Max, Min])
}

pub fn extreme_of_one(d: &mut Draw) -> Graph {
    of_single(d, &[Max, Min, Prod])
}

pub fn extreme_of_extremes(d: &mut Draw) -> Graph {
    of_reduced(d, &[Max, Min])
}

pub fn sum_of_expand(d: &mut Draw) -> Graph {
    of_repeated(d, &[Sum, Mean])
}

pub fn sum_of_one(d: &mut Draw) -> Graph {
    of_single(d, &[Sum, Mean])
}

pub fn sum_of_sums(d: &mut Draw) -> Graph {
    of_reduced(d, &[Sum])
}

pub fn sums_added(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let (x, y) = (m.x(&[3, 4]), m.x(&[3, 4]));
    let axes = vec![m.draw.below(2)];
    let x = m.push(Reduce { kind: Sum, axes: axes.clone() }, &[x]);
    let y = m.push(Reduce { kind: Sum, axes }, &[y]);
    let y = m.g.add(x, y).unwrap();
    m.done(y)
}

pub fn sum_of_scaled(d: &mut Draw) -> Graph {
    let mut m = Make::new(d);
    let axis = m.draw.below(2);
    let mut own = [3, 4];
    own[axis] = 1;
    let (x, c) = (m.x(&[3, 4]), m.x(&own));
    let c = m.expand(c, shape(&[3, 4]));
    let y = m.either(MUL, x, c);
    let y = m.push(Reduce { kind: Sum, axes: vec![axis] }, &[y]);
    m.done(y)
}
