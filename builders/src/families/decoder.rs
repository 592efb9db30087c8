//! What the decoder families share. In: raw keys and a family's row. Out: a configuration for the family to adjust where its
//! row does not say all; names and saved keys of transformers.

use super::model_type::{AttentionBias, Defaults, ModelType};
use super::windows::Windows;
use crate::config::rope_keys;
use crate::config::{
    Activation, AttentionSpec, ConfigError, InitStyle, LayerSpec, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS,
    MAX_POSITIONS, MAX_VOCAB, MAX_WIDTH, MlpSpec, ModelConfig, Names, NormPlacement, QkNorm, Raw, RopeLayout,
};
use astrai_ir::DType;
use serde_json::{Map, Value, json};

/// The two spellings of the element type.
pub(super) const ALIASES: &[(&str, &str)] = &[("dtype", "torch_dtype")];

/// Weight names that most decoders of transformers share.
pub(super) static NAMES: Names = Names {
    embed: "model.embed_tokens.weight",
    layer: "model.layers.{i}.",
    input_norm: "input_layernorm",
    q: "self_attn.q_proj",
    k: "self_attn.k_proj",
    v: "self_attn.v_proj",
    qkv: None,
    q_norm: "self_attn.q_norm",
    k_norm: "self_attn.k_norm",
    gate: "self_attn.gate_proj",
    sinks: None,
    o: "self_attn.o_proj",
    attention_out_norm: "post_self_attn_layernorm",
    post_attention_norm: "post_attention_layernorm",
    mlp_gate: "mlp.gate_proj",
    mlp_up: "mlp.up_proj",
    mlp_gate_up: None,
    mlp_down: "mlp.down_proj",
    mlp_out_norm: "post_mlp_layernorm",
    final_norm: "model.norm.weight",
    head: "lm_head.weight",
    ignored_prefixes: &[],
};

/// The row of a family from which the others differ.
pub(super) const DECODER: ModelType = ModelType {
    name: "",
    architectures: &[],
    description: "",
    aliases: ALIASES,
    inert: &[],
    names: &NAMES,
    defaults: DEFAULTS,
    resolve: plain,
    save,
};

/// What most families do when a key is absent.
pub(super) const DEFAULTS: Defaults = Defaults {
    kv_heads_all: false,
    head_dim: None,
    max_positions: None,
    norm_eps: Some(1e-6),
    layout: RopeLayout::Half,
    scalings: &["linear", "llama3", "yarn"],
    rotary: None,
    original: None,
    layer_type: None,
    tie: false,
    activation: Activation::Silu,
    norms: NormPlacement::Pre,
    qk_norm: QkNorm::None,
    bias: AttentionBias::None,
    mlp_bias: false,
    windows: Windows::None,
};

/// The configuration that the row of `model` alone describes.
pub(super) fn plain(raw: &Raw, model: &ModelType) -> Result<ModelConfig, ConfigError> {
    let hidden_size = raw.count("hidden_size", MAX_WIDTH)?;
    let (heads, kv_heads, head_dim) = heads(raw, hidden_size, &model.defaults)?;
    plain_of_heads(raw, model, [heads, kv_heads, head_dim, head_dim])
}

