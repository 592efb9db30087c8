//! Block formats. In: blocks of a tensor, a scale and codes each, some with an offset. Out: the numbers that they stand for, f32, computed as
//! ggml does. Codes of blocks of 32 lie in halves: byte `i` has numbers `i` and `i + 16`.

use astrai_ir::DType;
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
}

const fn single(
    kind: u32,
    name: &'static str,
    dtype: DType,
    size: usize,
    read: fn(&[u8], &mut Vec<f32>),
) -> Blocks {
    Blocks { kind, name, count: 1, size, plain: Some(dtype), read }
}

const fn packed(
    kind: u32,
    name: &'static str,
    count: usize,
    size: usize,
    read: fn(&[u8], &mut Vec<f32>),
) -> Blocks {
    Blocks { kind, name, count, size, plain: None, read }
}

/// Types that are read.
pub static TABLE: [Blocks; 11] = [
    single(0, "F32", DType::F32, 4, |b, out| out.push(DType::F32.decode(b) as f32)),
    single(1, "F16", DType::F16, 2, |b, out| out.push(half_at(b, 0))),
    single(30, "BF16", DType::BF16, 2, |b, out| out.push(DType::BF16.decode(b) as f32)),
    packed(2, "Q4_0", 32, 18, |b, out| {
        let d = half_at(b, 0);
        halves(&b[2..], out, |q, _| d * (f32::from(q) - 8.0));
    }),
    packed(3, "Q4_1", 32, 20, |b, out| {
        let (d, m) = (half_at(b, 0), half_at(b, 2));
        halves(&b[4..], out, |q, _| d * f32::from(q) + m);
    }),
    packed(6, "Q5_0", 32, 22, |b, out| {
        let (d, high) = (half_at(b, 0), word(&b[2..]));
        halves(&b[6..], out, |q, i| d * (f32::from(q | fifth(high, i)) - 16.0));
    }),
    packed(7, "Q5_1", 32, 24, |b, out| {
        let (d, m, high) = (half_at(b, 0), half_at(b, 2), word(&b[4..]));
        halves(&b[8..], out, |q, i| d * f32::from(q | fifth(high, i)) + m);
    }),
    packed(8, "Q8_0", 32, 34, |b, out| {
        let d = half_at(b, 0);
        out.extend(b[2..].iter().map(|q| d * f32::from(*q as i8)));
    }),
    packed(12, "Q4_K", 256, 144, |b, out| long(b, &[], &b[16..], out)),
    packed(13, "Q5_K", 256, 176, |b, out| long(b, &b[16..48], &b[48..], out)),
    packed(14, "Q6_K", 256, 210, six),
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
}

fn half_at(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

fn word(b: &[u8]) -> u32 {
    u32::from_le_bytes([b[0], b[1], b[2], b[3]])
}

/// The fifth bit of number `i`.
fn fifth(high: u32, i: usize) -> u8 {
    ((high >> i & 1) << 4) as u8
}

/// 32 numbers of codes of four bits in 16 bytes.
fn halves(bytes: &[u8], out: &mut Vec<f32>, number: impl Fn(u8, usize) -> f32) {
    let bytes = &bytes[..16];
    out.extend(bytes.iter().enumerate().map(|(i, b)| number(b & 15, i)));
    out.extend(bytes.iter().enumerate().map(|(i, b)| number(b >> 4, i + 16)));
}

/// 256 numbers in groups of 32: scales and offsets of six bits, times those of the block. `high` has the fifth bits, if any.
fn long(b: &[u8], high: &[u8], low: &[u8], out: &mut Vec<f32>) {
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
            out.extend(codes.iter().enumerate().map(|(i, code)| {
                let fifth = high.get(i).map_or(0, |h| (h >> j & 1) << 4);
                scale * f32::from(code >> (4 * half) & 15 | fifth) - offset
            }));
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
