//! Phi-3, Phi-3.5 and Phi-4: Llama with queries, keys and values in one tensor, gate and up in another, rope of a part of the
//! head, LongRoPE in models of long contexts, one window on all layers or none.
//! Source: `Phi3ForCausalLM` of transformers.

use super::decoder::{self, Defaults};
use crate::config::rope_keys::ROPE_KEYS;
use crate::config::{ConfigError, MAX_POSITIONS, ModelConfig, Raw};
use crate::registry::{ModelType, Names};
use serde_json::{Map, Value, json};

/// The registration.
pub static PHI3: ModelType = ModelType {
    name: "phi3",
    architectures: &["Phi3ForCausalLM"],
    description: "Phi-3, 3.5 and 4: fused projections, LongRoPE, sliding window on all layers or none",
    keys: &[decoder::KEYS, ROPE_KEYS, &["sliding_window"]],
    aliases: decoder::ALIASES,
    inert: &[],
    names: &NAMES,
    resolve,
    save,
};

static NAMES: Names =
    Names { qkv: Some("self_attn.qkv_proj"), mlp_gate_up: Some("mlp.gate_up_proj"), ..decoder::NAMES };

const DEFAULTS: Defaults = Defaults {
    kv_heads_all: true,
    max_positions: Some(4096),
    norm_eps: Some(1e-5),
    scalings: &["longrope", "su"],
    rotary: Some(1.0),
    original: Some(4096),
    ..decoder::DEFAULTS
};

fn resolve(raw: &Raw) -> Result<ModelConfig, ConfigError> {
    let mut c = decoder::plain(raw, &PHI3, &DEFAULTS)?;
    let window = raw.count_opt("sliding_window", MAX_POSITIONS)?;
    for layer in &mut c.layers {
        layer.attention.window = window;
    }
    Ok(c)
}

fn save(c: &ModelConfig) -> Map<String, Value> {
    let mut out = decoder::save(c);
    decoder::save_rotary(c, &mut out);
    out.insert("sliding_window".into(), json!(c.layers.iter().find_map(|l| l.attention.window)));
    out
}
