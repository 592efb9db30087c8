//! Every tensor of a checkpoint. In: a resolved configuration. Out: names, shapes and initialisers in model order, from
//! which parameters are counted, checkpoints checked and fresh weights drawn.

use super::spec::{InitStyle, LayerSpec, ModelConfig, NormPlace, QkNorm};

/// One tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSpec {
    /// Name in the checkpoint.
    pub name: String,
    /// Extents; matrices are `[out, in]`, the embedding `[vocab, hidden]`.
    pub shape: Vec<usize>,
    /// How it is drawn when a model starts fresh.
    pub init: Init,
}

/// Initial values of a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All zero.
    Zeros,
    /// All one.
    Ones,
    /// Normal, mean 0, this standard deviation.
    Normal(f64),
}

impl TensorSpec {
    /// Elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|&n| n as u64).product()
    }
}

/// All tensors of the checkpoint in model order; a tied head is absent.
pub fn tensors(c: &ModelConfig) -> Vec<TensorSpec> {
    let names = c.model_type.names;
    let draw = Init::Normal(c.initializer_range);
    let table =
        |name: &str| TensorSpec { name: name.into(), shape: vec![c.vocab_size, c.hidden_size], init: draw };
    let mut out = vec![table(names.embed)];
    for (i, layer) in c.layers.iter().enumerate() {
        layer_tensors(c, layer, i, &mut out);
    }
    out.push(TensorSpec { name: names.final_norm.into(), shape: vec![c.hidden_size], init: norm_init(c) });
    if !c.tie_embeddings {
        out.push(table(names.head));
    }
    out
}

/// Parameters from the shapes, tied tensors once.
pub fn parameter_count(c: &ModelConfig) -> u64 {
    // Within `u64` for every accepted configuration: `MAX_PARAMETERS` is far below.
    u64::try_from(count_parameters(c)).unwrap_or(u64::MAX)
}

/// The count in `u128`, safe before the limit is checked; equal layers are counted once and multiplied.
pub(super) fn count_parameters(c: &ModelConfig) -> u128 {
    let elements = |list: &[TensorSpec]| list.iter().map(|t| u128::from(t.elements())).sum::<u128>();
    let (kinds, of_layer) = c.layer_kinds();
    let mut total = 0;
    for (k, layer) in kinds.iter().enumerate() {
        let mut one = Vec::new();
        layer_tensors(c, layer, 0, &mut one);
        total += elements(&one) * of_layer.iter().filter(|&&x| x == k).count() as u128;
    }
    let outside = tensors(&ModelConfig { layers: Vec::new(), ..c.clone() });
    total + elements(&outside)
}

/// A fresh norm changes nothing: it multiplies by one.
fn norm_init(c: &ModelConfig) -> Init {
    if c.norm_offset { Init::Zeros } else { Init::Ones }
}

/// Tensors of layer `i` in the order they act.
fn layer_tensors(c: &ModelConfig, layer: &LayerSpec, i: usize, out: &mut Vec<TensorSpec>) {
    let names = c.model_type.names;
    let (h, q, kv, inner) =
        (c.hidden_size, c.heads * c.head_dim, c.kv_heads * c.head_dim, layer.mlp.intermediate);
    let (draw, one) = (Init::Normal(c.initializer_range), norm_init(c));
    let output = match c.init_style {
        InitStyle::Normal => draw,
        InitStyle::ScaledOutputs => Init::Normal(c.initializer_range / (2.0 * c.num_layers as f64).sqrt()),
    };
    let mut push = |part: &str, suffix: &str, shape: &[usize], init| {
        out.push(TensorSpec { name: names.in_layer(i, part, suffix), shape: shape.to_vec(), init });
    };
    let (a, m) = (&layer.attention, &layer.mlp);
    let (before, after) = (layer.norms != NormPlace::After, layer.norms != NormPlace::Before);
    if before {
        push(names.input_norm, "weight", &[h], one);
    }
    let apart = [(names.q, q), (names.k, kv), (names.v, kv)];
    let fused = names.qkv.map(|name| [(name, q + 2 * kv)]);
    for &(part, rows) in fused.as_ref().map_or(&apart[..], |f| &f[..]) {
        push(part, "weight", &[rows, h], draw);
        if a.qkv_bias {
            push(part, "bias", &[rows], Init::Zeros);
        }
    }
    let widths = match a.qk_norm {
        QkNorm::None => None,
        QkNorm::BeforeRope | QkNorm::AfterRope => Some([c.head_dim; 2]),
        QkNorm::WholeBeforeRope => Some([q, kv]),
    };
    if let Some([of_q, of_k]) = widths {
        push(names.q_norm, "weight", &[of_q], one);
        push(names.k_norm, "weight", &[of_k], one);
    }
    if a.gate {
        push(names.gate, "weight", &[q, h], draw);
    }
    push(names.o, "weight", &[h, q], output);
    if a.o_bias {
        push(names.o, "bias", &[h], Init::Zeros);
    }
    if after {
        push(names.attention_out_norm, "weight", &[h], one);
    }
    if before {
        push(names.post_attention_norm, "weight", &[h], one);
    }
    let apart = [(names.mlp_gate, inner), (names.mlp_up, inner)];
    let fused = names.mlp_gate_up.map(|name| [(name, 2 * inner)]);
    let into = fused.as_ref().map_or(&apart[..], |f| &f[..]).iter();
    let mlp = into.map(|&(part, rows)| (part, rows, h, draw)).chain([(names.mlp_down, h, inner, output)]);
    for (part, rows, columns, init) in mlp {
        push(part, "weight", &[rows, columns], init);
        if m.bias {
            push(part, "bias", &[rows], Init::Zeros);
        }
    }
    if after {
        push(names.mlp_out_norm, "weight", &[h], one);
    }
}
