//! Device memory. In: sizes and bytes of the host. Out: addresses in windows that the host cannot mistake for its own, the bytes
//! behind them, and for each byte whether it was ever written. Every allocation is a mapping of its own, so that freed memory
//! is gone at once, and addresses are not used twice while there are others.

use crate::fault::Kind;
use std::collections::BTreeMap;
use std::ptr::NonNull;

/// Generic addresses of shared memory, of a thread's local memory, of parameters.
pub(crate) const SHARED: u64 = 1 << 40;
pub(crate) const LOCAL: u64 = 2 << 40;
pub(crate) const PARAM: u64 = 3 << 40;
/// Global memory of the first device; each has as much room.
const GLOBAL: u64 = 16 << 40;
const ROOM: u64 = 1 << 40;
/// Bytes between allocations, and their alignment.
const GAP: u64 = 512;
/// What a copy to the host shows of memory that was never written.
const POISON: u8 = 0xA5;

/// Zeroed pages, committed when they are touched.
#[derive(Debug)]
struct Pages {
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: the pages are owned; who reads and writes them when is decided by the launch that borrows the memory.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    fn new(len: usize) -> Option<Pages> {
        let len = len.max(1).checked_next_multiple_of(4096)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new anonymous mapping.
        let at = unsafe {
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        (at != libc::MAP_FAILED).then(|| NonNull::new(at.cast()).map(|at| Pages { at, len }))?
    }

    fn zero(&self) {
        // SAFETY: our own mapping; its pages read as zero afterwards.
        unsafe { libc::madvise(self.at.as_ptr().cast(), self.len, libc::MADV_DONTNEED) };
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, unmapped once.
        unsafe { libc::munmap(self.at.as_ptr().cast(), self.len) };
    }
}

/// Shadow of a granule of global memory: its last write and its reads, see [`crate::shadow`].
pub(crate) const CELL: usize = 16;

#[derive(Debug)]
struct Allocation {
    len: u64,
    data: Pages,
    written: Pages,
    shadow: Pages,
    /// False before the stream reaches the allocation.
    live: bool,
}

/// A living allocation as a launch sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub base: u64,
    pub len: u64,
    pub data: *mut u8,
    pub written: *mut u8,
    pub shadow: *mut u64,
}

/// Memory of one device.
#[derive(Debug)]
pub struct Memory {
    base: u64,
    next: u64,
    limit: u64,
    used: u64,
    all: BTreeMap<u64, Allocation>,
    /// Time of the shadow; the next launch begins after it.
    pub(crate) clock: u32,
}

/// What was wrong with an access of the host.
pub type Refused = (Kind, String);

impl Memory {
    /// Memory of this many bytes of the device of this number.
    pub fn new(device: u32, limit: u64) -> Memory {
        let base = GLOBAL + ROOM * u64::from(device);
        Memory { base, next: base + GAP, limit, used: 0, all: BTreeMap::new(), clock: 0 }
    }

    /// Bytes that are free, and all.
    pub fn info(&self) -> (u64, u64) {
        (self.limit - self.used, self.limit)
    }

    /// True where the address is of this device's room.
    pub fn owns(&self, at: u64) -> bool {
        (self.base..self.base + ROOM).contains(&at)
    }

    /// New memory, never written; none where there is not enough.
    pub fn alloc(&mut self, len: u64) -> Option<u64> {
        let at = self.reserve(len)?;
        self.open(at);
        Some(at)
    }

    /// Memory that is there once [`Memory::open`] was called.
    pub fn reserve(&mut self, len: u64) -> Option<u64> {
        let len = len.max(1);
        if len > self.limit - self.used {
            return None;
        }
        let at = self.place(len)?;
        let pages = |n: u64| Pages::new(usize::try_from(n).ok()?);
        let (data, written) = (pages(len)?, pages(len)?);
        let shadow = pages(len.checked_mul(CELL as u64)?)?;
        self.used += len;
        self.all.insert(at, Allocation { len, data, written, shadow, live: false });
        Some(at)
    }

    /// An address with room behind it: after all others, or in the first gap once the window is used up.
    fn place(&mut self, len: u64) -> Option<u64> {
        let need = len.next_multiple_of(GAP) + GAP;
        if self.next + need < self.base + ROOM {
            let at = self.next;
            self.next += need;
            return Some(at);
        }
        let mut at = self.base + GAP;
        for (b, a) in &self.all {
            if at + need <= *b {
                return Some(at);
            }
            at = b + a.len.next_multiple_of(GAP) + GAP;
        }
        (at + need < self.base + ROOM).then_some(at)
    }

    /// Makes a reserved allocation live.
    pub fn open(&mut self, at: u64) -> bool {
        self.all.get_mut(&at).map(|a| a.live = true).is_some()
    }

