//! What goes to memory. In: a graph, the backend. Out: for each node whether its value is stored or computed where it is used, and
//! which pointwise nodes a kernel takes along. Greedy and deterministic; every choice is about cost, none about meaning. No region
//! crosses a block: a norm is the prologue of the dot that follows, a residual addition the epilogue of the dot before.

use super::alias_states::Versions;
use super::{BodyDraft, Draft, is_leaf};
use crate::uses::{DEEPEST, Uses};
use astrai_ir::backend::{Backend, Epilogue, Root, Takes};
use astrai_ir::ops::Op;
use astrai_ir::{Graph, IrError, NodeId};
use std::collections::{BTreeMap, BTreeSet};

/// The bodies of a graph with what each stores.
pub fn form_regions<'g>(graph: &'g Graph, backend: &dyn Backend) -> Result<Draft<'g>, IrError> {
    let mut bodies = Vec::with_capacity(graph.blocks().len() + 1);
    for block in graph.blocks() {
        if !block.graph.blocks().is_empty() {
            return Err(graph.error(format!("block `{}` calls blocks; flatten the graph first", block.name)));
        }
        bodies.push(body(&block.name, &block.graph, block.params.clone(), backend));
    }
    let named = graph.nodes().iter().filter(|n| matches!(n.op, Op::Input(_) | Op::State(_)));
    let params = named.filter_map(|n| n.op.leaf_name().map(str::to_string)).collect();
    bodies.push(body("", graph, params, backend));
    Ok(Draft { bodies })
}

fn body<'g>(name: &'g str, g: &'g Graph, params: Vec<String>, backend: &dyn Backend) -> BodyDraft<'g> {
    let roots = g.ids().map(|id| backend.root(g, id)).collect();
    let forming = Forming { g, backend, uses: Uses::of(g), roots };
    let stored = forming.stored();
    let Forming { uses, roots, .. } = forming;
    let (versions, layouts) = (Versions::default(), BTreeMap::new());
    BodyDraft { name, graph: g, params, uses, roots, stored, versions, layouts }
}

/// One body while its regions are formed.
struct Forming<'a> {
    g: &'a Graph,
    backend: &'a dyn Backend,
    uses: Uses,
    roots: Vec<Option<Root>>,
}

