//! Types of values: element type and symbolic shape; and real attributes, which compare by their bits.

use crate::dim::{Dim, Shape};
use crate::dtype::DType;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use std::fmt;

/// Type of a value: element type and shape, outermost dimension first.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Type {
    /// Element type.
    pub dtype: DType,
    /// Sizes, outermost first; empty for a scalar.
    pub shape: Shape,
}

impl Type {
    /// A type from its parts.
    pub fn new(dtype: DType, shape: impl IntoIterator<Item = Dim>) -> Type {
        Type { dtype, shape: shape.into_iter().collect() }
    }

    /// The scalar type.
    pub fn scalar(dtype: DType) -> Type {
        Type { dtype, shape: vec![] }
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// Number of elements.
    pub fn elements(&self) -> Dim {
        Dim::product(&self.shape)
    }

    /// Size in bytes.
    pub fn bytes(&self) -> Dim {
        &self.elements() * &Dim::from(self.dtype.bytes())
    }

    /// The same shape with another element type.
    pub fn with(&self, dtype: DType) -> Type {
        Type { dtype, shape: self.shape.clone() }
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.dtype, show(&self.shape))
    }
}

/// `[tokens, 4, 64]`.
pub fn show(shape: &[Dim]) -> String {
    format!("[{}]", shape.iter().map(Dim::to_string).collect::<Vec<_>>().join(", "))
}

/// A real attribute (a scale, an epsilon), equal and hashed by bits, so that hash-consing never merges different numbers.
#[derive(Clone, Copy)]
pub struct Real(pub f64);

impl PartialEq for Real {
    fn eq(&self, o: &Real) -> bool {
        self.0.to_bits() == o.0.to_bits()
    }
}
impl Eq for Real {}
impl std::hash::Hash for Real {
    fn hash<H: std::hash::Hasher>(&self, h: &mut H) {
        self.0.to_bits().hash(h)
    }
}
impl fmt::Debug for Real {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl Serialize for Real {
    /// `"0.125 3fc0000000000000"`: the decimal number for people, the bits for programs.
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&format!("{:?} {:016x}", self.0, self.0.to_bits()))
    }
}

impl<'de> Deserialize<'de> for Real {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Real, D::Error> {
        let text = String::deserialize(d)?;
        let bits =
            text.split(' ').nth(1).filter(|b| b.len() == 16).and_then(|b| u64::from_str_radix(b, 16).ok());
        let bits = bits.ok_or_else(|| {
            D::Error::custom(format!("`{text}` is not a number followed by its 16 hex digits"))
        })?;
        Ok(Real(f64::from_bits(bits)))
    }
}

impl Serialize for Dim {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Dim {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Dim, D::Error> {
        Dim::parse(&String::deserialize(d)?).map_err(D::Error::custom)
    }
}

impl Serialize for DType {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for DType {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<DType, D::Error> {
        let name = String::deserialize(d)?;
        DType::parse(&name).ok_or_else(|| {
            let all = DType::ALL.map(DType::name).join(", ");
            D::Error::custom(format!("`{name}` is not a dtype; known: {all}"))
        })
    }
}
