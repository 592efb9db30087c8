//! What goes to memory. In: a graph. Out: for each node whether its value is stored or computed where it is used, and
//! which pointwise nodes an anchor takes along. Greedy and deterministic; every choice is about cost, none about meaning.

use crate::canonicalise::represents;
use crate::strides::{read_in_place, read_whole};
use astrai_ir::ops::{Op, ScatterKind};
use astrai_ir::{DType, DotForm, Graph, GroupedForm, NodeId};
use std::collections::BTreeSet;

/// Who uses what.
pub struct Uses {
    users: Vec<Vec<NodeId>>,
    output: Vec<bool>,
}

impl Uses {
    /// Users of every node of a graph.
    pub fn of(g: &Graph) -> Uses {
        let mut output = vec![false; g.nodes().len()];
        g.outputs().iter().for_each(|(_, id)| output[id.index()] = true);
        let live = g.live();
        let mut users = g.users();
        users.iter_mut().for_each(|u| u.retain(|id| live[id.index()]));
        Uses { users, output }
    }

    /// Nodes that take this one as an argument.
    pub fn of_node(&self, id: NodeId) -> &[NodeId] {
        &self.users[id.index()]
    }

    /// True when a result of the graph is this node.
    pub fn is_output(&self, id: NodeId) -> bool {
        self.output[id.index()]
    }

    /// Users behind views and widening casts, which cost nothing: (user, the node it takes). Outputs of the graph behind
    /// such nodes are counted as `None`.
    fn effective(&self, g: &Graph, id: NodeId, out: &mut Vec<Option<(NodeId, NodeId)>>) {
        if self.is_output(id) {
            out.push(None);
        }
        for &u in self.of_node(id) {
            if is_free(g, u) { self.effective(g, u, out) } else { out.push(Some((u, id))) }
        }
    }

    /// The pointwise nodes that follow an anchor's value one by one, each the only user of the one before, over the same
    /// elements; ends at the first that narrows. Nodes that need a later anchor's value stop the tail.
    pub fn tail(&self, g: &Graph, anchor: NodeId) -> Vec<NodeId> {
        let mut tail = Vec::new();
        let mut at = anchor;
        while !self.is_output(at) {
            let [next] = self.of_node(at) else { break };
            let node = g.node(*next);
            let joins = matches!(node.op, Op::Unary(_) | Op::Binary(_) | Op::Select(_))
                || matches!(node.op, Op::Cast(_)) && !widens(g, *next);
            let others = || node.args.iter().filter(|a| **a != at);
            if !joins || node.ty().shape != g.ty(at).shape || others().any(|o| !before(g, *o, anchor)) {
                break;
            }
            tail.push(*next);
            at = *next;
            if matches!(node.op, Op::Cast(_)) {
                break;
            }
        }
        tail
    }
}

/// True when no anchor later than `anchor` is needed for `id`.
fn before(g: &Graph, id: NodeId, anchor: NodeId) -> bool {
    if id < anchor {
        return true;
    }
    let node = g.node(id);
    let computes = matches!(
        node.op,
        Op::Dot(_)
            | Op::GroupedDot(_)
            | Op::GroupedOuter(_)
            | Op::Route(_)
            | Op::Attention(_)
            | Op::AttentionGrad(_)
            | Op::Call(_)
            | Op::Reduce(_)
            | Op::RmsNorm(_)
            | Op::Softmax(_)
    );
    !computes && node.args.iter().all(|&a| before(g, a, anchor))
}

/// Values that have memory without a kernel of their graph.
pub fn is_leaf(g: &Graph, id: NodeId) -> bool {
    let node = g.node(id);
    match &node.op {
        Op::Input(_) | Op::Weight(_) | Op::State(_) | Op::Const(_) => true,
        Op::Part(_) => matches!(g.node(node.args[0]).op, Op::Call(_)),
        _ => false,
    }
}

/// The node that views look at.
pub fn base(g: &Graph, mut id: NodeId) -> NodeId {
    while g.node(id).op.is_view() {
        id = g.node(id).args[0];
    }
    id
}

