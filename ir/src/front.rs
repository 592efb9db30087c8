//! The tensor front end: a graph written by hand as arithmetic on values, recorded on a tape. In: inputs and weights by name, then
//! Rust operators and methods. Out: a finished [`Graph`], or the values of its outputs by the interpreter.
//!
//! Operator chains leave no room for `Result`. So the tape records the first error (shapes that do not fit, a missing axis), every
//! value computed from an invalid value is invalid, and [`Tape::finish`], [`Tape::run`] and [`Value::eval`] return that first
//! error. Nothing here panics.
//!
//! A two-layer perceptron, written, differentiated and run:
//!
//! ```
//! use astrai_ir::{DType::{F32, I32}, Tape, Tensor};
//! let t = Tape::new();
//! let (x, labels) = (t.input("x", F32, [4, 2]), t.input("labels", I32, [4]));
//! let (w1, b1) = (t.weight("w1", F32, &[2, 8]), t.weight("b1", F32, &[8]));
//! let (w2, b2) = (t.weight("w2", F32, &[8, 2]), t.weight("b2", F32, &[2]));
//! let hidden = (x.matmul(&w1) + &b1).relu();
//! let logp = (hidden.matmul(&w2) + &b2).log_softmax(-1);
//! let loss = -(logp * labels.one_hot(2, F32)).sum(&[-1], false).mean(&[], false);
//! let grads = loss.backward(&[&w1, &b1, &w2, &b2]);
//! let leaf = |name: &str, shape: &[usize]| {
//!     let n: usize = shape.iter().product();
//!     (name.to_string(), Tensor::f32(shape, &(0..n).map(|i| (i as f32).sin()).collect::<Vec<_>>()))
//! };
//! let labels = ("labels".to_string(), Tensor::int(I32, &[4], vec![0, 1, 1, 0]));
//! let leaves = [leaf("x", &[4, 2]), leaf("w1", &[2, 8]), leaf("b1", &[8]), leaf("w2", &[8, 2]), leaf("b2", &[2]), labels];
//! let out = t.run(&[("loss", &loss), ("dw1", &grads[0])], &leaves.into())?;
//! assert!(out["loss"].at(0) > 0.0 && out["dw1"].shape == [2, 8]);
//! # Ok::<(), astrai_ir::IrError>(())
//! ```

use crate::eval::{Precision, Sizes, eval};
use crate::graph::{Graph, IrError, NodeId};
use crate::ops::{Const, Detach, Random, RandomKind};
use crate::{DType, Dim, Shape, Symbol, Tensor, Type, grad::gradient};
use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::rc::Rc;

mod arithmetic;
mod methods;

type Made = Result<NodeId, IrError>;

/// The state that all values of a tape share.
#[derive(Default)]
struct Shared {
    graph: Graph,
    error: Option<IrError>,
}

/// A graph being recorded. Clones share the tape.
#[derive(Clone, Default)]
pub struct Tape {
    shared: Rc<RefCell<Shared>>,
}

/// A symbolic tensor of a tape, which has elements when the graph runs. Clones are the same value.
#[derive(Clone)]
pub struct Value {
    tape: Tape,
    /// `None` for an invalid value, whose error the tape has.
    node: Option<NodeId>,
}

/// What converts to a shape: an array or slice of numbers, or symbolic sizes.
pub trait IntoShape {
    /// The sizes, outermost first.
    fn into_shape(self) -> Shape;
}

impl<const N: usize> IntoShape for [usize; N] {
    fn into_shape(self) -> Shape {
        self.into_iter().map(Dim::from).collect()
    }
}

impl IntoShape for &[usize] {
    fn into_shape(self) -> Shape {
        self.iter().map(|&n| Dim::from(n)).collect()
    }
}

impl IntoShape for &[Dim] {
    fn into_shape(self) -> Shape {
        self.to_vec()
    }
}

impl IntoShape for Shape {
    fn into_shape(self) -> Shape {
        self
    }
}

impl Tape {
    /// An empty graph of literal sizes.
    pub fn new() -> Tape {
        Tape::default()
    }

    /// An empty graph whose sizes may use these symbols.
    pub fn with_symbols(symbols: Vec<Symbol>) -> Tape {
        let shared = Shared { graph: Graph::new(symbols), ..Shared::default() };
        Tape { shared: Rc::new(RefCell::new(shared)) }
    }

