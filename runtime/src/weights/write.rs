//! In: tensors, one after another. Out: a `.safetensors` file that appears whole under its name or not at all: written
//! beside it, synced, renamed. Shapes come first because the header does; data is then streamed, so that a model need
//! never be in memory twice.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::{File, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use astrai_files::folder_of;
use astrai_ir::DType;
use safetensors::SafeTensorError;
use safetensors::tensor::{Metadata, TensorInfo};
use tempfile::NamedTempFile;

use super::error::{WeightsError, quote};
use super::header::{MAX_HEADER, MAX_RANK, PREFIX, file_dtype, size_of, twice};
use super::json::METADATA;

/// Type and shape of a tensor to be written.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Name, unique in the file.
    pub name: String,
    /// Type of the elements.
    pub dtype: DType,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
}

/// A file being written. [`put`](Self::put) the bytes of every entry in order, then [`finish`](Self::finish); a writer
/// dropped before leaves nothing behind and an older file of that name untouched.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    file: NamedTempFile,
    /// A write failed halfway: what is on disk no longer matches the header.
    broken: bool,
    /// Name and bytes of each entry.
    sizes: Vec<(String, usize)>,
    next: usize,
}

impl Writer {
    /// Starts the file `path` with a header for `entries`, their data to follow in this order.
    ///
    /// # Errors
    /// Entries the format cannot hold (a name twice, a size beyond the address space, a header beyond 100 MB), or
    /// the directory refuses a file.
    pub fn create(
        path: &Path,
        entries: &[Entry],
        metadata: &BTreeMap<String, String>,
    ) -> Result<Writer, WeightsError> {
        let (header, sizes) =
            file_header(entries, metadata).map_err(|trouble| WeightsError::refused(path, trouble))?;
        if path.is_dir() {
            return Err(WeightsError::refused(path, "a directory has this name: give the path of a file"));
        }
        let mut writer = Writer {
            path: path.to_path_buf(),
            file: create_beside(path)?,
            broken: false,
            sizes: entries.iter().map(|e| e.name.clone()).zip(sizes).collect(),
            next: 0,
        };
        writer.append(&header)?;
        Ok(writer)
    }

    /// Writes the data of the next entry: row-major, little-endian.
    ///
    /// # Errors
    /// `bytes` are not the entry's, all entries are written already, or the disk refuses.
    pub fn put(&mut self, bytes: &[u8]) -> Result<(), WeightsError> {
        let Some((name, size)) = self.sizes.get(self.next) else {
            return Err(WeightsError::refused(
                &self.path,
                "data after the last tensor of the header: announce it in the header",
            ));
        };
        if bytes.len() != *size {
            let trouble =
                format!("tensor {}: {} bytes given, its shape takes {size}", quote(name), bytes.len());
            return Err(WeightsError::refused(&self.path, trouble));
        }
        self.append(bytes)?;
        self.next += 1;
        Ok(())
    }

    /// Makes the file durable and gives it its name.
    ///
    /// # Errors
    /// An entry has no data yet, or the disk refuses; an older file of that name is then still there.
    pub fn finish(self) -> Result<(), WeightsError> {
        if let Some((name, _)) = self.sizes.get(self.next) {
            return Err(WeightsError::refused(
                &self.path,
                format!("tensor {}: no data was given for it", quote(name)),
            ));
        }
        if self.broken {
            return Err(WeightsError::refused(&self.path, "an earlier write failed: start the file again"));
        }
        self.file.as_file().sync_all().map_err(WeightsError::io(&self.path, "make it durable"))?;
        self.file.persist(&self.path).map_err(|e| WeightsError::io(&self.path, "replace it")(e.error))?;
        // The new name is durable only when its directory is.
        let directory = folder_of(&self.path);
        File::open(directory)
            .and_then(|d| d.sync_all())
            .map_err(WeightsError::io(directory, "make it durable"))
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), WeightsError> {
        let written = self.file.write_all(bytes);
        self.broken |= written.is_err();
        written.map_err(WeightsError::io(&self.path, "write it"))
    }
}

