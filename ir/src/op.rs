//! The trait of operators. An operator is one file in `ops/`: its attributes, and its implementation of this trait: type
//! inference, reference evaluation, gradient (`vjp`), decomposition, sharding rules, cost and tolerance. The table in `ops.rs`
//! turns the files into one enum.

use crate::dim::Dim;
use crate::dtype::DType;
use crate::eval::{Eval, EvalCollective};
use crate::graph::{Graph, IrError, NodeId};
use crate::shard::{Partition, Propagate, ShardingRule, Traffic};
use crate::tensor::Tensor;
use crate::ty::Type;
use serde::{Serialize, de::DeserializeOwned};
use std::fmt::Debug;
use std::hash::Hash;

/// What type inference sees.
pub struct Infer<'a> {
    /// Types of the arguments.
    pub args: &'a [&'a Type],
    /// The graph to which the node will be added, for block signatures.
    pub graph: &'a Graph,
}

impl<'a> Infer<'a> {
    /// The arguments, when there are exactly `N`.
    pub fn exactly<const N: usize>(&self) -> Result<[&'a Type; N], String> {
        <[&Type; N]>::try_from(self.args.to_vec())
            .map_err(|a| format!("takes {N} argument{}, got {}", if N == 1 { "" } else { "s" }, a.len()))
    }
}

/// Result of type inference: one type per output, or what is wrong.
pub type Inferred = Result<Vec<Type>, String>;

/// What a gradient rule sees: `graph` grows by the gradient's nodes.
pub struct Vjp<'a> {
    /// Graph that holds the forward nodes and receives the backward ones.
    pub graph: &'a mut Graph,
    /// Arguments of the forward node.
    pub args: &'a [NodeId],
    /// Values of the forward node, one per output.
    pub outs: &'a [NodeId],
    /// Cotangent of each output; `None` where nothing depends on it.
    pub grads: &'a [Option<NodeId>],
}

impl Vjp<'_> {
    /// The cotangent of the only output.
    pub fn grad(&self) -> NodeId {
        self.grads[0].unwrap_or(self.outs[0])
    }

    /// The cotangent of the only argument, where that is an operator on the cotangent of the only output.
    pub fn through(&mut self, op: impl Into<crate::Op>) -> Cotangents {
        let grad = self.grad();
        Ok(vec![Some(self.graph.push(op, &[grad])?)])
    }
}

/// Result of a gradient rule: one cotangent per argument, `None` where no gradient flows.
pub type Cotangents = Result<Vec<Option<NodeId>>, IrError>;

/// Result of a collective's reference evaluation: the outputs of each rank.
pub type RankOutputs = Result<Vec<Vec<Tensor>>, String>;

/// One operator. `Self` is its attributes.
pub trait Operator: Clone + Eq + Hash + Debug + Serialize + DeserializeOwned {
    /// Name in dumps and errors.
    const NAME: &'static str;

    /// Floating-point operations for each element of the first output, where they are counted so.
    const FLOPS: usize = 1;

    /// True where loops reduce elements of the first argument, once for all elements of the result that share the sum.
    const REDUCES: bool = false;

    /// Relative error allowed between a kernel and [`eval`](Self::eval), as a multiple of the result's largest magnitude: so many
    /// unit roundoffs of the element type, and at least the second number.
    const TOLERANCE: [f64; 2] = [8.0, 1e-6];

    /// Types of the outputs, or what is wrong with the arguments.
    fn infer(&self, cx: &Infer) -> Inferred;

    /// Reference values of the outputs. Shapes and dtypes were checked by [`infer`](Self::infer); `Err` is for values
    /// that cannot be computed with (an index out of range). The default is that of leaves, whose values are given, and of
    /// collectives, which have [`eval_collective`](Self::eval_collective).
    fn eval(&self, _cx: &Eval) -> Result<Vec<Tensor>, String> {
        Err("has no value of its own".into())
    }

    /// The gradient rule (vector-Jacobian product): cotangents of the arguments. The default is an error that names the operator.
    fn vjp(&self, cx: &mut Vjp) -> Cotangents {
        Err(cx.graph.error(format!("`{}` has no gradient", Self::NAME)))
    }

    /// The decomposition into simpler operators, for targets without a kernel of this one.
    fn decompose(&self, _graph: &mut Graph, _args: &[NodeId]) -> Option<Result<Vec<NodeId>, IrError>> {
        None
    }

    /// An existing or simpler node that is equal to this one on `args`, bit for bit; `Graph::push` takes it instead.
    fn simplify(&self, _graph: &Graph, _args: &[NodeId]) -> Option<Simpler> {
        None
    }

    /// Sharding rules along one axis of a mesh that apply to the present placements of the arguments. The rule by which all
    /// arguments and results are replicated always applies and is not listed: an operator without rules is replicated.
    fn sharding_rules(&self, _cx: &Propagate) -> Vec<ShardingRule> {
        vec![]
    }

    /// The operator on a rank's shards `args` under the rule that was chosen. The default is the operator itself, for those
    /// whose attributes hold no sharded sizes and that need nothing from other ranks.
    fn partition(&self, graph: &mut Graph, args: &[NodeId], _cx: &Partition) -> Result<NodeId, IrError>
    where
        crate::Op: From<Self>,
    {
        graph.push(self.clone(), args)
    }

    /// Reference values of a collective: from the arguments of each rank of the group, in order, the outputs of each rank.
    fn eval_collective(&self, _ranks: &[Vec<&Tensor>], _cx: &EvalCollective) -> RankOutputs {
        Err("is no collective".into())
    }

    /// Bytes that one rank sends in a collective; `None` for operators that send nothing.
    fn traffic(&self, _args: &[&Type], _outs: &[Type]) -> Option<Traffic> {
        None
    }

    /// Floating-point operations of one evaluation.
    fn flops(&self, _args: &[&Type], outs: &[Type]) -> Dim {
        outs.first().map(|t| &t.elements() * &Dim::from(Self::FLOPS)).unwrap_or_default()
    }
}

/// What [`Operator::simplify`] found.
pub enum Simpler {
    /// An existing node.
    Node(NodeId),
    /// Another operator on other arguments.
    Op(Box<crate::Op>, Vec<NodeId>),
}

/// `Ok` when two types are one; the message names both otherwise.
pub fn same(what: &str, a: &Type, b: &Type) -> Result<(), String> {
    if a == b { Ok(()) } else { Err(format!("{what} must have one type, got {a} and {b}")) }
}

/// `Ok` for floating types.
pub fn float(what: &str, t: &Type) -> Result<(), String> {
    if t.dtype.is_float() { Ok(()) } else { Err(format!("{what} must be floating point, got {t}")) }
}

/// `Ok` for integer types.
pub fn integer(what: &str, t: &Type) -> Result<(), String> {
    if t.dtype.is_float() || t.dtype == DType::Bool {
        return Err(format!("{what} must be an integer, got {t}"));
    }
    Ok(())
}

/// `Ok` when `axis` exists.
pub fn axis_in(axis: usize, t: &Type) -> Result<(), String> {
    if axis < t.rank() { Ok(()) } else { Err(format!("axis {axis} is outside {t}")) }
}
