//! Matrices in MXFP4 (OCP Microscaling Formats 1.0), as gpt-oss is published. In: a checkpoint with `X_blocks` u8
//! `[.., n, k / 32, 16]`, two numbers of four bits in a byte, the lower first, and `X_scales` u8 `[.., n, k / 32]`, powers of
//! two. Out: `X` bf16 `[.., k, n]`, which holds every such number exactly, one tensor in memory at a time; or its codes `[.. * n, k / 2]` as
//! they lie in the file and their scales, bf16 `[.. * n, k / 32]`.

use crate::source::{Source, WeightSource};
use crate::weights::{Checkpoint, TensorView};
use astrai_ir::narrow::Part;
use astrai_ir::{Code, DType, Narrow};
use std::borrow::Cow;

/// Numbers that share a scale.
const BLOCK: usize = 32;

/// Magnitudes of the lower three bits (E2M1); the fourth is the sign.
const MAGNITUDES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// A checkpoint whose MXFP4 tensors read as bf16 under the names that they stand for.
pub struct Widened(pub Checkpoint);

impl Widened {
    /// The tensors of the file that give one `name` of this shape: itself, or its blocks and scales where those are there.
    pub fn expected(&self, name: String, shape: Vec<usize>) -> Vec<(String, Vec<usize>)> {
        let [blocks, scales] = parts(&name);
        let (true, [front @ .., k, n]) = (self.0.get(&blocks).is_some(), shape.as_slice()) else {
            return vec![(name, shape)];
        };
        let scaled = [front, &[*n, k.div_ceil(BLOCK)]].concat();
        vec![(blocks, [&scaled[..], &[BLOCK / 2]].concat()), (scales, scaled)]
    }
}

impl Widened {
    /// How a tensor can stay in memory, where it is of blocks and scales.
    pub fn narrow(&self, name: &str) -> Option<Narrow> {
        let [blocks, _] = parts(name);
        self.0.get(&blocks)?;
        let (code, scales) = (Code::Fp4, DType::BF16);
        Some(Narrow { code, group: BLOCK, scales, offsets: false, head: None, activations: None })
    }

    /// Codes or scales of a tensor.
    fn part(&self, name: &str, part: Part) -> Option<Source<'_>> {
        let [blocks, scales] = parts(name);
        let scales = self.0.get(&scales)?;
        let across = *scales.shape().last()?;
        let rows = scales.bytes().len().checked_div(across)?;
        match part {
            Part::Codes => {
                let t = self.0.tensor(&blocks)?;
                Some(Source { shape: vec![rows, across * BLOCK / 2], ..t })
            }
            Part::Scales => {
                let bytes = scales
                    .bytes()
                    .iter()
                    .flat_map(|s| half::bf16::from_f64(scale(*s)).to_le_bytes())
                    .collect();
                Some(Source { dtype: DType::BF16, shape: vec![rows, across], bytes: Cow::Owned(bytes) })
            }
            Part::Offsets => None,
        }
    }
}

/// The power of two that has 127 added; 255 is no number.
pub(super) fn scale(exponent: u8) -> f64 {
    if exponent == 255 { f64::NAN } else { 2f64.powi(i32::from(exponent) - 127) }
}

/// What four bits stand for.
pub(super) fn value(four: u8) -> f64 {
    let size = MAGNITUDES[usize::from(four & 7)];
    if four & 8 == 0 { size } else { -size }
}

fn parts(name: &str) -> [String; 2] {
    ["blocks", "scales"].map(|part| format!("{name}_{part}"))
}

impl WeightSource for Widened {
    fn tensor(&self, name: &str) -> Option<Source<'_>> {
        if let Some(plain) = self.0.tensor(name) {
            return Some(plain);
        }
        if let Some((plain, part)) = Part::named(name) {
            return self.part(plain, part);
        }
        let [blocks, scales] = parts(name);
        widen(&self.0.get(&blocks)?, &self.0.get(&scales)?)
    }

    fn done(&self, name: &str) {
        let name = Part::named(name).map_or(name, |(plain, _)| plain);
        match self.0.get(name) {
            Some(_) => self.0.done(name),
            None => parts(name).iter().for_each(|part| self.0.done(part)),
        }
    }
}

