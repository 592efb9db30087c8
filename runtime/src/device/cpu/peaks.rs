//! What this machine can do at best with the vector instructions of its target, measured: multiplications and additions of
//! registers, products of the matrix unit's tiles and reading of memory, by all threads of a pool. Beside a benchmark's seconds
//! stands then the least that they could have been.

use super::Isa;
use crate::{Device, Threads};
use astrai_ir::DType;
use std::hint::black_box;
use std::ops::Range;
use std::time::Instant;

/// What was there at best.
#[derive(Clone, Copy, Debug)]
pub struct Peak {
    /// Operations or bytes per second in the fastest try.
    pub rate: f64,
    /// Which part of that there was on average while it was measured: less than 1 where others share the processor.
    pub held: f64,
}

/// Measured peaks of all threads together.
#[derive(Clone, Copy, Debug)]
pub struct Peaks {
    /// Operations on f32; a fused multiply-add is two.
    pub vector: Peak,
    /// Operations on pairs of bf16 with sums in f32, where the target has a unit or instructions for them.
    pub matrix: Option<Peak>,
    /// Bytes read from memory.
    pub reading: Peak,
}

/// Fewest bytes of the work's that reading is measured on, and bytes that it takes in their place.
const FEWEST: usize = 64 << 20;
const OWN: usize = 256 << 20;
/// Bytes of one unit of reading, and most units.
pub(super) const UNIT: usize = 1 << 20;
const MOST: usize = 1 << 10;
/// Bytes whose reading is measured, of all threads together; a try reads so many at least.
pub const LEVELS: [usize; 6] = [1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30];
const TOGETHER: usize = 64 << 20;
/// Bytes that one turn of a loop reads.
const LINES: usize = 512;
/// Loop turns of a unit, and units of each thread: a few milliseconds.
const TURNS: u64 = 128 << 10;
const UNITS: usize = 8;
/// Loop turns of a unit of tile products, which take sixteen cycles each.
const TILE_TURNS: u64 = 8 << 10;
/// Tries, of which the fastest counts: a peak is what is possible, and a short try may go undisturbed.
const TRIES: [usize; 2] = [60, 12];

impl Peaks {
    /// Measures for a moment. Reading is measured on `again`, what the work reads again and again, up to 1 GiB of it: what a
    /// last-level cache keeps of it, and how far its memory is from the processor, counts for both. Where that is little, on
    /// 256 MiB, which this takes. `None` where the vector instructions are not known here.
    pub fn measure(device: &dyn Device, again: &[&[u8]]) -> Option<Peaks> {
        let isa = Isa::named(&device.backend().target().isa)?;
        let vector = Peaks::vector(device)?;
        let mut own = None;
        let again = match again.iter().map(|b| b.len()).sum::<usize>() < FEWEST {
            true => {
                // As weights lie: huge pages where the system has them.
                let block = own.insert(device.alloc(&[OWN]).ok()?.pop()?);
                device.fill(block.at(), OWN, &mut |bytes| bytes.fill(1)).ok()?;
                let address = device.host(block.at())?;
                // SAFETY: the block is that long, lives as long as `own`, and nobody writes it again.
                &[unsafe { std::slice::from_raw_parts(address.cast_const(), OWN) }]
            }
            false => again,
        };
        let units: Vec<&[u8]> = again.iter().flat_map(|b| b.chunks(UNIT)).take(MOST).collect();
        let size: usize = units.iter().map(|u| u.len()).sum();
        let units = in_turn(units, device.threads());
        let by = |read: &(dyn Fn(&[u8]) + Sync)| {
            best(TRIES[1], size as f64, || {
                device.share(units.len(), &|_, some| units[some].iter().for_each(|u| read(black_box(u))))
            })
        };
        let (several, one) = (by(&|u| _ = black_box(sum::<4, 4096>(u))), by(&|u| read(isa, u)));
        let reading = if several.rate > one.rate { several } else { one };
        Some(Peaks { vector, matrix: Peaks::matrix(device), reading })
    }

    /// Operations per second of vectors, of the unit for bf16, and of f32 in pieces there, as far as the target has them; without the
    /// measurement of memory. `None` where the vector instructions are not known here.
    pub fn arithmetic_of(device: &dyn Device) -> Option<[Option<f64>; 3]> {
        let vector = Peaks::vector(device)?;
        Some([Some(vector), Peaks::matrix(device), Peaks::pieces(device)].map(|peak| peak.map(|p| p.rate)))
    }

    /// Operations per second on operands of this type, without the measurement of memory.
    pub fn compute(device: &dyn Device, dtype: DType) -> Option<f64> {
        let matrix = if dtype == DType::BF16 { Peaks::matrix(device) } else { None };
        matrix.or_else(|| Peaks::vector(device)).map(|p| p.rate)
    }

