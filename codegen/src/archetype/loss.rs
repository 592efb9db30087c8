//! The archetype `loss`: cross-entropy of a linear layer, or its gradient, some tokens' logits at a time. In: a piece around one.
//! Out: hidden states, weight, targets, whole as they lie.

use super::{Archetype, Limits, results, whole};
use astrai_ir::backend::{Epilogue, Root, Takes};
use astrai_ir::ops::Op;
use astrai_ir::plan::bound;
use astrai_ir::region::{Form, LossForm, Piece};
use astrai_ir::strides::{AtCast, View};
use astrai_ir::{DType, Graph, Layout, NodeId};

pub(super) const ARCHETYPE: Archetype = Archetype {
    of: |op| matches!(op, Op::LinearCrossEntropy(_) | Op::LinearCrossEntropyGrad(_)),
    root: Some(root),
    layouts,
    form,
    ..Archetype::NONE
};

/// Arguments are read whole, below reshapes and widening of bf16.
fn root(g: &Graph, id: NodeId, _: &Limits) -> Root {
    let take = |&a: &NodeId| Takes::Memory(below(g, a).unwrap_or(a));
    Root { takes: g.node(id).args.iter().map(take).collect(), epilogue: Epilogue::None }
}

/// The weight is read row-major, whoever else reads it.
fn layouts(g: &Graph, id: NodeId, _: &Limits) -> Vec<(NodeId, Layout)> {
    below(g, g.node(id).args[1]).map(|weight| (weight, Layout::Rows)).into_iter().collect()
}

/// The value below reshapes, and below casts from bf16 to f32, whose memory holds the elements of `id` in order.
fn below(g: &Graph, id: NodeId) -> Option<NodeId> {
    let mut at = id;
    loop {
        let node = g.node(at);
        match &node.op {
            Op::Reshape(_) => {}
            Op::Cast(_) if node.ty().dtype == DType::F32 && g.ty(node.args[0]).dtype == DType::BF16 => {}
            _ if g.is_scalar(at) => return None,
            op if op.is_view() || matches!(op, Op::Iota(_)) => return None,
            _ => return Some(at),
        }
        at = node.args[0];
    }
}

/// The form of a piece around cross-entropy of types that its kernels multiply.
fn form(piece: &Piece, _: &Limits) -> Option<Form> {
    let g = &piece.graph;
    let found = g.nodes().iter().find_map(|node| match &node.op {
        Op::LinearCrossEntropy(forward) => Some((node, forward, false)),
        Op::LinearCrossEntropyGrad(gradient) => Some((node, &gradient.forward, true)),
        _ => None,
    });
    let (node, op, gradient) = found?;
    let dtype = g.ty(node.args[0]).dtype;
    if !matches!(dtype, DType::F32 | DType::BF16) {
        return None;
    }
    let read = |arg: usize| whole(piece, View::of(g, node.args[arg], &|_| AtCast::Through));
    let size = |axis: usize| g.ty(node.args[1]).shape[axis].size();
    let tokens = g.ty(node.args[0]).shape[0].clone();
    let most = bound(&g.symbols, &tokens).ok()? as usize;
    // Results of the forward operator are the gradient's from the third on.
    let mut results = results(g);
    if !gradient {
        results.iter_mut().for_each(|r| r.0 += 2);
    }
    Some(Form::Loss(LossForm {
        op: op.clone(),
        gradient,
        tokens: (tokens, most),
        size: [size(0)?, size(1)?],
        dtype,
        hidden: read(0)?,
        weight: read(1)?,
        targets: read(2)?.0,
        cotangents: (3..node.args.len()).map(|i| Some(read(i)?.0)).collect::<Option<_>>()?,
        results,
    }))
}
