//! Memory of this process, for devices whose memory it is: pages straight from the system, zeroed, aligned, huge where the system has them; and how much the
//! machine has.

use super::{Block, Pointer, Space};
use crate::Error;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

/// Bytes of a huge page; blocks of that size at least lie in such pages.
const HUGE: usize = 2 << 20;

/// Bytes of a page, or a multiple of it.
const SMALL: usize = 64 << 10;

/// Bytes that the start of a block is a multiple of: a line of the cache, and the widest vector.
pub(crate) const ALIGN: usize = 64;

/// A block of zeroed memory, 64-byte aligned at least; alone in its mapping, or beside others.
pub struct Memory {
    at: NonNull<u8>,
    len: usize,
    _mapping: Arc<Mapping>,
}

// SAFETY: a plain block of memory with one owner; sharing is governed by borrows of `Memory`.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

/// Pages from the system, given back when the last block in them is gone.
struct Mapping {
    at: *mut libc::c_void,
    len: usize,
}

// SAFETY: an address and a length, which nobody changes.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Room for `len` bytes, more than none, and where they begin: at a huge page, where they fill one.
    fn new(len: usize, protection: libc::c_int) -> Option<(Arc<Mapping>, NonNull<u8>)> {
        // Room to move the start, which costs addresses and no memory.
        let whole = if len < HUGE { len } else { len.checked_next_multiple_of(HUGE)?.checked_add(HUGE)? };
        // SAFETY: an anonymous private mapping of a length that is not zero; the result is checked.
        let at = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            libc::mmap(std::ptr::null_mut(), whole, protection, flags, -1, 0)
        };
        if at == libc::MAP_FAILED {
            return None;
        }
        let mapping = Arc::new(Mapping { at, len: whole });
        let mut first = at.cast::<u8>();
        if len >= HUGE {
            // SAFETY: less than the room added, and the range advised lies in what was mapped. Advice only: fewer page walks,
            // and processors that read ahead do not stop at every 4 KiB.
            unsafe {
                first = first.add(first.addr().next_multiple_of(HUGE) - first.addr());
                libc::madvise(first.cast(), len.next_multiple_of(HUGE), libc::MADV_HUGEPAGE);
            }
        }
        Some((mapping, NonNull::new(first)?))
    }

    /// Room for `len` zero bytes.
    fn zeroed(len: usize) -> Result<(Arc<Mapping>, NonNull<u8>), Error> {
        Mapping::new(len, libc::PROT_READ | libc::PROT_WRITE).ok_or_else(|| Error::Memory {
            what: "a buffer".into(),
            need: len as u64,
            have: available_memory(),
            remedy: "use a smaller model, batch or sequence".into(),
        })
    }

    /// The first `len` bytes of a file, which nobody can write there; `None` where the system has most of them in small pages, or
    /// cannot read them. Whoever shortens the file in place makes reading its lost pages a fault (SIGBUS), as with a checkpoint's.
    fn of(file: &File, len: usize) -> Option<(Arc<Mapping>, NonNull<u8>)> {
        /// Of Linux from 5.14 on; others refuse it.
        const POPULATE_READ: libc::c_int = 22;
        let (mapping, first) = Mapping::new(len, libc::PROT_NONE)?;
        let at = first.as_ptr().cast();
        // SAFETY: the pages replaced are the room just made, which the mapping alone has; the result is checked.
        let mapped = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
            libc::mmap(at, len, libc::PROT_READ, flags, file.as_raw_fd(), 0)
        };
        // SAFETY: advice on what was mapped, and pages read into it.
        let read = mapped == at
            && unsafe {
                libc::madvise(at, len, libc::MADV_HUGEPAGE);
                len < HUGE || libc::madvise(at, len, POPULATE_READ) == 0
            };
        (read && (len < HUGE || in_huge_pages(first.addr().get(), len))).then_some((mapping, first))
    }
}