    fn vector(device: &dyn Device) -> Option<Peak> {
        let (chains, flops) = chains(Isa::named(&device.backend().target().isa)?)?;
        Some(operations(device, flops, TURNS, chains))
    }

    fn matrix(device: &dyn Device) -> Option<Peak> {
        let (chains, flops, turns) = pair_chains(Isa::named(&device.backend().target().isa)?)?;
        Some(operations(device, flops, turns, chains))
    }

    fn pieces(device: &dyn Device) -> Option<Peak> {
        let (chains, flops, turns) = piece_chains(Isa::named(&device.backend().target().isa)?)?;
        Some(operations(device, flops, turns, chains))
    }

    /// Bytes per second that all threads together read of so many bytes again and again, of few each thread its part: of each number of bytes
    /// in [`LEVELS`] of which there is four times as much memory, the greatest last. A greater one is never faster.
    pub fn levels(device: &dyn Device) -> Option<Vec<(f64, f64)>> {
        let isa = Isa::named(&device.backend().target().isa)?;
        let room = device.available() / 4;
        let sizes: Vec<usize> = LEVELS.into_iter().filter(|n| *n as u64 <= room).collect();
        let (threads, len) = (device.threads().max(1), *sizes.last()?);
        let block = device.alloc(&[len]).ok()?.pop()?;
        device.fill(block.at(), len, &mut |bytes| bytes.fill(1)).ok()?;
        let address = device.host(block.at())?;
        // SAFETY: the block is that long, lives until the end, and nobody writes it again.
        let bytes = unsafe { std::slice::from_raw_parts(address.cast_const(), len) };
        let mut found = Vec::new();
        for size in sizes {
            let peak = if size < TOGETHER {
                let (each, turns) = (size / threads / LINES * LINES, TOGETHER / size);
                let parts: Vec<&[u8]> = bytes.chunks(each.max(1)).take(threads).collect();
                let work = |t: usize, some: Range<usize>| {
                    let part = parts.get(t).copied().unwrap_or_default();
                    some.for_each(|_| (0..turns).for_each(|_| read(isa, black_box(part))));
                };
                best(TRIES[1], (each * threads * turns) as f64, || device.share(threads, &work))
            } else {
                let units = in_turn(bytes[..size].chunks(UNIT).collect(), threads);
                let work = |_, some: Range<usize>| units[some].iter().for_each(|u| read(isa, black_box(u)));
                best(TRIES[1], size as f64, || device.share(units.len(), &work))
            };
            found.push((size as f64, peak.rate));
        }
        for i in (1..found.len()).rev() {
            found[i - 1].1 = found[i - 1].1.max(found[i].1);
        }
        Some(found)
    }

    /// The peak of operations on operands of this type.
    pub fn arithmetic(&self, dtype: DType) -> Peak {
        self.matrix.filter(|_| dtype == DType::BF16).unwrap_or(self.vector)
    }

    /// The least seconds that so many operations on operands of this type, and so many bytes, take.
    pub fn floor(&self, flops: f64, bytes: f64, dtype: DType) -> f64 {
        (flops / self.arithmetic(dtype).rate).max(bytes / self.reading.rate)
    }
}

/// Units in an order of which threads, each of which takes a run of it, read neighbours at the same time. Threads that read places a power
/// of two apart at one speed would meet in the same bank of memory again and again.
pub(super) fn in_turn(units: Vec<&[u8]>, threads: usize) -> Vec<&[u8]> {
    let threads = threads.max(1);
    (0..threads).flat_map(|t| units.iter().copied().skip(t).step_by(threads)).collect()
}

/// Of all threads, with `flops` operations in a turn of the loop.
fn operations(threads: &dyn Threads, flops: u64, turns: u64, chains: Chains) -> Peak {
    let units = threads.threads() * UNITS;
    let work = (units as u64 * turns * flops) as f64;
    best(TRIES[0], work, || threads.share(units, &|_, some| some.for_each(|_| chains(turns))))
}

/// Eight sums, so that no addition waits for the one before; of `STREAMS` side by side, as kernels read which hide the latency of
/// additions, or of one. Asks for the line `AHEAD` bytes ahead, as kernels do which wait for memory, or leaves that to the
/// processor where 0.
fn sum<const STREAMS: usize, const AHEAD: usize>(bytes: &[u8]) -> [u64; 8] {
    let mut sums = [0u64; 8];
    let length = bytes.len() / STREAMS;
    for at in (0..length).step_by(64) {
        for stream in 0..STREAMS {
            let from = stream * length + at;
            let Some(line) = bytes.get(from..from + 64) else { continue };
            if AHEAD > 0 {
                prefetch(line.as_ptr().wrapping_add(AHEAD));
            }
            for (s, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
                *s = s.wrapping_add(u64::from_le_bytes(*word));
            }
        }
    }
    sums
}

