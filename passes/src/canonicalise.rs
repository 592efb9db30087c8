//! Canonicalisation. In: any graph. Out: the same values, bit for bit, without redundant casts, without arithmetic on
//! neutral elements and without dead nodes. Views are canonical already: `Graph::push` simplifies them. The pass is idempotent.

use crate::{each_graph, eliminate_dead_nodes};
use astrai_ir::ops::{BinaryKind, Op};
use astrai_ir::{DType, Graph, IrError, NodeId};

/// The canonical form of a graph and of its blocks.
pub fn canonicalise(graph: &Graph) -> Result<Graph, IrError> {
    each_graph(graph, &|g| {
        if !g.ids().any(|id| may_change(g, id)) {
            return eliminate_dead_nodes(g);
        }
        let simple = g.rebuild(|out, id, args| {
            let found = match &g.node(id).op {
                Op::Cast(c) => cancel_casts(out, c.dtype, args[0])?,
                op => simplify(out, op, args),
            };
            found.map_or_else(|| out.push(g.node(id).op.clone(), args), Ok)
        })?;
        eliminate_dead_nodes(&simple)
    })
}

/// False for nodes that stay as they are where their arguments do.
fn may_change(g: &Graph, id: NodeId) -> bool {
    let node = g.node(id);
    match &node.op {
        Op::Cast(_) => {
            let inner = &g.node(node.args[0]).op;
            matches!(inner, Op::Cast(_)) || inner.is_view()
        }
        op => simplify(g, op, &node.args).is_some() || g.simpler(op, &node.args).is_some(),
    }
}

/// cast(cast(x: a -> b) -> a) is x when b represents every value of a; views between the casts are moved onto x.
fn cancel_casts(g: &mut Graph, dtype: DType, id: NodeId) -> Result<Option<NodeId>, IrError> {
    let node = g.node(id);
    match node.op.clone() {
        Op::Cast(inner) => {
            let x = node.args[0];
            Ok((g.ty(x).dtype == dtype && inner.dtype.represents(dtype)).then_some(x))
        }
        view if view.is_view() => {
            let x = cancel_casts(g, dtype, node.args[0])?;
            x.map(|x| g.push(view, &[x])).transpose()
        }
        _ => Ok(None),
    }
}

/// The argument that a node equals, if it is an identity.
fn simplify(g: &Graph, op: &Op, args: &[NodeId]) -> Option<NodeId> {
    match op {
        // Identities, whose only purpose is their gradient, which has been added by now.
        Op::Pvary(_) | Op::Detach(_) => Some(args[0]),
        Op::Binary(b) => match b.kind {
            BinaryKind::Mul if scalar(g, args[1]) == Some(1.0) => Some(args[0]),
            BinaryKind::Mul if scalar(g, args[0]) == Some(1.0) => Some(args[1]),
            BinaryKind::Div if scalar(g, args[1]) == Some(1.0) => Some(args[0]),
            // x - 0 is x for every x; x + 0 is not (-0 + 0 is 0).
            BinaryKind::Sub if scalar(g, args[1]).is_some_and(|c| c == 0.0 && c.is_sign_positive()) => {
                Some(args[0])
            }
            _ => None,
        },
        _ => None,
    }
}

/// The number that fills this node, if it is a splat constant under views.
pub(crate) fn scalar(g: &Graph, id: NodeId) -> Option<f64> {
    match &g.node(id).op {
        Op::Const(c) => c.as_scalar(),
        Op::Reshape(_) | Op::Expand(_) | Op::Permute(_) => scalar(g, g.node(id).args[0]),
        _ => None,
    }
}
