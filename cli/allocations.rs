//! How often the program asks the system's allocator for memory: what a training step must not do.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Whether allocations are counted now: a count that all threads write at every allocation costs them time.
static COUNTING: AtomicBool = AtomicBool::new(false);

static COUNT: AtomicU64 = AtomicU64::new(0);

/// The system's allocator, which [`counted`] can count.
pub struct Counted;

fn count() {
    if COUNTING.load(Ordering::Relaxed) {
        COUNT.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract of `GlobalAlloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }
}

/// What `work` gives, and how many allocations all threads made meanwhile; 0 where [`Counted`] is not the program's allocator. One
/// count at a time.
pub fn counted<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let before = COUNT.load(Ordering::Relaxed);
    COUNTING.store(true, Ordering::Relaxed);
    let done = work();
    COUNTING.store(false, Ordering::Relaxed);
    (done, COUNT.load(Ordering::Relaxed) - before)
}
