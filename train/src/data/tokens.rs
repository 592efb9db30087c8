//! Token ids on disk. In: a folder with `meta.json` and shards, ours or a user's, hostile until checked. Out: one long row of
//! ids, read where a window needs it. Sizes are proved when the folder is opened; ids are checked wherever they are read, and
//! all at once by [`Tokens::check`]. Shards are read and not mapped: a shard that somebody shortens under a run is then an
//! error with its name, not a fault.

use super::meta::META;
use super::{DataError, Meta, Progress, Shard, Width};
use astrai_files::hex;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Ids that are checked between two words of progress.
const BLOCK: usize = 1 << 20;

/// An open row of ids.
#[derive(Debug)]
pub struct Tokens {
    meta: Meta,
    shards: Vec<Opened>,
    total: u64,
    warnings: Vec<String>,
}

#[derive(Debug)]
struct Opened {
    path: PathBuf,
    file: File,
    /// Number of the first id.
    first: u64,
    /// How many there are.
    ids: u64,
}

impl Opened {
    /// Reads stored ids from number `from` of the whole row on, as many as `bytes` holds.
    fn read(&self, width: Width, from: u64, bytes: &mut [u8]) -> Result<(), DataError> {
        let read = self.file.read_exact_at(bytes, (from - self.first) * width.bytes() as u64);
        read.map_err(|source| match source.kind() {
            ErrorKind::UnexpectedEof => {
                DataError::refused(&self.path, "has become shorter since it was opened; restore it")
            }
            _ => DataError::io(&self.path, "read the shard; restore it or prepare the data again")(source),
        })
    }
}

impl Tokens {
    /// Opens a folder with shards, its `meta.json`, or one shard beside it.
    ///
    /// # Errors
    /// `meta.json` or a shard is absent, unreadable, empty, or does not hold what it should.
    pub fn open(path: &Path) -> Result<Tokens, DataError> {
        let folder = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new("")) };
        let (mut meta, warnings) = Meta::read(&folder.join(META))?;
        let one = path.is_file() && path.file_name().is_some_and(|name| name != META);
        if one {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let tokens = meta.shards.iter().find(|shard| shard.file == name).and_then(|shard| shard.tokens);
            meta.shards = vec![Shard { file: name, tokens }];
            meta.tokens = None;
        } else if meta.shards.is_empty() {
            meta.shards = all_shards(folder)?;
        }
        let mut tokens = Tokens { meta, shards: Vec::new(), total: 0, warnings };
        for shard in tokens.meta.shards.clone() {
            let opened = open(&folder.join(&shard.file), tokens.meta.dtype, shard.tokens, tokens.total)?;
            tokens.total += opened.ids;
            tokens.shards.push(opened);
        }
        if tokens.meta.tokens.is_some_and(|said| said != tokens.total) {
            let said = tokens.meta.tokens.unwrap_or(0);
            let message =
                format!("says {said} tokens, the shards hold {}; prepare the data again", tokens.total);
            return Err(DataError::refused(&folder.join(META), message));
        }
        Ok(tokens)
    }

    /// What `meta.json` says.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// Ids of all shards.
    pub fn len(&self) -> u64 {
        self.total
    }

    /// Whether there are none; never so, an empty shard is refused.
    pub fn is_empty(&self) -> bool {
        self.total == 0
    }

    /// What is odd about `meta.json` but does no harm, a line each.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Copies the ids from number `from` on.
    ///
    /// # Errors
    /// There are not as many, or one is not below the vocabulary that `meta.json` states.
    pub fn copy(&self, from: u64, mut to: &mut [i32]) -> Result<(), DataError> {
        let end = from.checked_add(to.len() as u64);
        if end.is_none_or(|end| end > self.total) {
            let message = format!("tokens {from} and on were asked for, {} there are", self.total);
            return Err(DataError::Options(message));
        }
        let limit = self.meta.vocab_size.unwrap_or(u64::MAX);
        let mut at = self.shards.partition_point(|shard| shard.first <= from).saturating_sub(1);
        let (mut from, width, mut stored) = (from, self.meta.dtype, [0; 8192]);
        while !to.is_empty() {
            let shard = &self.shards[at];
            let left = (shard.first + shard.ids - from) as usize;
            let n = to.len().min(left).min(stored.len() / width.bytes());
            let bytes = &mut stored[..n * width.bytes()];
            shard.read(width, from, bytes)?;
            let (now, later) = to.split_at_mut(n);
            let largest = widen(width, bytes, now);
            refuse_beyond(shard, width, from, bytes, largest, limit)?;
            (to, at, from) = (later, at + usize::from(n == left), from + n as u64);
        }
        Ok(())
    }

    /// Reads all ids once and refuses one that is not below `vocabulary`. `progress` is told ids read of all. Answers the
    /// SHA-256 of the ids as they are stored.
    ///
    /// # Errors
    /// An id is too large, or a shard cannot be read.
    pub fn check(&self, vocabulary: usize, progress: Progress<'_>) -> Result<String, DataError> {
        let mut sum = Sha256::new();
        let width = self.meta.dtype;
        let (mut block, mut stored) = (vec![0; BLOCK], vec![0; BLOCK * width.bytes()]);
        for shard in &self.shards {
            let end = shard.first + shard.ids;
            for from in (shard.first..end).step_by(BLOCK) {
                let n = BLOCK.min((end - from) as usize);
                let bytes = &mut stored[..n * width.bytes()];
                shard.read(width, from, bytes)?;
                let largest = widen(width, bytes, &mut block[..n]);
                refuse_beyond(shard, width, from, bytes, largest, vocabulary as u64)?;
                sum.update(bytes);
                progress(from + n as u64, self.total);
            }
        }
        Ok(hex(sum))
    }
}

