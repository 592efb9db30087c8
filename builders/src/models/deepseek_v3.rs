//! DeepSeek-V3 and R1: latent attention with a latent of the queries too, experts chosen by corrected sigmoid scores within the
//! best groups. The multi-token-prediction layer behind the last is left aside.
//! Source: `DeepseekV3ForCausalLM` of transformers.

use super::{decoder, deepseek, latent};
use crate::config::rope_keys::ROPE_KEYS;
use crate::config::{ConfigError, ModelConfig, Raw, RopeLayout};
use crate::registry::ModelType;
use astrai_ir::ops::{GroupScore, Scores};
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
    inert: deepseek::INERT,
    names: &decoder::NAMES,
    resolve,
    save,
};

fn resolve(raw: &Raw) -> Result<ModelConfig, ConfigError> {
    let layout = match raw.flag("rope_interleave", true)? {
        true => RopeLayout::Interleaved,
        false => RopeLayout::Half,
    };
    let mut c = deepseek::resolve(raw, &DEEPSEEK_V3, layout)?;
    deepseek::only(raw, "topk_method", &["noaux_tc"])?;
    deepseek::only(raw, "scoring_func", &["sigmoid"])?;
    let mut spec = deepseek::experts(raw, &c, Some(GroupScore::BestTwo))?;
    (spec.scores, spec.correction) = (Scores::Sigmoid, true);
    spec.normalise = raw.flag("norm_topk_prob", true)?;
    deepseek::put_experts(raw, &spec, &mut c)?;
    Ok(c)
}

fn save(c: &ModelConfig) -> Map<String, Value> {
    let mut out = deepseek::save(c);
    let layout = c.layers.first().map(|l| l.attention.rope.layout);
    out.insert("topk_method".into(), json!("noaux_tc"));
    out.insert("scoring_func".into(), json!("sigmoid"));
    out.insert("rope_interleave".into(), json!(layout != Some(RopeLayout::Half)));
    out
}
