//! Block formats. In: blocks of a tensor, a scale and codes each, some with an offset. Out: the numbers that they stand for, f32, computed as
//! ggml does; or, of types whose groups are of 32, the codes themselves. Codes of blocks of 32 lie in halves: byte `i` has numbers `i` and
//! `i + 16`.

use astrai_ir::{Code, DType};
use half::f16;

/// A type of a tensor's elements.
#[derive(Debug)]
pub struct Blocks {
    /// Its number in files.
    pub kind: u32,
    /// Its name.
    pub name: &'static str,
    /// Numbers in a block.
    count: usize,
    /// Bytes of a block.
    size: usize,
    /// The type, where blocks are single numbers.
    pub plain: Option<DType>,
    /// The numbers of a block.
    read: fn(&[u8], &mut Vec<f32>),
    /// Its groups of 32 as codes, where they can stay so.
    pub codes: Option<Codes>,
}

/// How a block's groups are codes as kernels read them.
#[derive(Debug)]
pub struct Codes {
    /// What a code stands for.
    pub code: Code,
    /// Whether groups have an offset.
    pub offsets: bool,
    /// Calls with each group's codes, an unsigned byte a number, their scale and offset.
    read: fn(&[u8], &mut Group),
}

/// What is done with a group: its codes, scale and offset.
type Group<'a> = dyn FnMut([u8; 32], f32, f32) + 'a;

const fn single(
    kind: u32,
    name: &'static str,
    dtype: DType,
    size: usize,
    read: fn(&[u8], &mut Vec<f32>),
) -> Blocks {
    Blocks { kind, name, count: 1, size, plain: Some(dtype), read, codes: None }
}

const fn packed(
    kind: u32,
    name: &'static str,
    count: usize,
    size: usize,
    read: fn(&[u8], &mut Vec<f32>),
    codes: Option<Codes>,
) -> Blocks {
    Blocks { kind, name, count, size, plain: None, read, codes }
}

/// Codes of this kind with the numbers of a scale, and those that have an offset, too.
const fn codes(code: Code, offsets: bool, read: fn(&[u8], &mut Group)) -> Option<Codes> {
    Some(Codes { code, offsets, read })
}

/// Types that are read.
pub static TABLE: [Blocks; 11] = [
    single(0, "F32", DType::F32, 4, |b, out| out.push(DType::F32.decode(b) as f32)),
    single(1, "F16", DType::F16, 2, |b, out| out.push(half_at(b, 0))),
    single(30, "BF16", DType::BF16, 2, |b, out| out.push(DType::BF16.decode(b) as f32)),
    packed(
        2,
        "Q4_0",
        32,
        18,
        |b, out| {
            let d = half_at(b, 0);
            out.extend(halves(&b[2..], 0).map(|q| d * (f32::from(q) - 8.0)));
        },
        codes(Code::Int4, false, |b, to| to(halves(&b[2..], 0), half_at(b, 0), 0.0)),
    ),
    packed(
        3,
        "Q4_1",
        32,
        20,
        |b, out| {
            let (d, m) = (half_at(b, 0), half_at(b, 2));
            out.extend(halves(&b[4..], 0).map(|q| d * f32::from(q) + m));
        },
        codes(Code::Int4, true, |b, to| {
            let (d, m) = (half_at(b, 0), half_at(b, 2));
            to(halves(&b[4..], 0), d, m + 8.0 * d);
        }),
    ),
    packed(
        6,
        "Q5_0",
        32,
        22,
        |b, out| {
            let d = half_at(b, 0);
            out.extend(halves(&b[6..], word(&b[2..])).map(|q| d * (f32::from(q) - 16.0)));
        },
        codes(Code::Int8, false, |b, to| {
            let q = halves(&b[6..], word(&b[2..]));
            to(q.map(|q| q.wrapping_sub(16)), half_at(b, 0), 0.0);
        }),
    ),
    packed(
        7,
        "Q5_1",
        32,
        24,
        |b, out| {
            let (d, m) = (half_at(b, 0), half_at(b, 2));
            out.extend(halves(&b[8..], word(&b[4..])).map(|q| d * f32::from(q) + m));
        },
        codes(Code::Int8, true, |b, to| to(halves(&b[8..], word(&b[4..])), half_at(b, 0), half_at(b, 2))),
    ),
    packed(
        8,
        "Q8_0",
        32,
        34,
        |b, out| {
            let d = half_at(b, 0);
            out.extend(b[2..].iter().map(|q| d * f32::from(*q as i8)));
        },
        codes(Code::Int8, false, |b, to| to(std::array::from_fn(|i| b[2 + i]), half_at(b, 0), 0.0)),
    ),
    packed(
        12,
        "Q4_K",
        256,
        144,
        |b, out| long(b, &[], &b[16..], &mut |q, s, o| out.extend(q.map(|q| s * f32::from(q) + o))),
        codes(Code::Int4, true, |b, to| long(b, &[], &b[16..], &mut |q, s, o| to(q, s, o + 8.0 * s))),
    ),
    packed(
        13,
        "Q5_K",
        256,
        176,
        |b, out| long(b, &b[16..48], &b[48..], &mut |q, s, o| out.extend(q.map(|q| s * f32::from(q) + o))),
        codes(Code::Int8, true, |b, to| long(b, &b[16..48], &b[48..], to)),
    ),
    packed(14, "Q6_K", 256, 210, six, None),
];

