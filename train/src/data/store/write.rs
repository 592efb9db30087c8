//! Writing prepared data. In: records, key by key, a number of any layout. Out: a shard, there whole or not at all: it is written
//! beside its name, made durable and renamed.

use super::bin::is_plain;
use super::hdf5::Writing;
use super::{Element, Layout};
use crate::data::DataError;
use astrai_files::{Disk, System, beside, folder_of, one_line};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Numbers to be written.
#[derive(Clone, Copy, Debug)]
pub enum Numbers<'a> {
    /// Ids, masks, positions.
    Ints(&'a [i32]),
    /// Rewards, log-probabilities.
    Floats(&'a [f32]),
}

impl Numbers<'_> {
    /// How many.
    pub fn len(&self) -> usize {
        match self {
            Numbers::Ints(list) => list.len(),
            Numbers::Floats(list) => list.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first number that a type cannot hold as it is.
    fn beyond(&self, element: Element) -> Option<f64> {
        let (least, most) = element.range();
        let fits =
            |x: f64| element.is_float() && x.is_finite() || x.fract() == 0.0 && least <= x && x <= most;
        match self {
            Numbers::Ints(list) => list.iter().map(|&x| f64::from(x)).find(|&x| !fits(x)),
            Numbers::Floats(list) => list.iter().map(|&x| f64::from(x)).find(|&x| !fits(x)),
        }
    }

    fn json(&self) -> Vec<Value> {
        match self {
            Numbers::Ints(list) => list.iter().map(|&x| Value::from(x)).collect(),
            Numbers::Floats(list) => list.iter().map(|&x| Value::from(x)).collect(),
        }
    }
}

/// What one key of a record is, before its numbers.
#[derive(Clone, Debug)]
pub struct Array {
    /// How to store the numbers.
    pub element: Element,
    /// Numbers of all rows.
    pub count: usize,
    /// Lengths of the rows of a matrix; empty for a list.
    pub rows: Vec<usize>,
}

/// How to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteOptions {
    /// In which layout; `tokens` is written by `astrai train` alone, `bin` stands for it here.
    pub layout: Layout,
    /// HDF5: chunks of 32768 numbers, shuffled and packed by gzip, instead of numbers in one piece.
    pub gzip: bool,
}

/// A shard being written.
pub struct Writer {
    /// Where it is to be.
    path: PathBuf,
    /// Where it is until it is whole.
    now: Unfinished,
    kind: Kind,
    /// Numbers of the key at hand that are still to come.
    left: usize,
    /// Their type.
    element: Element,
}

enum Kind {
    Hdf5(Box<Writing>),
    Bin { files: BTreeMap<String, Key>, at: String },
    Lines { file: BufWriter<File>, record: Map<String, Value>, at: String, rows: Vec<usize>, got: Vec<Value> },
}

/// Where a shard is written. What is still there when its writer goes was given up, and is removed.
struct Unfinished(PathBuf);

impl Drop for Unfinished {
    fn drop(&mut self) {
        // The next writer of this shard tries again, and says what keeps it.
        let _kept = Writer::remove(&self.0);
    }
}

/// A file of one key.
struct Key {
    file: BufWriter<File>,
    element: Element,
    offsets: Vec<u64>,
    rows: Vec<usize>,
}

impl Writer {
    /// The path of shard `number` in a folder: `shard_0000` (a folder), `data_0000.h5` or `data_0000.jsonl`.
    pub fn path(folder: &Path, layout: Layout, number: usize) -> PathBuf {
        folder.join(match layout {
            Layout::Hdf5 => format!("data_{number:04}.h5"),
            Layout::Jsonl => format!("data_{number:04}.jsonl"),
            Layout::Bin | Layout::Tokens => format!("shard_{number:04}"),
        })
    }

    /// Removes what a process that died left under a name of ours.
    pub(crate) fn remove(path: &Path) -> Result<(), DataError> {
        let done = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        match done {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(DataError::io(path, "remove the leftover")(e))
            }
            _ => Ok(()),
        }
    }

    /// Begins a shard; folders above it are made.
    ///
    /// # Errors
    /// The system refuses, or there is something already.
    pub fn create(path: &Path, options: WriteOptions) -> Result<Writer, DataError> {
        if path.exists() {
            return Err(DataError::refused(path, "exists; choose another name, or remove it"));
        }
        let folder = folder_of(path);
        fs::create_dir_all(folder).map_err(DataError::io(folder, "make the folder"))?;
        let now = Unfinished(beside(path));
        Writer::remove(&now.0)?;
        let kind = match options.layout {
            Layout::Hdf5 => Kind::Hdf5(Box::new(Writing::create(&now.0, options.gzip)?)),
            Layout::Bin | Layout::Tokens => {
                fs::create_dir(&now.0).map_err(DataError::io(&now.0, "make the folder"))?;
                Kind::Bin { files: BTreeMap::new(), at: String::new() }
            }
            Layout::Jsonl => {
                let file = File::create(&now.0).map_err(DataError::io(&now.0, "write"))?;
                let (record, at) = (Map::new(), String::new());
                Kind::Lines { file: BufWriter::new(file), record, at, rows: vec![], got: vec![] }
            }
        };
        Ok(Writer { path: path.to_path_buf(), now, kind, left: 0, element: Element::Int32 })
    }

    /// Begins a key of the record at hand.
    ///
    /// # Errors
    /// The system refuses; or the layout cannot hold it, as HDF5 cannot rows of unequal length.
    pub fn begin(&mut self, key: &str, array: &Array) -> Result<(), DataError> {
        if !is_plain(key) {
            let message = format!("{:?} is no plain name of a key; rename it", one_line(key));
            return Err(DataError::refused(&self.path, message));
        }
        (self.left, self.element) = (array.count, array.element);
        let equal = array.rows.windows(2).all(|pair| pair[0] == pair[1]);
        if !equal && !matches!(self.kind, Kind::Lines { .. }) {
            let message = format!(
                "`{key}`: rows of unequal length fit only JSON lines; choose --to jsonl, or pad them"
            );
            return Err(DataError::refused(&self.path, message));
        }
        match &mut self.kind {
            Kind::Hdf5(file) => file.begin(key, array.element, array.count, array.rows.len()),
            Kind::Lines { at, rows, .. } => {
                (*at, *rows) = (key.to_string(), array.rows.clone());
                if self.left == 0 { self.end() } else { Ok(()) }
            }
            Kind::Bin { files, at } => {
                if !files.contains_key(key) {
                    let path = self.now.0.join(format!("{key}.bin"));
                    let file = File::create(&path).map_err(DataError::io(&path, "write"))?;
                    let file = BufWriter::with_capacity(1 << 18, file);
                    let new = Key { file, element: array.element, offsets: vec![0], rows: vec![] };
                    files.insert(key.to_string(), new);
                }
                let Some(file) = files.get_mut(key) else { return Ok(()) };
                let end = file.offsets.last().copied().unwrap_or(0) + array.count as u64;
                file.offsets.push(end);
                file.rows.push(array.rows.len());
                *at = key.to_string();
                Ok(())
            }
        }
    }

    /// Numbers of the key at hand; of a matrix whole rows.
    ///
    /// # Errors
    /// The system refuses, or the key's type cannot hold a number.
    pub fn put(&mut self, numbers: Numbers<'_>) -> Result<(), DataError> {
        self.left = self.left.saturating_sub(numbers.len());
        if let Some(x) = numbers.beyond(self.element) {
            let name = self.element.name();
            let message =
                format!("{name} cannot hold {x}; choose another `dtype` for this key, or mend the data");
            return Err(DataError::refused(&self.path, message));
        }
        match &mut self.kind {
            Kind::Hdf5(file) => file.put(numbers),
            Kind::Bin { files, at } => {
                let Some(key) = files.get_mut(at) else { return Ok(()) };
                key.put(numbers).map_err(DataError::io(&self.path, "write"))
            }
            Kind::Lines { got, .. } => {
                got.extend(numbers.json());
                if self.left == 0 { self.end() } else { Ok(()) }
            }
        }
    }

    /// A line's key is whole.
    fn end(&mut self) -> Result<(), DataError> {
        if let Kind::Lines { record, at, rows, got, .. } = &mut self.kind {
            let value = match rows.is_empty() {
                true => Value::Array(std::mem::take(got)),
                false => {
                    rows.iter().map(|&n| Value::Array(got.drain(..n.min(got.len())).collect())).collect()
                }
            };
            got.clear();
            record.insert(std::mem::take(at), value);
        }
        Ok(())
    }

    /// Ends a record.
    ///
    /// # Errors
    /// The system refuses.
    pub fn end_record(&mut self) -> Result<(), DataError> {
        if let Kind::Lines { file, record, .. } = &mut self.kind {
            let line = Value::Object(std::mem::take(record));
            writeln!(file, "{line}").map_err(DataError::io(&self.path, "write"))?;
        }
        Ok(())
    }

    /// Makes the shard whole, durable and known by its name.
    ///
    /// # Errors
    /// The system refuses.
    pub fn finish(self) -> Result<(), DataError> {
        match self.kind {
            Kind::Hdf5(file) => file.finish()?,
            Kind::Lines { mut file, .. } => {
                file.flush()
                    .and_then(|()| file.get_ref().sync_all())
                    .map_err(DataError::io(&self.path, "write"))?;
            }
            Kind::Bin { files, .. } => {
                let mut meta = Map::new();
                for (name, mut key) in files {
                    key.file
                        .flush()
                        .and_then(|()| key.file.get_ref().sync_all())
                        .map_err(DataError::io(&self.path, "write"))?;
                    let count = key.offsets.last().copied().unwrap_or(0);
                    let mut entry =
                        json!({"shape": [count], "dtype": key.element.name(), "offsets": key.offsets});
                    if key.rows.iter().any(|&rows| rows > 0) {
                        entry["rows"] = json!(key.rows);
                    }
                    meta.insert(name, entry);
                }
                let path = self.now.0.join("meta.json");
                let text = Value::Object(meta).to_string();
                let written = File::create(&path).and_then(|mut file| {
                    file.write_all(text.as_bytes())?;
                    file.sync_all()
                });
                written.map_err(DataError::io(&path, "write"))?;
                System.sync_folder(&self.now.0).map_err(DataError::io(&self.now.0, "write"))?;
            }
        }
        fs::rename(&self.now.0, &self.path).map_err(DataError::io(&self.path, "write"))?;
        System.sync_folder(folder_of(&self.path)).map_err(DataError::io(&self.path, "write"))
    }
}

