//! In: the JSON of a header or of an index. Out: its entries as written, in order, duplicates and foreign keys refused.
//! Parsed by visitors rather than into a tree, so that memory stays proportional to the text: a tree of 100 MB of
//! `[[],[],…` takes gigabytes.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::error::quote;

/// Most dimensions of a tensor; PyTorch's own limit.
pub(super) const MAX_RANK: usize = 64;

/// The reserved key of a header for free text.
pub(super) const METADATA: &str = "__metadata__";

/// A tensor as the header describes it, nothing checked but the types. Offsets count from the end of the header.
pub(super) struct Described {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<usize>,
    pub offsets: [usize; 2],
}

/// A header as written.
pub(super) struct Parsed {
    pub tensors: Vec<Described>,
    pub metadata: BTreeMap<String, String>,
}

/// Parses a header.
pub(super) fn header(text: &str) -> Result<Parsed, serde_json::Error> {
    serde_json::from_str(text)
}

/// Parses an index; out: tensor name → shard's file name.
pub(super) fn index(text: &[u8]) -> Result<BTreeMap<String, String>, serde_json::Error> {
    serde_json::from_slice::<Index>(text).map(|index| index.0)
}

fn within<E: Error>(place: &str, error: E) -> E {
    E::custom(format_args!("{place}: {error}"))
}

impl<'de> Deserialize<'de> for Parsed {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Parsed;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Parsed, A::Error> {
        let (mut tensors, mut metadata) = (Vec::new(), None);
        while let Some(name) = map.next_key::<String>()? {
            if name == METADATA {
                let texts: Texts = map.next_value().map_err(|e| within(METADATA, e))?;
                if metadata.replace(texts.0).is_some() {
                    return Err(A::Error::custom(format_args!("{METADATA} occurs twice")));
                }
                continue;
            }
            let entry: Entry =
                map.next_value().map_err(|e| within(&format!("tensor {}", quote(&name)), e))?;
            tensors.push(Described { name, dtype: entry.dtype, shape: entry.shape, offsets: entry.offsets });
        }
        Ok(Parsed { tensors, metadata: metadata.unwrap_or_default() })
    }
}

struct Entry {
    dtype: String,
    shape: Vec<usize>,
    offsets: [usize; 2],
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(EntryVisitor)
    }
}

struct EntryVisitor;

impl<'de> Visitor<'de> for EntryVisitor {
    type Value = Entry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entry, A::Error> {
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        while let Some(key) = map.next_key::<String>()? {
            let twice = match key.as_str() {
                "dtype" => dtype.replace(map.next_value().map_err(|e| within("dtype", e))?).is_some(),
                "shape" => {
                    shape.replace(map.next_value::<Naturals>().map_err(|e| within("shape", e))?.0).is_some()
                }
                "data_offsets" => {
                    let numbers = map.next_value::<Naturals>().map_err(|e| within("data_offsets", e))?.0;
                    let pair = <[usize; 2]>::try_from(numbers).map_err(|numbers| {
                        A::Error::custom(format_args!("data_offsets: {} numbers instead of 2", numbers.len()))
                    })?;
                    offsets.replace(pair).is_some()
                }
                other => return Err(A::Error::custom(format_args!("unknown key {}", quote(other)))),
            };
            if twice {
                return Err(A::Error::custom(format_args!("{key} occurs twice")));
            }
        }
        let missing = |key: &str| A::Error::custom(format_args!("{key} is missing"));
        Ok(Entry {
            dtype: dtype.ok_or_else(|| missing("dtype"))?,
            shape: shape.ok_or_else(|| missing("shape"))?,
            offsets: offsets.ok_or_else(|| missing("data_offsets"))?,
        })
    }
}

/// At most [`MAX_RANK`] numbers.
struct Naturals(Vec<usize>);

impl<'de> Deserialize<'de> for Naturals {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_seq(NaturalsVisitor)
    }
}

struct NaturalsVisitor;

impl<'de> Visitor<'de> for NaturalsVisitor {
    type Value = Naturals;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of whole numbers from 0")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Naturals, A::Error> {
        let mut numbers = Vec::new();
        while let Some(Natural(n)) = seq.next_element()? {
            if numbers.len() == MAX_RANK {
                return Err(A::Error::custom(format_args!("more than {MAX_RANK} numbers")));
            }
            numbers.push(n);
        }
        Ok(Naturals(numbers))
    }
}

struct Natural(usize);

impl<'de> Deserialize<'de> for Natural {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_u64(NaturalVisitor)
    }
}

struct NaturalVisitor;

impl Visitor<'_> for NaturalVisitor {
    type Value = Natural;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number from 0")
    }

    fn visit_u64<E: Error>(self, n: u64) -> Result<Natural, E> {
        usize::try_from(n).map(Natural).map_err(|_| E::custom(format_args!("{n} exceeds the address space")))
    }

    fn visit_i64<E: Error>(self, n: i64) -> Result<Natural, E> {
        Err(E::custom(format_args!("{n} is negative")))
    }

    fn visit_f64<E: Error>(self, x: f64) -> Result<Natural, E> {
        Err(E::custom(format_args!("{x:?} is not a whole number of 64 bits")))
    }
}

/// An object of strings.
struct Texts(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(TextsVisitor)
    }
}

struct TextsVisitor;

impl<'de> Visitor<'de> for TextsVisitor {
    type Value = Texts;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Texts, A::Error> {
        let mut texts = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            let value: String = map.next_value().map_err(|e| within(&quote(&key), e))?;
            if texts.contains_key(&key) {
                return Err(A::Error::custom(format_args!("{} occurs twice", quote(&key))));
            }
            texts.insert(key, value);
        }
        Ok(Texts(texts))
    }
}

struct Index(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Index {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(IndexVisitor)
    }
}

struct IndexVisitor;

impl<'de> Visitor<'de> for IndexVisitor {
    type Value = Index;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with weight_map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Index, A::Error> {
        let mut weights = None;
        while let Some(key) = map.next_key::<String>()? {
            if key != "weight_map" {
                // "metadata" holds a total size that writers disagree on; the files themselves are measured.
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let texts: Texts = map.next_value().map_err(|e| within("weight_map", e))?;
            if weights.replace(texts.0).is_some() {
                return Err(A::Error::custom("weight_map occurs twice"));
            }
        }
        weights.map(Index).ok_or_else(|| A::Error::custom("weight_map is missing"))
    }
}
