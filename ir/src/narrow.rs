//! Narrow storage: how a number of a linear layer's weight, of a key or of a value is stored in fewer bits, with a scale for some of its neighbours. In: codes,
//! scales and, where the codes' range is not symmetric, offsets. Out: the numbers that they stand for, `scale · value(code) + offset`, and the names under which a checkpoint's tensor has them.

use crate::DType;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

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
    /// Floats of four bits, e2m1; two in a byte, the first in the lower half. They are read, numbers are not rounded to them.
    Fp4,
}

impl Code {
    /// Every code that numbers are rounded to.
    pub const ALL: [Code; 3] = [Code::Int8, Code::Int4, Code::Fp8];

    /// Name in flags and dumps.
    pub fn name(self) -> &'static str {
        match self {
            Code::Int8 => "int8",
            Code::Int4 => "int4",
            Code::Fp8 => "fp8",
            Code::Fp4 => "fp4",
        }
    }

    /// Codes in an element of the type that stores them.
    pub fn per_element(self) -> usize {
        if matches!(self, Code::Int4 | Code::Fp4) { 2 } else { 1 }
    }

    /// Type of what stores them.
    pub fn dtype(self) -> DType {
        match self {
            Code::Int8 => DType::I8,
            Code::Int4 | Code::Fp4 => DType::U8,
            Code::Fp8 => DType::F8E4M3,
        }
    }

    /// The least and the greatest value of a code.
    pub fn range(self) -> [f32; 2] {
        match self {
            Code::Int8 => [-128.0, 127.0],
            Code::Int4 => [-8.0, 7.0],
            Code::Fp8 => [-448.0, 448.0],
            Code::Fp4 => [-6.0, 6.0],
        }
    }

    /// The largest magnitude that a symmetric scale maps the largest number to.
    pub fn most(self) -> f32 {
        match self {
            Code::Int8 => 127.0,
            Code::Int4 => 7.0,
            Code::Fp8 => 448.0,
            Code::Fp4 => 6.0,
        }
    }

    /// True for integers.
    pub fn is_integer(self) -> bool {
        matches!(self, Code::Int8 | Code::Int4)
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
    /// What the head's codes stand for, with a scale for each row; none where the head stays as it is.
    pub head: Option<Code>,
    /// Whether dots by integer codes round their left sides to integers, too; none: where the device multiplies integers.
    pub activations: Option<bool>,
}

impl Narrow {
    /// The most neighbours of a left side that share a scale: one that is far greater than others takes their digits.
    pub const ROUNDED: usize = 192;

    /// How the head is stored.
    pub fn of_head(self) -> Option<Narrow> {
        self.head.map(|code| Narrow {
            code,
            group: 0,
            scales: DType::F32,
            offsets: false,
            head: None,
            ..self
        })
    }

    /// Neighbours that share a scale in rows of `k`, where such rows can be stored so.
    pub fn group_of(self, k: usize) -> Option<usize> {
        let group = if self.group == 0 { k } else { self.group };
        let whole = k > 0 && k.is_multiple_of(group) && (group.is_multiple_of(32) || group == 16);
        whole.then_some(group)
    }

    /// Neighbours of a left side that share a scale when it is rounded to integers, for codes that have integers and a group of so many:
    /// the most that divide it, up to [`Narrow::ROUNDED`], by 64 if they can.
    pub fn rounded(self, group: usize) -> Option<usize> {
        let most =
            |step: usize| (step..=Narrow::ROUNDED).rev().find(|g| g % step == 0 && group.is_multiple_of(*g));
        most(64).or_else(|| most(32)).filter(|_| self.code.is_integer())
    }
}

/// How the weights of a model's linear layers are stored.
#[derive(Clone, Debug, PartialEq)]
pub enum Storage {
    /// All alike, but for the head.
    Alike(Narrow),
    /// These checkpoint tensors so, others as numbers of their own.
    Each(Arc<BTreeMap<String, Narrow>>),
}

