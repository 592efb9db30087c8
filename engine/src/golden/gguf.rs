//! GGUF files held to a reference. In: a folder of `.gguf` files with a list of them, `golden.json`, with `golden.safetensors` (`input_ids`,
//! `<file>.logits`, `<file>.dequantised`) and `tokenizer_cases.json`. Out: rows for logits, numbers and ids of each file.

use super::narrow::logits;
use super::{Row, floats, largest};
use crate::gguf;
use crate::machine::Machine;
use crate::model::Model;
use crate::{Error, Hear};
use astrai_runtime::weights::{Checkpoint, Gguf, is_gguf};
use astrai_serve::tokenizer::Tokenizer;
use serde_json::Value;
use std::path::Path;

/// Longest list that is read.
const LONGEST: u64 = 1 << 20;

/// Checks a folder; no rows of one of another kind.
///
/// # Errors
/// The golden file is not of these files, or the device failed.
pub fn rows(folder: &Path, machine: &Machine, hear: Hear) -> Result<Vec<Row>, Error> {
    let read = |name: &str| -> Result<Value, Error> {
        let text = astrai_files::read_text(&folder.join(name), LONGEST).map_err(|e| e.to_string())?;
        Ok(serde_json::from_str(&text).map_err(|e| format!("{}: {e}", folder.join(name).display()))?)
    };
    let list = if folder.join("golden.json").is_file() { read("golden.json")? } else { Value::Null };
    let named = |entry: &Value| entry["file"].as_str().map(|name| (name.to_string(), entry.clone()));
    let files: Vec<_> = list.as_array().into_iter().flatten().filter_map(named).collect();
    if !files.iter().any(|(name, _)| is_gguf(&folder.join(name))) {
        return Ok(vec![]);
    }
    let path = folder.join("golden.safetensors");
    let file = Checkpoint::open(&path)?;
    let mut rows = Vec::new();
    for (name, entry) in &files {
        let at = folder.join(name);
        let wanted = format!("{name}.logits");
        let mut model = Model::open(&at, false)?;
        // The reference has the weights' codes alone.
        let codes = model.config.packed.take().filter(|_| machine.backend().reads_codes());
        rows.push(logits(&model, machine, &file, &path, &wanted, hear)?);
        if let Some(codes) = codes {
            model.config.packed = Some(codes.rounding(false));
            let row = logits(&model, machine, &file, &path, &wanted, hear)?;
            rows.push(Row { check: format!("{wanted} (codes)"), ..row });
        }
        let tensor = entry["dequantised"].as_str().unwrap_or_default();
        let got = Gguf::open(&at)?.floats(tensor).ok_or_else(|| format!("{name} has no `{tensor}`"))?;
        let want = floats(&file, &path, &format!("{name}.dequantised"), got.len())?;
        let off = got.iter().zip(&want).map(|(a, b)| f64::from(*a) - f64::from(*b));
        let error = largest(off) / largest(want.iter().map(|x| f64::from(*x)));
        rows.push(Row::compared(
            format!("{name}.numbers"),
            error,
            1e-6,
            &format!("{tensor}, of the largest"),
        ));
    }
    if folder.join("tokenizer_cases.json").is_file() {
        rows.push(ids(&read("tokenizer_cases.json")?, folder, &files)?);
    }
    Ok(rows)
}

/// How many texts have other ids than the reference's, in any file.
fn ids(cases: &Value, folder: &Path, files: &[(String, Value)]) -> Result<Row, Error> {
    let cases = cases["encode"].as_array().ok_or("tokenizer_cases.json has no list `encode`")?;
    let mut wrong = 0;
    for (name, _) in files {
        let texts = gguf::texts(&folder.join(name))?;
        let tokenizer = Tokenizer::open(texts.path()).map_err(|e| e.to_string())?;
        for case in cases {
            let text = case["text"].as_str().unwrap_or_default();
            let got = tokenizer.encode(text, false).map_err(|e| e.to_string())?;
            wrong += usize::from(serde_json::json!(got) != case["ids"]);
        }
    }
    let note = format!("of {} texts by {} files, those of other ids", cases.len(), files.len());
    Ok(Row::compared("tokenizer", wrong as f64, 0.0, &note))
}
