//! One decoder layer as the body of a block: attention and MLP, each normed and added to the residual stream.
//! In: what the layer computes. Out: a graph whose leaves are `x`, `cos`, `sin`, `starts` and the layer's weights by
//! their names within the layer; over a cache also `slots`, `tables`, `lens` and the states `k_cache` and `v_cache` (of latents
//! `pages` and the state `latent_cache`), whose next versions follow `x` among the outputs. Last are
//! what a loss wants of the layer's router.

mod latent;

use crate::config::{Activation, LayerSpec, MlpSpec, ModelConfig, NormPlace, QkNorm, RopeLayout};
use crate::experts::experts;
use crate::model::{Cache, Program};
use crate::router::Seen;
use crate::stacked::stacked;
use astrai_ir::ops::{self, Attention, GatedAct, Rope, UnaryKind};
use astrai_ir::{DType, Dim, Graph, IrError, NodeId, Real, Type};
use latent::Attended;
pub(crate) use latent::CONTEXT;

/// Next versions of states, or what is seen of a router, by name.
type Versions = Vec<(&'static str, NodeId)>;

/// What the parts of a layer share.
struct Layer<'a> {
    g: Graph,
    config: &'a ModelConfig,
    spec: &'a LayerSpec,
    program: &'a Program,
}

/// Inputs of programs over a cache: the row of each token's key and value, each sequence's pages, how many tokens it has.
/// Where pages hold latents, last also the pages in use: the tables then hold places in that list.
pub const CACHE: [&str; 4] = ["slots", "tables", "lens", "pages"];

/// The inputs [`CACHE`], of latents all.
pub fn cache_inputs(g: &mut Graph, cache: &Cache, latents: bool) -> Result<Vec<NodeId>, IrError> {
    let sequences = Dim::symbol("sequences");
    let slots = g.input(CACHE[0], DType::I32, vec![Dim::symbol("tokens")])?;
    let tables = g.input(CACHE[1], DType::I32, vec![sequences.clone(), Dim::from(cache.table)])?;
    let mut all = vec![slots, tables, g.input(CACHE[2], DType::I32, vec![sequences])?];
    if latents {
        all.push(g.input(CACHE[3], DType::I32, vec![Dim::symbol(CONTEXT)])?);
    }
    Ok(all)
}

/// The body of a layer of this kind: `x` `[tokens, hidden]` in, the same shape out.
pub fn body(config: &ModelConfig, spec: &LayerSpec, program: &Program) -> Result<Graph, IrError> {
    let mut layer = Layer { g: Graph::new(program.symbols(config)), config, spec, program };
    let tokens = Dim::symbol("tokens");
    let half = Dim::from(spec.attention.rope.dim / 2);
    let x = layer.g.input("x", DType::F32, vec![tokens.clone(), Dim::from(config.hidden_size)])?;
    let cos = layer.g.input("cos", DType::F32, vec![tokens.clone(), half.clone()])?;
    let sin = layer.g.input("sin", DType::F32, vec![tokens, half])?;
    let starts = layer.g.input("starts", DType::I32, vec![&Dim::symbol("sequences") + &Dim::from(1)])?;
    let (x, versions) = layer.attention(x, [cos, sin, starts])?;
    let (x, watched) = layer.mlp(x)?;
    layer.g.set_output("x", x)?;
    for (name, id) in versions.into_iter().chain(watched) {
        layer.g.set_output(name, id)?;
    }
    Ok(layer.g)
}

/// What an RMSNorm over `n` elements multiplies by.
pub fn norm_weight(g: &mut Graph, config: &ModelConfig, name: &str, n: usize) -> Result<NodeId, IrError> {
    let w = g.weight(name, DType::F32, &[n])?;
    if !config.norm_offset {
        return Ok(w);
    }
    let one = g.fill(w, 1.0)?;
    g.add(w, one)
}

