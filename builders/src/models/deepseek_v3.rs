//! DeepSeek-V3 and R1: latent attention with a latent of the queries too, experts chosen by corrected sigmoid scores within the
//! best groups. The multi-token-prediction layer behind the last is left aside.
//! Source: `DeepseekV3ForCausalLM` of transformers.

use super::{decoder, deepseek, deepseek_moe, latent};
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
        deepseek_moe::KEYS,
        deepseek::KEYS,
        &["rope_interleave"],
    ],
    aliases: decoder::ALIASES,
    inert: INERT,
    names: &decoder::NAMES,
    resolve,
    save,
};

/// Keys of training, and of the layer that is left aside.
const INERT: &[&str] = &[
    "num_nextn_predict_layers",
    "aux_loss_alpha",
    "seq_aux",
    "ep_size",
    "output_router_logits",
    "router_aux_loss_coef",
];

fn resolve(raw: &Raw) -> Result<ModelConfig, ConfigError> {
    let layout = match raw.flag("rope_interleave", true)? {
        true => RopeLayout::Interleaved,
        false => RopeLayout::Half,
    };
    deepseek::resolve(raw, &DEEPSEEK_V3, layout, &deepseek_moe::V3)
}

fn save(c: &ModelConfig) -> Map<String, Value> {
    let mut out = deepseek::save(c, &deepseek_moe::V3);
    let layout = c.layers.first().map(|l| l.attention.rope.layout);
    out.insert("rope_interleave".into(), json!(layout != Some(RopeLayout::Half)));
    out
}
