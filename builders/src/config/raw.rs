//! Typed access to raw keys. In: a JSON object. Out: numbers, names and flags that are in range, or an error that
//! names the file, the key as it is spelled there, the value and the remedy. `null` counts as absent, as it does in
//! the files that transformers writes.

use super::error::{ConfigError, PROBLEM, clipped, excerpt, show};
use super::json::kind;
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::BTreeSet;

/// An object being read, and what was noticed on the way.
pub struct Raw<'a> {
    file: &'a str,
    prefix: String,
    map: &'a Map<String, Value>,
    aliases: &'static [(&'static str, &'static str)],
    read: RefCell<BTreeSet<&'static str>>,
    notes: RefCell<Notes>,
}

/// What was noticed while reading: nothing here stops the reading.
#[derive(Clone, Debug, Default)]
pub struct Notes {
    /// Lines for the user.
    pub warnings: Vec<String>,
    /// Keys that nothing reads, nested ones joined by dots.
    pub unknown: Vec<String>,
}

impl<'a> Raw<'a> {
    /// The top-level object of `file`; `aliases` pairs a key with its other spelling.
    pub(crate) fn new(
        file: &'a str,
        map: &'a Map<String, Value>,
        aliases: &'static [(&'static str, &'static str)],
    ) -> Self {
        Raw { file, prefix: String::new(), map, aliases, read: RefCell::default(), notes: RefCell::default() }
    }

    /// The object under `key`, if there is one.
    pub fn object(&self, key: &'static str) -> Result<Option<Raw<'a>>, ConfigError> {
        let Some((spelled, value)) = self.find(key)? else { return Ok(None) };
        let Value::Object(map) = value else { return Err(self.wrong(spelled, value, "an object")) };
        Ok(Some(Raw { prefix: format!("{}{spelled}.", self.prefix), ..Raw::new(self.file, map, &[]) }))
    }

    /// All keys and values.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (&'a str, &'a Value)> + use<'a> {
        self.map.iter().map(|(k, v)| (k.as_str(), v))
    }

    /// The value of `key` under whichever spelling the file uses, with that spelling. `null` is absent.
    pub fn find(&self, key: &'static str) -> Result<Option<(&'static str, &'a Value)>, ConfigError> {
        self.read.borrow_mut().insert(key);
        let get = |k: &'static str| self.map.get(k).filter(|v| !v.is_null()).map(|v| (k, v));
        let other = self.aliases.iter().filter(|(k, _)| *k == key).find_map(|(_, alias)| get(alias));
        match (get(key), other) {
            // Files that several versions of transformers saved have two types, neither of which changes what is computed.
            (Some((a, x)), Some((b, y))) if x != y && key == "dtype" => {
                self.warn(format!("key `{a}` is {} and `{b}` is {}; the first counts", show(x), show(y)));
                Ok(Some((a, x)))
            }
            (Some((a, x)), Some((b, y))) if x != y => Err(self.refuse(
                b,
                format!("is {} while `{a}` is {}, and both mean the same", show(y), show(x)),
                "keep one of them",
            )),
            (first, other) => Ok(first.or(other)),
        }
    }

    /// A count in `1..=max`, if given.
    pub fn count_opt(&self, key: &'static str, max: usize) -> Result<Option<usize>, ConfigError> {
        let Some((key, value)) = self.find(key)? else { return Ok(None) };
        if !value.is_number() {
            return Err(self.wrong(key, value, "a positive integer"));
        }
        match value.as_u64() {
            Some(n) if n >= 1 && n <= max as u64 => Ok(Some(n as usize)),
            Some(n) if n > max as u64 => {
                Err(self.refuse(key, format!("is {n}"), format!("the largest accepted is {max}")))
            }
            _ => Err(self.refuse(key, format!("is {}", show(value)), "it must be a positive integer")),
        }
    }

    /// A count in `0..=max`, if given.
    pub fn count_or_none(&self, key: &'static str, max: usize) -> Result<Option<usize>, ConfigError> {
        match self.find(key)? {
            Some((_, v)) if v.as_u64() == Some(0) => Ok(Some(0)),
            _ => self.count_opt(key, max),
        }
    }

