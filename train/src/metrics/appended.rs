//! A file that grows by whole lines or records. In: their bytes. Out: the file, without half of one at its end wherever that can be helped.

use astrai_files::FileError;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// The file being written.
#[derive(Debug)]
pub(super) struct Appended {
    pub path: PathBuf,
    pub file: File,
    /// Bytes of whole lines.
    pub length: u64,
}

impl Appended {
    /// Goes on behind the `length` bytes that the file has.
    ///
    /// # Errors
    /// The system refuses.
    pub fn open(path: &Path, length: u64) -> Result<Appended, FileError> {
        Appended::with(path, File::options(), length)
    }

    /// Begins a file that is not there.
    ///
    /// # Errors
    /// It is there, or the system refuses.
    pub fn create_new(path: &Path) -> Result<Appended, FileError> {
        let mut options = File::options();
        options.create_new(true);
        Appended::with(path, options, 0)
    }

    fn with(path: &Path, mut options: OpenOptions, length: u64) -> Result<Appended, FileError> {
        // At its end only: half a line that was cut away leaves no hole before the next.
        let file = options.append(true).open(path).map_err(FileError::io(path, "open it"))?;
        Ok(Appended { path: path.to_path_buf(), file, length })
    }

    /// Adds a line or a record.
    ///
    /// # Errors
    /// The system refuses.
    pub fn add(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        if let Err(e) = self.file.write_all(bytes) {
            // Half of it would spoil the next; where cutting fails too, the reader drops both.
            let _cut = self.file.set_len(self.length);
            return Err(FileError::io(&self.path, "append to it")(e));
        }
        self.length += bytes.len() as u64;
        Ok(())
    }

    /// Makes what was added durable.
    ///
    /// # Errors
    /// The system refuses.
    pub fn sync(&self) -> Result<(), FileError> {
        self.file.sync_data().map_err(FileError::io(&self.path, "make it durable"))
    }
}
