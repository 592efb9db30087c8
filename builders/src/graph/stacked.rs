//! Experts in gpt-oss's form as part of a layer's body. In: the normed stream of every token. Out: what the chosen experts
//! make of it. The checkpoint has the matrices of all experts as one tensor `[experts, in, out]`; the products read it as it
//! lies, so that gradients, moments and saved weights have that form without a copy.

use super::components::{Layer, Outputs};
use super::experts::{add_up, rows_of};
use super::router::{self, Routed};
use crate::config::StackedExperts;
use astrai_ir::ops::{Activation, BinaryKind, GatedAct, GroupedDot, Route, Scores};
use astrai_ir::{DType, Dim, Graph, IrError, NodeId, Real};

impl Layer<'_> {
    /// What the chosen experts make of `x` `[tokens, hidden]`; and what the program's loss reads of the router, by the names of a
    /// layer's outputs.
    pub(super) fn stacked(&mut self, e: &StackedExperts, x: NodeId) -> Result<(NodeId, Outputs), IrError> {
        let hidden = self.config.hidden_size;
        let router = e.names.router[0].trim_end_matches(".weight");
        let logits = self.linear(router, x, [e.count, hidden], true)?; // [tokens, experts]
        let g = &mut self.g;
        let op = Route {
            k: e.chosen,
            scores: Scores::SoftmaxChosen,
            groups: None,
            normalise: false,
            scale: Real(1.0),
        };
        let routed = g.scope("mlp.route", |g| Routed::new(g, op, &[logits]))?;
        let watched = router::watched(g, e.router(), &routed, self.program.loss)?;
        let rows = rows_of(g, &routed, x)?;
        let expert = g.reshape(routed.experts, g.ty(routed.slots).shape.clone())?;
        let both = product(g, e.names.gate_up[0], rows, routed.offsets, 2 * e.intermediate)?;
        let both = g.scope(e.names.gate_up[1], |g| {
            let b = g.weight(e.names.gate_up[1], DType::F32, &[e.count, 2 * e.intermediate])?;
            let expert = g.gather(expert, routed.slots, 0)?;
            let b = g.gather(b, expert, 0)?; // [tokens * chosen, 2 * intermediate]
            g.add(both, b)
        })?;
        let h = g.scope("mlp.act", |g| act(g, e, both))?;
        let y = product(g, e.names.down[0], h, routed.offsets, hidden)?; // [tokens * chosen, hidden]
        let bias = g.scope(e.names.down[1], |g| {
            let b = g.weight(e.names.down[1], DType::F32, &[e.count, hidden])?;
            g.gather(b, expert, 0) // [tokens * chosen, hidden], in the order of tokens
        })?;
        Ok((add_up(g, &routed, y, Some(bias))?, watched))
    }
}

/// Rows `[rows, k]` in the order of experts, each times its expert's `[k, n]`.
fn product(g: &mut Graph, name: &str, x: NodeId, offsets: NodeId, n: usize) -> Result<NodeId, IrError> {
    let k = g.ty(x).shape[1].size().unwrap_or(0);
    let count = g.ty(offsets).shape[0].size().unwrap_or(1) - 1;
    g.scope(name, |g| {
        let w = g.weight(name, DType::F32, &[count, k, n])?;
        let w = g.reshape(w, vec![Dim::from(count * k), Dim::from(n)])?;
        g.push(GroupedDot { transposed: true }, &[x, w, offsets])
    })
}

/// `(u + 1) * g * sigmoid(alpha * g)` of gate and up `[rows, 2 * intermediate]`, the two in turn.
fn act(g: &mut Graph, e: &StackedExperts, both: NodeId) -> Result<NodeId, IrError> {
    let (rows, inner) = (g.ty(both).shape[0].clone(), Dim::from(e.intermediate));
    let pairs = g.reshape(both, vec![rows.clone(), inner.clone(), Dim::from(2)])?;
    let mut side = |at: usize| {
        let one = g.slice(pairs, 2, Dim::from(at), Dim::from(1))?;
        g.reshape(one, vec![rows.clone(), inner.clone()])
    };
    let (gate, up) = (side(0)?, side(1)?);
    let (most, least) = (g.fill(gate, e.limit)?, g.fill(gate, -e.limit)?);
    let gate = g.binary(BinaryKind::Min, gate, most)?;
    let up = g.binary(BinaryKind::Min, up, most)?;
    let up = g.binary(BinaryKind::Max, up, least)?;
    let one = g.fill(up, 1.0)?;
    let up = g.add(up, one)?;
    g.push(GatedAct { act: Activation::Swish(Real(e.alpha)) }, &[gate, up])
}
