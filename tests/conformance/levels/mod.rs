//! Kernels with other vector instructions than the best of this machine: the same numbers, with fewer of them, from another
//! compiler, and for another architecture.

mod cross;
mod image;

/// A dense model, experts, and latents with experts.
const CASES: [&str; 3] = ["llama", "qwen3_moe", "deepseek_v3"];
