//! Devices. In: kernels as source, bytes, launches. Out: memory that kernels see, and runs of them. Sessions, serving and training
//! hold an `Arc<dyn Device>` and know no thread pool, no compiler and no address of the host's; each folder beside this file is one
//! kind of device.

mod cache;
pub mod cpu;
pub mod cuda;
mod memory;
pub mod null;
pub mod reference;

pub use cache::KernelCache;
pub(crate) use cache::key;
pub(crate) use memory::{ALIGN, side_by_side};
pub use memory::{InProcess, available_memory, forget_peak, give_back, process_memory};

use crate::Error;
use astrai_ir::{Backend, Kernel, Region, Sizes, Symbol};
use std::any::Any;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

/// Bytes that go at once to a device whose memory this process does not see.
pub(crate) const PIECE: usize = 4 << 20;

/// The cause's own words where an error has one: a library's loader names only its call in the error itself.
pub(crate) fn cause(e: &dyn std::error::Error) -> String {
    e.source().map_or(e.to_string(), ToString::to_string)
}

/// Where bytes lie in a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Pointer(pub u64);

impl Pointer {
    /// So many bytes behind.
    pub fn offset(self, bytes: u64) -> Pointer {
        Pointer(self.0 + bytes)
    }
}

/// Memory of a device, zeroed when it was taken, given back with its last clone.
#[derive(Clone)]
pub struct Block {
    at: Pointer,
    len: usize,
    _owner: Arc<dyn Any + Send + Sync>,
}

impl Block {
    /// Memory that the owner keeps.
    pub fn new(at: Pointer, len: usize, owner: Arc<dyn Any + Send + Sync>) -> Block {
        Block { at, len, _owner: owner }
    }

    /// Its first byte.
    pub fn at(&self) -> Pointer {
        self.at
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many hold it.
    pub fn holders(&self) -> usize {
        Arc::strong_count(&self._owner)
    }
}

/// One launch of a kernel.
pub struct Launch<'a> {
    /// Buffers read, then written.
    pub buffers: &'a [Pointer],
    /// Names of the sizes, in the order of `sizes`.
    pub symbols: &'a [Symbol],
    /// Values of the symbols.
    pub sizes: &'a [i64],
    /// Memory that the kernel may use between its phases.
    pub workspace: &'a Block,
    /// Where its region comes from, for errors that a device meets later.
    pub origin: &'a Arc<str>,
}

impl Launch<'_> {
    /// Value of a symbol.
    pub fn size(&self, name: &str) -> Option<u64> {
        size_of_symbol(self.symbols, self.sizes, name)
    }
}

/// Value of a symbol among these.
fn size_of_symbol(symbols: &[Symbol], sizes: &[i64], name: &str) -> Option<u64> {
    let at = symbols.iter().position(|s| &*s.name == name)?;
    sizes.get(at).and_then(|n| u64::try_from(*n).ok())
}

/// A kernel that a device has built and loaded.
pub trait Executable: Send + Sync {
    /// Runs it; results are there when [`Device::synchronise`] has returned.
    ///
    /// # Errors
    /// The launch does not fit the kernel, or the device failed.
    fn launch(&self, launch: &Launch) -> Result<(), Error>;
}

/// Threads of this process that idle while a device computes nothing.
pub trait Threads: Send + Sync {
    /// How many, the caller's included.
    fn threads(&self) -> usize {
        1
    }

    /// Calls `body(thread, units)` on them until each of so many units was covered once.
    fn share(&self, units: usize, body: &(dyn Fn(usize, Range<usize>) + Sync)) {
        if units > 0 {
            body(0, 0..units);
        }
    }
}

/// A device's memory.
pub trait Space: Send + Sync {
    /// Bytes of memory that can be taken.
    fn available(&self) -> u64;

    /// Blocks of so many zero bytes each, at multiples of the backend's alignment.
    ///
    /// # Errors
    /// [`Error::Memory`].
    fn alloc(&self, lens: &[usize]) -> Result<Vec<Block>, Error>;

    /// Such blocks over the first bytes of a file, in which they lie one behind the other at multiples of the alignment, and which nobody may write; `None` where
    /// kernels cannot read a file in place, or would do so slower than other memory.
    fn map(&self, _file: &File, _lens: &[usize]) -> Option<Vec<Block>> {
        None
    }

    /// Takes this memory from the system now, where it is otherwise taken when first written: a page fault then costs a step milliseconds.
    fn populate(&self, _at: Pointer, _len: usize) {}

    /// The address at which this process sees the bytes; `None` where it does not.
    fn host(&self, at: Pointer) -> Option<*mut u8>;

    /// A pointer to bytes of this process, where kernels can read them in place.
    fn import(&self, bytes: &[u8]) -> Option<Pointer>;

    /// Copies bytes out; waits for launches that write them.
    ///
    /// # Errors
    /// The device failed.
    fn read(&self, at: Pointer, to: &mut [u8]) -> Result<(), Error>;

