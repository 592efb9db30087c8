//! Packing of weights into panels. In: rows of a checkpoint tensor in whatever type it has. Out: the same rows, at their
//! place in the joined buffer, in the type and layout that kernels read: row-major, or panels of 32 rows (f32
//! `[n/32][k][32]`, bf16 `[n/32][k/2][32][2]`); matrices `[groups, k, n]` as those of their transposes, one after another.

use crate::pool::Pool;
use astrai_ir::{DType, Layout};
use std::sync::{Mutex, PoisonError};

/// Rows in a panel.
pub const PANEL: usize = 32;

/// Elements of bf16 in a line of the caches.
const LINE: usize = 32;

/// Rows that one thread packs at once, whole panels.
const PIECE: usize = 8 * PANEL;

/// As [`pack`], on all threads of a pool; the rows come with their type.
pub fn pack_on(
    pool: &Pool,
    to: &mut [u8],
    dtype: DType,
    layout: Layout,
    first: usize,
    k: usize,
    (bytes, from): (&[u8], DType),
) {
    let width = k * from.bytes();
    if width == 0 {
        return;
    }
    let len = if layout == Layout::Rows { PIECE * k * dtype.bytes() } else { panel_bytes(dtype, PIECE, k) };
    let last = first + bytes.len() / width;
    let pieces: Vec<(usize, Mutex<&mut [u8]>)> = to
        .chunks_mut(len)
        .enumerate()
        .map(|(i, piece)| (i * PIECE, Mutex::new(piece)))
        .filter(|(begin, _)| *begin < last && first < begin + PIECE)
        .collect();
    pool.run(pieces.len(), &|_, some| {
        for (begin, piece) in &pieces[some] {
            // Each piece is one thread's; the lock only says so to the compiler.
            let mut piece = piece.lock().unwrap_or_else(PoisonError::into_inner);
            let (a, b) = (first.max(*begin), last.min(begin + PIECE));
            let bytes = &bytes[(a - first) * width..(b - first) * width];
            pack(&mut piece, dtype, layout, a - begin, k, bytes, from);
        }
    });
}

/// Writes `rows` rows of `k` elements (`bytes`, of type `from`) to rows `first ..` of `to`. Rows of one panel may come in
/// several calls.
pub fn pack(to: &mut [u8], dtype: DType, layout: Layout, first: usize, k: usize, bytes: &[u8], from: DType) {
    let width = k * from.bytes();
    if width == 0 {
        return;
    }
    if layout == Layout::Rows {
        let at = first * k * dtype.bytes();
        let n = bytes.len() / from.bytes();
        convert(&mut to[at..at + n * dtype.bytes()], dtype, bytes, from);
        return;
    }
    let mut staged = vec![0u8; PANEL * k * dtype.bytes()];
    let count = bytes.len() / width;
    let mut done = 0;
    while done < count {
        let row = first + done;
        let (panel, lane) = (row / PANEL, row % PANEL);
        let n = (PANEL - lane).min(count - done);
        let mut rows = &bytes[done * width..(done + n) * width];
        if dtype != from {
            let staged = &mut staged[..n * k * dtype.bytes()];
            convert(staged, dtype, rows, from);
            rows = staged;
        }
        let len = panel_bytes(dtype, PANEL, k);
        let panel = &mut to[panel * len..(panel + 1) * len];
        match dtype {
            DType::BF16 => interleave(panel, rows, lane, n, k),
            _ => spread(panel, rows, lane, n, k),
        }
        done += n;
    }
}

/// Writes matrices `[k, n]` (of type `from`, one after another) as the panels of their transposes, from matrix `first` of `to`
/// on; on all threads of a pool, if there is one.
pub fn pack_matrices(
    pool: Option<&Pool>,
    to: &mut [u8],
    dtype: DType,
    first: usize,
    [k, n]: [usize; 2],
    (bytes, from): (&[u8], DType),
) {
    let (width, len) = (k * n * from.bytes(), panel_bytes(dtype, n, k));
    if width == 0 {
        return;
    }
    let matrices: Vec<(&[u8], Mutex<&mut [u8]>)> =
        bytes.chunks_exact(width).zip(to.chunks_mut(len).skip(first).map(Mutex::new)).collect();
    let one = |(rows, panels): &(&[u8], Mutex<&mut [u8]>)| {
        // Each matrix is one thread's; the lock only says so to the compiler.
        let mut panels = panels.lock().unwrap_or_else(PoisonError::into_inner);
        transpose(&mut panels, dtype, [k, n], rows, from);
    };
    match pool {
        Some(pool) => pool.run(matrices.len(), &|_, some| matrices[some].iter().for_each(one)),
        None => matrices.iter().for_each(one),
    }
}

