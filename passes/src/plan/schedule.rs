//! Regions in order. In: a draft, the backend. Out: a plan whose regions are matched and whose steps run every reader of a version
//! of a state before what writes the next; buffers have no offsets yet.

use super::alias_states::{Versions, is_version, stored_param, version_leaf};
use super::form_regions::is_rounded;
use super::{BodyDraft, Draft, cone, is_leaf};
use astrai_ir::backend::Backend;
use astrai_ir::ops::{Input, Op};
use astrai_ir::plan::{Body, BodyId, Buffer, BufferId, Place, PlannedWeight, RegionId, Step, WeightId};
use astrai_ir::region::{Form, Matched, Piece, Read};
use astrai_ir::{Graph, IrError, Layout, NodeId, Operand, Plan, Region};
use petgraph::Direction;
use petgraph::graph::{DiGraph, NodeIndex};
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap};
use std::sync::Arc;

/// The plan of a draft, buffers not yet placed.
pub fn schedule(draft: &Draft, backend: &dyn Backend) -> Result<Plan, IrError> {
    let Some((main, blocks)) = draft.bodies.split_last() else { return Ok(Plan::default()) };
    let mut plan = Plan { symbols: main.graph.symbols.clone(), ..Plan::default() };
    let mut known = HashMap::new();
    for body in blocks {
        let made = Scheduling::new(body, backend, &mut plan, &mut known, false).body()?;
        plan.bodies.push(made);
    }
    plan.main = Scheduling::new(main, backend, &mut plan, &mut known, true).body()?;
    Ok(plan)
}

/// One body in the making.
struct Scheduling<'a> {
    draft: &'a BodyDraft<'a>,
    g: &'a Graph,
    backend: &'a dyn Backend,
    plan: &'a mut Plan,
    known: &'a mut HashMap<String, RegionId>,
    main: bool,
    /// Positions of the body's parameters.
    params: HashMap<&'a str, usize>,
    body: Body,
    buffer_of: HashMap<(NodeId, Layout), BufferId>,
    /// The value that each buffer of a state holds now.
    holds: HashMap<BufferId, NodeId>,
}

/// What runs at once: the roots of one kernel, or a call.
struct Unit {
    roots: Vec<NodeId>,
    is_call: bool,
}

