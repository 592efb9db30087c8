//! Values that need no memory: what is computed wherever it is used, because it only renames elements, widens them, or is known
//! from its index. In: a node. Out: whether it is one, and the value below such nodes that has memory.

use crate::ops::Op;
use crate::{Graph, NodeId};

impl Graph {
    /// True for a constant that is one number everywhere.
    pub fn is_scalar(&self, id: NodeId) -> bool {
        matches!(&self.node(id).op, Op::Const(c) if c.as_scalar().is_some())
    }

    /// True for a cast to a type of at least as many bytes.
    pub fn widens(&self, id: NodeId) -> bool {
        let node = self.node(id);
        matches!(node.op, Op::Cast(_)) && node.ty().dtype.bytes() >= self.ty(node.args[0]).dtype.bytes()
    }

    /// True for a cast that changes the type and no value.
    pub fn keeps_values(&self, id: NodeId) -> bool {
        let node = self.node(id);
        matches!(node.op, Op::Cast(_)) && node.ty().dtype.represents(self.ty(node.args[0]).dtype)
    }

    /// True for nodes that are computed wherever they are used: views, widening casts, indices, single numbers.
    pub fn is_free(&self, id: NodeId) -> bool {
        let op = &self.node(id).op;
        op.is_view() || matches!(op, Op::Iota(_)) || self.widens(id) || self.is_scalar(id)
    }

    /// The value that views look at.
    pub fn below_views(&self, mut id: NodeId) -> NodeId {
        while self.node(id).op.is_view() {
            id = self.node(id).args[0];
        }
        id
    }

    /// True for a store of rows of a state, which reads nothing of the others.
    pub fn stores_rows(&self, id: NodeId) -> bool {
        matches!((&self.node(id).op, self.node(id).args.as_slice()), (Op::Store(_), [_, _, _]))
    }

    /// The first value under views and widening casts; `None` where that is an index or a single number.
    pub fn below_free(&self, mut id: NodeId) -> Option<NodeId> {
        while self.is_free(id) && !self.node(id).args.is_empty() {
            id = self.node(id).args[0];
        }
        (!matches!(self.node(id).op, Op::Iota(_)) && !self.is_scalar(id)).then_some(id)
    }
}
