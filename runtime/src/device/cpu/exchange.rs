//! What cores give one another. In: a processor. Out: bytes per second at which all threads together read what others have just written,
//! as kernels read it: with few lines under way at a time. It is slow where a hypervisor has the cores of a machine far apart.

use super::speeds::median;
use crate::device::Device;
use std::hint::black_box;
use std::time::Instant;

/// Lines under way, as many as a core finds ahead while it computes with those that it has.
const CHAINS: usize = 8;
/// Lines of a chain, each of which says where the next one is.
const LINES: usize = 128;
/// Words of a line.
const WORDS: usize = 8;
/// Words that a thread writes and another one reads: a second-level cache holds them.
const SHARE: usize = CHAINS * LINES * WORDS;
/// From a line to the next one of a chain, so far that nothing is prefetched.
const STEP: usize = 37;
/// Tries, of which the one in the middle counts: a thread that is late leaves its share to the one that wrote it.
const TRIES: usize = 31;

fn write(share: &mut [u64]) {
    for chain in share.chunks_mut(LINES * WORDS) {
        (0..LINES).for_each(|line| chain[line * WORDS] = ((line + STEP) % LINES) as u64);
    }
}

fn read(share: &[u64]) -> [u64; CHAINS] {
    let mut at = [0; CHAINS];
    for _ in 0..LINES {
        for (chain, at) in share.chunks(LINES * WORDS).zip(&mut at) {
            *at = chain[*at as usize % LINES * WORDS];
        }
    }
    at
}

/// Measured now. `None` for a thread alone, and where memory is not this process's.
pub fn exchange(device: &dyn Device) -> Option<f64> {
    let threads = device.threads();
    let block = (threads > 1).then(|| device.alloc(&[threads * SHARE * 8]).ok()?.pop()).flatten()?;
    let address = device.host(block.at())? as usize;
    let share = |i: usize| (address + i % threads * SHARE * 8) as *mut u64;
    let seconds = [0.0; TRIES].map(|_| {
        // SAFETY: shares lie in the block, apart from one another; each is written by one thread, and read when all are written.
        device.share(threads, &|_, some| {
            some.for_each(|i| write(unsafe { std::slice::from_raw_parts_mut(share(i), SHARE) }));
        });
        let started = Instant::now();
        device.share(threads, &|_, some| {
            some.for_each(|i| {
                _ = black_box(read(unsafe { std::slice::from_raw_parts(share(i + 1), SHARE) }))
            });
        });
        started.elapsed().as_secs_f64()
    });
    Some((threads * SHARE * 8) as f64 / median(seconds)?)
}
