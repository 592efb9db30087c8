//! From a graph to numbers: `compile` names every stage in order; a device makes the kernels; a session holds the weights,
//! the arena and the threads, and runs.

mod buffers;
mod compile;
mod compiled;
pub mod device;
mod error;
mod pack;
mod profile;
mod report;
mod session;
mod source;
mod stages;
mod value;
pub mod weights;

pub use astrai_passes::{
    ACCUMULATE, Adapter, Destination, Factors, GRAD, Gradients, MeshSharding, NOISE_COUNTERS, NOISE_WIDTH,
    Noise, ROUNDED, Recompute, Wide, factor_placements, linear_layers,
};
pub use buffers::Buffers;
pub use compile::compile;
pub use compiled::{Compiled, Options, Report};
pub use device::{Device, Threads};
pub use error::Error;
pub use profile::{Profile, ProfileRow};
pub use report::Cost;
pub use session::{Session, laid_out};
pub use source::{OfFiles, Origin, Random, Source, WeightSource};
pub use stages::{Dump, Stage};
pub use value::Value;
