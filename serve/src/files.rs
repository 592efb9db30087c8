//! Small files of a model's folder, hostile until read. In: bytes, or messages of a library. Out: an object, or the defect and
//! its remedy on one line, for the module that knows what the file is for.

use serde_json::{Map, Value};

/// The JSON object that a file holds.
pub(crate) fn object(bytes: &[u8]) -> Result<Map<String, Value>, String> {
    serde_json::from_slice(bytes).map_err(|e| {
        format!("is no JSON object ({}); mend it or move it out of the folder", line(&e.to_string()))
    })
}

/// A message of a library on one line, no longer than one can read.
pub(crate) fn line(message: &str) -> String {
    let flat = message.split_whitespace().collect::<Vec<_>>().join(" ");
    match flat.char_indices().nth(400) {
        Some((at, _)) => format!("{}…", &flat[..at]),
        None => flat,
    }
}
