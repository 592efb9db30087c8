//! DeepSeek-V2 and V2-Lite: latent attention, rope by interleaved pairs, experts chosen by softmax, all or those of the best
//! groups. Source: `DeepseekV2ForCausalLM` of transformers.

use super::{decoder, deepseek, experts, latent};
use crate::config::rope_keys::ROPE_KEYS;
use crate::config::{ConfigError, ModelConfig, Raw, RopeLayout};
use crate::registry::ModelType;
use astrai_ir::ops::GroupScore;
use serde_json::{Map, Value, json};

/// The registration.
pub static DEEPSEEK_V2: ModelType = ModelType {
    name: "deepseek_v2",
    architectures: &["DeepseekV2ForCausalLM"],
    description: "DeepSeek-V2, V2-Lite, Coder-V2: latent attention, experts beside shared ones",
    keys: &[decoder::KEYS, ROPE_KEYS, latent::KEYS, latent::SHARED_KEYS, deepseek::KEYS],
    aliases: decoder::ALIASES,
    inert: deepseek::INERT,
    names: &decoder::NAMES,
    resolve,
    save,
};

fn resolve(raw: &Raw) -> Result<ModelConfig, ConfigError> {
    let mut c = deepseek::resolve(raw, &DEEPSEEK_V2, RopeLayout::Interleaved)?;
    deepseek::only(raw, "topk_method", &["greedy", LIMITED])?;
    deepseek::only(raw, "scoring_func", &["softmax"])?;
    let limited = raw.text("topk_method")? == Some(LIMITED);
    let mut spec = deepseek::experts(raw, &c, limited.then_some(GroupScore::Best))?;
    if raw.flag("norm_topk_prob", false)? {
        let problem = "is true, of which references make different weights";
        return Err(raw.refuse("norm_topk_prob", problem, "published models have false"));
    }
    spec.normalise = false;
    deepseek::put_experts(raw, &spec, &mut c)?;
    Ok(c)
}

/// The choice within the best groups.
const LIMITED: &str = "group_limited_greedy";

fn save(c: &ModelConfig) -> Map<String, Value> {
    let mut out = deepseek::save(c);
    let limited = experts::of(c).is_some_and(|e| e.groups.is_some());
    out.insert("topk_method".into(), json!(if limited { LIMITED } else { "greedy" }));
    out
}
