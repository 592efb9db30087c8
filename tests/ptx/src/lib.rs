//! A CUDA driver on machines without a GPU, for tests. In: PTX as NVRTC writes it, launches, the driver's calls. Out: memory as
//! the kernels leave it, counts of what they did, and a line for each thing that they do wrong: races, accesses outside,
//! reads of what nothing wrote, missing barriers, deadlocks.
//!
//! Two ways in: this library ([`Module`], [`Memory`], [`Launch`]), and the driver's own symbols ([`driver`]), which a program
//! finds in `libcuda.so.1` (`scripts/with-emulated-cuda`). Nothing of the compiler depends on this crate.

mod access;
mod alu;
mod block;
mod clocks;
mod collective;
mod control;
mod convert;
mod counts;
mod decode;
pub mod driver;
mod fault;
mod float;
mod kernel;
mod launch;
mod logic;
mod memory;
mod mutate;
pub mod nvrtc;
mod parse;
mod registers;
mod shadow;
mod tensor;

pub use counts::{Count, Counts};
pub use fault::{Fault, Kind};
pub use kernel::{Class, Kernel, Module, Op, Param, Ty, Variable};
pub use launch::{BUDGET, Launch};
pub use memory::{Memory, Refused};
pub use mutate::{Mutant, mutants};
