//! What Gemma 2 and 3 share: norms by `1 + w` before and after attention and MLP, scaled embeddings, windows on some layers,
//! soft-caps, a scale of the scores of its own. In: raw keys and a family's defaults. Out: a configuration; and back to keys.

use super::decoder::{self, Defaults};
use crate::config::{Activation, ConfigError, MAX_POSITIONS, MAX_WIDTH, ModelConfig, NormPlace, Raw};
use crate::registry::{ModelType, Names};
use serde_json::{Map, Value, json};

/// Keys that [`resolve`] reads, apart from the decoder's and the rope's.
pub(super) const KEYS: &[&str] = &[
    "attention_bias",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "layer_types",
    "query_pre_attn_scalar",
    "sliding_window",
];

/// The activation's own spelling, and that of the element type.
pub(super) const ALIASES: &[(&str, &str)] = &[("dtype", "torch_dtype"), ("hidden_act", "hidden_activation")];

pub(super) static NAMES: Names = Names {
    attention_out_norm: "post_attention_layernorm",
    post_attention_norm: "pre_feedforward_layernorm",
    mlp_out_norm: "post_feedforward_layernorm",
    ..decoder::NAMES
};

/// Defaults of both; the context is the family's.
pub(super) const DEFAULTS: Defaults = Defaults {
    head_dim: Some(256),
    norm_eps: Some(1e-6),
    tie: true,
    activation: Activation::GeluTanh,
    ..decoder::DEFAULTS
};

/// What differs between the two when a key is absent.
pub(super) struct Own {
    /// Every so manieth layer is not windowed.
    pub pattern: usize,
    /// Soft-cap of the scores.
    pub softcap: Option<f64>,
    /// Soft-cap of the logits.
    pub logit_softcap: Option<f64>,
}

/// Window when the key is absent.
const WINDOW: usize = 4096;

/// The shared keys resolved.
pub(super) fn resolve(
    raw: &Raw,
    model: &'static ModelType,
    defaults: &Defaults,
    own: &Own,
) -> Result<ModelConfig, ConfigError> {
    let mut c = decoder::plain(raw, model, defaults)?;
    // The reference reads `hidden_activation` only, so another `hidden_act` alone would have no effect there.
    let own_spelling = raw.entries().any(|(key, v)| key == "hidden_activation" && !v.is_null());
    if !own_spelling && c.activation != defaults.activation {
        let remedy = "this model type states its activation as hidden_activation";
        return Err(raw.refuse("hidden_act", "is not the default gelu_pytorch_tanh", remedy));
    }
    c.norm_offset = true;
    c.embed_scale = (c.hidden_size as f64).sqrt();
    c.logit_softcap = softcap(raw, "final_logit_softcapping", own.logit_softcap)?;
    let bias = raw.flag("attention_bias", false)?;
    let scalar = raw.count_opt("query_pre_attn_scalar", MAX_WIDTH)?.unwrap_or(256);
    let cap = softcap(raw, "attn_logit_softcapping", own.softcap)?;
    for layer in &mut c.layers {
        layer.norms = NormPlace::Both;
        layer.attention.qkv_bias = bias;
        layer.attention.o_bias = bias;
        layer.attention.scale = 1.0 / (scalar as f64).sqrt();
        layer.attention.softcap = cap;
    }
    windows(raw, &mut c, own.pattern)?;
    Ok(c)
}

/// A cap above zero; `null` is none, absent the default.
fn softcap(raw: &Raw, key: &'static str, default: Option<f64>) -> Result<Option<f64>, ConfigError> {
    let stated = raw.real_where(key, |x| (1e-3..=1e6).contains(&x), "between 1e-3 and 1e6, or null")?;
    Ok(if raw.states(key) { stated } else { default })
}

/// Windows on the layers that `layer_types` lists, else on all but every `pattern`th.
fn windows(raw: &Raw, c: &mut ModelConfig, pattern: usize) -> Result<(), ConfigError> {
    let window = match raw.count_opt("sliding_window", MAX_POSITIONS)? {
        None if !raw.states("sliding_window") => Some(WINDOW),
        stated => stated,
    };
    let types = decoder::layer_types(raw, c.num_layers)?;
    for (i, layer) in c.layers.iter_mut().enumerate() {
        let windowed = types.as_ref().map_or(!(i + 1).is_multiple_of(pattern), |t| t[i]);
        if windowed && window.is_none() {
            let problem = "is null while there are sliding layers";
            return Err(raw.refuse("sliding_window", problem, "state it, or list layer_types without them"));
        }
        layer.attention.window = window.filter(|_| windowed);
    }
    Ok(())
}

/// The keys of [`resolve`] for saving.
pub(super) fn save(c: &ModelConfig) -> Map<String, Value> {
    let mut out = decoder::save(c);
    if let Some(activation) = out.shift_remove("hidden_act") {
        out.insert("hidden_activation".into(), activation);
    }
    let Some(attention) = c.layers.first().map(|l| &l.attention) else { return out };
    out.insert("attention_bias".into(), json!(attention.qkv_bias));
    // The scalar is a whole number, up to which the quotient's rounding is far too small to matter.
    let scalar = (1.0 / (attention.scale * attention.scale)).round() as u64;
    out.insert("query_pre_attn_scalar".into(), json!(scalar));
    out.insert("attn_logit_softcapping".into(), json!(attention.softcap));
    out.insert("final_logit_softcapping".into(), json!(c.logit_softcap));
    let windows = || c.layers.iter().map(|l| l.attention.window);
    out.insert("sliding_window".into(), json!(windows().flatten().next().unwrap_or(WINDOW)));
    let name = |w: Option<usize>| if w.is_some() { "sliding_attention" } else { "full_attention" };
    out.insert("layer_types".into(), windows().map(name).collect());
    out
}
