//! The language everything is said in: graphs of typed operators, the blocks they call, their reference meaning and their
//! written forms. Nothing of the project comes in here but this crate's own types; every other crate depends on it.

pub mod block;
pub mod build;
pub mod dim;
pub mod dtype;
pub mod eval;
pub mod graph;
pub mod op;
pub mod ops;
pub mod plan;
pub mod target;
pub mod tensor;
pub mod ty;

pub use block::Block;
pub use dim::{Dim, Shape, Symbol};
pub use dtype::DType;
pub use eval::{Sizes, eval};
pub use graph::{BlockId, Graph, IrError, Node, NodeId};
pub use op::Operator;
pub use ops::Op;
pub use plan::{Anchor, Layout, Plan, Region};
pub use target::{Simd, Target, TargetKind};
pub use tensor::{Data, Tensor};
pub use ty::{Real, Type};
