//! Replaces the operators that a backend has no kernel of by simpler ones. In: a graph, which operators are
//! native. Out: a graph of native
//! operators, as far as decompositions exist.

use crate::{each_graph, eliminate_dead_nodes};
use astrai_ir::ops::Op;
use astrai_ir::{Graph, IrError, NodeId};

/// The graph with every operator that is not native and has a decomposition replaced by it.
pub fn decompose(graph: &Graph, native: impl Fn(&Op) -> bool) -> Result<Graph, IrError> {
    each_graph(graph, &|g| {
        let split: Vec<bool> = g.nodes().iter().map(|n| !native(&n.op) && !is_structure(&n.op)).collect();
        if !split.contains(&true) {
            return eliminate_dead_nodes(g);
        }
        let mut parts: Vec<Option<Vec<NodeId>>> = vec![None; g.nodes().len()];
        g.rebuild(|out, id, args| {
            let node = g.node(id);
            if let Op::Part(p) = &node.op
                && let Some(made) = &parts[node.args[0].index()]
            {
                return Ok(made[p.index as usize]);
            }
            if split[id.index()]
                && let Some(made) = node.op.decompose(out, args)
            {
                let made = made?;
                let first = made[0];
                parts[id.index()] = Some(made);
                return Ok(first);
            }
            out.push(node.op.clone(), args)
        })
    })
}

/// True for operators that compute nothing: they have no simpler ones.
fn is_structure(op: &Op) -> bool {
    op.leaf_name().is_some() || matches!(op, Op::Const(_) | Op::Call(_) | Op::Part(_) | Op::Store(_))
}
