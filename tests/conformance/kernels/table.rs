//! The table: many small cases in one graph, so that few translation units hold dozens of kernels. In: cases as outputs of
//! a graph, leaves with the range of their values. Out: the host's results held against the interpreter's, at several
//! values of the symbol `n` and with every level of vector instructions that the processor has, within the tolerance of the
//! operators that made them.

use crate::machines::{emulated, machine, machines, own};
use astrai_engine::machine::Machine;
use astrai_ir::ops::{Op, State};
use astrai_ir::{DType, Dim, Graph, NodeId, Precision, Shape, Sizes, Symbol, Tensor, Type, eval};
use astrai_runtime::{Buffers, Compiled, Error, Options, Session, Value, compile};
use std::collections::HashMap;
use std::sync::Arc;

/// Values of a leaf.
#[derive(Clone, Debug)]
pub enum Fill {
    /// Reals of a range, rounded to the type.
    Real(f64, f64),
    /// Integers of a range, its end included.
    Int(i64, i64),
    /// These, over and over.
    List(Vec<f64>),
}

struct Leaf {
    name: String,
    ty: Type,
    fill: Fill,
    role: Role,
}

#[derive(Clone, Copy, PartialEq)]
enum Role {
    Input,
    Weight,
    State,
}

/// Cases in one graph.
pub struct Table {
    /// The graph; outputs are cases.
    pub g: Graph,
    leaves: Vec<Leaf>,
    storage: DType,
    slack: f64,
    gradient_of: Option<String>,
}

/// Sizes from literals.
pub fn dims(sizes: &[usize]) -> Shape {
    sizes.iter().map(|&n| Dim::from(n)).collect()
}

/// `[n, rest…]` with the table's symbol.
pub fn rows(rest: &[usize]) -> Shape {
    [Dim::symbol("n")].into_iter().chain(dims(rest)).collect()
}

/// A well-mixed number of two.
pub fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ b.wrapping_add(0x632b_e59b_d9b4_e019);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Fill {
    /// A tensor of these values.
    pub fn tensor(&self, seed: u64, dtype: DType, shape: &[usize]) -> Tensor {
        let n: usize = shape.iter().product();
        let unit = |i: usize| (mix(seed, i as u64) >> 11) as f64 / (1u64 << 53) as f64;
        let int = |a: &i64, b: &i64, i| a + (mix(seed, i as u64) % (b - a + 1) as u64) as i64;
        match self {
            Fill::Real(a, b) => Tensor::float(dtype, shape, (0..n).map(|i| a + (b - a) * unit(i)).collect()),
            Fill::Int(a, b) if dtype.is_float() => {
                Tensor::float(dtype, shape, (0..n).map(|i| int(a, b, i) as f64).collect())
            }
            Fill::Int(a, b) => Tensor::int(dtype, shape, (0..n).map(|i| int(a, b, i)).collect()),
            Fill::List(v) if dtype.is_float() => {
                Tensor::float(dtype, shape, (0..n).map(|i| v[i % v.len()]).collect())
            }
            Fill::List(v) => Tensor::int(dtype, shape, (0..n).map(|i| v[i % v.len()] as i64).collect()),
        }
    }
}

impl Table {
    /// An empty table over the symbol `n`, which is at most 300.
    pub fn new() -> Table {
        Table::over(300)
    }

    /// An empty table over the symbol `n`, which is at most this.
    pub fn over(max: u64) -> Table {
        let n = Symbol { name: "n".into(), min: 1, max, multiple_of: 1 };
        Table { g: Graph::new(vec![n]), leaves: vec![], storage: DType::F32, slack: 1.0, gradient_of: None }
    }

    /// The table compiled with this storage type, its results compared with this many times the tolerance.
    pub fn stored(mut self, storage: DType, slack: f64) -> Table {
        (self.storage, self.slack) = (storage, slack);
        self
    }

    /// The table with gradients of the output `of` by its weights as further cases.
    pub fn gradient_of(mut self, of: &str) -> Table {
        self.gradient_of = Some(of.into());
        self
    }

    /// A fresh input.
    pub fn input(&mut self, dtype: DType, shape: Shape, fill: Fill) -> NodeId {
        let name = format!("in{}", self.leaves.len());
        self.named(&name, dtype, shape, fill)
    }

