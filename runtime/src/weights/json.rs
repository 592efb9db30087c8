//! In: the JSON of a header or of an index. Out: its entries as written, in order, duplicates and foreign keys refused.
//! Parsed by visitors rather than into a tree, so that memory stays proportional to the text: a tree of 100 MB of
//! `[[],[],…` takes gigabytes.

use std::collections::BTreeMap;
use std::fmt;

use safetensors::tensor::{Dtype, TensorInfo};
use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, Visitor};

use super::error::quote;

/// The reserved key of a header for free text.
pub(super) const METADATA: &str = "__metadata__";

/// A header as written. Offsets count from the end of the header.
pub(super) struct Parsed {
    pub tensors: Vec<(String, TensorInfo)>,
    pub metadata: BTreeMap<String, String>,
}

/// [`TensorInfo`] without room for keys of which a reader could not know what they change.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with dtype, shape and data_offsets")]
struct Entry {
    dtype: Dtype,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
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
            let Entry { dtype, shape, data_offsets } = entry;
            tensors.push((name, TensorInfo { dtype, shape, data_offsets }));
        }
        Ok(Parsed { tensors, metadata: metadata.unwrap_or_default() })
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
