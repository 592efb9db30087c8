//! Qwen3-MoE: Qwen3 whose MLPs, all or every nth, are mixtures of experts. Files have `num_experts` or `num_local_experts`.
//! Source: `Qwen3MoeForCausalLM` of transformers.

use super::decoder::{self, Defaults};
use super::experts;
use crate::config::rope_keys::ROPE_KEYS;
use crate::config::{
    ConfigError, ExpertNames, MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH, MlpSpec, ModelConfig, QkNorm, Raw,
    RopeLayout,
};
use crate::registry::ModelType;
use serde_json::{Map, Value, json};

/// The registration.
pub static QWEN3_MOE: ModelType = ModelType {
    name: "qwen3_moe",
    architectures: &["Qwen3MoeForCausalLM"],
    description: "Qwen3 mixture of experts (30B-A3B, 235B-A22B): all layers or every nth",
    keys: &[decoder::KEYS, ROPE_KEYS, KEYS],
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
    "decoder_sparse_step",
    "mlp_only_layers",
];

static NAMES: ExpertNames = ExpertNames {
    router: "mlp.gate",
    gate: "mlp.experts.{e}.gate_proj",
    up: "mlp.experts.{e}.up_proj",
    down: "mlp.experts.{e}.down_proj",
};

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
    let mut spec = experts::read(raw, "num_experts", (128, 8), c.num_layers, inner, &NAMES)?;
    spec.normalise = raw.flag("norm_topk_prob", false)?;
    let step = raw.count_opt("decoder_sparse_step", MAX_LAYERS)?.unwrap_or(1);
    let dense = dense_layers(raw)?;
    for (i, layer) in c.layers.iter_mut().enumerate() {
        layer.attention.qk_norm = QkNorm::BeforeRope;
        layer.attention.qkv_bias = bias;
        layer.attention.o_bias = bias;
        layer.attention.window = window;
        if (i + 1).is_multiple_of(step) && !dense.contains(&(i as u64)) {
            layer.mlp = MlpSpec::Experts(spec.clone());
        }
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

/// Layers whose MLP is dense whatever the step.
fn dense_layers(raw: &Raw) -> Result<Vec<u64>, ConfigError> {
    let key = "mlp_only_layers";
    let Some((_, value)) = raw.find(key)? else { return Ok(vec![]) };
    let wrong = || raw.refuse(key, "is no list of layer numbers", "list layers from 0, or leave it empty");
    let list = value.as_array().ok_or_else(wrong)?;
    list.iter().map(|v| v.as_u64().ok_or_else(wrong)).collect()
}

fn save(c: &ModelConfig) -> Map<String, Value> {
    let mut out = decoder::save(c);
    let window = c.layers.iter().find_map(|l| l.attention.window);
    out.insert("use_sliding_window".into(), json!(window.is_some()));
    out.insert("sliding_window".into(), json!(window));
    out.insert("attention_bias".into(), json!(c.layers.iter().any(|l| l.attention.qkv_bias)));
    let spec = c.layers.iter().find_map(|l| match &l.mlp {
        MlpSpec::Experts(e) => Some(e),
        _ => None,
    });
    if let Some(e) = spec {
        out.insert("num_experts".into(), json!(e.count));
        out.insert("num_experts_per_tok".into(), json!(e.chosen));
        out.insert("moe_intermediate_size".into(), json!(e.intermediate));
        out.insert("norm_topk_prob".into(), json!(e.normalise));
    }
    let dense = |i: &usize| matches!(c.layers[*i].mlp, MlpSpec::Dense { .. });
    out.insert("decoder_sparse_step".into(), json!(1));
    out.insert("mlp_only_layers".into(), json!((0..c.layers.len()).filter(dense).collect::<Vec<_>>()));
    out
}
