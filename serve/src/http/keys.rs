//! API keys. In: keys of the command line, and a file of more, which may change while the server runs. Out: whether a key is one of them. What
//! is kept of a key is its SHA-256: all are of one length and show nothing of the key.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use astrai_files::read_present;
use sha2::{Digest, Sha256};

/// SHA-256 of an API key.
pub type KeyHash = [u8; 32];

/// How often it is looked whether the file has changed.
const LOOK: Duration = Duration::from_secs(1);

/// Bytes of a file of keys.
const LARGEST: u64 = 1 << 20;

/// The keys of a server.
#[derive(Debug, Default)]
pub struct Keys {
    given: Vec<KeyHash>,
    file: Option<KeyFile>,
}

#[derive(Debug)]
struct KeyFile {
    path: PathBuf,
    read: Mutex<Read>,
}

#[derive(Debug)]
struct Read {
    keys: Vec<KeyHash>,
    /// Of the file as it was read.
    modified: Option<SystemTime>,
    /// The same of a file that could not be.
    refused: Option<Option<SystemTime>>,
    looked: Instant,
}

fn hash(key: &[u8]) -> KeyHash {
    Sha256::digest(key).into()
}

/// The keys of a file: one a line; a `#` that begins a line or follows a space begins a remark.
fn read(path: &Path) -> io::Result<Vec<KeyHash>> {
    let wrong = |what: String| io::Error::other(format!("{}: {what}", path.display()));
    let bytes = read_present(path, LARGEST).map_err(|e| wrong(e.trouble()))?;
    let bytes = bytes.ok_or_else(|| wrong("no such file; give one with a key a line".into()))?;
    let text = String::from_utf8(bytes).map_err(|_| wrong("is not UTF-8; save it as such".into()))?;
    let remark = |line: &str| {
        let of_its_own = |at: &usize| line[..*at].chars().next_back().is_none_or(char::is_whitespace);
        line.match_indices('#').map(|(at, _)| at).find(of_its_own)
    };
    let lines = text.lines().map(|line| line[..remark(line).unwrap_or(line.len())].trim());
    let keys: Vec<KeyHash> = lines.filter(|line| !line.is_empty()).map(|key| hash(key.as_bytes())).collect();
    // No key at all would let everybody in.
    if keys.is_empty() { Err(wrong("has no key; write one on a line of its own".into())) } else { Ok(keys) }
}

fn modified(path: &Path) -> Option<SystemTime> {
    std::fs::metadata(path).and_then(|about| about.modified()).ok()
}

impl Keys {
    /// The given keys, and those of a file.
    ///
    /// # Errors
    /// A key is empty, or the file has none.
    pub fn new(given: &[String], path: Option<&Path>) -> io::Result<Keys> {
        if given.iter().any(String::is_empty) {
            return Err(io::Error::other("an API key is empty; give one that is not, or none"));
        }
        let given = given.iter().map(|key| hash(key.as_bytes())).collect();
        let file = match path {
            None => None,
            Some(path) => {
                let modified = modified(path);
                let read = Read { keys: read(path)?, modified, refused: None, looked: Instant::now() };
                Some(KeyFile { path: path.into(), read: Mutex::new(read) })
            }
        };
        Ok(Keys { given, file })
    }

    /// Whether one must come with each request.
    pub fn are_wanted(&self) -> bool {
        !self.given.is_empty() || self.file.is_some()
    }

    /// Whether there may be several callers.
    pub fn are_several(&self) -> bool {
        self.given.len() > 1 || self.file.is_some()
    }

    /// The hash of a key, if it is one of these. Every key is compared, in the same time wherever it differs.
    pub fn check(&self, key: &[u8]) -> Option<KeyHash> {
        let sum = hash(key);
        let same = |ours: &KeyHash| ours.iter().zip(&sum).fold(0, |d, (a, b)| d | (a ^ b)) == 0;
        let any = |keys: &[KeyHash]| keys.iter().fold(false, |any, ours| any | same(ours));
        let of_file = self.file.as_ref().is_some_and(|file| {
            let mut read = file.read.lock().unwrap_or_else(PoisonError::into_inner);
            file.renew(&mut read);
            any(&read.keys)
        });
        (any(&self.given) | of_file).then_some(sum)
    }
}

impl KeyFile {
    /// Reads the file again if it has changed. One that cannot be read, or has no key, changes nothing but is told of: it may be half written,
    /// and must neither let everybody in nor nobody.
    fn renew(&self, known: &mut Read) {
        if known.looked.elapsed() < LOOK {
            return;
        }
        known.looked = Instant::now();
        let now = modified(&self.path);
        if now == known.modified {
            return;
        }
        match read(&self.path) {
            Ok(keys) => (known.keys, known.modified, known.refused) = (keys, now, None),
            Err(why) if known.refused != Some(now) => {
                known.refused = Some(now);
                // Whoever does not read it does not want it.
                let _ = writeln!(io::stderr(), "warning: {why}; the keys that were read before stay");
            }
            Err(_) => {}
        }
    }
}
