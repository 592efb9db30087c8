//! Where a golden case lies.

use std::path::{Path, PathBuf};

/// The case in this repository, or beside it; a word when it is in neither.
pub fn case(name: &str) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let found = ["tests/golden", "../shared/golden"].map(|p| root.join(p).join(name));
    let found = found.into_iter().find(|p| p.is_dir());
    if found.is_none() {
        println!("skipped: golden case {name} is not here");
    }
    found
}
