//! Round to nearest: narrow weights made of a checkpoint's numbers while they are loaded. In: a source of tensors, how weights are to be
//! stored. Out: the same source, which also gives the codes and scales of each matrix. The scale of a group maps its largest magnitude
//! to the largest code, with an offset the range from its least number to its greatest, zero among them, to all codes; it is rounded to
//! its type before codes are chosen, so that they make up for that.

use super::view::widen;
use crate::source::{Source, WeightSource};
use astrai_ir::narrow::Part;
use astrai_ir::{Code, DType, Narrow};
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// A source whose matrices can be read as codes and scales.
pub struct Quantised {
    inner: Box<dyn WeightSource>,
    narrow: Narrow,
    /// The matrix that is stored as a head.
    head: String,
    /// Scales and offsets of matrices whose codes were read, by their names.
    kept: Mutex<HashMap<String, Vec<u8>>>,
}

impl Quantised {
    /// Over these tensors, one of which is the head.
    pub fn new(inner: Box<dyn WeightSource>, narrow: Narrow, head: String) -> Quantised {
        Quantised { inner, narrow, head, kept: Mutex::default() }
    }

    /// How a matrix is stored.
    fn narrow_of(&self, name: &str) -> Option<Narrow> {
        if name == self.head { self.narrow.of_head() } else { Some(self.narrow) }
    }

    /// Codes and scales of a matrix, with its rows and their length.
    fn made(&self, name: &str) -> Option<([usize; 2], Quantisation)> {
        let t = self.inner.tensor(name)?;
        let &[n, k] = t.shape.as_slice() else { return None };
        let narrow = self.narrow_of(name)?;
        let group = narrow.group_of(k)?;
        if !t.dtype.is_float() {
            return None;
        }
        Some(([n, k], quantise(&t.bytes, t.dtype, narrow, group)))
    }
}

impl WeightSource for Quantised {
    fn tensor(&self, name: &str) -> Option<Source<'_>> {
        let Some((plain, part)) = Part::named(name) else { return self.inner.tensor(name) };
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let (rows, bytes) = match kept.remove(name) {
            Some(bytes) => (*self.inner.tensor(plain)?.shape.first()?, bytes),
            None => {
                let ([n, _], Quantisation { codes, scales, offsets }) = self.made(plain)?;
                let parts = [(Part::Codes, codes), (Part::Scales, scales), (Part::Offsets, offsets)];
                let mut asked = None;
                for (of, bytes) in parts {
                    match of == part {
                        true => asked = Some(bytes),
                        // Codes are read first, the others soon after.
                        false if of != Part::Codes && !bytes.is_empty() => {
                            _ = kept.insert(of.of(plain), bytes)
                        }
                        false => {}
                    }
                }
                (n, asked?)
            }
        };
        let narrow = self.narrow_of(plain)?;
        let dtype = if part == Part::Codes { narrow.code.dtype() } else { narrow.scales };
        let shape = vec![rows, bytes.len() / dtype.bytes() / rows.max(1)];
        Some(Source { dtype, shape, bytes: Cow::Owned(bytes) })
    }

    fn done(&self, name: &str) {
        match Part::named(name) {
            Some((plain, Part::Codes)) => self.inner.done(plain),
            Some(_) => {}
            None => self.inner.done(name),
        }
    }

    fn loaded(&self) {
        self.inner.loaded();
    }
}

/// Bytes of codes, scales and offsets.
#[derive(Clone, Debug, Default)]
pub struct Quantisation {
    /// Codes, row after row.
    pub codes: Vec<u8>,
    /// A scale a group.
    pub scales: Vec<u8>,
    /// An offset a group, where there are any.
    pub offsets: Vec<u8>,
}

impl Quantisation {
    /// Adds what follows.
    pub(super) fn append(&mut self, more: Quantisation) {
        self.codes.extend(more.codes);
        self.scales.extend(more.scales);
        self.offsets.extend(more.offsets);
    }
}

/// Groups that a thread widens at once.
const PIECE: usize = 64;