/// Nodes of the region that computes `roots`, with the stored values it reads, ascending. Of a `store` of a whole state only
/// the value counts.
pub fn cone(g: &Graph, stored: &[bool], roots: &[NodeId]) -> BTreeSet<NodeId> {
    let mut inside = BTreeSet::new();
    let mut todo = roots.to_vec();
    while let Some(id) = todo.pop() {
        if !inside.insert(id) {
            continue;
        }
        let stop = (stored[id.index()] || is_leaf(g, id)) && !roots.contains(&id);
        let node = g.node(id);
        match (&node.op, node.args.as_slice()) {
            _ if stop => {}
            (Op::Call(_), _) => {}
            (Op::Store(_), [_, value]) => todo.push(*value),
            (_, args) => todo.extend(args),
        }
    }
    inside
}

/// True for a cast to a type of at least as many bytes.
pub fn widens(g: &Graph, id: NodeId) -> bool {
    let node = g.node(id);
    matches!(node.op, Op::Cast(_)) && node.ty().dtype.bytes() >= g.ty(node.args[0]).dtype.bytes()
}

/// True for a cast that changes the type and no value.
pub fn keeps(g: &Graph, id: NodeId) -> bool {
    let node = g.node(id);
    matches!(node.op, Op::Cast(_)) && represents(node.ty().dtype, g.ty(node.args[0]).dtype)
}

/// True for nodes that are computed wherever they are used: they only rename elements or are known without memory.
pub fn is_free(g: &Graph, id: NodeId) -> bool {
    let op = &g.node(id).op;
    op.is_view() || matches!(op, Op::Iota(_)) || widens(g, id) || is_scalar(g, id)
}

fn is_scalar(g: &Graph, id: NodeId) -> bool {
    matches!(&g.node(id).op, Op::Const(c) if c.as_scalar().is_some())
}

/// For each node whether its value lies in memory.
pub fn stored(g: &Graph, uses: &Uses) -> Vec<bool> {
    let mut stored = vec![false; g.nodes().len()];
    let live = g.live();
    let mut in_tail = vec![false; g.nodes().len()];
    // What the kernels of products and of attention write.
    let mut ends = BTreeSet::new();
    for id in g.ids().filter(|id| live[id.index()]) {
        if is_product(&g.node(id).op) || is_attention_result(g, id) {
            let mut tail = uses.tail(g, id);
            if is_attention_result(g, id) {
                tail.retain(|t| matches!(g.node(*t).op, Op::Cast(_)) && tail_is_cast(g, uses, id));
            }
            if let Some((end, inner)) = tail.split_last() {
                in_tail[id.index()] = true;
                inner.iter().for_each(|t| in_tail[t.index()] = true);
                stored[end.index()] = true;
                ends.insert(*end);
            }
        }
    }
    for id in g.ids().filter(|id| live[id.index()]) {
        if !in_tail[id.index()] && needs_memory(g, uses, id) {
            stored[id.index()] = true;
        }
        match (&g.node(id).op, g.node(id).args.as_slice()) {
            (Op::Call(_), args) => args.iter().for_each(|a| stored[a.index()] = true),
            (Op::Store(_), [state, rows, _]) => {
                stored[state.index()] = true;
                store_below_free(g, *rows, &mut stored);
            }
            (Op::Store(_), args) => args.iter().for_each(|a| stored[a.index()] = true),
            _ => {}
        }
    }
    for id in g.ids().filter(|id| live[id.index()]) {
        let node = g.node(id);
        if let Op::Attention(_) | Op::AttentionGrad(_) = node.op {
            node.args.iter().for_each(|&a| stored[read_in_place(g, a).unwrap_or(a).index()] = true);
        } else if is_cross_entropy(&node.op) {
            node.args.iter().for_each(|&a| stored[read_whole(g, a).unwrap_or(a).index()] = true);
        } else if !inlines_arguments(&node.op) && !stores_rows(g, id) {
            for &a in &node.args {
                store_below_free(g, a, &mut stored);
            }
        }
        if let Op::GroupedDot(_) = node.op {
            let inlined = usize::from(GroupedForm::of(g, id).is_some());
            node.args[inlined..].iter().for_each(|&a| store_below_free(g, a, &mut stored));
        }
        if let Op::Dot(_) = node.op {
            store_below_free(g, node.args[1], &mut stored);
            if !DotForm::of(g, id).is_some_and(|f| f.rows) {
                store_below_free(g, node.args[0], &mut stored);
            }
        }
    }
    // Users first, for what they are computed in is then known.
    for id in g.ids().rev().filter(|id| live[id.index()]) {
        let sweeps = g.node(id).op.is_pointwise() && !ends.contains(&id);
        if stored[id.index()] && sweeps && in_one_sweep(g, uses, &stored, &ends, id) {
            stored[id.index()] = false;
        }
    }
    stored
}

