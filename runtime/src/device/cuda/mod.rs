//! CUDA devices. In: the source of a kernel. Out: its machine code ([`Nvrtc`]); launching it comes with the driver.

mod nvrtc;

pub use nvrtc::{Cubin, Nvrtc, Usage};
