//! AstrAI's `autoregressive_lm` with grouped-query attention and MLP: rope by interleaved pairs, queries and keys normed
//! after the rotation, an optional sigmoid gate on the attention output. Read in both spellings of its configuration,
//! written in the newer one, without keys that AstrAI does not know.

use super::decoder::{self, Defaults};
use crate::config::rope_keys::ROPE_KEYS;
use crate::config::{ConfigError, InitStyle, ModelConfig, QkNorm, Raw, RopeLayout};
use crate::registry::{ModelType, Names};
use serde_json::{Map, Value, json};

/// The registration.
pub static ASTRAI: ModelType = ModelType {
    name: "autoregressive_lm",
    architectures: &[], // its files have none
    description: "AstrAI: GQA and MLP, interleaved rope, optional gate and q/k norms after rope",
    keys: &[decoder::KEYS, ROPE_KEYS, &["use_qk_norm", "use_gated_attention", "attn_type", "ffn_type"]],
    aliases: ALIASES,
    // Keys of MLA and MoE, which `attn_type` gqa and `ffn_type` mlp leave without effect.
    inert: &[
        "decoder_sparse_step",
        "kv_lora_rank",
        "mlp_only_layers",
        "moe_aux_loss_coef",
        "moe_intermediate_size",
        "moe_topk_method",
        "n_activated_experts",
        "n_routed_experts",
        "n_shared_experts",
        "norm_topk_prob",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "shared_expert_intermediate_size",
        "topk_method",
    ],
    names: &NAMES,
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
    beside: &[],
};

const DEFAULTS: Defaults = Defaults {
    kv_heads_all: true,
    head_dim: None,
    max_positions: None,
    norm_eps: None,
    layout: RopeLayout::Interleaved,
    scalings: &["ntk"],
    ..decoder::DEFAULTS
};

fn resolve(raw: &Raw) -> Result<ModelConfig, ConfigError> {
    only(raw, "attn_type", "gqa")?;
    only(raw, "ffn_type", "mlp")?;
    grouped(raw, &ASTRAI)
}

/// The layers that all of AstrAI's models have: grouped-query attention and an MLP.
pub(super) fn grouped(raw: &Raw, model: &'static ModelType) -> Result<ModelConfig, ConfigError> {
    only(raw, "hidden_act", "silu")?;
    let mut c = decoder::plain(raw, model, &DEFAULTS)?;
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
    Ok(c)
}

/// Refuses any other value of `key` than `value`.
fn only(raw: &Raw, key: &'static str, value: &str) -> Result<(), ConfigError> {
    match raw.text(key)? {
        Some(other) if other != value => {
            let problem = format!("is {}, which is not supported", json!(other));
            Err(raw.refuse(key, problem, format!("supported: {value}")))
        }
        _ => Ok(()),
    }
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

pub(super) fn save(c: &ModelConfig) -> Map<String, Value> {
    let mut out = decoder::save(c);
    out.retain(|key, value| {
        !FOREIGN.contains(&key.as_str()) || (key.ends_with("_token_id") && !value.is_null())
    });
    if let Some(attention) = c.layers.first().map(|l| &l.attention) {
        out.insert("use_qk_norm".into(), json!(attention.qk_norm != QkNorm::None));
        out.insert("use_gated_attention".into(), json!(attention.gate));
    }
    out.insert("attn_type".into(), json!("gqa"));
    out.insert("ffn_type".into(), json!("mlp"));
    out
}
