//! OLMo 2: norms behind attention and MLP in place of before them, queries and keys normed over all heads together.
//! Source: `Olmo2ForCausalLM` of transformers.

use super::decoder::{self, Defaults};
use crate::config::rope_keys::ROPE_KEYS;
use crate::config::{ConfigError, ModelConfig, NormPlace, QkNorm, Raw};
use crate::registry::{ModelType, Names};
use serde_json::{Map, Value, json};

/// The registration.
pub static OLMO2: ModelType = ModelType {
    name: "olmo2",
    architectures: &["Olmo2ForCausalLM"],
    description: "OLMo 2: norms after attention and MLP, q and k normed over all heads",
    keys: &[decoder::KEYS, ROPE_KEYS, &["attention_bias"]],
    aliases: decoder::ALIASES,
    inert: &[],
    names: &NAMES,
    resolve,
    save,
};

static NAMES: Names = Names {
    attention_out_norm: "post_attention_layernorm",
    mlp_out_norm: "post_feedforward_layernorm",
    ..decoder::NAMES
};

const DEFAULTS: Defaults =
    Defaults { kv_heads_all: true, max_positions: Some(2048), norm_eps: Some(1e-5), ..decoder::DEFAULTS };

fn resolve(raw: &Raw) -> Result<ModelConfig, ConfigError> {
    let mut c = decoder::plain(raw, &OLMO2, &DEFAULTS)?;
    let bias = raw.flag("attention_bias", false)?;
    for layer in &mut c.layers {
        layer.norms = NormPlace::After;
        layer.attention.qk_norm = QkNorm::WholeBeforeRope;
        layer.attention.qkv_bias = bias;
        layer.attention.o_bias = bias;
    }
    Ok(c)
}

fn save(c: &ModelConfig) -> Map<String, Value> {
    let mut out = decoder::save(c);
    out.insert("attention_bias".into(), json!(c.layers.iter().any(|l| l.attention.qkv_bias)));
    out
}
