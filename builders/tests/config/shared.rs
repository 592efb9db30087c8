//! The folder beside the checkout.

use std::path::PathBuf;

/// The folder of shared configurations and golden cases beside the checkout, if there is one.
pub fn shared() -> Option<PathBuf> {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let found =
        ["../shared", "../../shared"].map(|p| here.join(p)).into_iter().find(|p| p.join("golden").is_dir());
    if found.is_none() {
        // Property tests ask thousands of times; one word is enough.
        static SAID: std::sync::Once = std::sync::Once::new();
        SAID.call_once(|| println!("skipped: no shared folder beside this checkout"));
    }
    found
}