impl Storage {
    /// How a weight that consists of these tensors is stored.
    pub fn of<'a>(&self, mut tensors: impl Iterator<Item = &'a str>) -> Option<Narrow> {
        match self {
            Storage::Alike(narrow) => Some(*narrow),
            Storage::Each(all) => {
                let first = all.get(tensors.next()?)?;
                tensors.all(|t| all.get(t) == Some(first)).then_some(*first)
            }
        }
    }

    /// The same of a head.
    pub fn of_head<'a>(&self, tensors: impl Iterator<Item = &'a str>) -> Option<Narrow> {
        match self {
            Storage::Alike(narrow) => narrow.of_head(),
            Storage::Each(_) => self.of(tensors),
        }
    }

    /// The same with left sides rounded or not where nothing was said.
    pub fn rounding(&self, round: bool) -> Storage {
        let said = |n: &Narrow| Narrow { activations: Some(n.activations.unwrap_or(round)), ..*n };
        match self {
            Storage::Alike(narrow) => Storage::Alike(said(narrow)),
            Storage::Each(all) => {
                Storage::Each(Arc::new(all.iter().map(|(t, n)| (t.clone(), said(n))).collect()))
            }
        }
    }

    /// True where some left sides are said to be rounded.
    pub fn rounds(&self) -> bool {
        match self {
            Storage::Alike(narrow) => narrow.activations == Some(true),
            Storage::Each(all) => all.values().any(|n| n.activations == Some(true)),
        }
    }
}

impl From<Narrow> for Storage {
    fn from(narrow: Narrow) -> Storage {
        Storage::Alike(narrow)
    }
}

impl FromStr for Narrow {
    type Err = &'static str;

    /// `int8`, `int4:group=64:asymmetric:head=none`: integers of four bits have groups of 32 unless told otherwise, other codes a scale
    /// for each row; the head has eight bits.
    fn from_str(text: &str) -> Result<Narrow, &'static str> {
        let known = |name: &str| Code::ALL.into_iter().find(|c| c.name() == name);
        let mut parts = text.split(':');
        let code = parts.next().and_then(known).ok_or("give int8, int4 or fp8")?;
        let (head, scales) = (Some(Code::Int8), DType::F32);
        let mut made = Narrow { code, group: 0, scales, offsets: false, head, activations: None };
        match code {
            Code::Int4 => made.group = 32,
            Code::Fp8 => made.head = Some(Code::Fp8),
            _ => {}
        }
        let mut given = BTreeSet::new();
        for part in parts {
            if !given.insert(part.split('=').next()) {
                return Err("group, head, activations and asymmetric are each given once");
            }
            match part.split_once('=') {
                Some(("group", n)) => {
                    let n =
                        n.parse().ok().filter(|n: &usize| (32..=1 << 16).contains(n) && n.is_multiple_of(32));
                    made.group = n.ok_or("a group has a multiple of 32 neighbours, at most 65536")?;
                }
                Some(("head", "none")) => made.head = None,
                Some(("head", name)) => {
                    made.head = Some(known(name).ok_or("a head is none, int8, int4 or fp8")?)
                }
                Some(("activations", "none")) => made.activations = Some(false),
                Some(("activations", "int8")) if code != Code::Fp8 => made.activations = Some(true),
                None if part == "asymmetric" && code != Code::Fp8 => made.offsets = true,
                _ => {
                    return Err(
                        "after a colon give group=N, head=TYPE, activations=none, or for integers activations=int8, asymmetric",
                    );
                }
            }
        }
        made.scales = if made.group == 0 { DType::F32 } else { DType::BF16 };
        Ok(made)
    }
}

impl fmt::Display for Narrow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.code.name())?;
        if self.group > 0 {
            write!(f, ":group={}", self.group)?;
        }
        if self.offsets {
            f.write_str(":asymmetric")?;
        }
        write!(f, ":head={}", self.head.map_or("none", Code::name))?;
        match self.activations {
            Some(round) => write!(f, ":activations={}", if round { "int8" } else { "none" }),
            None => Ok(()),
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        for text in ["int8:head=int8", "int4:group=64:asymmetric:head=none:activations=int8", "fp8:head=int4"]
        {
            assert_eq!(text.parse::<Narrow>().unwrap().to_string(), text);
        }
        assert_eq!("int4".parse::<Narrow>().unwrap().to_string(), "int4:group=32:head=int8");
        for text in [
            "",
            "int3",
            "int4:",
            "int4:group=33",
            "int8:group=0",
            "fp8:asymmetric",
            "int8:head=bf16",
            "int8:heads",
            "fp8:activations=int8",
            "int8:group=32:group=64",
        ] {
            assert!(text.parse::<Narrow>().is_err(), "{text}");
        }
    }
}
