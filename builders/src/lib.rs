//! Builders: from the configuration of a model to what is computed. In: `config.json`. Out: a resolved description, its
//! weights by name, shape and initialiser.

pub mod config;
pub mod models;
pub mod registry;

pub use config::{ConfigError, ModelConfig};
pub use registry::{MODELS, ModelType, Names};
