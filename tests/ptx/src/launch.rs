//! A launch: blocks in a seeded order, on one thread or several.

use crate::block::Block;
use crate::counts::Count;
use crate::fault::{Fault, Kind};
use crate::kernel::Kernel;
use crate::memory::Memory;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// What is launched and how.
#[derive(Clone, Debug)]
pub struct Launch<'a> {
    /// The kernel.
    pub kernel: &'a Kernel,
    /// Blocks along x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub dynamic: usize,
    /// Bytes of the parameters, each at its offset.
    pub params: &'a [u8],
    /// Addresses of the module's variables.
    pub variables: &'a [u64],
    /// Orders of blocks and warps.
    pub seed: u64,
    /// Threads of this process that run blocks; one where blocks may speak to each other.
    pub threads: usize,
    /// Counts sectors and passes, too.
    pub counted: bool,
    /// Looks for races in global memory.
    pub races: bool,
    /// Instructions of warps that a block may take.
    pub budget: u64,
}

/// Instructions that a block may take unless something else is said.
pub const BUDGET: u64 = 1 << 28;

impl<'a> Launch<'a> {
    /// A launch with the usual checks.
    pub fn new(kernel: &'a Kernel, grid: [u32; 3], block: [u32; 3], params: &'a [u8]) -> Launch<'a> {
        Launch {
            kernel,
            grid,
            block,
            dynamic: 0,
            params,
            variables: &[],
            seed: 1,
            threads: 1,
            counted: false,
            races: true,
            budget: BUDGET,
        }
    }

    /// Number of blocks.
    pub fn blocks(&self) -> u32 {
        self.grid.iter().product()
    }

    /// Runs the launch.
    ///
    /// # Errors
    /// The first fault, by the order of blocks.
    pub fn run(&self, memory: &mut Memory) -> Result<Vec<Count>, Box<Fault>> {
        if memory.clock > u32::MAX / 2 {
            memory.forget();
        }
        let spans = memory.spans();
        let spans = Spans(&spans);
        let base = memory.clock + 1;
        let blocks = self.blocks();
        let threads = if self.kernel.talks { 1 } else { self.threads.clamp(1, blocks.max(1) as usize) };
        let (next, stop) = (AtomicU32::new(0), AtomicUsize::new(usize::MAX));
        let end = AtomicU32::new(base);
        let total = Mutex::new(vec![Count::default(); self.kernel.code.len()]);
        let failed: Mutex<Option<(usize, Box<Fault>)>> = Mutex::new(None);
        let order = Order::new(blocks, self.seed);
        let work = || {
            let spans = &spans;
            let mut b = Block::new(self, spans.0, base, threads > 1);
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= blocks || n as usize > stop.load(Ordering::Relaxed) {
                    break;
                }
                if let Err(e) = b.run(order.at(n)) {
                    stop.fetch_min(n as usize, Ordering::Relaxed);
                    let mut f = failed.lock().unwrap_or_else(|e| e.into_inner());
                    if f.as_ref().is_none_or(|(at, _)| n as usize <= *at) {
                        *f = Some((n as usize, e));
                    }
                    break;
                }
            }
            end.fetch_max(b.end(), Ordering::Relaxed);
            let mut total = total.lock().unwrap_or_else(|e| e.into_inner());
            total.iter_mut().zip(&b.counts).for_each(|(t, c)| t.add(c));
        };
        if threads == 1 {
            work();
        } else {
            std::thread::scope(|s| (0..threads).for_each(|_| drop(s.spawn(work))));
        }
        memory.clock = end.into_inner() + 1;
        match failed.into_inner().unwrap_or_else(|e| e.into_inner()) {
            Some((_, f)) => Err(f),
            None => Ok(total.into_inner().unwrap_or_else(|e| e.into_inner())),
        }
    }

    /// What is wrong with the shape of the launch.
    pub fn refused(&self) -> Option<(Kind, String)> {
        let threads = self.block.iter().map(|n| u64::from(*n)).product::<u64>();
        let k = self.kernel;
        let bad = |what: String| Some((Kind::Unsupported, what));
        if threads == 0 || self.grid.contains(&0) {
            return bad("a launch of nothing".into());
        }
        if threads > u64::from(k.max_threads.min(1024)) {
            return bad(format!("{threads} threads in a block of {}", k.max_threads));
        }
        None
    }
}

/// Spans are shared by the threads of a launch.
struct Spans<'a>(&'a [crate::memory::Span]);
// SAFETY: spans point into the memory that the launch borrows exclusively; what threads do there is what kernels do.
unsafe impl Sync for Spans<'_> {}

/// A permutation of the blocks.
struct Order {
    blocks: u32,
    first: u32,
    stride: u32,
}

impl Order {
    fn new(blocks: u32, seed: u64) -> Order {
        let n = blocks.max(1);
        let mix = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut stride = (mix >> 32) as u32 % n;
        while gcd(stride, n) != 1 {
            stride = (stride + 1) % n.max(2);
        }
        Order { blocks, first: mix as u32 % n, stride }
    }

    fn at(&self, n: u32) -> u32 {
        ((u64::from(self.first) + u64::from(n) * u64::from(self.stride)) % u64::from(self.blocks)) as u32
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_of_blocks_has_each_once() {
        for n in [1, 2, 3, 12, 97] {
            for seed in 0..5 {
                let o = Order::new(n, seed);
                let mut all: Vec<u32> = (0..n).map(|i| o.at(i)).collect();
                all.sort_unstable();
                assert_eq!(all, (0..n).collect::<Vec<_>>());
            }
        }
    }
}