/// Reads whole lines with the widest vectors there are.
pub(super) fn read(isa: Isa, bytes: &[u8]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => read_512(bytes),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => read_256(bytes),
        _ => _ = black_box(sum::<1, 0>(bytes)),
    }
}

/// Loads of so many bytes each, eight or sixteen a turn.
#[cfg(target_arch = "x86_64")]
macro_rules! reads {
    ($name:ident, $r:literal, $each:literal) => {
        fn $name(bytes: &[u8]) {
            let turns = bytes.len() / LINES;
            if turns == 0 {
                return;
            }
            // SAFETY: reads the whole lines of the slice, into registers that are declared; chosen by `read` only where the
            // processor has the instructions.
            unsafe {
                std::arch::asm!(
                    "2:",
                    concat!(".set at, 0\n.rept 512 / ", $each, "\nvmovups ", $r, "0, [{at} + at]\n.set at, at + ", $each, "\n.endr"),
                    "add {at}, 512",
                    "dec {turns}",
                    "jnz 2b",
                    "vzeroupper",
                    at = inout(reg) bytes.as_ptr() => _,
                    turns = inout(reg) turns => _,
                    out("xmm0") _,
                    options(nostack, readonly),
                );
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
reads!(read_512, "zmm", "64");
#[cfg(target_arch = "x86_64")]
reads!(read_256, "ymm", "32");

/// Asks for a line of memory, wherever it is.
fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing that the program sees, and never faults.
    unsafe {
        std::arch::x86_64::_mm_prefetch(at.cast(), std::arch::x86_64::_MM_HINT_T0);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// The rate at which so much work is done, by the fastest try.
pub(super) fn best(tries: usize, amount: f64, mut work: impl FnMut()) -> Peak {
    let mut timed = || {
        let started = Instant::now();
        work();
        started.elapsed().as_secs_f64()
    };
    let all: Vec<f64> = (0..tries).map(|_| timed()).collect();
    let least = all.iter().copied().fold(f64::INFINITY, f64::min);
    Peak { rate: amount / least, held: least * tries as f64 / all.iter().sum::<f64>() }
}

/// A loop of so many turns.
type Chains = fn(u64);

/// Independent chains of multiplications and additions, and the operations of one turn.
fn chains(isa: Isa) -> Option<(Chains, u64)> {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => Some((chains_512, 12 * 16 * 2)),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => Some((chains_256, 12 * 8 * 2)),
        #[cfg(target_arch = "x86_64")]
        Isa::Plain => Some((chains_128, 12 * 4)),
        _ => None,
    }
}

/// Independent chains of products of bf16 pairs, the operations of one turn, and turns of a unit.
fn pair_chains(isa: Isa) -> Option<(Chains, u64, u64)> {
    match isa {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        Isa::Amx => Some((chains_of_tiles, 6 * 16 * 16 * 32 * 2, TILE_TURNS)),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 => Some((chains_of_pairs, 12 * 32 * 2, TURNS)),
        _ => None,
    }
}

/// Products of f32 in pieces, the operations of one turn, and turns of a unit.
fn piece_chains(isa: Isa) -> Option<(Chains, u64, u64)> {
    match isa {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        Isa::Amx => Some((chains_of_pieces, 32 * 32 * 32 * 2, TILE_TURNS / 4)),
        _ => None,
    }
}

/// Bytes in a cache line of their own.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[repr(align(64))]
struct Aligned<const N: usize>([u8; N]);

/// Eight tiles of 16 rows of 64 bytes.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn shapes() -> Aligned<64> {
    let mut shapes = Aligned([0; 64]);
    shapes.0[0] = 1; // the only palette there is
    shapes.0[16..32].copy_from_slice(&[64, 0].repeat(8)); // bytes of a row, of tiles 0 to 7
    shapes.0[48..56].fill(16); // rows
    shapes
}

/// Sums of 32 x 32 over 32 products of f32, each of six products of pieces of bf16, with the loads of tiles that the kernels have
/// (`dot_amx_split`), from the first-level cache.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn chains_of_pieces(turns: u64) {
    let shapes = shapes();
    // Three pieces of each side.
    let sides = Aligned([0; 12 << 10]);
    // SAFETY: as in `chains_of_tiles`; loads read the twelve KiB above.
    unsafe {
        std::arch::asm!(
            "ldtilecfg [{shapes}]",
            ".irp i, 0, 1, 2, 3, 4, 5, 6, 7",
            "tilezero tmm\\i",
            ".endr",
            ".macro astrai_rows piece",
            "tileloadd tmm4, [{a} + {near} + \\piece * 2048]",
            "tileloadd tmm5, [{a} + {near} + \\piece * 2048 + 1024]",
            ".endm",
            ".macro astrai_columns piece",
            "tileloadd tmm6, [{w} + {far} + \\piece * 2048]",
            "tileloadd tmm7, [{w} + {far} + \\piece * 2048 + 64]",
            ".endm",
            ".macro astrai_products",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            ".endm",
            "2:",
            "astrai_rows 0",
            "astrai_columns 2",
            "astrai_products",
            "astrai_columns 1",
            "astrai_products",
            "astrai_rows 1",
            "astrai_products",
            "astrai_columns 0",
            "astrai_products",
            "astrai_rows 2",
            "astrai_products",
            "astrai_rows 0",
            "astrai_products",
            "dec {turns}",
            "jnz 2b",
            "tilerelease",
            ".purgem astrai_rows",
            ".purgem astrai_columns",
            ".purgem astrai_products",
            shapes = in(reg) &raw const shapes,
            a = in(reg) &raw const sides,
            w = in(reg) (&raw const sides).byte_add(6 << 10),
            near = in(reg) 64_u64,
            far = in(reg) 128_u64,
            turns = inout(reg) turns.max(1) => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, readonly),
        );
    }
}

/// Six chains of 16 x 16 sums over 32 products each; a chain's latency is about three products.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn chains_of_tiles(turns: u64) {
    let shapes = shapes();
    // SAFETY: a machine runs with the matrix unit only where the processor has it and the system grants it; the registers are
    // declared, and the one load reads the 64 bytes above. Tiles are zeroed, so that no odd number slows anything down.
    unsafe {
        std::arch::asm!(
            "ldtilecfg [{shapes}]",
            ".irp i, 0, 1, 2, 3, 4, 5, 6, 7",
            "tilezero tmm\\i",
            ".endr",
            "2:",
            ".irp i, 0, 1, 2, 3, 4, 5",
            "tdpbf16ps tmm\\i, tmm6, tmm7",
            ".endr",
            "dec {turns}",
            "jnz 2b",
            "tilerelease",
            shapes = in(reg) &raw const shapes,
            turns = inout(reg) turns.max(1) => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, readonly),
        );
    }
}