    /// A count in `1..=max`.
    pub fn count(&self, key: &'static str, max: usize) -> Result<usize, ConfigError> {
        self.count_opt(key, max)?.ok_or_else(|| self.missing(key))
    }

    /// A finite number, if given.
    pub fn real_opt(&self, key: &'static str) -> Result<Option<f64>, ConfigError> {
        let Some((key, value)) = self.find(key)? else { return Ok(None) };
        match value.as_f64().filter(|x| x.is_finite()) {
            Some(x) => Ok(Some(x)),
            None => Err(self.wrong(key, value, "a number")),
        }
    }

    /// A finite number for which `ok` holds, if given; `range` says in words what that is.
    pub fn real_where(
        &self,
        key: &'static str,
        ok: fn(f64) -> bool,
        range: &str,
    ) -> Result<Option<f64>, ConfigError> {
        match self.real_opt(key)? {
            Some(x) if !ok(x) => {
                Err(self.refuse(self.spelled(key), format!("is {x}"), format!("it must be {range}")))
            }
            x => Ok(x),
        }
    }

    /// A flag, `default` when absent.
    pub fn flag(&self, key: &'static str, default: bool) -> Result<bool, ConfigError> {
        match self.find(key)? {
            None => Ok(default),
            Some((_, Value::Bool(b))) => Ok(*b),
            Some((key, value)) => Err(self.wrong(key, value, "true or false")),
        }
    }

