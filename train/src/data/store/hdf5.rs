//! HDF5 files: a group per key, datasets `data_0`, `data_1` and on in it, ordered by number. In: files of h5py, of this program,
//! of anyone. Out: segments, read slice by slice. The format is the `rust-hdf5` crate's: pure Rust, and it reads what
//! `libver="latest"` writes. What stands here are the names, and bounds on what a hostile file can ask for: no other file is
//! read for its numbers, no chunk is larger than [`CHUNK`], and no file unpacks to more than deflate can pack.

use super::bin::whole;
use super::{Element, Found, Numbers, Part, Segment};
use crate::data::DataError;
use astrai_files::{guarded, one_line};
use rust_hdf5::{DatatypeMessage, H5Dataset, H5File, H5Type, HBool, StorageLayout};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Bytes of the largest chunk.
const CHUNK: u64 = 1 << 28;

/// Deflate packs a byte into a thousandth at best; shuffling changes no length.
const RATIO: u64 = 1100;

/// What `h5py` and the library know: deflate, shuffle, Fletcher-32.
const FILTERS: [u16; 3] = [1, 2, 3];

/// Numbers of a chunk that is written: more than 32768 some readers refuse.
const WRITTEN: usize = 1 << 15;

struct File {
    path: PathBuf,
    file: H5File,
}

impl std::fmt::Debug for File {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "File({})", self.path.display())
    }
}

/// Calls the library; its errors and panics become one line with the file's name.
fn library<T>(path: &Path, doing: &str, call: impl FnOnce() -> rust_hdf5::Result<T>) -> Result<T, DataError> {
    let done = guarded(call).and_then(|done| done.map_err(|e| e.to_string()));
    done.map_err(|e| {
        let why = one_line(&e);
        DataError::refused(path, format!("{doing} ({why}); write the file again, with h5py say"))
    })
}

fn name(key: &str, number: u64) -> String {
    format!("{key}/data_{number}")
}

/// The key and number of a dataset's name.
fn parse(name: &str) -> Option<(String, u64)> {
    let (key, leaf) = name.trim_start_matches('/').split_once('/')?;
    let number: u64 = leaf.strip_prefix("data_")?.parse().ok()?;
    (self::name(key, number).trim_start_matches('/') == name.trim_start_matches('/'))
        .then(|| (key.to_string(), number))
}

pub(super) fn open(path: &Path, found: &mut Found<'_>) -> Result<Box<dyn Part>, DataError> {
    let (_, bytes) = astrai_files::open(path)?;
    let file = library(path, "is no HDF5 file that can be read", || {
        H5File::options().best_effort_locking().open(path)
    })?;
    let names = guarded(|| file.dataset_names()).map_err(|e| DataError::refused(path, one_line(&e)))?;
    let mut all: Vec<(String, u64)> = names.iter().filter_map(|name| parse(name)).collect();
    all.sort_unstable();
    if all.is_empty() {
        let message =
            "has no group with datasets `data_0` and on, one group a key; write it so, see docs/training.md";
        return Err(DataError::refused(path, message));
    }
    for (key, number) in all {
        let name = name(&key, number);
        let refused = |message: String| DataError::refused(path, format!("`{name}`: {message}"));
        let look = || {
            let set = file.dataset(&name)?;
            Ok((set.datatype()?, shape(&set), storage(&set)?))
        };
        let (datatype, shape, storage) = library(path, &format!("`{name}` cannot be read"), look)?;
        let element = element(&datatype).ok_or_else(|| {
            refused("holds no numbers of a usual type; store integers, booleans or floats".into())
        })?;
        let (rows, count) = match shape.as_slice() {
            [] => (0, Some(1)),
            &[count] => (0, Some(count)),
            &[rows, columns] => (rows, rows.checked_mul(columns)),
            _ => {
                return Err(refused("has more than two dimensions; store a list, or a row an answer".into()));
            }
        };
        let stored = count.and_then(|count| count.checked_mul(element.bytes() as u64));
        let most = match storage {
            Storage::Foreign(what) => {
                return Err(refused(format!("{what}; store its numbers in the file itself")));
            }
            Storage::Plain => bytes,
            Storage::Packed => bytes.saturating_mul(RATIO),
        };
        match (count, stored, u32::try_from(rows)) {
            (Some(count), Some(stored), Ok(rows)) if stored <= most => {
                found.segment(&key, element, number, count, rows);
            }
            _ => {
                let message = format!("is said to be {shape:?}, more than the file can hold; write it again");
                return Err(refused(message));
            }
        }
    }
    Ok(Box::new(File { path: path.to_path_buf(), file }))
}

fn shape(set: &H5Dataset) -> Vec<u64> {
    set.shape().into_iter().map(|n| n as u64).collect()
}

