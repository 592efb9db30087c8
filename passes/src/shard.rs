//! Sharding propagation and SPMD partitioning. In: the graph of the whole model (for the tokens of one data-parallel rank), a
//! mesh, and placements of weights and states. Out: the graph that every rank runs: all shapes local, and a collective wherever
//! the placement of a value differs from the one its user needs. The pass takes one axis at a time: every node takes the
//! cheapest of its operator's sharding rules; the local shapes of one axis are the global shapes of the next. Gradients are
//! added later, so that backward collectives are the gradients of forward ones.

mod choose;
mod partition;
mod reshard;

#[cfg(test)]
mod tests;

use astrai_ir::ops::{Op, Store};
use astrai_ir::shard::STAGES;
use astrai_ir::{Axis, Block, Graph, IrError, Mesh, NodeId, Placement, Symbol};
use std::collections::HashMap;
use std::sync::Arc;

/// Data-parallel axes: ranks along them have tokens of their own. Expert-parallel ranks are data-parallel, too.
pub const DATA: [&str; 2] = ["dp", "ep"];

/// A mesh, and the shardings of a model's weights and states on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MeshSharding {
    /// The ranks. Along the axes of [`DATA`] each has sequences of its own; the graph is written for those of one rank.
    pub mesh: Mesh,
    /// Placements of weights and states by name. Weights that are not listed are replicated, states local along the data axes.
    /// A state of partial sums is summed over its ranks where the graph reads it, once however often that is.
    pub leaves: HashMap<String, Vec<(String, Placement)>>,
    /// The pipeline stage of the graph, if [`pipeline`](crate::pipeline) has partitioned it.
    pub stage: usize,
    /// Whether the graph will be differentiated: then replicated values that ranks use differently are marked (`pvary`).
    pub trained: bool,
}

impl MeshSharding {
    /// Axes of more than one rank on which every rank runs the same graph.
    pub fn axes(&self) -> impl Iterator<Item = &Axis> {
        self.mesh.axes.iter().filter(|a| a.size > 1 && a.name != STAGES)
    }

    /// The axis whose ranks are the stages of a pipeline.
    pub fn stages(&self) -> Option<&Axis> {
        self.mesh.axes.iter().find(|a| a.size > 1 && a.name == STAGES)
    }

    /// The data-parallel axes: the gradients of weights that are replicated along them are summed over their ranks.
    pub fn data_axes(&self) -> Vec<Axis> {
        self.axes().filter(|a| is_data(a)).cloned().collect()
    }

    fn leaf(&self, op: &Op, axis: &Axis) -> Placement {
        let of = op.leaf_name().and_then(|name| self.leaves.get(name));
        let found = of.and_then(|list| list.iter().find(|(a, _)| *a == axis.name)).map(|(_, p)| p.clone());
        match op {
            _ if found.is_some() => found.unwrap_or(Placement::Replicate),
            Op::State(_) if is_data(axis) => Placement::Local,
            Op::Input(i) if is_data(axis) && !i.ty.shape.is_empty() => Placement::Local,
            _ => Placement::Replicate,
        }
    }
}

fn is_data(axis: &Axis) -> bool {
    DATA.contains(&axis.name.as_str())
}

/// The graph that every rank runs.
pub fn shard(graph: &Graph, shards: &MeshSharding) -> Result<Graph, IrError> {
    let mut g = graph.clone();
    for axis in shards.axes() {
        if axis.name == "ep" {
            g = with_symbols(&g, axis)?;
        }
        g = partition::partition(&g, axis, shards)?;
    }
    sum_in_place(&g, shards)
}

/// The graph in which the sum of a partial state over its ranks is the next version of that state: it needs no memory of its own.
fn sum_in_place(graph: &Graph, shards: &MeshSharding) -> Result<Graph, IrError> {
    let partial = |name: &str| {
        let placed = shards.leaves.get(name).into_iter().flatten();
        shards.axes().any(|axis| placed.clone().any(|(a, p)| *a == axis.name && *p == Placement::Partial))
    };
    let sums = |id: NodeId| match (&graph.node(id).op, graph.node(id).args.as_slice()) {
        (Op::AllReduce(_), [of]) => matches!(&graph.node(*of).op, Op::State(s) if partial(&s.name)),
        _ => false,
    };
    if !graph.ids().any(sums) {
        return Ok(graph.clone());
    }
    graph.rebuild(|out, id, args| {
        let made = out.push_exact(graph.node(id).op.clone(), args)?;
        if sums(id) { out.push_exact(Store {}.into(), &[args[0], made]) } else { Ok(made) }
    })
}

/// The graph with, beside each symbol, a symbol that counts the rows of all ranks of an axis.
fn with_symbols(graph: &Graph, axis: &Axis) -> Result<Graph, IrError> {
    let all = |s: &Symbol| Symbol {
        name: choose::symbol_of_all_ranks(&s.name, axis).into(),
        min: s.min,
        max: s.max.saturating_mul(axis.size as u64),
        multiple_of: s.multiple_of,
    };
    let with =
        |g: &Graph| -> Vec<Symbol> { g.symbols.iter().cloned().chain(g.symbols.iter().map(all)).collect() };
    let block = |b: &Arc<Block>| {
        let mut block = (**b).clone();
        block.graph.symbols = with(&b.graph);
        Arc::new(block)
    };
    let mut g = graph.with_blocks(graph.blocks().iter().map(block).collect())?;
    g.symbols = with(graph);
    Ok(g)
}
