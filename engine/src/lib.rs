//! The library that the commands, tests, examples and other programs share. In: a model directory or a configuration, a device. Out:
//! programs planned for the device, sessions with the model's weights, engines that train and serve it, and checks against what a
//! reference implementation computed. It prints nothing: what a person should hear of comes as [`Note`]s.

pub mod adapters;
pub mod batch;
pub mod calibrate;
pub mod compare;
pub mod curve;
mod error;
pub mod export;
pub mod figures;
pub mod gguf;
pub mod golden;
pub mod gradients;
pub mod greedy;
pub mod load;
pub mod machine;
pub mod model;
pub mod objective;
pub mod page;
pub mod programs;
pub mod serving;
pub mod texts;

pub use error::{Error, Hear, Note, unheard};
pub use machine::{Kind, Machine};
pub use model::Model;
