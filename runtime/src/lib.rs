//! From a graph to numbers: `compile` names every stage in order; a device makes the kernels; a session holds the weights,
//! the arena and the threads, and runs.

mod buffers;
mod cc;
mod compile;
mod error;
mod memory;
mod nvrtc;
mod pack;
pub mod pool;
mod profile;
mod session;
mod simd;
mod stages;
mod value;
mod weigh;
pub mod weights;

pub use astrai_passes::{ACCUMULATE, Destination, GRAD, Gradients, MeshSharding, Recompute};
pub use buffers::Buffers;
pub use cc::{Compiler, KernelCache};
pub use compile::{Cost, Device, Options, Program, compile};
pub use error::Error;
pub use memory::{Memory, available_memory};
pub use nvrtc::{Cubin, Nvrtc, Usage};
pub use profile::{Profile, ProfileRow};
pub use session::{Session, Tools, laid_out};
pub use simd::{host_levels, host_simd, modelled_levels};
pub use stages::{Dump, Stage};
pub use value::Value;
pub use weigh::{Random, Source, WeightSource};
