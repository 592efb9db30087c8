//! Groups nodes into regions, one kernel each, and orders them. In: a graph of native operators. Out: a plan whose buffers
//! have no offsets yet. No region crosses a block: a norm is the prologue of the dot that follows, a residual addition the
//! epilogue of the dot before.

use crate::regions::{
    Uses, adds_rows, attends, cone, has_cross_entropy_kernel, has_group_kernel, inlines_arguments,
    is_attention_result, is_cross_entropy, is_free, is_leaf, stored, stores_rows,
};
use crate::strides::read_whole;
use crate::versions::{Versions, is_version, stored_param, version_leaf};
use astrai_ir::ops::{Input, Op};
use astrai_ir::plan::{Body, Buffer, BufferId, Place, PlannedWeight, Step};
use astrai_ir::{Anchor, DotForm, Graph, GroupedForm, IrError, Layout, NodeId, Plan, Region};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// The plan of a graph, buffers not yet placed. Weights that are `trained` change at every step and stay row-major; others
/// are packed ahead for the dots that read them.
pub fn fuse(graph: &Graph, trained: bool) -> Result<Plan, IrError> {
    let mut plan = Plan { symbols: graph.symbols.clone(), ..Plan::default() };
    let mut known = HashMap::new();
    for block in graph.blocks() {
        if !block.graph.blocks().is_empty() {
            return Err(graph.error(format!("block `{}` calls blocks; flatten the graph first", block.name)));
        }
        let mut f = Fuse::new(&block.graph, trained, &mut plan, &mut known);
        f.params = block.params.clone();
        let mut body = f.body()?;
        body.name = block.name.clone();
        plan.bodies.push(body);
    }
    let mut f = Fuse::new(graph, trained, &mut plan, &mut known);
    f.params = inputs(graph);
    f.main = true;
    plan.main = f.body()?;
    Ok(plan)
}

/// Names of the inputs and states of a graph, in order.
fn inputs(g: &Graph) -> Vec<String> {
    let named = g.nodes().iter().filter(|n| matches!(n.op, Op::Input(_) | Op::State(_)));
    named.filter_map(|n| n.op.leaf_name().map(str::to_string)).collect()
}

/// Weights that are packed ahead: every dot on the core reads them as `[n, k]`, or as such matrices one after another, and no
/// cross-entropy reads them.
fn packed(g: &Graph) -> BTreeSet<NodeId> {
    let ahead = |id| DotForm::packed_weight(g, id).or_else(|| GroupedForm::packed_weight(g, id));
    let mut packed: BTreeSet<NodeId> = g.ids().filter_map(ahead).collect();
    for id in g.ids() {
        if let Some(form) = GroupedForm::of(g, id)
            && ahead(id).is_none()
        {
            packed.remove(&form.right.base);
        }
        if is_cross_entropy(&g.node(id).op)
            && let Some(weight) = read_whole(g, g.node(id).args[1])
        {
            packed.remove(&weight);
        }
        let Some(form) = DotForm::of(g, id) else { continue };
        let sides = [Some(form.right.base), form.left.map(|l| l.base)];
        for base in sides.into_iter().flatten() {
            if DotForm::packed_weight(g, id) != Some(base) {
                packed.remove(&base);
            }
        }
    }
    packed
}

/// One body in the making.
struct Fuse<'a> {
    g: &'a Graph,
    plan: &'a mut Plan,
    known: &'a mut HashMap<String, usize>,
    uses: Uses,
    stored: Vec<bool>,
    versions: Versions,
    packed: BTreeSet<NodeId>,
    params: Vec<String>,
    main: bool,
    body: Body,
    buffer_of: HashMap<(NodeId, Layout), BufferId>,
    /// The value that each buffer of a state holds now.
    holds: HashMap<BufferId, NodeId>,
}

