//! Graph, types, operators and the reference interpreter.

pub mod dtype;
pub use dtype::DType;
