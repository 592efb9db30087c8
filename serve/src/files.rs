//! Small files of a model's folder, hostile until read. In: a path and a bound. Out: bytes or an object, or the defect and its
//! remedy on one line, for the module that knows what the file is for.

use serde_json::{Map, Value};
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// The contents of a file; `None` where there is none.
pub(crate) fn read(path: &Path, largest: u64) -> Result<Option<Vec<u8>>, String> {
    let size = match fs::metadata(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(format!("cannot read: {e}")),
        Ok(found) if !found.is_file() => return Err("is no regular file; name the right one".into()),
        Ok(found) => found.len(),
    };
    if size > largest {
        return Err(format!("{size} bytes are too many, {largest} is the limit; name the right file"));
    }
    fs::read(path).map(Some).map_err(|e| format!("cannot read: {e}"))
}

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
