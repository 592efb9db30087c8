//! Where templates lie. In: a model's folder. Out: named sources, and the special tokens that templates print.

use super::TemplateError;
use crate::files;
use astrai_files::read_present;
use serde_json::{Map, Value};
use std::fs;
use std::path::{Path, PathBuf};

/// Published templates have some ten thousand bytes.
const LARGEST: u64 = 1 << 20;
const LARGEST_CONFIG: u64 = 1 << 26;

const CONFIG: &str = "tokenizer_config.json";

/// A template as it was found.
pub(super) struct Found {
    pub name: String,
    pub source: String,
    pub origin: PathBuf,
}

fn refuse(path: &Path, message: impl Into<String>) -> TemplateError {
    TemplateError::File { path: path.to_path_buf(), message: message.into() }
}

/// The templates of a folder: the newer layout if it is there, or else the older ones.
pub(super) fn templates(folder: &Path) -> Result<Vec<Found>, TemplateError> {
    let newer = newer(folder)?;
    if !newer.is_empty() {
        return Ok(newer);
    }
    for file in [CONFIG, "chat_template.json"] {
        let path = folder.join(file);
        let Some(config) = object(&path)? else { continue };
        let found = in_config(&path, config.get("chat_template"))?;
        if !found.is_empty() {
            return Ok(found);
        }
    }
    Ok(Vec::new())
}

fn newer(folder: &Path) -> Result<Vec<Found>, TemplateError> {
    let mut found = Vec::new();
    let mut add = |name: String, path: PathBuf| -> Result<(), TemplateError> {
        if let Some(source) = text(&path, LARGEST)? {
            found.push(Found { name, source, origin: path });
        }
        Ok(())
    };
    add("default".into(), folder.join("chat_template.jinja"))?;
    let more = folder.join("additional_chat_templates");
    let Ok(entries) = fs::read_dir(&more) else { return Ok(found) };
    let mut paths: Vec<PathBuf> = entries.filter_map(|e| e.ok().map(|e| e.path())).collect();
    paths.sort();
    for path in paths.into_iter().filter(|p| p.extension().is_some_and(|e| e == "jinja")) {
        let name = path.file_stem().and_then(|s| s.to_str()).map(str::to_owned);
        add(name.ok_or_else(|| refuse(&path, "has a name that is not UTF-8; rename it"))?, path)?;
    }
    Ok(found)
}

fn in_config(path: &Path, value: Option<&Value>) -> Result<Vec<Found>, TemplateError> {
    let refused = |key: &str| {
        refuse(
            path,
            format!("`{key}` is neither a text nor a list of {{name, template}}; mend it or remove it"),
        )
    };
    let found = |name: &str, source: &str| {
        if source.len() as u64 > LARGEST {
            return Err(refuse(path, format!("`chat_template` has more than {LARGEST} bytes; shorten it")));
        }
        Ok(Found { name: name.into(), source: source.into(), origin: path.to_path_buf() })
    };
    match value {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::String(source)) => Ok(vec![found("default", source)?]),
        Some(Value::Array(list)) => list
            .iter()
            .enumerate()
            .map(|(i, entry)| {
                let text = |key| entry.get(key).and_then(Value::as_str);
                match (text("name"), text("template")) {
                    (Some(name), Some(source)) => found(name, source),
                    _ => Err(refused(&format!("chat_template[{i}]"))),
                }
            })
            .collect(),
        Some(_) => Err(refused("chat_template")),
    }
}

/// Special tokens by the names that templates know: each `…_token` of the tokenizer's configuration.
pub(super) fn tokens(folder: &Path) -> Result<Map<String, Value>, TemplateError> {
    let mut found = Map::new();
    for file in [CONFIG, "special_tokens_map.json"] {
        let config = object(&folder.join(file))?.unwrap_or_default();
        for (key, value) in config {
            let value = match value {
                Value::Object(mut token) => token.remove("content").unwrap_or_default(),
                other => other,
            };
            if key.ends_with("_token") && value.is_string() && !found.contains_key(&key) {
                found.insert(key, value);
            }
        }
    }
    Ok(found)
}

fn object(path: &Path) -> Result<Option<Map<String, Value>>, TemplateError> {
    let bytes = read_present(path, LARGEST_CONFIG).map_err(|e| refuse(path, e.trouble()))?;
    bytes.map(|b| files::object(&b).map_err(|message| refuse(path, message))).transpose()
}

fn text(path: &Path, largest: u64) -> Result<Option<String>, TemplateError> {
    let bytes = read_present(path, largest).map_err(|e| refuse(path, e.trouble()))?;
    let text = bytes.map(|b| String::from_utf8(b).map_err(|_| refuse(path, "is not UTF-8; save it as such")));
    text.transpose()
}
