//! DeepSeek-V2 and V2-Lite: latent attention, rope by interleaved pairs, experts chosen by softmax, all or those of the best
//! groups. Source: `DeepseekV2ForCausalLM` of transformers.

use super::{decoder, deepseek, deepseek_moe, latent};
use crate::config::rope_keys::ROPE_KEYS;
use crate::config::{ConfigError, ModelConfig, Raw, RopeLayout};
use crate::registry::ModelType;
use serde_json::{Map, Value};

/// The registration.
pub static DEEPSEEK_V2: ModelType = ModelType {
    name: "deepseek_v2",
    architectures: &["DeepseekV2ForCausalLM"],
    description: "DeepSeek-V2, V2-Lite, Coder-V2: latent attention, experts beside shared ones",
    keys: &[decoder::KEYS, ROPE_KEYS, latent::KEYS, latent::SHARED_KEYS, deepseek_moe::KEYS, deepseek::KEYS],
    aliases: decoder::ALIASES,
    inert: deepseek_moe::INERT,
    names: &decoder::NAMES,
    resolve,
    save,
};

fn resolve(raw: &Raw) -> Result<ModelConfig, ConfigError> {
    deepseek::resolve(raw, &DEEPSEEK_V2, RopeLayout::Interleaved, &deepseek_moe::V2)
}

fn save(c: &ModelConfig) -> Map<String, Value> {
    deepseek::save(c, &deepseek_moe::V2)
}
