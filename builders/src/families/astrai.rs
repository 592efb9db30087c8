//! AstrAI's `autoregressive_lm`, with grouped-query attention or per-head latent attention, and MLP or experts: rope by
//! interleaved pairs, queries and keys normed after the rotation, an optional sigmoid gate on the attention output; on every nth
//! layer routed experts beside the mean of shared ones. Read in both spellings of its configuration, written in the newer one,
//! without keys that AstrAI does not know.

use super::decoder;
use super::experts::{self, Counts};
use super::latent;
use super::model_type::{Defaults, ModelType};
use crate::config::{
    Balance, ConfigError, ExpertNames, InitStyle, LatentNames, MAX_EXPERTS, MAX_WIDTH, ModelConfig, Names,
    QkNorm, Raw, RopeLayout, SharedSpec,
};
use serde_json::{Map, Value, json};

/// The registration.
pub static ASTRAI: ModelType = ModelType {
    name: "autoregressive_lm",
    architectures: &[], // its files have none
    description: "AstrAI: GQA or MLA and MLP or experts, interleaved rope, optional gate and q/k norms after rope",
    aliases: ALIASES,
    inert: &["moe_aux_loss_coef"], // of training
    names: &NAMES,
    defaults: DEFAULTS,
    resolve,
    save,
};

/// The older spellings.
pub(super) const ALIASES: &[(&str, &str)] = &[
    ("hidden_size", "dim"),
    ("num_hidden_layers", "n_layers"),
    ("num_attention_heads", "n_heads"),
    ("num_key_value_heads", "n_kv_heads"),
    ("intermediate_size", "dim_ffn"),
    ("rms_norm_eps", "norm_eps"),
    ("tie_word_embeddings", "tie_weight"),
    ("max_position_embeddings", "max_len"),
    ("dtype", "torch_dtype"),
    ("topk_method", "moe_topk_method"),
];

pub(super) static NAMES: Names = Names {
    embed: "embed_tokens.weight",
    layer: "layers.{i}.",
    input_norm: "input_norm",
    q: "attention.q_proj",
    k: "attention.k_proj",
    v: "attention.v_proj",
    qkv: None,
    q_norm: "attention.q_norm",
    k_norm: "attention.k_norm",
    gate: "attention.gate",
    sinks: None,
    o: "attention.o_proj",
    attention_out_norm: "attention_out_norm",
    post_attention_norm: "post_attention_norm",
    mlp_gate: "mlp.gate",
    mlp_up: "mlp.up",
    mlp_gate_up: None,
    mlp_down: "mlp.down",
    mlp_out_norm: "mlp_out_norm",
    final_norm: "norm.weight",
    head: "lm_head.weight",
    ignored_prefixes: &[],
};

/// Keys that only `ffn_type` moe gives an effect.
const MOE_KEYS: &[&str] = &[
    "n_routed_experts",
    "n_activated_experts",
    "n_shared_experts",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
    "topk_method",
];

static LATENT: LatentNames = LatentNames {
    q: "attention.q_proj",
    q_down: "", // queries have no latent
    q_norm: "",
    q_up: "",
    kv_down: "attention.kv_a_proj",
    kv_norm: "attention.kv_norm",
    kv_up: "attention.kv_b_proj",
};

static EXPERTS: ExpertNames = ExpertNames {
    router: "mlp.router",
    correction: "", // there is none
    gate: "mlp.routed_experts.{e}.gate",
    up: "mlp.routed_experts.{e}.up",
    down: "mlp.routed_experts.{e}.down",
    shared: ["mlp.shared_experts.{e}.gate", "mlp.shared_experts.{e}.up", "mlp.shared_experts.{e}.down"],
};

pub(super) const DEFAULTS: Defaults = Defaults {
    kv_heads_all: true,
    norm_eps: None,
    layout: RopeLayout::Interleaved,
    scalings: &["ntk"],
    ..decoder::DEFAULTS
};

fn resolve(raw: &Raw, model: &ModelType) -> Result<ModelConfig, ConfigError> {
    let attention = raw.one_of("attn_type", &["gqa", "mla"])?;
    let ffn = raw.one_of("ffn_type", &["mlp", "moe"])?;
    raw.one_of("hidden_act", &["silu"])?;
    let mut c = match attention {
        Some("mla") => latent_attention(raw, model)?,
        _ => {
            // These keys are known and have no effect.
            latent::KEYS.iter().try_for_each(|key| raw.find(key).map(drop))?;
            decoder::plain(raw, model)?
        }
    };
    common(raw, &mut c)?;
    match ffn {
        Some("moe") => put_experts(raw, &mut c)?,
        // These keys are known and have no effect.
        _ => MOE_KEYS.iter().chain(experts::EVERY_NTH).try_for_each(|key| raw.find(key).map(drop))?,
    }
    Ok(c)
}

/// The layers that an encoder has, too: grouped-query attention and an MLP.
pub(super) fn plain(raw: &Raw, model: &ModelType) -> Result<ModelConfig, ConfigError> {
    raw.one_of("hidden_act", &["silu"])?;
    let mut c = decoder::plain(raw, model)?;
    common(raw, &mut c)?;
    Ok(c)
}