/// How a dataset's numbers lie in the file.
enum Storage {
    Plain,
    Packed,
    Foreign(&'static str),
}

fn storage(set: &H5Dataset) -> rust_hdf5::Result<Storage> {
    if set.filters()?.iter().any(|f| !FILTERS.contains(&f.id)) {
        return Ok(Storage::Foreign("is packed by a filter other than gzip and shuffle"));
    }
    Ok(match set.storage_layout()? {
        StorageLayout::Virtual => Storage::Foreign("is a view of other datasets"),
        StorageLayout::Chunked => {
            let chunk = set.chunk_dims().unwrap_or_default();
            let size = chunk.iter().try_fold(set.element_size() as u64, |n, &d| n.checked_mul(d as u64));
            match size.is_some_and(|size| size <= CHUNK) {
                true => Storage::Packed,
                false => Storage::Foreign("has chunks of more than 256 MiB"),
            }
        }
        _ if !set.external_files()?.is_empty() => Storage::Foreign("lies in other files"),
        _ => Storage::Plain,
    })
}

fn element(datatype: &DatatypeMessage) -> Option<Element> {
    Some(match datatype {
        DatatypeMessage::FixedPoint { size, signed, bit_offset: 0, bit_precision, .. }
            if u32::from(*bit_precision) == size * 8 =>
        {
            match (size, signed) {
                (1, true) => Element::Int8,
                (1, false) => Element::Uint8,
                (2, true) => Element::Int16,
                (2, false) => Element::Uint16,
                (4, true) => Element::Int32,
                (4, false) => Element::Uint32,
                (8, true) => Element::Int64,
                (8, false) => Element::Uint64,
                _ => return None,
            }
        }
        DatatypeMessage::FloatingPoint { size: 4, .. } => Element::Float32,
        DatatypeMessage::FloatingPoint { size: 8, .. } => Element::Float64,
        // What h5py makes of NumPy's bool.
        DatatypeMessage::Enum { base, .. }
            if matches!(**base, DatatypeMessage::FixedPoint { size: 1, .. }) =>
        {
            Element::Bool
        }
        _ => return None,
    })
}

/// Numbers `from` to `from + n` of a list, or of a matrix as it lies in the file.
fn slice<T: H5Type>(set: &H5Dataset, from: usize, n: usize) -> rust_hdf5::Result<Vec<T>> {
    match *set.shape().as_slice() {
        _ if n == 0 => Ok(vec![]),
        [] => set.read_raw(),
        [_] => set.read_slice(&[from], &[n]),
        [_, columns, ..] => {
            let (first, last) = (from / columns.max(1), (from + n).div_ceil(columns.max(1)));
            let mut rows = set.read_slice(&[first, 0], &[last - first, columns])?;
            rows.drain(..from - first * columns);
            rows.truncate(n);
            Ok(rows)
        }
    }
}

impl File {
    /// Reads numbers as they are stored and gives each to `put`, with its place.
    fn each(
        &self,
        key: &str,
        s: &Segment,
        from: u64,
        n: usize,
        put: &mut dyn FnMut(usize, f64) -> Result<(), String>,
    ) -> Result<(), DataError> {
        let name = name(key, s.at);
        macro_rules! read {
            ($($kind:ident: $stored:ty, $as:expr;)*) => {
                match s.element {
                    $(Element::$kind => {
                        let doing = format!("`{name}` cannot be read");
                        let all: Vec<$stored> =
                            library(&self.path, &doing, || slice(&self.file.dataset(&name)?, from as usize, n))?;
                        if all.len() != n {
                            return Err(DataError::refused(&self.path, format!("`{name}` is cut short; restore the file")));
                        }
                        all.into_iter().enumerate().try_for_each(|(i, x)| put(i, $as(x)))
                    })*
                }
            };
        }
        let done: Result<(), String> = read! {
            Bool: u8, |x| f64::from(u8::from(x != 0));
            Int8: i8, f64::from;
            Uint8: u8, f64::from;
            Int16: i16, f64::from;
            Uint16: u16, f64::from;
            Int32: i32, f64::from;
            Uint32: u32, f64::from;
            Int64: i64, |x| x as f64;
            Uint64: u64, |x| x as f64;
            Float32: f32, f64::from;
            Float64: f64, |x| x;
        };
        done.map_err(|message| DataError::refused(&self.path, format!("`{name}`: {message}")))
    }
}

impl Part for File {
    fn path(&self) -> &Path {
        &self.path
    }

    fn ints(&self, key: &str, s: &Segment, from: u64, to: &mut [i32]) -> Result<(), DataError> {
        self.each(key, s, from, to.len(), &mut |i, x| {
            to[i] = whole(x, from + i as u64)?;
            Ok(())
        })
    }