    /// An input of this name.
    pub fn named(&mut self, name: &str, dtype: DType, shape: Shape, fill: Fill) -> NodeId {
        let ty = Type { dtype, shape: shape.clone() };
        self.leaves.push(Leaf { name: name.into(), ty, fill, role: Role::Input });
        self.g.input(name, dtype, shape).unwrap()
    }

    /// A state of this name.
    pub fn state(&mut self, name: &str, ty: Type, fill: Fill) -> NodeId {
        self.leaves.push(Leaf { name: name.into(), ty: ty.clone(), fill, role: Role::State });
        self.g.push(State { name: name.into(), ty }, &[]).unwrap()
    }

    /// A fresh f32 input of values between -2 and 2.
    pub fn x(&mut self, shape: Shape) -> NodeId {
        self.input(DType::F32, shape, Fill::Real(-2.0, 2.0))
    }

    /// A fresh weight.
    pub fn weight(&mut self, dtype: DType, shape: &[usize]) -> NodeId {
        self.weight_of(dtype, shape, Fill::Real(-1.0, 1.0))
    }

    /// A fresh weight of these values.
    pub fn weight_of(&mut self, dtype: DType, shape: &[usize], fill: Fill) -> NodeId {
        let name = format!("w{}", self.leaves.len());
        self.leaves.push(Leaf {
            name: name.clone(),
            ty: Type { dtype, shape: dims(shape) },
            fill,
            role: Role::Weight,
        });
        self.g.weight(&name, dtype, shape).unwrap()
    }

    /// A weight of this name.
    pub fn weight_named(&mut self, name: &str, dtype: DType, shape: &[usize]) -> NodeId {
        let ty = Type { dtype, shape: dims(shape) };
        self.leaves.push(Leaf { name: name.into(), ty, fill: Fill::Real(-1.0, 1.0), role: Role::Weight });
        self.g.weight(name, dtype, shape).unwrap()
    }

    /// Declares a case.
    pub fn case(&mut self, name: &str, id: NodeId) {
        self.g.set_output(name, id).unwrap();
    }

    /// The compiled table.
    pub fn compiled(&self) -> Compiled {
        self.compiled_on(machine())
    }

    /// The same for this machine.
    pub fn compiled_on(&self, m: &Machine) -> Compiled {
        let options =
            Options { storage: self.storage, gradient_of: self.gradient_of.clone(), ..Options::default() };
        compile(&self.g, m.backend(), &options).unwrap_or_else(|e| panic!("{e}"))
    }

    /// Every region has a kernel of its own.
    pub fn all_native(&self) -> &Table {
        let program = self.compiled();
        if let Some(r) = program.plan.regions.iter().find(|r| !r.form().has_kernel()) {
            let ops: Vec<&str> = r.graph().nodes().iter().map(|n| n.op.name()).collect();
            panic!("no kernel for {ops:?}");
        }
        self
    }

    /// The table with this case alone, and one that gives the symbol its size where nothing else does.
    pub fn only(mut self, case: &str) -> Table {
        let id = self.g.output(case).unwrap();
        self.g = self.g.without_outputs();
        self.case(case, id);
        let live = self.g.live();
        let sized = |id: NodeId| {
            let node = self.g.node(id);
            live[id.index()]
                && node.op.leaf_name().is_some()
                && node.ty().shape.iter().any(|d| d.size().is_none())
        };
        if !self.g.ids().any(sized) {
            let unused = self.x(rows(&[]));
            self.case("size", unused);
        }
        self
    }

    /// Values of the leaves at this size.
    pub fn values(&self, n: u64) -> HashMap<String, Tensor> {
        self.values_of((n, 0))
    }

    /// The same, of inputs drawn from a seed.
    pub fn values_of(&self, (n, seed): (u64, u64)) -> HashMap<String, Tensor> {
        let sizes = Sizes::from([("n".to_string(), n)]);
        let value = |(i, l): (usize, &Leaf)| {
            let size = |d: &Dim| d.eval(&|s| sizes.get(s).copied()).unwrap() as usize;
            let shape: Vec<usize> = l.ty.shape.iter().map(size).collect();
            let seed = if l.role == Role::Input { seed << 32 } else { 0 };
            (l.name.clone(), l.fill.tensor(i as u64 + 1 + seed, l.ty.dtype, &shape))
        };
        self.leaves.iter().enumerate().map(value).collect()
    }

    /// A session of the table's program.
    pub fn session(&self) -> Session {
        self.session_on(machine())
    }

    /// The same on this machine.
    pub fn session_on(&self, m: &Machine) -> Session {
        self.open(m, &self.states(m))
    }

