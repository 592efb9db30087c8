//! AstrAI's `embedding`: the layers of `autoregressive_lm` with attention to all of a sequence, no head, and one vector a
//! sequence. Source: AstrAI's `EmbeddingEncoder`.

use super::astrai;
use super::decoder::{self, DECODER};
use super::model_type::ModelType;
use crate::config::rope_keys::ROPE_KEYS;
use crate::config::{ConfigError, EncoderSpec, ModelConfig, Pooling, Raw};
use serde_json::{Map, Value, json};

/// The registration.
pub static EMBEDDING: ModelType = ModelType {
    name: "embedding",
    architectures: &[], // its files have none
    description: "AstrAI's encoder: attention to the whole sequence, one vector a sequence, no head",
    keys: &[
        decoder::KEYS,
        ROPE_KEYS,
        &["use_qk_norm", "use_gated_attention", "pooling_type", "normalize_embeddings"],
    ],
    aliases: astrai::ALIASES,
    names: &astrai::NAMES,
    defaults: astrai::DEFAULTS,
    resolve,
    save,
    ..DECODER
};

const POOLINGS: [(&str, Pooling); 3] =
    [("mean", Pooling::Mean), ("cls", Pooling::Cls), ("last", Pooling::Last)];

fn resolve(raw: &Raw, model: &ModelType) -> Result<ModelConfig, ConfigError> {
    let mut c = astrai::plain(raw, model)?;
    // `tie_word_embeddings` is known and has no effect: there is no head.
    c.tie_embeddings = false;
    let name = raw.text("pooling_type")?.unwrap_or("mean");
    let Some((_, pooling)) = POOLINGS.iter().find(|(n, _)| *n == name) else {
        let remedy = format!("supported: {}", POOLINGS.map(|(n, _)| n).join(", "));
        return Err(raw.refuse("pooling_type", format!("is {}", json!(name)), remedy));
    };
    let normalise = raw.flag("normalize_embeddings", false)?;
    c.encoder = Some(EncoderSpec { pooling: *pooling, normalise });
    Ok(c)
}

fn save(c: &ModelConfig, model: &ModelType) -> Map<String, Value> {
    let mut out = astrai::save(c, model);
    for key in ["attn_type", "ffn_type", "tie_word_embeddings"] {
        out.shift_remove(key);
    }
    if let Some(e) = &c.encoder {
        let name = POOLINGS.iter().find(|(_, p)| *p == e.pooling).map(|(n, _)| n);
        out.insert("pooling_type".into(), json!(name));
        out.insert("normalize_embeddings".into(), json!(e.normalise));
    }
    out
}
