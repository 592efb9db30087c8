//! The registry of model types, and the door of a configuration file. In: a `config.json`, a model directory or the text
//! itself, of transformers or of AstrAI. Out: a [`ModelConfig`] with what was noticed while reading, or one line that says what to
//! correct. A family is added by its file under `families/` and its line in the table of `families/mod.rs`.

use crate::config::{self, ConfigError, MAX_PARAMETERS, ModelConfig, Raw, excerpt, json, packing};
use astrai_ir::packing::Packing;
use serde_json::{Map, Value};
use std::path::Path;

pub use crate::families::{MODELS, ModelType};

/// Largest configuration file read, bytes.
const MAX_FILE: u64 = 16 << 20;

/// Most unknown keys named in a refusal.
const SHOWN: usize = 8;

/// Keys by which a file without a type is recognised as AstrAI's.
const ASTRAI_KEYS: [&str; 8] =
    ["dim", "n_layers", "n_heads", "dim_ffn", "use_gated_attention", "use_qk_norm", "attn_type", "ffn_type"];

/// A configuration and what was noticed while reading it.
#[derive(Clone, Debug)]
pub struct Reading {
    /// The model.
    pub config: ModelConfig,
    /// How its checkpoint packs the weights of linear layers, where it does and the family has no way of its own.
    pub packing: Option<Packing>,
    /// One line each, for the user.
    pub warnings: Vec<String>,
    /// Keys that nothing reads; each has its line in `warnings`.
    pub unknown: Vec<String>,
    file: String,
}

impl Reading {
    /// Refuses the file if it has unknown keys (`--strict`).
    pub fn deny_unknown(self) -> Result<Reading, ConfigError> {
        if self.unknown.is_empty() {
            return Ok(self);
        }
        let shown = self.unknown.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
        let more = if self.unknown.len() > SHOWN { ", …" } else { "" };
        Err(ConfigError::File {
            problem: format!("has {} unknown keys: {shown}{more}", self.unknown.len()),
            remedy: "remove them, or read without --strict".to_owned(),
            file: self.file,
        })
    }
}

impl ModelConfig {
    /// Reads a configuration file, or `config.json` of a model directory.
    pub fn read(path: &Path) -> Result<Reading, ConfigError> {
        let path = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
        let file = path.display().to_string();
        let bytes = astrai_files::read(&path, MAX_FILE)?;
        Self::parse(json::decode(&bytes, &file)?, &file)
    }

    /// Reads a configuration from its text; `file` names it in messages.
    pub fn parse(text: &str, file: &str) -> Result<Reading, ConfigError> {
        let map = json::object(text, file)?;
        let model = infer(&map, file)?;
        let raw = Raw::new(file, &map, model.aliases);
        let config = (model.resolve)(&raw, model)?;
        let packing = if raw.was_read(packing::KEY) { None } else { packing::read(&raw)? };
        model.check_keys(&raw)?;
        let parameters = config::count_parameters(&config);
        if parameters > MAX_PARAMETERS {
            return Err(ConfigError::File {
                file: file.to_owned(),
                problem: format!("describes {parameters} parameters"),
                remedy: format!("the most accepted is {MAX_PARAMETERS}; correct the sizes"),
            });
        }
        let notes = raw.into_notes();
        Ok(Reading {
            config,
            packing,
            warnings: notes.warnings,
            unknown: notes.unknown,
            file: file.to_owned(),
        })
    }

    /// The configuration that transformers (or AstrAI) reads as this model; parsing it gives `self` again. `null` if
    /// `model_type` is not registered, which no configuration is that was read.
    pub fn save(&self) -> Value {
        find(self.model_type).map_or(Value::Null, |model| Value::Object((model.save)(self, model)))
    }
}

/// The model type: by `model_type`, then by `architectures`, then by AstrAI's own keys.
fn infer(map: &Map<String, Value>, file: &str) -> Result<&'static ModelType, ConfigError> {
    let raw = Raw::new(file, map, &[]);
    let remedy = || format!("known model types: {}", known());
    if let Some(name) = raw.text("model_type")? {
        let problem = || format!("is \"{}\", which is not known", excerpt(name));
        return find(name).ok_or_else(|| raw.refuse("model_type", problem(), remedy()));
    }
    let architectures = raw.texts("architectures")?.unwrap_or_default();
    if let Some(first) = architectures.first() {
        let problem = || format!("is \"{}\", which is not known", excerpt(first));
        return architectures
            .iter()
            .find_map(|a| find_architecture(a))
            .ok_or_else(|| raw.refuse("architectures", problem(), remedy()));
    }
    if ASTRAI_KEYS.iter().any(|key| raw.states(key)) {
        return find("autoregressive_lm").ok_or_else(|| raw.missing("model_type"));
    }
    Err(ConfigError::File {
        file: file.to_owned(),
        problem: "does not say which model it describes (no `model_type`, no `architectures`)".to_owned(),
        remedy: format!("add `model_type`; {}", remedy()),
    })
}

/// The type with this name.
pub fn find(name: &str) -> Option<&'static ModelType> {
    MODELS.iter().copied().find(|m| m.name == name)
}

/// The type whose architectures include this one.
pub fn find_architecture(architecture: &str) -> Option<&'static ModelType> {
    MODELS.iter().copied().find(|m| m.architectures.contains(&architecture))
}

/// Names of all types for messages.
pub fn known() -> String {
    MODELS.iter().map(|m| m.name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is saved is read again without a word: no key is written that is not read.
    #[test]
    fn families_read_every_key_that_they_save() {
        for &model in MODELS {
            let rope = match model.name {
                "gemma3_text" | "gemma3" => r#"{"full_attention": {"rope_type": "default"}}"#,
                _ => r#"{"rope_type": "default"}"#,
            };
            // Which heads share keys, or how wide latents are.
            let heads = match model.name.starts_with("deepseek") {
                true => {
                    r#""kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
                    "q_lora_rank": null, "num_experts_per_tok": 1"#
                }
                false => r#""num_key_value_heads": 2"#,
            };
            let keys = format!(
                r#""vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1,
                "num_attention_heads": 4, {heads}, "intermediate_size": 48,
                "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_parameters": {rope}"#
            );
            let text = match model.name {
                "gemma3" => format!(r#"{{"model_type": "gemma3", "text_config": {{{keys}}}}}"#),
                name => format!(r#"{{"model_type": "{name}", {keys}}}"#),
            };
            let first = ModelConfig::parse(&text, "t").unwrap();
            assert_eq!(first.warnings, Vec::<String>::new(), "{}", model.name);
            let again = ModelConfig::parse(&first.config.save().to_string(), "t").unwrap();
            assert_eq!((again.config, again.warnings), (first.config, vec![]), "{}", model.name);
        }
    }
}
