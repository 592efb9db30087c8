//! One axis: every node of a graph, and of the bodies that it calls, put on the ranks along it.

use super::choose::{At, choose};
use super::{Shards, is_data};
use astrai_ir::ops::{Call, Op, Rows, Spread, Weight};
use astrai_ir::shard::{Cut, Local};
use astrai_ir::{Axis, Block, BlockId, Dim, Graph, IrError, NodeId, Placement, Sharding, Type};
use std::collections::HashMap;
use std::sync::Arc;

/// The graph on the ranks along `axis`.
pub fn along(graph: &Graph, axis: &Axis, shards: &Shards) -> Result<Graph, IrError> {
    let leaf = |op: &Op| shards.leaf(op, axis);
    let mut walk = Walk::new(graph, axis, shards.trained);
    walk.nodes(&leaf)?;
    walk.outputs(true)?;
    Ok(walk.out)
}

/// A node of the whole graph as it is on a rank.
#[derive(Clone)]
pub(super) struct Value {
    pub id: NodeId,
    /// Of each output.
    pub placed: Vec<Placement>,
    /// Rows that it had before they were sent to experts.
    pub rows: Option<Dim>,
    /// Whether a gradient may flow to it.
    pub graded: bool,
    /// Whether it was made of what ranks have of their own.
    joint: bool,
}

/// Placements of a block's parameters, to the block on a rank and the placements of its outputs.
type Bodies = HashMap<(BlockId, Vec<Placement>), (BlockId, Vec<Placement>)>;

pub(super) struct Walk<'a> {
    old: &'a Graph,
    pub out: Graph,
    pub axis: &'a Axis,
    pub trained: bool,
    values: Vec<Option<Value>>,
    bodies: Bodies,
    /// For what was sent to experts, the offsets by which it was.
    pub offsets: HashMap<NodeId, NodeId>,
    /// For offsets, the exchange that sent rows by them.
    pub arrived: HashMap<NodeId, NodeId>,
}

