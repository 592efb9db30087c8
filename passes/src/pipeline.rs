//! Pipeline parallelism: partitions a graph into stages. In: the graph of the whole model, and an axis whose ranks are the stages.
//! Out: the graph of one stage: its layers (the embedding on the first stage, the head on the last), with a `send` in one stage
//! and a `recv` in the other for every value that crosses between them. Values computed from inputs alone, or from weights
//! alone, are recomputed on every stage that uses them. Cotangents take the same point-to-point links back; they are added by
//! [`differentiate`](crate::differentiate).

use astrai_ir::ops::{Op, RecvFrom, SendTo};
use astrai_ir::shard::STAGES;
use astrai_ir::{Axis, Graph, IrError, NodeId, Placement, Sharding};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The stage of each node of a graph; `None` for nodes that every stage which uses them computes.
struct Stages<'a> {
    graph: &'a Graph,
    axis: &'a Axis,
    of: Vec<Option<usize>>,
}

/// The number of layers of a graph, by the `layer` of its calls.
fn layers(graph: &Graph) -> usize {
    let layer = |op: &Op| if let Op::Call(c) = op { Some(c.layer as usize + 1) } else { None };
    graph.nodes().iter().filter_map(|n| layer(&n.op)).max().unwrap_or(0)
}

/// The stage of a layer: stages have equally many layers, give or take one.
fn stage_of(layer: usize, layers: usize, stages: usize) -> usize {
    layer * stages / layers.max(1)
}

/// The graph of stage `here` along `axis`.
pub fn pipeline(graph: &Graph, axis: &Axis, here: usize) -> Result<Graph, IrError> {
    if here >= axis.size {
        return Err(graph.error(format!("there is no stage {here} of {axis}")));
    }
    if layers(graph) < axis.size {
        return Err(graph.error(format!("{} layers are fewer than {axis}", layers(graph))));
    }
    Stages::of(graph, axis)?.stage_graph(here)
}