impl<'a> Scheduling<'a> {
    fn new(
        draft: &'a BodyDraft<'a>,
        backend: &'a dyn Backend,
        plan: &'a mut Plan,
        known: &'a mut HashMap<String, RegionId>,
        main: bool,
    ) -> Scheduling<'a> {
        let (body, buffer_of, holds, g) = (Body::default(), HashMap::new(), HashMap::new(), draft.graph);
        let params = draft.params.iter().enumerate().map(|(i, p)| (p.as_str(), i)).collect();
        Scheduling { draft, g, backend, plan, known, main, params, body, buffer_of, holds }
    }

    fn body(mut self) -> Result<Body, IrError> {
        let layout = |p: &String| {
            let named = |id: &&NodeId| self.g.node(**id).op.leaf_name() == Some(p);
            let packed = self.draft.layouts.keys().find(named);
            packed.map_or(Layout::Rows, |id| self.layout(*id))
        };
        let params = self.draft.params.iter().map(|p| (p.clone(), layout(p))).collect();
        self.body.name = self.draft.name.to_string();
        self.body.params = params;
        self.body.results = self.g.outputs().iter().map(|(n, _)| n.clone()).collect();
        self.place_results();
        for unit in self.in_order()? {
            match unit.is_call {
                true => self.call(unit.roots[0])?,
                false => self.region(&unit.roots)?,
            }
        }
        self.copy_results()?;
        Ok(self.body)
    }

    /// What runs at once, in the order of nodes as far as what each needs allows: the values it reads, and the readers of the
    /// version of a state that it overwrites.
    fn in_order(&self) -> Result<Vec<Unit>, IrError> {
        let (units, unit_of) = self.units();
        let mut edges = Vec::new();
        let writers = self.writers(&units);
        for (at, unit) in units.iter().enumerate() {
            for read in self.reads(unit) {
                let made = unit_of.get(&self.version(read)).copied();
                let overwritten = writers
                    .get(&self.place_of(read))
                    .and_then(|all| all.iter().copied().find(|w| made.is_none_or(|m| *w > m)));
                let before = made.map(|from| (from, at));
                let both = before.into_iter().chain(overwritten.map(|w| (at, w)));
                edges.extend(both.filter(|(a, b)| a != b).map(|(a, b)| (a as u32, b as u32)));
            }
        }
        edges.sort_unstable();
        edges.dedup();
        let mut needs: DiGraph<(), ()> = DiGraph::with_capacity(units.len(), edges.len());
        units.iter().for_each(|_| _ = needs.add_node(()));
        needs.extend_with_edges(edges);
        // Units are numbered in the order of nodes: the lowest that is ready is next, before all others one that takes no memory: so
        // gradients of all layers need not wait to be sent or added up.
        let turn = |n: usize| Reverse((!self.takes_no_memory(&units[n]), n));
        let wanting = |n: NodeIndex| needs.neighbors_directed(n, Direction::Incoming).count();
        let mut waits: Vec<usize> = needs.node_indices().map(wanting).collect();
        let mut ready: BinaryHeap<_> = (0..units.len()).filter(|&n| waits[n] == 0).map(turn).collect();
        let mut order = Vec::with_capacity(units.len());
        while let Some(Reverse((_, at))) = ready.pop() {
            order.push(at);
            for next in needs.neighbors(NodeIndex::new(at)) {
                waits[next.index()] -= 1;
                if waits[next.index()] == 0 {
                    ready.push(turn(next.index()));
                }
            }
        }
        if order.len() < units.len() {
            let body = &self.draft.name;
            let message =
                format!("no order of the kernels of `{body}` reads each version of a state before the next");
            return Err(self.g.error(message));
        }
        let mut units: Vec<Option<Unit>> = units.into_iter().map(Some).collect();
        Ok(order.into_iter().filter_map(|at| units[at].take()).collect())
    }

    /// True for what writes only results, states, single numbers, or exchanges with other ranks.
    fn takes_no_memory(&self, unit: &Unit) -> bool {
        let none = |&id: &NodeId| {
            // Only results have buffers yet.
            let written = self.is_leaf(self.place_of(id)) || self.buffer_of.contains_key(&(id, Layout::Rows));
            written || self.g.node(id).op.collective_axes().is_some() || self.g.ty(id).elements().is_one()
        };
        self.main && unit.roots.iter().all(none)
    }

    /// Kernels and calls, in the order of the last node that each computes, and which of them makes each value.
    fn units(&self) -> (Vec<Unit>, HashMap<NodeId, usize>) {
        let live = self.g.live();
        let (mut units, mut unit_of) = (Vec::new(), HashMap::new());
        for id in self.g.ids().filter(|id| live[id.index()]) {
            let is_call = matches!(self.g.node(id).op, Op::Call(_));
            let computed = self.is_stored(id) && !self.is_leaf(id) && self.alias(id).is_none();
            if !is_call && (!computed || unit_of.contains_key(&id)) {
                continue;
            }
            let roots = if is_call { vec![id] } else { self.roots(id) };
            // Together at the last, when everything they need is there.
            if self.versions().together(id).is_some_and(|all| all.iter().any(|r| *r > id)) {
                continue;
            }
            let unit = Unit { roots, is_call };
            self.made_by(&unit).for_each(|value| _ = unit_of.insert(value, units.len()));
            units.push(unit);
        }
        (units, unit_of)
    }

    /// Values that a unit makes: those of its roots, and the parts of a call.
    fn made_by<'u>(&'u self, unit: &'u Unit) -> impl Iterator<Item = NodeId> + 'u {
        let users = self.draft.uses.of_node(unit.roots[0]).iter();
        let parts = users.filter(|u| unit.is_call && matches!(self.g.node(**u).op, Op::Part(_)));
        unit.roots.iter().chain(parts).copied()
    }

    /// For the memory of each state the units that write its versions, one after another.
    fn writers(&self, units: &[Unit]) -> HashMap<NodeId, Vec<usize>> {
        let mut writers: HashMap<NodeId, Vec<usize>> = HashMap::new();
        for (at, unit) in units.iter().enumerate() {
            for value in self.made_by(unit) {
                let place = self.place_of(value);
                let all = writers.entry(place).or_default();
                if place != value && self.is_leaf(place) && all.last() != Some(&at) {
                    all.push(at);
                }
            }
        }
        writers
    }

    /// Values that a unit reads from memory.
    fn reads(&self, unit: &Unit) -> Vec<NodeId> {
        if unit.is_call {
            return self.g.node(unit.roots[0]).args.clone();
        }
        let inside = cone(self.g, &self.draft.stored, &unit.roots);
        let read = |id: &NodeId| !unit.roots.contains(id) && (self.is_stored(*id) || self.is_leaf(*id));
        inside.into_iter().filter(read).collect()
    }

    fn is_stored(&self, id: NodeId) -> bool {
        self.draft.stored[id.index()]
    }

    fn versions(&self) -> &'a Versions {
        &self.draft.versions
    }

    fn layout(&self, id: NodeId) -> Layout {
        self.draft.layouts.get(&id).copied().unwrap_or(Layout::Rows)
    }

    fn is_leaf(&self, id: NodeId) -> bool {
        is_leaf(self.g, id)
    }

    /// The stored value whose memory is also this reshaped, or just stored, value's.
    fn alias(&self, id: NodeId) -> Option<NodeId> {
        let mut at = id;
        if let (Op::Store(_), &[_, value]) = (&self.g.node(id).op, self.g.node(id).args.as_slice()) {
            let there = self.versions().home(value) != value;
            return there.then(|| self.alias(value).unwrap_or(value));
        }
        while let Op::Reshape(_) = self.g.node(at).op {
            at = self.g.node(at).args[0];
            if self.is_stored(at) || self.is_leaf(at) || matches!(self.g.node(at).op, Op::Call(_)) {
                let computed = !matches!(self.g.node(at).op, Op::Const(_));
                return (computed && !self.draft.layouts.contains_key(&at))
                    .then(|| self.alias(at).unwrap_or(at));
            }
        }
        None
    }

    /// Outputs computed here are written straight to the caller's memory.
    fn place_results(&mut self) {
        for (i, (_, id)) in self.g.outputs().iter().enumerate() {
            let is_call = matches!(self.g.node(*id).op, Op::Call(_));
            let key = (*id, Layout::Rows);
            let own = !self.is_leaf(*id) && self.alias(*id).is_none() || is_call || self.is_call_part(*id);
            if own && !is_version(self.g, *id) && !self.buffer_of.contains_key(&key) {
                let b = self.new_buffer(*id, Place::Result(i));
                self.buffer_of.insert(key, b);
            }
        }
    }

    fn is_call_part(&self, id: NodeId) -> bool {
        let node = self.g.node(id);
        matches!(node.op, Op::Part(_)) && matches!(self.g.node(node.args[0]).op, Op::Call(_))
    }

    /// Outputs that are leaves, aliases or declared twice are copied.
    fn copy_results(&mut self) -> Result<(), IrError> {
        for (i, (_, id)) in self.g.outputs().iter().enumerate() {
            if is_version(self.g, *id) {
                continue;
            }
            // A block's weight comes in one layout, in which the copy reads it.
            let layout = if self.main { Layout::Rows } else { self.layout(*id) };
            let at = self.buffer(*id, layout)?;
            if self.body.buffers[at].place != Place::Result(i) {
                let mut graph = Graph::new(self.plan.symbols.clone());
                let x = graph.push(Input { name: "r0".into(), ty: self.g.ty(*id).clone() }, &[])?;
                graph.set_output("w0", x)?;
                let reads = vec![Read { leaf: x, layout }];
                let region =
                    self.intern(Piece { graph, reads, in_place: vec![] }, false, &self.g.node(*id).origin)?;
                let to = self.new_buffer(*id, Place::Result(i));
                let origin = self.g.node(*id).origin.clone();
                let (reads, writes, nodes) = (vec![at], vec![to], vec![]);
                self.body.steps.push(Step::Run { region, reads, writes, nodes, origin });
            }
        }
        Ok(())
    }

    fn new_buffer(&mut self, id: NodeId, place: Place) -> BufferId {
        let node = self.g.node(id);
        self.add(Buffer { ty: node.ty().clone(), place, origin: node.origin.clone() })
    }

    fn add(&mut self, buffer: Buffer) -> BufferId {
        self.body.buffers.push(buffer);
        BufferId(self.body.buffers.len() - 1)
    }

    /// The buffer of a stored value; made when first asked for.
    fn buffer(&mut self, id: NodeId, layout: Layout) -> Result<BufferId, IrError> {
        let id = self.place_of(id);
        if let Some(b) = self.buffer_of.get(&(id, layout)) {
            return Ok(*b);
        }
        let place = match &self.g.node(id).op {
            Op::Const(c) => Place::Const(c.bits.clone()),
            Op::Weight(w) if self.main => {
                self.plan.weights.push(PlannedWeight { weight: w.clone(), layout });
                Place::Weight(WeightId(self.plan.weights.len() - 1))
            }
            Op::Input(_) | Op::Weight(_) | Op::State(_) => {
                let name = self.g.node(id).op.leaf_name().unwrap_or_default();
                let at = self.params.get(name).copied();
                Place::Param(at.ok_or_else(|| self.g.error(format!("leaf `{name}` is no parameter")))?)
            }
            _ => Place::Arena(0),
        };
        let b = self.new_buffer(id, place);
        self.buffer_of.insert((id, layout), b);
        Ok(b)
    }

    /// The value under which the memory of this one is known.
    fn place_of(&self, id: NodeId) -> NodeId {
        let mut at = id;
        loop {
            let next = self.versions().home(self.alias(at).unwrap_or(at));
            let next = match version_leaf(self.g, next) {
                Some(leaf) if self.g.node(next).op.leaf_name().is_none() => leaf,
                _ => next,
            };
            if next == at {
                return at;
            }
            at = next;
        }
    }

    /// The version that a reader of this value wants in its buffer.
    fn version(&self, id: NodeId) -> NodeId {
        self.alias(id).map_or(id, |a| self.version(a))
    }

    /// Refuses to read a version of a state that was overwritten.
    fn check_version(&mut self, id: NodeId, buffer: BufferId) -> Result<(), IrError> {
        let wanted = self.version(id);
        let held = *self.holds.entry(buffer).or_insert(wanted);
        if held == wanted {
            return Ok(());
        }
        let origin = self.g.node(id).origin.to_string();
        Err(IrError { origin, message: format!("{id} is read after {held} has taken its place") })
    }

    fn call(&mut self, id: NodeId) -> Result<(), IrError> {
        let node = self.g.node(id);
        let Op::Call(c) = &node.op else { return Ok(()) };
        let body = BodyId(c.block.0 as usize);
        let layouts: Vec<Layout> = self.plan.bodies[body].params.iter().map(|p| p.1).collect();
        let mut args = Vec::with_capacity(node.args.len());
        for (&a, layout) in node.args.iter().zip(layouts) {
            let b = self.buffer(a, layout)?;
            self.check_version(a, b)?;
            args.push(b);
        }
        let parts = self.draft.uses.of_node(id).iter().copied();
        let mut results = Vec::new();
        for i in 0..node.types.len() {
            let here = |u: &NodeId| matches!(&self.g.node(*u).op, Op::Part(p) if p.index as usize == i);
            let value = if node.types.len() == 1 { Some(id) } else { parts.clone().find(here) };
            results.push(match (value, stored_param(self.g, id, i)) {
                (v, Some(param)) => {
                    self.holds.insert(args[param], v.unwrap_or(id));
                    args[param]
                }
                (Some(v), None) => {
                    let b = self.buffer(v, Layout::Rows)?;
                    self.holds.insert(b, v);
                    b
                }
                (None, None) => {
                    let (ty, place) = (node.types[i].clone(), Place::Arena(0));
                    self.add(Buffer { ty, place, origin: node.origin.clone() })
                }
            });
        }
        self.body.steps.push(Step::Call { body, args, results, origin: node.origin.clone() });
        Ok(())
    }

    /// Values written by the kernel that writes `id`: all stored outputs of a node that has several.
    fn roots(&self, id: NodeId) -> Vec<NodeId> {
        if let Some(all) = self.versions().together(id) {
            return all.to_vec();
        }
        let mut source = id;
        if let Op::Cast(_) = self.g.node(id).op
            && is_rounded(self.g, &self.draft.roots, self.g.node(id).args[0])
            && !self.is_stored(self.g.node(id).args[0])
        {
            source = self.g.node(id).args[0];
        }
        let Op::Part(_) = self.g.node(source).op else { return vec![id] };
        let many = self.g.node(source).args[0];
        let mut roots = Vec::new();
        for &part in self.draft.uses.of_node(many) {
            if self.is_stored(part) {
                roots.push(part);
            } else if let [cast] = self.draft.uses.of_node(part) {
                roots.push(*cast);
            }
        }
        roots
    }

    /// Adds the step of the kernel that writes `roots`.
    fn region(&mut self, roots: &[NodeId]) -> Result<(), IrError> {
        let inside = cone(self.g, &self.draft.stored, roots);
        let mut graph = Graph::new(self.plan.symbols.clone());
        let (mut buffers, mut reads, mut map) = (Vec::new(), Vec::new(), HashMap::new());
        let mut origins: Vec<Arc<str>> = Vec::new();
        let mut nodes = Vec::new();
        for id in self.by_need(&inside, roots) {
            let node = self.g.node(id);
            let read =
                !roots.contains(&id) && (self.is_stored(id) || self.is_leaf(id)) && !self.g.is_scalar(id);
            let made = if read {
                let layout = self.layout(id);
                let b = self.buffer(id, layout)?;
                self.check_version(id, b)?;
                let name = format!("r{}", buffers.len());
                buffers.push(b);
                let leaf = graph.push_exact(Input { name, ty: node.ty().clone() }.into(), &[])?;
                reads.push(Read { leaf, layout });
                leaf
            } else {
                nodes.push(id);
                if !node.origin.is_empty() && !self.g.is_free(id) && !origins.contains(&node.origin) {
                    origins.push(node.origin.clone());
                }
                match (&node.op, node.args.as_slice()) {
                    (Op::Store(_), [_, value]) => map[value],
                    (_, args) => {
                        let args: Vec<NodeId> = args.iter().map(|a| map[a]).collect();
                        graph.with_origin(&node.origin, |g| g.push_exact(node.op.clone(), &args))?
                    }
                }
            };
            map.insert(id, made);
        }
        for (i, r) in roots.iter().enumerate() {
            graph.set_output(&format!("w{i}"), map[r])?;
        }
        let mut writes = Vec::new();
        for &r in roots {
            let b = self.buffer(r, Layout::Rows)?;
            self.holds.insert(b, r);
            writes.push(b);
        }
        let pair = |(w, b): (usize, &BufferId)| Some((w, Operand(buffers.iter().position(|r| r == b)?)));
        let in_place = writes.iter().enumerate().filter_map(pair).collect();
        let (origin, reads_own) = (origins.join(" "), self.reads_what_it_stores(&inside, roots));
        let region = self.intern(Piece { graph, reads, in_place }, reads_own, &origin)?;
        self.body.steps.push(Step::Run { region, reads: buffers, writes, nodes, origin: origin.into() });
        Ok(())
    }

    /// The nodes of a region as its results ask for them: equal computations get equal regions, wherever their nodes were
    /// made.
    fn by_need(&self, inside: &BTreeSet<NodeId>, roots: &[NodeId]) -> Vec<NodeId> {
        let (mut order, mut done) = (Vec::with_capacity(inside.len()), BTreeSet::new());
        let mut todo: Vec<(NodeId, bool)> = roots.iter().rev().map(|r| (*r, false)).collect();
        while let Some((id, ready)) = todo.pop() {
            if ready {
                order.push(id);
            } else if done.insert(id) {
                todo.push((id, true));
                let reads = !roots.contains(&id) && (self.is_stored(id) || self.is_leaf(id));
                let args = if reads { &[][..] } else { &self.g.node(id).args };
                todo.extend(args.iter().rev().filter(|a| inside.contains(a)).map(|a| (*a, false)));
            }
        }
        order
    }

    /// True when rows of a state are stored that are computed from others of its rows.
    fn reads_what_it_stores(&self, inside: &BTreeSet<NodeId>, roots: &[NodeId]) -> bool {
        let &[root] = roots else { return false };
        let home = self.place_of(root);
        let reads = |id: &NodeId| {
            let args = self.g.node(*id).args.as_slice();
            let args = if *id == root { &args[1..] } else { args };
            (*id == root || !self.is_stored(*id)) && args.iter().any(|a| self.place_of(*a) == home)
        };
        self.g.stores_rows(root) && inside.iter().any(reads)
    }

    /// The region of a piece, matched when it is met first. One that reads what it stores would have to see all of it first, which
    /// no kernel does.
    fn intern(&mut self, piece: Piece, reads_own: bool, origin: &str) -> Result<RegionId, IrError> {
        let key = format!("{reads_own} {}", piece.key());
        if let Some(at) = self.known.get(&key) {
            return Ok(*at);
        }
        let matched = self.backend.matched(&piece)?;
        let form = if reads_own { Form::Interpreted } else { matched.form };
        let matched = Matched { form, ..matched };
        let at = RegionId(self.plan.regions.len());
        self.plan.regions.push(Arc::new(Region { piece, matched, origin: origin.to_string() }));
        self.known.insert(key, at);
        Ok(at)
    }
}