/// What all of AstrAI's models have in common.
fn common(raw: &Raw, c: &mut ModelConfig) -> Result<(), ConfigError> {
    if c.heads * c.head_dim != c.hidden_size {
        let problem =
            format!("is {}, times {} heads not the hidden size {}", c.head_dim, c.heads, c.hidden_size);
        return Err(raw.refuse("head_dim", problem, "AstrAI has no head width of its own; remove it"));
    }
    if c.initializer_range != 0.02 {
        let problem = format!("is {}", c.initializer_range);
        return Err(raw.refuse("initializer_range", problem, "AstrAI always draws with 0.02; remove it"));
    }
    c.init_style = InitStyle::ScaledOutputs;
    let (norm, gate) = (raw.flag("use_qk_norm", false)?, raw.flag("use_gated_attention", false)?);
    for layer in &mut c.layers {
        layer.attention.qk_norm = if norm { QkNorm::AfterRope } else { QkNorm::None };
        layer.attention.gate = gate;
    }
    Ok(())
}

/// Latent attention: a head's rotated components are its own, and values are as wide as keys.
fn latent_attention(raw: &Raw, model: &ModelType) -> Result<ModelConfig, ConfigError> {
    let hidden = raw.count("hidden_size", MAX_WIDTH)?;
    let (heads, kv_heads, head_dim) = decoder::heads(raw, hidden, &model.defaults)?;
    let mut latent = latent::read(raw, 0.0, &LATENT)?;
    if latent.width() != head_dim {
        let (problem, keys) = (format!("is {}", latent.nope), latent::KEYS);
        let remedy = format!("it and `{}` {} must make the head's {head_dim}", keys[2], latent.rope);
        return Err(raw.refuse(keys[1], problem, remedy));
    }
    let sizes = [heads, kv_heads, head_dim, latent.rope];
    let mut c = decoder::plain_of_heads(raw, model, sizes)?;
    latent.norm_eps = c.norm_eps;
    for layer in &mut c.layers {
        layer.attention.latent = Some(latent.clone());
    }
    Ok(c)
}

/// Gives layers their experts. AstrAI has no defaults for their numbers.
fn put_experts(raw: &Raw, c: &mut ModelConfig) -> Result<(), ConfigError> {
    let counts = Counts { count: ("n_routed_experts", None), chosen: ("n_activated_experts", None) };
    let width = |key| Ok::<_, ConfigError>(raw.count_opt(key, MAX_WIDTH)?.unwrap_or(c.intermediate_size));
    let inner = width("moe_intermediate_size")?;
    let mut spec = experts::read(raw, &counts, c.num_layers, inner, &EXPERTS)?;
    let count = raw.count_or_none("n_shared_experts", MAX_EXPERTS)?.unwrap_or(0);
    let intermediate = width("shared_expert_intermediate_size")?;
    spec.shared = (count > 0).then_some(SharedSpec { count, intermediate });
    spec.normalise = raw.flag("norm_topk_prob", true)?;
    (spec.balance, spec.skip_unrouted) = (Balance::PerLayer, true); // each expert is a module of its own
    if let Some(method) = raw.text("topk_method")?.filter(|m| *m != "greedy") {
        let key = raw.spelled("topk_method");
        raw.warn(format!("key `{key}` is {}: AstrAI never reads it, the choice is greedy", json!(method)));
    }
    experts::put_every_nth(raw, &spec, c)
}

/// Keys of transformers that AstrAI does not have: dropped unless the model states something by them.
const FOREIGN: [&str; 7] = [
    "architectures",
    "head_dim",
    "hidden_act",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
];

pub(super) fn save(c: &ModelConfig, model: &ModelType) -> Map<String, Value> {
    let mut out = decoder::save(c, model);
    out.retain(|key, value| {
        !FOREIGN.contains(&key.as_str()) || (key.ends_with("_token_id") && !value.is_null())
    });
    if let Some(attention) = c.layers.first().map(|l| &l.attention) {
        out.insert("use_qk_norm".into(), json!(attention.qk_norm != QkNorm::None));
        out.insert("use_gated_attention".into(), json!(attention.gate));
    }
    let latents = c.layers.iter().any(|l| l.attention.latent.is_some());
    out.insert("attn_type".into(), json!(if latents { "mla" } else { "gqa" }));
    latent::save(c, &mut out);
    out.insert("ffn_type".into(), json!("mlp"));
    if let Some(e) = experts::of(c) {
        out.insert("ffn_type".into(), json!("moe"));
        out.insert("n_routed_experts".into(), json!(e.count));
        out.insert("n_activated_experts".into(), json!(e.chosen));
        out.insert("n_shared_experts".into(), json!(e.shared.map_or(0, |s| s.count)));
        out.insert("moe_intermediate_size".into(), json!(e.intermediate));
        if let Some(s) = e.shared {
            out.insert("shared_expert_intermediate_size".into(), json!(s.intermediate));
        }
        out.insert("norm_topk_prob".into(), json!(e.normalise));
        experts::save_every_nth(c, &mut out);
    }
    out
}
