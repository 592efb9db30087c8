//! The reference interpreter. In: a graph, values of its leaves and of its symbols. Out: values of its outputs. It is the
//! meaning of every operator: slow, f64 inside, each result rounded to the node's element type (or not at all, in exact
//! mode, for finite differences).

use crate::dim::{Dim, Factor};
use crate::dtype::DType;
use crate::graph::{Graph, IrError, NodeId};
use crate::ops::Op;
use crate::tensor::{Data, Tensor};
use crate::ty::show;
use std::collections::HashMap;

/// Values of symbols.
pub type Sizes = HashMap<String, u64>;

/// What an operator's reference evaluation sees.
pub struct Eval<'a> {
    /// Values of the arguments.
    pub args: &'a [&'a Tensor],
    /// Element type and concrete shape of each output.
    pub outs: &'a [(DType, Vec<usize>)],
    /// Values of the graph's symbols.
    pub sizes: &'a Sizes,
    /// No rounding of floating results.
    pub exact: bool,
    /// The graph, for the bodies of blocks.
    pub graph: &'a Graph,
}

impl Eval<'_> {
    /// Shape of the first output.
    pub fn shape(&self) -> &[usize] {
        &self.outs[0].1
    }

    /// Element type of the first output.
    pub fn dtype(&self) -> DType {
        self.outs[0].0
    }

    /// Value of a size.
    pub fn dim(&self, d: &Dim) -> Result<usize, String> {
        size_of(d, self.sizes)
    }

    /// The first output from reals, rounded to its type unless exact.
    pub fn real(&self, values: Vec<f64>) -> Result<Vec<Tensor>, String> {
        Ok(vec![self.make(0, values)])
    }

    /// Output `i` from reals: rounded to a floating type unless exact, truncated to an integer one.
    pub fn make(&self, i: usize, values: Vec<f64>) -> Tensor {
        let (dtype, shape) = &self.outs[i];
        if !dtype.is_float() {
            return Tensor::int(*dtype, shape, values.into_iter().map(|x| x as i64).collect());
        }
        if self.exact { Tensor::exact(*dtype, shape, values) } else { Tensor::float(*dtype, shape, values) }
    }

    /// The first output element by element, from the row-major position.
    pub fn each(&self, f: impl Fn(usize) -> f64) -> Result<Vec<Tensor>, String> {
        let n = self.shape().iter().product();
        self.real((0..n).map(f).collect())
    }
}

pub(crate) fn size_of(d: &Dim, sizes: &Sizes) -> Result<usize, String> {
    let v = d.eval(&|s| sizes.get(s).copied())?;
    usize::try_from(v).map_err(|_| format!("size {d} does not fit the machine"))
}

/// What a collective's reference evaluation sees besides its arguments.
pub struct EvalCollective<'a> {
    /// Values of the graph's symbols on each rank of the group.
    pub sizes: &'a [&'a Sizes],
    /// No rounding of floating results.
    pub exact: bool,
}

impl EvalCollective<'_> {
    /// Value of a size on a rank.
    pub fn dim(&self, rank: usize, d: &Dim) -> Result<usize, String> {
        size_of(d, self.sizes[rank])
    }
}

/// Options of an evaluation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Precision {
    /// Keep floating results in f64 instead of rounding them to the node's type.
    pub exact: bool,
}

/// Values of the outputs, in their order. Leaves (`input`, `weight`, `state`) are looked up by name; symbols take their
/// values from `sizes`, and those not given there from the shapes of the leaves.
pub fn eval(
    graph: &Graph,
    leaves: &HashMap<String, Tensor>,
    sizes: &Sizes,
    precision: Precision,
) -> Result<Vec<(String, Tensor)>, IrError> {
    let leaves: HashMap<&str, &Tensor> = leaves.iter().map(|(k, v)| (k.as_str(), v)).collect();
    let sizes = sizes_of(graph, &leaves, sizes);
    eval_borrowed(graph, &leaves, &sizes, precision)
}