    /// Frees an allocation by its address.
    pub fn free(&mut self, at: u64) -> bool {
        let gone = self.all.remove(&at);
        self.used -= gone.as_ref().map_or(0, |a| a.len);
        gone.is_some()
    }

    /// Frees all.
    pub fn clear(&mut self) {
        self.all.clear();
        self.used = 0;
    }

    /// Number of allocations.
    pub fn allocations(&self) -> usize {
        self.all.len()
    }

    /// Start and length of the allocation around an address.
    pub fn around(&self, at: u64) -> Option<(u64, u64)> {
        let (base, a) = self.all.range(..=at).next_back()?;
        (at < base + a.len).then_some((*base, a.len))
    }

    fn find(&self, at: u64, len: u64) -> Result<Span, Refused> {
        let found = self.all.range(..=at).next_back();
        match found {
            Some((base, a)) if at - base <= a.len && len <= a.len - (at - base) && a.live => {
                Ok(a.span(*base))
            }
            _ => Err((Kind::OutOfBounds, format!("{len} bytes at {at:#x} are in no allocation"))),
        }
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// The range is in no allocation.
    pub fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), Refused> {
        let s = self.find(at, bytes.len() as u64)?;
        let o = (at - s.base) as usize;
        // SAFETY: the range is inside the allocation, which `self` owns.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), s.data.add(o), bytes.len());
            std::ptr::write_bytes(s.written.add(o), 1, bytes.len());
        }
        Ok(())
    }

    /// Copies bytes out; those that were never written are a pattern.
    ///
    /// # Errors
    /// The range is in no allocation.
    pub fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), Refused> {
        let s = self.find(at, bytes.len() as u64)?;
        let o = (at - s.base) as usize;
        // SAFETY: the range is inside the allocation, which `self` owns.
        unsafe {
            std::ptr::copy_nonoverlapping(s.data.add(o), bytes.as_mut_ptr(), bytes.len());
            let written = std::slice::from_raw_parts(s.written.add(o), bytes.len());
            bytes.iter_mut().zip(written).filter(|(_, w)| **w == 0).for_each(|(b, _)| *b = POISON);
        }
        Ok(())
    }

    /// Fills with a repeated pattern.
    ///
    /// # Errors
    /// The range is in no allocation.
    pub fn fill(&mut self, at: u64, pattern: &[u8], count: usize) -> Result<(), Refused> {
        let n = pattern.len() * count;
        let s = self.find(at, n as u64)?;
        let o = (at - s.base) as usize;
        // SAFETY: the range is inside the allocation, which `self` owns exclusively here.
        let (data, written) = unsafe {
            (
                std::slice::from_raw_parts_mut(s.data.add(o), n),
                std::slice::from_raw_parts_mut(s.written.add(o), n),
            )
        };
        data.chunks_exact_mut(pattern.len()).for_each(|c| c.copy_from_slice(pattern));
        written.fill(1);
        Ok(())
    }

    /// Copies on the device, with what is known of the bytes.
    ///
    /// # Errors
    /// A range is in no allocation.
    pub fn copy(&mut self, to: u64, from: u64, len: usize) -> Result<(), Refused> {
        let (d, s) = (self.find(to, len as u64)?, self.find(from, len as u64)?);
        copy(&d, to, &s, from, len);
        Ok(())
    }

    /// Copies from another device.
    ///
    /// # Errors
    /// A range is in no allocation.
    pub fn copy_from(&mut self, to: u64, other: &Memory, from: u64, len: usize) -> Result<(), Refused> {
        let (d, s) = (self.find(to, len as u64)?, other.find(from, len as u64)?);
        copy(&d, to, &s, from, len);
        Ok(())
    }

    /// The living allocations by address.
    pub(crate) fn spans(&self) -> Vec<Span> {
        self.all.iter().filter(|(_, a)| a.live).map(|(b, a)| a.span(*b)).collect()
    }

    /// Begins the time of the shadow again.
    pub(crate) fn forget(&mut self) {
        self.all.values().for_each(|a| a.shadow.zero());
        self.clock = 0;
    }
}

impl Allocation {
    fn span(&self, base: u64) -> Span {
        Span {
            base,
            len: self.len,
            data: self.data.at.as_ptr(),
            written: self.written.at.as_ptr(),
            shadow: self.shadow.at.as_ptr().cast(),
        }
    }
}

fn copy(d: &Span, to: u64, s: &Span, from: u64, len: usize) {
    let (a, b) = ((to - d.base) as usize, (from - s.base) as usize);
    // SAFETY: both ranges were found inside living allocations; they may overlap.
    unsafe {
        std::ptr::copy(s.data.add(b), d.data.add(a), len);
        std::ptr::copy(s.written.add(b), d.written.add(a), len);
    }
}
