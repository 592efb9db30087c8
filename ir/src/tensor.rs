//! Tensors of the reference interpreter. In: bytes or numbers with a shape. Out: numbers stored as f64 or i64, each rounded to its
//! element type, so that the interpreter computes with representable values only.

use crate::dtype::DType;

/// Elements of a [`Tensor`].
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// Values of a floating type.
    Float(Vec<f64>),
    /// Values of an integer or bool type.
    Int(Vec<i64>),
}

/// A concrete tensor, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Element type.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// Elements.
    pub data: Data,
}

impl Tensor {
    /// Zeros.
    pub fn zeros(dtype: DType, shape: &[usize]) -> Tensor {
        let n = shape.iter().product();
        let data = if dtype.is_float() { Data::Float(vec![0.0; n]) } else { Data::Int(vec![0; n]) };
        Tensor { dtype, shape: shape.to_vec(), data }
    }

    /// An f32 tensor from numbers (rounded to f32). The number of elements must be the product of `shape`.
    pub fn f32(shape: &[usize], values: &[f32]) -> Tensor {
        Tensor::float(DType::F32, shape, values.iter().map(|&x| x as f64).collect())
    }

    /// A tensor of a floating type; values are rounded to it.
    pub fn float(dtype: DType, shape: &[usize], mut values: Vec<f64>) -> Tensor {
        values.iter_mut().for_each(|x| *x = dtype.round(*x));
        Tensor::exact(dtype, shape, values)
    }

    /// A tensor of a floating type whose values are kept as they are (the interpreter's exact mode).
    pub fn exact(dtype: DType, shape: &[usize], values: Vec<f64>) -> Tensor {
        assert_eq!(values.len(), shape.iter().product::<usize>(), "elements of {shape:?}");
        Tensor { dtype, shape: shape.to_vec(), data: Data::Float(values) }
    }

    /// A tensor of an integer or bool type; values wrap around to it.
    pub fn int(dtype: DType, shape: &[usize], mut values: Vec<i64>) -> Tensor {
        assert_eq!(values.len(), shape.iter().product::<usize>(), "elements of {shape:?}");
        values.iter_mut().for_each(|x| *x = dtype.wrap(*x));
        Tensor { dtype, shape: shape.to_vec(), data: Data::Int(values) }
    }

    /// A tensor from little-endian bytes; `Err` when their number is not what the shape needs.
    pub fn from_bytes(dtype: DType, shape: &[usize], bytes: &[u8]) -> Result<Tensor, String> {
        let n: usize = shape.iter().product();
        if bytes.len() != n * dtype.bytes() {
            return Err(format!(
                "{dtype}{shape:?} needs {} bytes, there are {}",
                n * dtype.bytes(),
                bytes.len()
            ));
        }
        let chunks = bytes.chunks_exact(dtype.bytes());
        let data = if dtype.is_float() {
            Data::Float(chunks.map(|b| dtype.decode(b)).collect())
        } else {
            Data::Int(chunks.map(|b| dtype.decode_int(b)).collect())
        };
        Ok(Tensor { dtype, shape: shape.to_vec(), data })
    }

    /// Little-endian bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.len() * self.dtype.bytes());
        match &self.data {
            Data::Float(v) => v.iter().for_each(|&x| self.dtype.encode(x, &mut out)),
            Data::Int(v) => v.iter().for_each(|&x| match self.dtype {
                DType::I64 => out.extend(x.to_le_bytes()),
                DType::I32 => out.extend((x as i32).to_le_bytes()),
                DType::Bool => out.push((x != 0) as u8),
                _ => out.push(x as u8),
            }),
        }
        out
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match &self.data {
            Data::Float(v) => v.len(),
            Data::Int(v) => v.len(),
        }
    }

    /// True when there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element `i` in row-major order, as a real.
    pub fn at(&self, i: usize) -> f64 {
        match &self.data {
            Data::Float(v) => v[i],
            Data::Int(v) => v[i] as f64,
        }
    }

    /// Element `i` in row-major order, as an integer (floats are truncated).
    pub fn int_at(&self, i: usize) -> i64 {
        match &self.data {
            Data::Float(v) => v[i] as i64,
            Data::Int(v) => v[i],
        }
    }

    /// All elements as reals.
    pub fn reals(&self) -> Vec<f64> {
        (0..self.len()).map(|i| self.at(i)).collect()
    }

    /// The concatenation of the elements of this and of `other`, which has the same element type; one-dimensional.
    pub fn append(&self, other: &Tensor) -> Tensor {
        let data = match (&self.data, &other.data) {
            (Data::Int(a), Data::Int(b)) => Data::Int([a.as_slice(), b].concat()),
            _ => Data::Float([self.reals(), other.reals()].concat()),
        };
        Tensor { dtype: self.dtype, shape: vec![self.len() + other.len()], data }
    }

    /// Elements gathered by row-major position: element `i` of the result is element `from(i)` of this.
    pub fn gather_with(&self, shape: &[usize], from: impl Fn(usize) -> usize) -> Tensor {
        let n: usize = shape.iter().product();
        let data = match &self.data {
            Data::Float(v) => Data::Float((0..n).map(|i| v[from(i)]).collect()),
            Data::Int(v) => Data::Int((0..n).map(|i| v[from(i)]).collect()),
        };
        Tensor { dtype: self.dtype, shape: shape.to_vec(), data }
    }
}

/// Row-major strides of a shape, in elements.
pub fn strides(shape: &[usize]) -> Vec<usize> {
    let mut s = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        s[i - 1] = s[i] * shape[i];
    }
    s
}

/// Index of row-major element `i` of a tensor of this shape.
pub fn unravel(mut i: usize, shape: &[usize]) -> Vec<usize> {
    let mut at = vec![0; shape.len()];
    for d in (0..shape.len()).rev() {
        at[d] = i % shape[d].max(1);
        i /= shape[d].max(1);
    }
    at
}

/// Row-major position of an index.
pub fn ravel(at: &[usize], shape: &[usize]) -> usize {
    at.iter().zip(shape).fold(0, |i, (a, n)| i * n + a)
}
