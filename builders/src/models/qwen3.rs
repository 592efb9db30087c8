//! Qwen3 (dense): heads of their own width, queries and keys normed per head before the rotation, no biases by default.
//! Source: `Qwen3ForCausalLM` of transformers.

use super::decoder::{self, Defaults};
use crate::config::rope_keys::ROPE_KEYS;
use crate::config::{ConfigError, ModelConfig, QkNorm, Raw, RopeLayout};
use crate::registry::ModelType;
use serde_json::{Map, Value, json};

/// The registration.
pub static QWEN3: ModelType = ModelType {
    name: "qwen3",
    architectures: &["Qwen3ForCausalLM"],
    description: "Qwen3 dense: GQA with its own head width, q and k normed before rope",
    keys: &[decoder::KEYS, ROPE_KEYS, decoder::WINDOW_KEYS, &["attention_bias"]],
    aliases: decoder::ALIASES,
    inert: &[],
    names: &decoder::NAMES,
    resolve,
    save,
};

const DEFAULTS: Defaults = Defaults {
    kv_heads_all: false,
    head_dim: Some(128),
    max_positions: Some(32_768),
    norm_eps: Some(1e-6),
    layout: RopeLayout::Half,
    scalings: decoder::SCALINGS,
    ..decoder::DEFAULTS
};

fn resolve(raw: &Raw) -> Result<ModelConfig, ConfigError> {
    let mut c = decoder::plain(raw, &QWEN3, &DEFAULTS)?;
    decoder::qwen_windows(raw, &mut c)?;
    let bias = raw.flag("attention_bias", false)?;
    for layer in &mut c.layers {
        layer.attention.qk_norm = QkNorm::BeforeRope;
        layer.attention.qkv_bias = bias;
        layer.attention.o_bias = bias;
    }
    Ok(c)
}

fn save(c: &ModelConfig) -> Map<String, Value> {
    let mut out = decoder::save(c);
    decoder::save_qwen_windows(c, &mut out);
    out.insert("attention_bias".into(), json!(c.layers.iter().any(|l| l.attention.qkv_bias)));
    out
}
