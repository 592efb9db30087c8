//! Narrow weights: how a number of a linear layer's weight is stored in fewer bits, with a scale for some of its neighbours. In: codes,
//! scales and, where the codes' range is not symmetric, offsets. Out: the numbers that they stand for, `scale · value(code) + offset`, and the names under which a checkpoint's tensor has them.

use crate::DType;
use serde::{Deserialize, Serialize};
use std::fmt;

/// What a code stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Code {
    /// Signed integers of eight bits.
    Int8,
    /// Integers of four bits, 8 more than their value; two in a byte, the first in the lower half.
    Int4,
    /// Floats of eight bits, e4m3.
    Fp8,
}

impl Code {
    /// Every code.
    pub const ALL: [Code; 3] = [Code::Int8, Code::Int4, Code::Fp8];

    /// Name in flags and dumps.
    pub fn name(self) -> &'static str {
        match self {
            Code::Int8 => "int8",
            Code::Int4 => "int4",
            Code::Fp8 => "fp8",
        }
    }

    /// Codes in an element of the type that stores them.
    pub fn per_element(self) -> usize {
        if self == Code::Int4 { 2 } else { 1 }
    }

    /// Type of what stores them.
    pub fn dtype(self) -> DType {
        match self {
            Code::Int8 => DType::I8,
            Code::Int4 => DType::U8,
            Code::Fp8 => DType::F8E4M3,
        }
    }

    /// The least and the greatest value of a code.
    pub fn range(self) -> [f32; 2] {
        match self {
            Code::Int8 => [-128.0, 127.0],
            Code::Int4 => [-8.0, 7.0],
            Code::Fp8 => [-448.0, 448.0],
        }
    }

    /// The largest magnitude that a symmetric scale maps the largest number to.
    pub fn most(self) -> f32 {
        match self {
            Code::Int8 => 127.0,
            Code::Int4 => 7.0,
            Code::Fp8 => 448.0,
        }
    }
}

/// How a weight `[n, k]` is stored: codes `[n, k / per_element]`, scales and offsets `[n, k / group]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Narrow {
    /// What a code stands for.
    pub code: Code,
    /// Neighbours along `k` that share a scale; 0: all of a row.
    pub group: usize,
    /// Type of the scales and offsets: f32, f16 or bf16.
    pub scales: DType,
    /// Whether a group has an offset beside its scale.
    pub offsets: bool,
}

impl Narrow {
    /// Neighbours that share a scale in rows of `k`, where such rows can be stored so.
    pub fn group_of(self, k: usize) -> Option<usize> {
        let group = if self.group == 0 { k } else { self.group };
        let whole = k > 0 && k.is_multiple_of(group) && group.is_multiple_of(32);
        whole.then_some(group)
    }
}

impl fmt::Display for Narrow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.code.name())?;
        if self.group > 0 {
            write!(f, ":group={}", self.group)?;
        }
        if self.offsets { f.write_str(":asymmetric") } else { Ok(()) }
    }
}

impl Narrow {
    /// The parts that a weight consists of.
    pub fn parts(self) -> &'static [Part] {
        if self.offsets { &Part::ALL } else { &Part::ALL[..2] }
    }
}

/// What a narrow weight consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// Codes.
    Codes,
    /// What the value of a code is multiplied by.
    Scales,
    /// What is added then.
    Offsets,
}

impl Part {
    /// Every part.
    pub const ALL: [Part; 3] = [Part::Codes, Part::Scales, Part::Offsets];

    fn suffix(self) -> &'static str {
        match self {
            Part::Codes => "#codes",
            Part::Scales => "#scales",
            Part::Offsets => "#offsets",
        }
    }

    /// Name of this part of the tensor.
    pub fn of(self, tensor: &str) -> String {
        format!("{tensor}{}", self.suffix())
    }

    /// The tensor of which, and the part that, has this name.
    pub fn named(name: &str) -> Option<(&str, Part)> {
        Part::ALL.into_iter().find_map(|part| Some((name.strip_suffix(part.suffix())?, part)))
    }
}
