//! Multi-head latent attention as part of a layer's body. In: the layer's normed input. Out: queries and what attention takes
//! behind them. Where all heads share the rotated part of keys, pages hold the latent and that part, and keys and values are
//! made of the pages in use; where each head rotates its own (AstrAI), nothing could be read from the latent alone without
//! making every key again, so that pages hold keys and values.

use super::components::{Layer, Outputs, parts};
use crate::config::{LatentSpec, QkNorm, RopeKey};
use astrai_ir::ops::Concat;
use astrai_ir::{Dim, IrError, NodeId};

/// Queries, what attention takes behind them, next versions of states.
pub(super) type Attended = (NodeId, Vec<NodeId>, Outputs);

impl Layer<'_> {
    /// Queries, keys and values of latent attention on `n` `[tokens, hidden]`.
    pub(super) fn latent(
        &mut self,
        l: &LatentSpec,
        n: NodeId,
        [cos, sin, starts]: [NodeId; 3],
    ) -> Result<Attended, IrError> {
        let q = self.latent_queries(l, n, [cos, sin])?;
        let (bias, hidden) = (self.spec.attention.qkv_bias, self.config.hidden_size);
        let both = self.linear(l.names.kv_down, n, [l.down(), hidden], bias)?;
        let rank = Dim::from(l.rank);
        let c = self.g.scope(l.names.kv_down, |g| g.slice(both, 1, Dim::from(0), rank.clone()))?;
        let c = self.norm_by(l.names.kv_norm, c, l.rank, l.norm_eps)?; // [tokens, rank]
        if l.rope_key == RopeKey::OfLatent {
            let [k, v] = self.keys_of_latent(l, c, [cos, sin])?;
            let (keys, versions) = self.keys([k, v, starts])?;
            return Ok((q, keys, versions));
        }
        let shape = vec![Dim::symbol("tokens"), Dim::from(1), Dim::from(l.rope)];
        let turned = self.g.scope(l.names.kv_down, |g| {
            let part = g.slice(both, 1, rank, Dim::from(l.rope))?;
            g.reshape(part, shape)
        })?;
        let turned = self.turn(turned, [cos, sin])?; // [tokens, 1, rope]
        let (c, turned, rest, versions) = self.latents(l, [c, turned, starts])?;
        let [k, v] = self.keys_beside(l, c, turned)?;
        Ok((q, [vec![k, v], rest].concat(), versions))
    }

    /// Queries `[tokens, heads, nope + rope]`, the last of each head rotated.
    fn latent_queries(&mut self, l: &LatentSpec, n: NodeId, tables: [NodeId; 2]) -> Result<NodeId, IrError> {
        let (a, hidden, heads) = (&self.spec.attention, self.config.hidden_size, self.config.heads);
        let rows = heads * l.width();
        let q = match l.q_rank {
            None => self.linear(l.names.q, n, [rows, hidden], false)?,
            Some(rank) => {
                let low = self.linear(l.names.q_down, n, [rank, hidden], a.qkv_bias)?;
                let low = self.norm_by(l.names.q_norm, low, rank, l.norm_eps)?;
                self.linear(l.names.q_up, low, [rows, rank], false)?
            }
        };
        let q = self.heads(q, heads)?;
        let [plain, turned] = parts(&mut self.g, q, 2, [l.nope, l.rope])?;
        let turned = self.turn(turned, tables)?;
        let q = self.g.scope("attn.rope", |g| g.push(Concat { axis: 2 }, &[plain, turned]))?;
        self.head_norm(self.config.names.q_norm, q)
    }

    /// The norm of each head behind the rotation, where there is one.
    fn head_norm(&mut self, name: &str, x: NodeId) -> Result<NodeId, IrError> {
        match self.spec.attention.qk_norm {
            QkNorm::AfterRope => self.norm(name, x, self.config.head_dim),
            _ => Ok(x),
        }
    }

    /// Keys `[tokens, kv, nope + rope]` and values `[tokens, kv, value]`, each head's own rotated part out of the latent.
    fn keys_of_latent(
        &mut self,
        l: &LatentSpec,
        c: NodeId,
        tables: [NodeId; 2],
    ) -> Result<[NodeId; 2], IrError> {
        let [plain, turned, v] = self.up(l, c, [l.nope, l.rope, l.value])?;
        let turned = self.turn(turned, tables)?;
        let k = self.g.scope("attn.rope", |g| g.push(Concat { axis: 2 }, &[plain, turned]))?;
        Ok([self.head_norm(self.config.names.k_norm, k)?, v])
    }

    /// Keys `[rows, heads, nope + rope]` and values `[rows, heads, value]` of latents `[rows, rank]` and the rotated part
    /// `[rows, 1, rope]` that all heads share.
    fn keys_beside(&mut self, l: &LatentSpec, c: NodeId, turned: NodeId) -> Result<[NodeId; 2], IrError> {
        let [plain, v] = self.up(l, c, [l.nope, l.value])?;
        let k = self.g.scope("attn.keys", |g| {
            let shape = [g.ty(plain).shape[..2].to_vec(), vec![Dim::from(l.rope)]].concat();
            let turned = g.broadcast(turned, &shape)?;
            g.push(Concat { axis: 2 }, &[plain, turned])
        })?;
        Ok([k, v])
    }

    /// What `kv_up` makes of latents `[rows, rank]`, by heads of keys, in parts of these widths.
    fn up<const N: usize>(
        &mut self,
        l: &LatentSpec,
        c: NodeId,
        widths: [usize; N],
    ) -> Result<[NodeId; N], IrError> {
        let kv = self.config.kv_heads;
        let all = self.linear(l.names.kv_up, c, [kv * l.up(), l.rank], false)?;
        self.g.scope(l.names.kv_up, |g| {
            let shape = vec![g.ty(c).shape[0].clone(), Dim::from(kv), Dim::from(l.up())];
            let all = g.reshape(all, shape)?;
            parts(g, all, 2, widths)
        })
    }
}