    /// Copies bytes in.
    ///
    /// # Errors
    /// The device failed.
    fn write(&self, at: Pointer, from: &[u8]) -> Result<(), Error>;

    /// Copies bytes to another place of this memory, after the launches before and before those after; the places do not overlap.
    ///
    /// # Errors
    /// The device failed.
    fn copy(&self, from: Pointer, to: Pointer, len: usize) -> Result<(), Error> {
        let mut bytes = vec![0; len];
        self.read(from, &mut bytes)?;
        self.write(to, &bytes)
    }

    /// Lets `f` make `len` bytes of memory that nobody else uses: in place where this process sees it, otherwise beside it, from
    /// where they are copied, at the latest before the next launch. What `f` is shown holds anything.
    ///
    /// # Errors
    /// The device failed.
    fn fill(&self, at: Pointer, len: usize, f: &mut dyn FnMut(&mut [u8])) -> Result<(), Error> {
        if let Some(address) = self.host(at) {
            // SAFETY: whoever has a pointer knows how many bytes lie there; the caller's is the only use of them.
            f(unsafe { std::slice::from_raw_parts_mut(address, len) });
            return Ok(());
        }
        let mut bytes = vec![0; len];
        f(&mut bytes);
        self.write(at, &bytes)
    }
}

/// What a device that keeps memory for later has given out, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// In use now.
    pub used: u64,
    /// In use at most.
    pub most: u64,
    /// Given back by their users and kept for the next.
    pub kept: u64,
    /// How often the system was asked for memory.
    pub taken: u64,
    /// How often what was kept was given out again.
    pub reused: u64,
}

/// Launches that a device has recorded.
pub trait Recording: Send + Sync {
    /// Runs them again, on the same buffers with these sizes, which are those that were recorded but where [`Device::resizes`].
    ///
    /// # Errors
    /// As [`Executable::launch`].
    fn replay(&self, sizes: &[i64]) -> Result<(), Error>;

    /// Seconds of each launch of the last replay, for which [`Device::synchronise`] has waited; none where they were not recorded to be timed.
    ///
    /// # Errors
    /// The device failed.
    fn seconds(&self) -> Result<Vec<f64>, Error>;
}

/// A device.
pub trait Device: Space + Threads {
    /// What the compiler is told of it.
    fn backend(&self) -> &dyn Backend;

    /// Name in results.
    fn name(&self) -> &'static str;

    /// Everything on which the last bits of its results depend, as one line: compiler, instructions.
    fn identity(&self) -> String {
        self.name().into()
    }

    /// The folder of what it keeps for later processes, where it can keep weights.
    fn cache(&self) -> Option<&KernelCache> {
        None
    }

    /// Builds and loads kernels; those that it has already are shared.
    ///
    /// # Errors
    /// What the compiler says.
    fn load(&self, kernels: &[&Kernel]) -> Result<Vec<Arc<dyn Executable>>, Error>;

    /// Waits for all launches.
    ///
    /// # Errors
    /// What a launch met.
    fn synchronise(&self) -> Result<(), Error> {
        Ok(())
    }

    /// True where running recorded launches costs less than launching them one by one.
    fn records(&self) -> bool {
        false
    }

    /// True where what was recorded can be run with other sizes.
    fn resizes(&self) -> bool {
        false
    }

    /// Records what `launches` launches from this thread, and runs nothing of it; `None` where the device records nothing (so), and
    /// `launches` was not called. `timed`: each replay keeps the time of each launch, for which the next waits.
    ///
    /// # Errors
    /// That of `launches`, or the device failed.
    fn record(
        &self,
        _launches: &mut dyn FnMut() -> Result<(), Error>,
        _timed: bool,
    ) -> Result<Option<Box<dyn Recording>>, Error> {
        Ok(None)
    }

    /// What was given out of its memory, where it keeps count.
    fn memory_use(&self) -> Option<MemoryUse> {
        None
    }
}

/// Shows `len` bytes of a device's memory, in place or as a copy that is written back.
///
/// # Safety
/// Nobody else may touch the bytes meanwhile.
pub(crate) unsafe fn with_bytes<R>(
    device: &dyn Device,
    at: Pointer,
    len: usize,
    write_back: bool,
    f: impl FnOnce(&mut [u8]) -> R,
) -> Result<R, Error> {
    if let Some(address) = device.host(at) {
        // SAFETY: the caller's: the bytes are there and nobody else's.
        return Ok(f(unsafe { std::slice::from_raw_parts_mut(address, len) }));
    }
    let mut copy = vec![0; len];
    device.read(at, &mut copy)?;
    let r = f(&mut copy);
    if write_back {
        device.write(at, &copy)?;
    }
    Ok(r)
}

/// Computes a region without a kernel by the reference interpreter.
pub(crate) fn interpret(
    device: &dyn Device,
    region: &Region,
    buffers: &[Pointer],
    sizes: &Sizes,
) -> Result<(), Error> {
    reference::run_region(device, region, buffers, sizes)
}
