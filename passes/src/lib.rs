//! The passes of the compiler. Each is a plain function with a verb for a name: from a graph to a new graph; the last ones give a
//! plan. `runtime::compile` names them in order.

mod adapt;
mod canonicalise;
mod decompose;
mod differentiate;
mod flatten;
mod fold;
mod freeze;
mod merge;
mod observe;
mod perturb;
mod pipeline;
mod plan;
mod precision;
mod quantise;
mod saturate;
mod shard;
mod share_loss;
mod stack;
mod uses;

pub use adapt::{Adapter, Factors, adapt, factor_placements, linear_layers};
pub use canonicalise::canonicalise;
pub use decompose::decompose;
pub use differentiate::{
    ACCUMULATE, Destination, GRAD, Gradients, Recompute, differentiate, differentiate_over,
};
pub use flatten::flatten;
pub use fold::{Derived, fold};
pub use freeze::freeze;
pub use merge::{merge, merge_alike};
pub use observe::{Observed, carried, gram, observe};
pub use perturb::{NOISE_COUNTERS, NOISE_WIDTH, Noise, perturb};
pub use pipeline::pipeline;
pub use plan::{
    Draft, alias_states, assign_layouts, form_regions, is_version, place, schedule, version_leaf,
};
pub use precision::{Policy, ROUNDED, Wide, precision};
pub use quantise::{narrow_weights, quantise};
pub use saturate::{Extraction, Fidelity, RULES, Rule, RuleClass, Saturate, SaturationReport, saturate};
pub use shard::{DATA, MeshSharding, shard};
pub use stack::{Joined, STACKED, Stack, stack, stackable};

use astrai_ir::{Block, Graph, IrError};
use std::sync::Arc;

/// Applies a pass to the bodies of all blocks, then to the graph itself.
fn each_graph(graph: &Graph, stage: &dyn Fn(&Graph) -> Result<Graph, IrError>) -> Result<Graph, IrError> {
    let block = |b: &Arc<Block>| {
        let body = each_graph(&b.graph, stage)?;
        Ok(if body.is_copy_of(&b.graph) { b.clone() } else { b.with(body).into() })
    };
    let blocks = graph.blocks().iter().map(block).collect::<Result<_, IrError>>()?;
    stage(&graph.with_blocks(blocks)?)
}

/// Dead code elimination: the graph without nodes that no output depends on.
fn eliminate_dead_nodes(graph: &Graph) -> Result<Graph, IrError> {
    graph.with_blocks(graph.blocks().to_vec())
}
