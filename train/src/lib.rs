//! Datasets in, checkpoints out. The engine runs the compiled programs of a model under training; around it stand the data,
//! the settings of a run, its schedule, checkpoints, metrics and the signals that end it.

pub mod batch;
pub mod checkpoint;
pub mod contents;
pub mod data;
pub mod dataset;
pub mod engine;
mod error;
pub mod evaluation;
pub mod frozen;
pub mod hooks;
pub mod lora;
pub mod metrics;
pub mod plot;
pub mod preference;
pub mod router;
mod saver;
pub mod scaler;
pub mod schedule;
pub mod settings;
pub mod signals;
pub mod strategies;
pub mod trainer;
pub mod update;

pub use astrai_files::FileError;
pub use error::Error;
