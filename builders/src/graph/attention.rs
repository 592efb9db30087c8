//! Attention of a layer and its residual branch. In: the residual stream. Out: the stream with what attention adds, and the next
//! versions of the states.

use super::components::{Layer, Outputs};
use super::latent::Attended;
use crate::config::QkNorm;
use astrai_ir::ops::{Attention, UnaryKind};
use astrai_ir::{DType, Dim, IrError, NodeId, Real};

impl Layer<'_> {
    /// `x + o(attention(x))`, normed where the layer says so, and the next versions of the states.
    pub(super) fn attention(
        &mut self,
        x: NodeId,
        [cos, sin, starts]: [NodeId; 3],
    ) -> Result<(NodeId, Outputs), IrError> {
        let (names, a) = (self.config.names, &self.spec.attention);
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
        let (names, a) = (self.config.names, &self.spec.attention);
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

    /// Rotation by position, with the norm of each head of queries and keys before or after it.
    fn rotate(&mut self, norm: &str, x: NodeId, tables: [NodeId; 2]) -> Result<NodeId, IrError> {
        let (a, d) = (&self.spec.attention, self.config.head_dim);
        let x = if a.qk_norm == QkNorm::BeforeRope { self.norm(norm, x, d)? } else { x };
        let x = self.turn(x, tables)?;
        if a.qk_norm == QkNorm::AfterRope { self.norm(norm, x, d) } else { Ok(x) }
    }
}