impl Layer<'_> {
    /// `x + o(attention(x))`, normed where the layer says so, and the next versions of the states.
    fn attention(
        &mut self,
        x: NodeId,
        [cos, sin, starts]: [NodeId; 3],
    ) -> Result<(NodeId, Versions), IrError> {
        let (names, a) = (self.config.model_type.names, &self.spec.attention);
        let (heads, hidden) = (self.config.heads, self.config.hidden_size);
        let dv = a.value_dim(self.config.head_dim);
        let n = self.norm_before(names.input_norm, x)?;
        let (q, mut keys, versions) = match &a.latent {
            Some(latent) => self.latent(latent, n, [cos, sin, starts])?,
            None => self.grouped(n, [cos, sin, starts])?,
        };
        if let Some(name) = names.sinks.filter(|_| a.sinks) {
            keys.push(self.g.scope(name, |g| g.weight(name, DType::F32, &[heads]))?);
        }
        let op = Attention {
            scale: Real(a.scale),
            causal: self.config.encoder.is_none(),
            window: a.window,
            softcap: a.softcap.map(Real),
            sinks: a.sinks,
            span: Dim::from(self.program.span as usize),
            page: self.program.cache.map(|c| c.page),
        };
        let out = self.g.scope("attn", |g| {
            let both = g.push(op, &[&[q][..], &keys].concat())?;
            let out = g.part(both, 0)?; // [tokens, heads, dv]
            g.reshape(out, vec![Dim::symbol("tokens"), Dim::from(heads * dv)])
        })?;
        let out = match a.gate {
            true => {
                let gate = self.linear(names.gate, n, [heads * dv, hidden], false)?;
                self.g.scope("attn.gate", |g| {
                    let gate = g.unary(UnaryKind::Sigmoid, gate)?;
                    g.mul(out, gate)
                })?
            }
            false => out,
        };
        let o = self.linear(names.o, out, [hidden, heads * dv], a.o_bias)?;
        let o = self.norm_after(names.attention_out_norm, o)?;
        Ok((self.g.scope("attn.residual", |g| g.add(x, o))?, versions))
    }

    /// Queries of `n` `[tokens, hidden]` and what attention takes behind them, heads of queries sharing those of keys.
    fn grouped(&mut self, n: NodeId, [cos, sin, starts]: [NodeId; 3]) -> Result<Attended, IrError> {
        let (names, a) = (self.config.model_type.names, &self.spec.attention);
        let (heads, kv, d) = (self.config.heads, self.config.kv_heads, self.config.head_dim);
        let apart = [(names.q, heads * d), (names.k, kv * d), (names.v, kv * d)];
        let [mut q, mut k, v] = self.projections(names.qkv, apart, n, a.qkv_bias)?;
        if a.qk_norm == QkNorm::WholeBeforeRope {
            q = self.norm(names.q_norm, q, heads * d)?;
            k = self.norm(names.k_norm, k, kv * d)?;
        }
        let q = self.heads(q, heads)?;
        let k = self.heads(k, kv)?;
        let v = self.heads(v, kv)?; // [tokens, kv, d]
        let q = self.rotate(names.q_norm, q, [cos, sin])?;
        let k = self.rotate(names.k_norm, k, [cos, sin])?;
        let (keys, versions) = self.keys([k, v, starts])?;
        Ok((q, keys, versions))
    }

    /// What attention takes behind the queries: this run's keys and values, or the pages that these were stored into.
    fn keys(&mut self, [k, v, starts]: [NodeId; 3]) -> Result<(Vec<NodeId>, Versions), IrError> {
        let Some(cache) = self.program.cache else { return Ok((vec![k, v, starts], vec![])) };
        self.g.scope("attn.cache", |g| {
            let inputs = cache_inputs(g, &cache, false)?;
            let (slots, rest) = (inputs[0], &inputs[1..]);
            let mut versions = Vec::new();
            for (name, rows) in [("k_cache", k), ("v_cache", v)] {
                let row = g.ty(rows).shape[1..].to_vec();
                let ty = Type::new(DType::F32, [vec![Dim::from(cache.pages * cache.page)], row].concat());
                let state = g.push(ops::State { name: name.into(), ty }, &[])?;
                versions.push((name, g.push(ops::Store {}, &[state, slots, rows])?));
            }
            Ok(([&[versions[0].1, versions[1].1, starts], rest].concat(), versions))
        })
    }

    /// `x + down(act(gate(x)) * up(x))`, of one MLP or of the chosen experts, normed where the layer says so; and what is seen of
    /// a router.
    fn mlp(&mut self, x: NodeId) -> Result<(NodeId, Versions), IrError> {
        let (names, hidden) = (self.config.model_type.names, self.config.hidden_size);
        let n = self.norm_before(names.post_attention_norm, x)?;
        let act = match self.config.activation {
            Activation::Silu => ops::Activation::Silu,
            Activation::Gelu => ops::Activation::Gelu,
            Activation::GeluTanh => ops::Activation::GeluTanh,
        };
        let mut watched = Versions::new();
        let y = match &self.spec.mlp {
            MlpSpec::Dense { intermediate, bias } => {
                let apart = [names.mlp_gate, names.mlp_up].map(|name| (name, *intermediate));
                let [gate, up] = self.projections(names.mlp_gate_up, apart, n, *bias)?;
                let h = self.g.scope("mlp.act", |g| g.push(GatedAct { act }, &[gate, up]))?;
                self.linear(names.mlp_down, h, [hidden, *intermediate], *bias)?
            }
            MlpSpec::Experts(e) => {
                let (y, seen) = experts(&mut self.g, e, act, n, Seen::by(self.program.loss))?;
                watched = seen;
                y
            }
            MlpSpec::Stacked(e) => {
                let (y, seen) = stacked(&mut self.g, e, n, Seen::by(self.program.loss))?;
                watched = seen;
                y
            }
        };
        let y = self.norm_after(names.mlp_out_norm, y)?;
        Ok((self.g.scope("mlp.residual", |g| g.add(x, y))?, watched))
    }

    /// `[tokens, heads * d]` as `[tokens, heads, d]`.
    fn heads(&mut self, x: NodeId, heads: usize) -> Result<NodeId, IrError> {
        self.g.reshape(x, vec![Dim::symbol("tokens"), Dim::from(heads), Dim::from(self.config.head_dim)])
    }

    /// Rotation by position, with the norm of each head of queries and keys before or after it.
    fn rotate(&mut self, norm: &str, x: NodeId, tables: [NodeId; 2]) -> Result<NodeId, IrError> {
        let (a, d) = (&self.spec.attention, self.config.head_dim);
        let x = if a.qk_norm == QkNorm::BeforeRope { self.norm(norm, x, d)? } else { x };
        let x = self.turn(x, tables)?;
        if a.qk_norm == QkNorm::AfterRope { self.norm(norm, x, d) } else { Ok(x) }
    }

    /// Rotation of `x` `[tokens, heads, ..]` by position.
    fn turn(&mut self, x: NodeId, [cos, sin]: [NodeId; 2]) -> Result<NodeId, IrError> {
        let rope = &self.spec.attention.rope;
        let layout = match rope.layout {
            RopeLayout::Half => ops::RopeLayout::Half,
            RopeLayout::Interleaved => ops::RopeLayout::Interleaved,
        };
        self.g.scope("attn.rope", |g| g.push(Rope { layout, dim: rope.dim }, &[x, cos, sin]))
    }

    /// What a residual branch takes.
    fn norm_before(&mut self, name: &str, x: NodeId) -> Result<NodeId, IrError> {
        match self.spec.norms {
            NormPlace::Before | NormPlace::Both => self.norm(name, x, self.config.hidden_size),
            NormPlace::After => Ok(x),
        }
    }

    /// What a residual branch adds.
    fn norm_after(&mut self, name: &str, x: NodeId) -> Result<NodeId, IrError> {
        match self.spec.norms {
            NormPlace::Before => Ok(x),
            NormPlace::After | NormPlace::Both => self.norm(name, x, self.config.hidden_size),
        }
    }

    /// RMSNorm over the last axis of `x`, weight `[n]`.
    fn norm(&mut self, name: &str, x: NodeId, n: usize) -> Result<NodeId, IrError> {
        self.norm_by(name, x, n, self.config.norm_eps)
    }

    /// The same with another epsilon than the model's.
    fn norm_by(&mut self, name: &str, x: NodeId, n: usize, eps: f64) -> Result<NodeId, IrError> {
        let config = self.config;
        self.g.scope(name, |g| {
            let w = norm_weight(g, config, &format!("{name}.weight"), n)?;
            g.rms_norm(x, w, eps)
        })
    }

    /// Linear layers of one input, each `[out, hidden]`: apart, or slices of one whose weight the checkpoint has under `fused`.
    fn projections<const N: usize>(
        &mut self,
        fused: Option<&str>,
        apart: [(&str, usize); N],
        x: NodeId,
        bias: bool,
    ) -> Result<[NodeId; N], IrError> {
        let hidden = self.config.hidden_size;
        let mut made = [x; N];
        let Some(name) = fused else {
            for (y, (name, rows)) in made.iter_mut().zip(apart) {
                *y = self.linear(name, x, [rows, hidden], bias)?;
            }
            return Ok(made);
        };
        let all = self.linear(name, x, [apart.iter().map(|(_, rows)| rows).sum(), hidden], bias)?;
        let mut start = 0;
        for (y, (_, rows)) in made.iter_mut().zip(apart) {
            *y = self.g.scope(name, |g| g.slice(all, 1, Dim::from(start), Dim::from(rows)))?;
            start += rows;
        }
        Ok(made)
    }

    /// `x · wᵀ` (`+ b`), `w` `[out, in]`.
    fn linear(&mut self, name: &str, x: NodeId, shape: [usize; 2], bias: bool) -> Result<NodeId, IrError> {
        self.g.scope(name, |g| {
            let w = g.weight(&format!("{name}.weight"), DType::F32, &shape)?;
            let y = g.linear(x, w)?; // [tokens, out]
            if !bias {
                return Ok(y);
            }
            let b = g.weight(&format!("{name}.bias"), DType::F32, &shape[..1])?;
            g.add(y, b)
        })
    }
}
