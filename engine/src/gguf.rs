//! Models in GGUF files. In: a file's metadata. Out: the configuration, the tokenizer and the chat template as transformers lays them out, so
//! that one reader checks them all; and which tensors of the file are the model's.

mod config;
mod rope;
mod tokenizer;

use self::config::Keys;
use self::tokenizer::tokenizer;
use astrai_builders::{ModelConfig, Reading};
use astrai_ir::Storage;
use astrai_runtime::weights::{Gguf, InFile, OfGguf};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

/// A file as a model: its configuration, and its tensors.
///
/// # Errors
/// One line: what of the file is not known, or is not there.
pub fn open(path: &Path) -> Result<(Reading, OfGguf), String> {
    let file = Gguf::open(path).map_err(|e| e.to_string())?;
    let named = |line: String| format!("{}: {line}", path.display());
    let keys = Keys::of(&file).map_err(named)?;
    let config = keys.config(&file).map_err(named)?;
    let reading = ModelConfig::parse(&config.to_string(), &path.display().to_string());
    let mut reading = reading.map_err(|e| e.to_string())?;
    reading.warnings.extend(keys.check().map_err(named)?);
    let layers = keys.layers(&file, [reading.config.heads, reading.config.kv_heads]);
    let stored = move |name: &str| InFile::of(name, &layers);
    let expected: Vec<_> = reading.config.tensors().into_iter().map(|t| (t.name, t.shape)).collect();
    file.check(expected.iter().cloned(), &stored).map_err(|e| e.to_string())?;
    // What kernels read as codes stays as the file has it.
    let kept = |(name, _): (String, _)| Some((name.clone(), file.narrow(&stored(&name)?)?));
    let kept: BTreeMap<_, _> = expected.into_iter().filter_map(kept).collect();
    reading.config.packed = (!kept.is_empty()).then(|| Storage::Each(Arc::new(kept)));
    Ok((reading, OfGguf::new(file, Box::new(stored))))
}

/// A folder with the configuration, the tokenizer and the chat template of a file; it goes when it is dropped.
///
/// # Errors
/// One line.
pub fn texts(path: &Path) -> Result<TempDir, String> {
    let file = Gguf::open(path).map_err(|e| e.to_string())?;
    let folder = tempfile::tempdir().map_err(|e| format!("a temporary folder: {e}"))?;
    write_texts(&file, folder.path())?;
    Ok(folder)
}

/// Writes `config.json`, `tokenizer.json` and `tokenizer_config.json` of a file into a folder.
///
/// # Errors
/// One line.
fn write_texts(file: &Gguf, folder: &Path) -> Result<(), String> {
    let named = |line: String| format!("{}: {line}", file.path().display());
    let (tokenizer, beside) = tokenizer(file).map_err(named)?;
    let config = Keys::of(file).and_then(|keys| keys.config(file)).map_err(named)?;
    let (config, beside) = (config.to_string(), beside.to_string());
    let texts = [("config.json", config), ("tokenizer.json", tokenizer), ("tokenizer_config.json", beside)];
    for (name, text) in texts {
        let path = folder.join(name);
        std::fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    Ok(())
}
