//! What every device must do, and what the stages before it promise: golden cases, kernels against the interpreter, bit-exactness,
//! paged serving, gradients, plans. One binary, so that machines, compiled kernels and fixtures are shared.

mod attention_grad;
mod cases;
mod cuda;
#[path = "../emulated/mod.rs"]
mod driver;
mod emulated;
mod exact;
mod golden;
mod gradients;
mod kernels;
mod levels;
mod machines;
mod models;
mod null;
mod paged;
mod programs;
#[path = "../quick/mod.rs"]
mod quick;
mod serving;
mod shard;
mod stages;
mod toy;
