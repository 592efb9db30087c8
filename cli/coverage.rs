//! Counters of the program's edges, where the compiler put them in (feature `coverage`; the command is in `tests/fuzz/main.rs`). In:
//! what ran. Out: which edges it met and how often. Only fuzzing asks; an ordinary build has nothing of this.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

/// The counters of each part of the program.
static COUNTERS: Mutex<Vec<&[AtomicU8]>> = Mutex::new(Vec::new());

/// SanitizerCoverage's hook: every module that has counters calls it before `main`, those of one program with the same bounds.
#[unsafe(no_mangle)]
extern "C" fn __sanitizer_cov_8bit_counters_init(begin: *const AtomicU8, end: *const AtomicU8) {
    let Ok(mut all) = COUNTERS.lock() else { return };
    if all.iter().all(|part| part.as_ptr() != begin) {
        // SAFETY: the linker's bounds of one section of bytes, which lives as long as the program.
        all.push(unsafe { std::slice::from_raw_parts(begin, end.offset_from_unsigned(begin)) });
    }
}

/// Sets all counters to zero, and gives those that were not, by number.
pub fn take(mut met: impl FnMut(usize, u8)) {
    let Ok(all) = COUNTERS.lock() else { return };
    let mut first = 0;
    for part in &*all {
        // SAFETY: any eight bytes are a number. Most are zero, and are looked at eight at a time.
        let (head, words, _) = unsafe { part.align_to::<AtomicU64>() };
        let mut one = |at: usize| {
            if part[at].load(Relaxed) > 0 {
                met(first + at, part[at].swap(0, Relaxed));
            }
        };
        (0..head.len()).for_each(&mut one);
        for (at, _) in words.iter().enumerate().filter(|(_, word)| word.load(Relaxed) != 0) {
            (head.len() + 8 * at..head.len() + 8 * at + 8).for_each(&mut one);
        }
        (head.len() + 8 * words.len()..part.len()).for_each(&mut one);
        first += part.len();
    }
}
