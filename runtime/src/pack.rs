//! Packing of weights into panels. In: rows of a checkpoint tensor in whatever type it has. Out: the same rows, at their place in the
//! joined buffer, in the type and layout that kernels read: row-major, or panels `[n/rows][k/group][rows][group]`; matrices
//! `[groups, k, n]` as those of their transposes, one after another. The layout is data, which a backend chose.

use crate::device::Device;
use astrai_ir::{DType, Layout};
use std::sync::{Mutex, PoisonError};

/// Elements along `k` that are packed before the next row's: of rows far apart, a cache may not hold the lines of all.
const LINE: usize = 32;

/// Rows that one thread packs at once, at least.
const PIECE: usize = 256;

/// Rows of `k` elements, in one type, to be written in another and in a layout.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    /// The elements, row-major.
    pub bytes: &'a [u8],
    /// Their type.
    pub from: DType,
    /// Elements of a row.
    pub k: usize,
    /// Type to be written.
    pub dtype: DType,
    /// Layout to be written.
    pub layout: Layout,
}

impl Rows<'_> {
    /// Writes them to rows `first ..` of `to`, on the threads of a device. Rows of one panel may come in several calls.
    pub fn pack_on(self, device: &dyn Device, to: &mut [u8], first: usize) {
        let width = self.k * self.from.bytes();
        if width == 0 {
            return;
        }
        let panel = match self.layout {
            Layout::Rows => 1,
            Layout::Panels { rows, .. } => rows,
        };
        let piece = PIECE.next_multiple_of(panel);
        let len = layout_bytes(self.layout, self.dtype, &[piece, self.k]);
        let last = first + self.bytes.len() / width;
        let pieces: Vec<(usize, Mutex<&mut [u8]>)> = to
            .chunks_mut(len)
            .enumerate()
            .map(|(i, part)| (i * piece, Mutex::new(part)))
            .filter(|(begin, _)| *begin < last && first < begin + piece)
            .collect();
        device.share(pieces.len(), &|_, some| {
            for (begin, part) in &pieces[some] {
                // Each piece is one thread's; the lock only says so to the compiler.
                let mut part = part.lock().unwrap_or_else(PoisonError::into_inner);
                let (a, b) = (first.max(*begin), last.min(begin + piece));
                let bytes = &self.bytes[(a - first) * width..(b - first) * width];
                Rows { bytes, ..self }.pack(&mut part, a - begin);
            }
        });
    }

    /// Writes them to rows `first ..` of `to`.
    pub fn pack(self, to: &mut [u8], first: usize) {
        let Rows { bytes, from, k, dtype, layout } = self;
        let width = k * from.bytes();
        if width == 0 {
            return;
        }
        let Layout::Panels { rows: panel_rows, group } = layout else {
            let at = first * k * dtype.bytes();
            let n = bytes.len() / from.bytes();
            convert(&mut to[at..at + n * dtype.bytes()], dtype, bytes, from);
            return;
        };
        let mut staged = vec![0u8; if dtype == from { 0 } else { panel_rows * k * dtype.bytes() }];
        let len = layout_bytes(layout, dtype, &[panel_rows, k]);
        let (count, mut done) = (bytes.len() / width, 0);
        while done < count {
            let row = first + done;
            let (panel, lane) = (row / panel_rows, row % panel_rows);
            let n = (panel_rows - lane).min(count - done);
            let mut rows = &bytes[done * width..(done + n) * width];
            if dtype != from {
                let staged = &mut staged[..n * k * dtype.bytes()];
                convert(staged, dtype, rows, from);
                rows = staged;
            }
            interleave(
                &mut to[panel * len..(panel + 1) * len],
                rows,
                lane,
                [panel_rows, group],
                dtype.bytes(),
                k,
            );
            done += n;
        }
    }
}

