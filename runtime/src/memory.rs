//! Memory of sessions: pages straight from the system, zeroed, aligned, huge where the system has them; and how much the
//! machine has.

use crate::Error;
use std::ptr::NonNull;

/// A block of zeroed memory, 64-byte aligned at least.
pub struct Memory {
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: a plain block of memory with one owner; sharing is governed by borrows of `Memory`.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// `len` zero bytes.
    pub fn zeroed(len: usize) -> Result<Memory, Error> {
        let len = len.max(64);
        // SAFETY: an anonymous private mapping of a length that is not zero; the result is checked.
        let at = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        let refused = || Error::Memory {
            what: "a buffer".into(),
            need: len as u64,
            have: available_memory(),
            remedy: "use a smaller model, batch or sequence".into(),
        };
        if at == libc::MAP_FAILED {
            return Err(refused());
        }
        if len >= 4 << 20 {
            // SAFETY: the range was just mapped. Advice only: fewer page walks on large buffers.
            unsafe { libc::madvise(at, len, libc::MADV_HUGEPAGE) };
        }
        Ok(Memory { at: NonNull::new(at.cast()).ok_or_else(refused)?, len })
    }

    /// Address of the first byte.
    pub fn address(&self) -> *mut u8 {
        self.at.as_ptr()
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: a block has 64 bytes at least.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is `len` bytes long and initialised by the system; writers hold `&mut` or run in a session.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }

    /// The bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is `len` bytes long, initialised by the system, and borrowed mutably here.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped in `zeroed` with this length, unmapped once.
        unsafe { libc::munmap(self.at.as_ptr().cast(), self.len) };
    }
}

/// Bytes that can be allocated without swapping; what the system says, or all that can be addressed where it is silent.
pub fn available_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.map_or(u64::MAX, |k| k * 1024)
}
