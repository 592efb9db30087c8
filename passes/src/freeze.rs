//! Frozen weights. In: a graph, and the checkpoint tensors that training leaves as they are. Out: the same graph with their weights marked, so that they
//! get no gradient, and the optimiser nothing to keep. Layers of one kind of which not the same weights are frozen become several kinds.

use astrai_ir::ops::{Call, Op, Weight};
use astrai_ir::{Block, BlockId, Graph, IrError, NodeId};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// The graph with these checkpoint tensors frozen.
///
/// # Errors
/// Some of the tensors that are one weight are named, and others not.
pub fn freeze(graph: &Graph, names: &BTreeSet<String>) -> Result<Graph, IrError> {
    let mut frozen: BTreeSet<NodeId> = BTreeSet::new();
    for id in graph.ids() {
        let Op::Weight(w) = &graph.node(id).op else { continue };
        let rows = w.rows();
        let left: Vec<&str> = rows.iter().map(|r| r.name.as_str()).filter(|n| !names.contains(*n)).collect();
        if w.frozen || left.is_empty() {
            frozen.insert(id);
        } else if left.len() < rows.len() {
            let left = left.join(", ");
            return Err(graph.error(format!("{left} and frozen tensors are one weight: freeze all or none")));
        }
    }
    let (mut kinds, mut of_call) = (Vec::<(BlockId, BTreeSet<&String>)>::new(), HashMap::new());
    for id in graph.ids() {
        let Op::Call(c) = &graph.node(id).op else { continue };
        let bound = graph.block(c.block).params.iter().zip(&graph.node(id).args);
        let kind = (c.block, bound.filter(|(_, arg)| frozen.contains(arg)).map(|(p, _)| p).collect());
        let at = kinds.iter().position(|k| *k == kind).unwrap_or(kinds.len());
        if at == kinds.len() {
            kinds.push(kind);
        }
        of_call.insert(id, BlockId(at as u32));
    }
    let (mut known, mut blocks) = (BTreeSet::new(), Vec::with_capacity(kinds.len()));
    for (of, frozen) in &kinds {
        let block = graph.block(*of);
        let name = match known.insert(*of) {
            true => block.name.clone(),
            false => format!("{}_{}", block.name, blocks.len()),
        };
        let body = block.graph.rebuild(|out, id, args| match &block.graph.node(id).op {
            Op::Weight(w) if frozen.contains(&w.name) => mark(out, w),
            op => out.push_exact(op.clone(), args),
        })?;
        blocks.push(Arc::new(Block { name, graph: body, params: block.params.clone() }));
    }
    graph.rebuild_with(blocks, |out, id, args| match &graph.node(id).op {
        Op::Weight(w) if frozen.contains(&id) => mark(out, w),
        Op::Call(c) => out.push(Call { block: of_call[&id], layer: c.layer }, args),
        op => out.push_exact(op.clone(), args),
    })
}

fn mark(out: &mut Graph, w: &Weight) -> Result<NodeId, IrError> {
    out.push(Weight { frozen: true, ..w.clone() }, &[])
}
