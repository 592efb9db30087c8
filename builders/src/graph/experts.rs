//! Mixture of experts as part of a layer's body. In: the normed stream of every token. Out: what the chosen experts, and those
//! that all tokens share, make of it. Experts' matrices lie one after another in one buffer, the checkpoint's tensors are
//! rows of it; tokens go through them in the order of experts, in two grouped products, and a token's results are added up
//! best expert first.

use super::components::{Layer, Outputs, parts};
use super::router::{self, Routed};
use crate::config::{ExpertNames, ExpertsSpec, SharedSpec};
use astrai_ir::ops::{Activation, GatedAct, GroupedDot, ReduceKind, Route, Rows, Weight};
use astrai_ir::{DType, Dim, Graph, IrError, NodeId, Real, Type};

impl Layer<'_> {
    /// `Σ w_e · down_e(act(gate_e(x)) * up_e(x))` for `x` `[tokens, hidden]`, and the mean of the shared experts; and what the
    /// program's loss reads of the router, by the names of a layer's outputs.
    pub(super) fn experts(
        &mut self,
        e: &ExpertsSpec,
        act: Activation,
        x: NodeId,
    ) -> Result<(NodeId, Outputs), IrError> {
        let routes = self.route(e, x)?;
        let y = chosen(&mut self.g, e, act, x, &routes)?;
        let watched = router::watched(&mut self.g, e.router(), &routes, self.program.loss)?;
        let Some(s) = &e.shared else { return Ok((y, watched)) };
        let shared = self.shared(s, &e.names.shared, act, x)?;
        Ok((self.g.scope("mlp.experts.sum", |g| g.add(y, shared))?, watched))
    }

    /// Which experts each token of `x` meets.
    fn route(&mut self, e: &ExpertsSpec, x: NodeId) -> Result<Routed, IrError> {
        let logits = self.linear(e.names.router, x, [e.count, self.config.hidden_size], false)?;
        let op = Route {
            k: e.chosen,
            scores: e.scores,
            groups: e.groups,
            normalise: e.normalise,
            scale: Real(e.scale),
        };
        self.g.scope("mlp.route", |g| {
            let mut args = vec![logits];
            if e.correction {
                let ty = Type::new(DType::F32, [Dim::from(e.count)]);
                args.push(g.push(Weight::fixed(e.names.correction, ty), &[])?);
            }
            Routed::new(g, op, &args)
        })
    }

    /// The mean of the shared experts, of these names, for `x` `[tokens, hidden]`.
    fn shared(
        &mut self,
        s: &SharedSpec,
        names: &[&str; 3],
        act: Activation,
        x: NodeId,
    ) -> Result<NodeId, IrError> {
        let (hidden, inner) = (self.config.hidden_size, s.intermediate);
        let mut sum: Option<NodeId> = None;
        for i in 0..s.count {
            let [gate, up, down] = names.map(|name| name.replace("{e}", &i.to_string()));
            let a = self.linear(&gate, x, [inner, hidden], false)?;
            let b = self.linear(&up, x, [inner, hidden], false)?;
            let h = self.g.scope("mlp.shared_experts.act", |g| g.push(GatedAct { act }, &[a, b]))?;
            let y = self.linear(&down, h, [hidden, inner], false)?; // [tokens, hidden]
            sum = Some(match sum {
                Some(sum) => self.g.scope("mlp.shared_experts.mean", |g| g.add(sum, y))?,
                None => y,
            });
        }
        let sum = sum.ok_or_else(|| self.g.error("there are no shared experts".into()))?;
        if s.count == 1 {
            return Ok(sum);
        }
        self.g.scope("mlp.shared_experts.mean", |g| {
            let count = g.fill(sum, s.count as f64)?;
            g.div(sum, count)
        })
    }
}

/// What the chosen experts make of each token, weighed and added up.
fn chosen(
    g: &mut Graph,
    e: &ExpertsSpec,
    act: Activation,
    x: NodeId,
    routes: &Routed,
) -> Result<NodeId, IrError> {
    let hidden = g.ty(x).shape[1].clone();
    let rows = rows_of(g, routes, x)?;
    let both = product(g, e, &[e.names.gate, e.names.up], rows, routes.offsets, &hidden)?;
    let h = g.scope("mlp.act", |g| {
        let halves = parts(g, both, 1, [e.intermediate; 2])?;
        g.push(GatedAct { act }, &halves)
    })?;
    let y = product(g, e, &[e.names.down], h, routes.offsets, &hidden)?; // [tokens * chosen, hidden]
    add_up(g, routes, y, None)
}

/// Rows of `x` `[tokens, hidden]` in the order of experts: `[tokens * chosen, hidden]`.
pub(crate) fn rows_of(g: &mut Graph, routed: &Routed, x: NodeId) -> Result<NodeId, IrError> {
    let chosen = g.ty(routed.weights).shape[1].size().unwrap_or(1);
    g.scope("mlp.experts.rows", |g| {
        let chosen = g.fill(routed.slots, chosen as f64)?;
        let token = g.div(routed.slots, chosen)?;
        g.gather(x, token, 0)
    })
}

/// A token's results `y` `[tokens * chosen, hidden]`, with a bias in the order of tokens, times their weights, added up best
/// expert first: `[tokens, hidden]`.
pub(crate) fn add_up(
    g: &mut Graph,
    routed: &Routed,
    y: NodeId,
    bias: Option<NodeId>,
) -> Result<NodeId, IrError> {
    let [tokens, chosen] = [0, 1].map(|axis| g.ty(routed.weights).shape[axis].clone());
    g.scope("mlp.experts.sum", |g| {
        let shape = vec![tokens.clone(), chosen.clone(), g.ty(y).shape[1].clone()];
        let place = g.reshape(routed.places, vec![&tokens * &chosen])?;
        let y = g.gather(y, place, 0)?;
        let y = bias.map_or(Ok(y), |b| g.add(y, b))?;
        let y = g.reshape(y, shape.clone())?;
        let w = g.reshape(routed.weights, vec![tokens, chosen, Dim::from(1)])?;
        let w = g.broadcast(w, &shape)?;
        let y = g.mul(y, w)?;
        g.reduce(ReduceKind::Sum, y, &[1])
    })
}

/// Rows in the order of experts, each times its expert's matrices of these names, one after another.
fn product(
    g: &mut Graph,
    e: &ExpertsSpec,
    names: &[&str],
    x: NodeId,
    offsets: NodeId,
    hidden: &Dim,
) -> Result<NodeId, IrError> {
    let k = g.ty(x).shape[1].clone();
    let n = if k == *hidden { Dim::from(e.intermediate) } else { hidden.clone() };
    let each = n.size().unwrap_or(0);
    let part = |expert, name: &&str| Rows { name: e.names.of(name, expert), rows: each };
    let parts: Vec<Rows> = (0..e.count).flat_map(|i| names.iter().map(move |n| part(i, n))).collect();
    let ty = Type::new(DType::F32, [&n * &Dim::from(names.len() * e.count), k]);
    let name = ExpertNames::joined(names);
    g.scope(&name, |g| {
        let w =
            Weight { parts, skip_zero_grad: e.skip_unrouted, ..Weight::new(&format!("{name}.weight"), ty) };
        let w = g.push(w, &[])?;
        g.push(GroupedDot { transposed: false }, &[x, w, offsets])
    })
}
