//! Block formats. In: blocks of a tensor: groups of a scale and codes each, some with an offset. Out: the numbers that they stand for, f32,
//! computed as ggml does; or the codes themselves, as kernels read them. Codes of blocks of 32 lie in halves: byte `i` has numbers `i` and
//! `i + 16`.

use super::super::mxfp4;
use astrai_ir::{Code, DType};
use half::{bf16, f16};

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
    /// What its elements are.
    pub elements: Elements,
}

/// What a type's elements are.
#[derive(Debug)]
pub enum Elements {
    /// Numbers of their own.
    Plain(DType),
    /// Codes in groups.
    Codes(Codes),
}

/// How a block's groups are codes as kernels read them.
#[derive(Debug)]
pub struct Codes {
    /// What a code stands for.
    pub code: Code,
    /// Numbers of a group.
    pub group: usize,
    /// Whether groups have an offset.
    pub offsets: bool,
    /// Type of the scales and offsets: that of the file where it has the very numbers, else f32.
    pub scales: DType,
    /// The code of zero, as codes are stored.
    zero: u8,
    /// Calls with each group's codes, an unsigned byte a number, their scale and offset.
    read: fn(&[u8], &mut Group),
}

/// What is done with a group: its codes, scale and offset.
type Group<'a> = dyn FnMut(&[u8], f32, f32) + 'a;

const fn single(kind: u32, name: &'static str, dtype: DType, size: usize) -> Blocks {
    Blocks { kind, name, count: 1, size, elements: Elements::Plain(dtype) }
}

const fn packed(kind: u32, name: &'static str, [count, size]: [usize; 2], codes: Codes) -> Blocks {
    Blocks { kind, name, count, size, elements: Elements::Codes(codes) }
}

/// Codes in groups of 32 with scales of f16, of which this one is zero.
const fn even(code: Code, zero: u8, read: fn(&[u8], &mut Group)) -> Codes {
    Codes { code, group: 32, offsets: false, scales: DType::F16, zero, read }
}

/// The same with offsets, so that zero has no code.
const fn offset(code: Code, read: fn(&[u8], &mut Group)) -> Codes {
    Codes { offsets: true, scales: DType::F32, ..even(code, 0, read) }
}

/// Types that are read.
pub static TABLE: [Blocks; 12] = [
    single(0, "F32", DType::F32, 4),
    single(1, "F16", DType::F16, 2),
    single(30, "BF16", DType::BF16, 2),
    packed(2, "Q4_0", [32, 18], even(Code::Int4, 8, |b, to| to(&halves(&b[2..], 0), half_at(b, 0), 0.0))),
    packed(
        3,
        "Q4_1",
        [32, 20],
        offset(Code::Int4, |b, to| to(&halves(&b[4..], 0), half_at(b, 0), half_at(b, 2))),
    ),
    packed(
        6,
        "Q5_0",
        [32, 22],
        even(Code::Int8, 16, |b, to| to(&halves(&b[6..], word(&b[2..])), half_at(b, 0), 0.0)),
    ),
    packed(
        7,
        "Q5_1",
        [32, 24],
        offset(Code::Int8, |b, to| to(&halves(&b[8..], word(&b[4..])), half_at(b, 0), half_at(b, 2))),
    ),
    packed(
        8,
        "Q8_0",
        [32, 34],
        even(Code::Int8, 128, |b, to| {
            to(&std::array::from_fn::<u8, 32, _>(|i| b[2 + i] ^ 128), half_at(b, 0), 0.0);
        }),
    ),
    packed(12, "Q4_K", [256, 144], offset(Code::Int4, |b, to| long(b, &[], &b[16..], to))),
    packed(13, "Q5_K", [256, 176], offset(Code::Int8, |b, to| long(b, &b[16..48], &b[48..], to))),
    packed(14, "Q6_K", [256, 210], Codes { group: 16, scales: DType::F32, ..even(Code::Int8, 32, six) }),
    packed(
        39,
        "MXFP4",
        [32, 17],
        Codes {
            scales: DType::BF16,
            ..even(Code::Fp4, 0, |b, to| to(&halves(&b[1..], 0), mxfp4::scale(b[0]) as f32, 0.0))
        },
    ),
];

impl Codes {
    /// What a code stands for, as it is stored.
    fn value(&self, code: u8) -> f32 {
        match self.code {
            Code::Fp4 => mxfp4::value(code) as f32,
            _ => f32::from(code) - f32::from(self.zero),
        }
    }

    /// Writes a scale or an offset.
    fn put(&self, x: f32, to: &mut &mut [u8]) {
        match self.scales {
            DType::F16 => next(to, 2).copy_from_slice(&f16::from_f32(x).to_le_bytes()),
            DType::BF16 => next(to, 2).copy_from_slice(&bf16::from_f32(x).to_le_bytes()),
            _ => next(to, 4).copy_from_slice(&x.to_le_bytes()),
        }
    }
}