/// Whether most of the pages of a file that are mapped from this address on are huge.
fn in_huge_pages(first: usize, len: usize) -> bool {
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    let mut lines = text.lines().skip_while(|line| !line.starts_with(&format!("{first:x}-")));
    let kib = lines.find_map(|line| line.strip_prefix("FilePmdMapped:"));
    let kib = kib.and_then(|k| k.trim().trim_end_matches(" kB").parse::<usize>().ok());
    kib.unwrap_or(0) * 1024 > len / 2
}

/// Where blocks of so many bytes begin, one behind the other, and how many bytes they take together.
pub(crate) fn side_by_side(lens: &[usize]) -> (Vec<usize>, usize) {
    let room = |len: usize| len.max(ALIGN).checked_next_multiple_of(ALIGN).unwrap_or(usize::MAX);
    let mut whole = 0usize;
    let mut place = |len: &usize| {
        let at = whole;
        whole = whole.saturating_add(room(*len));
        at
    };
    (lens.iter().map(&mut place).collect(), whole.max(ALIGN))
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length, unmapped once, and no block is left in it.
        unsafe { libc::munmap(self.at, self.len) };
    }
}

impl Memory {
    /// Blocks of so many zero bytes each, one behind the other: small ones share huge pages, too. For blocks that live as long as
    /// one another, since their memory is given back together.
    pub fn together(lens: &[usize]) -> Result<Vec<Memory>, Error> {
        let (places, whole) = side_by_side(lens);
        Ok(Memory::within(Mapping::zeroed(whole)?, &places, lens))
    }

    /// Such blocks over the first bytes of a file, where it lies in huge pages or is small.
    fn over(file: &File, lens: &[usize]) -> Option<Vec<Memory>> {
        let (places, whole) = side_by_side(lens);
        Some(Memory::within(Mapping::of(file, whole)?, &places, lens))
    }

    fn within(
        (mapping, first): (Arc<Mapping>, NonNull<u8>),
        places: &[usize],
        lens: &[usize],
    ) -> Vec<Memory> {
        let block = |(place, len): (&usize, &usize)| {
            // SAFETY: the blocks' room, of which this one's comes after that of those before, is what was mapped.
            let at = unsafe { first.add(*place) };
            Memory { at, len: (*len).max(ALIGN), _mapping: mapping.clone() }
        };
        places.iter().zip(lens).map(block).collect()
    }

    /// Address of the first byte.
    pub fn address(&self) -> *mut u8 {
        self.at.as_ptr()
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }
}

impl From<Memory> for Block {
    fn from(m: Memory) -> Block {
        let (at, len) = (Pointer(m.address().expose_provenance() as u64), m.len());
        Block::new(at, len, Arc::new(m))
    }
}

/// A device whose memory is this process's, whose pointers are its addresses.
pub trait InProcess: Send + Sync {}

impl<T: InProcess> Space for T {
    fn available(&self) -> u64 {
        available_memory()
    }

    fn alloc(&self, lens: &[usize]) -> Result<Vec<Block>, Error> {
        Ok(Memory::together(lens)?.into_iter().map(Block::from).collect())
    }

    fn map(&self, file: &File, lens: &[usize]) -> Option<Vec<Block>> {
        Some(Memory::over(file, lens)?.into_iter().map(Block::from).collect())
    }

    fn populate(&self, at: Pointer, len: usize) {
        /// Of Linux from 5.14 on; others refuse it.
        const POPULATE_WRITE: libc::c_int = 23;
        let first = (at.0 as usize).next_multiple_of(SMALL);
        let end = (at.0 as usize + len) / SMALL * SMALL;
        if first < end {
            // SAFETY: whole pages of a block; the advice changes no byte.
            unsafe {
                libc::madvise(std::ptr::with_exposed_provenance_mut(first), end - first, POPULATE_WRITE)
            };
        }
    }

    fn host(&self, at: Pointer) -> Option<*mut u8> {
        Some(std::ptr::with_exposed_provenance_mut(at.0 as usize))
    }

    fn import(&self, bytes: &[u8]) -> Option<Pointer> {
        Some(Pointer(bytes.as_ptr().expose_provenance() as u64))
    }

