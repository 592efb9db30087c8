//! What the compiler asks of a device's family. In: a graph, a node, a piece of a plan. Out: which kernels there are, what each
//! takes along and wants in memory, and their source. Every stage that chooses a fusion, a layout or an alignment takes a
//! [`Backend`]; none knows a kind of device.

use crate::kernel::Kernel;
use crate::ops::Op;
use crate::region::{Layout, Matched, Piece, Region};
use crate::{Graph, IrError, NodeId, Target};
use std::fmt::Debug;

/// What a kernel does with an argument of its root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    /// Computes it a row at a time, whatever makes it: the argument's computation is the kernel's prologue.
    Prologue,
    /// Reads this value where it lies in memory: the argument, or what is below its views.
    Memory(NodeId),
    /// Nothing in memory: an index, or a single number.
    Nothing,
}

/// What a kernel does with its sums before they go to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epilogue {
    /// Nothing: they are stored as they are.
    None,
    /// Results of the operator below this number may be rounded.
    Rounded(u32),
    /// Everything that follows element by element.
    Pointwise,
}

/// A node that a kernel is built around.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root {
    /// What is done with each argument.
    pub takes: Vec<Takes>,
    /// What is done with the result.
    pub epilogue: Epilogue,
}

/// A family of devices, as the compiler sees it.
pub trait Backend: Debug + Send + Sync {
    /// The machine.
    fn target(&self) -> &Target;

    /// True for composites that a kernel computes whole; others are decomposed where they say how.
    fn native(&self, op: &Op) -> bool;

    /// What a kernel around this node takes along; `None` for nodes that loops compute where they stand, and for those that have
    /// no kernel.
    fn root(&self, g: &Graph, id: NodeId) -> Option<Root>;

    /// True where narrow weights are read as they are stored.
    fn reads_codes(&self) -> bool {
        false
    }

    /// True where a kernel draws tokens from logits where these lie.
    fn samples(&self) -> bool {
        false
    }

    /// True where dots by integer codes take a left side that is rounded to integers.
    fn multiplies_codes(&self) -> bool {
        false
    }

    /// True for operators that loops compute element by element, with their arguments.
    fn loops(&self, op: &Op) -> bool;

    /// True for a sum that its kernel adds up where its first argument lies.
    fn accumulates(&self, g: &Graph, id: NodeId) -> bool;

    /// The layouts in which the kernel around this node would read weights and other values.
    fn layouts(&self, g: &Graph, id: NodeId) -> Vec<(NodeId, Layout)>;

    /// The form of a piece of a plan. Whatever this matches, [`emit`](Self::emit) writes.
    fn matched(&self, piece: &Piece) -> Result<Matched, IrError>;

    /// The kernel of a region; `None` for one that has none.
    ///
    /// # Errors
    /// A message, which is a defect of the backend: what is matched is emitted.
    fn emit(&self, region: &Region) -> Result<Option<Kernel>, String>;

    /// One translation unit of several kernels.
    fn unit(&self, kernels: &[&Kernel]) -> String;

    /// Ending of a unit's file name.
    fn extension(&self) -> &'static str;

    /// Bytes of which every buffer's address is a multiple.
    fn alignment(&self) -> u64;
}
