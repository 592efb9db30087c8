//! Puts a graph on a mesh of ranks. In: the graph of the whole model (for the tokens of one data rank), a mesh, and placements
//! of weights and states. Out: the graph that each rank runs: every shape local, collectives where what a node has and what
//! it needs disagree. One axis after the other, each a walk in which every node takes the cheapest of the ways that its operator
//! knows; what the first axis leaves is the whole of the next. Gradients come later and by the collectives' own rules.

mod choose;
mod place;
mod walk;

#[cfg(test)]
mod tests;

use astrai_ir::ops::Op;
use astrai_ir::shard::STAGES;
use astrai_ir::{Axis, Graph, IrError, Mesh, Placement, Symbol};
use std::collections::HashMap;

/// Axes along which ranks have tokens of their own.
pub const DATA: [&str; 2] = ["dp", "ep"];

/// A mesh and what lies where on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shards {
    /// The ranks. Along the axes of [`DATA`] each has sequences of its own; the graph is of those of one rank.
    pub mesh: Mesh,
    /// Weights and states by name: what a rank holds along an axis. Others are whole on every rank, or a rank's own.
    pub leaves: HashMap<String, Vec<(String, Placement)>>,
    /// Which stage of the pipeline the graph is of, where there is one: [`pipeline`](crate::pipeline) has made it.
    pub stage: usize,
    /// Whether the graph will be differentiated: then values that ranks use differently are marked (`spread`).
    pub trained: bool,
}

impl Shards {
    /// Axes of more than one rank on which every rank runs the same graph.
    pub fn axes(&self) -> impl Iterator<Item = &Axis> {
        self.mesh.axes.iter().filter(|a| a.size > 1 && a.name != STAGES)
    }

    /// The axis whose ranks are the stages of a pipeline.
    pub fn stages(&self) -> Option<&Axis> {
        self.mesh.axes.iter().find(|a| a.size > 1 && a.name == STAGES)
    }

    /// Axes along which the gradients of weights that are whole are sums.
    pub fn data_axes(&self) -> Vec<Axis> {
        self.axes().filter(|a| is_data(a)).cloned().collect()
    }

    fn leaf(&self, op: &Op, axis: &Axis) -> Placement {
        let of = op.leaf_name().and_then(|name| self.leaves.get(name));
        let found = of.and_then(|list| list.iter().find(|(a, _)| *a == axis.name)).map(|(_, p)| p.clone());
        match op {
            _ if found.is_some() => found.unwrap_or(Placement::Whole),
            Op::State(_) if is_data(axis) => Placement::Own,
            Op::Input(i) if is_data(axis) && !i.ty.shape.is_empty() => Placement::Own,
            _ => Placement::Whole,
        }
    }
}

fn is_data(axis: &Axis) -> bool {
    DATA.contains(&axis.name.as_str())
}

/// The graph of each rank.
pub fn shard(graph: &Graph, shards: &Shards) -> Result<Graph, IrError> {
    let mut g = graph.clone();
    for axis in shards.axes() {
        if axis.name == "ep" {
            g = with_symbols(&g, axis)?;
        }
        g = walk::along(&g, axis, shards)?;
    }
    Ok(g)
}

/// The graph with a symbol for the rows of all ranks of an axis beside each symbol.
fn with_symbols(graph: &Graph, axis: &Axis) -> Result<Graph, IrError> {
    let all = |s: &Symbol| Symbol {
        name: choose::of_all(&s.name, axis).into(),
        min: s.min,
        max: s.max.saturating_mul(axis.size as u64),
        multiple_of: s.multiple_of,
    };
    let with =
        |g: &Graph| -> Vec<Symbol> { g.symbols.iter().cloned().chain(g.symbols.iter().map(all)).collect() };
    let mut g = graph.rebuild(
        |b| {
            let mut block = (**b).clone();
            block.graph.symbols = with(&b.graph);
            Ok(block.into())
        },
        |g, id, args| g.push_exact(graph.node(id).op.clone(), args),
    )?;
    g.symbols = with(graph);
    Ok(g)
}
