//! Llama and its many namesakes: pre-norm decoder, grouped-query attention, rope by halves, SwiGLU.
//! Source: `LlamaForCausalLM` of transformers.

use super::decoder::{self, Defaults};
use crate::config::rope_keys::ROPE_KEYS;
use crate::config::{ConfigError, MlpSpec, ModelConfig, Raw, RopeLayout};
use crate::registry::ModelType;
use serde_json::{Map, Value, json};

/// The registration.
pub static LLAMA: ModelType = ModelType {
    name: "llama",
    architectures: &["LlamaForCausalLM"],
    description: "Llama 1 to 3.x and models of the same shape: GQA, optional biases, rope scaling",
    keys: &[decoder::KEYS, ROPE_KEYS, &["attention_bias", "mlp_bias"]],
    aliases: decoder::ALIASES,
    inert: &[],
    names: &decoder::NAMES,
    resolve,
    save,
};

const DEFAULTS: Defaults = Defaults {
    kv_heads_all: true,
    head_dim: None,
    max_positions: Some(2048),
    norm_eps: Some(1e-6),
    layout: RopeLayout::Half,
    scalings: decoder::SCALINGS,
    ..decoder::DEFAULTS
};

fn resolve(raw: &Raw) -> Result<ModelConfig, ConfigError> {
    let mut c = decoder::plain(raw, &LLAMA, &DEFAULTS)?;
    let (attention, mlp) = (raw.flag("attention_bias", false)?, raw.flag("mlp_bias", false)?);
    for layer in &mut c.layers {
        layer.attention.qkv_bias = attention;
        layer.attention.o_bias = attention;
        layer.mlp = MlpSpec::Dense { intermediate: c.intermediate_size, bias: mlp };
    }
    Ok(c)
}

fn save(c: &ModelConfig) -> Map<String, Value> {
    let mut out = decoder::save(c);
    out.insert("attention_bias".into(), json!(c.layers.iter().any(|l| l.attention.qkv_bias)));
    out.insert(
        "mlp_bias".into(),
        json!(c.layers.iter().any(|l| matches!(l.mlp, MlpSpec::Dense { bias: true, .. }))),
    );
    out
}
