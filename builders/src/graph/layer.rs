//! One decoder layer as the body of a block: attention and MLP, each normed and added to the residual stream.
//! In: what the layer computes. Out: a graph whose leaves are `x`, `cos`, `sin`, `starts` and the layer's weights by
//! their names within the layer; over a cache also `slots`, `tables` (of windowed
//! layers with pages of their own `window_slots`, `window_tables`), `lens` and the states `k_cache` and `v_cache` (of latents
//! `pages` and the state `latent_cache`; of pages of eight bits codes and scales of each), whose next versions follow `x` among
//! the outputs. Last are the statistics of the
//! layer's router that a loss reads.

use super::components::{Layer, Outputs};
use crate::config::{Activation, LayerSpec, MlpSpec, ModelConfig};
use crate::program::Program;
use astrai_ir::ops::{self, GatedAct};
use astrai_ir::{DType, Dim, Graph, IrError, NodeId};

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
        layer.g.set_output(&name, id)?;
    }
    Ok(layer.g)
}

impl Layer<'_> {
    /// `x + down(act(gate(x)) * up(x))`, of one MLP or of the chosen experts, normed where the layer says so; and what is seen of
    /// a router.
    fn mlp(&mut self, x: NodeId) -> Result<(NodeId, Outputs), IrError> {
        let (names, hidden) = (self.config.names, self.config.hidden_size);
        let n = self.norm_before(names.post_attention_norm, x)?;
        let act = match self.config.activation {
            Activation::Silu => ops::Activation::Silu,
            Activation::Gelu => ops::Activation::Gelu,
            Activation::GeluTanh => ops::Activation::GeluTanh,
        };
        let (y, watched) = match &self.spec.mlp {
            MlpSpec::Dense { intermediate, bias } => {
                let apart = [names.mlp_gate, names.mlp_up].map(|name| (name, *intermediate));
                let [gate, up] = self.projections(names.mlp_gate_up, apart, n, *bias)?;
                let h = self.g.scope("mlp.act", |g| g.push(GatedAct { act }, &[gate, up]))?;
                (self.linear(names.mlp_down, h, [hidden, *intermediate], *bias)?, vec![])
            }
            MlpSpec::Experts(e) => self.experts(e, act, n)?,
            MlpSpec::Stacked(e) => self.stacked(e, n)?,
        };
        let y = self.norm_after(names.mlp_out_norm, y)?;
        Ok((self.g.scope("mlp.residual", |g| g.add(x, y))?, watched))
    }
}
