//! Finding text. In: files and folders as a user names them. Out: the files that hold text, in an order that is the same on
//! every machine. Folders are walked in order of names; hidden ones and those of build tools are passed by, and what is not
//! UTF-8 text is skipped and counted.

use super::{DataError, Documents};
use astrai_files::hex;
use sha2::{Digest, Sha256};
use std::fs::{self, Metadata};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// Folders that hold what machines wrote.
pub(super) const PASSED: [&str; 2] = ["node_modules", "target"];

/// Bytes at the start of a file by which text is told from the rest.
const HEAD: usize = 8192;

/// Files with text.
#[derive(Clone, Debug)]
pub struct Corpus {
    roots: Vec<PathBuf>,
    files: Vec<Source>,
    skipped: Skipped,
}

/// A file with text.
#[derive(Clone, Debug)]
pub struct Source {
    /// Where it is.
    pub path: PathBuf,
    /// Its size in bytes.
    pub bytes: u64,
    /// When it was changed, in nanoseconds since 1970.
    pub modified: u128,
    /// How its documents are marked.
    pub kind: Kind,
}

/// How a file's documents are marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The file is one document.
    Text,
    /// Each line is a JSON object whose `text` is a document.
    JsonLines,
}

/// What a folder held besides text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Skipped {
    /// Files that are not UTF-8 text.
    pub binary: u64,
    /// Files of no bytes.
    pub empty: u64,
    /// Links that lead nowhere or to a folder, sockets, pipes and the like.
    pub other: u64,
    /// Hidden files and folders, and those of build tools.
    pub hidden: u64,
}

impl std::fmt::Display for Skipped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Skipped { binary, empty, other, hidden } = self;
        write!(f, "{binary} binary, {empty} empty, {other} special, {hidden} hidden or of build tools")
    }
}

impl Corpus {
    /// Finds the text in `roots`, files or folders. A root that is a file is text or an error. The folders `except`, where
    /// results are written, are passed by.
    ///
    /// # Errors
    /// A root is absent or inside another, something cannot be read, or there is no text at all.
    pub fn find(roots: &[PathBuf], except: &[PathBuf]) -> Result<Corpus, DataError> {
        refuse_twice(roots)?;
        let except: Vec<PathBuf> = except.iter().filter_map(|path| path.canonicalize().ok()).collect();
        let mut corpus = Corpus { roots: roots.to_vec(), files: Vec::new(), skipped: Skipped::default() };
        for root in roots {
            let doing = "read; name a file or folder that exists and may be read";
            let found = fs::metadata(root).map_err(DataError::io(root, doing))?;
            if found.is_dir() {
                corpus.walk(root, &except)?;
            } else {
                let before = corpus.files.len();
                corpus.add(root.clone(), &found)?;
                if corpus.files.len() == before {
                    let message =
                        "holds no UTF-8 text (it is empty, binary or compressed); unpack or convert it";
                    return Err(DataError::refused(root, message));
                }
            }
        }
        match (corpus.files.is_empty(), roots.first()) {
            (false, _) => Ok(corpus),
            (true, None) => Err(DataError::Options("no data named; name a file or folder with text".into())),
            (true, Some(root)) => {
                let message = format!(
                    "no text found (skipped: {}); name a folder with UTF-8 text or .jsonl files",
                    corpus.skipped
                );
                Err(DataError::refused(root, message))
            }
        }
    }

    fn walk(&mut self, root: &Path, except: &[PathBuf]) -> Result<(), DataError> {
        let mut todo = vec![root.to_path_buf()];
        while let Some(at) = todo.pop() {
            let found = fs::symlink_metadata(&at).map_err(DataError::io(&at, UNREADABLE))?;
            if found.is_dir() || at == root {
                if at.canonicalize().is_ok_and(|at| except.contains(&at)) {
                    self.skipped.hidden += 1;
                    continue;
                }
                todo.extend(self.entries(&at)?);
            } else if found.is_symlink() {
                // A link to a folder may lead back up; one to a file cannot.
                match fs::metadata(&at) {
                    Ok(behind) if behind.is_file() => self.add(at, &behind)?,
                    _ => self.skipped.other += 1,
                }
            } else {
                self.add(at, &found)?;
            }
        }
        Ok(())
    }

