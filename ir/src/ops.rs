//! The table of operators: from one line a file, the enum, the names, and the dispatch to the trait's methods.

use crate::dim::Dim;
use crate::dtype::DType;
use crate::eval::{Eval, EvalCollective};
use crate::graph::{Graph, IrError, NodeId};
use crate::op::{Cotangents, Infer, Inferred, Operator, RankOutputs, Simpler, Vjp};
use crate::shard::{Axis, Partition, Propagate, ShardingRule, Traffic};
use crate::tensor::Tensor;
use crate::ty::Type;

macro_rules! ops {
    ($($module:ident :: $variant:ident),* $(,)?) => {
        $(mod $module; pub use $module::*;)*

        /// An operator with its attributes.
        #[derive(Clone, Debug, PartialEq, Eq, Hash)]
        #[allow(missing_docs)] // each payload documents itself
        pub enum Op { $($variant($variant)),* }

        $(impl From<$variant> for Op {
            fn from(op: $variant) -> Op { Op::$variant(op) }
        })*

        impl Op {
            /// Names of all operators, in table order.
            pub const NAMES: &'static [&'static str] = &[$(<$variant as Operator>::NAME),*];

            /// Name in dumps and errors.
            pub fn name(&self) -> &'static str {
                match self { $(Op::$variant(_) => <$variant as Operator>::NAME),* }
            }
            /// Type inference.
            pub fn infer(&self, cx: &Infer) -> Inferred {
                match self { $(Op::$variant(op) => op.infer(cx)),* }
            }
            /// Reference evaluation.
            pub fn eval(&self, cx: &Eval) -> Result<Vec<Tensor>, String> {
                if let Some(over) = self.collective_axes() {
                    let over: Vec<String> = over.iter().map(Axis::to_string).collect();
                    return Err(format!("runs over the ranks of {}; evaluate all of them together", over.join(",")));
                }
                match self { $(Op::$variant(op) => op.eval(cx)),* }
            }
            /// Gradient rule.
            pub fn vjp(&self, cx: &mut Vjp) -> Cotangents {
                match self { $(Op::$variant(op) => op.vjp(cx)),* }
            }
            /// The decomposition into simpler operators.
            pub fn decompose(&self, graph: &mut Graph, args: &[NodeId]) -> Option<Result<Vec<NodeId>, IrError>> {
                match self { $(Op::$variant(op) => op.decompose(graph, args)),* }
            }
            /// An equal simpler node.
            pub fn simplify(&self, graph: &Graph, args: &[NodeId]) -> Option<Simpler> {
                match self { $(Op::$variant(op) => op.simplify(graph, args)),* }
            }
            /// Sharding rules along one axis of a mesh.
            pub fn sharding_rules(&self, cx: &Propagate) -> Vec<ShardingRule> {
                match self { $(Op::$variant(op) => op.sharding_rules(cx)),* }
            }
            /// The operator on a rank's shards.
            pub fn partition(&self, graph: &mut Graph, args: &[NodeId], cx: &Partition) -> Result<NodeId, IrError> {
                match self { $(Op::$variant(op) => op.partition(graph, args, cx)),* }
            }
            /// Reference values of a collective.
            pub fn eval_collective(&self, ranks: &[Vec<&Tensor>], cx: &EvalCollective) -> RankOutputs {
                match self { $(Op::$variant(op) => op.eval_collective(ranks, cx)),* }
            }
            /// Bytes that one rank sends in a collective.
            pub fn traffic(&self, args: &[&Type], outs: &[Type]) -> Option<Traffic> {
                match self { $(Op::$variant(op) => op.traffic(args, outs)),* }
            }
            /// Floating-point operations.
            pub fn flops(&self, args: &[&Type], outs: &[Type]) -> Dim {
                match self { $(Op::$variant(op) => op.flops(args, outs)),* }
            }
            /// True where loops reduce elements of the first argument.
            pub fn reduces(&self) -> bool {
                match self { $(Op::$variant(_) => <$variant as Operator>::REDUCES),* }
            }
            /// Relative error allowed to a kernel.
            pub fn tolerance(&self, dtype: DType) -> f64 {
                let [roundoffs, least] = match self { $(Op::$variant(_) => <$variant as Operator>::TOLERANCE),* };
                (roundoffs * dtype.epsilon()).max(least)
            }
            /// Attributes as a JSON object.
            pub fn attributes(&self) -> serde_json::Value {
                let v = match self { $(Op::$variant(op) => serde_json::to_value(op)),* };
                v.unwrap_or(serde_json::Value::Null)
            }
            /// The operator with this name and these attributes.
            pub fn from_attributes(name: &str, attributes: serde_json::Value) -> Result<Op, String> {
                $(if name == <$variant as Operator>::NAME {
                    return serde_json::from_value::<$variant>(attributes).map(Op::$variant)
                        .map_err(|e| format!("`{name}`: {e}"));
                })*
                Err(format!("`{name}` is not an operator"))
            }
        }
    };
}

