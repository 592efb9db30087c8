//! Files that are there whole or not at all. In: bytes and a name. Out: a file written beside it, made durable, renamed;
//! or one line that says what kept it from being so. Everything that changes the disk goes through [`Disk`], so that
//! tests can stop a save after any of its operations.

use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// How names of unfinished files and folders begin.
pub(crate) const UNFINISHED: &str = ".tmp-";

/// A digest in hexadecimal, as records of files hold it.
pub(crate) fn hex(digest: Sha256) -> String {
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Why a file could not be read or written. `Display` is one line: file, trouble, remedy.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The system refused an operation.
    #[error("{}: cannot {doing}: {source}", shown(path))]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The operation, as a verb: "open it", …
        doing: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// There is no room.
    #[error(
        "{}: the disk is full: {needed} bytes are needed, {free} are free, {} are missing; make room and save again",
        shown(path),
        needed.saturating_sub(*free)
    )]
    Full {
        /// The folder that was to hold it.
        path: PathBuf,
        /// Bytes of the whole.
        needed: u64,
        /// Bytes that were free.
        free: u64,
    },
    /// What is there, or was given, is not usable.
    #[error("{}: {trouble}", shown(path))]
    Refused {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong, and the remedy.
        trouble: String,
    },
}

impl FileError {
    pub(crate) fn io(path: &Path, doing: &'static str) -> impl FnOnce(io::Error) -> FileError {
        move |source| FileError::Io { path: path.to_path_buf(), doing, source }
    }

    pub(crate) fn refused(path: &Path, trouble: impl Into<String>) -> FileError {
        FileError::Refused { path: path.to_path_buf(), trouble: trouble.into() }
    }
}

/// A path on one line.
pub(crate) fn shown(path: &Path) -> String {
    one_line(&path.to_string_lossy())
}

/// `text` without control characters, its beginning only where it is long.
pub(crate) fn one_line(text: &str) -> String {
    text.chars().take(400).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// What changes the disk.
pub(crate) trait Disk {
    /// Makes a folder, and those above it.
    fn create_folder(&self, path: &Path) -> io::Result<()>;
    /// Makes a file that does not exist yet.
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;
    /// Gives a file or folder another name; replaces a file.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Removes a folder with all in it.
    fn remove_folder(&self, path: &Path) -> io::Result<()>;
    /// Makes the names in a folder durable.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;
    /// Bytes that this user may still write at `path`, if the filesystem says so.
    fn free(&self, path: &Path) -> io::Result<Option<u64>>;
}

/// A file being written.
pub(crate) trait DiskFile {
    /// Appends all of `bytes`.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Makes what was written durable.
    fn sync(&mut self) -> io::Result<()>;
}

/// The system's own disk.
pub(crate) struct System;

impl DiskFile for File {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

impl Disk for System {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(File::create_new(path)?))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir_all(path)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn free(&self, path: &Path) -> io::Result<Option<u64>> {
        let name = std::ffi::CString::new(path.as_os_str().as_bytes())?;
        let mut stat = MaybeUninit::<libc::statvfs>::uninit();
        // SAFETY: `name` ends with a zero, `stat` has room for the answer, and is read only when the call filled it.
        let stat = unsafe {
            if libc::statvfs(name.as_ptr(), stat.as_mut_ptr()) != 0 {
                return Err(io::Error::last_os_error());
            }
            stat.assume_init()
        };
        // Filesystems without a notion of size report no blocks at all.
        Ok((stat.f_blocks > 0).then(|| stat.f_bavail.saturating_mul(stat.f_frsize)))
    }
}

/// The folder that holds `path`.
pub(crate) fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The name beside `path` under which it is written until it is whole.
pub(crate) fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    folder_of(path).join(format!("{UNFINISHED}{name}-{}", std::process::id()))
}

/// Writes the file `path` whole: readers see the old content or `bytes`, also after a crash.
pub(crate) fn replace(disk: &dyn Disk, path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let (folder, beside) = (folder_of(path), beside(path));
    let written = write_beside(disk, &beside, bytes).and_then(|()| disk.rename(&beside, path));
    if let Err(e) = written {
        // The write's own error is the one to report; a leftover is removed by the next run.
        let _leftover = disk.remove_file(&beside);
        return Err(FileError::io(path, "write it")(e));
    }
    disk.sync_folder(folder).map_err(FileError::io(folder, "make it durable"))
}

fn write_beside(disk: &dyn Disk, beside: &Path, bytes: &[u8]) -> io::Result<()> {
    if let Err(e) = disk.remove_file(beside) {
        // Only a process that died under our number leaves one.
        if e.kind() != io::ErrorKind::NotFound {
            return Err(e);
        }
    }
    let mut file = disk.create(beside)?;
    file.write(bytes)?;
    file.sync()
}

/// Reads a regular file of at most `longest` bytes.
pub(crate) fn read_limited(path: &Path, longest: u64) -> Result<Vec<u8>, FileError> {
    let kind = fs::metadata(path).map_err(FileError::io(path, "look at it"))?;
    if !kind.is_file() {
        return Err(FileError::refused(path, "not a regular file"));
    }
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(FileError::io(path, "open it"))?;
    file.take(longest + 1).read_to_end(&mut bytes).map_err(FileError::io(path, "read it"))?;
    if bytes.len() as u64 > longest {
        return Err(FileError::refused(path, format!("longer than {longest} bytes: not what its name says")));
    }
    Ok(bytes)
}

/// Reads a UTF-8 file of at most `longest` bytes.
pub(crate) fn read_text(path: &Path, longest: u64) -> Result<String, FileError> {
    let text = String::from_utf8(read_limited(path, longest)?);
    text.map_err(|e| FileError::refused(path, format!("not UTF-8 at byte {}", e.utf8_error().valid_up_to())))
}
