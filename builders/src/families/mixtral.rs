//! Mixtral: Mistral whose every MLP is a mixture of experts, weights normalised over the chosen.
//! Source: `MixtralForCausalLM` of transformers.

use super::decoder::{self, DECODER, DEFAULTS};
use super::experts::{self, Counts};
use super::model_type::{Defaults, ModelType};
use super::windows::Windows;
use crate::config::{ConfigError, ExpertNames, MlpSpec, ModelConfig, Raw};
use serde_json::{Map, Value, json};

/// The registration.
pub static MIXTRAL: ModelType = ModelType {
    name: "mixtral",
    architectures: &["MixtralForCausalLM"],
    description: "Mixtral 8x7B and 8x22B: Mistral with a mixture of experts in every layer",
    aliases: &[("dtype", "torch_dtype"), ("num_local_experts", "num_experts")],
    inert: experts::LOSS_KEYS,
    defaults: Defaults {
        max_positions: Some(131_072),
        norm_eps: Some(1e-5),
        windows: Windows::All(None),
        ..DEFAULTS
    },
    resolve,
    save,
    ..DECODER
};

static NAMES: ExpertNames = ExpertNames {
    router: "block_sparse_moe.gate",
    gate: "block_sparse_moe.experts.{e}.w1",
    up: "block_sparse_moe.experts.{e}.w3",
    down: "block_sparse_moe.experts.{e}.w2",
    ..experts::NAMES
};

fn resolve(raw: &Raw, model: &ModelType) -> Result<ModelConfig, ConfigError> {
    let mut c = decoder::plain(raw, model)?;
    let counts = Counts { count: ("num_local_experts", Some(8)), chosen: ("num_experts_per_tok", Some(2)) };
    let spec = experts::read(raw, &counts, c.num_layers, c.intermediate_size, &NAMES)?;
    for layer in &mut c.layers {
        layer.mlp = MlpSpec::Experts(spec.clone());
    }
    Ok(c)
}

fn save(c: &ModelConfig, model: &ModelType) -> Map<String, Value> {
    let mut out = decoder::save(c, model);
    if let Some(e) = experts::of(c) {
        out.insert("num_local_experts".into(), json!(e.count));
        out.insert("num_experts_per_tok".into(), json!(e.chosen));
    }
    out
}
