//! Inlines calls inside blocks. In: a graph whose blocks may call blocks. Out: the same values, with calls at the top level only,
//! since a plan binds the parameters of a block at the top level only.

use astrai_ir::{Block, Graph, IrError, inline_calls};
use std::sync::Arc;

/// The graph with no calls inside its blocks.
pub fn flatten(graph: &Graph) -> Result<Graph, IrError> {
    if graph.blocks().iter().all(|b| b.graph.blocks().is_empty()) {
        return Ok(graph.clone());
    }
    graph.rebuild(
        |b| {
            let graph = inline_calls(&b.graph)?;
            Ok(Arc::new(Block { name: b.name.clone(), graph, params: b.params.clone() }))
        },
        |g, id, args| g.push_exact(graph.node(id).op.clone(), args),
    )
}
