//! The archetype `sample`: tokens drawn from rows of logits. In: a piece around a draw. Out: logits and how each row is drawn, whole
//! buffers.

use super::{Archetype, Limits};
use astrai_ir::DType;
use astrai_ir::ops::Op;
use astrai_ir::region::{Form, Piece, SampleForm};

pub(super) const ARCHETYPE: Archetype =
    Archetype { of: |op| matches!(op, Op::Sample(_)), form, ..Archetype::NONE };

/// The form of a piece that is a draw and nothing else, from f32.
fn form(piece: &Piece, _: &Limits) -> Option<Form> {
    let g = &piece.graph;
    let node = g.nodes().iter().find(|n| matches!(n.op, Op::Sample(_)))?;
    let &[logits, sampling, draws] = node.args.as_slice() else { return None };
    let types = [(logits, DType::F32), (sampling, DType::F32), (draws, DType::I32)];
    if types.iter().any(|(id, dtype)| g.ty(*id).dtype != *dtype) {
        return None;
    }
    let shape = &g.ty(logits).shape;
    Some(Form::Sample(SampleForm {
        rows: shape[0].clone(),
        vocabulary: shape[1].size()?,
        logits: piece.operand(logits)?,
        drawings: [piece.operand(sampling)?, piece.operand(draws)?],
    }))
}
