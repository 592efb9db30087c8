//! JSON lines of numbers: each line an object, under each key a list of numbers, or of such lists (the answers of a group, which may
//! differ in length). In: a file, hostile until read. Out: a segment per line and key. The file is read once to find the lines,
//! and then line by line where a record is wanted.

use super::{Element, Found, Part, Segment};
use crate::data::documents::{LINE, next_line};
use crate::data::{DataError, IDS, Kind};
use astrai_files::one_line;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// What a key holds in a line.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Entry {
    Ints(Vec<i64>),
    Flags(Vec<bool>),
    Rows(Vec<Vec<i64>>),
    FlagRows(Vec<Vec<bool>>),
    Floats(Vec<f64>),
    FloatRows(Vec<Vec<f64>>),
    One(f64),
    Flag(bool),
    /// What is no list of numbers, a domain's name say, is passed by.
    Other(serde::de::IgnoredAny),
}

impl Entry {
    /// Its type, how many numbers it has, and in how many rows; none where it is something else.
    fn shape(&self) -> Option<(Element, usize, usize)> {
        Some(match self {
            Entry::Ints(list) => (Element::Int64, list.len(), 0),
            Entry::Flags(list) => (Element::Bool, list.len(), 0),
            Entry::Floats(list) => (Element::Float64, list.len(), 0),
            Entry::Rows(rows) => (Element::Int64, rows.iter().map(Vec::len).sum(), rows.len()),
            Entry::FlagRows(rows) => (Element::Bool, rows.iter().map(Vec::len).sum(), rows.len()),
            Entry::FloatRows(rows) => (Element::Float64, rows.iter().map(Vec::len).sum(), rows.len()),
            Entry::One(_) => (Element::Float64, 1, 0),
            Entry::Flag(_) => (Element::Bool, 1, 0),
            Entry::Other(_) => return None,
        })
    }

    /// Its numbers from number `from` on.
    fn numbers(&self, from: usize) -> Box<dyn Iterator<Item = f64> + '_> {
        let flag = |b: &bool| f64::from(u8::from(*b));
        match self {
            Entry::Ints(list) => Box::new(list.iter().skip(from).map(|&x| x as f64)),
            Entry::Flags(list) => Box::new(list.iter().skip(from).map(flag)),
            Entry::Floats(list) => Box::new(list.iter().skip(from).copied()),
            Entry::Rows(rows) => Box::new(rows.iter().flatten().skip(from).map(|&x| x as f64)),
            Entry::FlagRows(rows) => Box::new(rows.iter().flatten().skip(from).map(flag)),
            Entry::FloatRows(rows) => Box::new(rows.iter().flatten().skip(from).copied()),
            Entry::One(x) => Box::new(std::iter::once(*x).skip(from)),
            Entry::Flag(x) => Box::new(std::iter::once(flag(x)).skip(from)),
            Entry::Other(_) => Box::new(std::iter::empty()),
        }
    }
}

type Line = BTreeMap<String, Entry>;

#[derive(Debug)]
struct Lines {
    path: PathBuf,
    file: File,
    /// Length of each line, by where it begins.
    lengths: BTreeMap<u64, (u64, u64)>,
    /// The line that was read last.
    last: Mutex<Option<(u64, Line)>>,
}

fn read(path: &Path, number: u64, bytes: &[u8]) -> Result<Line, DataError> {
    serde_json::from_slice(bytes).map_err(|e| {
        let why = one_line(&e.to_string());
        let message = format!("line {number} is no JSON object of lists of numbers ({why}); chat or text records go through `astrai preprocess`");
        DataError::refused(path, message)
    })
}

/// Whether the first record of a file has token ids, and is not one of text.
pub(super) fn holds_numbers(path: &Path) -> bool {
    let Ok((file, _)) = astrai_files::open(path) else { return false };
    let mut lines = BufReader::new(file.take(LINE)).split(b'\n').map_while(Result::ok);
    let first = lines.find(|line| !line.trim_ascii().is_empty());
    // An empty list says nothing: a prompt of text may be without answers.
    let ids = |entry: &Entry| match entry {
        Entry::Ints(list) => !list.is_empty(),
        Entry::Rows(rows) => !rows.is_empty(),
        _ => false,
    };
    first.is_some_and(|line| {
        read(path, 1, &line).is_ok_and(|line| IDS.iter().any(|key| line.get(*key).is_some_and(ids)))
    })
}

