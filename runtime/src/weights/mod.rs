//! Checkpoints. In: a model directory, a `.safetensors` file or an index of shards, all hostile until checked. Out: named
//! tensor views over private memory maps, whose ranges, types and shapes are proved before the first is handed
//! out; and, the other way, files written whole or not at all. Nothing here allocates by a number that a file claims: memory is
//! bounded by the length of the header's text.
//!
//! A map shows the file as it is: whoever shortens a file in place while it is open makes reading its lost pages a fault
//! (SIGBUS). Replace weights by renaming, as [`write()`] and every download tool do.

mod check;
mod compress;
mod error;
mod gguf;
mod header;
mod json;
mod locate;
mod mxfp4;
mod narrow;
mod packed;
mod solve;
#[cfg(test)]
mod tests;
mod view;
mod write;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use memmap2::{Mmap, MmapOptions, UncheckedAdvice};

use astrai_files::shown;
use error::quote;
use header::Tensor;
use locate::{Index, Location, locate, open_regular};

pub use compress::{compress, compressed_layout};
pub use error::WeightsError;
pub use gguf::{Gguf, InFile, Layers, NORMS_BEHIND, OF_GPT_OSS, OfGguf, ROPE_FACTORS, is_gguf};
pub use mxfp4::Widened;
pub use narrow::{Quantisation, Quantised, quantise};
pub use packed::Packed;
pub use solve::Factor;
pub use view::TensorView;
pub use write::{Entry, Writer, file_header, write};

/// An open checkpoint, checked in full. Shared freely between threads.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    files: Vec<Mapped>,
    /// By file, then by offset.
    tensors: Vec<Stored>,
    /// Positions in `tensors`.
    by_name: BTreeMap<String, usize>,
    metadata: BTreeMap<String, String>,
}

#[derive(Debug)]
struct Mapped {
    path: PathBuf,
    map: Mmap,
}

#[derive(Debug)]
struct Stored {
    file: usize,
    tensor: Tensor,
}

impl Checkpoint {
    /// Opens the weights at `path`: a directory with `model.safetensors` or `model.safetensors.index.json`, one
    /// `.safetensors` file, or an index. Reads headers only; data is read when a view is.
    ///
    /// # Errors
    /// Whatever keeps the weights from being used: see [`WeightsError`].
    pub fn open(path: &Path) -> Result<Checkpoint, WeightsError> {
        let mut checkpoint = Checkpoint {
            path: path.to_path_buf(),
            files: Vec::new(),
            tensors: Vec::new(),
            by_name: BTreeMap::new(),
            metadata: BTreeMap::new(),
        };
        match locate(path)? {
            Location::Single(file) => checkpoint.add(&file)?,
            Location::Sharded(index) => {
                for shard in &index.shards {
                    checkpoint.add(shard)?;
                }
                checkpoint.check_index(&index)?;
            }
        }
        Ok(checkpoint)
    }

    /// The path given to [`open`](Self::open).
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names in the order in which the data is stored, the order in which to load.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.tensors.iter().map(|stored| stored.tensor.name.as_str())
    }

    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<TensorView<'_>> {
        let Stored { file, tensor } = self.find(name)?;
        let Mapped { path, map } = &self.files[*file];
        let bytes = &map[tensor.begin..tensor.end];
        Some(TensorView { path, name: &tensor.name, dtype: tensor.dtype, shape: &tensor.shape, bytes })
    }

    /// The free text of the headers; where shards disagree, the first one's.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Gives the memory behind a tensor back to the system, so that a load that copies tensor after tensor does not
    /// grow by the whole file. Views stay valid: the next access reads the file again.
    ///
    /// # Errors
    /// There is no such tensor, or the system refuses.
    pub fn release(&self, name: &str) -> Result<(), WeightsError> {
        let Some(Stored { file, tensor }) = self.find(name) else {
            return Err(WeightsError::refused(&self.path, format!("no tensor {} to release", quote(name))));
        };
        if tensor.begin == tensor.end {
            return Ok(());
        }
        let Mapped { path, map } = &self.files[*file];
        // The pages at both ends go too, though neighbours share them: small tensors would otherwise keep a page or two each.
        // SAFETY: the map is never written, so a dropped page comes back with the same bytes from the file.
        unsafe {
            map.unchecked_advise_range(UncheckedAdvice::DontNeed, tensor.begin, tensor.end - tensor.begin)
        }
        .map_err(WeightsError::io(path, "release its memory"))
    }

    fn find(&self, name: &str) -> Option<&Stored> {
        self.by_name.get(name).map(|&at| &self.tensors[at])
    }

    /// Opens a file; no tensor may be in another one too.
    fn add(&mut self, path: &Path) -> Result<(), WeightsError> {
        let (file, length) = open_regular(path)?;
        if length == 0 {
            return Err(WeightsError::refused(path, format!("the file is empty; {}", error::FETCH_AGAIN)));
        }
        // SAFETY: the map is read-only and private; the module's text names the one condition left to the user.
        let map = unsafe { MmapOptions::new().len(length).map_copy_read_only(&file) };
        let map = map.map_err(WeightsError::io(path, "map it"))?;
        let header = header::read(&map).map_err(|trouble| WeightsError::refused(path, trouble))?;
        let file = self.files.len();
        for tensor in header.tensors {
            if let Some(before) = self.by_name.insert(tensor.name.clone(), self.tensors.len()) {
                let trouble = format!(
                    "tensor {}: in this shard and in {} too; download the shards again",
                    quote(&tensor.name),
                    shown(path)
                );
                return Err(WeightsError::refused(&self.files[self.tensors[before].file].path, trouble));
            }
            self.tensors.push(Stored { file, tensor });
        }
        for (key, text) in header.metadata {
            self.metadata.entry(key).or_insert(text);
        }
        self.files.push(Mapped { path: path.to_path_buf(), map });
        Ok(())
    }

    /// Holds the shards to the index: each listed tensor in its shard. Tensors the index omits are kept, for
    /// [`check`](Self::check) to judge.
    fn check_index(&self, index: &Index) -> Result<(), WeightsError> {
        for (name, &shard) in &index.weights {
            if self.find(name).is_none_or(|stored| stored.file != shard) {
                let trouble = format!(
                    "tensor {} is not in its shard {}; download index and shards again, of one version",
                    quote(name),
                    shown(&self.files[shard].path)
                );
                return Err(WeightsError::refused(&index.path, trouble));
            }
        }
        Ok(())
    }
}
