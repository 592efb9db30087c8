//! Builders: from the configuration of a model to what is computed. In: `config.json`. Out: a resolved description, its
//! weights by name, shape and initialiser, and the graph of every program of the model.

pub mod config;
mod experts;
mod layer;
pub mod model;
pub mod models;
mod placements;
mod pool;
pub mod registry;
pub mod router;
mod stacked;

pub use config::{ConfigError, ModelConfig};
pub use model::{Cache, Logits, Loss, Program, build};
pub use placements::{Ranks, placements};
pub use registry::{MODELS, ModelType, Names};
