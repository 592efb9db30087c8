//! Qwen3-MoE: Qwen3 whose MLPs, all or every nth, are mixtures of experts. Files have `num_experts` or `num_local_experts`.
//! Source: `Qwen3MoeForCausalLM` of transformers.

use super::decoder::{self, DECODER, DEFAULTS};
use super::experts::{self, Counts};
use super::model_type::{AttentionBias, Defaults, ModelType};
use super::windows::Windows;
use crate::config::{ConfigError, MAX_WIDTH, ModelConfig, QkNorm, Raw};
use serde_json::{Map, Value, json};

/// The registration.
pub static QWEN3_MOE: ModelType = ModelType {
    name: "qwen3_moe",
    architectures: &["Qwen3MoeForCausalLM"],
    description: "Qwen3 mixture of experts (30B-A3B, 235B-A22B): all layers or every nth",
    aliases: &[("dtype", "torch_dtype"), ("num_experts", "num_local_experts")],
    // Windows are on all layers or on none.
    inert: &["output_router_logits", "router_aux_loss_coef", "max_window_layers"],
    defaults: Defaults {
        max_positions: Some(32_768),
        qk_norm: QkNorm::BeforeRope,
        bias: AttentionBias::AllKey(false),
        windows: Windows::AllSwitched(4096),
        ..DEFAULTS
    },
    resolve,
    save,
    ..DECODER
};

fn resolve(raw: &Raw, model: &ModelType) -> Result<ModelConfig, ConfigError> {
    let mut c = decoder::plain(raw, model)?;
    let inner = raw.count_opt("moe_intermediate_size", MAX_WIDTH)?.unwrap_or(768);
    let counts = Counts { count: ("num_experts", Some(128)), chosen: ("num_experts_per_tok", Some(8)) };
    let mut spec = experts::read(raw, &counts, c.num_layers, inner, &experts::NAMES)?;
    spec.normalise = raw.flag("norm_topk_prob", false)?;
    experts::put_every_nth(raw, &spec, &mut c)?;
    Ok(c)
}

fn save(c: &ModelConfig, model: &ModelType) -> Map<String, Value> {
    let mut out = decoder::save(c, model);
    if let Some(e) = experts::of(c) {
        out.insert("num_experts".into(), json!(e.count));
        out.insert("num_experts_per_tok".into(), json!(e.chosen));
        out.insert("moe_intermediate_size".into(), json!(e.intermediate));
        out.insert("norm_topk_prob".into(), json!(e.normalise));
    }
    experts::save_every_nth(c, &mut out);
    out
}
