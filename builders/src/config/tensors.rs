//! Every tensor of a checkpoint. In: a resolved configuration. Out: names, shapes and initialisers in model order, from
//! which parameters are counted, checkpoints checked and fresh weights drawn.

use super::mtp::Hidden;
use super::spec::{
    ExpertsSpec, InitStyle, LatentSpec, LayerSpec, MlpSpec, ModelConfig, NormPlacement, QkNorm,
    StackedExperts,
};

/// One tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSpec {
    /// Name in the checkpoint.
    pub name: String,
    /// Extents; matrices are `[out, in]`, the embedding `[vocab, hidden]`.
    pub shape: Vec<usize>,
    /// How it is drawn when a model starts fresh.
    pub init: Init,
    /// Training leaves it as it is, and it is no parameter.
    pub fixed: bool,
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
    /// A parameter.
    fn new(name: String, shape: &[usize], init: Init) -> TensorSpec {
        TensorSpec { name, shape: shape.to_vec(), init, fixed: false }
    }

    /// Elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|&n| n as u64).product()
    }
}

impl ModelConfig {
    /// All tensors of the checkpoint in model order; a tied head is absent.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let names = self.names;
        let draw = Init::Normal(self.initializer_range);
        let table = |name: &str| TensorSpec::new(name.into(), &[self.vocab_size, self.hidden_size], draw);
        let mut out = vec![table(names.embed)];
        let first = self.first_layer();
        if let (Some(Hidden::Read(_)), Some(mtp)) = (self.hidden, &self.mtp) {
            let (h, one, names) = (self.hidden_size, norm_init(self), mtp.names);
            for (part, shape, init) in [
                (names.token_norm, &[h][..], one),
                (names.hidden_norm, &[h], one),
                (names.join, &[h, 2 * h], draw),
            ] {
                out.push(TensorSpec::new(names.model.in_layer(first, part, "weight"), shape, init));
            }
        }
        for (i, layer) in (first..).zip(&self.layers) {
            layer_tensors(self, layer, i, &mut out);
        }
        out.push(TensorSpec::new(self.final_norm(), &[self.hidden_size], norm_init(self)));
        if !self.tie_embeddings && self.encoder.is_none() {
            out.push(table(names.head));
        }
        out
    }

    /// Parameters from the shapes, tied tensors once; fixed tensors are none.
    pub fn parameter_count(&self) -> u64 {
        // Within `u64` for every accepted configuration: `MAX_PARAMETERS` is far below.
        u64::try_from(count_parameters(self)).unwrap_or(u64::MAX)
    }
}

/// The count in `u128`, safe before the limit is checked; equal layers are counted once and multiplied.
pub(crate) fn count_parameters(c: &ModelConfig) -> u128 {
    let elements = |list: &[TensorSpec]| {
        list.iter().filter(|t| !t.fixed).map(|t| u128::from(t.elements())).sum::<u128>()
    };
    let (kinds, of_layer) = c.layer_kinds();
    let mut total = 0;
    for (k, layer) in kinds.iter().enumerate() {
        let mut one = Vec::new();
        layer_tensors(c, layer, 0, &mut one);
        total += elements(&one) * of_layer.iter().filter(|&&x| x == k).count() as u128;
    }
    let outside = ModelConfig { layers: Vec::new(), ..c.clone() }.tensors();
    total + elements(&outside)
}

/// A fresh norm changes nothing: it multiplies by one.
fn norm_init(c: &ModelConfig) -> Init {
    if c.norm_offset { Init::Zeros } else { Init::Ones }
}

