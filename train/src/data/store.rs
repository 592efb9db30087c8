//! Prepared data: keys, each a list of segments of numbers. In: a file or folder in one of the layouts below, hostile until read.
//! Out: a key's segments one by one (records), or as one long row that crosses them (a river). Nothing is held in memory but
//! where each segment lies and how long it is; numbers are read when they are asked for.
//!
//! | layout | what it is |
//! |---|---|
//! | `hdf5` | `.h5` and `.hdf5` files in nested folders: a group per key, datasets `data_0`, `data_1` and on in it |
//! | `bin` | folders with a `meta.json` that says of each key its shape, type and perhaps `offsets`, beside `KEY.bin` |
//! | `tokens` | shards of one key, which `astrai train` makes of text ([`Tokens`]) |
//! | `jsonl` | lines that are objects: a key, a list of numbers (or a list of such lists) |

mod bin;
mod element;
mod find;
mod hdf5;
mod lines;
mod tokens;
mod write;

use super::{DataError, Progress};
use astrai_files::hex;
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use element::Element;
pub use find::is_prepared;
pub use write::{Array, Numbers, WriteOptions, Writer};

/// Where preprocessing that is not finished keeps its state; a folder that holds it is not read.
pub const PROGRESS: &str = "progress.json";

/// Numbers that are read and checked at a time.
const BLOCK: usize = 1 << 16;

/// A layout of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// HDF5 files, a group per key, `data_0` and on in it
    #[value(alias = "h5")]
    Hdf5,
    /// Folders of raw little-endian numbers with a meta.json, a file per key
    Bin,
    /// Shards of one key, as `astrai train` writes them
    #[value(skip)]
    Tokens,
    /// Lines of JSON objects
    Jsonl,
}

/// A part of a key's numbers: a record, or a piece of a river.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment {
    /// Which of the store's files.
    part: u32,
    /// Rows, where the numbers are a matrix; 0 where they are a list.
    rows: u32,
    element: Element,
    /// Where in the file; its reader knows of what.
    at: u64,
    /// Numbers of all rows.
    count: u64,
}

/// What is known of a key.
#[derive(Clone, Debug, Default)]
pub struct Column {
    elements: BTreeSet<Element>,
    segments: Vec<Segment>,
    /// Numbers up to the end of each segment.
    ends: Vec<u64>,
}

impl Column {
    fn push(&mut self, segment: Segment) {
        self.elements.insert(segment.element);
        self.ends.push(self.len() + segment.count);
        self.segments.push(segment);
    }

    /// Numbers of all segments.
    pub fn len(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Segments.
    pub fn segments(&self) -> usize {
        self.segments.len()
    }

    /// Numbers of a segment, and its rows where it is a matrix.
    pub fn shape(&self, segment: usize) -> (u64, Option<u64>) {
        let s = self.segments[segment];
        (s.count, (s.rows > 0).then_some(u64::from(s.rows)))
    }

    /// The number of the river with which a segment begins.
    pub fn begin(&self, segment: usize) -> u64 {
        self.ends[segment] - self.segments[segment].count
    }

    /// How its numbers are stored; more than one type where files differ.
    pub fn elements(&self) -> impl Iterator<Item = Element> {
        self.elements.iter().copied()
    }

    /// The segment that holds number `at` of the river.
    fn segment_of(&self, at: u64) -> usize {
        self.ends.partition_point(|&end| end <= at)
    }
}

/// A file, or a folder of a key's files, that segments lie in.
trait Part: Send + Sync + std::fmt::Debug {
    /// The file or folder.
    fn path(&self) -> &Path;

    /// Reads whole numbers of a segment from number `from` on; those of a fraction, or beyond an i32, are refused.
    fn ints(&self, key: &str, s: &Segment, from: u64, to: &mut [i32]) -> Result<(), DataError>;

    /// Reads numbers of a segment as floats.
    fn floats(&self, key: &str, s: &Segment, from: u64, to: &mut [f32]) -> Result<(), DataError>;

    /// How long the rows of a matrix are, where they are not all alike.
    fn rows(&self, _key: &str, s: &Segment) -> Result<Vec<usize>, DataError> {
        let rows = (s.rows as usize).max(1);
        Ok(vec![s.count as usize / rows; rows])
    }
}

/// Prepared data, opened.
#[derive(Debug)]
pub struct Store {
    root: PathBuf,
    layout: Layout,
    parts: Vec<Box<dyn Part>>,
    columns: BTreeMap<String, Column>,
    /// The id that ends a document, where `meta.json` names it.
    eos: Option<u32>,
    warnings: Vec<String>,
}

/// What a layout's reader adds to a store.
struct Found<'a> {
    part: u32,
    columns: &'a mut BTreeMap<String, Column>,
}

