//! Where versions of states live. In: a draft, which says what is stored. Out: values that are computed straight into the memory of
//! another (the next version of a state into the state's, a sum of rows into what it is added to), and values that one kernel
//! writes together, so that an optimiser's step reads everything once.

use super::{Draft, cone, is_leaf};
use crate::uses::Uses;
use astrai_ir::backend::Backend;
use astrai_ir::ops::Op;
use astrai_ir::{Graph, NodeId};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// The draft with the memory of states' versions. What only kernels of several results use is computed in them and has none.
pub fn alias_states<'g>(mut draft: Draft<'g>, backend: &dyn Backend) -> Draft<'g> {
    for body in &mut draft.bodies {
        body.versions = Versions::of(body.graph, backend, &body.uses, &mut body.stored);
    }
    draft
}

/// Values that share memory, values that are written together.
#[derive(Clone, Default)]
pub(super) struct Versions {
    lives_in: HashMap<NodeId, NodeId>,
    together: HashMap<NodeId, Arc<[NodeId]>>,
}

/// The leaf of which this node is a version: through stores, and through calls whose bodies store.
pub fn version_leaf(g: &Graph, id: NodeId) -> Option<NodeId> {
    let node = g.node(id);
    match &node.op {
        Op::State(_) => Some(id),
        Op::Store(_) => version_leaf(g, node.args[0]).or(Some(node.args[0])),
        Op::Part(p) => called_version(g, node.args[0], p.index as usize),
        Op::Call(_) => called_version(g, id, 0),
        _ => None,
    }
}

/// True for what a state holds after a store, here or in a body that is called: it stays where it is.
pub fn is_version(g: &Graph, id: NodeId) -> bool {
    g.node(id).op.leaf_name().is_none() && version_leaf(g, id).is_some()
}

/// The leaf of which result `i` of a call is a version.
pub fn called_version(g: &Graph, call: NodeId, i: usize) -> Option<NodeId> {
    let arg = g.node(call).args[stored_param(g, call, i)?];
    version_leaf(g, arg).or(Some(arg))
}

/// The parameter of the called body that result `i` is a version of.
pub fn stored_param(g: &Graph, call: NodeId, i: usize) -> Option<usize> {
    let Op::Call(c) = &g.node(call).op else { return None };
    let block = g.block(c.block);
    let (_, out) = block.graph.outputs().get(i)?;
    if block.graph.node(*out).op.leaf_name().is_some() {
        return None;
    }
    let leaf = version_leaf(&block.graph, *out)?;
    let name = block.graph.node(leaf).op.leaf_name()?;
    block.params.iter().position(|p| p == name)
}

impl Versions {
    /// What shares memory in a graph. What only kernels of several results use is computed in them: it is `stored` no more.
    fn of(g: &Graph, backend: &dyn Backend, uses: &Uses, stored: &mut [bool]) -> Versions {
        let mut v = Versions::default();
        let live = g.live();
        for id in g.ids().filter(|id| live[id.index()]) {
            let node = g.node(id);
            match (&node.op, node.args.as_slice()) {
                (Op::Store(_), [state, value]) => {
                    let sole = !uses.is_output(*value) && !v.lives_in.contains_key(value);
                    let safe = v.living_in(g, *value).all(|x| may_overwrite(g, stored, x, *state));
                    if sole && safe && stored[value.index()] {
                        v.lives_in.insert(*value, *state);
                    }
                }
                (Op::Store(_), [state, ..]) => _ = v.lives_in.insert(id, *state),
                (Op::Scatter(_), [x, ..]) if backend.accumulates(g, id) && stored[id.index()] => {
                    let sole = uses.of_node(*x) == [id] && !uses.is_output(*x);
                    let computed =
                        stored[x.index()] && !is_leaf(g, *x) && !matches!(g.node(*x).op, Op::Reshape(_));
                    if sole && computed {
                        v.lives_in.insert(*x, id);
                    }
                }
                _ => {}
            }
        }
        v.group(g, uses, stored);
        v
    }

    /// The value in whose memory this one is computed; itself when it has its own.
    pub fn home(&self, mut id: NodeId) -> NodeId {
        while let Some(&next) = self.lives_in.get(&id) {
            id = next;
        }
        id
    }

    /// `Err` names a value whose home is itself by a detour.
    pub fn verify(&self) -> Result<(), NodeId> {
        let within = |id: &NodeId| {
            let steps = std::iter::successors(Some(*id), |at| self.lives_in.get(at).copied());
            steps.take(self.lives_in.len() + 2).count() <= self.lives_in.len() + 1
        };
        self.lives_in.keys().find(|id| !within(id)).map_or(Ok(()), |id| Err(*id))
    }

    /// The value, and what is computed in its memory before it: what rows are added to.
    fn living_in<'a>(&'a self, g: &'a Graph, value: NodeId) -> impl Iterator<Item = NodeId> + 'a {
        let before = |id: &NodeId| {
            let x = *g.node(*id).args.first()?;
            (self.lives_in.get(&x) == Some(id)).then_some(x)
        };
        std::iter::successors(Some(value), before)
    }

    /// All values that the kernel of this one writes.
    pub fn together(&self, id: NodeId) -> Option<&[NodeId]> {
        self.together.get(&id).map(|g| &**g)
    }

