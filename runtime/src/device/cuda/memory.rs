//! A device's memory. In: lengths, bytes. Out: blocks that are zero, copies. What blocks gave back is kept and given out again, since the
//! driver takes long for both and waits for the device; it goes back to the driver where memory is short. Large copies go through
//! pinned pages of this process, a piece in flight while the next is made.

use super::driver::{Driver, lock, words};
use crate::Error;
use crate::device::{Block, MemoryUse, PIECE, Pointer};
use cudarc::driver::sys::{CUdeviceptr, CUresult};
use cudarc::driver::{CudaEvent, CudaSlice, DevicePtr, DriverError, PinnedHostSlice, result};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Bytes that every block's address is a multiple of.
pub(super) const ALIGN: usize = 256;

/// Blocks are rounded up to this where they are large, so that what is kept fits again.
const LARGE: usize = 2 << 20;

/// Pieces of pinned memory.
const PIECES: usize = 3;

/// Copies from this length on go through pinned memory.
const STAGED: usize = 256 << 10;

/// Memory that is kept, and what was given out.
#[derive(Default)]
struct Kept {
    /// By length.
    free: BTreeMap<usize, Vec<CudaSlice<u8>>>,
    figures: MemoryUse,
}

/// The memory of a device.
pub(super) struct Memory {
    driver: Arc<Driver>,
    kept: Mutex<Kept>,
    staging: Mutex<Staging>,
}

/// Memory given out: goes back to what is kept with the last block in it.
struct Slab {
    memory: Option<CudaSlice<u8>>,
    of: Arc<Memory>,
}

impl Drop for Slab {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            let (mut kept, len) = (lock(&self.of.kept), memory.len());
            kept.figures.used -= len as u64;
            kept.figures.kept += len as u64;
            kept.free.entry(len).or_default().push(memory);
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // What is kept is given back by whichever thread comes last; a device that failed has nothing to give back to.
        let _bound = self.driver.context.bind_to_thread();
    }
}

impl Memory {
    pub(super) fn new(driver: Arc<Driver>) -> Memory {
        Memory { driver, kept: Mutex::default(), staging: Mutex::default() }
    }

    pub(super) fn figures(&self) -> MemoryUse {
        lock(&self.kept).figures
    }

    /// Bytes that can be taken: what is free, and what is kept.
    pub(super) fn available(&self) -> u64 {
        let free = self.driver.context.mem_get_info().map_or(0, |(free, _)| free as u64);
        free.saturating_add(self.figures().kept)
    }

    /// Blocks of zeros, side by side.
    pub(super) fn alloc(self: &Arc<Self>, lens: &[usize]) -> Result<Vec<Block>, Error> {
        self.driver.enter()?;
        let room = |len: usize| len.max(1).checked_next_multiple_of(ALIGN).unwrap_or(usize::MAX);
        let whole = lens.iter().fold(0usize, |sum, len| sum.saturating_add(room(*len)));
        if lens.is_empty() {
            return Ok(vec![]);
        }
        let memory = self.take(whole)?;
        let first = address(&memory, &self.driver);
        let slab = Arc::new(Slab { memory: Some(memory), of: self.clone() });
        // SAFETY: the slab is at least that long, and whoever had it before is done with it in the order of the stream.
        let zeroed = unsafe { result::memset_d8_async(first, 0, whole, self.driver.compute.cu_stream()) };
        self.driver.check("clearing memory", zeroed)?;
        let mut at = first;
        let block = |&len: &usize| {
            let block = Block::new(Pointer(at), len, Arc::new(slab.clone()));
            at += room(len) as u64;
            block
        };
        Ok(lens.iter().map(block).collect())
    }

