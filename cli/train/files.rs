//! What a checkpoint has beside its weights. In: the model that a run began with, its tokenizer. Out: the text of `config.json`, and the small
//! files that make its folder a model's.

use crate::failure::Failure;
use astrai_engine::export::{COPIED, LONGEST, tell_dtype};
use astrai_engine::model::Model;
use astrai_ir::DType;
use astrai_serve::recommended::FILE;
use astrai_serve::tokenizer::SpecialTokens;
use astrai_train::checkpoint::{Attachment, Opened};
use astrai_train::settings::Settings;
use serde_json::{Map, Value, json};

/// The text of a checkpoint's `config.json`: its weights are of this type, and a model that began here has its tokenizer's ids, whatever the
/// configuration was written for.
pub fn described(text: String, settings: &Settings, dtype: DType, special: Option<&SpecialTokens>) -> String {
    let Ok(mut keys) = serde_json::from_str::<Map<String, Value>>(&text) else { return text };
    tell_dtype(&mut keys, dtype);
    if let (None, Some(special)) = (&settings.model, special) {
        let known = [("bos", &special.bos), ("eos", &special.eos), ("pad", &special.pad)];
        for (name, token) in known {
            let key = format!("{name}_token_id");
            let id = token.as_ref().map(|token| json!(token.id));
            // Of the tokenizer's own family there may be several.
            let has = |ids: &Value| {
                ids.as_array().is_some_and(|ids| ids.iter().any(|one| Some(one) == id.as_ref()))
            };
            if settings.vocab.is_some() || id.is_some() && !keys.get(&key).is_some_and(has) {
                keys.insert(key, json!(id));
            }
        }
    }
    format!("{:#}\n", Value::Object(keys))
}

/// Adds the small files that the model came with, its recommended sampling among them; those of a tokenizer only where it is the model's.
pub fn with_those_of_the_model(
    files: &mut Vec<Attachment>,
    settings: &Settings,
    checkpoint: Option<&Opened>,
    model: Option<&Model>,
) -> Result<(), Failure> {
    let there = |files: &[Attachment], name: &str| files.iter().any(|file| file.name == name);
    if let Some(checkpoint) = checkpoint {
        let more: Vec<_> = checkpoint.tokenizer.iter().filter(|f| !there(files, &f.name)).cloned().collect();
        files.extend(more);
        return Ok(());
    }
    let folder = model.and_then(|model| model.folder.as_deref()).filter(|_| settings.vocab.is_none());
    let Some(folder) = folder else { return Ok(()) };
    let own = settings.tokenizer.is_none();
    for name in COPIED.into_iter().filter(|name| own || *name == FILE) {
        if there(files, name) {
            continue;
        }
        if let Some(bytes) = astrai_files::read_present(&folder.join(name), LONGEST)? {
            files.push(Attachment { name: name.into(), bytes });
        }
    }
    Ok(())
}