    /// Finds next versions of one shape, pointwise in what they share, that one kernel can write.
    fn group(&mut self, g: &Graph, uses: &Uses, stored: &mut [bool]) {
        let mut groups: Vec<Vec<NodeId>> = Vec::new();
        // The groups that read each value.
        let mut reading: HashMap<NodeId, Vec<usize>> = HashMap::new();
        let mut ids: Vec<NodeId> = self.lives_in.keys().copied().collect();
        ids.sort_unstable();
        for id in ids {
            let inside = cone(g, stored, &[id]);
            if !inside.iter().all(|&x| pointwise(g, stored, id, x)) {
                continue;
            }
            let read = |x: &NodeId| {
                let memory = stored[x.index()] || is_leaf(g, *x) && !matches!(g.node(*x).op, Op::Const(_));
                memory && g.ty(*x).shape == g.ty(id).shape
            };
            let shared: BTreeSet<NodeId> = inside.iter().copied().filter(read).collect();
            let sharing = shared.iter().filter_map(|x| reading.get(x)).flatten().copied();
            let fits = |at: &usize| g.ty(groups[*at][0]).shape == g.ty(id).shape;
            let at = sharing.filter(fits).min().unwrap_or(groups.len());
            if at == groups.len() {
                groups.push(vec![]);
            }
            groups[at].push(id);
            for x in shared {
                let all: &mut Vec<usize> = reading.entry(x).or_default();
                if !all.contains(&at) {
                    all.push(at);
                }
            }
        }
        for roots in groups.into_iter().filter(|roots| roots.len() > 1) {
            let kept = absorb(g, uses, stored, &roots);
            let inside = cone(g, stored, &roots);
            let last = roots.iter().max().copied().unwrap_or(NodeId(0));
            let waits = |u: &NodeId| *u > last || inside.contains(u) || matches!(g.node(*u).op, Op::Store(_));
            let alone = roots.iter().all(|r| uses.of_node(*r).iter().all(waits));
            let safe = roots.iter().all(|r| same_elements(g, &inside, &roots, self.home(*r)));
            if alone && safe {
                let roots: Arc<[NodeId]> = roots.into();
                roots.iter().for_each(|r| _ = self.together.insert(*r, roots.clone()));
            } else {
                kept.into_iter().for_each(|id| stored[id.index()] = true);
            }
        }
    }
}

/// True when what computes `value` may write over the version of a state that it may read.
fn may_overwrite(g: &Graph, stored: &[bool], value: NodeId, state: NodeId) -> bool {
    let node = g.node(value);
    if let Op::Part(_) = node.op
        && let Op::Call(_) = g.node(node.args[0]).op
    {
        // A body may read its arguments after it has written a result.
        return g.node(node.args[0]).args.iter().all(|a| g.below_views(*a) != state);
    }
    let reshaped = matches!(node.op, Op::Reshape(_));
    if is_leaf(g, value) || reshaped || matches!(node.op, Op::Store(_) | Op::Call(_) | Op::Const(_)) {
        return false;
    }
    let inside = cone(g, stored, &[value]);
    !inside.contains(&state) || same_elements(g, &inside, &[value], state)
}

/// Takes pointwise values that nothing but the kernel of these roots uses out of memory; answers which.
fn absorb(g: &Graph, uses: &Uses, stored: &mut [bool], roots: &[NodeId]) -> Vec<NodeId> {
    let mut taken = Vec::new();
    loop {
        let inside = cone(g, stored, roots);
        let computed = |id: &NodeId| {
            inside.contains(id) && (roots.contains(id) || !stored[id.index()] && !is_leaf(g, *id))
        };
        let only_here = |id: &NodeId| {
            let pointwise = g.node(*id).op.is_pointwise() && g.ty(*id).shape == g.ty(roots[0]).shape;
            let read = stored[id.index()] && !roots.contains(id);
            read && pointwise && !uses.is_output(*id) && uses.of_node(*id).iter().all(computed)
        };
        let Some(id) = inside.iter().copied().rev().find(only_here) else { return taken };
        stored[id.index()] = false;
        taken.push(id);
    }
}

/// True for what a pointwise kernel of `root` computes or reads.
fn pointwise(g: &Graph, stored: &[bool], root: NodeId, id: NodeId) -> bool {
    let node = g.node(id);
    let read = id != root && (stored[id.index()] || is_leaf(g, id));
    let scalar = || node.args.iter().all(|a| g.ty(*a).shape.iter().all(|d| d.is_one()));
    read || node.op.is_pointwise() || matches!(node.op, Op::Cast(_)) || node.op.is_view() && scalar()
}

/// True when `leaf` is read only at the very element that is written: on every way to it shapes stay what they are.
fn same_elements(g: &Graph, inside: &BTreeSet<NodeId>, roots: &[NodeId], leaf: NodeId) -> bool {
    let mut reads = BTreeSet::from([leaf]);
    for &id in inside {
        let node = g.node(id);
        if id == leaf || !node.args.iter().any(|a| reads.contains(a) && inside.contains(a)) {
            continue;
        }
        let keeps = node.op.is_pointwise() || matches!(node.op, Op::Cast(_) | Op::AllReduce(_));
        if !keeps || g.ty(id).shape != g.ty(leaf).shape {
            return false;
        }
        reads.insert(id);
    }
    roots.iter().all(|r| !reads.contains(r) || g.ty(*r).shape == g.ty(leaf).shape)
}