    /// A string, if given.
    pub fn text(&self, key: &'static str) -> Result<Option<&'a str>, ConfigError> {
        match self.find(key)? {
            None => Ok(None),
            Some((_, Value::String(s))) => Ok(Some(s)),
            Some((key, value)) => Err(self.wrong(key, value, "a string")),
        }
    }

    /// One of the strings `known`, if given.
    pub fn one_of(&self, key: &'static str, known: &[&str]) -> Result<Option<&'a str>, ConfigError> {
        match self.text(key)? {
            Some(other) if !known.contains(&other) => {
                let problem = format!("is {}, which is not supported", show(&Value::from(other)));
                Err(self.refuse(self.spelled(key), problem, format!("supported: {}", known.join(", "))))
            }
            stated => Ok(stated),
        }
    }

    /// What stands beside one of the names of `table`, if one is given.
    pub fn named<T: Copy>(&self, key: &'static str, table: &[(&str, T)]) -> Result<Option<T>, ConfigError> {
        let names: Vec<&str> = table.iter().map(|(name, _)| *name).collect();
        let stated = self.one_of(key, &names)?;
        Ok(table.iter().find(|(name, _)| stated == Some(name)).map(|(_, x)| *x))
    }

    /// A list of strings, if given.
    pub fn texts(&self, key: &'static str) -> Result<Option<Vec<&'a str>>, ConfigError> {
        let Some((key, value)) = self.find(key)? else { return Ok(None) };
        let list = value.as_array().ok_or_else(|| self.wrong(key, value, "a list of strings"))?;
        let text = |v: &'a Value| v.as_str().ok_or_else(|| self.wrong(key, v, "a string in that list"));
        list.iter().map(text).collect::<Result<_, _>>().map(Some)
    }

    /// A list of finite numbers, if given.
    pub fn reals(&self, key: &'static str) -> Result<Option<Vec<f64>>, ConfigError> {
        let Some((key, value)) = self.find(key)? else { return Ok(None) };
        let list = value.as_array().ok_or_else(|| self.wrong(key, value, "a list of numbers"))?;
        let number = |v: &'a Value| {
            v.as_f64().filter(|x| x.is_finite()).ok_or_else(|| self.wrong(key, v, "a number in that list"))
        };
        list.iter().map(number).collect::<Result<_, _>>().map(Some)
    }

    /// Token ids under `key`: one id or a list. An id outside `0..vocab` warns; a negative one also counts as absent,
    /// as published files use -1 for "none".
    pub fn token_ids(&self, key: &'static str, vocab: usize) -> Result<Vec<u32>, ConfigError> {
        let Some((key, value)) = self.find(key)? else { return Ok(Vec::new()) };
        let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        let mut ids = Vec::new();
        for v in list {
            match v.as_i64() {
                Some(n) if n < 0 => self.warn(format!("key `{key}` is {n}; taken as no such token")),
                Some(n) if n <= u32::MAX as i64 => {
                    if n >= vocab as i64 {
                        self.warn(format!(
                            "key `{key}` is {n}, outside the vocabulary of {vocab}; it never occurs"
                        ));
                    }
                    ids.push(n as u32);
                }
                _ => return Err(self.wrong(key, v, "a token id")),
            }
        }
        Ok(ids)
    }

    /// The spelling of `key` that the file uses.
    pub fn spelled(&self, key: &'static str) -> &'static str {
        let given = |k: &&'static str| self.map.get(*k).is_some_and(|v| !v.is_null());
        let others = self.aliases.iter().filter(|(k, _)| *k == key).map(|(_, alias)| *alias);
        std::iter::once(key).chain(others).find(given).unwrap_or(key)
    }

    /// True when the file has `key`, even as `null`.
    pub fn states(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// The error that `key` is absent.
    pub fn missing(&self, key: &'static str) -> ConfigError {
        self.refuse(key, "is missing", "add it, the model cannot be described without")
    }

    /// An error about `key`.
    pub fn refuse(&self, key: &str, problem: impl Into<String>, remedy: impl Into<String>) -> ConfigError {
        ConfigError::Key {
            file: self.file.to_owned(),
            key: format!("{}{}", self.prefix, excerpt(key)),
            problem: clipped(&problem.into(), PROBLEM),
            remedy: remedy.into(),
        }
    }

    fn wrong(&self, key: &str, value: &Value, wanted: &str) -> ConfigError {
        let problem = match value {
            Value::Array(_) | Value::Object(_) => format!("is {}", kind(value)),
            _ => format!("is {} ({})", show(value), kind(value)),
        };
        self.refuse(key, problem, format!("it must be {wanted}"))
    }

    /// Adds a line for the user.
    pub fn warn(&self, line: impl AsRef<str>) {
        self.notes.borrow_mut().warnings.push(format!("{}: {}", self.file, line.as_ref()));
    }

    /// Notes that nothing reads `key`.
    pub(crate) fn ignore(&self, key: &str) {
        let key = format!("{}{}", self.prefix, excerpt(key));
        self.warn(format!("key `{key}` is not known and was ignored"));
        self.notes.borrow_mut().unknown.push(key);
    }

    /// Reads `map`, an object that stands under `key`, as the keys of a model; what is noticed is noted here.
    pub(crate) fn within<T>(
        &self,
        key: &str,
        map: &Map<String, Value>,
        aliases: &'static [(&'static str, &'static str)],
        read: impl FnOnce(&Raw) -> Result<T, ConfigError>,
    ) -> Result<T, ConfigError> {
        let prefix = format!("{}{key}.", self.prefix);
        let inner = Raw { prefix, ..Raw::new(self.file, map, aliases) };
        let made = read(&inner)?;
        self.take_notes(inner.into_notes());
        Ok(made)
    }

    fn take_notes(&self, theirs: Notes) {
        let mut notes = self.notes.borrow_mut();
        notes.warnings.extend(theirs.warnings);
        notes.unknown.extend(theirs.unknown);
    }

    /// Takes the notes of a nested object, whose keys that were never looked at are unknown.
    pub(crate) fn absorb(&self, inner: Raw) {
        for (key, _) in inner.entries() {
            if !inner.was_read(key) {
                inner.ignore(key);
            }
        }
        self.take_notes(inner.into_notes());
    }

    /// True for a key that was looked at so far.
    pub(crate) fn was_read(&self, key: &str) -> bool {
        self.read.borrow().contains(key)
    }

    /// What was noticed.
    pub(crate) fn into_notes(self) -> Notes {
        self.notes.into_inner()
    }
}
