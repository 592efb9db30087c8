//! How fast cores multiply small matrices now. In: a processor. Out: operations per second of all threads together, of a product whose sides
//! are in the first-level caches, with a kernel's loads beside its multiplications. Where a thread of another tenant runs on the same core,
//! multiplications of registers keep their peak and these do not: both threads are decoded in turn.

use super::Isa;
use super::speeds::median;
use crate::device::Device;
use std::time::{Duration, Instant};

/// Length of a sum, and sums side by side: rows of a side, and vectors of the other.
const LENGTH: usize = 64;
const ROWS: usize = 6;
const VECTORS: usize = 2;
/// Products of a unit, and units of each thread: together less than a millisecond.
const TIMES: usize = 64;
const UNITS: usize = 4;
/// Tries, of which the one in the middle counts: this is what kernels meet, not what is possible.
const TRIES: usize = 11;
/// How long one is: another tenant's thread takes turns with this one within a fraction of a millisecond, for a part of the time that changes from
/// second to second, and shorter tries would mostly miss it.
const TRY: Duration = Duration::from_millis(4);
/// What comes before them.
const AWAKE: Duration = Duration::from_millis(5);

/// Zeros for both sides, where no odd number slows anything down.
#[repr(align(64))]
struct Sides([f32; LENGTH * (ROWS + VECTORS * 16)]);
static SIDES: Sides = Sides([0.0; LENGTH * (ROWS + VECTORS * 16)]);

/// Measured now. `None` where the vector instructions are not known here.
pub fn product(device: &dyn Device) -> Option<f64> {
    let (once, lanes) = loops(Isa::named(&device.backend().target().isa)?)?;
    let units = device.threads().max(1) * UNITS;
    let work = |seconds: Duration| {
        let (began, mut runs) = (Instant::now(), 0);
        while began.elapsed() < seconds {
            device.share(units, &|_, some| some.for_each(|_| (0..TIMES).for_each(|_| once())));
            runs += 1;
        }
        runs as f64 / began.elapsed().as_secs_f64()
    };
    // A thread that sleeps takes longer to wake than a unit takes.
    work(AWAKE);
    let operations = 2 * units * TIMES * LENGTH * ROWS * VECTORS * lanes;
    Some(operations as f64 * median([0.0; TRIES].map(|_| work(TRY)))?)
}

/// A product, and the numbers of a vector.
fn loops(isa: Isa) -> Option<(fn(), usize)> {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => Some((product_512, 16)),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => Some((product_256, 8)),
        _ => None,
    }
}

/// Twelve sums of vectors of so many bytes; a turn of the loop takes four steps of the sums.
#[cfg(target_arch = "x86_64")]
macro_rules! products {
    ($name:ident, $r:literal, $bytes:literal, $($row:literal $x:literal $y:literal),*) => {
        fn $name() {
            // SAFETY: reads the sides, which are as long as the loop goes, into registers that are declared; chosen by `loops` only where the
            // processor has the instructions.
            unsafe {
                std::arch::asm!(
                    "vzeroall",
                    "2:",
                    ".irp k, 0, 1, 2, 3",
                    concat!("vmovups ", $r, "12, [{b} + \\k * 2 * ", $bytes, "]"),
                    concat!("vmovups ", $r, "13, [{b} + \\k * 2 * ", $bytes, " + ", $bytes, "]"),
                    $(
                        concat!("vbroadcastss ", $r, "14, [{a} + \\k * 24 + ", $row, "]"),
                        concat!("vfmadd231ps ", $r, $x, ", ", $r, "14, ", $r, "12"),
                        concat!("vfmadd231ps ", $r, $y, ", ", $r, "14, ", $r, "13"),
                    )*
                    ".endr",
                    "add {a}, 96",
                    concat!("add {b}, 8 * ", $bytes),
                    "dec {turns}",
                    "jnz 2b",
                    "vzeroupper",
                    a = inout(reg) SIDES.0.as_ptr() => _,
                    b = inout(reg) SIDES.0.as_ptr().wrapping_add(LENGTH * ROWS) => _,
                    turns = inout(reg) LENGTH / 4 => _,
                    out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                    out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                    out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                    out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
                    options(nostack, readonly),
                );
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
products!(product_256, "ymm", "32", "0" "0" "1", "4" "2" "3", "8" "4" "5", "12" "6" "7", "16" "8" "9", "20" "10" "11");
#[cfg(target_arch = "x86_64")]
products!(product_512, "zmm", "64", "0" "0" "1", "4" "2" "3", "8" "4" "5", "12" "6" "7", "16" "8" "9", "20" "10" "11");