/// Tensors of layer `i` in the order they act.
fn layer_tensors(c: &ModelConfig, layer: &LayerSpec, i: usize, out: &mut Vec<TensorSpec>) {
    let names = c.names;
    let (h, q, kv) = (c.hidden_size, c.heads * c.head_dim, c.kv_heads * c.head_dim);
    let (draw, one) = (Init::Normal(c.initializer_range), norm_init(c));
    let output = match c.init_style {
        InitStyle::Normal => draw,
        InitStyle::ScaledOutputs => Init::Normal(c.initializer_range / (2.0 * c.num_layers as f64).sqrt()),
    };
    let mut push = |part: &str, suffix: &str, shape: &[usize], init| {
        out.push(TensorSpec::new(names.in_layer(i, part, suffix), shape, init));
    };
    let a = &layer.attention;
    let (before, after) = (layer.norms != NormPlacement::Post, layer.norms != NormPlacement::Pre);
    if before {
        push(names.input_norm, "weight", &[h], one);
    }
    if let Some(l) = &a.latent {
        latent_tensors(c, l, a.qkv_bias, &mut push);
    } else {
        let apart = [(names.q, q), (names.k, kv), (names.v, kv)];
        let fused = names.qkv.map(|name| [(name, q + 2 * kv)]);
        for &(part, rows) in fused.as_ref().map_or(&apart[..], |f| &f[..]) {
            push(part, "weight", &[rows, h], draw);
            if a.qkv_bias {
                push(part, "bias", &[rows], Init::Zeros);
            }
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
    let result = c.heads * a.value_dim(c.head_dim);
    if a.gate {
        push(names.gate, "weight", &[result, h], draw);
    }
    push(names.o, "weight", &[h, result], output);
    if a.o_bias {
        push(names.o, "bias", &[h], Init::Zeros);
    }
    if after {
        push(names.attention_out_norm, "weight", &[h], one);
    }
    if before {
        push(names.post_attention_norm, "weight", &[h], one);
    }
    if let Some(name) = names.sinks.filter(|_| a.sinks) {
        out.push(TensorSpec::new(in_layer(c, i, name), &[c.heads], draw));
    }
    match &layer.mlp {
        MlpSpec::Dense { intermediate, bias } => {
            dense_tensors(c, (*intermediate, *bias), i, [draw, output], out)
        }
        MlpSpec::Experts(e) => expert_tensors(c, e, i, [draw, output], out),
        MlpSpec::Stacked(e) => stacked_tensors(c, e, i, [draw, output], out),
    }
    if after {
        out.push(TensorSpec::new(names.in_layer(i, names.mlp_out_norm, "weight"), &[h], one));
    }
}

/// Projections of latent attention, but for the last, with biases on those that make latents.
fn latent_tensors(
    c: &ModelConfig,
    l: &LatentSpec,
    bias: bool,
    push: &mut impl FnMut(&str, &str, &[usize], Init),
) {
    let (names, h, draw, one) = (l.names, c.hidden_size, Init::Normal(c.initializer_range), norm_init(c));
    let queries = c.heads * l.width();
    let down = |part, rows| {
        let bias = bias.then_some((part, "bias", vec![rows], Init::Zeros));
        std::iter::once((part, "weight", vec![rows, h], draw)).chain(bias)
    };
    let mut list = Vec::new();
    match l.q_rank {
        None => list.push((names.q, "weight", vec![queries, h], draw)),
        Some(rank) => {
            list.extend(down(names.q_down, rank));
            list.push((names.q_norm, "weight", vec![rank], one));
            list.push((names.q_up, "weight", vec![queries, rank], draw));
        }
    }
    list.extend(down(names.kv_down, l.down()));
    list.push((names.kv_norm, "weight", vec![l.rank], one));
    list.push((names.kv_up, "weight", vec![c.kv_heads * l.up(), l.rank], draw));
    list.into_iter().for_each(|(part, suffix, shape, init)| push(part, suffix, &shape, init));
}

/// The MLP of layer `i`, of this width, with or without biases; down projections are drawn as the second of `init`.
fn dense_tensors(
    c: &ModelConfig,
    (inner, bias): (usize, bool),
    i: usize,
    init: [Init; 2],
    out: &mut Vec<TensorSpec>,
) {
    let (names, h) = (c.names, c.hidden_size);
    let mut push = |part: &str, suffix: &str, shape: &[usize], init| {
        out.push(TensorSpec::new(names.in_layer(i, part, suffix), shape, init));
    };
    let apart = [(names.mlp_gate, inner), (names.mlp_up, inner)];
    let fused = names.mlp_gate_up.map(|name| [(name, 2 * inner)]);
    let into = fused.as_ref().map_or(&apart[..], |f| &f[..]).iter();
    let mlp = into.map(|&(part, rows)| (part, rows, h, init[0])).chain([(names.mlp_down, h, inner, init[1])]);
    for (part, rows, columns, init) in mlp {
        push(part, "weight", &[rows, columns], init);
        if bias {
            push(part, "bias", &[rows], Init::Zeros);
        }
    }
}

/// Router, experts and shared experts of layer `i`; the first of `init` draws all but down projections.
fn expert_tensors(c: &ModelConfig, e: &ExpertsSpec, i: usize, init: [Init; 2], out: &mut Vec<TensorSpec>) {
    let (h, layer) = (c.hidden_size, c.names.prefix(i));
    let down = match c.init_style {
        InitStyle::Normal => init[1],
        // What a layer adds is a mean of the shared experts and one of the chosen.
        InitStyle::ScaledOutputs => {
            let shared = e.shared.map_or(1.0, |s| s.count as f64);
            let added = 2.0 * c.num_layers as f64 * (1.0 / shared + 1.0 / e.chosen as f64);
            Init::Normal(c.initializer_range / added.sqrt())
        }
    };
    let mut push = |name: String, shape: &[usize], init| {
        out.push(TensorSpec::new(format!("{layer}{name}"), shape, init));
    };
    push(format!("{}.weight", e.names.router), &[e.count, h], init[0]);
    let own = (0..e.count).map(|x| (x, [e.names.gate, e.names.up, e.names.down], e.intermediate));
    let shared = e.shared.into_iter().flat_map(|s| (0..s.count).map(move |x| (x, s.intermediate)));
    for (x, [gate, up, last], inner) in own.chain(shared.map(|(x, inner)| (x, e.names.shared, inner))) {
        push(e.names.of(gate, x), &[inner, h], init[0]);
        push(e.names.of(up, x), &[inner, h], init[0]);
        push(e.names.of(last, x), &[h, inner], down);
    }
    if e.correction {
        let name = format!("{layer}{}", e.names.correction);
        out.push(TensorSpec { fixed: true, ..TensorSpec::new(name, &[e.count], Init::Zeros) });
    }
}

/// Router and experts of layer `i` in one tensor each; down projections are drawn as the second of `init`.
fn stacked_tensors(
    c: &ModelConfig,
    e: &StackedExperts,
    i: usize,
    init: [Init; 2],
    out: &mut Vec<TensorSpec>,
) {
    let (n, h, inner) = (e.count, c.hidden_size, e.intermediate);
    let mut push = |name: &str, shape: &[usize], init| {
        out.push(TensorSpec::new(in_layer(c, i, name), shape, init));
    };
    push(e.names.router[0], &[n, h], init[0]);
    push(e.names.router[1], &[n], Init::Zeros);
    push(e.names.gate_up[0], &[n, h, 2 * inner], init[0]);
    push(e.names.gate_up[1], &[n, 2 * inner], Init::Zeros);
    push(e.names.down[0], &[n, inner, h], init[1]);
    push(e.names.down[1], &[n, h], Init::Zeros);
}

/// A name of layer `i` that stands whole.
fn in_layer(c: &ModelConfig, i: usize, name: &str) -> String {
    format!("{}{name}", c.names.prefix(i))
}
