//! Where weights come from: a checkpoint on disk, or a generator. In: checkpoint names. Out: rows as bytes, one tensor at a
//! time, given back when they have been packed.

use crate::weights::Checkpoint;
use astrai_ir::DType;
use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::{self, DirEntry, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A tensor of a source.
pub struct Source<'a> {
    /// Element type.
    pub dtype: DType,
    /// Sizes.
    pub shape: Vec<usize>,
    /// Elements, row-major, little-endian.
    pub bytes: Cow<'a, [u8]>,
}

/// Gives weights by checkpoint name.
pub trait WeightSource {
    /// The tensor, if there is one of that name.
    fn tensor(&self, name: &str) -> Option<Source<'_>>;

    /// Says that the tensor is not needed again.
    fn done(&self, _name: &str) {}

    /// Says that a session has its weights: what is mapped of the source may go until something is asked for again.
    fn loaded(&self) {}

    /// What its bytes are made of, where that is known.
    fn origin(&self) -> Option<&Origin> {
        None
    }
}

/// What the bytes of a source are made of: by this, weights that were kept as kernels read them are found again.
#[derive(Clone, Default)]
pub struct Origin {
    /// Its name, and how its numbers are rounded.
    pub name: String,
    /// Another text once any byte may be another.
    pub state: String,
    /// Weights that are not kept yet are to be.
    pub keep: bool,
}

impl Origin {
    /// The same and this file, or all of this folder, as they are now: ask before they are opened. A file that is written or exchanged
    /// is another state.
    pub fn and(mut self, path: &Path) -> Origin {
        self.name += &format!("{}\n", path.canonicalize().as_deref().unwrap_or(path).display());
        for file in files(path, DEPTH) {
            let of = |m: Metadata| {
                let times = [m.mtime(), m.mtime_nsec(), m.ctime(), m.ctime_nsec()];
                format!("{} {} {} {times:?}", m.dev(), m.ino(), m.len())
            };
            let now = fs::metadata(&file).map_or_else(|e| e.to_string(), of);
            self.state += &format!("{:?}: {now}\n", file.strip_prefix(path));
        }
        self
    }
}

/// A source whose bytes come from files.
pub struct OfFiles {
    /// Gives them.
    pub inner: Box<dyn WeightSource>,
    /// Its files.
    pub origin: Origin,
}

/// Folders within folders that are looked into for what an index of shards may name.
const DEPTH: usize = 3;

/// A file itself; of a folder all files in order, those in its own folders among them: shards may have any name.
fn files(path: &Path, depth: usize) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(path) else { return vec![path.to_path_buf()] };
    let mut all: Vec<_> = entries.flatten().collect();
    all.sort_by_key(DirEntry::file_name);
    let of = |entry: DirEntry| match entry.file_type() {
        Ok(kind) if kind.is_dir() && depth == 0 => vec![],
        Ok(kind) if kind.is_dir() => files(&entry.path(), depth - 1),
        _ => vec![entry.path()],
    };
    all.into_iter().flat_map(of).collect()
}

impl WeightSource for OfFiles {
    fn tensor(&self, name: &str) -> Option<Source<'_>> {
        self.inner.tensor(name)
    }

    fn done(&self, name: &str) {
        self.inner.done(name);
    }

    fn loaded(&self) {
        self.inner.loaded();
    }

    fn origin(&self) -> Option<&Origin> {
        Some(&self.origin)
    }
}

impl WeightSource for Checkpoint {
    fn tensor(&self, name: &str) -> Option<Source<'_>> {
        let v = self.get(name)?;
        Some(Source { dtype: v.dtype(), shape: v.shape().to_vec(), bytes: Cow::Borrowed(v.bytes()) })
    }

    fn done(&self, name: &str) {
        // Advice only: pages that stay mapped cost memory, not correctness.
        let _ = self.release(name);
    }
}

impl WeightSource for HashMap<String, crate::Value> {
    fn tensor(&self, name: &str) -> Option<Source<'_>> {
        let v = self.get(name)?;
        Some(Source { dtype: v.dtype, shape: v.shape.clone(), bytes: Cow::Borrowed(&v.bytes) })
    }
}

/// Weights drawn from a normal distribution: the same for the same seed, name and shape.
pub struct Random {
    /// Shape, mean and standard deviation of each tensor by name.
    pub tensors: HashMap<String, (Vec<usize>, f32, f32)>,
    /// Seed of the draws.
    pub seed: u64,
}

impl WeightSource for Random {
    fn tensor(&self, name: &str) -> Option<Source<'_>> {
        let (shape, mean, std) = self.tensors.get(name)?;
        let n: usize = shape.iter().product();
        let mut state = name
            .bytes()
            .fold(self.seed ^ 0x9e37_79b9_7f4a_7c15, |h, b| (h ^ b as u64).wrapping_mul(0x0100_0000_01b3));
        let mut next = || {
            // SplitMix64; four 16-bit draws summed approximate a normal well enough for fresh weights.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        };
        let mut bytes = Vec::with_capacity(n * 4);
        for _ in 0..n {
            let z = next();
            let sum: f32 = (0..4).map(|i| ((z >> (16 * i)) & 0xffff) as f32 / 65536.0 - 0.5).sum();
            // The sum of four uniforms on (-½, ½) has variance 1/3.
            bytes.extend((mean + std * sum * 1.732_050_8).to_le_bytes());
        }
        Some(Source { dtype: DType::F32, shape: shape.clone(), bytes: Cow::Owned(bytes) })
    }
}
