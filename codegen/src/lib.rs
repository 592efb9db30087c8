//! From regions to kernel source. What all archetypes share (index maps, pointwise bodies, reductions) is a small kernel IR
//! that one printer turns into host C or CUDA C++; the tuned cores are templates with slots that the same IR fills.

mod columns;
pub mod cuda;
pub mod host;
pub mod index;
pub mod kernel;
pub mod loops;
mod lower;
mod print;
mod store;

use astrai_ir::{Anchor, Region};

/// A kernel's source and how it is called.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Prefix of its symbols.
    pub name: String,
    /// Archetype.
    pub anchor: Anchor,
    /// Source text, without the shared prelude.
    pub source: String,
    /// Phases, each a set of units, one phase after the other.
    pub phases: usize,
    /// True when it needs scratch memory between its phases.
    pub scratch: bool,
    /// True when all its phases run several times, as often as its `rounds` function says; the number of the round
    /// follows the symbols in `dims`, and that of the threads which share the units follows it.
    pub rounds: bool,
}

/// The comment that opens a kernel: where it comes from, what it computes, what it should cost.
fn comment(region: &Region) -> String {
    let ops: Vec<&str> = region.graph.nodes().iter().map(|n| n.op.name()).filter(|n| *n != "input").collect();
    let reads: Vec<String> = region.reads().iter().map(ToString::to_string).collect();
    let writes: Vec<String> = region.writes().iter().map(ToString::to_string).collect();
    format!(
        "/* {}\n * {}\n * {} -> {}\n * bytes {}  flops {} */\n",
        region.origin,
        ops.join(" "),
        reads.join(" "),
        writes.join(" "),
        region.bytes(),
        region.flops()
    )
}
