//! The kernel IR: what archetypes share whatever the device. In: a region's graph. Out: index arithmetic, expressions, loops and
//! reductions, and the printer that writes them in the C of a vector machine or in that of blocks of threads.

pub mod expr;
pub mod index;
pub mod loops;
pub mod lower;
pub mod print;

use astrai_ir::Region;

/// The comment that opens a kernel: where it comes from, what it computes, what it should cost.
pub fn comment(region: &Region) -> String {
    let ops = region.graph().nodes().iter().map(|n| n.op.name()).filter(|n| *n != "input");
    let ops: Vec<&str> = ops.collect();
    let reads: Vec<String> = region.piece.read_types().iter().map(ToString::to_string).collect();
    let writes: Vec<String> = region.piece.write_types().iter().map(ToString::to_string).collect();
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
