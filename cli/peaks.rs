//! What this machine can do at best, measured: fused multiply-adds of registers and reading of memory, by all threads of a
//! pool. Beside a benchmark's seconds stands then the least that they could have been.

use astrai_ir::{DType, Simd};
use astrai_runtime::pool::Pool;
use astrai_runtime::{Memory, host_simd};
use std::hint::black_box;
use std::time::Instant;

/// Measured peaks of all threads together.
#[derive(Clone, Copy, Debug)]
pub struct Peaks {
    /// f32 operations per second; a fused multiply-add is two.
    pub flops: f64,
    /// Bytes read from memory per second.
    pub bandwidth: f64,
}

/// Bytes that reading is measured on, more than caches hold, and bytes of one unit of it.
const READ: usize = 256 << 20;
const UNIT: usize = 1 << 20;
/// Loop turns of a unit, and units of each thread: a few milliseconds.
const TURNS: u64 = 128 << 10;
const UNITS: usize = 8;
/// Tries, of which the fastest counts: a peak is what is possible, and a short try may go undisturbed.
const TRIES: [usize; 2] = [60, 12];

impl Peaks {
    /// Measures for a moment; takes 256 MiB. `None` where the vector instructions are not known here.
    pub fn measure(pool: &Pool) -> Option<Peaks> {
        let flops = Peaks::arithmetic(pool)?;
        let mut memory = Memory::zeroed(READ).ok()?; // as the weights lie: large pages where the system has them
        memory.bytes_mut().fill(1);
        let bytes = &*memory.bytes_mut();
        let read = fastest(TRIES[1], || {
            pool.run(READ / UNIT, &|_, some| {
                black_box(sum(black_box(&bytes[some.start * UNIT..some.end * UNIT])));
            })
        });
        Some(Peaks { flops, bandwidth: READ as f64 / read })
    }

    /// f32 operations per second alone, which takes no memory.
    fn arithmetic(pool: &Pool) -> Option<f64> {
        let (chains, flops) = chains(host_simd())?;
        let units = pool.threads() * UNITS;
        let fma = fastest(TRIES[0], || pool.run(units, &|_, some| some.for_each(|_| chains(TURNS))));
        Some((units as u64 * TURNS * flops) as f64 / fma)
    }

    /// Operations per second on this type: as [`of`](Peaks::of), without the measurement of memory.
    pub fn compute(pool: &Pool, dtype: DType) -> Option<f64> {
        Some(Peaks { flops: Peaks::arithmetic(pool)?, bandwidth: 0.0 }.of(dtype))
    }

    /// Peak for operands of this type. A matrix unit for bf16 multiplies 16 times as many numbers a cycle as two vector units.
    pub fn of(&self, dtype: DType) -> f64 {
        let unit = || std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|t| t.contains(" amx_bf16"));
        if dtype == DType::BF16 && unit() { 16.0 * self.flops } else { self.flops }
    }

    /// The least seconds that so many operations and bytes take.
    pub fn floor(&self, flops: f64, bytes: f64) -> f64 {
        (flops / self.flops).max(bytes / self.bandwidth)
    }
}

/// Eight sums, so that no addition waits for the one before.
fn sum(bytes: &[u8]) -> [u64; 8] {
    let mut sums = [0u64; 8];
    for line in bytes.as_chunks::<64>().0 {
        for (s, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
            *s = s.wrapping_add(u64::from_le_bytes(*word));
        }
    }
    sums
}

fn fastest(tries: usize, mut work: impl FnMut()) -> f64 {
    let mut timed = || {
        let started = Instant::now();
        work();
        started.elapsed().as_secs_f64()
    };
    (0..tries).map(|_| timed()).fold(f64::INFINITY, f64::min)
}

/// Independent chains of fused multiply-adds, and the operations of one turn.
fn chains(simd: Simd) -> Option<(fn(u64), u64)> {
    match simd {
        #[cfg(target_arch = "x86_64")]
        Simd::Avx512 => Some((chains_512, 12 * 16 * 2)),
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 => Some((chains_256, 12 * 8 * 2)),
        _ => None,
    }
}

/// Twelve chains hide a latency of four cycles on two ports with some to spare.
#[cfg(target_arch = "x86_64")]
macro_rules! chains {
    ($name:ident, $r:literal) => {
        fn $name(turns: u64) {
            // SAFETY: registers only, all declared; chosen by `chains` only where the processor has the instructions.
            // Zeroed first, so that no odd number slows the arithmetic down.
            unsafe {
                std::arch::asm!(
                    "vzeroall",
                    "2:",
                    concat!("vfmadd231ps ", $r, "0, ", $r, "12, ", $r, "13"),
                    concat!("vfmadd231ps ", $r, "1, ", $r, "12, ", $r, "13"),
                    concat!("vfmadd231ps ", $r, "2, ", $r, "12, ", $r, "13"),
                    concat!("vfmadd231ps ", $r, "3, ", $r, "12, ", $r, "13"),
                    concat!("vfmadd231ps ", $r, "4, ", $r, "12, ", $r, "13"),
                    concat!("vfmadd231ps ", $r, "5, ", $r, "12, ", $r, "13"),
                    concat!("vfmadd231ps ", $r, "6, ", $r, "12, ", $r, "13"),
                    concat!("vfmadd231ps ", $r, "7, ", $r, "12, ", $r, "13"),
                    concat!("vfmadd231ps ", $r, "8, ", $r, "12, ", $r, "13"),
                    concat!("vfmadd231ps ", $r, "9, ", $r, "12, ", $r, "13"),
                    concat!("vfmadd231ps ", $r, "10, ", $r, "12, ", $r, "13"),
                    concat!("vfmadd231ps ", $r, "11, ", $r, "12, ", $r, "13"),
                    "dec {turns}",
                    "jnz 2b",
                    "vzeroupper",
                    turns = inout(reg) turns.max(1) => _,
                    out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                    out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                    out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                    out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
                    options(nomem, nostack),
                );
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
chains!(chains_512, "zmm");
#[cfg(target_arch = "x86_64")]
chains!(chains_256, "ymm");