    /// A tape that goes on from a graph, and the values of the graph's outputs, which are outputs no more.
    pub fn over(graph: Graph) -> (Tape, HashMap<String, Value>) {
        let outputs = graph.outputs().to_vec();
        let shared = Shared { graph: graph.without_outputs(), ..Shared::default() };
        let tape = Tape { shared: Rc::new(RefCell::new(shared)) };
        let values = outputs.into_iter().map(|(name, id)| (name, tape.value(Ok(id)))).collect();
        (tape, values)
    }

    /// New nodes of a graph, written as arithmetic on values of existing ones.
    pub(crate) fn extend<const N: usize, const M: usize>(
        graph: &mut Graph,
        args: [NodeId; N],
        f: impl FnOnce([Value; N]) -> [Value; M],
    ) -> Result<[NodeId; M], IrError> {
        let shared = Shared { graph: std::mem::take(graph), ..Shared::default() };
        let tape = Tape { shared: Rc::new(RefCell::new(shared)) };
        let made = f(args.map(|id| tape.value(Ok(id))));
        let ids = tape.ids(&made.each_ref());
        *graph = std::mem::take(&mut tape.shared.borrow_mut().graph);
        ids.map(|ids| std::array::from_fn(|i| ids[i]))
    }

    /// A value given at each run.
    pub fn input(&self, name: &str, dtype: DType, shape: impl IntoShape) -> Value {
        let shape = shape.into_shape();
        self.make(|g| g.input(name, dtype, shape))
    }

    /// A trainable tensor.
    pub fn weight(&self, name: &str, dtype: DType, shape: &[usize]) -> Value {
        self.make(|g| g.weight(name, dtype, shape))
    }

    /// Literal numbers.
    pub fn constant(&self, value: &Tensor) -> Value {
        self.make(|g| g.push(Const::new(value), &[]))
    }

    /// `x` everywhere.
    pub fn full(&self, dtype: DType, shape: impl IntoShape, x: f64) -> Value {
        let ty = Type { dtype, shape: shape.into_shape() };
        self.make(|g| g.constant(ty, x))
    }

    /// Random numbers of (seed, step), both i64 scalars; see the operator `random`.
    pub fn random(&self, kind: RandomKind, ty: Type, stream: u32, seed: &Value, step: &Value) -> Value {
        self.make_from(&[seed, step], |g, a| g.push(Random { kind, ty, stream }, a))
    }

    /// Runs `f` with `name` appended to the origin of the nodes that it adds.
    pub fn scope<R>(&self, name: &str, f: impl FnOnce() -> R) -> R {
        self.shared.borrow_mut().graph.enter(name);
        let r = f();
        self.shared.borrow_mut().graph.leave();
        r
    }

    /// The graph with these outputs; or the first error.
    pub fn finish(&self, outputs: &[(&str, &Value)]) -> Result<Graph, IrError> {
        let ids: Vec<NodeId> = self.ids(&outputs.iter().map(|(_, v)| *v).collect::<Vec<_>>())?;
        let mut graph = self.shared.borrow().graph.clone();
        for ((name, _), id) in outputs.iter().zip(ids) {
            graph.set_output(name, id)?;
        }
        Ok(graph)
    }

    /// Outputs by the interpreter, from the values of inputs and weights; or the first error.
    pub fn run(
        &self,
        outputs: &[(&str, &Value)],
        leaves: &HashMap<String, Tensor>,
    ) -> Result<HashMap<String, Tensor>, IrError> {
        let graph = self.finish(outputs)?;
        Ok(eval(&graph, leaves, &Sizes::new(), Precision::default())?.into_iter().collect())
    }

    /// A value; invalid on an error, which is recorded if it is the first.
    fn value(&self, made: Made) -> Value {
        let record = |e| _ = self.shared.borrow_mut().error.get_or_insert(e);
        let node = made.map_err(record).ok();
        Value { tape: self.clone(), node }
    }

    fn make(&self, f: impl FnOnce(&mut Graph) -> Made) -> Value {
        let made = f(&mut self.shared.borrow_mut().graph);
        self.value(made)
    }

    /// A value from others; an invalid value when one of them is invalid.
    fn make_from(&self, args: &[&Value], f: impl FnOnce(&mut Graph, &[NodeId]) -> Made) -> Value {
        match self.ids(args) {
            Ok(ids) => self.make(|g| f(g, &ids)),
            Err(e) => self.value(Err(e)),
        }
    }