    fn read(&self, at: Pointer, to: &mut [u8]) -> Result<(), Error> {
        let from = std::ptr::with_exposed_provenance::<u8>(at.0 as usize);
        // SAFETY: whoever has a pointer of a device knows how many bytes lie there, and that no launch writes them.
        unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    fn write(&self, at: Pointer, from: &[u8]) -> Result<(), Error> {
        let to = std::ptr::with_exposed_provenance_mut::<u8>(at.0 as usize);
        // SAFETY: as in `read`.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
        Ok(())
    }
}

/// Bytes that can be allocated without swapping, within the limit of this process's control group; what the system says, or all that can be
/// addressed where it is silent.
pub fn available_memory() -> u64 {
    whole_memory().min(group_memory(Path::new("/sys/fs/cgroup")).unwrap_or(u64::MAX))
}

/// Bytes that a control group may still take, its page cache given up; `None` where it has no limit.
fn group_memory(group: &Path) -> Option<u64> {
    let read = |name: &str| std::fs::read_to_string(group.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let stat = read("memory.stat")?;
    let cached = stat.lines().find_map(|l| l.strip_prefix("inactive_file "))?.trim().parse::<u64>().ok()?;
    Some((number("memory.max")? + cached).saturating_sub(number("memory.current")?))
}

fn whole_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.map_or(u64::MAX, |k| k * 1024)
}

/// Bytes of memory that this process holds, and the most that it held since [`forget_peak`]; `None` where the system does not say.
pub fn process_memory() -> Option<[u64; 2]> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let of = |key: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(key))?;
        Some(line.trim().trim_end_matches(" kB").parse::<u64>().ok()? * 1024)
    };
    Some([of("VmRSS:")?, of("VmHWM:")?])
}

/// Gives memory back to the system that the allocator keeps for later, after what was large for a while is gone.
pub fn give_back() {
    // SAFETY: the call has no preconditions.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0)
    };
}

/// From now on the peak of [`process_memory`] is counted anew; false where the system does not do so.
pub fn forget_peak() -> bool {
    std::fs::write("/proc/self/clear_refs", "5").is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Here;

    impl InProcess for Here {}

    #[test]
    fn a_control_group_limits_what_is_available() {
        let group = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(group.path().join(name), text).unwrap();
        assert_eq!(group_memory(group.path()), None);
        write("memory.current", "700\n");
        write("memory.stat", "anon 500\ninactive_file 150\n");
        write("memory.max", "max\n");
        assert_eq!(group_memory(group.path()), None);
        write("memory.max", "1000\n");
        assert_eq!(group_memory(group.path()), Some(450));
        assert!(available_memory() > 0);
    }

    #[test]
    fn blocks_together_are_zero_apart_and_outlive_one_another() {
        let lens = [3, 0, HUGE + 5, 64, 200];
        let bytes = |block: &Block| {
            let mut bytes = vec![1; block.len()];
            Here.read(block.at(), &mut bytes).unwrap();
            bytes
        };
        let mut blocks = Here.alloc(&lens).unwrap();
        for (i, (block, len)) in blocks.iter_mut().zip(lens).enumerate() {
            assert_eq!((block.len(), block.at().0 as usize % ALIGN), (len.max(ALIGN), 0));
            assert!(bytes(block).iter().all(|b| *b == 0));
            Here.write(block.at(), &vec![i as u8 + 1; block.len()]).unwrap();
        }
        let kept = blocks.remove(2);
        assert!(blocks.iter().zip([1, 2, 4, 5]).all(|(b, i)| bytes(b).iter().all(|x| *x == i)));
        drop(blocks);
        assert!(bytes(&kept).iter().all(|x| *x == 3));
        assert!(Here.alloc(&[]).unwrap().is_empty());
    }

    #[test]
    fn a_large_block_begins_at_a_huge_page_and_too_large_a_one_is_refused() {
        assert_eq!(Memory::together(&[HUGE + 1]).unwrap()[0].address().addr() % HUGE, 0);
        for lens in [&[usize::MAX][..], &[usize::MAX / 2, usize::MAX / 2, 7], &[1 << 60]] {
            assert!(Memory::together(lens).is_err());
        }
    }
}
