//! Weights kept on disk as kernels read them. In: the weights that a session lacks, what their source is made of, the folder of compiled
//! kernels. Out: their blocks, mapped from the file, so that nothing is packed and processes share the pages; or, where the system would
//! map it in small pages, read from it by all threads.
//!
//! A file holds the blocks one behind the other and ends with a mark and a sum over the state of the source and this build's
//! sources: one of another state is as good as absent. Nobody but its user can have written it, so that the blocks themselves, too many for
//! a sum at every start, are taken as they are.

use crate::Error;
use crate::device::{ALIGN, Block, Device, KernelCache, PIECE, key, side_by_side};
use crate::report::weight_bytes;
use crate::source::Origin;
use astrai_ir::json;
use astrai_ir::plan::PlannedWeight;
use astrai_passes::Derived;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

/// Before the sum at a file's end.
const MARK: &[u8; 8] = b"weights1";

/// Bytes of mark and sum.
const END: usize = MARK.len() + 32;

/// A file of weights that is there, or could be.
pub(super) struct Kept<'a> {
    cache: &'a KernelCache,
    device: &'a dyn Device,
    /// The beginning of its name, which all files of this source have, and its name.
    names: [String; 2],
    end: Vec<u8>,
    /// Bytes of each block.
    lens: Vec<usize>,
}

