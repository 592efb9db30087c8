//! DeepSeek-V2 and V3: latent attention whose rotated part all heads share, dense layers first, then experts beside shared ones.
//! With yarn, the scores' scale is that of the extended context too. Of V3's modules of multi-token prediction the first is built.
//! Sources: `DeepseekV2ForCausalLM` and `DeepseekV3ForCausalLM` of transformers.

use super::decoder::{self, DECODER};
use super::deepseek_moe::{self, V2, V3, Version};
use super::latent;
use super::model_type::{AttentionBias, Defaults, ModelType};
use crate::config::{
    ConfigError, LayerSpec, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MlpSpec, ModelConfig, MtpNames, MtpSpec,
    Names, Raw, RopeLayout, RopeScaling, yarn_mscale,
};
use serde_json::{Map, Value, json};

/// V2 and V2-Lite: experts chosen by softmax, all or those of the best groups.
pub static DEEPSEEK_V2: ModelType = ModelType {
    name: "deepseek_v2",
    architectures: &["DeepseekV2ForCausalLM"],
    description: "DeepSeek-V2, V2-Lite, Coder-V2: latent attention, experts beside shared ones",
    ..DEEPSEEK
};

/// V3 and R1: a latent of the queries too, experts chosen by corrected sigmoid scores within the best groups.
pub static DEEPSEEK_V3: ModelType = ModelType {
    name: "deepseek_v3",
    architectures: &["DeepseekV3ForCausalLM"],
    description: "DeepSeek-V3, R1: latent attention, grouped choice of experts, shared experts",
    inert: &[
        "aux_loss_alpha",
        "seq_aux",
        "ep_size",
        "output_router_logits",
        "router_aux_loss_coef",
    ],
    resolve: |raw, model| {
        let mut c = resolve(raw, model, &V3)?;
        if !raw.flag("rope_interleave", true)? {
            c.layers.iter_mut().for_each(|l| l.attention.rope.layout = RopeLayout::Half);
        }
        c.mtp = mtp(raw, &c)?;
        Ok(c)
    },
    save: |c, model| {
        let mut out = save(c, model, &V3);
        let layout = c.layers.first().map(|l| l.attention.rope.layout);
        out.insert("rope_interleave".into(), json!(layout != Some(RopeLayout::Half)));
        if c.mtp.is_some() {
            out.insert(MODULES.into(), json!(1));
        }
        out
    },
    ..DEEPSEEK
};

/// The row of V2, and of V3 where that says nothing else.
const DEEPSEEK: ModelType = ModelType {
    inert: deepseek_moe::INERT,
    defaults: Defaults {
        max_positions: Some(4096),
        layout: RopeLayout::Interleaved,
        bias: AttentionBias::AllKey(false),
        ..decoder::DEFAULTS
    },
    resolve: |raw, model| resolve(raw, model, &V2),
    save: |c, model| save(c, model, &V2),
    ..DECODER
};

/// The key of modules of multi-token prediction.
const MODULES: &str = "num_nextn_predict_layers";

/// Names of a module's weights; the checkpoint repeats embedding and head, which are the model's.
static MTP: MtpNames = MtpNames {
    model: Names { final_norm: "model.layers.{i}.shared_head.norm.weight", ..decoder::NAMES },
    token_norm: "enorm",
    hidden_norm: "hnorm",
    join: "eh_proj",
};

/// The first module of a model of version 3: a layer behind the others, dense or not as one of its number is.
fn mtp(raw: &Raw, c: &ModelConfig) -> Result<Option<Box<MtpSpec>>, ConfigError> {
    let modules = raw.count_or_none(MODULES, MAX_LAYERS)?.unwrap_or(0);
    let Some(last) = c.layers.last().filter(|_| modules > 0) else { return Ok(None) };
    let mlp = MlpSpec::Dense { intermediate: c.intermediate_size, bias: false };
    let layers = vec![LayerSpec { mlp, ..last.clone() }; c.num_layers + 1];
    let mut with = ModelConfig { num_layers: layers.len(), layers, ..c.clone() };
    deepseek_moe::put(raw, &V3, &mut with)?;
    Ok(with.layers.pop().map(|layer| Box::new(MtpSpec { layer, names: &MTP })))
}

/// Epsilon of the norms of the latents, whatever the others have.
const LATENT_EPS: f64 = 1e-6;

/// A model of this version.
fn resolve(raw: &Raw, model: &ModelType, version: &Version) -> Result<ModelConfig, ConfigError> {
    let heads = raw.count("num_attention_heads", MAX_HEADS)?;
    let key = "num_key_value_heads";
    if let Some(n) = raw.count_opt(key, MAX_HEADS)?.filter(|n| *n != heads) {
        let problem = format!("is {n}, with {heads} heads of queries");
        return Err(raw.refuse(key, problem, "a latent makes keys and values for every head; leave it out"));
    }
    // Where files have `head_dim`, it is the width that rope rotates.
    raw.count_opt("head_dim", MAX_HEAD_DIM)?;
    let latent = latent::read_shared(raw, LATENT_EPS)?;
    let mut c = decoder::plain_of_heads(raw, model, [heads, heads, latent.width(), latent.rope])?;
    for layer in &mut c.layers {
        let a = &mut layer.attention;
        if let RopeScaling::Yarn(y) = &a.rope.scaling {
            a.scale *= y.mscale_all_dim.map_or(1.0, |all| yarn_mscale(y.factor, all).powi(2));
        }
        a.latent = Some(latent.clone());
    }
    deepseek_moe::put(raw, version, &mut c)?;
    Ok(c)
}

/// The keys of both versions.
fn save(c: &ModelConfig, model: &ModelType, version: &Version) -> Map<String, Value> {
    let mut out = decoder::save(c, model);
    latent::save(c, &mut out);
    deepseek_moe::save(version, c, &mut out);
    out
}