    /// Memory of this length or a little more: of what is kept, or the driver's.
    fn take(&self, len: usize) -> Result<CudaSlice<u8>, Error> {
        let len = if len < LARGE { len } else { len.checked_next_multiple_of(LARGE).unwrap_or(usize::MAX) };
        let mut kept = lock(&self.kept);
        // An eighth more than was asked for is no waste that shows.
        let fits = kept.free.range(len..=len.saturating_add(len / 8)).next().map(|(have, _)| *have);
        let found = fits.and_then(|have| {
            let list = kept.free.get_mut(&have)?;
            let memory = list.pop();
            if list.is_empty() {
                kept.free.remove(&have);
            }
            memory
        });
        let memory = match found {
            Some(memory) => {
                kept.figures.kept -= memory.len() as u64;
                kept.figures.reused += 1;
                memory
            }
            None => {
                let memory = self.fresh(&mut kept, len)?;
                kept.figures.taken += 1;
                memory
            }
        };
        kept.figures.used += memory.len() as u64;
        kept.figures.most = kept.figures.most.max(kept.figures.used);
        Ok(memory)
    }

    /// Memory of the driver's; what is kept goes back to it first where there is too little.
    fn fresh(&self, kept: &mut Kept, len: usize) -> Result<CudaSlice<u8>, Error> {
        let full = |e: &DriverError| e.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        // A length that no machine has is not asked for: the driver's interface counts in signed numbers.
        let ask = || match len <= isize::MAX as usize {
            // SAFETY: plain bytes, which are cleared before anybody sees them.
            true => unsafe { self.driver.compute.alloc::<u8>(len) },
            false => Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)),
        };
        let mut answer = ask();
        if answer.as_ref().is_err_and(full) && !kept.free.is_empty() {
            kept.free.clear();
            kept.figures.kept = 0;
            // What was given back is free once the device has reached it.
            self.driver.check("waiting for memory", self.driver.compute.synchronize())?;
            answer = ask();
        }
        match answer {
            Err(e) if full(&e) => Err(Error::Memory {
                what: format!("{}: a block of memory", self.driver.name()),
                need: len as u64,
                have: self.driver.context.mem_get_info().map_or(0, |(free, _)| free as u64),
                remedy: "lower --batch, --seq, --max-seqs or --kv-memory, or use --dtype bf16".into(),
            }),
            answer => self.driver.check("taking memory", answer),
        }
    }

    /// Copies bytes in, after the kernels before and before those after.
    pub(super) fn write(&self, at: Pointer, from: &[u8]) -> Result<(), Error> {
        if from.len() >= STAGED {
            let mut rest = from;
            while !rest.is_empty() {
                let (piece, after) = rest.split_at(rest.len().min(PIECE));
                let to = at.offset((from.len() - rest.len()) as u64);
                self.fill(to, piece.len(), &mut |bytes| bytes.copy_from_slice(piece))?;
                rest = after;
            }
            return Ok(());
        }
        self.driver.enter()?;
        // SAFETY: whoever has a pointer knows how many bytes lie there. Bytes that are not pinned have been read when this returns.
        let copied = unsafe { result::memcpy_htod_async(at.0, from, self.driver.compute.cu_stream()) };
        self.driver.check("copying to it", copied)
    }

    /// Copies bytes within it, after the kernels before and before those after.
    pub(super) fn copy(&self, from: Pointer, to: Pointer, len: usize) -> Result<(), Error> {
        self.driver.enter()?;
        // SAFETY: whoever has pointers knows how many bytes lie there, and that the places do not overlap.
        let copied = unsafe { result::memcpy_dtod_async(to.0, from.0, len, self.driver.compute.cu_stream()) };
        self.driver.check("copying within it", copied)
    }

    /// Lets `f` make bytes in pinned memory, and copies them beside kernels.
    pub(super) fn fill(&self, at: Pointer, len: usize, f: &mut dyn FnMut(&mut [u8])) -> Result<(), Error> {
        if len > PIECE {
            let mut bytes = vec![0; len];
            f(&mut bytes);
            return self.write(at, &bytes);
        }
        self.driver.bind()?;
        let mut staging = lock(&self.staging);
        let piece = staging.next(&self.driver)?;
        let bytes = &mut piece.bytes(&self.driver)?[..len];
        f(bytes);
        // SAFETY: as in `write`; the piece is not touched again before the event that follows has passed.
        self.driver
            .copy(|| unsafe { result::memcpy_htod_async(at.0, bytes, self.driver.copies.cu_stream()) })?;
        let done = self.driver.copies.record_event(None);
        piece.copied = Some(self.driver.check("copying to it", done)?);
        Ok(())
    }

    /// Copies bytes out, after the kernels before.
    pub(super) fn read(&self, at: Pointer, to: &mut [u8]) -> Result<(), Error> {
        self.driver.enter()?;
        if to.len() < STAGED {
            // SAFETY: whoever has a pointer knows how many bytes lie there; `to` outlives the copy, which is waited for.
            let copied = unsafe { result::memcpy_dtoh_async(to, at.0, self.driver.compute.cu_stream()) };
            self.driver.check("copying from it", copied)?;
            return self.driver.wait();
        }
        let mut staging = lock(&self.staging);
        // Each piece is copied out of pinned memory while the next is on its way.
        let mut flying: Option<(&mut [u8], usize)> = None;
        let mut offset = 0;
        let mut chunks = to.chunks_mut(PIECE);
        loop {
            let next = chunks.next();
            let launched = match next {
                Some(chunk) => {
                    let index = staging.take_next(&self.driver)?;
                    let len = chunk.len();
                    let piece = &mut staging.pieces[index];
                    let bytes = &mut piece.bytes(&self.driver)?[..len];
                    let stream = &self.driver.compute;
                    // SAFETY: as above; the piece is read only after its event has passed.
                    let copied =
                        unsafe { result::memcpy_dtoh_async(bytes, at.offset(offset).0, stream.cu_stream()) };
                    self.driver.check("copying from it", copied)?;
                    piece.copied = Some(self.driver.check("copying from it", stream.record_event(None))?);
                    offset += len as u64;
                    Some((chunk, index))
                }
                None => None,
            };
            if let Some((chunk, index)) = flying {
                let len = chunk.len();
                chunk.copy_from_slice(&staging.pieces[index].bytes(&self.driver)?[..len]);
            }
            flying = launched;
            if flying.is_none() {
                return self.driver.wait();
            }
        }
    }
}

