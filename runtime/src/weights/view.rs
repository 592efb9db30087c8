//! In: the checked bytes of one tensor. Out: its elements as f32 or i64. Bytes may lie at any address (the format does not
//! align data), so elements are assembled from bytes, never cast.

use std::fmt;
use std::path::Path;

use astrai_ir::DType;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};

use super::error::{WeightsError, quote};

/// One tensor of an open checkpoint; `bytes` holds exactly `shape` elements of `dtype`, row-major, little-endian.
#[derive(Clone, Copy)]
pub struct TensorView<'a> {
    pub(super) path: &'a Path,
    pub(super) name: &'a str,
    pub(super) dtype: DType,
    pub(super) shape: &'a [usize],
    pub(super) bytes: &'a [u8],
}

impl fmt::Debug for TensorView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} {:?}", quote(self.name), self.dtype, self.shape)
    }
}

impl<'a> TensorView<'a> {
    /// The tensor's name in the checkpoint.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// Type of the stored elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Dimensions, outermost first; empty for a scalar.
    pub fn shape(&self) -> &'a [usize] {
        self.shape
    }

    /// The stored bytes: row-major, little-endian, at any alignment.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.bytes.len() / self.dtype.bytes()
    }

    /// All elements of a float tensor, widened exactly to f32.
    ///
    /// # Errors
    /// The tensor is of integers, or `out` has not its number of elements.
    pub fn to_f32(&self, out: &mut [f32]) -> Result<(), WeightsError> {
        if !self.dtype.is_float() {
            return Err(self.refused(format!("floats are wanted, {} is stored", self.dtype)));
        }
        let (bytes, elements) = (self.bytes, self.elements());
        if out.len() != elements {
            return Err(self.refused(format!("{elements} elements do not fit a buffer of {}", out.len())));
        }
        widen(bytes, self.dtype, out);
        Ok(())
    }

    /// All elements of an integer or bool tensor.
    ///
    /// # Errors
    /// The tensor is of floats.
    pub fn to_i64(&self) -> Result<Vec<i64>, WeightsError> {
        if self.dtype.is_float() {
            return Err(self.refused(format!("integers are wanted, {} is stored", self.dtype)));
        }
        Ok(self.bytes.chunks_exact(self.dtype.bytes()).map(|b| self.dtype.decode_int(b)).collect())
    }

    fn refused(&self, trouble: String) -> WeightsError {
        WeightsError::refused(self.path, format!("tensor {}: {trouble}", quote(self.name)))
    }
}

/// `out.len()` numbers of a float type as f32, exactly.
pub(super) fn widen(bytes: &[u8], dtype: DType, out: &mut [f32]) {
    match dtype {
        DType::F32 => {
            for (x, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *x = f32::from_le_bytes(*b);
            }
        }
        DType::BF16 => {
            for (x, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *x = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
            }
        }
        DType::F16 => widen_f16(bytes, out),
        _ => {
            let table: [f32; 256] = std::array::from_fn(|b| dtype.decode(&[b as u8]) as f32);
            for (x, b) in out.iter_mut().zip(bytes) {
                *x = table[usize::from(*b)];
            }
        }
    }
}

/// `bytes` are `out.len()` binary16 numbers. By blocks, because the vector conversion wants aligned input.
fn widen_f16(bytes: &[u8], out: &mut [f32]) {
    let mut bits = [0u16; 1024];
    for (to, from) in out.chunks_mut(bits.len()).zip(bytes.chunks(2 * bits.len())) {
        let bits = &mut bits[..to.len()];
        for (h, b) in bits.iter_mut().zip(from.as_chunks::<2>().0) {
            *h = u16::from_le_bytes(*b);
        }
        bits.reinterpret_cast::<half::f16>().convert_to_f32_slice(to);
    }
}
