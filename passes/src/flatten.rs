//! Inlines calls inside blocks. In: a graph whose blocks may call blocks. Out: the same values, with calls at the top level only,
//! since a plan binds the parameters of a block at the top level only.

use astrai_ir::{Block, Graph, IrError, inline_calls};
use std::sync::Arc;

/// The graph with no calls inside its blocks.
pub fn flatten(graph: &Graph) -> Result<Graph, IrError> {
    if graph.blocks().iter().all(|b| b.graph.blocks().is_empty()) {
        return Ok(graph.clone());
    }
    let flat = |b: &Arc<Block>| Ok(b.with(inline_calls(&b.graph)?).into());
    graph.with_blocks(graph.blocks().iter().map(flat).collect::<Result<_, IrError>>()?)
}
