//! Why data cannot be used, each in one line: the file, the defect, the remedy.

use astrai_files::{FileError, one_line};
use astrai_serve::tokenizer::TokenizerError;
use std::io;
use std::path::Path;

/// Bytes of a message that is shown whole.
const MESSAGE: usize = 1500;

/// An error of finding, reading or preparing data.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A file or folder cannot be read or written, or does not hold what it should.
    #[error("{0}")]
    File(#[from] FileError),
    /// What was asked for does not fit the data.
    #[error("{0}")]
    Options(String),
    /// The tokenizer cannot be used.
    #[error("{0}")]
    Tokenizer(#[from] TokenizerError),
}

impl DataError {
    pub(crate) fn io(path: &Path, doing: &'static str) -> impl FnOnce(io::Error) -> DataError {
        move |source| FileError::io(path, doing)(source).into()
    }

    pub(crate) fn refused(path: &Path, message: impl Into<String>) -> DataError {
        // Names in a message may be a file's own, of any length.
        let mut message = message.into();
        if message.len() > MESSAGE || message.contains(char::is_control) {
            message = one_line(&message);
        }
        FileError::refused(path, message).into()
    }
}