impl Found<'_> {
    /// A segment of a key.
    fn segment(&mut self, key: &str, element: Element, at: u64, count: u64, rows: u32) {
        let segment = Segment { part: self.part, rows, element, at, count };
        match self.columns.get_mut(key) {
            Some(column) => column.push(segment),
            None => self.columns.entry(key.to_string()).or_default().push(segment),
        }
    }
}

impl Store {
    /// Opens a file or folder. Of a folder that holds several layouts the first of this page's table counts.
    ///
    /// # Errors
    /// There is nothing to read, a file cannot be read or is not what its name says, or the folder is one that
    /// preprocessing has not finished.
    pub fn open(path: &Path) -> Result<Store, DataError> {
        let (layout, files) = find::find(path)?;
        let (mut parts, mut columns): (Vec<Box<dyn Part>>, _) = (Vec::new(), BTreeMap::new());
        let (mut eos, mut warnings) = (None, Vec::new());
        for file in &files {
            let mut found = Found { part: parts.len() as u32, columns: &mut columns };
            parts.push(match layout {
                Layout::Hdf5 => hdf5::open(file, &mut found)?,
                Layout::Jsonl => lines::open(file, &mut found)?,
                Layout::Bin => bin::open(file, &mut found)?,
                Layout::Tokens => {
                    let (part, tokens) = tokens::open(file, &mut found)?;
                    eos = tokens.meta().eos;
                    warnings.extend_from_slice(tokens.warnings());
                    part
                }
            });
        }
        if columns.values().all(Column::is_empty) {
            let message =
                "holds no numbers under any key; name prepared data, or prepare it with `astrai preprocess`";
            return Err(DataError::refused(path, message));
        }
        Ok(Store { root: path.to_path_buf(), layout, parts, columns, eos, warnings })
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.root
    }