impl Forming<'_> {
    fn root(&self, id: NodeId) -> Option<&Root> {
        self.roots[id.index()].as_ref()
    }

    /// True for sums that go to memory through what follows them, element by element.
    fn is_product(&self, id: NodeId) -> bool {
        self.root(id).is_some_and(|r| r.epilogue == Epilogue::Pointwise)
    }

    /// True for a result that its kernel can round.
    fn is_rounded(&self, id: NodeId) -> bool {
        is_rounded(self.g, &self.roots, id)
    }

    /// For each node whether its value lies in memory.
    fn stored(&self) -> Vec<bool> {
        let g = self.g;
        let mut stored = vec![false; g.nodes().len()];
        let live = g.live();
        let mut in_tail = vec![false; g.nodes().len()];
        // What kernels write after their epilogues, or at the end of what they follow: it stays in memory.
        let mut ends = BTreeSet::new();
        for id in g.ids().filter(|id| live[id.index()]) {
            let rounded = self.is_rounded(id);
            if !self.is_product(id) && !rounded {
                continue;
            }
            let mut tail = self.uses.tail(g, id);
            if rounded {
                tail.retain(|t| matches!(g.node(*t).op, Op::Cast(_)) && self.is_rounded_once(id));
            }
            if let Some((end, inner)) = tail.split_last() {
                in_tail[id.index()] = true;
                inner.iter().for_each(|t| in_tail[t.index()] = true);
                stored[end.index()] = true;
                ends.insert(*end);
            }
        }
        for id in g.ids().filter(|id| live[id.index()]) {
            if !in_tail[id.index()] && self.needs_memory(id) {
                stored[id.index()] = true;
            }
            self.store_arguments(id, &mut stored);
        }
        self.cut_chains(&live, &in_tail, &mut stored, &mut ends);
        // Users first, for what they are computed in is then known.
        for id in g.ids().rev().filter(|id| live[id.index()]) {
            let sweeps = g.node(id).op.is_pointwise() && !ends.contains(&id);
            if stored[id.index()] && sweeps && self.in_one_sweep(&stored, &ends, id) {
                stored[id.index()] = false;
            }
        }
        stored
    }

    /// Stores a value wherever a kernel would follow more than [`DEEPEST`] nodes one after another.
    fn cut_chains(&self, live: &[bool], in_tail: &[bool], stored: &mut [bool], ends: &mut BTreeSet<NodeId>) {
        let g = self.g;
        let mut depth = vec![0; g.nodes().len()];
        for id in g.ids().filter(|id| live[id.index()]) {
            let node = g.node(id);
            if stored[id.index()] || is_leaf(g, id) {
                continue;
            }
            let below = node.args.iter().map(|a| depth[a.index()]).max().unwrap_or(0);
            let whole = node.types.len() == 1 && !in_tail[id.index()] && !g.is_free(id);
            if below >= DEEPEST && whole {
                stored[id.index()] = true;
                ends.insert(id);
            } else {
                depth[id.index()] = below + 1;
            }
        }
    }

    /// Marks what a node reads from memory.
    fn store_arguments(&self, id: NodeId, stored: &mut [bool]) {
        let g = self.g;
        let node = g.node(id);
        let mut below = |a: NodeId| g.below_free(a).into_iter().for_each(|b| stored[b.index()] = true);
        match (&node.op, node.args.as_slice(), self.root(id)) {
            (_, _, Some(root)) => {
                for take in &root.takes {
                    if let Takes::Memory(read) = take {
                        stored[read.index()] = true;
                    }
                }
            }
            (Op::Store(_), [state, rows, _], _) => {
                below(*rows);
                stored[state.index()] = true;
            }
            (Op::Store(_), args, _) => {
                args.iter().for_each(|&a| below(a));
                args.iter().for_each(|a| stored[a.index()] = true);
            }
            (Op::Call(_), args, _) => args.iter().for_each(|a| stored[a.index()] = true),
            (Op::Part(_), ..) => {}
            (op, args, _) if !self.backend.loops(op) => args.iter().for_each(|&a| below(a)),
            _ => {}
        }
    }

    /// True when all uses of a value end in one other, element by element: its kernel computes this on the way, once for each
    /// piece of the result, which takes less time than memory does.
    fn in_one_sweep(&self, stored: &[bool], ends: &BTreeSet<NodeId>, id: NodeId) -> bool {
        if self.uses.is_output(id) {
            return false;
        }
        let (mut root, mut seen) = (None, BTreeSet::new());
        let mut todo = self.uses.of_node(id).to_vec();
        while let Some(user) = todo.pop() {
            let op = &self.g.node(user).op;
            let sweeps = op.is_pointwise() || matches!(op, Op::Pad(_) | Op::Concat(_));
            if !sweeps || ends.contains(&user) {
                return false;
            }
            if !seen.insert(user) {
                continue;
            }
            match stored[user.index()] {
                true if *root.get_or_insert(user) != user => return false,
                true => {}
                false => todo.extend(self.uses.of_node(user)),
            }
        }
        root.is_some()
    }

    /// True when the only thing done with a result is its one rounding.
    fn is_rounded_once(&self, id: NodeId) -> bool {
        let g = self.g;
        let rounds = |u: NodeId| matches!(g.node(u).op, Op::Cast(_)) && g.ty(u).dtype.is_float();
        let once = g.ty(id).dtype == astrai_ir::DType::F32 && !self.uses.is_output(id);
        once && matches!(self.uses.of_node(id), [u] if rounds(*u))
    }

    fn needs_memory(&self, id: NodeId) -> bool {
        let (g, op) = (self.g, &self.g.node(id).op);
        if self.uses.is_output(id) {
            return true;
        }
        if g.is_free(id) {
            return false;
        }
        if is_leaf(g, id) || matches!(op, Op::Part(_)) {
            return true;
        }
        if self.is_read_below(id) {
            return false;
        }
        if self.root(id).is_some() || !self.backend.loops(op) {
            return g.node(id).types.len() == 1;
        }
        let mut users = Vec::new();
        self.uses.effective(g, id, &mut users);
        let [Some((user, through))] = users.as_slice() else { return true };
        !self.takes_inline(id, *user, *through)
    }

    /// True when every kernel that takes the value reads its arguments instead, as a dot does the codes of its weight, or rounds its
    /// rows to integers itself.
    fn is_read_below(&self, id: NodeId) -> bool {
        let args = &self.g.node(id).args;
        if let Op::FakeQuant(_) = self.g.node(id).op {
            let rounds = |user: &NodeId| {
                let first = self.root(*user).and_then(|r| r.takes.first());
                first == Some(&Takes::Prologue)
                    && matches!(self.g.node(*user).op, Op::Dot(_) | Op::GroupedDot(_))
            };
            return self.uses.of_node(id).iter().all(rounds);
        }
        let below = |user: &NodeId| {
            let reads = |take: &Takes| matches!(take, Takes::Memory(read) if args.contains(read));
            let takes = |take: &Takes| *take == Takes::Memory(id);
            self.root(*user).is_some_and(|r| r.takes.iter().any(reads) && !r.takes.iter().any(takes))
        };
        let code = matches!(self.g.node(id).op, Op::Dequant(_));
        code && !self.uses.of_node(id).is_empty() && self.uses.of_node(id).iter().all(below)
    }

    /// True when the kernel of `user` may compute `id`, which it takes as `through`, where it needs it.
    fn takes_inline(&self, id: NodeId, user: NodeId, through: NodeId) -> bool {
        let g = self.g;
        let node = g.node(user);
        let reduces = |id: NodeId| g.node(id).op.reduces();
        // No view between the two changes the shape.
        let same_rows = g.ty(id).shape == g.ty(through).shape;
        if let Some(root) = self.root(user) {
            let at = |(a, _): &(&NodeId, &Takes)| **a == through;
            let mut taken = node.args.iter().zip(&root.takes).filter(at);
            let prologue = matches!((taken.next(), taken.next()), (Some((_, Takes::Prologue)), None));
            return prologue && same_rows;
        }
        match &node.op {
            Op::Gather(_) => !reduces(id),
            Op::Store(_) => match node.args.as_slice() {
                [_, _, value] if *value == through => {
                    !reduces(id) || same_rows && g.ty(id).shape == g.ty(*value).shape
                }
                _ => false,
            },
            op if !self.backend.loops(op) && !matches!(op, Op::Call(_) | Op::Part(_)) => false,
            // Sums of sums: the inner ones are spread over threads.
            Op::Reduce(_) if matches!(g.node(id).op, Op::Reduce(_)) => false,
            // A row's statistics are computed once for the row only where the user walks the same rows.
            op if op.reduces() => !reduces(id) || same_rows && g.ty(id).shape == g.ty(node.args[0]).shape,
            _ => !reduces(id) || g.ty(id).shape == node.ty().shape && same_rows,
        }
    }
}

/// True for a result that the kernel around its operator can round.
pub(super) fn is_rounded(g: &Graph, roots: &[Option<Root>], id: NodeId) -> bool {
    let node = g.node(id);
    let Op::Part(p) = &node.op else { return false };
    let root = roots[node.args[0].index()].as_ref();
    matches!(root, Some(Root { epilogue: Epilogue::Rounded(below), .. }) if p.index < *below)
}
