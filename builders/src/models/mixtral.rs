//! Mixtral: Mistral whose every MLP is a mixture of experts, weights normalised over the chosen.
//! Source: `MixtralForCausalLM` of transformers.

use super::decoder::{self, Defaults};
use super::experts::{self, Counts};
use crate::config::rope_keys::ROPE_KEYS;
use crate::config::{ConfigError, ExpertNames, MAX_POSITIONS, MlpSpec, ModelConfig, Raw, RopeLayout};
use crate::registry::ModelType;
use serde_json::{Map, Value, json};

/// The registration.
pub static MIXTRAL: ModelType = ModelType {
    name: "mixtral",
    architectures: &["MixtralForCausalLM"],
    description: "Mixtral 8x7B and 8x22B: Mistral with a mixture of experts in every layer",
    keys: &[decoder::KEYS, ROPE_KEYS, &["sliding_window", "num_local_experts", "num_experts_per_tok"]],
    aliases: &[("dtype", "torch_dtype"), ("num_local_experts", "num_experts")],
    inert: experts::LOSS_KEYS,
    names: &decoder::NAMES,
    resolve,
    save,
};

static NAMES: ExpertNames = ExpertNames {
    router: "block_sparse_moe.gate",
    gate: "block_sparse_moe.experts.{e}.w1",
    up: "block_sparse_moe.experts.{e}.w3",
    down: "block_sparse_moe.experts.{e}.w2",
    ..experts::NAMES
};

const DEFAULTS: Defaults = Defaults {
    kv_heads_all: false,
    head_dim: None,
    max_positions: Some(131_072),
    norm_eps: Some(1e-5),
    layout: RopeLayout::Half,
    scalings: decoder::SCALINGS,
    ..decoder::DEFAULTS
};

fn resolve(raw: &Raw) -> Result<ModelConfig, ConfigError> {
    let mut c = decoder::plain(raw, &MIXTRAL, &DEFAULTS)?;
    let window = raw.count_opt("sliding_window", MAX_POSITIONS)?;
    let counts = Counts { count: ("num_local_experts", Some(8)), chosen: ("num_experts_per_tok", Some(2)) };
    let spec = experts::read(raw, &counts, c.num_layers, c.intermediate_size, &NAMES)?;
    for layer in &mut c.layers {
        layer.attention.window = window;
        layer.mlp = MlpSpec::Experts(spec.clone());
    }
    Ok(c)
}

fn save(c: &ModelConfig) -> Map<String, Value> {
    let mut out = decoder::save(c);
    out.insert("sliding_window".into(), json!(c.layers.iter().find_map(|l| l.attention.window)));
    if let Some(e) = experts::of(c) {
        out.insert("num_local_experts".into(), json!(e.count));
        out.insert("num_experts_per_tok".into(), json!(e.chosen));
    }
    out
}
