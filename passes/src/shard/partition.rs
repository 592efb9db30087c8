//! Partitions a graph, and the bodies of the blocks that it calls, over the ranks along one axis. In: the graph with global
//! shapes. Out: the graph that every rank runs, each node noted with its placement.

use super::choose::{PlacedNode, choose};
use super::{MeshSharding, is_data};
use astrai_ir::ops::{Call, Op, Pvary, Rows, Weight};
use astrai_ir::shard::{Partition, Shard};
use astrai_ir::{Axis, Block, BlockId, Dim, Graph, IrError, NodeId, Placement, Sharding, Type};
use std::collections::HashMap;
use std::sync::Arc;

/// The graph partitioned over the ranks along `axis`.
pub fn partition(graph: &Graph, axis: &Axis, shards: &MeshSharding) -> Result<Graph, IrError> {
    let leaf = |op: &Op| shards.leaf(op, axis);
    let mut partitioner = Partitioner::new(graph, axis, shards.trained);
    partitioner.nodes(&leaf)?;
    partitioner.outputs(true)?;
    Ok(partitioner.out)
}

/// A node of the global graph as it is on a rank.
#[derive(Clone)]
pub(super) struct Value {
    pub id: NodeId,
    /// Placement of each output.
    pub placements: Vec<Placement>,
    /// For dispatched rows, the rows before they were dispatched to experts.
    pub rows: Option<Dim>,
    /// Whether a gradient may flow to it.
    pub has_gradient: bool,
    /// Whether the value depends on data that differ between data-parallel ranks.
    data_dependent: bool,
}

/// Partitioned blocks: from a block and the placements of its parameters to the block on a rank and the placements of its
/// outputs.
type Bodies = HashMap<(BlockId, Vec<Placement>), (BlockId, Vec<Placement>)>;

pub(super) struct Partitioner<'a> {
    global: &'a Graph,
    pub out: Graph,
    pub axis: &'a Axis,
    pub trained: bool,
    values: Vec<Option<Value>>,
    bodies: Bodies,
    /// For dispatched rows, the offsets by which they were dispatched.
    pub offsets: HashMap<NodeId, NodeId>,
    /// For offsets, the all-to-all that dispatched rows by them.
    pub arrived: HashMap<NodeId, NodeId>,
}