    fn floats(&self, key: &str, s: &Segment, from: u64, to: &mut [f32]) -> Result<(), DataError> {
        self.each(key, s, from, to.len(), &mut |i, x| {
            to[i] = x as f32;
            Ok(())
        })
    }
}

/// Writes datasets one after another, each piece by piece.
pub(super) struct Writing {
    path: PathBuf,
    file: H5File,
    gzip: bool,
    /// Datasets of each key.
    counts: BTreeMap<String, u64>,
    open: Option<Open>,
}

struct Open {
    set: H5Dataset,
    element: Element,
    columns: Option<usize>,
    written: usize,
}

impl Writing {
    pub(super) fn create(path: &Path, gzip: bool) -> Result<Writing, DataError> {
        let file = library(path, "cannot be written", || H5File::create(path))?;
        Ok(Writing { path: path.to_path_buf(), file, gzip, counts: BTreeMap::new(), open: None })
    }

    /// The next dataset of a key: a list, or a matrix of equal rows.
    pub(super) fn begin(
        &mut self,
        key: &str,
        element: Element,
        count: usize,
        rows: usize,
    ) -> Result<(), DataError> {
        let (file, gzip) = (&self.file, self.gzip && count > 0);
        let number = match self.counts.get_mut(key) {
            Some(count) => {
                *count += 1;
                *count - 1
            }
            None => {
                self.counts.insert(key.into(), 1);
                library(&self.path, "cannot be written", || file.create_group(key))?;
                0
            }
        };
        let shape = if rows > 0 { vec![rows, count / rows] } else { vec![count] };
        let chunk: Vec<usize> = match *shape.as_slice() {
            [rows, columns] => {
                vec![(WRITTEN / columns.max(1)).clamp(1, rows.max(1)), columns.clamp(1, WRITTEN)]
            }
            _ => vec![count.clamp(1, WRITTEN)],
        };
        macro_rules! create {
            ($($kind:ident: $stored:ty),*) => {
                match element {
                    $(Element::$kind => {
                        let mut set = file.new_dataset::<$stored>().shape(&shape);
                        if gzip {
                            set = set.chunk(&chunk).shuffle_deflate(4);
                        }
                        set.create(&name(key, number))
                    })*
                }
            };
        }
        let set = library(&self.path, "cannot be written", || {
            create!(Bool: HBool, Int8: i8, Uint8: u8, Int16: i16, Uint16: u16, Int32: i32, Uint32: u32, Int64: i64,
                Uint64: u64, Float32: f32, Float64: f64)
        })?;
        self.open = Some(Open {
            set,
            element,
            columns: (rows > 0).then_some(shape[1.min(shape.len() - 1)]),
            written: 0,
        });
        Ok(())
    }

    /// More numbers of the dataset at hand; whole rows of a matrix.
    pub(super) fn put(&mut self, numbers: Numbers<'_>) -> Result<(), DataError> {
        let Some(open) = &mut self.open else { return Ok(()) };
        let (n, columns) = (numbers.len(), open.columns.unwrap_or(1).max(1));
        if n == 0 {
            return Ok(());
        }
        let (starts, counts) = match open.columns {
            Some(columns) => (vec![open.written / columns, 0], vec![n / columns, columns]),
            None => (vec![open.written], vec![n]),
        };
        debug_assert!(n.is_multiple_of(columns), "whole rows");
        macro_rules! write {
            ($($kind:ident: $stored:ty, $as:expr;)*) => {
                match open.element {
                    $(Element::$kind => {
                        let all: Vec<$stored> = match numbers {
                            Numbers::Ints(list) => list.iter().map(|&x| $as(f64::from(x))).collect(),
                            Numbers::Floats(list) => list.iter().map(|&x| $as(f64::from(x))).collect(),
                        };
                        open.set.write_slice(&starts, &counts, &all)
                    })*
                }
            };
        }
        library(&self.path, "cannot be written", || {
            write! {
                Bool: HBool, |x| HBool(u8::from(x != 0.0));
                Int8: i8, |x| x as i8;
                Uint8: u8, |x| x as u8;
                Int16: i16, |x| x as i16;
                Uint16: u16, |x| x as u16;
                Int32: i32, |x| x as i32;
                Uint32: u32, |x| x as u32;
                Int64: i64, |x| x as i64;
                Uint64: u64, |x| x as u64;
                Float32: f32, |x| x as f32;
                Float64: f64, |x| x;
            }
        })?;
        open.written += n;
        Ok(())
    }

    /// Makes the file whole and durable.
    pub(super) fn finish(mut self) -> Result<(), DataError> {
        self.open = None;
        let (path, file) = (&self.path, self.file);
        library(path, "cannot be written", || file.close())
    }
}