/// All `.bin` files of a folder.
fn all_shards(folder: &Path) -> Result<Vec<Shard>, DataError> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(DataError::io(folder, "read the folder"))? {
        let name = entry.map_err(DataError::io(folder, "read the folder"))?.file_name();
        if Path::new(&name).extension().is_some_and(|e| e == "bin") {
            names.push(name.to_string_lossy().into_owned());
        }
    }
    names.sort_unstable();
    if names.is_empty() {
        return Err(DataError::refused(folder, "holds meta.json but no .bin file; put the shards beside it"));
    }
    Ok(names.into_iter().map(|file| Shard { file, tokens: None }).collect())
}

fn open(path: &Path, width: Width, said: Option<u64>, first: u64) -> Result<Opened, DataError> {
    let refused = |message: String| Err(DataError::refused(path, message));
    let ((file, size), each) = (astrai_files::open(path)?, width.bytes() as u64);
    if size == 0 {
        return refused("is empty; restore it or prepare the data again".into());
    }
    if !size.is_multiple_of(each) {
        return refused(format!(
            "{size} bytes are no multiple of the {each} bytes of an id; the file is cut short, or `dtype` in meta.json is wrong"
        ));
    }
    if said.is_some_and(|said| said != size / each) {
        let said = said.unwrap_or(0);
        return refused(format!(
            "holds {} tokens, meta.json says {said}; prepare the data again",
            size / each
        ));
    }
    Ok(Opened { path: path.to_path_buf(), file, first, ids: size / each })
}

/// Writes ids as i32; gives the largest, as it is stored. What does not fit is for the caller to refuse.
fn widen(width: Width, bytes: &[u8], to: &mut [i32]) -> u64 {
    macro_rules! widen_from {
        ($stored:ty) => {{
            let mut largest = 0;
            for (to, id) in to.iter_mut().zip(bytes.as_chunks().0) {
                let id = <$stored>::from_le_bytes(*id);
                largest = largest.max(id);
                *to = id as i32;
            }
            largest as u64
        }};
    }
    match width {
        Width::Uint16 => widen_from!(u16),
        Width::Uint32 => widen_from!(u32),
        Width::Int64 => widen_from!(u64),
    }
}

/// The error for ids beyond `limit`, and beyond what an i32 holds, among those from number `first` on.
fn refuse_beyond(
    shard: &Opened,
    width: Width,
    first: u64,
    bytes: &[u8],
    largest: u64,
    limit: u64,
) -> Result<(), DataError> {
    let limit = limit.min(1 << 31);
    if largest < limit {
        return Ok(());
    }
    let begin = (first - shard.first) as usize;
    let id = |bytes: &[u8]| {
        let mut whole = [0; 8];
        whole[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(whole)
    };
    let at = bytes.chunks(width.bytes()).position(|bytes| id(bytes) >= limit).unwrap_or(0);
    let message = format!(
        "token {} is {}, the vocabulary ends at {limit}; name the tokenizer that made the data, or mend `dtype` in meta.json",
        begin + at,
        id(&bytes[at * width.bytes()..][..width.bytes()])
    );
    Err(DataError::refused(&shard.path, message))
}