    /// How it is laid out.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Its files, or folders of files, in the order in which they are read.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.parts.iter().map(|part| part.path())
    }

    /// Its keys, in order of names.
    pub fn keys(&self) -> impl Iterator<Item = (&str, &Column)> {
        self.columns.iter().map(|(key, column)| (key.as_str(), column))
    }

    /// What is known of a key.
    pub fn column(&self, key: &str) -> Option<&Column> {
        self.columns.get(key)
    }

    /// The same, or which keys there are instead.
    ///
    /// # Errors
    /// There is no such key.
    pub fn need(&self, key: &str) -> Result<&Column, DataError> {
        self.column(key).ok_or_else(|| {
            let have: Vec<&str> = self.columns.keys().map(String::as_str).collect();
            let message = format!(
                "has no key `{key}`, only {}; choose the strategy they are for, or prepare the data again",
                have.join(", ")
            );
            DataError::refused(&self.root, message)
        })
    }

    /// The id that ends a document, where the files name it.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// What is odd about the files but does no harm, a line each.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Reads whole numbers of a key's river from number `from` on.
    ///
    /// # Errors
    /// There is no such key, it has not as many, or a number is no token id, mask or position.
    pub fn ints(&self, key: &str, mut from: u64, mut to: &mut [i32]) -> Result<(), DataError> {
        let column = self.need(key)?;
        if from.checked_add(to.len() as u64).is_none_or(|end| end > column.len()) {
            let message =
                format!("`{key}` has {} numbers, those from {from} on were asked for", column.len());
            return Err(DataError::refused(&self.root, message));
        }
        while !to.is_empty() {
            let at = column.segment_of(from);
            let (s, end) = (column.segments[at], column.ends[at]);
            let (now, later) = to.split_at_mut(to.len().min((end - from) as usize));
            self.part(&s).ints(key, &s, s.count - (end - from), now)?;
            from += now.len() as u64;
            to = later;
        }
        Ok(())
    }

    /// Whole numbers of a segment.
    ///
    /// # Errors
    /// Those of [`ints`](Self::ints).
    pub fn record(&self, key: &str, segment: usize) -> Result<Vec<i32>, DataError> {
        let s = self.segment(key, segment)?;
        let mut all = vec![0; s.count as usize];
        self.part(&s).ints(key, &s, 0, &mut all)?;
        Ok(all)
    }

    /// Numbers of a segment as floats.
    ///
    /// # Errors
    /// There is no such segment, or it cannot be read.
    pub fn floats(&self, key: &str, segment: usize) -> Result<Vec<f32>, DataError> {
        let s = self.segment(key, segment)?;
        let mut all = vec![0.0; s.count as usize];
        self.part(&s).floats(key, &s, 0, &mut all)?;
        Ok(all)
    }

    /// Rows of a segment that is a matrix; a list is one row.
    ///
    /// # Errors
    /// Those of [`record`](Self::record).
    pub fn rows(&self, key: &str, segment: usize) -> Result<Vec<Vec<i32>>, DataError> {
        let s = self.segment(key, segment)?;
        let (all, lengths) = (self.record(key, segment)?, self.part(&s).rows(key, &s)?);
        let mut rest = all.as_slice();
        let mut row = |n: usize| {
            let (now, later) = rest.split_at(n.min(rest.len()));
            rest = later;
            now.to_vec()
        };
        Ok(lengths.into_iter().map(&mut row).collect())
    }

    /// How long the rows of a segment are.
    ///
    /// # Errors
    /// Those of [`record`](Self::record).
    pub fn row_lengths(&self, key: &str, segment: usize) -> Result<Vec<usize>, DataError> {
        let s = self.segment(key, segment)?;
        self.part(&s).rows(key, &s)
    }

    fn segment(&self, key: &str, segment: usize) -> Result<Segment, DataError> {
        let column = self.need(key)?;
        column.segments.get(segment).copied().ok_or_else(|| {
            let message =
                format!("`{key}` has {} segments, number {segment} was asked for", column.segments());
            DataError::refused(&self.root, message)
        })
    }

    fn part(&self, s: &Segment) -> &dyn Part {
        &*self.parts[s.part as usize]
    }

    /// The first segment of a key that does not belong to the same record as that of another key with its number: it is of another
    /// file, or of another line or number in it.
    pub fn misplaced(&self, key: &str, other: &str) -> Option<usize> {
        let (a, b) = (self.column(key)?, self.column(other)?);
        let numbered = matches!(self.layout, Layout::Hdf5 | Layout::Jsonl);
        let apart = |(a, b): (&Segment, &Segment)| a.part != b.part || numbered && a.at != b.at;
        a.segments.iter().zip(&b.segments).position(apart)
    }

    /// The file that a segment lies in.
    pub fn file_of(&self, key: &str, segment: usize) -> &Path {
        self.segment(key, segment).map_or(&self.root, |s| self.part(&s).path())
    }

    /// Reads everything once. Ids under `ids` must be below `vocabulary`. Answers a SHA-256 over all keys, lengths and numbers.
    ///
    /// # Errors
    /// A number cannot be read, or an id is too large or negative.
    pub fn check(
        &self,
        ids: &[&str],
        vocabulary: usize,
        progress: Progress<'_>,
    ) -> Result<String, DataError> {
        let mut sum = Sha256::new();
        let total = self.columns.values().map(Column::len).sum();
        let (mut done, mut block, mut bytes) = (0, vec![0; BLOCK], Vec::with_capacity(4 * BLOCK));
        for (key, column) in &self.columns {
            sum.update(key.as_bytes());
            for (i, s) in column.segments.iter().enumerate() {
                sum.update(s.count.to_le_bytes());
                if column.elements().any(Element::is_float) {
                    self.floats(key, i)?.iter().for_each(|x| sum.update(x.to_le_bytes()));
                    done += s.count;
                    continue;
                }
                for from in (0..s.count).step_by(BLOCK) {
                    let block = &mut block[..BLOCK.min((s.count - from) as usize)];
                    self.part(s).ints(key, s, from, block)?;
                    if ids.contains(&key.as_str()) {
                        self.refuse_beyond(key, i, from, block, vocabulary)?;
                    }
                    bytes.clear();
                    bytes.extend(block.iter().flat_map(|x| x.to_le_bytes()));
                    sum.update(&bytes);
                    done += block.len() as u64;
                    progress(done, total);
                }
            }
        }
        Ok(hex(sum))
    }

    fn refuse_beyond(
        &self,
        key: &str,
        segment: usize,
        from: u64,
        block: &[i32],
        vocabulary: usize,
    ) -> Result<(), DataError> {
        let Some(at) = block.iter().position(|&id| id < 0 || id as usize >= vocabulary) else {
            return Ok(());
        };
        let message = format!(
            "`{key}` of record {segment}: token {} is {}, the vocabulary ends at {vocabulary}; use the tokenizer that made the data",
            from + at as u64,
            block[at]
        );
        Err(DataError::refused(self.file_of(key, segment), message))
    }
}

/// A key's river.
#[derive(Clone, Debug)]
pub struct River {
    store: Arc<Store>,
    key: &'static str,
}

impl River {
    /// The river of a key that the store has.
    ///
    /// # Errors
    /// It has no such key.
    pub fn new(store: &Arc<Store>, key: &'static str) -> Result<River, DataError> {
        store.need(key)?;
        Ok(River { store: store.clone(), key })
    }
}

impl super::windows::Row for River {
    fn len(&self) -> u64 {
        self.store.column(self.key).map_or(0, Column::len)
    }

    fn copy(&self, from: u64, to: &mut [i32]) -> Result<(), DataError> {
        self.store.ints(self.key, from, to)
    }
}
