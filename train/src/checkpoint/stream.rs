//! In: pieces of a file, of any size. Out: the file, in writes of a good size, with the hash of what was written; large
//! pieces go from the caller's memory to the system without a copy.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::manifest::Record;
use astrai_files::{Disk, DiskFile, FileError, hex};

/// Pieces below this many bytes are collected first.
const WRITE: usize = 1 << 20;

/// A file being written and hashed.
pub(super) struct Stream {
    path: PathBuf,
    file: Box<dyn DiskFile>,
    hash: Sha256,
    written: u64,
    /// Hashed, not yet written.
    waiting: Vec<u8>,
}

impl Stream {
    pub(super) fn create(disk: &dyn Disk, path: PathBuf) -> Result<Stream, FileError> {
        let file = disk.create(&path).map_err(FileError::io(&path, "create it"))?;
        Ok(Stream { path, file, hash: Sha256::new(), written: 0, waiting: Vec::new() })
    }

    pub(super) fn put(&mut self, piece: &[u8]) -> Result<(), FileError> {
        self.hash.update(piece);
        self.written += piece.len() as u64;
        if self.waiting.len() + piece.len() < WRITE {
            self.waiting.extend_from_slice(piece);
            return Ok(());
        }
        self.flush()?;
        self.file.write(piece).map_err(FileError::io(&self.path, "write it"))
    }

    /// Bytes put so far.
    pub(super) fn written(&self) -> u64 {
        self.written
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the file durable.
    pub(super) fn finish(mut self) -> Result<Record, FileError> {
        self.flush()?;
        self.file.sync().map_err(FileError::io(&self.path, "make it durable"))?;
        Ok(Record { bytes: self.written, sha256: hex(self.hash) })
    }

    fn flush(&mut self) -> Result<(), FileError> {
        if !self.waiting.is_empty() {
            self.file.write(&self.waiting).map_err(FileError::io(&self.path, "write it"))?;
            self.waiting.clear();
        }
        Ok(())
    }
}
