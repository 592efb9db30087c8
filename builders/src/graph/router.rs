//! What routers did in a run, and the losses that keep them in bounds. In: each layer's router logits and choice. Out, of a
//! program with [`Loss::Routed`]: the output `router_load` f32 `[layers with experts, experts]`, how many tokens each expert
//! had; and where losses are wanted `router_balance` and `router_z`, times the scalar inputs `balance_scale` and `z_scale`
//! added to `loss`, whose first term is then the output `cross_entropy`. The balance is what the family's
//! [`Balance`] says; `router_z` is the mean over tokens and layers of the squared log-sum-exp of the logits (ST-MoE,
//! arXiv:2202.08906). How many tokens an expert had is a constant to the gradient, as the choice is.

use super::components::Outputs;
use crate::config::{Balance, ModelConfig, RouterSpec};
use crate::program::Loss;
use astrai_ir::ops::{Concat, ReduceKind, Route, Scores, Softmax, UnaryKind};
use astrai_ir::{Block, DType, Dim, Graph, IrError, NodeId};

/// The choice of experts, and the lists that their products need: see [`Route`].
pub(crate) struct Routed {
    /// `[tokens, experts]`
    pub logits: NodeId,
    /// i32 `[tokens, chosen]`
    pub experts: NodeId,
    /// `[tokens, chosen]`
    pub weights: NodeId,
    /// i32 `[tokens * chosen]`
    pub slots: NodeId,
    /// i32 `[tokens, chosen]`
    pub places: NodeId,
    /// i32 `[experts + 1]`
    pub offsets: NodeId,
}

impl Routed {
    /// The choice by router logits `[tokens, experts]` and a correction, if there is one.
    pub(crate) fn new(g: &mut Graph, op: Route, args: &[NodeId]) -> Result<Routed, IrError> {
        let route = g.push(op, args)?;
        let [experts, weights] = [g.part(route, 0)?, g.part(route, 1)?];
        let [slots, places, offsets] = [g.part(route, 2)?, g.part(route, 3)?, g.part(route, 4)?];
        Ok(Routed { logits: args[0], experts, weights, slots, places, offsets })
    }
}

/// Outputs of a layer: tokens of each expert f32 `[experts]`, sums over tokens of their probabilities `[experts]` and of the
/// squared log-sum-exp.
const OUTPUTS: [&str; 3] = ["router.load", "router.probabilities", "router.z"];

/// What a program with this loss shows of a layer's router: tokens of each expert, and what the losses are made of.
pub(crate) fn watched(g: &mut Graph, r: RouterSpec, routed: &Routed, loss: Loss) -> Result<Outputs, IrError> {
    let (Loss::Routed { balanced } | Loss::Tokens { balanced }) = loss else { return Ok(vec![]) };
    if !balanced && matches!(loss, Loss::Tokens { .. }) {
        return Ok(vec![]);
    }
    g.scope("router", |g| {
        let (count, offsets, logits) = (Dim::from(r.count), routed.offsets, routed.logits);
        let begin = g.slice(offsets, 0, Dim::from(0), count.clone())?;
        let end = g.slice(offsets, 0, Dim::from(1), count)?;
        let load = g.sub(end, begin)?;
        let load = g.cast(load, DType::F32)?;
        let mut out = vec![(OUTPUTS[0].to_string(), load)];
        if balanced {
            let p = probabilities(g, r, logits)?;
            out.push((OUTPUTS[1].into(), g.reduce(ReduceKind::Sum, p, &[0])?));
            out.push((OUTPUTS[2].into(), squared_log_sum(g, logits)?));
        }
        Ok(out)
    })
}

/// Probabilities of all experts: softmax, or sigmoids over their sum (DeepSeek-V3, arXiv:2412.19437).
fn probabilities(g: &mut Graph, r: RouterSpec, logits: NodeId) -> Result<NodeId, IrError> {
    if r.scores != Scores::Sigmoid {
        return g.push(Softmax { log: false }, &[logits]);
    }
    let p = g.unary(UnaryKind::Sigmoid, logits)?;
    let sum = g.reduce_last(ReduceKind::Sum, p)?;
    g.div(p, sum)
}

