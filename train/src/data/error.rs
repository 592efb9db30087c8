//! Why data cannot be used, each in one line: the file, the defect, the remedy.

use astrai_serve::tokenizer::TokenizerError;
use std::io;
use std::path::{Path, PathBuf};

/// An error of finding, reading or preparing data.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The system refused.
    #[error("{path}: cannot {doing}: {source}", path = .path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried, and what may help.
        doing: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// A file or folder does not hold what it should.
    #[error("{path}: {message}", path = .path.display())]
    Refused {
        /// The file or folder.
        path: PathBuf,
        /// The defect and the remedy.
        message: String,
    },
    /// What was asked for does not fit the data.
    #[error("{0}")]
    Options(String),
    /// The tokenizer cannot be used.
    #[error("{0}")]
    Tokenizer(#[from] TokenizerError),
}

impl DataError {
    pub(super) fn io(path: &Path, doing: &'static str) -> impl FnOnce(io::Error) -> DataError {
        move |source| DataError::Io { path: path.to_path_buf(), doing, source }
    }

    pub(super) fn refused(path: &Path, message: impl Into<String>) -> DataError {
        DataError::Refused { path: path.to_path_buf(), message: message.into() }
    }
}