impl Blocks {
    /// Bytes of a tensor; none where its rows are no whole blocks, or there are too many.
    pub fn bytes(&self, shape: &[usize]) -> Option<u64> {
        let row = shape.last().copied()?;
        let all = shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d as u64))?;
        let whole = row % self.count == 0 && all > 0;
        (all / self.count as u64).checked_mul(self.size as u64).filter(|_| whole)
    }

    /// The numbers of whole blocks.
    pub fn floats(&self, bytes: &[u8]) -> Vec<f32> {
        let mut out = Vec::with_capacity(bytes.len() / self.size * self.count);
        bytes.chunks_exact(self.size).for_each(|b| (self.read)(b, &mut out));
        out
    }

    /// Appends codes, scales and offsets of whole blocks, as kernels read them; none where they are not codes.
    pub fn parts(&self, bytes: &[u8], [codes, scales, offsets]: &mut [Vec<u8>; 3]) -> Option<()> {
        let of = self.codes.as_ref()?;
        for b in bytes.chunks_exact(self.size) {
            (of.read)(b, &mut |group, scale, offset| {
                match of.code {
                    Code::Int4 => {
                        codes.extend(group.as_chunks::<2>().0.iter().map(|[low, high]| low | high << 4))
                    }
                    _ => codes.extend(group),
                }
                of.scales().encode(f64::from(scale), scales);
                if of.offsets {
                    of.scales().encode(f64::from(offset), offsets);
                }
            });
        }
        Some(())
    }
}

impl Codes {
    /// Type of the scales and offsets: that of the file where it has the very numbers, else f32.
    pub fn scales(&self) -> DType {
        if self.offsets { DType::F32 } else { DType::F16 }
    }
}

fn half_at(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

fn word(b: &[u8]) -> u32 {
    u32::from_le_bytes([b[0], b[1], b[2], b[3]])
}

/// 32 codes of four bits in 16 bytes, and their fifth bits.
fn halves(bytes: &[u8], high: u32) -> [u8; 32] {
    std::array::from_fn(|i| {
        let low = if i < 16 { bytes[i] & 15 } else { bytes[i - 16] >> 4 };
        low | ((high >> i & 1) << 4) as u8
    })
}

/// 256 numbers in groups of 32: scales and offsets of six bits, times those of the block. `high` has the fifth bits, if any.
fn long(b: &[u8], high: &[u8], low: &[u8], each: &mut Group) {
    let (d, m) = (half_at(b, 0), half_at(b, 2));
    let six = &b[4..16];
    for (pair, codes) in low[..128].chunks_exact(32).enumerate() {
        for half in 0..2 {
            let j = 2 * pair + half;
            let (scale, offset) = match j {
                0..4 => (six[j] & 63, six[j + 4] & 63),
                _ => (six[j + 4] & 15 | six[j - 4] >> 6 << 4, six[j + 4] >> 4 | six[j] >> 6 << 4),
            };
            let (scale, offset) = (d * f32::from(scale), m * f32::from(offset));
            let code = |i: usize| {
                let fifth = high.get(i).map_or(0, |h| (h >> j & 1) << 4);
                codes[i] >> (4 * half) & 15 | fifth
            };
            each(std::array::from_fn(code), scale, -offset);
        }
    }
}

/// 256 numbers of six bits in groups of 16 with scales of eight bits.
fn six(b: &[u8], out: &mut Vec<f32>) {
    let d = half_at(b, 208);
    for part in 0..2 {
        let (low, high, scales) = (&b[part * 64..], &b[128 + part * 32..], &b[192 + part * 8..]);
        for quarter in 0..4 {
            for l in 0..32 {
                let four = low[l + quarter % 2 * 32] >> (quarter / 2 * 4) & 15;
                let code = four | (high[l] >> (2 * quarter) & 3) << 4;
                let scale = f32::from(scales[quarter * 2 + l / 16] as i8);
                out.push(d * scale * (f32::from(code) - 32.0));
            }
        }
    }
}
