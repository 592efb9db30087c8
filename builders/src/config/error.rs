//! What can be wrong with a configuration. In: file, key, value. Out: one line that names them and the remedy.

use astrai_files::FileError;
use serde_json::Value;
use thiserror::Error;

/// Why a configuration was refused. `Display` is one line: file, key, problem, remedy.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file could not be opened or read.
    #[error("{0}; give a config.json or a model directory that holds one")]
    Read(#[from] FileError),
    /// The file as a whole is no configuration: not UTF-8, not JSON, no object, no known model.
    #[error("{file}: {problem}; {remedy}")]
    File {
        /// The file.
        file: String,
        /// What is wrong.
        problem: String,
        /// What to do.
        remedy: String,
    },
    /// One key is missing, malformed, contradictory or not supported.
    #[error("{file}: key `{key}` {problem}; {remedy}")]
    Key {
        /// The file.
        file: String,
        /// The key as the file spells it; nested keys are joined by dots.
        key: String,
        /// What is wrong, with the value.
        problem: String,
        /// What to do.
        remedy: String,
    },
}

/// Longest description of a problem, which may show several values, characters.
pub(crate) const PROBLEM: usize = 600;

/// Longest excerpt of a value or a key in a message, characters.
const EXCERPT: usize = 60;

/// `text` on one line, control characters escaped, shortened with an ellipsis.
pub(crate) fn excerpt(text: &str) -> String {
    clipped(text, EXCERPT)
}

/// The same of so many characters.
pub(crate) fn clipped(text: &str, most: usize) -> String {
    let mut out: String = text
        .chars()
        .take(most)
        .flat_map(|c| if c.is_control() { c.escape_default().collect::<Vec<_>>() } else { vec![c] })
        .collect();
    if text.chars().nth(most).is_some() {
        out.push('…');
    }
    out
}

/// A JSON value for a message.
pub(crate) fn show(value: &Value) -> String {
    excerpt(&value.to_string())
}
