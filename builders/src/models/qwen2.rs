//! Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and windows on the upper layers if asked for.
//! Source: `Qwen2ForCausalLM` of transformers.

use super::decoder::{self, Defaults};
use crate::config::rope_keys::ROPE_KEYS;
use crate::config::{ConfigError, ModelConfig, Raw, RopeLayout};
use crate::registry::ModelType;
use serde_json::{Map, Value};

/// The registration.
pub static QWEN2: ModelType = ModelType {
    name: "qwen2",
    architectures: &["Qwen2ForCausalLM"],
    description: "Qwen2 and Qwen2.5: GQA with biases on q, k and v, optional windows on upper layers",
    keys: &[decoder::KEYS, ROPE_KEYS, decoder::WINDOW_KEYS],
    aliases: decoder::ALIASES,
    inert: &[],
    names: &decoder::NAMES,
    resolve,
    save,
};

const DEFAULTS: Defaults = Defaults {
    kv_heads_all: false,
    head_dim: None,
    max_positions: Some(32_768),
    norm_eps: Some(1e-6),
    layout: RopeLayout::Half,
    scalings: decoder::SCALINGS,
    ..decoder::DEFAULTS
};

fn resolve(raw: &Raw) -> Result<ModelConfig, ConfigError> {
    let mut c = decoder::plain(raw, &QWEN2, &DEFAULTS)?;
    decoder::qwen_windows(raw, &mut c)?;
    for layer in &mut c.layers {
        layer.attention.qkv_bias = true;
    }
    Ok(c)
}

fn save(c: &ModelConfig) -> Map<String, Value> {
    let mut out = decoder::save(c);
    decoder::save_qwen_windows(c, &mut out);
    out
}
