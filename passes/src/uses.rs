//! Who uses what in a graph, of what some result needs.

use astrai_ir::ops::Op;
use astrai_ir::{Graph, NodeId};
use std::collections::BTreeSet;

/// Nodes of a kernel that follow one another at most: what writes a kernel walks along them.
pub(crate) const DEEPEST: usize = 256;

/// Who uses what.
#[derive(Clone)]
pub(crate) struct Uses {
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
    pub fn effective(&self, g: &Graph, id: NodeId, out: &mut Vec<Option<(NodeId, NodeId)>>) {
        let mut todo = vec![id];
        while let Some(id) = todo.pop() {
            if self.is_output(id) {
                out.push(None);
            }
            for &u in self.of_node(id) {
                if g.is_free(u) { todo.push(u) } else { out.push(Some((u, id))) }
            }
        }
    }

    /// The pointwise nodes that follow a kernel's value one by one, each the only user of the one before, over the same elements: its
    /// epilogue. Ends at the first that narrows; nodes that need what a later kernel computes stop it.
    pub fn tail(&self, g: &Graph, root: NodeId) -> Vec<NodeId> {
        let mut tail = Vec::new();
        let mut at = root;
        while !self.is_output(at) && tail.len() < DEEPEST {
            let [next] = self.of_node(at) else { break };
            let node = g.node(*next);
            let joins = matches!(node.op, Op::Unary(_) | Op::Binary(_) | Op::Select(_))
                || matches!(node.op, Op::Cast(_)) && !g.widens(*next);
            let others = || node.args.iter().filter(|a| **a != at);
            if !joins || node.ty().shape != g.ty(at).shape || others().any(|o| !before(g, *o, root)) {
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

/// True when nothing that sums or calls and comes later than `root` is needed for `id`.
fn before(g: &Graph, id: NodeId, root: NodeId) -> bool {
    let computes = |id: &NodeId| {
        let op = &g.node(*id).op;
        let core = matches!(
            op,
            Op::Dot(_)
                | Op::GroupedDot(_)
                | Op::GroupedOuter(_)
                | Op::LowRank(_)
                | Op::Route(_)
                | Op::Attention(_)
                | Op::AttentionGrad(_)
                | Op::Call(_)
        );
        core || op.reduces()
    };
    let later = if id < root { BTreeSet::new() } else { g.ancestors([id], |_, a| a >= root) };
    !later.iter().any(computes)
}