impl<'a> Stages<'a> {
    fn of(graph: &'a Graph, axis: &'a Axis) -> Result<Stages<'a>, IrError> {
        let (live, layers) = (graph.live(), layers(graph));
        let mut of: Vec<Option<usize>> = Vec::with_capacity(graph.nodes().len());
        // For each node whether it depends on inputs, and whether on weights or states.
        let mut depends: Vec<[bool; 2]> = Vec::with_capacity(graph.nodes().len());
        for node in graph.nodes() {
            let own = [matches!(node.op, Op::Input(_)), matches!(node.op, Op::Weight(_) | Op::State(_))];
            let or = |[a, b]: [bool; 2], [c, d]: [bool; 2]| [a || c, b || d];
            let all = node.args.iter().map(|a| depends[a.index()]).fold(own, or);
            depends.push(all);
            // A node that depends on both inputs and weights belongs to a stage, the first unless its arguments say otherwise.
            let args = node.args.iter().filter_map(|a| of[a.index()]).max();
            let made = args.or((all == [true; 2]).then_some(0));
            of.push(match &node.op {
                Op::Call(c) => {
                    let stage = stage_of(c.layer as usize, layers, axis.size);
                    if made > Some(stage) {
                        let line = format!("layer {} needs what a later stage of {axis} makes", c.layer);
                        return Err(graph.error(line));
                    }
                    Some(stage)
                }
                _ => made,
            });
        }
        of.iter_mut().zip(&live).filter(|(_, live)| !**live).for_each(|(stage, _)| *stage = None);
        Ok(Stages { graph, axis, of })
    }

    /// The stages that use each leaf.
    fn users(&self) -> BTreeMap<NodeId, BTreeSet<usize>> {
        let mut users: BTreeMap<NodeId, BTreeSet<usize>> = BTreeMap::new();
        for stage in 0..self.axis.size {
            let own = self.graph.ids().filter(|id| self.of[id.index()] == Some(stage));
            for id in self.ancestors_at(own.collect(), stage) {
                if self.graph.node(id).op.leaf_name().is_some() {
                    users.entry(id).or_default().insert(stage);
                }
            }
        }
        users
    }

    /// The later stages that use each value.
    fn crossings(&self) -> BTreeMap<NodeId, BTreeSet<usize>> {
        let mut found: BTreeMap<NodeId, BTreeSet<usize>> = BTreeMap::new();
        for (id, stage) in self.graph.ids().zip(&self.of) {
            let Some(stage) = stage else { continue };
            for a in &self.graph.node(id).args {
                if self.of[a.index()].is_some_and(|from| from < *stage) {
                    found.entry(*a).or_default().insert(*stage);
                }
            }
        }
        found
    }

    fn label(&self, id: NodeId) -> String {
        format!("{}.{id}", self.graph.node(id).origin).trim_start_matches('.').to_string()
    }

    fn stage_graph(&self, here: usize) -> Result<Graph, IrError> {
        let (users, crossings) = (self.users(), self.crossings());
        let mut out = Graph::new(self.graph.symbols.clone());
        let blocks: Vec<_> = self.graph.blocks().iter().map(|b| out.add_block(b.clone())).collect();
        let mut made: Vec<Option<NodeId>> = vec![None; self.graph.nodes().len()];
        let needed = self.needed(here, &users);
        for id in self.graph.ids() {
            let node = self.graph.node(id);
            out.enter_origin(&node.origin);
            let arrives = crossings.get(&id).is_some_and(|to| to.contains(&here));
            let placed = |stages: Vec<usize>| -> Sharding {
                let here = (STAGES.to_string(), Placement::Stages(stages));
                node.sharding.iter().cloned().chain([here]).collect()
            };
            if arrives && let Some(from) = self.of[id.index()] {
                let op =
                    RecvFrom { over: self.axis.clone(), from, label: self.label(id), ty: node.ty().clone() };
                let arrived = out.push(op, &[])?;
                out.note_sharding(arrived, &placed(vec![here]));
                made[id.index()] = Some(arrived);
                continue;
            }
            if !needed.contains(&id) {
                continue;
            }
            let arg = |a: &NodeId| {
                made[a.index()].ok_or_else(|| self.graph.error(format!("{id} needs {a}, which is not here")))
            };
            let args = node.args.iter().map(arg).collect::<Result<Vec<_>, IrError>>()?;
            let op: Op = match &node.op {
                Op::Call(c) => astrai_ir::ops::Call { block: blocks[c.block.0 as usize], ..c.clone() }.into(),
                op => op.clone(),
            };
            let copied = out.push_exact(op, &args)?;
            let all = || (0..self.axis.size).collect();
            let stages = match (self.of[id.index()], users.get(&id)) {
                (Some(stage), _) => vec![stage],
                (None, Some(users)) if !matches!(node.op, Op::Input(_)) => users.iter().copied().collect(),
                _ => all(),
            };
            out.note_sharding(copied, &placed(stages));
            made[id.index()] = Some(copied);
            if self.of[id.index()] == Some(here) {
                for to in crossings.get(&id).into_iter().flatten() {
                    let (over, label) = (self.axis.clone(), self.label(id));
                    let output = format!("send.{to}.{label}");
                    let sent = out.push(SendTo { over, to: *to, label }, &[copied])?;
                    out.note_sharding(sent, &placed(vec![here]));
                    out.set_output(&output, sent)?;
                }
            }
        }
        out.enter_origin(&Arc::from(""));
        for (name, id) in self.graph.outputs() {
            if self.has_output(*id, here, &users)
                && let Some(made) = made[id.index()]
            {
                out.set_output(name, made)?;
            }
        }
        Ok(out)
    }

    /// Whether an output belongs to a stage: that of its node or, for a node without stage, any that uses it.
    fn has_output(&self, id: NodeId, here: usize, users: &BTreeMap<NodeId, BTreeSet<usize>>) -> bool {
        match self.of[id.index()] {
            Some(stage) => stage == here,
            None => users.get(&id).map_or(here == 0, |u| u.contains(&here)),
        }
    }

    /// The nodes that a stage computes: its own, its outputs, and the nodes without stage that these depend on.
    fn needed(&self, here: usize, users: &BTreeMap<NodeId, BTreeSet<usize>>) -> BTreeSet<NodeId> {
        let mut roots: Vec<NodeId> =
            self.graph.ids().filter(|id| self.of[id.index()] == Some(here)).collect();
        let outputs = self.graph.outputs().iter().map(|(_, id)| *id);
        roots.extend(outputs.filter(|id| self.has_output(*id, here, users)));
        self.ancestors_at(roots, here)
    }

    /// These nodes and the nodes of this stage, or of no stage, that they depend on.
    fn ancestors_at(&self, roots: Vec<NodeId>, here: usize) -> BTreeSet<NodeId> {
        self.graph.ancestors(roots, |_, a| self.of[a.index()].is_none_or(|stage| stage == here))
    }
}
