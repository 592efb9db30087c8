//! GLM 4 (0414): half of each head rotated by interleaved pairs, four norms a layer, biases on queries, keys and values, gate
//! and up in one tensor.
//! Source: `Glm4ForCausalLM` of transformers.

use super::decoder::{self, Defaults};
use crate::config::rope_keys::ROPE_KEYS;
use crate::config::{ConfigError, ModelConfig, NormPlace, Raw, RopeLayout};
use crate::registry::{ModelType, Names};
use serde_json::{Map, Value, json};

/// The registration.
pub static GLM4: ModelType = ModelType {
    name: "glm4",
    architectures: &["Glm4ForCausalLM"],
    description: "GLM 4 (0414): partial interleaved rope, norms before and after attention and MLP",
    keys: &[decoder::KEYS, ROPE_KEYS, &["attention_bias"]],
    aliases: decoder::ALIASES,
    inert: &[],
    names: &NAMES,
    resolve,
    save,
};

static NAMES: Names = Names { mlp_gate_up: Some("mlp.gate_up_proj"), ..decoder::NAMES };

const DEFAULTS: Defaults = Defaults {
    head_dim: Some(128),
    max_positions: Some(131_072),
    norm_eps: Some(1.5625e-7),
    layout: RopeLayout::Interleaved,
    rotary: Some(0.5),
    ..decoder::DEFAULTS
};

fn resolve(raw: &Raw) -> Result<ModelConfig, ConfigError> {
    let mut c = decoder::plain(raw, &GLM4, &DEFAULTS)?;
    let bias = raw.flag("attention_bias", true)?;
    for layer in &mut c.layers {
        layer.norms = NormPlace::Both;
        layer.attention.qkv_bias = bias;
    }
    Ok(c)
}

fn save(c: &ModelConfig) -> Map<String, Value> {
    let mut out = decoder::save(c);
    decoder::save_rotary(c, &mut out);
    out.insert("attention_bias".into(), json!(c.layers.iter().any(|l| l.attention.qkv_bias)));
    out
}
