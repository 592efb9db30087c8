//! Tensors as bytes, at the border between the user and a session.

use astrai_ir::{DType, Tensor};

/// A tensor in host memory, row-major, little-endian.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// Element type.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// Elements.
    pub bytes: Vec<u8>,
}

impl Value {
    /// An i32 tensor.
    pub fn i32(shape: &[usize], values: &[i32]) -> Value {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Value { dtype: DType::I32, shape: shape.to_vec(), bytes }
    }

    /// An f32 tensor.
    pub fn f32(shape: &[usize], values: &[f32]) -> Value {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Value { dtype: DType::F32, shape: shape.to_vec(), bytes }
    }

    /// Elements as f32, whatever the type.
    pub fn to_f32(&self) -> Vec<f32> {
        let chunks = self.bytes.chunks_exact(self.dtype.bytes());
        match self.dtype {
            DType::F32 => chunks.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            DType::BF16 => {
                chunks.map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)).collect()
            }
            d => chunks.map(|b| d.decode(b) as f32).collect(),
        }
    }

    /// The interpreter's form.
    pub fn to_tensor(&self) -> Result<Tensor, String> {
        Tensor::from_bytes(self.dtype, &self.shape, &self.bytes)
    }

    /// From the interpreter's form.
    pub fn from_tensor(t: &Tensor) -> Value {
        Value { dtype: t.dtype, shape: t.shape.clone(), bytes: t.to_bytes() }
    }
}