/// The sum over tokens of the squared log-sum-exp of their logits: the first logit less its log-probability.
fn squared_log_sum(g: &mut Graph, logits: NodeId) -> Result<NodeId, IrError> {
    let log = g.push(Softmax { log: true }, &[logits])?;
    let first = |g: &mut Graph, x| g.slice(x, 1, Dim::from(0), Dim::from(1));
    let (x, log) = (first(g, logits)?, first(g, log)?);
    let lse = g.sub(x, log)?; // [tokens, 1]
    let square = g.mul(lse, lse)?;
    g.reduce(ReduceKind::Sum, square, &[0, 1])
}

/// What the layers so far show of their routers, first to last.
#[derive(Default)]
pub(crate) struct Routers {
    seen: [Vec<NodeId>; 3],
}

impl Routers {
    /// Takes what a call of a layer shows.
    pub fn see(&mut self, g: &mut Graph, layer: &Block, call: NodeId) -> Result<(), IrError> {
        for (name, all) in OUTPUTS.iter().zip(&mut self.seen) {
            if let Some(i) = layer.graph.outputs().iter().position(|(n, _)| n == name) {
                all.push(g.part(call, i as u32)?);
            }
        }
        Ok(())
    }

    /// Puts out what was seen, and adds to the loss, if there is one, the routers' own where they are wanted.
    pub fn loss(
        &self,
        g: &mut Graph,
        config: &ModelConfig,
        kind: Loss,
        loss: Option<NodeId>,
    ) -> Result<Option<NodeId>, IrError> {
        let router = config.layers.iter().find_map(|l| l.mlp.router());
        let (balanced, e) = match (kind, router) {
            (Loss::Routed { balanced }, Some(e)) => (balanced, e),
            (Loss::Tokens { balanced: true }, Some(e)) => (true, e),
            _ => return Ok(loss),
        };
        let [load, probabilities, z] = &self.seen;
        let rows = load.iter().map(|&x| g.reshape(x, vec![Dim::from(1), Dim::from(e.count)]));
        let rows = rows.collect::<Result<Vec<_>, _>>()?;
        let table = if let [one] = rows[..] { one } else { g.push(Concat { axis: 0 }, &rows)? };
        g.set_output("router_load", table)?;
        if !balanced {
            return Ok(loss);
        }
        if let Some(loss) = loss {
            g.set_output("cross_entropy", loss)?;
        }
        let tokens = total(g, load)?;
        let tokens = g.reduce(ReduceKind::Sum, tokens, &[0])?;
        let tokens = g.scale(tokens, 1.0 / e.chosen as f64)?; // of all layers
        let balance = match e.balance {
            Balance::Global => {
                let (load, p) = (total(g, load)?, total(g, probabilities)?);
                product(g, e.count as f64, [load, p], tokens)?
            }
            Balance::PerLayer => {
                let layers = load.len() as f64;
                let each = g.scale(tokens, 1.0 / layers)?;
                let factor = e.count as f64 / e.chosen as f64 / layers;
                let of_layer =
                    load.iter().zip(probabilities).map(|(&l, &p)| product(g, factor, [l, p], each));
                let all = of_layer.collect::<Result<Vec<_>, _>>()?;
                total(g, &all)?
            }
        };
        let z = total(g, z)?;
        let z = g.div(z, tokens)?;
        let mut sum = loss;
        for (name, x, factor) in [("router_balance", balance, "balance_scale"), ("router_z", z, "z_scale")] {
            g.set_output(name, x)?;
            let Some(before) = sum else { continue };
            let factor = g.input(factor, DType::F32, vec![])?;
            let part = g.mul(x, factor)?;
            sum = Some(g.add(before, part)?);
        }
        Ok(sum)
    }
}

/// `factor Σ (a / n) (b / n)`.
fn product(g: &mut Graph, factor: f64, sides: [NodeId; 2], n: NodeId) -> Result<NodeId, IrError> {
    let mut shares = sides;
    for x in &mut shares {
        let shape = g.ty(*x).shape.clone();
        let n = g.broadcast(n, &shape)?;
        *x = g.div(*x, n)?;
    }
    let both = g.mul(shares[0], shares[1])?;
    let sum = g.reduce(ReduceKind::Sum, both, &[0])?;
    g.scale(sum, factor)
}

/// The sum of values of one shape, first to last.
fn total(g: &mut Graph, all: &[NodeId]) -> Result<NodeId, IrError> {
    let Some((&first, rest)) = all.split_first() else {
        return Err(g.error("no layer shows its router".into()));
    };
    rest.iter().try_fold(first, |sum, &x| g.add(sum, x))
}