/// A matrix `[k, n]` as the panels of its transpose.
fn transpose(panels: &mut [u8], dtype: DType, [k, n]: [usize; 2], bytes: &[u8], from: DType) {
    let (width, size) = (n * from.bytes(), dtype.bytes());
    let mut staged = vec![0; n * size];
    for (i, row) in bytes.chunks_exact(width).enumerate() {
        convert(&mut staged, dtype, row, from);
        for (panel, lanes) in panels.chunks_mut(panel_bytes(dtype, PANEL, k)).zip(staged.chunks(PANEL * size))
        {
            match dtype {
                DType::BF16 => {
                    let line = &mut panel[i / 2 * PANEL * 4 + i % 2 * 2..];
                    for (lane, x) in lanes.chunks_exact(2).enumerate() {
                        line[lane * 4..lane * 4 + 2].copy_from_slice(x);
                    }
                }
                _ => panel[i * PANEL * size..][..lanes.len()].copy_from_slice(lanes),
            }
        }
    }
}

/// f32: element k of row `lane + r` goes to `[k][lane + r]`.
fn spread(panel: &mut [u8], rows: &[u8], lane: usize, n: usize, k: usize) {
    for i in 0..k {
        let line = &mut panel[i * PANEL * 4..(i + 1) * PANEL * 4];
        for r in 0..n {
            let from = (r * k + i) * 4;
            line[(lane + r) * 4..(lane + r) * 4 + 4].copy_from_slice(&rows[from..from + 4]);
        }
    }
}

/// bf16: elements k and k + 1 of row `lane + r` go to `[k/2][lane + r][0..2]`.
fn interleave(panel: &mut [u8], rows: &[u8], lane: usize, n: usize, k: usize) {
    // A line of a row after the other: of rows far apart, a cache may not hold the lines of all.
    for begin in (0..k).step_by(LINE) {
        let panel = &mut panel[begin / 2 * PANEL * 4..];
        for r in 0..n {
            let row = &rows[(r * k + begin) * 2..(r * k + k.min(begin + LINE)) * 2];
            let (pairs, odd) = row.as_chunks::<4>();
            for (i, pair) in pairs.iter().enumerate() {
                panel[(i * PANEL + lane + r) * 4..][..4].copy_from_slice(pair);
            }
            if !odd.is_empty() {
                panel[(pairs.len() * PANEL + lane + r) * 4..][..odd.len()].copy_from_slice(odd);
            }
        }
    }
}

/// A matrix `[n, k]`, or matrices `[groups, k, n]`, that lie in panels, row-major.
pub fn unpack(panels: &[u8], dtype: DType, shape: &[usize]) -> Vec<u8> {
    let width = dtype.bytes();
    let mut rows = Vec::with_capacity(shape.iter().product::<usize>() * width);
    if let &[_, k, n] = shape {
        for one in panels.chunks_exact(panel_bytes(dtype, n, k)) {
            for (i, r) in (0..k).flat_map(|i| (0..n).map(move |r| (i, r))) {
                rows.extend_from_slice(&one[panel_element(dtype, k, r, i) * width..][..width]);
            }
        }
        return rows;
    }
    let [n, k] = [0, 1].map(|axis| shape.get(axis).copied().unwrap_or(1));
    for r in 0..n {
        for i in 0..k {
            let at = panel_element(dtype, k, r, i) * width;
            rows.extend_from_slice(&panels[at..at + width]);
        }
    }
    rows
}

/// Position in its panels of element `i` of row `r`.
fn panel_element(dtype: DType, k: usize, r: usize, i: usize) -> usize {
    let (panel, lane) = (r / PANEL, r % PANEL);
    match dtype {
        DType::BF16 => (panel * k.div_ceil(2) + i / 2) * PANEL * 2 + lane * 2 + i % 2,
        _ => (panel * k + i) * PANEL + lane,
    }
}

/// Bytes of a matrix `[n, k]` in panels.
pub fn panel_bytes(dtype: DType, n: usize, k: usize) -> usize {
    let k = if dtype == DType::BF16 { k.next_multiple_of(2) } else { k };
    n.next_multiple_of(PANEL) * k * dtype.bytes()
}

/// Bytes in panels of a matrix `[n, k]`, or of matrices `[groups, k, n]`.
pub fn packed_bytes(dtype: DType, shape: &[usize]) -> usize {
    match *shape {
        [groups, k, n] => groups * panel_bytes(dtype, n, k),
        _ => panel_bytes(dtype, shape.first().copied().unwrap_or(1), shape.get(1).copied().unwrap_or(1)),
    }
}