/// Rounds groups of `group` numbers of this type to nearest, ties to even, on all cores.
pub fn quantise(numbers: &[u8], dtype: DType, narrow: Narrow, group: usize) -> Quantisation {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (width, per) = (dtype.bytes(), narrow.code.per_element());
    let each = (numbers.len() / width).div_ceil(threads).next_multiple_of(group).max(group);
    let part = |numbers: &[u8], codes: &mut [u8]| {
        let mut made = Quantisation::default();
        let mut wide = vec![0f32; PIECE * group];
        for (piece, codes) in numbers.chunks(PIECE * group * width).zip(codes.chunks_mut(PIECE * group / per))
        {
            let wide = &mut wide[..piece.len() / width];
            widen(piece, dtype, wide);
            wide.chunks(group)
                .zip(codes.chunks_mut(group / per))
                .for_each(|(g, c)| one(g, narrow, c, &mut made));
        }
        made
    };
    let mut all = Quantisation::default();
    // Each thread writes its codes where they are to lie: most of what is made is codes.
    let mut codes = vec![0; numbers.len() / width / per];
    std::thread::scope(|s| {
        let parts = numbers.chunks(each * width).zip(codes.chunks_mut(each / per));
        let parts: Vec<_> = parts.map(|(some, codes)| s.spawn(move || part(some, codes))).collect();
        for done in parts {
            // A part that panicked would leave rows out; the panic goes on instead.
            let made = done.join().unwrap_or_else(|p| std::panic::resume_unwind(p));
            all.append(made);
        }
    });
    Quantisation { codes, ..all }
}

/// What the codes of a group stand for: `scale · (code - zero)`.
#[derive(Clone, Copy)]
pub(super) struct Grid {
    code: Code,
    scale: f32,
    /// What numbers are divided by: that of a scale of zero are all zero.
    by: f32,
    /// The code of zero, counted from the middle; none where there are no offsets.
    zero: Option<i32>,
    /// The least and the greatest code of integers that is taken.
    least: i32,
    most: i32,
}

impl Grid {
    /// That of a group, its range made less by this factor. A number that is none makes the scale none.
    pub(super) fn of(numbers: &[f32], narrow: Narrow, factor: f32) -> Grid {
        // Minimum and maximum pass over what is no number; a sum does not.
        let least = fold(numbers, |x, least| if x < least { x } else { least }) * factor;
        let greatest = fold(numbers, |x, greatest| if x > greatest { x } else { greatest }) * factor;
        let none = fold(numbers, |x, sum| sum + x * 0.0);
        let [low, high] = narrow.code.range();
        let wanted = match narrow.offsets {
            true => (greatest - least) / (high - low),
            false => greatest.max(-least) / narrow.code.most(),
        } + none;
        let scale = narrow.scales.round(f64::from(wanted)) as f32;
        let by = if scale == 0.0 { 1.0 } else { scale };
        let zero = narrow.offsets.then(|| rounded(-least / by) + low as i32);
        let code = narrow.code;
        let bottom = if zero.is_some() || code == Code::Int4 { low } else { -code.most() };
        Grid { code, scale, by, zero, least: bottom as i32, most: high as i32 }
    }

    /// The code nearest to a number, of integers. A loop over it is one of vectors only where nothing in it is a call, and the bounds
    /// are met as floats: the oldest vectors have no minimum of whole numbers.
    #[inline]
    fn whole(self, x: f32) -> i32 {
        let zero = self.zero.unwrap_or(0);
        let (least, most) = ((self.least - zero) as f32, (self.most - zero) as f32);
        let x = x / self.by;
        let x = if x > least { x } else { least };
        rounded(if x < most { x } else { most }) + zero
    }

    /// The value of the code nearest to a number.
    pub(super) fn nearest(self, x: f32) -> f32 {
        match self.code {
            Code::Fp8 => {
                let [low, high] = self.code.range();
                self.code.dtype().round(f64::from((x / self.by).clamp(low, high))) as f32
            }
            _ => self.whole(x) as f32,
        }
    }

    /// The number that the code of this value stands for.
    pub(super) fn number(self, value: f32) -> f32 {
        self.scale * (value - self.zero.unwrap_or(0) as f32)
    }

    /// Writes scale and offset.
    pub(super) fn put(self, narrow: Narrow, to: &mut Quantisation) {
        narrow.scales.encode(f64::from(self.scale), &mut to.scales);
        if let Some(zero) = self.zero {
            narrow.scales.encode(f64::from(-zero as f32 * self.scale), &mut to.offsets);
        }
    }
}