/// Matrices `[k, n]`, one after another, to be written as the panels of their transposes.
#[derive(Clone, Copy)]
pub struct Matrices<'a> {
    /// The elements.
    pub bytes: &'a [u8],
    /// Their type.
    pub from: DType,
    /// Rows and columns of each.
    pub size: [usize; 2],
    /// Type to be written.
    pub dtype: DType,
    /// Layout to be written.
    pub layout: Layout,
}

impl Matrices<'_> {
    /// Writes them from matrix `first` of `to` on, on the threads of a device.
    pub fn pack_on(self, device: &dyn Device, to: &mut [u8], first: usize) {
        let [k, n] = self.size;
        let (width, len) = (k * n * self.from.bytes(), layout_bytes(self.layout, self.dtype, &[n, k]));
        if width == 0 {
            return;
        }
        let panels = to.chunks_mut(len).skip(first).map(Mutex::new);
        let matrices: Vec<(&[u8], Mutex<&mut [u8]>)> = self.bytes.chunks_exact(width).zip(panels).collect();
        device.share(matrices.len(), &|_, some| {
            for (rows, panels) in &matrices[some] {
                // Each matrix is one thread's; the lock only says so to the compiler.
                let mut panels = panels.lock().unwrap_or_else(PoisonError::into_inner);
                self.transpose(&mut panels, rows);
            }
        });
    }

    /// A matrix `[k, n]` as the panels of its transpose.
    fn transpose(self, panels: &mut [u8], bytes: &[u8]) {
        let Layout::Panels { rows: lanes, group } = self.layout else { return };
        let ([k, n], size) = (self.size, self.dtype.bytes());
        let mut staged = vec![0; n * size];
        let len = layout_bytes(self.layout, self.dtype, &[lanes, k]);
        for (i, row) in bytes.chunks_exact(n * self.from.bytes()).enumerate() {
            convert(&mut staged, self.dtype, row, self.from);
            for (panel, part) in panels.chunks_mut(len).zip(staged.chunks(lanes * size)) {
                let line = &mut panel[(i / group * lanes * group + i % group) * size..];
                if group == 1 {
                    line[..part.len()].copy_from_slice(part);
                    continue;
                }
                for (lane, x) in part.chunks_exact(size).enumerate() {
                    line[lane * group * size..][..size].copy_from_slice(x);
                }
            }
        }
    }
}

/// Element `i` of row `lane + r` goes to `[i/group][lane + r][i%group]` of a panel.
fn interleave(panel: &mut [u8], rows: &[u8], lane: usize, [lanes, group]: [usize; 2], size: usize, k: usize) {
    match (size, group) {
        (4, 1) => groups::<4>(panel, rows, lane, lanes, k * size),
        (2, 2) => groups::<4>(panel, rows, lane, lanes, k * size),
        (2, 1) => groups::<2>(panel, rows, lane, lanes, k * size),
        (1, 1) => groups::<1>(panel, rows, lane, lanes, k * size),
        (1, 4) => groups::<4>(panel, rows, lane, lanes, k * size),
        _ => {
            for (r, row) in rows.chunks_exact(k * size).enumerate() {
                for (i, x) in row.chunks_exact(size).enumerate() {
                    let at = ((i / group * lanes + lane + r) * group + i % group) * size;
                    panel[at..at + size].copy_from_slice(x);
                }
            }
        }
    }
}

/// The same for groups of `N` bytes, of rows of `width` bytes.
fn groups<const N: usize>(panel: &mut [u8], rows: &[u8], lane: usize, lanes: usize, width: usize) {
    for begin in (0..width).step_by(LINE * N) {
        let panel = &mut panel[begin * lanes..];
        for (r, row) in rows.chunks_exact(width).enumerate() {
            let (whole, odd) = row[begin..width.min(begin + LINE * N)].as_chunks::<N>();
            for (i, group) in whole.iter().enumerate() {
                panel[(i * lanes + lane + r) * N..][..N].copy_from_slice(group);
            }
            if !odd.is_empty() {
                panel[(whole.len() * lanes + lane + r) * N..][..odd.len()].copy_from_slice(odd);
            }
        }
    }
}

