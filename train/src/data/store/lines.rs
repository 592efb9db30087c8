//! JSON lines of numbers: each line an object, under each key a list of numbers, or of such lists (the answers of a group, which may
//! differ in length). In: a file, hostile until read. Out: a segment per line and key. The file is read once to find the lines,
//! and then line by line where a record is wanted.

use super::{Element, Found, Part, Segment};
use crate::data::documents::LINE;
use crate::data::{DataError, IDS};
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
    let ids = |entry: &Entry| matches!(entry, Entry::Ints(_) | Entry::Rows(_));
    first.is_some_and(|line| {
        read(path, 1, &line).is_ok_and(|line| IDS.iter().any(|key| line.get(*key).is_some_and(ids)))
    })
}

pub(super) fn open(path: &Path, found: &mut Found<'_>) -> Result<Box<dyn Part>, DataError> {
    let (file, _) = astrai_files::open(path)?;
    let again = file.try_clone().map_err(DataError::io(path, "open it twice"))?;
    let (mut reader, mut at, mut number) = (BufReader::new(again), 0, 0);
    let (mut lengths, mut line) = (BTreeMap::new(), Vec::new());
    loop {
        line.clear();
        let got = (&mut reader).take(LINE + 1).read_until(b'\n', &mut line);
        let got = got.map_err(DataError::io(path, "read on"))? as u64;
        number += 1;
        if got == 0 {
            break;
        }
        if got > LINE {
            return Err(DataError::refused(path, format!("line {number} is longer than 256 MiB; split it")));
        }
        if !line.trim_ascii().is_empty() {
            for (key, entry) in read(path, number, &line)? {
                let (element, count, rows) = match &entry {
                    Entry::Ints(list) => (Element::Int64, list.len(), 0),
                    Entry::Flags(list) => (Element::Bool, list.len(), 0),
                    Entry::Floats(list) => (Element::Float64, list.len(), 0),
                    Entry::Rows(rows) => (Element::Int64, rows.iter().map(Vec::len).sum(), rows.len()),
                    Entry::FlagRows(rows) => (Element::Bool, rows.iter().map(Vec::len).sum(), rows.len()),
                    Entry::FloatRows(rows) => (Element::Float64, rows.iter().map(Vec::len).sum(), rows.len()),
                    Entry::One(_) => (Element::Float64, 1, 0),
                    Entry::Flag(_) => (Element::Bool, 1, 0),
                    Entry::Other(_) => continue,
                };
                found.segment(&key, element, at, count as u64, rows as u32);
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

    fn numbers(&self, key: &str, s: &Segment) -> Result<Vec<f64>, DataError> {
        let flag = |b: &bool| f64::from(u8::from(*b));
        let all = self.entry(key, s.at, |entry| match entry {
            Entry::Ints(list) => list.iter().map(|&x| x as f64).collect(),
            Entry::Flags(list) => list.iter().map(flag).collect(),
            Entry::Floats(list) => list.clone(),
            Entry::Rows(rows) => rows.iter().flatten().map(|&x| x as f64).collect(),
            Entry::FlagRows(rows) => rows.iter().flatten().map(flag).collect(),
            Entry::FloatRows(rows) => rows.concat(),
            Entry::One(x) => vec![*x],
            Entry::Flag(x) => vec![flag(x)],
            Entry::Other(_) => Vec::new(),
        })?;
        match all.len() as u64 == s.count {
            true => Ok(all),
            false => Err(DataError::refused(&self.path, "has changed since it was opened; restore it")),
        }
    }
}

impl Part for Lines {
    fn path(&self) -> &Path {
        &self.path
    }

    fn ints(&self, key: &str, s: &Segment, from: u64, to: &mut [i32]) -> Result<(), DataError> {
        let all = self.numbers(key, s)?;
        for (i, to) in to.iter_mut().enumerate() {
            let at = from + i as u64;
            *to = super::bin::whole(all[at as usize], at).map_err(|message| {
                let line = self.lengths.get(&s.at).map_or(0, |(_, number)| *number);
                DataError::refused(&self.path, format!("line {line}, `{key}`: {message}"))
            })?;
        }
        Ok(())
    }

    fn floats(&self, key: &str, s: &Segment, from: u64, to: &mut [f32]) -> Result<(), DataError> {
        let all = self.numbers(key, s)?;
        to.iter_mut().zip(&all[from as usize..]).for_each(|(to, x)| *to = *x as f32);
        Ok(())
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
