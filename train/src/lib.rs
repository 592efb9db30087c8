//! Datasets in, checkpoints out. The engine runs the compiled programs of a model under training; around it stand the data,
//! the settings of a run, its schedule, checkpoints, metrics and the signals that end it.

pub mod batch;
pub mod checkpoint;
pub mod data;
mod durable;
pub mod engine;
pub mod metrics;
pub mod plot;
pub mod schedule;
pub mod settings;
pub mod signals;
pub mod update;

pub use durable::FileError;