/// The bf16 tensor of blocks and scales; `None` where their shapes or types are not those of one.
fn widen(blocks: &TensorView, scales: &TensorView) -> Option<Source<'static>> {
    let [front @ .., n, across] = scales.shape() else { return None };
    let bytes = [DType::U8; 2] == [blocks.dtype(), scales.dtype()];
    if !bytes || *blocks.shape() != [scales.shape(), &[BLOCK / 2]].concat() {
        return None;
    }
    let (n, k) = (*n, across * BLOCK);
    let values = table();
    let mut out = vec![0u8; blocks.bytes().len() * 4];
    let matrix = (n * k).max(1);
    let each = out.chunks_exact_mut(2 * matrix).zip(blocks.bytes().chunks(matrix / 2));
    for ((to, packed), scale) in each.zip(scales.bytes().chunks(matrix / BLOCK)) {
        // Tiles of a block of either axis, for rows become columns.
        for (first, block) in (0..n).step_by(BLOCK).flat_map(|r| (0..*across).map(move |b| (r, b))) {
            for r in first..n.min(first + BLOCK) {
                let at = r * across + block;
                let of = &values[usize::from(scale[at])];
                for (j, byte) in packed[at * BLOCK / 2..][..BLOCK / 2].iter().enumerate() {
                    let row = block * BLOCK + 2 * j;
                    for (row, four) in [(row, byte & 15), (row + 1, byte >> 4)] {
                        to[(row * n + r) * 2..][..2].copy_from_slice(&of[usize::from(four)]);
                    }
                }
            }
        }
    }
    let shape = [front, &[k, n]].concat();
    Some(Source { dtype: DType::BF16, shape, bytes: Cow::Owned(out) })
}

/// The bf16 of four bits under each scale, an exponent of 127 more; 255 is no number.
fn table() -> Vec<[[u8; 2]; 16]> {
    let number = |by: u8, four: usize| half::bf16::from_f64(value(four as u8) * scale(by)).to_le_bytes();
    (0..=255).map(|by| std::array::from_fn(|four| number(by, four))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::write;
    use std::collections::BTreeMap;

    /// Two matrices of three rows and two blocks, and a tensor that is plain.
    #[test]
    fn blocks_and_scales_become_columns() {
        let [groups, n, across] = [2usize, 3, 2];
        let blocks: Vec<u8> = (0..groups * n * across * 16).map(|i| (i * 37 + 11) as u8).collect();
        let scales: Vec<u8> = (0..groups * n * across).map(|i| (120 + i) as u8).collect();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        let tensors: [(&str, DType, &[usize], &[u8]); 3] = [
            ("w_blocks", DType::U8, &[groups, n, across, 16], &blocks),
            ("w_scales", DType::U8, &[groups, n, across], &scales),
            ("plain", DType::U8, &[2], &[1, 2]),
        ];
        write(&path, tensors, &BTreeMap::new()).unwrap();
        let file = Widened(Checkpoint::open(&path).unwrap());
        assert_eq!(file.tensor("plain").unwrap().bytes[..], [1, 2]);
        assert!(file.tensor("w_scales").is_some() && file.tensor("other").is_none());
        let w = file.tensor("w").unwrap();
        assert_eq!((w.dtype, &w.shape[..]), (DType::BF16, &[groups, 64, n][..]));
        for (e, k, r) in (0..groups).flat_map(|e| (0..64).flat_map(move |k| (0..n).map(move |r| (e, k, r)))) {
            let at = (e * n + r) * across + k / 32;
            let byte = blocks[at * 16 + k % 32 / 2];
            let four = if k % 2 == 0 { byte % 16 } else { byte / 16 };
            let (sign, exponent, mantissa) = (four / 8, four / 2 % 4, f64::from(four % 2));
            let magnitude = match exponent {
                0 => mantissa / 2.0,
                x => (1.0 + mantissa / 2.0) * 2f64.powi(i32::from(x) - 1),
            };
            let want = if sign == 1 { -magnitude } else { magnitude };
            let want = want * 2f64.powi(i32::from(scales[at]) - 127);
            assert_eq!(DType::BF16.decode(&w.bytes[((e * 64 + k) * n + r) * 2..][..2]), want, "{e} {k} {r}");
        }
        file.done("w");
        let shapes = file.expected("w".into(), vec![groups, 64, n]);
        let (codes, scales) = (file.tensor("w#codes").unwrap(), file.tensor("w#scales").unwrap());
        assert_eq!((&codes.shape[..], &codes.bytes[..]), (&[groups * n, 32][..], &blocks[..]));
        assert_eq!((scales.dtype, &scales.shape[..]), (DType::BF16, &[groups * n, 2][..]));
        assert_eq!(DType::BF16.decode(&scales.bytes[6..8]), 2f64.powi(123 - 127));
        assert!(file.0.check(&shapes, &|name| name == "plain").is_ok());
        let wrong = file.expected("w".into(), vec![groups, 70, n]);
        let line = file.0.check(&wrong, &|name| name == "plain").unwrap_err().to_string();
        assert!(line.contains("\"w_blocks\" is [2, 3, 2, 16] instead of [2, 3, 3, 16]"), "{line}");
        assert!(DType::BF16.decode(&table()[255][2]).is_nan());
    }
}
