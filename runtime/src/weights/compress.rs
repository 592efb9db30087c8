//! A narrow matrix as compressed-tensors has it. In: how it is stored, its codes, scales and offsets. Out: the tensors that stand for it, which
//! [`Packed`](super::Packed) reads again: offsets become zero points, multiples of the scale.

use super::narrow::Quantisation;
use astrai_ir::{Code, DType, Narrow};

/// The format's name, the ends of the tensors' names with their types and shapes.
pub fn compressed_layout(
    narrow: Narrow,
    [n, k]: [usize; 2],
    group: usize,
) -> (&'static str, Vec<(&'static str, DType, Vec<usize>)>) {
    let scales = ("weight_scale", narrow.scales, vec![n, k / group]);
    let zeros = |dtype, rows| narrow.offsets.then(|| ("weight_zero_point", dtype, vec![rows, k / group]));
    match narrow.code {
        Code::Int4 => {
            let codes = ("weight_packed", DType::I32, vec![n, k / 8]);
            let all = [codes, scales, ("weight_shape", DType::I64, vec![2])];
            ("pack-quantized", all.into_iter().chain(zeros(DType::I32, n.div_ceil(8))).collect())
        }
        code => {
            let format = if code == Code::Fp8 { "float-quantized" } else { "int-quantized" };
            let all = [("weight", code.dtype(), vec![n, k]), scales];
            (format, all.into_iter().chain(zeros(DType::I8, n)).collect())
        }
    }
}

/// The bytes of those tensors, in their order.
pub fn compress(narrow: Narrow, [n, k]: [usize; 2], made: Quantisation) -> Vec<Vec<u8>> {
    let points = zero_points(narrow.scales, &made);
    let four = narrow.code == Code::Int4;
    // Codes of four bits fill words from the lowest bits up, as they fill bytes.
    let mut all = vec![made.codes, made.scales];
    if four {
        all.push([n, k].iter().flat_map(|x| (*x as i64).to_le_bytes()).collect());
    }
    if narrow.offsets {
        let groups = points.len() / n.max(1);
        all.push(if four {
            packed_rows(&points, n, groups)
        } else {
            points.iter().map(|z| *z as u8).collect()
        });
    }
    all
}

/// `offset = -scale · zero`; rounding of the offset is far below half a step.
fn zero_points(dtype: DType, made: &Quantisation) -> Vec<i8> {
    let width = dtype.bytes();
    let each = made.offsets.chunks(width).zip(made.scales.chunks(width));
    let zero = |(offset, scale): (&[u8], &[u8])| {
        let zero = -dtype.decode(offset) / dtype.decode(scale);
        // Where the scale is zero so is all else.
        if zero.is_finite() { zero.round() as i8 } else { 0 }
    };
    each.map(zero).collect()
}

/// Numbers of four bits `[n, groups]`, eight rows in a word.
fn packed_rows(points: &[i8], n: usize, groups: usize) -> Vec<u8> {
    let mut words = vec![0u32; n.div_ceil(8) * groups];
    for (i, z) in points.iter().enumerate() {
        let (row, group) = (i / groups, i % groups);
        words[row / 8 * groups + group] |= u32::from((z + 8) as u8 & 15) << (4 * (row % 8));
    }
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}
