//! Brings a graph into one normal form. In: any graph. Out: the same values, bit for bit, without casts that change
//! nothing, without arithmetic on neutral elements and without dead nodes. Views are normalised by the constructor.
//! Running it twice changes nothing.

use crate::{each_graph, live_only};
use astrai_ir::ops::{BinaryKind, Op};
use astrai_ir::{DType, Graph, IrError, NodeId};

/// The normal form.
pub fn canonicalise(graph: &Graph) -> Result<Graph, IrError> {
    each_graph(graph, &|g| {
        let simple = g.rebuild(
            |b| Ok(b.clone()),
            |out, id, args| {
                let found = match &g.node(id).op {
                    Op::Cast(c) => stored(out, c.dtype, args[0])?,
                    op => simpler(out, op, args),
                };
                found.map_or_else(|| out.push(g.node(id).op.clone(), args), Ok)
            },
        )?;
        live_only(&simple)
    })
}

/// cast(cast(x: a -> b) -> a) is x when b holds every value of a, and views may stand between.
fn stored(g: &mut Graph, dtype: DType, id: NodeId) -> Result<Option<NodeId>, IrError> {
    let node = g.node(id);
    match node.op.clone() {
        Op::Cast(inner) => {
            let x = node.args[0];
            Ok((g.ty(x).dtype == dtype && holds(inner.dtype, dtype)).then_some(x))
        }
        view if view.is_view() => {
            let x = stored(g, dtype, node.args[0])?;
            x.map(|x| g.push(view, &[x])).transpose()
        }
        _ => Ok(None),
    }
}

fn simpler(g: &Graph, op: &Op, args: &[NodeId]) -> Option<NodeId> {
    match op {
        // It was there for its gradient, which exists by now.
        Op::Pvary(_) => Some(args[0]),
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

/// True when every value of `narrow` is a value of `wide`.
pub(crate) fn holds(wide: DType, narrow: DType) -> bool {
    use DType::*;
    match wide {
        F32 => matches!(narrow, F16 | BF16 | F8E4M3 | F8E5M2 | I8 | U8 | Bool),
        F16 => matches!(narrow, F8E4M3 | F8E5M2 | I8 | U8 | Bool),
        BF16 => matches!(narrow, F8E5M2 | F8E4M3 | I8 | U8 | Bool),
        I64 => matches!(narrow, I32 | I8 | U8 | Bool),
        I32 => matches!(narrow, I8 | U8 | Bool),
        _ => false,
    }
}

/// The number that fills this node, looked at through views.
pub(crate) fn scalar(g: &Graph, id: NodeId) -> Option<f64> {
    match &g.node(id).op {
        Op::Const(c) => c.as_scalar(),
        Op::Reshape(_) | Op::Expand(_) | Op::Permute(_) => scalar(g, g.node(id).args[0]),
        _ => None,
    }
}
