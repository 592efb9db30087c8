//! A narrow matrix as compressed-tensors has it. In: how it is stored, its codes, scales and offsets. Out: the tensors that stand for it,
//! which [`Packed`](super::Packed) reads again: offsets become zero points, multiples of the scale. Integers of eight bits are packed as
//! those of four are, for that is the form in which other programs compute with them without rounding inputs as well.

use super::narrow::Quantisation;
use super::packed::bits;
use astrai_ir::{Code, DType, Narrow};

/// Name behind the module's, type and shape of a tensor.
pub type StoredAs = (&'static str, DType, Vec<usize>);

/// The format's name, the ends of the tensors' names with their types and shapes.
pub fn compressed_layout(narrow: Narrow, [n, k]: [usize; 2], group: usize) -> (&'static str, Vec<StoredAs>) {
    let scales = ("weight_scale", narrow.scales, vec![n, k / group]);
    if narrow.code == Code::Fp8 {
        return ("float-quantized", vec![("weight", narrow.code.dtype(), vec![n, k]), scales]);
    }
    let per = 32 / bits(narrow.code);
    let codes = ("weight_packed", DType::I32, vec![n, k / per]);
    let mut all = vec![codes, scales, ("weight_shape", DType::I64, vec![2])];
    if narrow.offsets {
        all.push(("weight_zero_point", DType::I32, vec![n.div_ceil(per), k / group]));
    }
    ("pack-quantized", all)
}

/// The bytes of those tensors, in their order.
pub fn compress(narrow: Narrow, [n, k]: [usize; 2], made: Quantisation) -> Vec<Vec<u8>> {
    let points = narrow.offsets.then(|| zero_points(narrow, n, &made));
    let mut codes = made.codes;
    if narrow.code == Code::Int8 {
        codes.iter_mut().for_each(|c| *c ^= 0x80);
    }
    // Codes fill words from the lowest bits up, as they fill bytes.
    let mut all = vec![codes, made.scales];
    if narrow.code != Code::Fp8 {
        all.push([n, k].iter().flat_map(|x| (*x as i64).to_le_bytes()).collect());
    }
    all.extend(points);
    all
}

/// `offset = -scale · zero`, whose rounding is far below half a step; in words along the `n` rows, the middle of the range added.
fn zero_points(narrow: Narrow, n: usize, made: &Quantisation) -> Vec<u8> {
    let (dtype, bits) = (narrow.scales, bits(narrow.code));
    let (width, per, [least, most]) = (dtype.bytes(), 32 / bits, narrow.code.range());
    let groups = made.scales.len() / width / n.max(1);
    let mut words = vec![0u32; n.div_ceil(per) * groups];
    let each = made.offsets.chunks(width).zip(made.scales.chunks(width));
    for (i, (offset, scale)) in each.enumerate() {
        let zero = (-dtype.decode(offset) / dtype.decode(scale)).round();
        // Where the scale is zero so is all else.
        let zero = if zero.is_finite() { zero.clamp(f64::from(least), f64::from(most)) } else { 0.0 };
        let (row, group) = (i / groups, i % groups);
        words[row / per * groups + group] |= ((zero - f64::from(least)) as u32) << (bits * (row % per));
    }
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}