/// True when all uses of a value end in one other, element by element: its kernel computes this on the way, once for each piece
/// of the result, which takes less time than memory does.
fn in_one_sweep(g: &Graph, uses: &Uses, stored: &[bool], ends: &BTreeSet<NodeId>, id: NodeId) -> bool {
    if uses.is_output(id) {
        return false;
    }
    let (mut root, mut seen) = (None, BTreeSet::new());
    let mut todo = uses.of_node(id).to_vec();
    while let Some(user) = todo.pop() {
        let op = &g.node(user).op;
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
            false => todo.extend(uses.of_node(user)),
        }
    }
    root.is_some()
}

/// True for the first output of attention and for the cotangents of its arguments: their kernels can round them.
pub fn is_attention_result(g: &Graph, id: NodeId) -> bool {
    let node = g.node(id);
    let Op::Part(p) = &node.op else { return false };
    match g.node(node.args[0]).op {
        Op::Attention(_) => p.index == 0,
        Op::AttentionGrad(_) => true,
        _ => false,
    }
}

/// Widest head that the attention core keeps on its stack.
const MAX_HEAD: usize = 1024;

/// True for attention, or its gradient, that a core computes: a positive scale, heads that fit its stack.
pub fn attends(g: &Graph, id: NodeId) -> bool {
    let node = g.node(id);
    let a = match &node.op {
        Op::Attention(a) => a,
        Op::AttentionGrad(g) => &g.forward,
        _ => return false,
    };
    let narrow = |i: usize| g.ty(node.args[i]).shape[2].size().is_some_and(|d| d <= MAX_HEAD);
    a.scale.0 > 0.0 && narrow(0) && narrow(2)
}

/// True for cross-entropy of a linear layer and for its gradient.
pub fn is_cross_entropy(op: &Op) -> bool {
    matches!(op, Op::LinearCrossEntropy(_) | Op::LinearCrossEntropyGrad(_))
}

/// True for cross-entropy, or its gradient, of types that its kernel multiplies.
pub fn has_cross_entropy_kernel(g: &Graph, id: NodeId) -> bool {
    let node = g.node(id);
    is_cross_entropy(&node.op) && matches!(g.ty(node.args[0]).dtype, DType::F32 | DType::BF16)
}

/// True for dots, of whatever kind: their sums go to memory, or through what follows them one by one.
fn is_product(op: &Op) -> bool {
    matches!(op, Op::Dot(_) | Op::GroupedDot(_) | Op::GroupedOuter(_))
}

/// Most experts that the kernel of a route holds on its stack.
const MAX_EXPERTS: usize = 8192;

/// True for a choice of experts, or a product by groups, that has a kernel.
pub fn has_group_kernel(g: &Graph, id: NodeId) -> bool {
    let node = g.node(id);
    match &node.op {
        Op::Route(_) => {
            let few = g.ty(node.args[0]).shape[1].size().is_some_and(|n| n <= MAX_EXPERTS);
            few && !node.args.iter().any(|a| is_free(g, *a))
        }
        Op::GroupedDot(_) => GroupedForm::of(g, id).is_some(),
        Op::GroupedOuter(_) => GroupedForm::outer(g, id).is_some(),
        _ => false,
    }
}

/// True for a scatter that adds rows to an f32 matrix, which has a kernel.
pub fn adds_rows(g: &Graph, id: NodeId) -> bool {
    let node = g.node(id);
    let Op::Scatter(s) = &node.op else { return false };
    let plain = s.axis == 0 && s.batch == 0 && s.kind == ScatterKind::Add;
    plain && node.ty().rank() == 2 && node.ty().dtype == DType::F32 && g.ty(node.args[1]).rank() == 1
}

