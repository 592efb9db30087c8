//! In: what went wrong and where. Out: one line that names the file, the tensor and the remedy. Names come from hostile
//! files, so they are escaped and clipped before anyone prints them.

use astrai_files::{FileError, shown};
use std::fmt::Write;
use std::io;
use std::path::{Path, PathBuf};

/// What a damaged or incomplete file calls for.
pub(super) const FETCH_AGAIN: &str = "the file is damaged or cut short: download or copy it again";
/// What a file calls for whose writer did not follow the format.
pub(super) const WRITE_ANEW: &str = "the format forbids this: write the file anew with a safetensors library";

/// How many names a message lists before it says "and n more".
const LISTED: usize = 8;
/// How many characters of a name a message shows.
const NAME: usize = 100;
/// How many characters of another library's message, which may quote the file, are shown.
const MESSAGE: usize = 400;

/// Why weights could not be read or written. `Display` is one line: file, tensor, trouble, remedy.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// A file is absent, of another format, damaged, or asked for in a way it cannot serve; or the system refused an operation.
    #[error("{0}")]
    File(#[from] FileError),
    /// The checkpoint is sound, but its tensors are not those of the model ([`check`](super::Checkpoint::check)).
    #[error("{}: {trouble}", shown(path))]
    Mismatch {
        /// The checkpoint as it was opened.
        path: PathBuf,
        /// Missing, surplus and misshapen tensors, and the remedy.
        trouble: String,
    },
}

impl WeightsError {
    pub(super) fn io(path: &Path, doing: &'static str) -> impl FnOnce(io::Error) -> WeightsError {
        move |source| FileError::io(path, doing)(source).into()
    }

    pub(super) fn refused(path: &Path, trouble: impl Into<String>) -> WeightsError {
        FileError::refused(path, trouble).into()
    }
}

/// `name` on one line, its beginning only where it is long.
pub(super) fn clip(name: &str) -> String {
    clip_to(name, NAME)
}

/// `name` in quotes, on one line, clipped.
pub(super) fn quote(name: &str) -> String {
    format!("\"{}\"", clip(name))
}

/// The parser's reason on one line.
pub(super) fn reason(error: &serde_json::Error) -> String {
    clip_to(&error.to_string(), MESSAGE)
}

fn clip_to(text: &str, limit: usize) -> String {
    let mut out = String::new();
    for (n, c) in text.chars().enumerate() {
        if n == limit {
            out.push('…');
            break;
        }
        out.push(if c.is_control() { '\u{fffd}' } else { c });
    }
    out
}

/// `items` joined by commas, the first [`LISTED`] of them, then how many more there are.
pub(super) fn list(items: &[String]) -> String {
    let mut out = items[..items.len().min(LISTED)].join(", ");
    if items.len() > LISTED {
        let _infallible = write!(out, " and {} more", items.len() - LISTED);
    }
    out
}