/// A value that lies in panels, row-major: a matrix `[n, k]`, or matrices `[groups, k, n]`.
pub fn unpack(panels: &[u8], layout: Layout, dtype: DType, shape: &[usize]) -> Vec<u8> {
    let Layout::Panels { rows: lanes, group } = layout else { return panels.to_vec() };
    let width = dtype.bytes();
    let mut rows = Vec::with_capacity(shape.iter().product::<usize>() * width);
    let mut take = |matrix: &[u8], k: usize, r: usize, i: usize| {
        let line = r / lanes * k.div_ceil(group) + i / group;
        let at = ((line * lanes + r % lanes) * group + i % group) * width;
        rows.extend_from_slice(&matrix[at..at + width]);
    };
    if let &[_, k, n] = shape {
        for matrix in panels.chunks_exact(layout_bytes(layout, dtype, &[n, k])) {
            (0..k).for_each(|i| (0..n).for_each(|r| take(matrix, k, r, i)));
        }
        return rows;
    }
    let [n, k] = [0, 1].map(|axis| shape.get(axis).copied().unwrap_or(1));
    (0..n).for_each(|r| (0..k).for_each(|i| take(panels, k, r, i)));
    rows
}

/// Bytes of a value in a layout: of a matrix `[n, k]`, or of matrices `[groups, k, n]`.
pub fn layout_bytes(layout: Layout, dtype: DType, shape: &[usize]) -> usize {
    let Layout::Panels { rows, group } = layout else {
        return shape.iter().product::<usize>() * dtype.bytes();
    };
    let matrix = |n: usize, k: usize| n.next_multiple_of(rows) * k.next_multiple_of(group) * dtype.bytes();
    match *shape {
        [groups, k, n] => groups * matrix(n, k),
        _ => matrix(shape.first().copied().unwrap_or(1), shape.get(1).copied().unwrap_or(1)),
    }
}