impl<'a> Walk<'a> {
    fn new(old: &'a Graph, axis: &'a Axis, trained: bool) -> Walk<'a> {
        Walk {
            old,
            out: Graph::new(old.symbols.clone()),
            axis,
            trained,
            values: vec![None; old.nodes().len()],
            bodies: HashMap::new(),
            offsets: HashMap::new(),
            arrived: HashMap::new(),
        }
    }

    fn nodes(&mut self, leaf: &dyn Fn(&Op) -> Placement) -> Result<(), IrError> {
        let live = self.old.live();
        let old = self.old;
        for id in old.ids() {
            let node = old.node(id);
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
        let node = self.old.node(id);
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
                let placed = vec![args[0].placed[p.index as usize].clone()];
                Value { id: made, placed, ..args[0].clone() }
            }
            Op::Call(c) => self.call(id, c, &args)?,
            _ => self.operator(id, &args)?,
        };
        let noted = value.placed[0].clone();
        self.note_as(value.id, &node.sharding, &noted);
        Ok(value)
    }

    /// Notes what ranks hold of a node that was made of another.
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

    fn leaf(&mut self, id: NodeId, placed: Placement) -> Result<Value, IrError> {
        let node = self.old.node(id);
        let (ty, n) = (node.ty(), self.axis.size);
        if let Placement::Split(cut) = &placed
            && !cut.fits(ty, n)
        {
            let name = node.op.leaf_name().unwrap_or_default();
            return Err(self.out.error(format!("`{name}` {ty} does not divide by {}", self.axis)));
        }
        let local = placed.local(ty, n);
        let op: Op = match &node.op {
            Op::Weight(w) => piece_of_weight(w, &placed, local, self.axis).into(),
            Op::State(s) => astrai_ir::ops::State { ty: local, ..s.clone() }.into(),
            Op::Input(i) => astrai_ir::ops::Input { ty: local, ..i.clone() }.into(),
            op => op.clone(),
        };
        let graded = !matches!(op, Op::State(_)) && ty.dtype.is_float();
        let joint = placed == Placement::Own;
        let made = self.out.push(op, &[])?;
        self.note_as(made, &node.sharding, &placed);
        Ok(Value { id: made, placed: vec![placed], rows: None, graded, joint })
    }

    fn operator(&mut self, id: NodeId, args: &[Value]) -> Result<Value, IrError> {
        let node = self.old.node(id);
        let types: Vec<&Type> = node.args.iter().map(|a| self.old.ty(*a)).collect();
        let placed: Vec<Placement> = args.iter().map(|v| v.placed[0].clone()).collect();
        let at = At { op: &node.op, args: &types, outs: &node.types, placed: &placed };
        let way = choose(self.old, &at, self.axis)
            .map_err(|m| self.out.error(format!("`{}` {m}", node.op.name())))?;
        let arrives = matches!(node.op, Op::RecvFrom(_));
        let graded =
            (arrives || args.iter().any(|v| v.graded)) && node.types.iter().any(|t| t.dtype.is_float());
        let joint = args.iter().any(|v| v.joint);
        let differs = way.outs.iter().any(|p| *p != Placement::Whole);
        let mut given = Vec::with_capacity(args.len());
        for (i, v) in args.iter().enumerate() {
            let here = match way.args[i] == Placement::Routed && v.placed[0] == Placement::Own {
                true => self.route(v, &way.args, args)?,
                false => self.bring(v, &way.args[i], None)?,
            };
            // Gradients of weights are summed over ranks with other tokens where they end, not at every use.
            let implicit = is_data(self.axis) && !v.joint;
            let whole = way.args[i] == Placement::Whole && self.old.ty(node.args[i]).dtype.is_float();
            given.push(match self.trained && differs && whole && v.graded && !implicit {
                true => {
                    let made = self.out.push(Spread { over: self.axis.clone() }, &[here])?;
                    self.note(made, here, &Placement::Whole);
                    made
                }
                false => here,
            });
        }
        let mixed = is_data(self.axis) && !differs && args.iter().any(|v| v.graded && !v.joint);
        if self.trained && mixed && joint && graded {
            let message = format!(
                "`{}` joins a sum over tokens with a weight; its gradient is not known",
                node.op.name()
            );
            return Err(self.out.error(message));
        }
        let owned: Vec<Type> = types.into_iter().cloned().collect();
        let cx = Local { way: &way, args: &owned, outs: &node.types, axis: self.axis };
        let made = node.op.local(&mut self.out, &given, &cx)?;
        let rows = (way.outs[0] == Placement::Routed).then(|| node.ty().shape.first().cloned()).flatten();
        if rows.is_some()
            && let Some(o) = self.sent_by(args, &way.args)
        {
            self.offsets.insert(made, o);
        }
        let joint = joint || way.outs.iter().any(|p| matches!(p, Placement::Own));
        Ok(Value { id: made, placed: way.outs, rows, graded, joint })
    }

    /// Argument `i` as its experts' ranks have it: rows are sent by the offsets, offsets become those of what arrived.
    fn route(&mut self, v: &Value, want: &[Placement], args: &[Value]) -> Result<NodeId, IrError> {
        let offsets = self.sent_by(args, want).or(args.get(2).map(|o| o.id));
        let offsets = offsets.ok_or_else(|| self.out.error("no offsets by which to send rows".into()))?;
        if v.id != offsets {
            let made = self.bring(v, &Placement::Routed, Some(offsets))?;
            self.offsets.insert(made, offsets);
            return Ok(made);
        }
        let both = self.arrived.get(&offsets).copied();
        let both = both.ok_or_else(|| self.out.error("offsets are sent with their rows".into()))?;
        let made = self.out.part(both, 1)?;
        self.note(made, offsets, &Placement::Routed);
        Ok(made)
    }

    /// The offsets by which one of these arguments was sent.
    fn sent_by(&self, args: &[Value], want: &[Placement]) -> Option<NodeId> {
        let routed = args.iter().zip(want).filter(|(_, w)| **w == Placement::Routed);
        let known = routed.clone().find_map(|(v, _)| self.offsets.get(&v.id).copied());
        known.or_else(|| routed.clone().find_map(|(v, _)| self.arrived.contains_key(&v.id).then_some(v.id)))
    }

    fn call(&mut self, id: NodeId, c: &Call, args: &[Value]) -> Result<Value, IrError> {
        let mut given = Vec::with_capacity(args.len());
        let mut placed = Vec::with_capacity(args.len());
        for v in args {
            let to = settled(&v.placed[0]);
            given.push(self.bring(v, &to, None)?);
            placed.push(to);
        }
        let key = (c.block, placed);
        let (block, outs) = match self.bodies.get(&key) {
            Some(known) => known.clone(),
            None => {
                let (body, outs) = self.body(self.old.block(c.block), &key.1)?;
                let made = (self.out.add_block(Arc::new(body)), outs);
                self.bodies.insert(key, made.clone());
                made
            }
        };
        let made = self.out.push(Call { block, layer: c.layer }, &given)?;
        let float = self.old.node(id).types.iter().any(|t| t.dtype.is_float());
        let joint = outs.contains(&Placement::Own);
        Ok(Value { id: made, placed: outs, rows: None, graded: float, joint })
    }

    fn body(&self, block: &Block, placed: &[Placement]) -> Result<(Block, Vec<Placement>), IrError> {
        let by_name: HashMap<&str, &Placement> =
            block.params.iter().map(String::as_str).zip(placed).collect();
        let leaf = |op: &Op| {
            let p = op.leaf_name().and_then(|name| by_name.get(name));
            p.map_or(Placement::Whole, |p| (*p).clone())
        };
        let mut walk = Walk::new(&block.graph, self.axis, self.trained);
        walk.nodes(&leaf)?;
        let outs = walk.outputs(false)?;
        Ok((Block { name: block.name.clone(), graph: walk.out, params: block.params.clone() }, outs))
    }

    /// Declares the results: sums are whole, and at the `top` pieces are joined but for the states'.
    fn outputs(&mut self, top: bool) -> Result<Vec<Placement>, IrError> {
        let mut placed = Vec::new();
        for (name, id) in self.old.outputs() {
            let value = self.value(*id)?.clone();
            let mut to = settled(&value.placed[0]);
            let version = crate::is_version(self.old, *id) || matches!(self.old.node(*id).op, Op::State(_));
            if top && matches!(to, Placement::Split(_)) && !version {
                to = Placement::Whole;
            }
            let origin = self.old.node(*id).origin.clone();
            self.out.enter_origin(&origin);
            let made = self.bring(&value, &to, None)?;
            self.out.set_output(name, made)?;
            placed.push(to);
        }
        self.out.enter_origin(&Arc::from(""));
        Ok(placed)
    }
}

/// Where a value is that leaves a body: no summands, no rows at their experts.
fn settled(p: &Placement) -> Placement {
    match p {
        Placement::Partial => Placement::Whole,
        Placement::Routed => Placement::Own,
        other => other.clone(),
    }
}

/// A weight's piece. Of parts that are each cut it has a piece of every one; of parts that lie on ranks whole it has the first
/// rank's names.
fn piece_of_weight(w: &Weight, placed: &Placement, ty: Type, axis: &Axis) -> Weight {
    let mut parts = w.parts.clone();
    if let Placement::Split(Cut { dim: 0, sections }) = placed
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
                parts
                    .into_iter()
                    .take_while({
                        let mut inside = inside;
                        move |p| inside(p)
                    })
                    .collect()
            }
        };
    }
    Weight { ty, parts, ..w.clone() }
}
