//! Why a run does not begin or go on, each in one line.

use crate::data::DataError;
use crate::settings;
use astrai_files::FileError;

/// An error of a training run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Settings contradict each other, or do not fit the model or the data.
    #[error("{0}")]
    Settings(#[from] settings::Error),
    /// The data cannot be used.
    #[error("{0}")]
    Data(#[from] DataError),
    /// A checkpoint or the metrics cannot be read or written.
    #[error("{0}")]
    File(#[from] FileError),
    /// A program cannot be made or run.
    #[error("{0}")]
    Run(#[from] astrai_runtime::Error),
    /// What was asked for does not fit together.
    #[error("{0}")]
    Refused(String),
}
