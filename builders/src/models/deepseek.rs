//! What DeepSeek-V2 and V3 share: latent attention whose rotated part all heads share, dense layers first, then experts beside
//! shared ones. With yarn, the scores' scale is that of the stretched context too.

use super::decoder::{self, Defaults};
use super::deepseek_moe::{self, Version};
use super::latent;
use crate::config::{
    ConfigError, MAX_HEAD_DIM, MAX_HEADS, ModelConfig, Raw, RopeLayout, RopeScaling, yarn_mscale,
};
use crate::registry::ModelType;
use serde_json::{Map, Value, json};

/// Keys of both that no other family has.
pub(super) const KEYS: &[&str] = &["attention_bias"];

/// Epsilon of the norms of the latents, whatever the others have.
const LATENT_EPS: f64 = 1e-6;

const DEFAULTS: Defaults = Defaults { norm_eps: Some(1e-6), max_positions: Some(4096), ..decoder::DEFAULTS };

/// A model of this version.
pub(super) fn resolve(
    raw: &Raw,
    model: &'static ModelType,
    layout: RopeLayout,
    version: &Version,
) -> Result<ModelConfig, ConfigError> {
    let heads = raw.count("num_attention_heads", MAX_HEADS)?;
    let key = "num_key_value_heads";
    if let Some(n) = raw.count_opt(key, MAX_HEADS)?.filter(|n| *n != heads) {
        let problem = format!("is {n}, with {heads} heads of queries");
        return Err(raw.refuse(key, problem, "a latent makes keys and values for every head; leave it out"));
    }
    // Where files have it, it is the width that rope sees.
    raw.count_opt("head_dim", MAX_HEAD_DIM)?;
    let latent = latent::read_shared(raw, LATENT_EPS)?;
    let sizes = [heads, heads, latent.width(), latent.rope];
    let mut c = decoder::plain_of_heads(raw, model, &Defaults { layout, ..DEFAULTS }, sizes)?;
    let bias = raw.flag("attention_bias", false)?;
    for layer in &mut c.layers {
        let a = &mut layer.attention;
        if let RopeScaling::Yarn(y) = &a.rope.scaling {
            a.scale *= y.mscale_all_dim.map_or(1.0, |all| yarn_mscale(y.factor, all).powi(2));
        }
        (a.qkv_bias, a.o_bias) = (bias, bias);
        a.latent = Some(latent.clone());
    }
    deepseek_moe::put(raw, version, &mut c)?;
    Ok(c)
}

/// The keys of both.
pub(super) fn save(c: &ModelConfig, version: &Version) -> Map<String, Value> {
    let mut out = decoder::save(c);
    latent::save(c, &mut out);
    deepseek_moe::save(version, c, &mut out);
    out.insert("attention_bias".into(), json!(c.layers.iter().any(|l| l.attention.o_bias)));
    out
}
