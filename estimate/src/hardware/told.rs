//! The text of a hardware file as data. In: JSON or JSON5. Out: its value, or one line: what is no JSON5, a number that is none, null,
//! a key that is given twice, each with where it stands. To `serde_json` alone the first two are nothing, and of the third the last counts.

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value, json};
use std::cell::RefCell;
use std::fmt;

/// Reads a file's text.
pub fn value(text: &str) -> Result<Value, String> {
    let wrong = RefCell::new(None);
    // What follows the value is refused where nothing is expected there.
    let nothing_more = json5::from_str::<serde::de::IgnoredAny>(text).map(drop);
    let read = nothing_more.and_then(|()| {
        let at = At { path: String::new(), wrong: &wrong };
        at.deserialize(&mut json5::Deserializer::from_str(text))
    });
    let unread =
        |e: json5::Error| format!("is neither JSON nor JSON5: {}", astrai_files::one_line(&e.to_string()));
    read.map_err(|e| wrong.take().unwrap_or_else(|| unread(e)))
}

/// Where a value stands, and what was refused.
struct At<'a> {
    path: String,
    wrong: &'a RefCell<Option<String>>,
}

impl At<'_> {
    fn below(&self, path: String) -> At<'_> {
        At { path, wrong: self.wrong }
    }

    fn refuse<T, E: Error>(&self, why: &str) -> Result<T, E> {
        let path = if self.path.is_empty() { "the file" } else { &self.path };
        let line = astrai_files::one_line(&format!("{path}{why}"));
        *self.wrong.borrow_mut() = Some(line.clone());
        Err(E::custom(line))
    }
}

impl<'de> DeserializeSeed<'de> for At<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Value, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for At<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a value of JSON5")
    }

    fn visit_bool<E: Error>(self, v: bool) -> Result<Value, E> {
        Ok(json!(v))
    }

    fn visit_i64<E: Error>(self, v: i64) -> Result<Value, E> {
        Ok(json!(v))
    }

    fn visit_u64<E: Error>(self, v: u64) -> Result<Value, E> {
        Ok(json!(v))
    }

    fn visit_f64<E: Error>(self, v: f64) -> Result<Value, E> {
        if v.is_finite() { Ok(json!(v)) } else { self.refuse(&format!(": {v} is no number that counts")) }
    }

    fn visit_str<E: Error>(self, v: &str) -> Result<Value, E> {
        Ok(json!(v))
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        self.refuse(": null says nothing; leave the key out")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut of: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(v) = of.next_element_seed(self.below(format!("{}[{}]", self.path, list.len())))? {
            list.push(v);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut of: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some(key) = of.next_key::<String>()? {
            let below = if self.path.is_empty() { key.clone() } else { format!("{}.{key}", self.path) };
            let below = self.below(below);
            if fields.contains_key(&key) {
                return below.refuse(" is given twice");
            }
            fields.insert(key, of.next_value_seed(below)?);
        }
        Ok(Value::Object(fields))
    }
}
