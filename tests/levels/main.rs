//! Kernels with other vector instructions than the best of this machine: the same numbers, with fewer of them, from another
//! compiler, and for another architecture.

mod cross;
mod image;
mod numbers;

use std::path::{Path, PathBuf};

/// A dense model, experts, and latents with experts.
const CASES: [&str; 3] = ["llama", "qwen3_moe", "deepseek_v3"];

/// The golden case in this repository, or beside it; a word when it is in neither.
fn case(name: &str) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let found = [root.join("tests/golden"), root.join("../shared/golden")].into_iter().map(|p| p.join(name));
    let found = found.into_iter().find(|p| p.is_dir());
    if found.is_none() {
        println!("skipped: golden case {name} is not here");
    }
    found
}