impl Key {
    fn put(&mut self, numbers: Numbers<'_>) -> std::io::Result<()> {
        let element = self.element;
        let mut one = |x: f64| match element {
            Element::Bool => self.file.write_all(&[u8::from(x != 0.0)]),
            Element::Int8 => self.file.write_all(&(x as i8).to_le_bytes()),
            Element::Uint8 => self.file.write_all(&(x as u8).to_le_bytes()),
            Element::Int16 => self.file.write_all(&(x as i16).to_le_bytes()),
            Element::Uint16 => self.file.write_all(&(x as u16).to_le_bytes()),
            Element::Int32 => self.file.write_all(&(x as i32).to_le_bytes()),
            Element::Uint32 => self.file.write_all(&(x as u32).to_le_bytes()),
            Element::Int64 => self.file.write_all(&(x as i64).to_le_bytes()),
            Element::Uint64 => self.file.write_all(&(x as u64).to_le_bytes()),
            Element::Float32 => self.file.write_all(&(x as f32).to_le_bytes()),
            Element::Float64 => self.file.write_all(&x.to_le_bytes()),
        };
        match numbers {
            Numbers::Ints(list) => list.iter().try_for_each(|&x| one(f64::from(x))),
            Numbers::Floats(list) => list.iter().try_for_each(|&x| one(f64::from(x))),
        }
    }
}
