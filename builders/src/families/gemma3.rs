//! Gemma 3, its language part: five of six layers windowed, with another rope than the others; queries and keys normed per
//! head. Read as `gemma3_text`, and from under `text_config` of `gemma3`, whose image tower is not built.
//! Source: `Gemma3ForCausalLM` and `Gemma3ForConditionalGeneration` of transformers.

use super::decoder::DECODER;
use super::gemma::{self, GEMMA, WINDOW};
use super::model_type::{AttentionBias, Defaults, ModelType};
use super::windows::{self, Windows};
use crate::config::rope_keys::{self, LayerType};
use crate::config::{ConfigError, MAX_LAYERS, ModelConfig, Names, QkNorm, Raw, RopeScaling, RopeSpec, show};
use serde_json::{Map, Value, json};

/// The registration of the language model by itself.
pub static GEMMA3_TEXT: ModelType = ModelType {
    name: "gemma3_text",
    architectures: &["Gemma3ForCausalLM"],
    description: "Gemma 3: windows with a rope of their own on most layers, q and k normed, norms by 1 + w",
    defaults: DEFAULTS,
    resolve,
    save,
    ..GEMMA
};

/// The registration of the model that also sees: only its language part is built.
pub static GEMMA3: ModelType = ModelType {
    name: "gemma3",
    architectures: &["Gemma3ForConditionalGeneration"],
    description: "Gemma 3 with images: the language part alone, from under text_config",
    // The image tower and its tokens; the language part says the rest again.
    inert: &[
        "vision_config",
        "mm_tokens_per_image",
        "boi_token_index",
        "eoi_token_index",
        "image_token_index",
        "boi_token_id",
        "eoi_token_id",
        "image_token_id",
        "initializer_range",
        "dtype",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    ],
    names: &NESTED,
    // The language part's; its keys stand under text_config.
    defaults: Defaults { windows: Windows::None, bias: AttentionBias::None, ..DEFAULTS },
    resolve: resolve_nested,
    save: save_nested,
    ..DECODER
};

static NESTED: Names = Names {
    embed: "language_model.model.embed_tokens.weight",
    layer: "language_model.model.layers.{i}.",
    final_norm: "language_model.model.norm.weight",
    head: "language_model.lm_head.weight",
    ignored_prefixes: &["vision_tower.", "multi_modal_projector."],
    ..gemma::NAMES
};

const FULL: LayerType = LayerType { name: "full_attention", theta: "rope_theta", default: 1e6, scaled: true };
const WINDOWED: LayerType =
    LayerType { name: "sliding_attention", theta: "rope_local_base_freq", default: 1e4, scaled: false };

const DEFAULTS: Defaults = Defaults {
    max_positions: Some(131_072),
    layer_type: Some(FULL),
    qk_norm: QkNorm::BeforeRope,
    windows: Windows::Pattern(WINDOW, |i| !(i + 1).is_multiple_of(6)),
    ..GEMMA.defaults
};

fn resolve(raw: &Raw, model: &ModelType) -> Result<ModelConfig, ConfigError> {
    let mut c = gemma::resolve(raw, model, None, None)?;
    let [stated, private] =
        ["sliding_window_pattern", "_sliding_window_pattern"].map(|k| raw.count_opt(k, MAX_LAYERS));
    let period = stated?.or(private?).unwrap_or(6);
    windows::pattern(raw, &mut c, WINDOW, |i| !(i + 1).is_multiple_of(period))?;
    let windowed = Defaults { layer_type: Some(WINDOWED), ..model.defaults };
    let rope = rope_keys::read(raw, c.head_dim, c.max_positions, &windowed.rope())?;
    for layer in c.layers.iter_mut().filter(|l| l.attention.window.is_some()) {
        layer.attention.rope = rope.clone();
    }
    Ok(c)
}

/// Sizes that published files leave out under `text_config`.
const SIZES: [(&str, usize); 4] =
    [("vocab_size", 262_208), ("num_attention_heads", 8), ("num_key_value_heads", 4), ("head_dim", 256)];

fn resolve_nested(raw: &Raw, model: &ModelType) -> Result<ModelConfig, ConfigError> {
    let Some((key, Value::Object(text))) = raw.find("text_config")? else {
        return Err(raw.refuse("text_config", "is no object", "it describes the language part"));
    };
    let mut text = text.clone();
    for (key, size) in SIZES {
        if text.get(key).is_none_or(Value::is_null) {
            text.insert(key.into(), json!(size));
        }
    }
    let tied = json!(raw.flag("tie_word_embeddings", true)?);
    match text.get("tie_word_embeddings").filter(|v| !v.is_null()) {
        Some(other) if *other != tied => {
            let problem = format!("is {tied} while `{key}` has {}", show(other));
            return Err(raw.refuse("tie_word_embeddings", problem, "state the same in both"));
        }
        _ => _ = text.insert("tie_word_embeddings".into(), tied),
    }
    raw.within(key, &text, GEMMA.aliases, |inner| {
        match inner.text("model_type")? {
            Some("gemma3_text") | None => {}
            Some(other) => {
                let problem = format!("is {}", json!(other));
                return Err(inner.refuse("model_type", problem, "supported: gemma3_text"));
            }
        }
        let c = resolve(inner, &GEMMA3_TEXT)?;
        GEMMA3_TEXT.check_keys(inner)?;
        Ok(ModelConfig { model_type: model.name, names: model.names, ..c })
    })
}

fn save(c: &ModelConfig, model: &ModelType) -> Map<String, Value> {
    let mut out = gemma::save(c, model);
    let of = |windowed: bool| {
        let layer = c.layers.iter().find(|l| l.attention.window.is_some() == windowed);
        layer.map(|l| &l.attention.rope)
    };
    let theta = |rope: Option<&RopeSpec>, of: LayerType| rope.map_or(of.default, |r| r.theta);
    let (full, windowed) = (of(false), of(true));
    let bases = [(FULL, full), (WINDOWED, windowed)];
    out.shift_remove("rope_scaling");
    if windowed.is_none_or(|r| r.scaling == RopeScaling::None) {
        // The older layout, which every reader knows.
        for (of, rope) in bases {
            out.insert(of.theta.into(), json!(theta(rope, of)));
        }
        if let Some(scaling) = full.and_then(|r| rope_keys::write_scaling(&r.scaling)) {
            out.insert("rope_scaling".into(), scaling);
        }
        return out;
    }
    out.shift_remove("rope_theta");
    let entry = |(of, rope): (LayerType, Option<&RopeSpec>)| {
        let scaling = rope.and_then(|r| rope_keys::write_scaling(&r.scaling));
        let mut map = scaling.unwrap_or_else(|| json!({"rope_type": "default"}));
        map["rope_theta"] = json!(theta(rope, of));
        (of.name.to_owned(), map)
    };
    out.insert("rope_parameters".into(), Value::Object(bases.into_iter().map(entry).collect()));
    out
}

fn save_nested(c: &ModelConfig, model: &ModelType) -> Map<String, Value> {
    let mut text = save(c, &GEMMA3_TEXT);
    text.shift_remove("architectures");
    let mut out = Map::new();
    out.insert("architectures".into(), json!(model.architectures));
    out.insert("model_type".into(), json!(model.name));
    out.insert("tie_word_embeddings".into(), json!(c.tie_embeddings));
    out.insert("text_config".into(), Value::Object(text));
    out
}
