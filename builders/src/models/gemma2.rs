//! Gemma 2: every other layer windowed, the first one too; scores and logits soft-capped.
//! Source: `Gemma2ForCausalLM` of transformers.

use super::decoder::{self, Defaults};
use super::gemma::{self, Own};
use crate::config::rope_keys::ROPE_KEYS;
use crate::config::{ConfigError, ModelConfig, Raw};
use crate::registry::ModelType;

/// The registration.
pub static GEMMA2: ModelType = ModelType {
    name: "gemma2",
    architectures: &["Gemma2ForCausalLM"],
    description: "Gemma 2: windows on every other layer, soft-capped scores and logits, norms by 1 + w",
    keys: &[decoder::KEYS, ROPE_KEYS, gemma::KEYS],
    aliases: gemma::ALIASES,
    inert: &[],
    names: &gemma::NAMES,
    resolve,
    save: gemma::save,
};

const DEFAULTS: Defaults = Defaults { max_positions: Some(8192), ..gemma::DEFAULTS };

const OWN: Own = Own { pattern: 2, softcap: Some(50.0), logit_softcap: Some(30.0) };

fn resolve(raw: &Raw) -> Result<ModelConfig, ConfigError> {
    gemma::resolve(raw, &GEMMA2, &DEFAULTS, &OWN)
}
