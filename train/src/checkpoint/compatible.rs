//! Whether a run may resume. In: a checkpoint, and the model, settings and data of the run that would continue it. Out: the
//! first difference that would make it another run, or what may change and did. Model and settings come first, because text that belongs to
//! another run need not be read.

use std::path::Path;

use astrai_builders::ModelConfig;
use serde_json::Value;

use super::{CONFIG, Opened, TRAINER};
use crate::settings::Settings;
use astrai_files::{FileError, one_line};

/// Settings that decide which samples make an update, what is learnt of them, and the tensors of the optimizer.
pub(super) const FIXED: [&str; 23] = [
    "strategy",
    "set",
    "reference",
    "old",
    "batch",
    "seq",
    "stride",
    "packing",
    "accum",
    "optimizer",
    "ema",
    "dtype",
    "moments",
    "freeze",
    "neftune_alpha",
    "rounding",
    "precision",
    "seed",
    "lora_rank",
    "lora_alpha",
    "lora_targets",
    "rslora",
    "dora",
];

/// Settings that bend the rest of the curve: allowed, never silently.
pub(super) const CURVE: [&str; 23] = [
    "lr",
    "schedule",
    "warmup",
    "warmup_form",
    "stable",
    "cycle",
    "cycle_mult",
    "min_lr",
    "steps",
    "epochs",
    "weight_decay",
    "clip",
    "skip_norm",
    "beta1",
    "beta2",
    "eps",
    "momentum",
    "nesterov",
    "muon_scale",
    "adamw_lr",
    "group",
    "router_aux_loss_coef",
    "router_z_loss_coef",
];

/// Holds a checkpoint to the run that would continue it: `config` is its model's `config.json`. Gives a line for each setting
/// that may differ and does.
///
/// # Errors
/// Another model, or a setting that must stay: the first difference.
pub fn check_compatible(
    checkpoint: &Opened,
    config: &str,
    settings: &Settings,
) -> Result<Vec<String>, FileError> {
    let file = |name: &str| checkpoint.path.join(name);
    let ours = model(config, Path::new(CONFIG))?;
    if let Some(line) = difference("", &model(&checkpoint.config, &file(CONFIG))?, &ours) {
        return Err(FileError::refused(&file(CONFIG), format!("of another model: {line}")));
    }
    let refused = |trouble: String| FileError::refused(&file(TRAINER), trouble);
    let before = &checkpoint.trainer.settings;
    let as_json = |settings: &Settings| serde_json::to_value(settings).map_err(|e| refused(e.to_string()));
    let (was, is) = (as_json(before)?, as_json(settings)?);
    let other_words = before.vocab.zip(settings.vocab).is_some_and(|(a, b)| a != b);
    let other_held = (before.eval_every == 0) != (settings.eval_every == 0);
    let special = [("vocab", other_words), ("eval_every", other_held)];
    let special = special.into_iter().filter_map(|(key, differs)| differs.then_some(key));
    if let Some(key) = FIXED.into_iter().filter(|key| was[key] != is[key]).chain(special).next() {
        let why =
            if key == "eval_every" { " between 0 and more, for it decides what is held out" } else { "" };
        let trouble = format!(
            "{key} was {}, is now {}: it cannot change{why} on --resume; start another run with --model",
            was[key], is[key]
        );
        return Err(refused(trouble));
    }
    let changed = CURVE.into_iter().filter(|key| was[key] != is[key]);
    Ok(changed.map(|key| format!("{key} was {}, is now {}", was[key], is[key])).collect())
}

/// Holds a checkpoint to the data of the run that would continue it, by their fingerprint.
///
/// # Errors
/// They are others.
pub fn check_same_data(checkpoint: &Opened, data: &str) -> Result<(), FileError> {
    if checkpoint.trainer.data == data {
        return Ok(());
    }
    Err(FileError::refused(
        &checkpoint.path.join(TRAINER),
        "the data are not those it was trained on: give the same --data and tokenizer, or start another run with --model",
    ))
}

/// What a config.json means: two texts that mean the same model give the same value.
fn model(text: &str, path: &Path) -> Result<Value, FileError> {
    let reading = ModelConfig::parse(text, &path.display().to_string());
    let reading = reading.map_err(|e| FileError::refused(path, one_line(&e.to_string())))?;
    let mut keys = reading.config.save();
    // A checkpoint says these of its own weights and tokenizer.
    for key in ["torch_dtype", "dtype", "bos_token_id", "eos_token_id", "pad_token_id"] {
        keys.as_object_mut().and_then(|keys| keys.remove(key));
    }
    Ok(keys)
}

/// The first key in which two values differ, with both.
fn difference(at: &str, was: &Value, is: &Value) -> Option<String> {
    if let (Value::Object(a), Value::Object(b)) = (was, is) {
        let keys = a.keys().chain(b.keys().filter(|key| !a.contains_key(*key)));
        let missing = Value::Null;
        let value =
            |map: &serde_json::Map<String, Value>, key: &str| map.get(key).unwrap_or(&missing).clone();
        return keys
            .filter_map(|key| {
                let at = if at.is_empty() { key.clone() } else { format!("{at}.{key}") };
                difference(&at, &value(a, key), &value(b, key))
            })
            .next();
    }
    (was != is)
        .then(|| format!("{at} is {} there, {} here", one_line(&was.to_string()), one_line(&is.to_string())))
}