#[rustfmt::skip]
ops! {
    // leaves
    input::Input, weight::Weight, state::State, constant::Const, iota::Iota, random::Random,
    // views
    reshape::Reshape, permute::Permute, expand::Expand, slice::Slice, pad::Pad, concat::Concat,
    // pointwise
    unary::Unary, binary::Binary, compare::Compare, select::Select, cast::Cast, detach::Detach,
    // contractions and indexing
    reduce::Reduce, cumsum::Cumsum, argmax::Argmax, topk::Topk, sample::Sample, dot::Dot, gather::Gather, scatter::Scatter,
    // structure
    call::Call, part::Part, store::Store,
    // composites
    dequant::Dequant, fake_quant::FakeQuant, rms_norm::RmsNorm, layer_norm::LayerNorm, softmax::Softmax, rope::Rope, attention::Attention, attention_grad::AttentionGrad,
    gated_act::GatedAct, route::Route, grouped_dot::GroupedDot, grouped_outer::GroupedOuter, low_rank::LowRank,
    linear_cross_entropy::LinearCrossEntropy,
    linear_cross_entropy_grad::LinearCrossEntropyGrad,
    // collectives
    all_reduce::AllReduce, all_gather::AllGather, reduce_scatter::ReduceScatter, all_to_all::AllToAll,
    local_slice::LocalSlice, pvary::Pvary, send::SendTo, recv::RecvFrom,
}

impl Op {
    /// The name by which a leaf's value is looked up.
    pub fn leaf_name(&self) -> Option<&str> {
        match self {
            Op::Input(i) => Some(&i.name),
            Op::Weight(w) => Some(&w.name),
            Op::State(s) => Some(&s.name),
            _ => None,
        }
    }

    /// The mesh axes that a collective runs over; `None` for other operators.
    pub fn collective_axes(&self) -> Option<&[Axis]> {
        match self {
            Op::AllReduce(op) => Some(&op.over),
            Op::AllGather(op) => Some(std::slice::from_ref(&op.over)),
            Op::ReduceScatter(op) => Some(std::slice::from_ref(&op.over)),
            Op::AllToAll(op) => Some(std::slice::from_ref(&op.over)),
            Op::LocalSlice(op) => Some(std::slice::from_ref(&op.over)),
            Op::SendTo(op) => Some(std::slice::from_ref(&op.over)),
            Op::RecvFrom(op) => Some(std::slice::from_ref(&op.over)),
            _ => None,
        }
    }

    /// True for views: operators that rearrange, repeat or select elements of one argument and compute nothing.
    pub fn is_view(&self) -> bool {
        matches!(self, Op::Reshape(_) | Op::Permute(_) | Op::Expand(_) | Op::Slice(_))
    }

    /// True for pointwise operators: each element depends on the elements at the same place of the arguments only.
    pub fn is_pointwise(&self) -> bool {
        matches!(
            self,
            Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select(_) | Op::Cast(_) | Op::GatedAct(_)
        )
    }
}
