//! The language everything is said in: graphs of typed operators, the blocks they call, their reference meaning and their
//! written forms. Nothing of the project comes in here but this crate's own types; every other crate depends on it.

pub mod backend;
pub mod block;
pub mod build;
#[cfg(test)]
mod check;
pub mod dim;
pub mod dtype;
pub mod effects;
pub mod eval;
mod free;
pub mod front;
pub mod grad;
pub mod graph;
pub mod graphviz;
pub mod inline;
pub mod json;
pub mod kernel;
pub mod narrow;
pub mod op;
pub mod ops;
pub mod packing;
pub mod plan;
pub mod ranks;
pub mod region;
pub mod shard;
pub mod strides;
pub mod target;
pub mod tensor;
pub mod text;
pub mod ty;
pub mod verify;
pub mod view;

pub use backend::Backend;
pub use block::Block;
pub use dim::{Dim, Shape, Symbol};
pub use dtype::DType;
pub use eval::{Precision, Sizes, eval};
pub use front::{Tape, Value};
pub use grad::{GradientOptions, gradient, gradient_with, refuse_calls};
pub use graph::{BlockId, Graph, IrError, Node, NodeId};
pub use inline::inline_calls;
pub use kernel::Kernel;
pub use narrow::{Code, Narrow, Storage};
pub use op::Operator;
pub use ops::Op;
pub use plan::Plan;
pub use ranks::{Stage, eval_ranks, eval_stages};
pub use region::{Form, Layout, Operand, Region};
pub use shard::{Axis, Mesh, Placement, Sharding};
pub use target::Target;
pub use tensor::{Data, Tensor};
pub use ty::{Real, Type};
pub use verify::{verify, verify_since};
pub use view::GraphView;