impl Blocks {
    /// Bytes of a tensor; none where its rows are no whole blocks, or there are too many.
    pub fn bytes(&self, shape: &[usize]) -> Option<u64> {
        let row = shape.last().copied()?;
        let all = shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d as u64))?;
        let whole = row % self.count == 0 && all > 0;
        (all / self.count as u64).checked_mul(self.size as u64).filter(|_| whole)
    }

    /// How its blocks are codes, where they are.
    pub fn codes(&self) -> Option<&Codes> {
        if let Elements::Codes(codes) = &self.elements { Some(codes) } else { None }
    }

    /// The numbers of whole blocks.
    pub fn floats(&self, bytes: &[u8]) -> Vec<f32> {
        let mut out = Vec::with_capacity(bytes.len() / self.size * self.count);
        bytes.chunks_exact(self.size).for_each(|b| match &self.elements {
            Elements::Plain(dtype) => out.push(dtype.decode(b) as f32),
            Elements::Codes(of) => (of.read)(b, &mut |group, scale, offset| {
                out.extend(group.iter().map(|q| scale * of.value(*q) + offset));
            }),
        });
        out
    }

    /// Bytes of the codes, scales and offsets of so many bytes of blocks.
    pub fn sizes(&self, bytes: usize) -> [usize; 3] {
        let Some(of) = self.codes() else { return [0; 3] };
        let numbers = bytes / self.size * self.count;
        let scales = numbers / of.group * of.scales.bytes();
        [numbers / of.code.per_element(), scales, if of.offsets { scales } else { 0 }]
    }

    /// Writes codes, scales and offsets of rows of whole blocks, as kernels read them; none where they are not codes.
    pub fn parts<'a>(&self, rows: impl Iterator<Item = &'a [u8]>, to: [&mut [u8]; 3]) -> Option<()> {
        let of = self.codes()?;
        // Codes of four bits count as 8 less than they are stored, those of eight as they are less the code of zero.
        let middle = match of.code {
            Code::Int4 => 8.0,
            _ => f32::from(of.zero),
        };
        let [mut codes, mut scales, mut offsets] = to;
        let mut group = |group: &[u8], scale: f32, offset: f32| {
            let now = next(&mut codes, group.len() / of.code.per_element());
            match of.code.per_element() {
                2 => {
                    let pairs = now.iter_mut().zip(group.as_chunks::<2>().0);
                    pairs.for_each(|(to, [low, high])| *to = low | high << 4);
                }
                _ => now.iter_mut().zip(group).for_each(|(to, q)| *to = q.wrapping_sub(of.zero)),
            }
            of.put(scale, &mut scales);
            if of.offsets {
                of.put(offset + middle * scale, &mut offsets);
            }
        };
        rows.for_each(|row| row.chunks_exact(self.size).for_each(|b| (of.read)(b, &mut group)));
        Some(())
    }
}

/// The next so many bytes of those that are left.
pub fn next<'a>(left: &mut &'a mut [u8], count: usize) -> &'a mut [u8] {
    let (now, rest) = std::mem::take(left).split_at_mut(count);
    *left = rest;
    now
}

fn half_at(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

fn word(b: &[u8]) -> u32 {
    u32::from_le_bytes([b[0], b[1], b[2], b[3]])
}

/// 32 codes of four bits in 16 bytes, and their fifth bits.
fn halves(bytes: &[u8], high: u32) -> [u8; 32] {
    let mut codes = [0; 32];
    let (first, second) = codes.split_at_mut(16);
    for ((low, up), both) in first.iter_mut().zip(second).zip(bytes) {
        (*low, *up) = (both & 15, both >> 4);
    }
    if high != 0 {
        codes.iter_mut().enumerate().for_each(|(i, code)| *code |= ((high >> i & 1) << 4) as u8);
    }
    codes
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
            each(&std::array::from_fn::<u8, 32, _>(code), scale, -offset);
        }
    }
}

/// 256 numbers of six bits in groups of 16 with scales of eight bits.
fn six(b: &[u8], each: &mut Group) {
    let d = half_at(b, 208);
    for part in 0..2 {
        let (low, high, scales) = (&b[part * 64..], &b[128 + part * 32..], &b[192 + part * 8..]);
        for (group, scale) in scales[..8].iter().enumerate() {
            let (quarter, first) = (group / 2, group % 2 * 16);
            let (low, high) = (&low[first + quarter % 2 * 32..][..16], &high[first..][..16]);
            let (four, two) = (quarter / 2 * 4, 2 * quarter);
            let code = |i: usize| low[i] >> four & 15 | (high[i] >> two & 3) << 4;
            each(&std::array::from_fn::<u8, 16, _>(code), d * f32::from(*scale as i8), 0.0);
        }
    }
}