    /// A session over these states.
    pub fn open(&self, m: &Machine, states: &Buffers) -> Session {
        self.opened(Arc::new(self.compiled_on(m)), states).unwrap_or_else(|e| panic!("{e}"))
    }

    fn opened(&self, program: Arc<Compiled>, states: &Buffers) -> Result<Session, Error> {
        let leaves = self.values(1);
        let weights = self.leaves.iter().filter(|l| l.role == Role::Weight);
        let weights: HashMap<String, Value> =
            weights.map(|l| (l.name.clone(), Value::from_tensor(&leaves[&l.name]))).collect();
        Session::over(program, &weights, states, &mut |_, _| {})
    }

    /// Memory of the states, filled.
    pub fn states(&self, m: &Machine) -> Buffers {
        let mut buffers = Buffers::new(&m.device);
        for l in self.leaves.iter().filter(|l| l.role == Role::State) {
            let shape: Vec<usize> = l.ty.shape.iter().filter_map(|d| d.size()).collect();
            buffers.add(&l.name, l.ty.dtype, &shape).unwrap();
        }
        self.reset(&buffers);
        buffers
    }

    fn reset(&self, states: &Buffers) {
        let values = self.values(1);
        for l in self.leaves.iter().filter(|l| l.role == Role::State) {
            states.write(&l.name, |bytes| bytes.copy_from_slice(&values[&l.name].to_bytes())).unwrap();
        }
    }

    /// Runs every case at every size, on the emulated GPU too, and compares.
    pub fn run(&self, sizes: &[u64]) {
        self.run_on(machines().iter().chain(emulated()), sizes);
    }

    /// The same of what surrounds a core, whose text names no instructions: with the least and the best that the processor has, and
    /// the model of those that it lacks. The cores' own tables run on every level.
    pub fn run_some(&self, sizes: &[u64]) {
        let models = machines().len() - own().len();
        let some = machines()[..models].iter().chain([&own()[0], &own()[own().len() - 1]]);
        self.run_on(some.chain(emulated()), sizes);
    }

    /// The same of loops alone, with the least and the best instructions: their C names none, so that no set has a text of its own.
    pub fn run_loops(&self, sizes: &[u64]) {
        self.run_on([&own()[0], &own()[own().len() - 1]].into_iter().chain(emulated()), sizes);
    }

    /// The same on these machines.
    pub fn run_on<'a>(&self, machines: impl IntoIterator<Item = &'a Machine>, sizes: &[u64]) {
        let with = |m: &Machine| {
            let states = self.states(m);
            (m.isa().to_string(), self.open(m, &states), states)
        };
        let mut sessions: Vec<_> = machines.into_iter().map(with).collect();
        let differentiate =
            |of: &String| astrai_passes::differentiate(&self.g, of, Default::default()).unwrap();
        let differentiated = self.gradient_of.as_ref().map(differentiate);
        let graph = differentiated.as_ref().unwrap_or(&self.g);
        let mut wrong = Vec::new();
        for &n in sizes {
            let leaves = self.values(n);
            let want = eval(graph, &leaves, &Sizes::from([("n".to_string(), n)]), Precision::default());
            let want = want.unwrap_or_else(|e| panic!("{e}"));
            for (isa, session, states) in &mut sessions {
                self.reset(states);
                let got = run(session, &leaves);
                for e in self.differences(graph, &got, &want, states) {
                    wrong.push(format!("{isa}, n = {n}: {e}"));
                }
            }
        }
        assert!(wrong.is_empty(), "{} cases are wrong:\n{}", wrong.len(), wrong.join("\n"));
    }

    /// Results of the compiled table, next versions of states among them, at this size, of inputs drawn from this seed.
    pub fn results_of(
        &self,
        program: &Arc<Compiled>,
        m: &Machine,
        at: (u64, u64),
    ) -> Result<Vec<(String, Tensor)>, Error> {
        let states = self.states(m);
        let got = tried(&mut self.opened(program.clone(), &states)?, &self.values_of(at))?;
        let one = |(name, _): &(String, NodeId)| (name.clone(), result(&self.g, name, &got, &states));
        Ok(self.g.outputs().iter().map(one).collect())
    }

    /// A line for each result, or next version of a state, that is not the interpreter's.
    fn differences(
        &self,
        graph: &Graph,
        got: &[(String, Value)],
        want: &[(String, Tensor)],
        states: &Buffers,
    ) -> Vec<String> {
        let difference = |(name, want): &(String, Tensor)| {
            let id = graph.output(name).unwrap();
            let tolerance = tolerance(graph, id, self.storage) * self.slack;
            compare(&result(graph, name, got, states), want, tolerance).err().map(|e| format!("{name}: {e}"))
        };
        want.iter().filter_map(difference).collect()
    }
}