    /// Nodes of values of this tape; or the first error.
    fn ids(&self, values: &[&Value]) -> Result<Vec<NodeId>, IrError> {
        let shared = self.shared.borrow();
        if let Some(e) = &shared.error {
            return Err(e.clone());
        }
        let of = |v: &&Value| match v.node {
            Some(id) if Rc::ptr_eq(&v.tape.shared, &self.shared) => Ok(id),
            Some(_) => Err(shared.graph.error("values of two tapes do not go together".into())),
            None => {
                let error = v.tape.shared.borrow().error.clone();
                Err(error.unwrap_or_else(|| shared.graph.error("no value".into())))
            }
        };
        values.iter().map(of).collect()
    }
}

impl Value {
    /// Element type and shape; `None` for an invalid value.
    pub fn ty(&self) -> Option<Type> {
        Some(self.tape.shared.borrow().graph.ty(self.node?).clone())
    }

    /// The node in the tape's graph; `None` for an invalid value.
    pub fn node(&self) -> Option<NodeId> {
        self.node
    }

    /// The elements by the interpreter, from the values of inputs and weights; or the tape's first error.
    pub fn eval(&self, leaves: &HashMap<String, Tensor>) -> Result<Tensor, IrError> {
        let mut out = self.tape.run(&[("value", self)], leaves)?;
        out.remove("value").ok_or_else(|| self.tape.shared.borrow().graph.error("no value".into()))
    }

    /// The same value, through which no gradient flows (stop-gradient).
    pub fn detach(&self) -> Value {
        self.with(|g, x| g.push(Detach {}, &[x]))
    }

    /// Gradients of the sum of this value's elements with respect to `wrt`, as new values of the tape; zeros for those that it
    /// does not depend on.
    pub fn backward(&self, wrt: &[&Value]) -> Vec<Value> {
        match self.gradients(wrt) {
            Ok(ids) => ids.into_iter().map(|id| self.tape.value(Ok(id))).collect(),
            Err(e) => wrt.iter().map(|_| self.tape.value(Err(e.clone()))).collect(),
        }
    }

    fn gradients(&self, wrt: &[&Value]) -> Result<Vec<NodeId>, IrError> {
        let y = self.tape.ids(&[self])?[0];
        let wrt = self.tape.ids(wrt)?;
        let shared = &mut *self.tape.shared.borrow_mut();
        let one = shared.graph.fill(y, 1.0)?;
        let found = gradient(&mut shared.graph, &[(y, one)], &wrt)?;
        let zero_or = |(w, g): (&NodeId, Option<NodeId>)| g.map_or_else(|| shared.graph.fill(*w, 0.0), Ok);
        wrt.iter().zip(found).map(zero_or).collect()
    }

    /// A value from this one.
    fn with(&self, f: impl FnOnce(&mut Graph, NodeId) -> Made) -> Value {
        self.tape.make_from(&[self], |g, a| f(g, a[0]))
    }

    /// A value from this one and another.
    fn with2(&self, o: &Value, f: impl FnOnce(&mut Graph, NodeId, NodeId) -> Made) -> Value {
        self.tape.make_from(&[self, o], |g, a| f(g, a[0], a[1]))
    }
}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.node, self.ty()) {
            (Some(id), Some(ty)) => write!(f, "{id}: {ty}"),
            _ => f.write_str("invalid"),
        }
    }
}

/// Position of an axis that may be counted from the end: -1 is the last.
fn axis_of(g: &Graph, x: NodeId, axis: isize) -> Result<usize, IrError> {
    let rank = g.ty(x).rank();
    let at = if axis < 0 { axis + rank as isize } else { axis };
    let at = usize::try_from(at).ok().filter(|&a| a < rank);
    at.ok_or_else(|| g.error(format!("axis {axis} is outside {}", g.ty(x))))
}

/// [`axis_of`] for several axes, ascending and each once; all of them for none.
fn axes_of(g: &Graph, x: NodeId, axes: &[isize]) -> Result<Vec<usize>, IrError> {
    if axes.is_empty() {
        return Ok((0..g.ty(x).rank()).collect());
    }
    let mut found = axes.iter().map(|&a| axis_of(g, x, a)).collect::<Result<Vec<_>, _>>()?;
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

/// Start and number of elements of a range.
fn start_and_len(range: Range<usize>) -> (Dim, Dim) {
    (Dim::from(range.start), Dim::from(range.end.saturating_sub(range.start)))
}