/// These sizes, and those of further symbols from the shapes of leaves.
pub(crate) fn sizes_of(graph: &Graph, leaves: &HashMap<&str, &Tensor>, sizes: &Sizes) -> Sizes {
    let mut sizes = sizes.clone();
    for node in graph.nodes() {
        if let Some(t) = node.op.leaf_name().and_then(|n| leaves.get(n)) {
            for (d, n) in node.ty().shape.iter().zip(&t.shape) {
                if let [(1, [Factor::Symbol(s)])] = d.products().collect::<Vec<_>>().as_slice() {
                    sizes.entry(s.to_string()).or_insert(*n as u64);
                }
            }
        }
    }
    sizes
}

/// [`eval`] with borrowed leaves and all sizes given.
pub fn eval_borrowed(
    graph: &Graph,
    leaves: &HashMap<&str, &Tensor>,
    sizes: &Sizes,
    precision: Precision,
) -> Result<Vec<(String, Tensor)>, IrError> {
    let live = graph.live();
    let mut left: Vec<usize> = graph.users().iter().map(Vec::len).collect();
    for (_, id) in graph.outputs() {
        left[id.index()] += 1;
    }
    let mut values: Vec<Vec<Tensor>> = vec![Vec::new(); graph.nodes().len()];
    for id in graph.ids().filter(|id| live[id.index()]) {
        values[id.index()] = eval_node(graph, id, &values, leaves, sizes, precision)?;
        for a in graph.node(id).args.iter().collect::<std::collections::BTreeSet<_>>() {
            left[a.index()] -= 1;
            if left[a.index()] == 0 {
                values[a.index()] = Vec::new();
            }
        }
    }
    Ok(graph.outputs().iter().map(|(n, id)| (n.clone(), values[id.index()][0].clone())).collect())
}

pub(crate) fn eval_node(
    graph: &Graph,
    id: NodeId,
    values: &[Vec<Tensor>],
    leaves: &HashMap<&str, &Tensor>,
    sizes: &Sizes,
    precision: Precision,
) -> Result<Vec<Tensor>, IrError> {
    let node = graph.node(id);
    let at = |m: String| node.error(m);
    let mut outs = Vec::with_capacity(node.types.len());
    for t in &node.types {
        let shape: Result<Vec<usize>, String> = t.shape.iter().map(|d| size_of(d, sizes)).collect();
        outs.push((t.dtype, shape.map_err(at)?));
    }
    if let Some(name) = node.op.leaf_name() {
        let t = leaves.get(name).ok_or_else(|| at(format!("`{name}` has no value")))?;
        return Ok(vec![leaf_value(t, &outs[0], precision).map_err(|m| at(format!("`{name}` {m}")))?]);
    }
    if let Op::Part(p) = &node.op {
        return Ok(vec![values[node.args[0].index()][p.index as usize].clone()]);
    }
    let args: Vec<&Tensor> = node.args.iter().map(|a| &values[a.index()][0]).collect();
    node.op.eval(&Eval { args: &args, outs: &outs, sizes, exact: precision.exact, graph }).map_err(at)
}

fn leaf_value(
    t: &Tensor,
    (dtype, shape): &(DType, Vec<usize>),
    precision: Precision,
) -> Result<Tensor, String> {
    if &t.shape != shape {
        let want: Vec<Dim> = shape.iter().map(|&n| Dim::from(n)).collect();
        return Err(format!("has shape {:?}, the graph wants {}", t.shape, show(&want)));
    }
    match (&t.data, dtype.is_float()) {
        (Data::Float(_), true) if t.dtype == *dtype || precision.exact => {
            Ok(Tensor { dtype: *dtype, ..t.clone() })
        }
        (Data::Float(v), true) => Ok(Tensor::float(*dtype, shape, v.clone())),
        (Data::Int(v), false) => Ok(Tensor::int(*dtype, shape, v.clone())),
        _ => Err(format!("has dtype {}, the graph wants {dtype}", t.dtype)),
    }
}
