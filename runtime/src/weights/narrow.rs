//! Round to nearest: narrow weights made of a checkpoint's numbers while they are loaded. In: a source of tensors, how weights are to be
//! stored. Out: the same source, which also gives the codes and scales of each matrix. The scale of a group maps its largest magnitude
//! to the largest code, with an offset the range from its least number to its greatest, zero among them, to all codes; it is rounded to
//! its type before codes are chosen, so that they make up for that.

use crate::pack::convert;
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
    /// Scales and offsets of matrices whose codes were read, by their names.
    kept: Mutex<HashMap<String, Vec<u8>>>,
}

impl Quantised {
    /// Over these tensors.
    pub fn new(inner: Box<dyn WeightSource>, narrow: Narrow) -> Quantised {
        Quantised { inner, narrow, kept: Mutex::default() }
    }

    /// Codes and scales of a matrix, with its rows and their length.
    fn made(&self, name: &str) -> Option<([usize; 2], Quantisation)> {
        let t = self.inner.tensor(name)?;
        let &[n, k] = t.shape.as_slice() else { return None };
        let group = self.narrow.group_of(k)?;
        if !t.dtype.is_float() {
            return None;
        }
        let mut rows = vec![0u8; n * k * 4];
        convert(&mut rows, DType::F32, &t.bytes, t.dtype);
        let rows: Vec<f32> = rows.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        Some(([n, k], quantise(&rows, self.narrow, group)))
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
                for (part, bytes) in [(Part::Scales, &scales), (Part::Offsets, &offsets)] {
                    kept.insert(part.of(plain), bytes.clone());
                }
                let bytes = match part {
                    Part::Codes => codes,
                    Part::Scales => scales,
                    Part::Offsets => offsets,
                };
                (n, bytes)
            }
        };
        let dtype = if part == Part::Codes { self.narrow.code.dtype() } else { self.narrow.scales };
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
}

/// Bytes of codes, scales and offsets.
#[derive(Default)]
pub struct Quantisation {
    /// Codes, row after row.
    pub codes: Vec<u8>,
    /// A scale a group.
    pub scales: Vec<u8>,
    /// An offset a group, where there are any.
    pub offsets: Vec<u8>,
}

/// Rounds groups of `group` numbers to nearest, ties to even, on all cores.
pub fn quantise(numbers: &[f32], narrow: Narrow, group: usize) -> Quantisation {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let each = numbers.len().div_ceil(threads).next_multiple_of(group).max(group);
    let part = |numbers: &[f32]| {
        let mut made = Quantisation { codes: Vec::with_capacity(numbers.len()), ..Quantisation::default() };
        numbers.chunks(group).for_each(|g| one(g, narrow, &mut made));
        made
    };
    let mut all = Quantisation::default();
    std::thread::scope(|s| {
        let parts: Vec<_> = numbers.chunks(each).map(|some| s.spawn(move || part(some))).collect();
        for done in parts {
            // A part that panicked would leave rows out; the panic goes on instead.
            let made = done.join().unwrap_or_else(|p| std::panic::resume_unwind(p));
            all.codes.extend(made.codes);
            all.scales.extend(made.scales);
            all.offsets.extend(made.offsets);
        }
    });
    all
}

/// One group. A number that is none makes its whole group none.
fn one(numbers: &[f32], narrow: Narrow, to: &mut Quantisation) {
    let fold = |pick: fn(f32, f32) -> f32| {
        numbers.iter().fold(0f32, |m, x| if x.is_nan() || m.is_nan() { f32::NAN } else { pick(m, *x) })
    };
    let (least, greatest) = (fold(f32::min), fold(f32::max));
    let [low, high] = narrow.code.range();
    let wanted = match narrow.offsets {
        true => (greatest - least) / (high - low),
        false => least.abs().max(greatest) / narrow.code.most(),
    };
    // The larger of a magnitude and no number is the magnitude.
    let wanted = if least.is_nan() { f32::NAN } else { wanted };
    let scale = narrow.scales.round(f64::from(wanted)) as f32;
    narrow.scales.encode(f64::from(scale), &mut to.scales);
    let steps = |x: f32| if scale > 0.0 { x / scale } else { 0.0 };
    let mut zero = 0.0;
    if narrow.offsets {
        // The code of zero, counted from the middle.
        zero = steps(-least).round_ties_even() + low;
        narrow.scales.encode(f64::from(-zero * scale), &mut to.offsets);
    }
    let least = if narrow.offsets || narrow.code == Code::Int4 { low } else { -narrow.code.most() };
    let whole = |x: &f32| (steps(*x).round_ties_even() + zero).clamp(least, high);
    match narrow.code {
        Code::Int8 => to.codes.extend(numbers.iter().map(|x| whole(x) as i8 as u8)),
        Code::Int4 => to.codes.extend(numbers.as_chunks::<2>().0.iter().map(|pair| {
            let [low, high] = pair.each_ref().map(|x| (whole(x) + 8.0) as u8);
            low | high << 4
        })),
        Code::Fp8 => {
            let value = |x: &f32| f64::from(steps(*x).clamp(least, high));
            numbers.iter().for_each(|x| Code::Fp8.dtype().encode(value(x), &mut to.codes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_number_gets_the_largest_code() {
        let numbers: Vec<f32> = (0..64).map(|i| (i as f32 - 40.0) / 8.0).collect();
        let all = Code::ALL.into_iter().flat_map(|c| [(c, DType::F32, false), (c, DType::BF16, false)]);
        for (code, scales, offsets) in
            all.chain([(Code::Int4, DType::F32, true), (Code::Int8, DType::F32, true)])
        {
            let narrow = Narrow { code, group: 32, scales, offsets };
            let made = quantise(&numbers, narrow, 32);
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
        let narrow = Narrow { code: Code::Int4, group: 32, scales: DType::F32, offsets: false };
        assert_eq!(quantise(&[0.0; 32], narrow, 32).codes, [0x88; 16]);
        let mut numbers = [1.0; 32];
        numbers[5] = f32::NAN;
        assert!(DType::F32.decode(&quantise(&numbers, narrow, 32).scales).is_nan());
    }
}
