//! Mixture of experts as part of a layer's body. In: the normed stream of every token. Out: what the chosen experts make of
//! it. Experts' matrices lie one after another in one buffer, the checkpoint's tensors are rows of it; tokens go through
//! them in the order of experts, in two grouped products, and a token's results are added up best expert first.

use crate::config::ExpertsSpec;
use astrai_ir::ops::{Activation, GatedAct, GroupedDot, ReduceKind, Route, Rows, Scores, Weight};
use astrai_ir::{DType, Dim, Graph, IrError, NodeId, Real, Type};

/// `Σ w_e · down_e(act(gate_e(x)) * up_e(x))` for `x` `[tokens, hidden]`.
pub fn experts(g: &mut Graph, e: &ExpertsSpec, act: Activation, x: NodeId) -> Result<NodeId, IrError> {
    let (tokens, hidden) = (g.ty(x).shape[0].clone(), g.ty(x).shape[1].clone());
    let (count, inner) = (Dim::from(e.count), Dim::from(e.intermediate));
    let logits = g.scope(e.names.router, |g| {
        let router = Type::new(DType::F32, [count.clone(), hidden.clone()]);
        let router = g.push(Weight::new(&format!("{}.weight", e.names.router), router), &[])?;
        g.linear(x, router)
    })?;
    let op = Route {
        k: e.chosen,
        scores: Scores::Softmax,
        groups: None,
        normalise: e.normalise,
        scale: Real(1.0),
    };
    let [weights, slots, places, offsets] = g.scope("mlp.route", |g| {
        let route = g.push(op, &[logits])?;
        Ok::<_, IrError>([g.part(route, 1)?, g.part(route, 2)?, g.part(route, 3)?, g.part(route, 4)?])
    })?;
    let rows = g.scope("mlp.experts.rows", |g| {
        let chosen = g.fill(slots, e.chosen as f64)?;
        let token = g.div(slots, chosen)?;
        g.gather(x, token, 0) // [tokens * chosen, hidden]
    })?;
    let both = product(g, e, &[e.names.gate, e.names.up], rows, offsets, &hidden)?;
    let h = g.scope("mlp.act", |g| {
        let gate = g.slice(both, 1, Dim::from(0), inner.clone())?;
        let up = g.slice(both, 1, inner.clone(), inner.clone())?;
        g.push(GatedAct { act }, &[gate, up])
    })?;
    let y = product(g, e, &[e.names.down], h, offsets, &hidden)?; // [tokens * chosen, hidden]
    g.scope("mlp.experts.sum", |g| {
        let shape = vec![tokens.clone(), Dim::from(e.chosen), hidden];
        let place = g.reshape(places, vec![&tokens * &shape[1]])?;
        let y = g.gather(y, place, 0)?;
        let y = g.reshape(y, shape.clone())?;
        let w = g.reshape(weights, vec![tokens, shape[1].clone(), Dim::from(1)])?;
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
    let name = joined(names);
    g.scope(&name, |g| {
        let w = g.push(Weight { name: format!("{name}.weight"), ty, parts }, &[])?;
        g.push(GroupedDot { transposed: false }, &[x, w, offsets])
    })
}

/// `experts.*.{gate_proj,up_proj}` for names that differ in their last part.
pub(crate) fn joined(names: &[&str]) -> String {
    let all = |name: &str| name.replace("{e}", "*");
    match names {
        [one] => all(one),
        _ => {
            let split = |n: &&str| n.rsplit_once('.').map(|(a, b)| (a.to_string(), b.to_string()));
            let ends: Vec<String> = names.iter().filter_map(split).map(|(_, end)| end).collect();
            let stem = names.first().and_then(split).map(|(stem, _)| stem).unwrap_or_default();
            format!("{}.{{{}}}", all(&stem), ends.join(","))
        }
    }
}
