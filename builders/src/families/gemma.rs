//! Gemma 2, and what Gemma 3 shares with it: norms by `1 + w` before and after attention and MLP, scaled embeddings, windows
//! on some layers, soft-capped scores and logits, a stated scale of the scores. In: raw keys and a family's row. Out: a
//! configuration; and back to keys. Source: `Gemma2ForCausalLM` of transformers.

use super::decoder::{self, DECODER};
use super::model_type::{AttentionBias, Defaults, ModelType};
use super::windows::Windows;
use crate::config::{Activation, ConfigError, MAX_WIDTH, ModelConfig, Names, NormPlacement, Raw};
use serde_json::{Map, Value, json};

/// Gemma 2: every other layer windowed, the first one too.
pub static GEMMA2: ModelType = ModelType {
    name: "gemma2",
    architectures: &["Gemma2ForCausalLM"],
    description: "Gemma 2: windows on every other layer, soft-capped scores and logits, norms by 1 + w",
    defaults: Defaults {
        max_positions: Some(8192),
        windows: Windows::Pattern(WINDOW, |i| i.is_multiple_of(2)),
        ..GEMMA.defaults
    },
    resolve: |raw, model| resolve(raw, model, Some(50.0), Some(30.0)),
    ..GEMMA
};

/// The row of Gemma 2 and 3 but for the context and the windows.
pub(super) const GEMMA: ModelType = ModelType {
    aliases: &[("dtype", "torch_dtype"), ("hidden_act", "hidden_activation")],
    names: &NAMES,
    defaults: Defaults {
        head_dim: Some(256),
        tie: true,
        activation: Activation::GeluTanh,
        norms: NormPlacement::Sandwich,
        bias: AttentionBias::AllKey(false),
        ..decoder::DEFAULTS
    },
    save,
    ..DECODER
};

pub(super) static NAMES: Names = Names {
    attention_out_norm: "post_attention_layernorm",
    post_attention_norm: "pre_feedforward_layernorm",
    mlp_out_norm: "post_feedforward_layernorm",
    ..decoder::NAMES
};

/// Window when the key is absent.
pub(super) const WINDOW: usize = 4096;

/// The configuration, with the soft-caps of scores and of logits that absent keys mean.
pub(super) fn resolve(
    raw: &Raw,
    model: &ModelType,
    scores_cap: Option<f64>,
    logits_cap: Option<f64>,
) -> Result<ModelConfig, ConfigError> {
    let mut c = decoder::plain(raw, model)?;
    // The reference reads `hidden_activation` only, so another `hidden_act` alone would have no effect there.
    let reference_spelling = raw.entries().any(|(key, v)| key == "hidden_activation" && !v.is_null());
    if !reference_spelling && c.activation != model.defaults.activation {
        let remedy = "this model type states its activation as hidden_activation";
        return Err(raw.refuse("hidden_act", "is not the default gelu_pytorch_tanh", remedy));
    }
    c.norm_offset = true;
    c.embed_scale = (c.hidden_size as f64).sqrt();
    c.logit_softcap = softcap(raw, "final_logit_softcapping", logits_cap)?;
    let scalar = raw.count_opt("query_pre_attn_scalar", MAX_WIDTH)?.unwrap_or(256);
    let cap = softcap(raw, "attn_logit_softcapping", scores_cap)?;
    for layer in &mut c.layers {
        layer.attention.scale = 1.0 / (scalar as f64).sqrt();
        layer.attention.softcap = cap;
    }
    Ok(c)
}

/// A cap above zero; `null` is none, absent the default.
fn softcap(raw: &Raw, key: &'static str, default: Option<f64>) -> Result<Option<f64>, ConfigError> {
    let stated = raw.real_where(key, |x| (1e-3..=1e6).contains(&x), "between 1e-3 and 1e6, or null")?;
    Ok(if raw.states(key) { stated } else { default })
}

/// The keys of [`resolve`] for saving.
pub(super) fn save(c: &ModelConfig, model: &ModelType) -> Map<String, Value> {
    let mut out = decoder::save(c, model);
    if let Some(activation) = out.shift_remove("hidden_act") {
        out.insert("hidden_activation".into(), activation);
    }
    let Some(attention) = c.layers.first().map(|l| &l.attention) else { return out };
    // The scalar is a whole number, up to which the quotient's rounding is far too small to matter.
    let scalar = (1.0 / (attention.scale * attention.scale)).round() as u64;
    out.insert("query_pre_attn_scalar".into(), json!(scalar));
    out.insert("attn_logit_softcapping".into(), json!(attention.softcap));
    out.insert("final_logit_softcapping".into(), json!(c.logit_softcap));
    out
}
