//! Puts layers on the stages of a pipeline. In: the graph of the whole model, and how many stages there are. Out: the graph of
//! one stage: its layers, what stands before the first on the first stage and behind the last on the last, and where a value
//! crosses to another stage a `send` in one and a `recv` in the other. What is made of inputs alone, or of weights alone, is
//! made wherever it is needed. Cotangents go back by the same links; they come with the gradient
//! ([`differentiate`](crate::differentiate)).

use astrai_ir::ops::{Op, RecvFrom, SendTo};
use astrai_ir::shard::STAGES;
use astrai_ir::{Axis, Graph, IrError, NodeId, Placement, Sharding};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Stage of each node of a graph; `None`: wherever it is needed.
struct Stages<'a> {
    graph: &'a Graph,
    axis: &'a Axis,
    of: Vec<Option<usize>>,
}

/// Layers of a graph: calls are counted by their `layer`.
fn layers(graph: &Graph) -> usize {
    let layer = |op: &Op| if let Op::Call(c) = op { Some(c.layer as usize + 1) } else { None };
    graph.nodes().iter().filter_map(|n| layer(&n.op)).max().unwrap_or(0)
}

/// The stage of a layer: as many layers on each as on any other, give or take one.
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
    Stages::of(graph, axis)?.part(here)
}

impl<'a> Stages<'a> {
    fn of(graph: &'a Graph, axis: &'a Axis) -> Result<Stages<'a>, IrError> {
        let (live, layers) = (graph.live(), layers(graph));
        let mut of: Vec<Option<usize>> = Vec::with_capacity(graph.nodes().len());
        // Whether inputs, and whether weights or states, are behind a node.
        let mut behind: Vec<[bool; 2]> = Vec::with_capacity(graph.nodes().len());
        for node in graph.nodes() {
            let own = [matches!(node.op, Op::Input(_)), matches!(node.op, Op::Weight(_) | Op::State(_))];
            let or = |[a, b]: [bool; 2], [c, d]: [bool; 2]| [a || c, b || d];
            let all = node.args.iter().map(|a| behind[a.index()]).fold(own, or);
            behind.push(all);
            // Where inputs first meet weights the model begins; what either makes alone is wherever it is needed.
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

    /// The stages at which a leaf is used.
    fn users(&self) -> BTreeMap<NodeId, BTreeSet<usize>> {
        let mut users: BTreeMap<NodeId, BTreeSet<usize>> = BTreeMap::new();
        for stage in 0..self.axis.size {
            let own = self.graph.ids().filter(|id| self.of[id.index()] == Some(stage));
            for id in self.reach(own.collect(), stage) {
                if self.graph.node(id).op.leaf_name().is_some() {
                    users.entry(id).or_default().insert(stage);
                }
            }
        }
        users
    }

    /// Later stages that use a value of a stage.
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

    fn part(&self, here: usize) -> Result<Graph, IrError> {
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
            let here_is = out.push_exact(op, &args)?;
            let all = || (0..self.axis.size).collect();
            let stages = match (self.of[id.index()], users.get(&id)) {
                (Some(stage), _) => vec![stage],
                (None, Some(users)) if !matches!(node.op, Op::Input(_)) => users.iter().copied().collect(),
                _ => all(),
            };
            out.note_sharding(here_is, &placed(stages));
            made[id.index()] = Some(here_is);
            if self.of[id.index()] == Some(here) {
                for to in crossings.get(&id).into_iter().flatten() {
                    let (over, label) = (self.axis.clone(), self.label(id));
                    let output = format!("send.{to}.{label}");
                    let sent = out.push(SendTo { over, to: *to, label }, &[here_is])?;
                    out.note_sharding(sent, &placed(vec![here]));
                    out.set_output(&output, sent)?;
                }
            }
        }
        out.enter_origin(&Arc::from(""));
        for (name, id) in self.graph.outputs() {
            if self.at(*id, here, &users)
                && let Some(made) = made[id.index()]
            {
                out.set_output(name, made)?;
            }
        }
        Ok(out)
    }

    /// Whether an output belongs to a stage: to that of its node, of a state that nothing changes to those that use it.
    fn at(&self, id: NodeId, here: usize, users: &BTreeMap<NodeId, BTreeSet<usize>>) -> bool {
        match self.of[id.index()] {
            Some(stage) => stage == here,
            None => users.get(&id).map_or(here == 0, |u| u.contains(&here)),
        }
    }

    /// What a stage computes: its own nodes, its outputs, and what they need that is made anywhere.
    fn needed(&self, here: usize, users: &BTreeMap<NodeId, BTreeSet<usize>>) -> BTreeSet<NodeId> {
        let mut todo: Vec<NodeId> = self.graph.ids().filter(|id| self.of[id.index()] == Some(here)).collect();
        let outputs = self.graph.outputs().iter().map(|(_, id)| *id);
        todo.extend(outputs.filter(|id| self.at(*id, here, users)));
        self.reach(todo, here)
    }

    /// These nodes and what they need that is made at this stage or anywhere.
    fn reach(&self, mut todo: Vec<NodeId>, here: usize) -> BTreeSet<NodeId> {
        let mut needed = BTreeSet::new();
        while let Some(id) = todo.pop() {
            if needed.insert(id) {
                let args = self.graph.node(id).args.iter();
                todo.extend(args.filter(|a| self.of[a.index()].is_none_or(|stage| stage == here)));
            }
        }
        needed
    }
}
