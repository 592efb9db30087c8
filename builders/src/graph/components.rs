//! Components that the parts of a layer share: linear layers, norms, heads, rope. In: nodes of the layer's input. Out: nodes.

use crate::config::{LayerSpec, ModelConfig, NormPlacement, RopeLayout};
use crate::program::Program;
use astrai_ir::ops::{self, Rope, UnaryKind};
use astrai_ir::{DType, Dim, Graph, IrError, NodeId};

/// Outputs of a layer by name: next versions of states, or statistics of a router.
pub(super) type Outputs = Vec<(String, NodeId)>;

/// A layer whose body is being built.
pub(super) struct Layer<'a> {
    pub g: Graph,
    pub config: &'a ModelConfig,
    pub spec: &'a LayerSpec,
    pub program: &'a Program,
}

/// What an RMSNorm over `n` elements multiplies by.
pub(super) fn norm_weight(
    g: &mut Graph,
    config: &ModelConfig,
    name: &str,
    n: usize,
) -> Result<NodeId, IrError> {
    let w = g.weight(name, DType::F32, &[n])?;
    if !config.norm_offset {
        return Ok(w);
    }
    let one = g.fill(w, 1.0)?;
    g.add(w, one)
}

/// `cap * tanh(x / cap)`.
pub(super) fn softcap(g: &mut Graph, x: NodeId, cap: f64) -> Result<NodeId, IrError> {
    let whole = g.fill(x, cap)?;
    let x = g.div(x, whole)?;
    let x = g.unary(UnaryKind::Tanh, x)?;
    g.mul(x, whole)
}

/// `x` along an axis in parts of these sizes, one behind the other.
pub(super) fn parts<const N: usize>(
    g: &mut Graph,
    x: NodeId,
    axis: usize,
    sizes: [usize; N],
) -> Result<[NodeId; N], IrError> {
    let (mut made, mut start) = ([x; N], 0);
    for (part, size) in made.iter_mut().zip(sizes) {
        *part = g.slice(x, axis, Dim::from(start), Dim::from(size))?;
        start += size;
    }
    Ok(made)
}

impl Layer<'_> {
    /// `[tokens, heads * d]` as `[tokens, heads, d]`.
    pub(super) fn heads(&mut self, x: NodeId, heads: usize) -> Result<NodeId, IrError> {
        self.g.reshape(x, vec![Dim::symbol("tokens"), Dim::from(heads), Dim::from(self.config.head_dim)])
    }

    /// Rotation of `x` `[tokens, heads, ..]` by position.
    pub(super) fn turn(&mut self, x: NodeId, [cos, sin]: [NodeId; 2]) -> Result<NodeId, IrError> {
        let rope = &self.spec.attention.rope;
        let layout = match rope.layout {
            RopeLayout::Half => ops::RopeLayout::Half,
            RopeLayout::Interleaved => ops::RopeLayout::Interleaved,
        };
        self.g.scope("attn.rope", |g| g.push(Rope { layout, dim: rope.dim }, &[x, cos, sin]))
    }

    /// What a residual branch takes.
    pub(super) fn norm_before(&mut self, name: &str, x: NodeId) -> Result<NodeId, IrError> {
        match self.spec.norms {
            NormPlacement::Pre | NormPlacement::Sandwich => self.norm(name, x, self.config.hidden_size),
            NormPlacement::Post => Ok(x),
        }
    }

    /// What a residual branch adds.
    pub(super) fn norm_after(&mut self, name: &str, x: NodeId) -> Result<NodeId, IrError> {
        match self.spec.norms {
            NormPlacement::Pre => Ok(x),
            NormPlacement::Post | NormPlacement::Sandwich => self.norm(name, x, self.config.hidden_size),
        }
    }

    /// RMSNorm over the last axis of `x`, weight `[n]`.
    pub(super) fn norm(&mut self, name: &str, x: NodeId, n: usize) -> Result<NodeId, IrError> {
        self.norm_by(name, x, n, self.config.norm_eps)
    }

    /// The same with another epsilon than the model's.
    pub(super) fn norm_by(&mut self, name: &str, x: NodeId, n: usize, eps: f64) -> Result<NodeId, IrError> {
        let config = self.config;
        self.g.scope(name, |g| {
            let w = norm_weight(g, config, &format!("{name}.weight"), n)?;
            g.rms_norm(x, w, eps)
        })
    }

    /// Linear layers of one input, each `[out, hidden]`: apart, or slices of one whose weight the checkpoint has under `fused`.
    pub(super) fn projections<const N: usize>(
        &mut self,
        fused: Option<&str>,
        apart: [(&str, usize); N],
        x: NodeId,
        bias: bool,
    ) -> Result<[NodeId; N], IrError> {
        let hidden = self.config.hidden_size;
        if let Some(name) = fused {
            let rows = apart.map(|(_, rows)| rows);
            let all = self.linear(name, x, [rows.iter().sum(), hidden], bias)?;
            return self.g.scope(name, |g| parts(g, all, 1, rows));
        }
        let mut made = [x; N];
        for (y, (name, rows)) in made.iter_mut().zip(apart) {
            *y = self.linear(name, x, [rows, hidden], bias)?;
        }
        Ok(made)
    }

    /// `x · wᵀ` (`+ b`), `w` `[out, in]`.
    pub(super) fn linear(
        &mut self,
        name: &str,
        x: NodeId,
        shape: [usize; 2],
        bias: bool,
    ) -> Result<NodeId, IrError> {
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
