//! Datasets in, checkpoints out: the engine runs the compiled programs of a model under training.

pub mod batch;
pub mod engine;
pub mod update;