/// A result of this name, which may be the next version of a state.
fn result(graph: &Graph, name: &str, got: &[(String, Value)], states: &Buffers) -> Tensor {
    match got.iter().find(|(n, _)| n == name) {
        Some((_, got)) => got.to_tensor().unwrap(),
        None => version(graph, graph.output(name).unwrap(), states),
    }
}

/// What the state holds of which `id` is the next version.
fn version(graph: &Graph, id: NodeId, states: &Buffers) -> Tensor {
    let leaf = astrai_passes::version_leaf(graph, id).and_then(|l| graph.node(l).op.leaf_name()).unwrap();
    let (dtype, shape) = states.shape(leaf).unwrap();
    states.read(leaf, |bytes| Tensor::from_bytes(dtype, shape, bytes)).unwrap().unwrap()
}

/// Results of a session on these leaves, those that it does not name left out.
pub fn run(session: &mut Session, leaves: &HashMap<String, Tensor>) -> Vec<(String, Value)> {
    tried(session, leaves).unwrap_or_else(|e| panic!("{e}"))
}

fn tried(session: &mut Session, leaves: &HashMap<String, Tensor>) -> Result<Vec<(String, Value)>, Error> {
    let names: Vec<String> = session.inputs().iter().map(|(n, _)| n.clone()).collect();
    let values: Vec<(String, Value)> =
        names.iter().map(|n| (n.clone(), Value::from_tensor(&leaves[n]))).collect();
    let inputs: Vec<(&str, &Value)> = values.iter().map(|(n, v)| (n.as_str(), v)).collect();
    session.run(&inputs)
}

/// Sum of the tolerances of the operators that an output is made by.
pub fn tolerance(g: &Graph, id: NodeId, storage: DType) -> f64 {
    let mut seen = vec![false; g.nodes().len()];
    let mut todo = vec![id];
    let mut sum = 0.0;
    while let Some(id) = todo.pop() {
        if std::mem::replace(&mut seen[id.index()], true) {
            continue;
        }
        let node = g.node(id);
        todo.extend(&node.args);
        // Of several outputs the first that is no integer.
        let float = node.types.iter().map(|t| t.dtype).find(|d| d.is_float());
        let dtype = float.unwrap_or(node.types[0].dtype);
        let exact = node.op.is_view()
            || matches!(
                node.op,
                Op::Select(_)
                    | Op::Concat(_)
                    | Op::Pad(_)
                    | Op::Gather(_)
                    | Op::Iota(_)
                    | Op::Const(_)
                    | Op::Part(_)
            );
        if let Op::Call(c) = &node.op {
            let b = &g.block(c.block).graph;
            sum += b.outputs().iter().map(|(_, id)| tolerance(b, *id, storage)).sum::<f64>();
        } else if !exact && node.op.leaf_name().is_none() && dtype.is_float() {
            let narrow = if dtype == DType::F32 { storage } else { dtype };
            sum += node.op.tolerance(narrow);
        }
    }
    sum
}

/// `Ok` when two tensors agree within this share of the largest magnitude; integers agree exactly.
pub fn compare(got: &Tensor, want: &Tensor, tolerance: f64) -> Result<(), String> {
    if (got.dtype, &got.shape) != (want.dtype, &want.shape) {
        return Err(format!("{}{:?} is not {}{:?}", got.dtype, got.shape, want.dtype, want.shape));
    }
    let top = want.reals().iter().filter(|x| x.is_finite()).fold(0f64, |m, x| m.max(x.abs()));
    let allowed = if got.dtype.is_float() { tolerance * top } else { 0.0 };
    let mut bad = 0;
    let mut first = None;
    for i in 0..want.len() {
        let (a, b) = (got.at(i), want.at(i));
        let close = a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= allowed;
        if !close {
            bad += 1;
            first.get_or_insert((i, a, b));
        }
    }
    match first {
        None => Ok(()),
        Some((i, a, b)) => Err(format!(
            "{bad} of {} differ, element {i} is {a:?}, not {b:?} (allowed {allowed:e})",
            want.len()
        )),
    }
}