/// Writes `tensors` (name, type, shape, bytes), in their order, as the file `path`; see [`Writer`] for data that is
/// made as it is written.
///
/// # Errors
/// Those of [`Writer`].
pub fn write<'a>(
    path: &Path,
    tensors: impl IntoIterator<Item = (&'a str, DType, &'a [usize], &'a [u8])>,
    metadata: &BTreeMap<String, String>,
) -> Result<(), WeightsError> {
    let (mut entries, mut data) = (Vec::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        entries.push(Entry { name: name.to_string(), dtype, shape: shape.to_vec() });
        data.push(bytes);
    }
    let mut writer = Writer::create(path, &entries, metadata)?;
    for bytes in data {
        writer.put(bytes)?;
    }
    writer.finish()
}

/// The bytes before the data of a file of `entries`, padded so that data begins at a multiple of eight, and the bytes that
/// each entry takes; for those who write the file themselves.
///
/// # Errors
/// Entries the format cannot hold: which, and why.
pub fn file_header(
    entries: &[Entry],
    metadata: &BTreeMap<String, String>,
) -> Result<(Vec<u8>, Vec<usize>), String> {
    if let Some(name) = twice(entries.iter().map(|e| e.name.as_str())) {
        return Err(format!("tensor {} is given twice", quote(name)));
    }
    let (mut sizes, mut infos, mut begin) = (Vec::new(), Vec::new(), 0usize);
    for Entry { name, dtype, shape } in entries {
        let refused = |trouble: String| Err(format!("tensor {}: {trouble}", quote(name)));
        if name == METADATA {
            return Err(format!("a tensor cannot be called {METADATA}: rename it"));
        }
        if shape.len() > MAX_RANK {
            return refused(format!("{} dimensions, the limit is {MAX_RANK}", shape.len()));
        }
        let size = size_of(*dtype, shape);
        let Some((size, end)) = size.and_then(|size| Some((size, begin.checked_add(size)?))) else {
            return refused(format!("shape {shape:?} overflows the address space"));
        };
        let Some(dtype) = file_dtype(*dtype) else {
            return refused(format!("the format has no type {dtype}"));
        };
        infos.push((name.clone(), TensorInfo { dtype, shape: shape.clone(), data_offsets: (begin, end) }));
        sizes.push(size);
        begin = end;
    }
    let mut header = header_text(infos, metadata).map_err(|e| e.to_string())?.into_bytes();
    header.resize(header.len().next_multiple_of(PREFIX), b' ');
    if header.len() > MAX_HEADER {
        return Err(format!(
            "the header takes {} bytes, the limit is {MAX_HEADER}: split the tensors over files",
            header.len()
        ));
    }
    Ok(([&(header.len() as u64).to_le_bytes()[..], &header].concat(), sizes))
}

fn header_text(
    infos: Vec<(String, TensorInfo)>,
    metadata: &BTreeMap<String, String>,
) -> Result<String, SafeTensorError> {
    let texts = (!metadata.is_empty()).then(|| metadata.clone().into_iter().collect());
    let mut header = serde_json::to_value(Metadata::new(texts, infos)?)?;
    // The crate keeps the free text in a hash map, whose order is another one in every run.
    if let Some(texts) = header.get_mut(METADATA).and_then(serde_json::Value::as_object_mut) {
        texts.sort_keys();
    }
    Ok(header.to_string())
}

/// A new file in the directory of `path`, because only there a rename is atomic; who may read it is the umask's to say.
fn create_beside(path: &Path) -> Result<NamedTempFile, WeightsError> {
    let Some(name) = path.file_name() else {
        return Err(WeightsError::refused(path, "this names no file: give the path of a file"));
    };
    let hidden = OsString::from_iter([OsStr::new("."), name, OsStr::new(".")]);
    let mut builder = tempfile::Builder::new();
    builder.prefix(&hidden).suffix(".tmp").permissions(Permissions::from_mode(0o666));
    builder.tempfile_in(folder_of(path)).map_err(WeightsError::io(path, "create it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_an_error_and_stays_one() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("w.safetensors");
        let entry = Entry { name: "x".to_string(), dtype: DType::U8, shape: vec![1] };
        let mut writer = Writer::create(&path, &[entry], &BTreeMap::new()).expect("created");
        *writer.file.as_file_mut() = File::options().write(true).open("/dev/full").expect("the full device");
        let error = writer.put(&[1]).expect_err("no space").to_string();
        assert!(error.contains("w.safetensors: cannot write it: No space left"), "{error}");
        writer.next = 1;
        let error = writer.finish().expect_err("broken").to_string();
        assert!(error.contains("an earlier write failed"), "{error}");
        assert_eq!(std::fs::read_dir(dir.path()).expect("listed").count(), 0);
    }
}
