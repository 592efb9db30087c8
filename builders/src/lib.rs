//! Builders: from a model's configuration to its graphs. In: `config.json`. Out: a resolved configuration, the model's
//! weights by name, shape and initialiser, and the graph of every program of the model.
//!
//! Modules depend on each other in one direction: `config` (plain data, raw keys) ← `families` (a row per family) ←
//! `registry` (reading and saving) ← `placements`; `config` ← `program` ← `graph`.

pub mod config;
mod families;
mod graph;
mod placements;
mod program;
pub mod registry;

pub use config::{ConfigError, ModelConfig, Names};
pub use graph::build;
pub use placements::{Ranks, placements};
pub use program::{Cache, Logits, Loss, Program, TOKEN_OUTPUTS, Windows};
pub use registry::{MODELS, ModelType, Reading};
