//! The keys of latent attention. In: raw keys. Out: its ranks and widths; and back to keys for saving.

use crate::config::{
    ConfigError, LatentNames, LatentSpec, MAX_HEAD_DIM, MAX_WIDTH, ModelConfig, Raw, RopeKey,
};
use serde_json::{Map, Value, json};

/// Keys that [`read`] looks at.
pub(super) const KEYS: &[&str] = &["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"];

/// DeepSeek's names.
pub(super) static NAMES: LatentNames = LatentNames {
    q: "self_attn.q_proj",
    q_down: "self_attn.q_a_proj",
    q_norm: "self_attn.q_a_layernorm",
    q_up: "self_attn.q_b_proj",
    kv_down: "self_attn.kv_a_proj_with_mqa",
    kv_norm: "self_attn.kv_a_layernorm",
    kv_up: "self_attn.kv_b_proj",
};

/// Ranks and widths, every one of which has to be stated: values as wide as keys, and every head of keys with a rotated part
/// of its own, as AstrAI has them.
pub(super) fn read(raw: &Raw, norm_eps: f64, names: &'static LatentNames) -> Result<LatentSpec, ConfigError> {
    let [rank, nope, rope] = [(KEYS[0], MAX_WIDTH), (KEYS[1], MAX_HEAD_DIM), (KEYS[2], MAX_HEAD_DIM)]
        .map(|(k, m)| raw.count(k, m));
    let (rank, nope, rope) = (rank?, nope?, rope?);
    if !rope.is_multiple_of(2) {
        return Err(raw.refuse(KEYS[2], format!("is {rope}"), "rope turns pairs, so it must be even"));
    }
    if nope + rope > MAX_HEAD_DIM {
        let problem = format!("is {nope}, with {} {rope} behind it", KEYS[2]);
        return Err(raw.refuse(KEYS[1], problem, format!("heads have at most {MAX_HEAD_DIM} components")));
    }
    let value = nope + rope;
    Ok(LatentSpec { q_rank: None, rank, nope, rope, value, rope_key: RopeKey::OfLatent, norm_eps, names })
}

/// The same as DeepSeek has them: a rotated part that all heads share, values of their own width, queries through a latent of
/// their own where `q_lora_rank` is no `null`.
pub(super) fn read_shared(raw: &Raw, norm_eps: f64) -> Result<LatentSpec, ConfigError> {
    let spec = read(raw, norm_eps, &NAMES)?;
    let value = raw.count("v_head_dim", MAX_HEAD_DIM)?;
    let q_rank = raw.count_opt("q_lora_rank", MAX_WIDTH)?;
    if q_rank.is_none() && !raw.states("q_lora_rank") {
        return Err(raw.refuse("q_lora_rank", "is missing", "add it; null means queries without a latent"));
    }
    if let Some(width) = raw.count_opt("qk_head_dim", MAX_HEAD_DIM)?.filter(|w| *w != spec.width()) {
        let problem = format!("is {width}, {} and {} make {}", KEYS[1], KEYS[2], spec.width());
        return Err(raw.refuse("qk_head_dim", problem, "correct one of them"));
    }
    Ok(LatentSpec { q_rank, value, rope_key: RopeKey::Shared, ..spec })
}

/// Adds the keys of the latent attention of `c`, if it has any.
pub(super) fn save(c: &ModelConfig, out: &mut Map<String, Value>) {
    let Some(l) = c.layers.first().and_then(|l| l.attention.latent.as_ref()) else { return };
    for (key, value) in KEYS.iter().zip([l.rank, l.nope, l.rope]) {
        out.insert((*key).into(), json!(value));
    }
    if l.rope_key == RopeKey::Shared {
        out.insert("q_lora_rank".into(), json!(l.q_rank));
        out.insert("v_head_dim".into(), json!(l.value));
        // There, the width that rope sees.
        out.insert("head_dim".into(), json!(l.rope));
    }
}