impl<'a> Fuse<'a> {
    fn new(
        g: &'a Graph,
        trained: bool,
        plan: &'a mut Plan,
        known: &'a mut HashMap<String, usize>,
    ) -> Fuse<'a> {
        let uses = Uses::of(g);
        let mut stored = stored(g, &uses);
        let versions = Versions::of(g, &uses, &mut stored);
        let packed = if trained { BTreeSet::new() } else { packed(g) };
        let body = Body::default();
        Fuse {
            g,
            plan,
            known,
            uses,
            stored,
            versions,
            packed,
            params: vec![],
            main: false,
            body,
            buffer_of: HashMap::new(),
            holds: HashMap::new(),
        }
    }

    fn body(mut self) -> Result<Body, IrError> {
        let layout = |f: &Fuse, p: &String| {
            let leaf = f.packed.iter().any(|id| f.g.node(*id).op.leaf_name() == Some(p));
            if leaf { Layout::Panels } else { Layout::Rows }
        };
        self.body.params = self.params.iter().map(|p| (p.clone(), layout(&self, p))).collect();
        self.body.results = self.g.outputs().iter().map(|(n, _)| n.clone()).collect();
        self.place_results();
        let live = self.g.live();
        let mut done = BTreeSet::new();
        for id in self.g.ids().filter(|id| live[id.index()]) {
            if let Op::Call(_) = self.g.node(id).op {
                self.call(id)?;
            } else if self.stored[id.index()]
                && !self.is_leaf(id)
                && self.alias(id).is_none()
                && !done.contains(&id)
            {
                let roots = self.roots(id);
                // Together at the last, when everything they need is there.
                if self.versions.together(id).is_some_and(|all| all.iter().any(|r| *r > id)) {
                    continue;
                }
                done.extend(roots.iter().copied());
                self.region(&roots)?;
            }
        }
        self.copy_results()?;
        Ok(self.body)
    }

    fn is_leaf(&self, id: NodeId) -> bool {
        is_leaf(self.g, id)
    }

    /// The stored value whose memory is also this reshaped, or just stored, value's.
    fn alias(&self, id: NodeId) -> Option<NodeId> {
        let mut at = id;
        if let (Op::Store(_), &[_, value]) = (&self.g.node(id).op, self.g.node(id).args.as_slice()) {
            let there = self.versions.home(value) != value;
            return there.then(|| self.alias(value).unwrap_or(value));
        }
        while let Op::Reshape(_) = self.g.node(at).op {
            at = self.g.node(at).args[0];
            if self.stored[at.index()] || self.is_leaf(at) || matches!(self.g.node(at).op, Op::Call(_)) {
                let computed = !matches!(self.g.node(at).op, Op::Const(_));
                return (computed && !self.packed.contains(&at)).then(|| self.alias(at).unwrap_or(at));
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
            let layout = match self.packed.contains(id) && !self.main {
                true => Layout::Panels,
                false => Layout::Rows,
            };
            let at = self.buffer(*id, layout)?;
            if self.body.buffers[at].place != Place::Result(i) {
                let mut graph = Graph::new(self.plan.symbols.clone());
                let x = graph.push(Input { name: "r0".into(), ty: self.g.ty(*id).clone() }, &[])?;
                graph.set_output("w0", x)?;
                let layouts = vec![layout];
                let origin = self.g.node(*id).origin.to_string();
                let region =
                    self.intern(Region { anchor: Anchor::Loops, graph, layouts, in_place: vec![], origin });
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
        self.body.buffers.push(Buffer { ty: node.ty().clone(), place, origin: node.origin.clone() });
        self.body.buffers.len() - 1
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
                Place::Weight(self.weight(PlannedWeight { weight: w.clone(), layout }))
            }
            Op::Input(_) | Op::Weight(_) | Op::State(_) => {
                let name = self.g.node(id).op.leaf_name().unwrap_or_default();
                let at = self.params.iter().position(|p| p == name);
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
            let next = self.versions.home(self.alias(at).unwrap_or(at));
            let next = match version_leaf(self.g, next) {
                Some(leaf) if is_version(self.g, next) => leaf,
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

    fn weight(&mut self, w: PlannedWeight) -> usize {
        let at = self.plan.weights.iter().position(|x| *x == w);
        at.unwrap_or_else(|| {
            self.plan.weights.push(w);
            self.plan.weights.len() - 1
        })
    }

    fn call(&mut self, id: NodeId) -> Result<(), IrError> {
        let node = self.g.node(id);
        let Op::Call(c) = &node.op else { return Ok(()) };
        let body = c.block.0 as usize;
        let layouts: Vec<Layout> = self.plan.bodies[body].params.iter().map(|p| p.1).collect();
        let mut args = Vec::with_capacity(node.args.len());
        for (&a, layout) in node.args.iter().zip(layouts) {
            let b = self.buffer(a, layout)?;
            self.check_version(a, b)?;
            args.push(b);
        }
        let mut results = Vec::new();
        for i in 0..node.types.len() {
            let value = match node.types.len() {
                1 => Some(id),
                _ => self
                    .uses
                    .of_node(id)
                    .iter()
                    .copied()
                    .find(|u| matches!(&self.g.node(*u).op, Op::Part(p) if p.index as usize == i)),
            };
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
                    self.body.buffers.push(Buffer {
                        ty: node.types[i].clone(),
                        place: Place::Arena(0),
                        origin: node.origin.clone(),
                    });
                    self.body.buffers.len() - 1
                }
            });
        }
        self.body.steps.push(Step::Call { body, args, results, origin: node.origin.clone() });
        Ok(())
    }

    /// Values written by the kernel that writes `id`: all stored outputs of a node that has several.
    fn roots(&self, id: NodeId) -> Vec<NodeId> {
        if let Some(all) = self.versions.together(id) {
            return all.to_vec();
        }
        let mut source = id;
        if let Op::Cast(_) = self.g.node(id).op
            && is_attention_result(self.g, self.g.node(id).args[0])
            && !self.stored[self.g.node(id).args[0].index()]
        {
            source = self.g.node(id).args[0];
        }
        let Op::Part(_) = self.g.node(source).op else { return vec![id] };
        let many = self.g.node(source).args[0];
        let mut roots = Vec::new();
        for &part in self.uses.of_node(many) {
            if self.stored[part.index()] {
                roots.push(part);
            } else if let [cast] = self.uses.of_node(part) {
                roots.push(*cast);
            }
        }
        roots
    }

    /// Emits the kernel that writes `roots`.
    fn region(&mut self, roots: &[NodeId]) -> Result<(), IrError> {
        let inside = cone(self.g, &self.stored, roots);
        let mut graph = Graph::new(self.plan.symbols.clone());
        let (mut reads, mut layouts, mut map) = (Vec::new(), Vec::new(), HashMap::new());
        let mut origins: Vec<Arc<str>> = Vec::new();
        let mut nodes = Vec::new();
        for id in self.by_need(&inside, roots) {
            let node = self.g.node(id);
            let is_root = roots.contains(&id);
            let made = if !is_root && (self.stored[id.index()] || self.is_leaf(id)) && !self.is_scalar(id) {
                let layout = if self.packed.contains(&id) { Layout::Panels } else { Layout::Rows };
                let name = format!("r{}", reads.len());
                let b = self.buffer(id, layout)?;
                self.check_version(id, b)?;
                reads.push(b);
                layouts.push(layout);
                graph.push_exact(Input { name, ty: node.ty().clone() }.into(), &[])?
            } else {
                nodes.push(id);
                if !node.origin.is_empty() && !is_free(self.g, id) && !origins.contains(&node.origin) {
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
        let anchor = self.anchor(&inside, roots);
        let origin = origins.join(" ");
        let mut writes = Vec::new();
        for &r in roots {
            let b = self.buffer(r, Layout::Rows)?;
            self.holds.insert(b, r);
            writes.push(b);
        }
        let pair = |(w, b): (usize, &BufferId)| Some((w, reads.iter().position(|r| r == b)?));
        let in_place = writes.iter().enumerate().filter_map(pair).collect();
        let region = self.intern(Region { anchor, graph, layouts, in_place, origin: origin.clone() });
        self.body.steps.push(Step::Run { region, reads, writes, nodes, origin: origin.into() });
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
                let reads = !roots.contains(&id) && (self.stored[id.index()] || self.is_leaf(id));
                let args = if reads { &[][..] } else { &self.g.node(id).args };
                todo.extend(args.iter().rev().filter(|a| inside.contains(a)).map(|a| (*a, false)));
            }
        }
        order
    }

    fn is_scalar(&self, id: NodeId) -> bool {
        matches!(&self.g.node(id).op, Op::Const(c) if c.as_scalar().is_some())
    }

    fn anchor(&self, inside: &BTreeSet<NodeId>, roots: &[NodeId]) -> Anchor {
        let computed = || {
            inside.iter().filter(|id| roots.contains(id) || !self.stored[id.index()] && !self.is_leaf(**id))
        };
        if computed().any(|id| DotForm::of(self.g, *id).is_some()) {
            return Anchor::Dot;
        }
        if let Some(id) = computed().find(|id| has_group_kernel(self.g, **id)) {
            return match self.g.node(*id).op {
                Op::Route(_) => Anchor::Route,
                Op::GroupedOuter(_) => Anchor::GroupedOuter,
                _ => Anchor::Grouped,
            };
        }
        if let Some(id) = computed().find(|id| attends(self.g, **id)) {
            match self.g.node(*id).op {
                Op::AttentionGrad(_) => return Anchor::AttentionGrad,
                _ if inside.iter().any(|id| is_attention_result(self.g, *id)) => return Anchor::Attention,
                _ => {}
            }
        }
        if computed().any(|id| has_cross_entropy_kernel(self.g, *id)) {
            return Anchor::CrossEntropy;
        }
        if computed().any(|id| self.g.node(*id).op.collective_axes().is_some()) {
            return Anchor::Collective;
        }
        let known = |id: &NodeId| {
            let op = &self.g.node(*id).op;
            inlines_arguments(op) && !matches!(op, Op::Part(_) | Op::GroupedDot(_))
                || matches!(op, Op::Store(_)) && self.g.node(*id).args.len() == 2
                || matches!(op, Op::Const(_) | Op::Iota(_))
                || adds_rows(self.g, *id)
                || stores_rows(self.g, *id)
        };
        if self.reads_what_it_stores(inside, roots) {
            return Anchor::Eval;
        }
        if computed().all(known) { Anchor::Loops } else { Anchor::Eval }
    }

    /// True when rows of a state are stored that are computed from others of its rows.
    fn reads_what_it_stores(&self, inside: &BTreeSet<NodeId>, roots: &[NodeId]) -> bool {
        let &[root] = roots else { return false };
        let home = self.place_of(root);
        let reads = |id: &NodeId| {
            let args = self.g.node(*id).args.as_slice();
            let args = if *id == root { &args[1..] } else { args };
            (*id == root || !self.stored[id.index()]) && args.iter().any(|a| self.place_of(*a) == home)
        };
        stores_rows(self.g, root) && inside.iter().any(reads)
    }

    fn intern(&mut self, region: Region) -> usize {
        let key = region.key();
        let next = self.plan.regions.len();
        let at = *self.known.entry(key).or_insert(next);
        if at == next {
            self.plan.regions.push(Arc::new(region));
        }
        at
    }
}
