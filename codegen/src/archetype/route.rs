//! The archetype `route`: the choice of experts. In: a piece around a route. Out: its logits and results, whole buffers.

use super::{Archetype, Limits, results};
use astrai_ir::ops::Op;
use astrai_ir::region::{Form, Piece, RouteForm};

pub(super) const ARCHETYPE: Archetype =
    Archetype { of: |op| matches!(op, Op::Route(_)), form, ..Archetype::NONE };

/// The form of a piece around a route of so many experts as its kernel holds.
fn form(piece: &Piece, limits: &Limits) -> Option<Form> {
    let g = &piece.graph;
    let node = g.nodes().iter().find(|n| matches!(n.op, Op::Route(_)))?;
    let Op::Route(op) = &node.op else { return None };
    let ty = g.ty(node.args[0]);
    let experts = ty.shape[1].size().filter(|n| *n <= limits.experts)?;
    let buffers: Option<Vec<_>> = node.args.iter().map(|a| piece.operand(*a)).collect();
    let (logits, correction) = match buffers?.as_slice() {
        [logits] => (*logits, None),
        [logits, correction, ..] => (*logits, Some(*correction)),
        [] => return None,
    };
    let (tokens, results) = (ty.shape[0].clone(), results(g));
    Some(Form::Route(RouteForm { op: op.clone(), tokens, experts, logits, correction, results }))
}
