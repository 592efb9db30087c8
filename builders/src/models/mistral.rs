//! Mistral: Llama without biases, every layer with the same sliding window or none.
//! Source: `MistralForCausalLM` of transformers.

use super::decoder::{self, Defaults};
use crate::config::rope_keys::ROPE_KEYS;
use crate::config::{ConfigError, MAX_POSITIONS, ModelConfig, Raw, RopeLayout};
use crate::registry::ModelType;
use serde_json::{Map, Value, json};

/// The registration.
pub static MISTRAL: ModelType = ModelType {
    name: "mistral",
    architectures: &["MistralForCausalLM"],
    description: "Mistral 7B and its successors: GQA, sliding window on all layers or none",
    keys: &[decoder::KEYS, ROPE_KEYS, &["sliding_window", "layer_types"]],
    aliases: decoder::ALIASES,
    inert: &[],
    names: &decoder::NAMES,
    resolve,
    save,
};

const DEFAULTS: Defaults = Defaults {
    kv_heads_all: false,
    head_dim: None,
    max_positions: Some(131_072),
    norm_eps: Some(1e-6),
    layout: RopeLayout::Half,
    scalings: decoder::SCALINGS,
    ..decoder::DEFAULTS
};

/// Window when the key is absent; `null` is none.
const DEFAULT_WINDOW: usize = 4096;

fn resolve(raw: &Raw) -> Result<ModelConfig, ConfigError> {
    let mut c = decoder::plain(raw, &MISTRAL, &DEFAULTS)?;
    let window = match raw.count_opt("sliding_window", MAX_POSITIONS)? {
        None if !raw.states("sliding_window") => Some(DEFAULT_WINDOW),
        stated => stated,
    };
    if let Some(types) = decoder::layer_types(raw, c.num_layers)?
        && types.iter().any(|&windowed| windowed != window.is_some())
    {
        let problem = "contradicts `sliding_window`";
        return Err(raw.refuse("layer_types", problem, "mistral has one window on all layers, or none"));
    }
    for layer in &mut c.layers {
        layer.attention.window = window;
    }
    Ok(c)
}

fn save(c: &ModelConfig) -> Map<String, Value> {
    let mut out = decoder::save(c);
    out.insert("sliding_window".into(), json!(c.layers.iter().find_map(|l| l.attention.window)));
    out
}