/// Elements of one type as another, rounded to nearest even.
pub fn convert(to: &mut [u8], dtype: DType, bytes: &[u8], from: DType) {
    if dtype == from {
        to.copy_from_slice(bytes);
        return;
    }
    let (tw, fw) = (dtype.bytes(), from.bytes());
    match (from, dtype) {
        (DType::BF16, DType::F32) => {
            let both = to.as_chunks_mut::<4>().0.iter_mut().zip(bytes.as_chunks::<2>().0);
            both.for_each(|(t, f)| *t = (u32::from(u16::from_le_bytes(*f)) << 16).to_le_bytes());
        }
        (DType::F32, DType::BF16) => {
            let both = to.as_chunks_mut::<2>().0.iter_mut().zip(bytes.as_chunks::<4>().0);
            both.for_each(|(t, f)| *t = half::bf16::from_f32(f32::from_le_bytes(*f)).to_le_bytes());
        }
        (DType::F32, DType::F16) => {
            let both = to.as_chunks_mut::<2>().0.iter_mut().zip(bytes.as_chunks::<4>().0);
            both.for_each(|(t, f)| *t = half::f16::from_f32(f32::from_le_bytes(*f)).to_le_bytes());
        }
        _ => {
            let mut one = Vec::with_capacity(8);
            to.chunks_exact_mut(tw).zip(bytes.chunks_exact(fw)).for_each(|(t, f)| {
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
    use crate::device::reference::Reference;

    /// Layouts of processors, and others.
    fn layouts() -> [(DType, Layout); 5] {
        let panels = |rows, group| Layout::Panels { rows, group };
        [
            (DType::F32, panels(32, 1)),
            (DType::BF16, panels(32, 2)),
            (DType::BF16, panels(16, 1)),
            (DType::F32, panels(8, 3)),
            (DType::F32, Layout::Rows),
        ]
    }

    fn element(bytes: &[u8], (dtype, layout): (DType, Layout), k: usize, n: usize, i: usize) -> f64 {
        let at = match layout {
            Layout::Rows => n * k + i,
            Layout::Panels { rows, group } => {
                (n / rows * k.div_ceil(group) + i / group) * rows * group + n % rows * group + i % group
            }
        };
        dtype.decode(&bytes[at * dtype.bytes()..][..dtype.bytes()])
    }

    #[test]
    fn every_element_lands_where_kernels_read_it_whatever_the_pieces() {
        let (n, k) = (77usize, 5usize);
        let source: Vec<u8> = (0..n * k).flat_map(|i| (i as f32).to_le_bytes()).collect();
        for (dtype, layout) in layouts() {
            let mut to = vec![0u8; layout_bytes(layout, dtype, &[n, k])];
            let mut row = 0;
            for piece in [1, 30, 3, 40, 3] {
                let bytes = &source[row * k * 4..(row + piece) * k * 4];
                let rows = Rows { bytes, from: DType::F32, k, dtype, layout };
                match piece {
                    40 => rows.pack_on(&Reference::default(), &mut to, row),
                    _ => rows.pack(&mut to, row),
                }
                row += piece;
            }
            for (r, i) in (0..n).flat_map(|r| (0..k).map(move |i| (r, i))) {
                let want = dtype.round((r * k + i) as f64);
                assert_eq!(element(&to, (dtype, layout), k, r, i), want, "{dtype} {layout} {r} {i}");
            }
        }
    }

    #[test]
    fn what_was_packed_unpacks() {
        for (dtype, layout) in layouts() {
            for (n, k) in [(1usize, 1usize), (33, 7), (64, 8)] {
                let bytes: Vec<u8> = (0..n * k * dtype.bytes()).map(|i| i as u8).collect();
                let mut to = vec![0; layout_bytes(layout, dtype, &[n, k])];
                Rows { bytes: &bytes, from: dtype, k, dtype, layout }.pack(&mut to, 0);
                assert_eq!(unpack(&to, layout, dtype, &[n, k]), bytes, "{dtype} {layout} {n} {k}");
            }
        }
    }

    #[test]
    fn matrices_pack_as_their_transposes_would() {
        let [groups, k, n] = [3usize, 5, 64];
        let value = |e: usize, i: usize, r: usize| (e * 1000 + i * 100 + r) as f32;
        let all: Vec<u8> =
            (0..groups * k * n).flat_map(|x| value(x / (k * n), x / n % k, x % n).to_le_bytes()).collect();
        for (dtype, layout) in layouts().into_iter().filter(|(_, l)| l.is_packed()) {
            let len = layout_bytes(layout, dtype, &[n, k]);
            let mut to = vec![0; layout_bytes(layout, dtype, &[groups, k, n])];
            let split = k * n * 4;
            let pack = |bytes, to: &mut [u8], first| {
                let size = [k, n];
                Matrices { bytes, from: DType::F32, size, dtype, layout }.pack_on(
                    &Reference::default(),
                    to,
                    first,
                )
            };
            pack(&all[..split], &mut to, 0);
            pack(&all[split..], &mut to, 1);
            for e in 0..groups {
                let turned: Vec<u8> = (0..n * k).flat_map(|x| value(e, x % k, x / k).to_le_bytes()).collect();
                let mut want = vec![0; len];
                Rows { bytes: &turned, from: DType::F32, k, dtype, layout }.pack(&mut want, 0);
                assert!(to[e * len..(e + 1) * len] == want, "{dtype} {e}");
            }
            let mut rows = vec![0; groups * k * n * dtype.bytes()];
            convert(&mut rows, dtype, &all, DType::F32);
            assert_eq!(unpack(&to, layout, dtype, &[groups, k, n]), rows);
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