pub(super) fn open(path: &Path, found: &mut Found<'_>) -> Result<Box<dyn Part>, DataError> {
    let (file, _) = astrai_files::open(path)?;
    let again = file.try_clone().map_err(DataError::io(path, "open it twice"))?;
    let (mut reader, mut at, mut number) = (BufReader::new(again), 0, 0);
    let mut lengths = BTreeMap::new();
    while let Some(line) = next_line(&mut reader, path, number + 1)? {
        let got = line.len() as u64;
        number += 1;
        if !line.trim_ascii().is_empty() {
            for (key, entry) in read(path, number, &line)? {
                match entry.shape() {
                    Some((element, count, rows)) => {
                        found.segment(&key, element, at, count as u64, rows as u32);
                    }
                    None if Kind::knows(&key) => {
                        let message = format!(
                            "line {number}, `{key}` is no list of numbers; records of text go through `astrai preprocess`"
                        );
                        return Err(DataError::refused(path, message));
                    }
                    None => {}
                }
            }
            lengths.insert(at, (got, number));
        }
        at += got;
    }
    Ok(Box::new(Lines { path: path.to_path_buf(), file, lengths, last: Mutex::new(None) }))
}

impl Lines {
    /// What a key holds in the line that begins at `at`.
    fn entry<T>(&self, key: &str, at: u64, take: impl FnOnce(&Entry) -> T) -> Result<T, DataError> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.as_ref().is_none_or(|(known, _)| *known != at) {
            let (length, number) = self.lengths.get(&at).copied().unwrap_or_default();
            let mut bytes = vec![0; length as usize];
            let changed = "read the line again; it has changed since it was opened";
            self.file.read_exact_at(&mut bytes, at).map_err(DataError::io(&self.path, changed))?;
            *last = Some((at, read(&self.path, number, &bytes)?));
        }
        match last.as_ref().and_then(|(_, line)| line.get(key)) {
            Some(entry) => Ok(take(entry)),
            None => Err(DataError::refused(
                &self.path,
                format!("has lost `{key}` since it was opened; restore it"),
            )),
        }
    }

    /// Gives numbers of a segment from number `from` on to `put`, with their places in `0..n`.
    fn each(
        &self,
        key: &str,
        s: &Segment,
        from: u64,
        n: usize,
        put: &mut dyn FnMut(usize, f64) -> Result<(), String>,
    ) -> Result<(), DataError> {
        let done = self.entry(key, s.at, |entry| match entry.shape() {
            Some((_, count, _)) if count as u64 == s.count => {
                entry.numbers(from as usize).take(n).enumerate().try_for_each(|(i, x)| put(i, x))
            }
            _ => Err("has changed since it was opened; restore it".into()),
        })?;
        done.map_err(|message| {
            let line = self.lengths.get(&s.at).map_or(0, |(_, number)| *number);
            DataError::refused(&self.path, format!("line {line}, `{key}`: {message}"))
        })
    }
}

impl Part for Lines {
    fn path(&self) -> &Path {
        &self.path
    }

    fn ints(&self, key: &str, s: &Segment, from: u64, to: &mut [i32]) -> Result<(), DataError> {
        self.each(key, s, from, to.len(), &mut |i, x| {
            to[i] = super::bin::whole(x, from + i as u64)?;
            Ok(())
        })
    }

    fn floats(&self, key: &str, s: &Segment, from: u64, to: &mut [f32]) -> Result<(), DataError> {
        self.each(key, s, from, to.len(), &mut |i, x| {
            to[i] = x as f32;
            Ok(())
        })
    }

    fn rows(&self, key: &str, s: &Segment) -> Result<Vec<usize>, DataError> {
        self.entry(key, s.at, |entry| match entry {
            Entry::Rows(rows) => rows.iter().map(Vec::len).collect(),
            Entry::FlagRows(rows) => rows.iter().map(Vec::len).collect(),
            Entry::FloatRows(rows) => rows.iter().map(Vec::len).collect(),
            _ => vec![s.count as usize],
        })
    }
}
