//! DeepSeek-V3 and R1: latent attention with a latent of the queries too, experts chosen by corrected sigmoid scores within the
//! best groups. The multi-token-prediction layer behind the last is left aside.
//! Source: `DeepseekV3ForCausalLM` of transformers.

use super::{decoder, deepseek, latent};
use crate::config::rope_keys::ROPE_KEYS;
use crate::config::{ConfigError, ModelConfig, Raw, RopeLayout};
use crate::registry::ModelType;
use serde_json::{Map, Value, json};

/// The registration.
pub static DEEPSEEK_V3: ModelType = ModelType {
    name: "deepseek_v3",
    architectures: &["DeepseekV3ForCausalLM"],
    description: "DeepSeek-V3, R1: latent attention, grouped choice of experts, shared experts",
    keys: &[
        decoder::KEYS,
        ROPE_KEYS,
        latent::KEYS,
        latent::SHARED_KEYS,
        deepseek::KEYS,
        &["rope_interleave"],
    ],
    aliases: decoder::ALIASES,
    inert: &["num_nextn_predict_layers"],
    names: &decoder::NAMES,
    resolve,
    save,
};

fn resolve(raw: &Raw) -> Result<ModelConfig, ConfigError> {
    let layout = match raw.flag("rope_interleave", true)? {
        true => RopeLayout::Interleaved,
        false => RopeLayout::Half,
    };
    deepseek::resolve(raw, &DEEPSEEK_V3, layout)
}

fn save(c: &ModelConfig) -> Map<String, Value> {
    let mut out = deepseek::save(c);
    let layout = c.layers.first().map(|l| l.attention.rope.layout);
    out.insert("rope_interleave".into(), json!(layout != Some(RopeLayout::Half)));
    out
}
