//! The official Python client, unmodified, where the test cache holds it (`scripts/setup-cache.sh`).

use super::*;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Python, and the folder of a client made for it.
fn client() -> Option<(&'static str, PathBuf)> {
    let python = "python3";
    let asked =
        Command::new(python).args(["-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).output();
    let version = String::from_utf8(asked.ok()?.stdout).ok()?;
    let cache = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache/openai");
    let mut folders = std::fs::read_dir(cache).ok()?.filter_map(|e| e.ok().map(|e| e.path()));
    let made = format!("-python{}", version.trim());
    let folder =
        folders.find(|f| f.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.ends_with(&made)))?;
    Some((python, folder))
}

fn check(model: Alphabet, pace: &str) {
    let Some((python, folder)) = client() else {
        println!("skipped: the test cache has no openai client for python3");
        return;
    };
    let settings = Server::keyed(&["secret"]);
    let server = Server::with(model, Settings::default(), settings);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/openai/check.py");
    let out = Command::new(python)
        .arg(script)
        .args([&format!("http://{}", server.address), "secret", pace])
        .env("PYTHONPATH", folder)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    server.settle();
}

#[test]
fn the_official_client_is_content() {
    check(Alphabet::new(), "fast");
}

#[test]
fn the_official_client_may_leave() {
    check(Alphabet::paced(Duration::from_millis(10)), "slow");
}
