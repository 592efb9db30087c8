//! AstrAI's `embedding`: the layers of `autoregressive_lm` with attention to all of a sequence, no head, and one vector a
//! sequence. Source: AstrAI's `EmbeddingEncoder`.

use super::astrai;
use super::decoder::{DECODER, name_of};
use super::model_type::ModelType;
use crate::config::{ConfigError, EncoderSpec, ModelConfig, Pooling, Raw};
use serde_json::{Map, Value, json};

/// The registration.
pub static EMBEDDING: ModelType = ModelType {
    name: "embedding",
    architectures: &[], // its files have none
    description: "AstrAI's encoder: attention to the whole sequence, one vector a sequence, no head",
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
    let pooling = raw.named("pooling_type", &POOLINGS)?.unwrap_or(Pooling::Mean);
    let normalise = raw.flag("normalize_embeddings", false)?;
    c.encoder = Some(EncoderSpec { pooling, normalise });
    Ok(c)
}

fn save(c: &ModelConfig, model: &ModelType) -> Map<String, Value> {
    let mut out = astrai::save(c, model);
    for key in ["attn_type", "ffn_type", "tie_word_embeddings"] {
        out.shift_remove(key);
    }
    if let Some(e) = &c.encoder {
        out.insert("pooling_type".into(), json!(name_of(&POOLINGS, e.pooling)));
        out.insert("normalize_embeddings".into(), json!(e.normalise));
    }
    out
}