/// Elements of one type as another, rounded to nearest even.
pub fn convert(to: &mut [u8], dtype: DType, bytes: &[u8], from: DType) {
    if dtype == from {
        to.copy_from_slice(bytes);
        return;
    }
    let (tw, fw) = (dtype.bytes(), from.bytes());
    let pairs = to.chunks_exact_mut(tw).zip(bytes.chunks_exact(fw));
    match (from, dtype) {
        (DType::BF16, DType::F32) => pairs.for_each(|(t, f)| t.copy_from_slice(&[0, 0, f[0], f[1]])),
        (DType::F32, DType::BF16) => pairs.for_each(|(t, f)| {
            let x = half::bf16::from_f32(f32::from_le_bytes([f[0], f[1], f[2], f[3]]));
            t.copy_from_slice(&x.to_le_bytes());
        }),
        _ => {
            let mut one = Vec::with_capacity(8);
            pairs.for_each(|(t, f)| {
                one.clear();
                dtype.encode(from.decode(f), &mut one);
                t.copy_from_slice(&one);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn element(panels: &[u8], dtype: DType, k: usize, n: usize, i: usize) -> f64 {
        let at = match dtype {
            DType::BF16 => (n / 32 * k.div_ceil(2) * 64 + i / 2 * 64 + n % 32 * 2 + i % 2) * 2,
            _ => (n / 32 * k * 32 + i * 32 + n % 32) * 4,
        };
        dtype.decode(&panels[at..at + dtype.bytes()])
    }

    #[test]
    fn every_element_lands_where_kernels_read_it_whatever_the_pieces() {
        let (n, k) = (77usize, 5usize);
        let source: Vec<u8> = (0..n * k).flat_map(|i| (i as f32).to_le_bytes()).collect();
        for dtype in [DType::F32, DType::BF16] {
            let mut to = vec![0u8; 96 * k.next_multiple_of(2) * dtype.bytes()];
            let mut row = 0;
            for piece in [1, 30, 3, 40, 3] {
                let bytes = &source[row * k * 4..(row + piece) * k * 4];
                pack(&mut to, dtype, Layout::Panels, row, k, bytes, DType::F32);
                row += piece;
            }
            for r in 0..n {
                for i in 0..k {
                    assert_eq!(
                        element(&to, dtype, k, r, i),
                        dtype.round((r * k + i) as f64),
                        "{dtype} {r} {i}"
                    );
                }
            }
        }
    }

    #[test]
    fn what_was_packed_unpacks() {
        for dtype in [DType::F32, DType::BF16] {
            for (n, k) in [(1usize, 1usize), (33, 7), (64, 8)] {
                let bytes: Vec<u8> = (0..n * k * dtype.bytes()).map(|i| i as u8).collect();
                let mut to = vec![0; panel_bytes(dtype, n, k)];
                pack(&mut to, dtype, Layout::Panels, 0, k, &bytes, dtype);
                assert_eq!(unpack(&to, dtype, &[n, k]), bytes, "{dtype} {n} {k}");
            }
        }
    }

    #[test]
    fn matrices_pack_as_their_transposes_would() {
        let [groups, k, n] = [3usize, 5, 64];
        let value = |e: usize, i: usize, r: usize| (e * 1000 + i * 100 + r) as f32;
        let all: Vec<u8> =
            (0..groups * k * n).flat_map(|x| value(x / (k * n), x / n % k, x % n).to_le_bytes()).collect();
        for dtype in [DType::F32, DType::BF16] {
            let len = panel_bytes(dtype, n, k);
            let mut to = vec![0; packed_bytes(dtype, &[groups, k, n])];
            let split = k * n * 4;
            pack_matrices(None, &mut to, dtype, 0, [k, n], (&all[..split], DType::F32));
            let pool = Pool::new(2).unwrap();
            pack_matrices(Some(&pool), &mut to, dtype, 1, [k, n], (&all[split..], DType::F32));
            for e in 0..groups {
                let turned: Vec<u8> = (0..n * k).flat_map(|x| value(e, x % k, x / k).to_le_bytes()).collect();
                let mut want = vec![0; len];
                pack(&mut want, dtype, Layout::Panels, 0, k, &turned, DType::F32);
                assert!(to[e * len..(e + 1) * len] == want, "{dtype} {e}");
            }
            let mut rows = vec![0; groups * k * n * dtype.bytes()];
            convert(&mut rows, dtype, &all, DType::F32);
            assert_eq!(unpack(&to, dtype, &[groups, k, n]), rows);
        }
    }

    #[test]
    fn conversions_round_to_nearest_even() {
        let mut to = [0u8; 2];
        convert(&mut to, DType::BF16, &(1.0 + 2f32.powi(-8)).to_le_bytes(), DType::F32);
        assert_eq!(DType::BF16.decode(&to), 1.0);
        let mut to = [0u8; 4];
        convert(&mut to, DType::F32, &half::f16::from_f32(0.333).to_le_bytes(), DType::F16);
        assert_eq!(DType::F32.decode(&to), half::f16::from_f32(0.333).to_f64());
    }
}