    /// What is to be visited in a folder, the last first.
    fn entries(&mut self, folder: &Path) -> Result<Vec<PathBuf>, DataError> {
        let mut names = Vec::new();
        for entry in fs::read_dir(folder).map_err(DataError::io(folder, UNREADABLE))? {
            names.push(entry.map_err(DataError::io(folder, UNREADABLE))?.file_name());
        }
        names.sort_unstable_by(|a, b| b.cmp(a));
        let all = names.len();
        names.retain(|name| {
            !name.as_encoded_bytes().starts_with(b".") && !PASSED.iter().any(|passed| name == passed)
        });
        self.skipped.hidden += (all - names.len()) as u64;
        Ok(names.into_iter().map(|name| folder.join(name)).collect())
    }

    fn add(&mut self, path: PathBuf, found: &Metadata) -> Result<(), DataError> {
        if !found.is_file() {
            self.skipped.other += 1;
        } else if found.len() == 0 {
            self.skipped.empty += 1;
        } else if !is_text(&path)? {
            self.skipped.binary += 1;
        } else {
            let since = found.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            let lines = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("jsonl"));
            let kind = if lines { Kind::JsonLines } else { Kind::Text };
            let modified = since.map_or(0, |since| since.as_nanos());
            self.files.push(Source { path, bytes: found.len(), modified, kind });
        }
        Ok(())
    }

    /// The files and folders that were named.
    pub fn roots(&self) -> &[PathBuf] {
        &self.roots
    }

    /// The files with text, in the order in which they are read.
    pub fn files(&self) -> &[Source] {
        &self.files
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// What was passed by.
    pub fn skipped(&self) -> Skipped {
        self.skipped
    }

    /// A sum over paths, sizes and times: while it stays the same, so do the documents.
    pub fn fingerprint(&self) -> String {
        let mut sum = Sha256::new();
        for file in &self.files {
            let path = file.path.canonicalize().unwrap_or_else(|_| file.path.clone());
            let path = path.as_os_str().as_encoded_bytes();
            sum.update((path.len() as u64).to_le_bytes());
            sum.update(path);
            sum.update(file.bytes.to_le_bytes());
            sum.update(file.modified.to_le_bytes());
        }
        hex(sum)
    }

    /// Reads the documents from the first.
    pub fn documents(&self) -> Documents<'_> {
        Documents::new(&self.files)
    }
}

/// Refuses a root that is, or is inside of, another: its text would count twice.
fn refuse_twice(roots: &[PathBuf]) -> Result<(), DataError> {
    let real = |root: &PathBuf| root.canonicalize().unwrap_or_else(|_| root.clone());
    let real: Vec<PathBuf> = roots.iter().map(real).collect();
    for (i, root) in roots.iter().enumerate() {
        if (0..roots.len()).any(|j| j != i && real[i].starts_with(&real[j])) {
            return Err(DataError::refused(
                root,
                "is given twice, alone or within another folder; name it once",
            ));
        }
    }
    Ok(())
}

const UNREADABLE: &str = "read; give yourself the right to, or move it out of the folder";

/// Whether a file starts like text: UTF-8 without a zero byte, whatever its name says.
fn is_text(path: &Path) -> Result<bool, DataError> {
    let mut head = Vec::with_capacity(HEAD);
    let (file, _) = astrai_files::open(path)?;
    file.take(HEAD as u64).read_to_end(&mut head).map_err(DataError::io(path, UNREADABLE))?;
    let valid = match std::str::from_utf8(&head) {
        Ok(_) => true,
        Err(e) => e.error_len().is_none() && head.len() == HEAD,
    };
    Ok(valid && !head.contains(&0))
}
