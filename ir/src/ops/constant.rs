//! `const`: literal numbers, kept as bits.

use crate::op::{Infer, Inferred, Operator};
use crate::{DType, Dim, Tensor, Type, eval::Eval};
use serde::{Deserialize, Serialize};

/// Literal numbers.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Const {
    /// Element type.
    pub dtype: DType,
    /// Literal sizes, outermost first.
    pub shape: Vec<usize>,
    /// Little-endian bits of the elements, row-major.
    #[serde(with = "hex")]
    pub bits: Vec<u8>,
}

impl Const {
    /// A constant from its value.
    pub fn new(value: &Tensor) -> Const {
        Const { dtype: value.dtype, shape: value.shape.clone(), bits: value.to_bytes() }
    }

    /// A scalar.
    pub fn scalar(dtype: DType, x: f64) -> Const {
        let mut bits = Vec::new();
        dtype.encode(x, &mut bits);
        Const { dtype, shape: vec![], bits }
    }

    /// The number, when there is one element.
    pub fn as_scalar(&self) -> Option<f64> {
        (self.bits.len() == self.dtype.bytes()).then(|| self.dtype.decode(&self.bits))
    }

    /// Element `i`.
    pub fn at(&self, i: usize) -> f64 {
        let n = self.dtype.bytes();
        self.dtype.decode(&self.bits[i * n..(i + 1) * n])
    }
}

impl Operator for Const {
    const NAME: &'static str = "const";
    const FLOPS: usize = 0;

    fn infer(&self, cx: &Infer) -> Inferred {
        let [] = cx.exactly()?;
        let n = self.shape.iter().try_fold(self.dtype.bytes(), |n, &d| n.checked_mul(d));
        if n != Some(self.bits.len()) {
            return Err(format!(
                "{}{:?} does not hold {} bytes of bits",
                self.dtype,
                self.shape,
                self.bits.len()
            ));
        }
        Ok(vec![Type::new(self.dtype, self.shape.iter().map(|&n| Dim::from(n)))])
    }

    fn eval(&self, _: &Eval) -> Result<Vec<Tensor>, String> {
        Tensor::from_bytes(self.dtype, &self.shape, &self.bits).map(|t| vec![t])
    }
}

mod hex {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(bits: &[u8], s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&bits.iter().map(|b| format!("{b:02x}")).collect::<String>())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<u8>, D::Error> {
        let text = String::deserialize(d)?;
        let bad = || D::Error::custom("bits must be pairs of hex digits");
        if !text.len().is_multiple_of(2) || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(bad());
        }
        (0..text.len())
            .step_by(2)
            .map(|i| u8::from_str_radix(&text[i..i + 2], 16).map_err(|_| bad()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::apply;

    #[test]
    fn bits_survive_json() {
        let c = Const::new(&Tensor::f32(&[2], &[1.5, -0.0]));
        let json = serde_json::to_value(&c).unwrap();
        assert_eq!(serde_json::from_value::<Const>(json).unwrap(), c);
        assert_eq!(apply(c, &[])[0].reals(), [1.5, -0.0]);
        for bits in ["0", "+1", "zz", "éé"] {
            let bad = serde_json::json!({"dtype": "u8", "shape": [1], "bits": bits});
            assert!(serde_json::from_value::<Const>(bad).is_err(), "{bits}");
        }
    }
}
