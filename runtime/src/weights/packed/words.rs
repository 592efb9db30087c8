//! Unsigned integers of a few bits in words of 32. In: words, which axis of a matrix runs through a word. Out: the matrix, a byte a number.

use astrai_ir::Code;

/// Bits of an integer.
pub(in crate::weights) fn bits(code: Code) -> usize {
    if code == Code::Int4 { 4 } else { 8 }
}

/// Which axis of a matrix `[rows, columns]` runs through a word, the first from the lowest bits up.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Along {
    Rows,
    Columns,
}

/// The numbers, row after row, of words of `bits` each; `lanes`, where there are any, say which lane of its word a number of a row stands in.
pub(super) fn unpack(
    bytes: &[u8],
    [rows, columns]: [usize; 2],
    along: Along,
    bits: usize,
    lanes: Option<[usize; 8]>,
) -> Option<Vec<u8>> {
    let (words, per, mask) = (bytes.as_chunks::<4>().0, 32 / bits, (1u32 << bits) - 1);
    let (height, width) = match along {
        Along::Rows => (rows.div_ceil(per), columns),
        Along::Columns => (rows, columns.div_ceil(per)),
    };
    if words.len() != height.checked_mul(width)? {
        return None;
    }
    if let (Along::Columns, 8, None) = (along, bits, lanes) {
        // The lowest bits are a word's first byte.
        let mut out = Vec::with_capacity(rows * columns);
        (0..rows).for_each(|r| out.extend_from_slice(&bytes[r * width * 4..][..columns]));
        return Some(out);
    }
    let lanes: Vec<usize> = (0..per).map(|i| bits * lanes.map_or(i, |l| l[i % 8])).collect();
    let mut out = Vec::with_capacity(rows * columns);
    for r in 0..rows {
        match along {
            Along::Rows => {
                let shift = lanes[r % per];
                let row = &words[r / per * width..][..width];
                out.extend(row.iter().map(|w| (u32::from_le_bytes(*w) >> shift & mask) as u8));
            }
            Along::Columns => {
                let row = &words[r * width..][..width];
                for (i, w) in row.iter().enumerate() {
                    let (word, here) = (u32::from_le_bytes(*w), per.min(columns - i * per));
                    out.extend(lanes[..here].iter().map(|l| (word >> l & mask) as u8));
                }
            }
        }
    }
    Some(out)
}

/// Columns as rows; by tiles, so that both sides stay in a cache.
pub(super) fn transposed<T: Copy + Default>(from: &[T], [rows, columns]: [usize; 2]) -> Vec<T> {
    const TILE: usize = 32;
    let mut to = vec![T::default(); from.len()];
    for first in (0..rows).step_by(TILE) {
        for c in 0..columns {
            for r in first..rows.min(first + TILE) {
                to[c * rows + r] = from[r * columns + c];
            }
        }
    }
    to
}