impl<'a> Partitioner<'a> {
    fn new(global: &'a Graph, axis: &'a Axis, trained: bool) -> Partitioner<'a> {
        Partitioner {
            global,
            out: Graph::new(global.symbols.clone()),
            axis,
            trained,
            values: vec![None; global.nodes().len()],
            bodies: HashMap::new(),
            offsets: HashMap::new(),
            arrived: HashMap::new(),
        }
    }

    fn nodes(&mut self, leaf: &dyn Fn(&Op) -> Placement) -> Result<(), IrError> {
        let live = self.global.live();
        let global = self.global;
        for id in global.ids() {
            let node = global.node(id);
            if !live[id.index()] && node.op.leaf_name().is_none() {
                continue;
            }
            self.out.enter_origin(&node.origin);
            let value = self.node(id, leaf)?;
            self.values[id.index()] = Some(value);
        }
        self.out.enter_origin(&Arc::from(""));
        Ok(())
    }

    fn value(&self, id: NodeId) -> Result<&Value, IrError> {
        self.values[id.index()].as_ref().ok_or_else(|| self.out.error(format!("{id} has no value")))
    }

    fn node(&mut self, id: NodeId, leaf: &dyn Fn(&Op) -> Placement) -> Result<Value, IrError> {
        let node = self.global.node(id);
        if node.op.leaf_name().is_some() {
            return self.leaf(id, leaf(&node.op));
        }
        let args = node.args.iter().map(|a| self.value(*a).cloned()).collect::<Result<Vec<_>, _>>()?;
        let value = match &node.op {
            Op::Part(p) => {
                let made = self.out.push(p.clone(), &[args[0].id])?;
                if let Some(o) = self.offsets.get(&args[0].id).copied() {
                    self.offsets.insert(made, o);
                }
                let placements = vec![args[0].placements[p.index as usize].clone()];
                Value { id: made, placements, ..args[0].clone() }
            }
            Op::Call(c) => self.call(id, c, &args)?,
            _ => self.operator(id, &args)?,
        };
        let noted = value.placements[0].clone();
        self.note_as(value.id, &node.sharding, &noted);
        Ok(value)
    }

    /// Notes the placement of a node that was made by resharding another.
    pub(super) fn note(&mut self, made: NodeId, from: NodeId, to: &Placement) {
        let mut sharding = self.out.node(from).sharding.clone();
        sharding.retain(|(axis, _)| *axis != self.axis.name);
        self.note_as(made, &sharding, to);
    }

    fn note_as(&mut self, made: NodeId, before: &Sharding, here: &Placement) {
        let mut sharding = before.clone();
        sharding.push((self.axis.name.clone(), here.clone()));
        self.out.note_sharding(made, &sharding);
    }

    fn leaf(&mut self, id: NodeId, placement: Placement) -> Result<Value, IrError> {
        let node = self.global.node(id);
        let (ty, n) = (node.ty(), self.axis.size);
        if let Placement::Shard(shard) = &placement
            && !shard.divides(ty, n)
        {
            let name = node.op.leaf_name().unwrap_or_default();
            return Err(self.out.error(format!("`{name}` {ty} does not divide by {}", self.axis)));
        }
        let local = placement.local_type(ty, n);
        let op: Op = match &node.op {
            Op::Weight(w) => shard_of_weight(w, &placement, local, self.axis).into(),
            Op::State(s) => astrai_ir::ops::State { ty: local, ..s.clone() }.into(),
            Op::Input(i) => astrai_ir::ops::Input { ty: local, ..i.clone() }.into(),
            op => op.clone(),
        };
        let has_gradient = !matches!(op, Op::State(_)) && ty.dtype.is_float();
        let data_dependent = placement == Placement::Local;
        let made = self.out.push(op, &[])?;
        self.note_as(made, &node.sharding, &placement);
        let value = Value { id: made, placements: vec![placement], rows: None, has_gradient, data_dependent };
        if value.placements[0] != Placement::Partial {
            return Ok(value);
        }
        // Every use by itself would sum what is linear in the leaf, and so send it once a use.
        let id = self.reshard(&value, &Placement::Replicate, None)?;
        Ok(Value { id, placements: vec![Placement::Replicate], ..value })
    }

    fn operator(&mut self, id: NodeId, args: &[Value]) -> Result<Value, IrError> {
        let node = self.global.node(id);
        let types: Vec<&Type> = node.args.iter().map(|a| self.global.ty(*a)).collect();
        let placements: Vec<Placement> = args.iter().map(|v| v.placements[0].clone()).collect();
        let at = PlacedNode { op: &node.op, args: &types, outs: &node.types, placements: &placements };
        let rule = choose(self.global, &at, self.axis)
            .map_err(|m| self.out.error(format!("`{}` {m}", node.op.name())))?;
        let arrives = matches!(node.op, Op::RecvFrom(_));
        let has_gradient =
            (arrives || args.iter().any(|v| v.has_gradient)) && node.types.iter().any(|t| t.dtype.is_float());
        let data_dependent = args.iter().any(|v| v.data_dependent);
        let differs = rule.outs.iter().any(|p| *p != Placement::Replicate);
        let mut given = Vec::with_capacity(args.len());
        for (i, v) in args.iter().enumerate() {
            let here = match rule.args[i] == Placement::Dispatched && v.placements[0] == Placement::Local {
                true => self.dispatched(v, &rule.args, args)?,
                false => self.reshard(v, &rule.args[i], None)?,
            };
            // Gradients of weights are summed over data-parallel ranks once, where they are complete, not at every use.
            let implicit = is_data(self.axis) && !v.data_dependent;
            let replicated =
                rule.args[i] == Placement::Replicate && self.global.ty(node.args[i]).dtype.is_float();
            given.push(match self.trained && differs && replicated && v.has_gradient && !implicit {
                true => {
                    let made = self.out.push(Pvary { over: self.axis.clone() }, &[here])?;
                    self.note(made, here, &Placement::Replicate);
                    made
                }
                false => here,
            });
        }
        let mixed =
            is_data(self.axis) && !differs && args.iter().any(|v| v.has_gradient && !v.data_dependent);
        if self.trained && mixed && data_dependent && has_gradient {
            let message = format!(
                "`{}` joins a sum over tokens with a weight; its gradient is not known",
                node.op.name()
            );
            return Err(self.out.error(message));
        }
        let owned: Vec<Type> = types.into_iter().cloned().collect();
        let cx = Partition { rule: &rule, args: &owned, outs: &node.types, axis: self.axis };
        let made = node.op.partition(&mut self.out, &given, &cx)?;
        let rows =
            (rule.outs[0] == Placement::Dispatched).then(|| node.ty().shape.first().cloned()).flatten();
        if rows.is_some()
            && let Some(o) = self.dispatched_by(args, &rule.args)
        {
            self.offsets.insert(made, o);
        }
        let data_dependent = data_dependent || rule.outs.iter().any(|p| matches!(p, Placement::Local));
        Ok(Value { id: made, placements: rule.outs, rows, has_gradient, data_dependent })
    }

    /// An argument on the ranks of its experts: rows are dispatched by the offsets, offsets become those of the rows that arrived.
    fn dispatched(&mut self, v: &Value, want: &[Placement], args: &[Value]) -> Result<NodeId, IrError> {
        let offsets = self.dispatched_by(args, want).or(args.get(2).map(|o| o.id));
        let offsets = offsets.ok_or_else(|| self.out.error("no offsets by which to dispatch rows".into()))?;
        if v.id != offsets {
            let made = self.reshard(v, &Placement::Dispatched, Some(offsets))?;
            self.offsets.insert(made, offsets);
            return Ok(made);
        }
        let both = self.arrived.get(&offsets).copied();
        let both = both.ok_or_else(|| self.out.error("offsets are sent with their rows".into()))?;
        let made = self.out.part(both, 1)?;
        self.note(made, offsets, &Placement::Dispatched);
        Ok(made)
    }

    /// The offsets by which one of these arguments was dispatched.
    fn dispatched_by(&self, args: &[Value], want: &[Placement]) -> Option<NodeId> {
        let dispatched = args.iter().zip(want).filter(|(_, w)| **w == Placement::Dispatched);
        let known = dispatched.clone().find_map(|(v, _)| self.offsets.get(&v.id).copied());
        known.or_else(|| {
            dispatched.clone().find_map(|(v, _)| self.arrived.contains_key(&v.id).then_some(v.id))
        })
    }

    fn call(&mut self, id: NodeId, c: &Call, args: &[Value]) -> Result<Value, IrError> {
        let mut given = Vec::with_capacity(args.len());
        let mut placements = Vec::with_capacity(args.len());
        for v in args {
            let to = at_boundary(&v.placements[0]);
            given.push(self.reshard(v, &to, None)?);
            placements.push(to);
        }
        let key = (c.block, placements);
        let (block, outs) = match self.bodies.get(&key) {
            Some(known) => known.clone(),
            None => {
                let (body, outs) = self.body(self.global.block(c.block), &key.1)?;
                let made = (self.out.add_block(Arc::new(body)), outs);
                self.bodies.insert(key, made.clone());
                made
            }
        };
        let made = self.out.push(Call { block, layer: c.layer }, &given)?;
        let float = self.global.node(id).types.iter().any(|t| t.dtype.is_float());
        let data_dependent = outs.contains(&Placement::Local);
        Ok(Value { id: made, placements: outs, rows: None, has_gradient: float, data_dependent })
    }

    fn body(&self, block: &Block, placements: &[Placement]) -> Result<(Block, Vec<Placement>), IrError> {
        let by_name: HashMap<&str, &Placement> =
            block.params.iter().map(String::as_str).zip(placements).collect();
        let leaf = |op: &Op| {
            let p = op.leaf_name().and_then(|name| by_name.get(name));
            p.map_or(Placement::Replicate, |p| (*p).clone())
        };
        let mut partitioner = Partitioner::new(&block.graph, self.axis, self.trained);
        partitioner.nodes(&leaf)?;
        let outs = partitioner.outputs(false)?;
        Ok((block.with(partitioner.out), outs))
    }

    /// Declares the outputs: partial sums are reduced, and at the `top` level shards are gathered, except those of states.
    fn outputs(&mut self, top: bool) -> Result<Vec<Placement>, IrError> {
        let mut placements = Vec::new();
        for (name, id) in self.global.outputs() {
            let value = self.value(*id)?.clone();
            let mut to = at_boundary(&value.placements[0]);
            let version =
                crate::is_version(self.global, *id) || matches!(self.global.node(*id).op, Op::State(_));
            if top && matches!(to, Placement::Shard(_)) && !version {
                to = Placement::Replicate;
            }
            let origin = self.global.node(*id).origin.clone();
            self.out.enter_origin(&origin);
            let made = self.reshard(&value, &to, None)?;
            self.out.set_output(name, made)?;
            placements.push(to);
        }
        self.out.enter_origin(&Arc::from(""));
        Ok(placements)
    }
}

/// The placement of a value where it crosses the boundary of a body: neither partial nor dispatched.
fn at_boundary(p: &Placement) -> Placement {
    match p {
        Placement::Partial => Placement::Replicate,
        Placement::Dispatched => Placement::Local,
        other => other.clone(),
    }
}

/// A rank's shard of a weight. If its checkpoint tensors are sections, the shard has rows of each of them; if whole checkpoint
/// tensors lie on one rank each, it has the names of those of the first rank.
fn shard_of_weight(w: &Weight, placement: &Placement, ty: Type, axis: &Axis) -> Weight {
    let mut parts = w.parts.clone();
    if let Placement::Shard(Shard { dim: 0, sections }) = placement
        && !parts.is_empty()
    {
        let rows = ty.shape[0].size().unwrap_or(0);
        let each = |p: &Rows| Rows { name: p.name.clone(), rows: p.rows / axis.size };
        parts = match sections.is_empty() {
            false => parts.iter().map(each).collect(),
            true => {
                let mut before = 0;
                let inside = |p: &Rows| {
                    before += p.rows;
                    before <= rows
                };
                parts.into_iter().take_while(inside).collect()
            }
        };
    }
    Weight { ty, parts, ..w.clone() }
}
