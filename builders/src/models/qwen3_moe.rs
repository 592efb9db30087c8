//! Qwen3-MoE: Qwen3 whose MLPs, all or every nth, are mixtures of experts. Files have `num_experts` or `num_local_experts`.
//! Source: `Qwen3MoeForCausalLM` of transformers.

use super::decoder::{self, Defaults};
use super::experts::{self, Counts};
use crate::config::rope_keys::ROPE_KEYS;
use crate::config::{
    ConfigError, ExpertNames, MAX_POSITIONS, MAX_WIDTH, ModelConfig, QkNorm, Raw, RopeLayout,
};
use crate::registry::ModelType;
use serde_json::{Map, Value, json};

/// The registration.
pub static QWEN3_MOE: ModelType = ModelType {
    name: "qwen3_moe",
    architectures: &["Qwen3MoeForCausalLM"],
    description: "Qwen3 mixture of experts (30B-A3B, 235B-A22B): all layers or every nth",
    keys: &[decoder::KEYS, ROPE_KEYS, KEYS, experts::EVERY_NTH],
    aliases: &[("dtype", "torch_dtype"), ("num_experts", "num_local_experts")],
    // Windows are on all layers or on none.
    inert: &["output_router_logits", "router_aux_loss_coef", "max_window_layers"],
    names: &decoder::NAMES,
    resolve,
    save,
};

const KEYS: &[&str] = &[
    "attention_bias",
    "use_sliding_window",
    "sliding_window",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
];

static NAMES: ExpertNames = experts::NAMES;

const DEFAULTS: Defaults = Defaults {
    kv_heads_all: false,
    head_dim: None,
    max_positions: Some(32_768),
    norm_eps: Some(1e-6),
    layout: RopeLayout::Half,
    scalings: decoder::SCALINGS,
    ..decoder::DEFAULTS
};

fn resolve(raw: &Raw) -> Result<ModelConfig, ConfigError> {
    let mut c = decoder::plain(raw, &QWEN3_MOE, &DEFAULTS)?;
    let bias = raw.flag("attention_bias", false)?;
    let window = window(raw)?;
    let inner = raw.count_opt("moe_intermediate_size", MAX_WIDTH)?.unwrap_or(768);
    let counts = Counts { count: ("num_experts", Some(128)), chosen: ("num_experts_per_tok", Some(8)) };
    let mut spec = experts::read(raw, &counts, c.num_layers, inner, &NAMES)?;
    spec.normalise = raw.flag("norm_topk_prob", false)?;
    experts::put_every_nth(raw, &spec, &mut c)?;
    for layer in &mut c.layers {
        layer.attention.qk_norm = QkNorm::BeforeRope;
        layer.attention.qkv_bias = bias;
        layer.attention.o_bias = bias;
        layer.attention.window = window;
    }
    Ok(c)
}

/// The window of all layers.
fn window(raw: &Raw) -> Result<Option<usize>, ConfigError> {
    let stated = match raw.count_opt("sliding_window", MAX_POSITIONS)? {
        None if !raw.states("sliding_window") => Some(4096), // the reference's default
        other => other,
    };
    Ok(if raw.flag("use_sliding_window", false)? { stated } else { None })
}

fn save(c: &ModelConfig) -> Map<String, Value> {
    let mut out = decoder::save(c);
    let window = c.layers.iter().find_map(|l| l.attention.window);
    out.insert("use_sliding_window".into(), json!(window.is_some()));
    out.insert("sliding_window".into(), json!(window));
    out.insert("attention_bias".into(), json!(c.layers.iter().any(|l| l.attention.qkv_bias)));
    if let Some(e) = experts::of(c) {
        out.insert("num_experts".into(), json!(e.count));
        out.insert("num_experts_per_tok".into(), json!(e.chosen));
        out.insert("moe_intermediate_size".into(), json!(e.intermediate));
        out.insert("norm_topk_prob".into(), json!(e.normalise));
    }
    experts::save_every_nth(c, &mut out);
    out
}
