//! Tests of the checkpoints: what must be refused and in which words, what must be read, mutations at random, and the
//! golden files where they are at hand.

mod fuzz;
mod golden;
mod hostile;
mod reading;
mod sharded;
mod writing;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use astrai_ir::DType;
use tempfile::TempDir;

use super::{Checkpoint, WeightsError, write};

/// A directory that goes when the test ends.
fn directory() -> TempDir {
    tempfile::tempdir().expect("a temporary directory")
}

/// A file of the format: length, header, data.
fn file_with(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

fn put(directory: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = directory.join(name);
    fs::write(&path, bytes).expect("a file");
    path
}

/// The one line with which `path` is refused; it must contain every one of `words`.
fn refused(path: &Path, words: &[&str]) -> String {
    let error = Checkpoint::open(path).expect_err("a refusal");
    said(&error, words)
}

fn said(error: &WeightsError, words: &[&str]) -> String {
    let line = error.to_string();
    assert!(!line.contains('\n') && line.len() < 2500, "{line}");
    for word in words {
        assert!(line.contains(word), "{word:?} is not in {line:?}");
    }
    line
}

/// Two f32 tensors `a` [2, 3] and `b` [4], an i64 tensor `ids` [2].
fn sample(path: &Path) {
    let a: Vec<u8> = (0..6).flat_map(|x| (x as f32).to_le_bytes()).collect();
    let b: Vec<u8> = (10..14).flat_map(|x| (x as f32).to_le_bytes()).collect();
    let ids: Vec<u8> = [7i64, -1].iter().flat_map(|x| x.to_le_bytes()).collect();
    let tensors: [(&str, DType, &[usize], &[u8]); 3] =
        [("a", DType::F32, &[2, 3], &a), ("b", DType::F32, &[4], &b), ("ids", DType::I64, &[2], &ids)];
    write(path, tensors, &BTreeMap::from([("format".to_string(), "pt".to_string())])).expect("written");
}
