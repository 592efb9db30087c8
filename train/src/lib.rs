//! Datasets in, checkpoints out. The training programs are built from the gradient rules that every operator in `astrai-ir`
//! already has.

pub mod checkpoint;
mod durable;
pub mod metrics;
pub mod plot;
pub mod schedule;
pub mod settings;
pub mod signals;

pub use durable::FileError;