/// True for a store of rows of a state, which has a kernel.
pub fn stores_rows(g: &Graph, id: NodeId) -> bool {
    matches!((&g.node(id).op, g.node(id).args.as_slice()), (Op::Store(_), [_, _, _]))
}

/// True when the only thing done with attention's result is its one rounding.
fn tail_is_cast(g: &Graph, uses: &Uses, id: NodeId) -> bool {
    let rounds = |u: NodeId| matches!(g.node(u).op, Op::Cast(_)) && g.ty(u).dtype.is_float();
    let once = g.ty(id).dtype == DType::F32 && !uses.is_output(id);
    once && matches!(uses.of_node(id), [u] if rounds(*u))
}

/// Operators whose kernels compute their arguments element by element.
pub fn inlines_arguments(op: &Op) -> bool {
    op.is_pointwise()
        || op.is_view()
        || matches!(
            op,
            Op::Rope(_)
                | Op::Concat(_)
                | Op::Pad(_)
                | Op::Gather(_)
                | Op::Reduce(_)
                | Op::RmsNorm(_)
                | Op::Softmax(_)
                | Op::Dot(_)
                | Op::GroupedDot(_)
                | Op::Call(_)
        )
        || matches!(op, Op::Part(_))
}

/// Marks the first node under views and widening casts.
fn store_below_free(g: &Graph, mut id: NodeId, stored: &mut [bool]) {
    while is_free(g, id) && !g.node(id).args.is_empty() {
        id = g.node(id).args[0];
    }
    if !matches!(g.node(id).op, Op::Iota(_)) && !is_scalar(g, id) {
        stored[id.index()] = true;
    }
}

fn needs_memory(g: &Graph, uses: &Uses, id: NodeId) -> bool {
    let op = &g.node(id).op;
    if uses.is_output(id) {
        return true;
    }
    if is_free(g, id) {
        return false;
    }
    match op {
        Op::Input(_) | Op::Weight(_) | Op::State(_) | Op::Const(_) | Op::Part(_) => true,
        Op::Attention(_) | Op::AttentionGrad(_) | Op::Call(_) => g.node(id).types.len() == 1,
        _ if !inlines_arguments(op) => g.node(id).types.len() == 1,
        op if is_product(op) => true,
        _ => {
            let mut users = Vec::new();
            uses.effective(g, id, &mut users);
            let [Some((user, through))] = users.as_slice() else { return true };
            !takes_inline(g, id, *user, *through)
        }
    }
}

/// True when `user` may compute `id`, which it takes as `through`, element by element where it needs it.
fn takes_inline(g: &Graph, id: NodeId, user: NodeId, through: NodeId) -> bool {
    let node = g.node(user);
    let reduces = |id: NodeId| matches!(g.node(id).op, Op::Reduce(_) | Op::RmsNorm(_) | Op::Softmax(_));
    match &node.op {
        Op::Dot(_) => {
            let left = node.args[0] == through && node.args[1] != through;
            left && DotForm::of(g, user).is_some_and(|f| f.rows) && same_rows(g, id, through)
        }
        Op::GroupedDot(_) => {
            let left = node.args[0] == through && !node.args[1..].contains(&through);
            left && has_group_kernel(g, user) && same_rows(g, id, through)
        }
        Op::Gather(_) => !reduces(id),
        Op::Store(_) => match node.args.as_slice() {
            [_, _, value] if *value == through => {
                !reduces(id) || same_rows(g, id, through) && g.ty(id).shape == g.ty(*value).shape
            }
            _ => false,
        },
        _ if !inlines_arguments(&node.op) => false,
        // Sums of sums: the inner ones are spread over threads.
        Op::Reduce(_) if matches!(g.node(id).op, Op::Reduce(_)) => false,
        // A row's statistics are computed once for the row only where the user walks the same rows.
        Op::Reduce(_) | Op::RmsNorm(_) | Op::Softmax(_) => {
            !reduces(id) || same_rows(g, id, through) && g.ty(id).shape == g.ty(node.args[0]).shape
        }
        _ => !reduces(id) || g.ty(id).shape == node.ty().shape && same_rows(g, id, through),
    }
}

/// True when no view between the two changes the shape.
fn same_rows(g: &Graph, id: NodeId, through: NodeId) -> bool {
    g.ty(id).shape == g.ty(through).shape
}
