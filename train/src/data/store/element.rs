//! Types of numbers, by the names of NumPy and PyTorch.

use serde::Serialize;

/// How numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "the names say it")]
pub enum Element {
    Bool,
    Int8,
    Uint8,
    Int16,
    Uint16,
    Int32,
    Uint32,
    Int64,
    Uint64,
    Float32,
    Float64,
}

/// Every type of number with its name and its bytes.
const ELEMENTS: [(Element, &str, usize); 11] = [
    (Element::Bool, "bool", 1),
    (Element::Int8, "int8", 1),
    (Element::Uint8, "uint8", 1),
    (Element::Int16, "int16", 2),
    (Element::Uint16, "uint16", 2),
    (Element::Int32, "int32", 4),
    (Element::Uint32, "uint32", 4),
    (Element::Int64, "int64", 8),
    (Element::Uint64, "uint64", 8),
    (Element::Float32, "float32", 4),
    (Element::Float64, "float64", 8),
];

impl Element {
    /// The type of a name as NumPy and PyTorch write it.
    pub fn parse(name: &str) -> Option<Element> {
        ELEMENTS.iter().find(|row| row.1 == name).map(|row| row.0)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        ELEMENTS[self as usize].1
    }

    /// Bytes of a number.
    pub fn bytes(self) -> usize {
        ELEMENTS[self as usize].2
    }

    /// The least and the largest number of a type of whole numbers; 0 and 1 are truth values.
    pub(super) fn range(self) -> (f64, f64) {
        let unsigned = matches!(self, Element::Uint8 | Element::Uint16 | Element::Uint32 | Element::Uint64);
        let bits = 8 * self.bytes() as i32;
        match self {
            Element::Bool => (0.0, 1.0),
            _ if unsigned => (0.0, f64::exp2(f64::from(bits)) - 1.0),
            _ => (-f64::exp2(f64::from(bits - 1)), f64::exp2(f64::from(bits - 1)) - 1.0),
        }
    }

    /// Whether numbers have fractions.
    pub fn is_float(self) -> bool {
        matches!(self, Element::Float32 | Element::Float64)
    }
}