/// As [`plain`], with query heads, key-value heads, the width of a head and the components of it that rope may rotate known.
pub(super) fn plain_of_heads(
    raw: &Raw,
    model: &ModelType,
    [heads, kv_heads, head_dim, rope_dim]: [usize; 4],
) -> Result<ModelConfig, ConfigError> {
    let d = &model.defaults;
    let vocab_size = raw.count("vocab_size", MAX_VOCAB)?;
    let hidden_size = raw.count("hidden_size", MAX_WIDTH)?;
    let num_layers = raw.count("num_hidden_layers", MAX_LAYERS)?;
    let intermediate_size = raw.count("intermediate_size", MAX_WIDTH)?;
    let max_positions = raw.count_opt("max_position_embeddings", MAX_POSITIONS)?.or(d.max_positions);
    let max_positions = max_positions.ok_or_else(|| raw.missing("max_position_embeddings"))?;
    let norm_eps =
        raw.real_where("rms_norm_eps", |x| x > 0.0 && x < 1.0, "above 0 and below 1")?.or(d.norm_eps);
    let range = raw.real_where("initializer_range", |x| (0.0..=1e3).contains(&x), "between 0 and 1000")?;
    let (qkv_bias, o_bias) = d.bias.read(raw)?;
    let layer = LayerSpec {
        attention: AttentionSpec {
            qkv_bias,
            o_bias,
            qk_norm: d.qk_norm,
            gate: false,
            window: None,
            scale: 1.0 / (head_dim as f64).sqrt(),
            softcap: None,
            rope: rope_keys::read(raw, rope_dim, max_positions, &d.rope())?,
            latent: None,
            sinks: false,
        },
        mlp: MlpSpec::Dense {
            intermediate: intermediate_size,
            bias: d.mlp_bias && raw.flag("mlp_bias", false)?,
        },
        norms: d.norms,
    };
    let mut c = ModelConfig {
        model_type: model.name,
        names: model.names,
        vocab_size,
        hidden_size,
        num_layers,
        heads,
        kv_heads,
        head_dim,
        intermediate_size,
        max_positions,
        norm_eps: norm_eps.ok_or_else(|| raw.missing("rms_norm_eps"))?,
        norm_offset: false,
        embed_scale: 1.0,
        logit_softcap: None,
        tie_embeddings: raw.flag("tie_word_embeddings", d.tie)?,
        activation: raw.named("hidden_act", &ACTIVATIONS)?.unwrap_or(d.activation),
        dtype: dtype(raw)?,
        initializer_range: range.unwrap_or(0.02),
        init_style: InitStyle::Normal,
        bos: token(raw, "bos_token_id", vocab_size)?,
        eos: raw.token_ids("eos_token_id", vocab_size)?,
        pad: token(raw, "pad_token_id", vocab_size)?,
        layers: vec![layer; num_layers],
        narrow: None,
        packed: None,
        pages: None,
        adapters: None,
        encoder: None,
        mtp: None,
        hidden: None,
    };
    d.windows.read(raw, &mut c)?;
    Ok(c)
}

/// Query heads, key-value heads, width of a head.
pub(super) fn heads(
    raw: &Raw,
    hidden_size: usize,
    d: &Defaults,
) -> Result<(usize, usize, usize), ConfigError> {
    let heads = raw.count("num_attention_heads", MAX_HEADS)?;
    let key = "num_key_value_heads";
    let kv_heads = match raw.count_opt(key, MAX_HEADS)? {
        Some(n) => n,
        None if d.kv_heads_all || raw.states(key) => heads,
        None => return Err(raw.refuse(key, "is missing", format!("add it; null means all {heads} heads"))),
    };
    if !heads.is_multiple_of(kv_heads) {
        let problem = format!("is {kv_heads}, which does not divide the {heads} heads");
        return Err(raw.refuse(raw.spelled(key), problem, "each key-value head serves as many query heads"));
    }
    let head_dim = match raw.count_opt("head_dim", MAX_HEAD_DIM)?.or(d.head_dim) {
        Some(n) => n,
        None if hidden_size.is_multiple_of(heads) => hidden_size / heads,
        None => {
            let problem = format!("is {hidden_size}, not a multiple of the {heads} heads");
            return Err(raw.refuse(raw.spelled("hidden_size"), problem, "correct it, or state head_dim"));
        }
    };
    if !head_dim.is_multiple_of(2) || head_dim > MAX_HEAD_DIM {
        let key = if raw.states("head_dim") { "head_dim" } else { raw.spelled("hidden_size") };
        let remedy = format!("rope turns pairs, so heads have an even width of at most {MAX_HEAD_DIM}");
        return Err(raw.refuse(key, format!("makes heads of width {head_dim}"), remedy));
    }
    Ok((heads, kv_heads, head_dim))
}

/// Names that transformers gives to activations; of several the first is written.
const ACTIVATIONS: [(&str, Activation); 5] = [
    ("silu", Activation::Silu),
    ("swish", Activation::Silu),
    ("gelu", Activation::Gelu),
    ("gelu_pytorch_tanh", Activation::GeluTanh),
    ("gelu_new", Activation::GeluTanh),
];

