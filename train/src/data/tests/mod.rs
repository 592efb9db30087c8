//! Data from files to batches, and files that no one should have written.

mod finding;
mod hostile;
mod row;
mod sampling;
mod stores;

use super::bpe::{Bpe, BpeOptions};
use super::*;
use astrai_serve::tokenizer::Tokenizer;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Discards progress.
fn quiet(_: u64, _: u64) {}

fn put(dir: &Path, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
    let path = dir.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, bytes).unwrap();
    path
}

fn find(root: &Path) -> Result<Corpus, DataError> {
    Corpus::find(&[root.to_path_buf()], &[])
}

/// Whole documents of what is found under `root`.
fn documents(root: &Path) -> Result<Vec<String>, DataError> {
    let mut whole = vec![String::new()];
    for piece in find(root)?.documents() {
        let piece = piece?;
        assert!(!piece.text.is_empty());
        whole.last_mut().unwrap().push_str(&piece.text);
        if piece.last {
            whole.push(String::new());
        }
    }
    assert_eq!(whole.pop().as_deref(), Some(""), "a document without an end");
    Ok(whole)
}

/// A small tokenizer of our own training.
pub(crate) fn tokenizer() -> &'static Tokenizer {
    static MADE: OnceLock<(tempfile::TempDir, Tokenizer)> = OnceLock::new();
    let made = MADE.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let text = include_str!("../documents.rs").to_string();
        let pieces = [Ok(Piece { text, last: true, read: 0 })];
        let bpe = Bpe::train(&BpeOptions::new(400), pieces, 0, &mut |_, _, _| {}).unwrap();
        let tokenizer = bpe.write(dir.path()).unwrap();
        (dir, tokenizer)
    });
    &made.1
}

/// A row of 16-bit ids in a folder of its own.
fn row(ids: &[u16], meta: &str) -> (tempfile::TempDir, Result<Tokens, DataError>) {
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), "data.bin", ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>());
    put(dir.path(), "meta.json", meta);
    let tokens = Tokens::open(dir.path());
    (dir, tokens)
}

#[track_caller]
fn says<T>(result: Result<T, DataError>, words: &str) {
    let said = result.err().expect("no error").to_string();
    assert!(said.contains(words) && !said.contains('\n'), "{said:?} lacks {words:?}");
}