impl<'a> Kept<'a> {
    /// The file of these weights, some of which are computed from others; `None` where the device keeps none.
    pub fn of(
        weights: &[&PlannedWeight],
        derived: &[Derived],
        origin: &Origin,
        device: &'a dyn Device,
    ) -> Option<Kept<'a>> {
        let each = weights.iter().map(|w| match derived.iter().find(|d| d.weight.name == w.weight.name) {
            Some(d) => format!("{w:?} = {}", json::write_json(&d.graph)),
            None => format!("{w:?}"),
        });
        let source = key(&[&origin.name]);
        let name = format!("{source}-{}.weights", key(&[&each.collect::<Vec<_>>().join("\n")]));
        let sum =
            Sha256::new().chain_update(&origin.state).chain_update([0]).chain_update(env!("ASTRAI_SOURCES"));
        let end = [&MARK[..], &sum.finalize()].concat();
        let lens = weights.iter().map(|w| weight_bytes(w) as usize).collect();
        let cache = device.cache().filter(|cache| !cache.is_temporary())?;
        Some(Kept { cache, device, names: [source, name], end, lens })
    }

    /// The blocks, if the file is there and of this state.
    pub fn blocks(&self) -> Option<Vec<Block>> {
        let (places, whole) = side_by_side(&self.lens);
        let (file, len) = self.cache.file(&self.names[1])?;
        if !self.is_of_state(&file, len) || len != (whole + END) as u64 {
            return None;
        }
        self.device.map(&file, &self.lens).or_else(|| self.read(&file, &places))
    }

    fn is_of_state(&self, file: &File, len: u64) -> bool {
        let mut end = [0; END];
        let read = len.checked_sub(END as u64).map(|at| file.read_exact_at(&mut end, at));
        matches!(read, Some(Ok(()))) && end == *self.end
    }

    /// The blocks in memory of their own.
    fn read(&self, file: &File, places: &[usize]) -> Option<Vec<Block>> {
        let blocks = self.device.alloc(&self.lens).ok()?;
        let mut pieces = vec![];
        for ((block, len), place) in blocks.iter().zip(&self.lens).zip(places) {
            let first = self.device.host(block.at())?.expose_provenance();
            pieces.extend((0..*len).step_by(PIECE).map(|at| (first + at, place + at, PIECE.min(len - at))));
        }
        let failed = AtomicBool::new(false);
        self.device.share(pieces.len(), &|_, range| {
            for (to, from, len) in &pieces[range] {
                let to = std::ptr::with_exposed_provenance_mut(*to);
                // SAFETY: the piece lies in a block that was just made, and no other piece does there.
                let bytes = unsafe { std::slice::from_raw_parts_mut(to, *len) };
                if file.read_exact_at(bytes, *from as u64).is_err() {
                    failed.store(true, Ordering::Relaxed);
                }
            }
        });
        (!failed.into_inner()).then_some(blocks)
    }

    /// Writes the file, and removes those of the same source in another state, which nobody would read again.
    pub fn write(&self, blocks: &[Block]) -> Result<(), Error> {
        let written = self.cache.write_by(&self.names[1], |mut file| {
            // Whole pieces at their multiples: the system then keeps the file in huge pages.
            let mut piece = Vec::with_capacity(PIECE);
            let (places, whole) = side_by_side(&self.lens);
            let ends = places.iter().skip(1).chain([&whole]);
            for (((block, len), place), end) in blocks.iter().zip(&self.lens).zip(&places).zip(ends) {
                let address = self.device.host(block.at()).ok_or(ErrorKind::Unsupported)?;
                // SAFETY: the block is that long, and nobody writes weights once they are loaded.
                let bytes = unsafe { std::slice::from_raw_parts(address.cast_const(), *len) };
                for mut rest in [bytes, &[0; ALIGN][..end - place - len]] {
                    while !rest.is_empty() {
                        let (now, later) = rest.split_at(rest.len().min(PIECE - piece.len()));
                        piece.extend_from_slice(now);
                        rest = later;
                        if piece.len() == PIECE {
                            file.write_all(&piece)?;
                            piece.clear();
                        }
                    }
                }
            }
            piece.extend_from_slice(&self.end);
            file.write_all(&piece)?;
            file.sync_data()
        });
        let failed = |source: io::Error| Error::Io { path: self.cache.path().join(&self.names[1]), source };
        written.map_err(failed)?;
        for name in self.cache.names(&self.names[0]) {
            if self.cache.file(&name).is_some_and(|(file, len)| !self.is_of_state(&file, len)) {
                self.cache.remove(&name);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Space;
    use crate::device::reference::Reference;

    /// Blocks as a file gives them, mapped and read, are those written; of another state, or cut short, it gives none.
    #[test]
    fn blocks_come_back_as_they_were_written() {
        let (cache, device) = (KernelCache::temporary().unwrap(), Reference::default());
        let lens = vec![3, 2 * PIECE + 5, 64, 200];
        let kept = |state: u8, name: &str| Kept {
            cache: &cache,
            device: &device,
            names: ["model".into(), format!("model-{name}.weights")],
            end: vec![state; END],
            lens: lens.clone(),
        };
        let bytes = |blocks: &[Block]| -> Vec<Vec<u8>> {
            let each = blocks.iter().zip(&lens).map(|(block, len)| {
                let mut bytes = vec![0; *len];
                device.read(block.at(), &mut bytes).unwrap();
                bytes
            });
            each.collect()
        };
        let blocks = device.alloc(&lens).unwrap();
        for (i, block) in blocks.iter().enumerate() {
            let numbers: Vec<u8> = (0..block.len()).map(|at| (at / 7 + i) as u8).collect();
            device.write(block.at(), &numbers).unwrap();
        }
        let (one, other) = (kept(1, "a"), kept(2, "a"));
        assert!(one.blocks().is_none());
        one.write(&blocks).unwrap();
        kept(1, "b").write(&blocks).unwrap();
        assert_eq!(bytes(&one.blocks().unwrap()), bytes(&blocks));
        let (file, len) = cache.file(&one.names[1]).unwrap();
        let (places, whole) = side_by_side(&lens);
        assert_eq!(len, (whole + END) as u64);
        assert_eq!(bytes(&one.read(&file, &places).unwrap()), bytes(&blocks));
        if let Some(mapped) = device.map(&file, &lens) {
            assert_eq!(bytes(&mapped), bytes(&blocks));
        }
        assert!(other.blocks().is_none() && Kept { lens: vec![3], ..kept(1, "a") }.blocks().is_none());
        // The first file of the new state takes the old ones' place.
        other.write(&blocks).unwrap();
        assert_eq!(cache.names("model"), ["model-a.weights"]);
        assert!(one.blocks().is_none() && other.blocks().is_some());
        cache.write_by(&other.names[1], |file| file.set_len(whole as u64)).unwrap();
        assert!(other.blocks().is_none() && other.read(&file, &places).is_some());
        cache.write_by(&other.names[1], |file| file.set_len(100)).unwrap();
        let (file, _) = cache.file(&other.names[1]).unwrap();
        assert!(other.blocks().is_none() && other.read(&file, &places).is_none());
    }
}