/// Names that transformers gives to element types.
const DTYPES: [(&str, DType); 5] = [
    ("float32", DType::F32),
    ("float16", DType::F16),
    ("bfloat16", DType::BF16),
    ("float8_e4m3fn", DType::F8E4M3),
    ("float8_e5m2", DType::F8E5M2),
];

fn dtype(raw: &Raw) -> Result<Option<DType>, ConfigError> {
    let Some(name) = raw.text("dtype")? else { return Ok(None) };
    let bare = name.strip_prefix("torch.").unwrap_or(name);
    match DTYPES.iter().find(|(n, _)| *n == bare) {
        Some((_, dtype)) => Ok(Some(*dtype)),
        None if bare == "auto" => Ok(None),
        None => {
            let remedy = format!("supported: {}", DTYPES.map(|(n, _)| n).join(", "));
            Err(raw.refuse(raw.spelled("dtype"), format!("is {}", json!(name)), remedy))
        }
    }
}

/// The first name of a value in a table.
pub(super) fn name_of<T: PartialEq>(table: &[(&'static str, T)], value: T) -> Option<&'static str> {
    table.iter().find(|(_, x)| *x == value).map(|(name, _)| *name)
}

fn token(raw: &Raw, key: &'static str, vocab: usize) -> Result<Option<u32>, ConfigError> {
    let ids = raw.token_ids(key, vocab)?;
    if ids.len() > 1 {
        return Err(raw.refuse(key, format!("lists {} tokens", ids.len()), "state one"));
    }
    Ok(ids.first().copied())
}

/// The shared keys in transformers' spelling. Absent tokens are written as `null`, for some families default to ids.
pub(super) fn save(c: &ModelConfig, model: &ModelType) -> Map<String, Value> {
    let mut out = Map::new();
    let mut put = |key: &str, value: Value| out.insert(key.to_owned(), value);
    put("architectures", json!([model.architectures.first()]));
    put("model_type", json!(model.name));
    put("vocab_size", json!(c.vocab_size));
    put("hidden_size", json!(c.hidden_size));
    put("num_hidden_layers", json!(c.num_layers));
    put("num_attention_heads", json!(c.heads));
    put("num_key_value_heads", json!(c.kv_heads));
    put("head_dim", json!(c.head_dim));
    put("intermediate_size", json!(c.intermediate_size));
    put("max_position_embeddings", json!(c.max_positions));
    put("rms_norm_eps", json!(c.norm_eps));
    put("tie_word_embeddings", json!(c.tie_embeddings));
    put("hidden_act", json!(name_of(&ACTIVATIONS, c.activation)));
    put("initializer_range", json!(c.initializer_range));
    if let Some(dtype) = c.dtype {
        put("torch_dtype", json!(name_of(&DTYPES, dtype).unwrap_or("float32")));
    }
    put("bos_token_id", json!(c.bos));
    put("eos_token_id", eos(c));
    put("pad_token_id", json!(c.pad));
    if let Some(layer) = c.layers.first() {
        rope_keys::write(&layer.attention.rope, &mut out);
    }
    let d = &model.defaults;
    for key in d.bias.keys() {
        out.insert((*key).into(), json!(c.layers.iter().any(|l| l.attention.qkv_bias)));
    }
    if d.mlp_bias {
        let bias = |l: &LayerSpec| matches!(l.mlp, MlpSpec::Dense { bias: true, .. });
        out.insert("mlp_bias".into(), json!(c.layers.iter().any(bias)));
    }
    if let (Some(_), Some(layer)) = (d.rotary, c.layers.first()) {
        let share = rope_keys::share_of(layer.attention.rope.dim, c.head_dim);
        out.insert("partial_rotary_factor".into(), json!(share));
    }
    d.windows.save(c, &mut out);
    out
}

/// None, one id, or a list.
fn eos(c: &ModelConfig) -> Value {
    match c.eos.as_slice() {
        [] => Value::Null,
        [one] => json!(one),
        list => json!(list),
    }
}