/// Twelve chains hide a latency of four cycles on two ports, or of six on one, with some to spare.
#[cfg(target_arch = "x86_64")]
macro_rules! chains {
    ($name:ident, $op:literal, $r:literal) => {
        fn $name(turns: u64) {
            // SAFETY: registers only, all declared; chosen by `chains` only where the processor has the instructions.
            // Zeroed first, so that no odd number slows the arithmetic down.
            unsafe {
                std::arch::asm!(
                    "vzeroall",
                    "2:",
                    ".irp i, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11",
                    concat!($op, $r, "\\i, ", $r, "12, ", $r, "13"),
                    ".endr",
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
chains!(chains_512, "vfmadd231ps ", "zmm");
#[cfg(target_arch = "x86_64")]
chains!(chains_of_pairs, "vdpbf16ps ", "zmm");
#[cfg(target_arch = "x86_64")]
chains!(chains_256, "vfmadd231ps ", "ymm");

/// Plain vectors multiply and add by an instruction each: six chains of both.
#[cfg(target_arch = "x86_64")]
fn chains_128(turns: u64) {
    // SAFETY: as above; every x86-64 has the instructions.
    unsafe {
        std::arch::asm!(
            "xorps xmm0, xmm0", "xorps xmm1, xmm1", "xorps xmm2, xmm2", "xorps xmm3, xmm3",
            "xorps xmm4, xmm4", "xorps xmm5, xmm5", "xorps xmm6, xmm6", "xorps xmm7, xmm7",
            "xorps xmm8, xmm8", "xorps xmm9, xmm9", "xorps xmm10, xmm10", "xorps xmm11, xmm11",
            "xorps xmm12, xmm12",
            "2:",
            "mulps xmm0, xmm12", "addps xmm1, xmm12", "mulps xmm2, xmm12", "addps xmm3, xmm12",
            "mulps xmm4, xmm12", "addps xmm5, xmm12", "mulps xmm6, xmm12", "addps xmm7, xmm12",
            "mulps xmm8, xmm12", "addps xmm9, xmm12", "mulps xmm10, xmm12", "addps xmm11, xmm12",
            "dec {turns}",
            "jnz 2b",
            turns = inout(reg) turns.max(1) => _,
            out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
            out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
            out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
            out("xmm12") _,
            options(nomem, nostack),
        );
    }
}
