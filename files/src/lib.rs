//! Files, for all crates. Reading: a path of unknown origin gives a regular file of bounded length or one line of refusal; a
//! pipe, a device or a link to one can neither block a program nor fill its memory. Writing: a file is there whole or not at
//! all, written beside its name, made durable, renamed. Everything that changes the disk goes through [`Disk`], so that tests
//! can stop a save after any of its operations.

mod guard;

pub use guard::guarded;

use sha2::{Digest, Sha256};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// How names of unfinished files and folders begin.
pub const UNFINISHED: &str = ".tmp-";

/// A digest in hexadecimal, as records of files hold it.
pub fn hex(digest: Sha256) -> String {
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
    /// The system's refusal of an operation, given as a verb.
    pub fn io(path: &Path, doing: &'static str) -> impl FnOnce(io::Error) -> FileError {
        move |source| FileError::Io { path: path.to_path_buf(), doing, source }
    }

    /// What is wrong with a file, and the remedy.
    pub fn refused(path: &Path, trouble: impl Into<String>) -> FileError {
        FileError::Refused { path: path.to_path_buf(), trouble: trouble.into() }
    }

    /// The message without the file's name, for errors that say the name themselves.
    pub fn trouble(&self) -> String {
        match self {
            FileError::Io { doing, source, .. } => format!("cannot {doing}: {source}"),
            FileError::Refused { trouble, .. } => trouble.clone(),
            FileError::Full { path, .. } => self.to_string()[shown(path).len() + 2..].to_string(),
        }
    }

    /// Whether the trouble is that there is no such file.
    pub fn is_absence(&self) -> bool {
        matches!(self, FileError::Io { source, .. } if source.kind() == ErrorKind::NotFound)
    }
}

/// A path on one line.
pub fn shown(path: &Path) -> String {
    one_line(&path.to_string_lossy())
}

/// `text` without control characters, its beginning only where it is long.
pub fn one_line(text: &str) -> String {
    text.chars().take(400).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// A text as a cell of comma-separated values (RFC 4180); what breaks lines is a space.
pub fn csv_cell(text: &str) -> String {
    let text = text.replace(char::is_control, " ");
    if text.contains([',', '"']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text }
}

/// What changes the disk.
pub trait Disk {
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
pub trait DiskFile {
    /// Appends all of `bytes`.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Makes what was written durable.
    fn sync(&mut self) -> io::Result<()>;
}

/// The system's own disk.
pub struct System;

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
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The name beside `path` under which it is written until it is whole.
pub fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    folder_of(path).join(format!("{UNFINISHED}{name}-{}", std::process::id()))
}

/// Writes the file `path` whole: readers see the old content or `bytes`, also after a crash.
///
/// # Errors
/// The system refuses.
pub fn replace(disk: &dyn Disk, path: &Path, bytes: &[u8]) -> Result<(), FileError> {
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
        if e.kind() != ErrorKind::NotFound {
            return Err(e);
        }
    }
    let mut file = disk.create(beside)?;
    file.write(bytes)?;
    file.sync()
}

/// Opens a regular file for reading, or what a link leads to if that is one; also gives its length in bytes.
///
/// # Errors
/// There is none, it may not be read, or it is a folder, a pipe, a socket or a device.
pub fn open(path: &Path) -> Result<(File, u64), FileError> {
    // Opening a pipe that nobody writes to would wait for ever without O_NONBLOCK, which regular files do not heed.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path);
    let file = file.map_err(FileError::io(path, "open it"))?;
    let found = file.metadata().map_err(FileError::io(path, "look at it"))?;
    match found.is_file() {
        true => Ok((file, found.len())),
        false => Err(FileError::refused(path, "not a regular file; name the right one")),
    }
}

/// Reads a regular file of at most `longest` bytes.
///
/// # Errors
/// Those of [`open`], or it is longer.
pub fn read(path: &Path, longest: u64) -> Result<Vec<u8>, FileError> {
    let (file, length) = open(path)?;
    let mut bytes = Vec::with_capacity(length.min(longest) as usize + 1);
    file.take(longest + 1).read_to_end(&mut bytes).map_err(FileError::io(path, "read it"))?;
    if bytes.len() as u64 > longest {
        let trouble =
            format!("longer than {longest} bytes, the most that are read of such a file; name the right one");
        return Err(FileError::refused(path, trouble));
    }
    Ok(bytes)
}

/// What [`read`] gives; `None` where there is no such file.
///
/// # Errors
/// Those of [`read`] but for absence.
pub fn read_present(path: &Path, longest: u64) -> Result<Option<Vec<u8>>, FileError> {
    match read(path, longest) {
        Err(e) if e.is_absence() => Ok(None),
        read => read.map(Some),
    }
}

/// Reads a UTF-8 file of at most `longest` bytes.
///
/// # Errors
/// Those of [`read`], or it is not UTF-8.
pub fn read_text(path: &Path, longest: u64) -> Result<String, FileError> {
    let text = String::from_utf8(read(path, longest)?);
    text.map_err(|e| FileError::refused(path, format!("not UTF-8 at byte {}", e.utf8_error().valid_up_to())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::process::Command;

    /// What is no regular file is refused at once, whoever would have to be waited for.
    #[test]
    fn pipes_devices_and_folders_are_refused() {
        let dir = tempfile::tempdir().expect("a folder");
        let at = |name: &str| dir.path().join(name);
        assert!(Command::new("mkfifo").arg(at("pipe")).status().expect("mkfifo").success());
        symlink("/dev/zero", at("zero")).expect("a link");
        symlink(at("nowhere"), at("dangling")).expect("a link");
        for name in ["pipe", "zero", "."] {
            let line = read(&at(name), 10).expect_err(name).to_string();
            assert!(line.ends_with("not a regular file; name the right one"), "{line}");
        }
        for name in ["none", "dangling"] {
            assert!(read_present(&at(name), 10).expect("absent").is_none(), "{name}");
        }
        fs::write(at("text"), "0123456789").expect("written");
        assert_eq!(read(&at("text"), 10).expect("read"), b"0123456789");
        assert!(read(&at("text"), 9).expect_err("long").to_string().contains("longer than 9 bytes"));
    }
}