/// One group.
fn one(numbers: &[f32], narrow: Narrow, codes: &mut [u8], to: &mut Quantisation) {
    let grid = Grid::of(numbers, narrow, 1.0);
    grid.put(narrow, to);
    match narrow.code {
        Code::Int8 => codes.iter_mut().zip(numbers).for_each(|(c, x)| *c = grid.whole(*x) as i8 as u8),
        Code::Int4 => {
            // Codes before pairs, so that the first loop is one of vectors.
            for (piece, pairs) in numbers.as_chunks::<16>().0.iter().zip(codes.as_chunks_mut::<8>().0) {
                let mut whole = [0u8; 16];
                whole.iter_mut().zip(piece).for_each(|(c, x)| *c = (grid.whole(*x) + 8) as u8);
                pairs
                    .iter_mut()
                    .zip(whole.as_chunks::<2>().0)
                    .for_each(|(p, [low, high])| *p = low | high << 4);
            }
        }
        // Nothing is rounded to floats of four bits.
        Code::Fp8 | Code::Fp4 => {
            let mut made = Vec::with_capacity(numbers.len());
            let value = |x: &f32| f64::from(grid.nearest(*x));
            numbers.iter().for_each(|x| Code::Fp8.dtype().encode(value(x), &mut made));
            codes.iter_mut().zip(made).for_each(|(c, code)| *c = code);
        }
    }
}

/// What comes of zero and all numbers, eight at a time: such a loop is one of vectors, which a loop for several results at once is not.
#[inline]
fn fold(numbers: &[f32], next: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0f32; 8];
    for some in numbers.as_chunks::<8>().0 {
        lanes.iter_mut().zip(some).for_each(|(lane, x)| *lane = next(*x, *lane));
    }
    lanes.into_iter().fold(0.0, |made, lane| next(lane, made))
}

/// The nearest integer, ties to even, of a magnitude below 2^22: an addition rounds there, which vectors do as well.
#[inline]
fn rounded(x: f32) -> i32 {
    const WHOLE: f32 = 12_582_912.0; // 1.5 * 2^23
    ((x + WHOLE).to_bits() as i32).wrapping_sub(WHOLE.to_bits() as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantised(numbers: &[f32], narrow: Narrow) -> Quantisation {
        let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        quantise(&bytes, DType::F32, narrow, 32)
    }

    #[test]
    fn the_largest_number_gets_the_largest_code() {
        let numbers: Vec<f32> = (0..64).map(|i| (i as f32 - 40.0) / 8.0).collect();
        let all = Code::ALL.into_iter().flat_map(|c| [(c, DType::F32, false), (c, DType::BF16, false)]);
        for (code, scales, offsets) in
            all.chain([(Code::Int4, DType::F32, true), (Code::Int8, DType::F32, true)])
        {
            let narrow = Narrow { code, group: 32, scales, offsets, head: None, activations: None };
            let made = quantised(&numbers, narrow);
            assert_eq!(made.codes.len(), 64 / code.per_element());
            for (i, x) in numbers.iter().enumerate() {
                let width = scales.bytes();
                let scale = scales.decode(&made.scales[i / 32 * width..][..width]);
                let value = match code {
                    Code::Int4 => f64::from(made.codes[i / 2] >> (i % 2 * 4) & 15) - 8.0,
                    _ => code.dtype().decode(&made.codes[i..=i]),
                };
                let offset = match offsets {
                    true => scales.decode(&made.offsets[i / 32 * width..][..width]),
                    false => 0.0,
                };
                let step = if code == Code::Fp8 { (f64::from(*x) / 16.0).abs() } else { scale / 2.0 };
                // The largest of four bits may be clipped by half a step where its scale was rounded down.
                assert!(
                    (scale * value + offset - f64::from(*x)).abs() <= step * 1.1 + 1e-3,
                    "{code:?} {x} {scale} {value}"
                );
            }
        }
    }

    #[test]
    fn zeros_stay_and_no_number_spreads() {
        let narrow = Narrow {
            code: Code::Int4,
            group: 32,
            scales: DType::F32,
            offsets: false,
            head: None,
            activations: None,
        };
        assert_eq!(quantised(&[0.0; 32], narrow).codes, [0x88; 16]);
        let mut numbers = [1.0; 32];
        numbers[5] = f32::NAN;
        assert!(DType::F32.decode(&quantised(&numbers, narrow).scales).is_nan());
    }
}
