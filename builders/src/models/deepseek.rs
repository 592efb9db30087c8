//! What DeepSeek-V2 and V3 share: latent attention whose rotated part all heads share, dense layers first, then experts beside
//! shared ones. With yarn, the scores' scale is that of the stretched context too.

use super::decoder::{self, Defaults};
use super::experts::{self, Counts};
use super::latent;
use crate::config::{
    ConfigError, ExpertsSpec, MAX_EXPERTS, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, MlpSpec,
    ModelConfig, Raw, RopeLayout, RopeScaling, SharedSpec, yarn_mscale,
};
use crate::registry::ModelType;
use astrai_ir::ops::{GroupScore, Groups};
use serde_json::{Map, Value, json};

/// Keys of both that no other family has.
pub(super) const KEYS: &[&str] = &[
    "attention_bias",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "moe_intermediate_size",
    "first_k_dense_replace",
    "moe_layer_freq",
    "n_group",
    "topk_group",
    "topk_method",
    "scoring_func",
    "norm_topk_prob",
    "routed_scaling_factor",
];

/// Keys of both that mean nothing for what is built here: weighing losses, and how experts are spread over machines.
pub(super) const INERT: &[&str] = &[
    "aux_loss_alpha",
    "ep_size",
    "num_nextn_predict_layers",
    "output_router_logits",
    "router_aux_loss_coef",
    "seq_aux",
];

/// Epsilon of the norms of the latents, whatever the others have.
const LATENT_EPS: f64 = 1e-6;

const DEFAULTS: Defaults = Defaults { norm_eps: Some(1e-6), max_positions: Some(4096), ..decoder::DEFAULTS };

/// Everything but the experts.
pub(super) fn resolve(
    raw: &Raw,
    model: &'static ModelType,
    layout: RopeLayout,
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
    Ok(c)
}

/// Experts with shared ones beside them, all of a token's within the best groups where `limited` says how these are ranked.
pub(super) fn experts(
    raw: &Raw,
    c: &ModelConfig,
    limited: Option<GroupScore>,
) -> Result<ExpertsSpec, ConfigError> {
    let counts = Counts { count: ("n_routed_experts", None), chosen: ("num_experts_per_tok", None) };
    let inner = raw.count("moe_intermediate_size", MAX_WIDTH)?;
    let mut spec = experts::read(raw, &counts, c.num_layers, inner, &experts::NAMES)?;
    let shared = raw.count_or_none("n_shared_experts", MAX_EXPERTS)?.unwrap_or(0);
    if shared.saturating_mul(inner) > MAX_WIDTH {
        let problem = format!("is {shared}, each {inner} wide");
        return Err(raw.refuse("n_shared_experts", problem, format!("together at most {MAX_WIDTH} wide")));
    }
    // They are one MLP as wide as all.
    spec.shared = (shared > 0).then_some(SharedSpec { count: 1, intermediate: shared * inner });
    let range = "above 0, at most 1e6";
    let scale = raw.real_where("routed_scaling_factor", |x| x > 0.0 && x <= 1e6, range)?;
    spec.scale = scale.unwrap_or(1.0);
    spec.groups = groups(raw, &spec, limited)?;
    Ok(spec)
}

/// The limit of the choice. One group is no limit.
fn groups(
    raw: &Raw,
    spec: &ExpertsSpec,
    limited: Option<GroupScore>,
) -> Result<Option<Groups>, ConfigError> {
    let (count, kept) = (raw.count_opt("n_group", MAX_EXPERTS)?, raw.count_opt("topk_group", MAX_EXPERTS)?);
    let Some(score) = limited else { return Ok(None) };
    let (count, kept) = match (count, kept) {
        (None, None) | (Some(1), _) => return Ok(None),
        (Some(count), Some(kept)) => (count, kept),
        (None, _) => return Err(raw.missing("n_group")),
        (_, None) => return Err(raw.missing("topk_group")),
    };
    let each = spec.count / count;
    if !spec.count.is_multiple_of(count) || score == GroupScore::BestTwo && each < 2 {
        let problem = format!("is {count}, of {} experts", spec.count);
        return Err(raw.refuse("n_group", problem, "groups are equal, and ranked by their best experts"));
    }
    if kept > count {
        let problem = format!("is {kept}, of {count} groups");
        return Err(raw.refuse("topk_group", problem, "it must be at most `n_group`"));
    }
    if spec.chosen > kept * each {
        let problem = format!("is {}, of {} experts in {kept} groups", spec.chosen, kept * each);
        return Err(raw.refuse("num_experts_per_tok", problem, "choose fewer, or keep more groups"));
    }
    Ok(Some(Groups { count, kept, score }))
}

/// Gives experts to every `moe_layer_freq`th layer behind the first `first_k_dense_replace`.
pub(super) fn put_experts(raw: &Raw, spec: &ExpertsSpec, c: &mut ModelConfig) -> Result<(), ConfigError> {
    let dense = raw.count_or_none("first_k_dense_replace", MAX_LAYERS)?.unwrap_or(0);
    let step = raw.count_opt("moe_layer_freq", MAX_LAYERS)?.unwrap_or(1);
    for (_, layer) in c.layers.iter_mut().enumerate().filter(|(i, _)| *i >= dense && i.is_multiple_of(step)) {
        layer.mlp = MlpSpec::Experts(spec.clone());
    }
    Ok(())
}

/// Refuses a value of `key` other than these.
pub(super) fn only(raw: &Raw, key: &'static str, known: &[&str]) -> Result<(), ConfigError> {
    match raw.text(key)?.filter(|given| !known.contains(given)) {
        Some(other) => {
            let problem = format!("is {}, which this model type does not compute", json!(other));
            Err(raw.refuse(key, problem, format!("supported: {}", known.join(", "))))
        }
        None => Ok(()),
    }
}

/// The keys of both.
pub(super) fn save(c: &ModelConfig) -> Map<String, Value> {
    let mut out = decoder::save(c);
    latent::save(c, &mut out);
    out.insert("attention_bias".into(), json!(c.layers.iter().any(|l| l.attention.o_bias)));
    let layers: Vec<usize> = (0..c.layers.len()).filter(|i| experts_at(c, *i).is_some()).collect();
    let Some(e) = layers.first().and_then(|i| experts_at(c, *i)) else { return out };
    let (first, step) = (layers[0], layers.get(1).map_or(1, |next| next - layers[0]));
    let mut put = |key: &str, value: Value| out.insert(key.into(), value);
    put("n_routed_experts", json!(e.count));
    put("num_experts_per_tok", json!(e.chosen));
    put("n_shared_experts", json!(e.shared.map_or(0, |s| s.intermediate / e.intermediate)));
    put("moe_intermediate_size", json!(e.intermediate));
    put("first_k_dense_replace", json!(first));
    put("moe_layer_freq", json!(step));
    put("n_group", json!(e.groups.map_or(1, |g| g.count)));
    put("topk_group", json!(e.groups.map_or(1, |g| g.kept)));
    put("norm_topk_prob", json!(e.normalise));
    put("routed_scaling_factor", json!(e.scale));
    out
}

fn experts_at(c: &ModelConfig, layer: usize) -> Option<&ExpertsSpec> {
    match &c.layers[layer].mlp {
        MlpSpec::Experts(e) => Some(e),
        _ => None,
    }
}