/// The driver's address of a slice.
fn address(memory: &CudaSlice<u8>, driver: &Driver) -> CUdeviceptr {
    memory.device_ptr(&driver.compute).0
}

/// Pinned memory, taken when it is first used.
#[derive(Default)]
struct Staging {
    pieces: Vec<Piece>,
    at: usize,
}

/// A piece of pinned memory, and the copy that it is in.
struct Piece {
    memory: PinnedHostSlice<u8>,
    copied: Option<CudaEvent>,
}

impl Staging {
    fn next(&mut self, driver: &Driver) -> Result<&mut Piece, Error> {
        let index = self.take_next(driver)?;
        Ok(&mut self.pieces[index])
    }

    /// Number of the piece that was used longest ago.
    fn take_next(&mut self, driver: &Driver) -> Result<usize, Error> {
        self.at = (self.at + 1) % PIECES;
        if self.pieces.len() <= self.at {
            self.at = self.pieces.len();
            // SAFETY: plain bytes of any value; what is read of them was written before.
            let memory = unsafe { driver.context.alloc_pinned_with_flags::<u8>(PIECE, 0) };
            let memory = memory
                .map_err(|e| driver.error(format!("no {PIECE} bytes of pinned memory: {}", words(e))))?;
            self.pieces.push(Piece { memory, copied: None });
        }
        Ok(self.at)
    }
}

impl Piece {
    /// Its bytes, once no copy is under way.
    fn bytes(&mut self, driver: &Driver) -> Result<&mut [u8], Error> {
        if let Some(event) = self.copied.take() {
            driver.check("copying", event.synchronize())?;
        }
        driver.check("copying", self.memory.as_mut_slice())
    }
}
