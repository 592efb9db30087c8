//! Which layout a path is in. In: a file or folder. Out: its layout, and its files in order of paths; names alone decide, and for
//! JSON lines and `meta.json` a look inside.

use super::{Layout, PROGRESS, lines, tokens};
use crate::data::DataError;
use crate::data::preprocess::{DATASET, State};
use crate::data::text::PASSED;
use astrai_files::UNFINISHED;
use std::fs;
use std::path::{Path, PathBuf};

/// Whether a path holds prepared data of several keys, and neither text, records of text nor shards of one key.
pub fn is_prepared(path: &Path) -> bool {
    if path.is_dir() {
        // What cannot be read is said when it is opened.
        return path.join(PROGRESS).exists()
            || path.join(DATASET).exists()
            || find_in(path).is_ok_and(|(layout, _)| matches!(layout, Layout::Hdf5 | Layout::Bin));
    }
    match layout_of(path) {
        Some(Layout::Hdf5) => true,
        Some(Layout::Jsonl) => lines::holds_numbers(path),
        _ => false,
    }
}

/// The layout of a path, and its files in order of paths.
pub(super) fn find(path: &Path) -> Result<(Layout, Vec<PathBuf>), DataError> {
    let doing = "read; name a file or folder that exists and may be read";
    let found = fs::metadata(path).map_err(DataError::io(path, doing))?;
    if found.is_dir() {
        return find_in(path);
    }
    let one = |layout| Ok((layout, vec![path.to_path_buf()]));
    match layout_of(path) {
        Some(Layout::Bin) if path.file_name().is_some_and(|name| name != "meta.json") => one(Layout::Tokens),
        Some(Layout::Bin) => find_in(path.parent().unwrap_or(Path::new("."))),
        Some(layout) => one(layout),
        None => Err(DataError::refused(path, UNKNOWN)),
    }
}

const UNKNOWN: &str =
    "is no prepared data: name .h5, .hdf5 or .jsonl files, or a folder with shards and their meta.json";

/// The layout that a file's name speaks of; `meta.json` stands for its folder, `.bin` for shards.
fn layout_of(path: &Path) -> Option<Layout> {
    if path.file_name().is_some_and(|name| name == "meta.json") {
        return Some(Layout::Bin);
    }
    match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
        "h5" | "hdf5" => Some(Layout::Hdf5),
        "jsonl" => Some(Layout::Jsonl),
        "bin" => Some(Layout::Bin),
        _ => None,
    }
}

/// Whether a file is the state of a preprocessing, and not another's of the same name.
fn is_state(path: &Path) -> bool {
    State::read(path).is_ok_and(|state| state.is_some())
}

fn unfinished(folder: &Path) -> DataError {
    let message = format!(
        "holds {PROGRESS}: its preprocessing has not finished; run `astrai preprocess` again with the same --out, it goes on from there"
    );
    DataError::refused(folder, message)
}

fn find_in(root: &Path) -> Result<(Layout, Vec<PathBuf>), DataError> {
    // A domain's folder lies in the folder that says how far its preprocessing has come.
    if let Some(above) = root.parent().filter(|above| is_state(&above.join(PROGRESS))) {
        return Err(unfinished(above));
    }
    let (mut todo, mut files) = (vec![root.to_path_buf()], Vec::new());
    while let Some(at) = todo.pop() {
        for entry in fs::read_dir(&at).map_err(DataError::io(&at, "read the folder"))? {
            let entry = entry.map_err(DataError::io(&at, "read the folder"))?;
            let (name, path) = (entry.file_name(), entry.path());
            let kind = entry.file_type().map_err(DataError::io(&path, "look at it"))?;
            if name == PROGRESS && (at == root || is_state(&path)) {
                return Err(unfinished(&at));
            }
            if name.as_encoded_bytes().starts_with(UNFINISHED.as_bytes())
                || name.as_encoded_bytes().starts_with(b".")
            {
                continue;
            }
            if kind.is_dir() {
                if !PASSED.iter().any(|passed| name == *passed) {
                    todo.push(path);
                }
            } else if layout_of(&path).is_some() {
                files.push(path);
            }
        }
    }
    files.sort_unstable();
    for layout in [Layout::Hdf5, Layout::Bin, Layout::Jsonl] {
        let mut of: Vec<PathBuf> =
            files.iter().filter(|path| layout_of(path) == Some(layout)).cloned().collect();
        if layout == Layout::Bin {
            of.retain(|path| path.file_name().is_some_and(|name| name == "meta.json"));
        }
        match of.as_slice() {
            [] => {}
            [one] if layout == Layout::Bin && tokens::described_by(one)? => return Ok((Layout::Tokens, of)),
            _ => return Ok((layout, of)),
        }
    }
    Err(DataError::refused(root, UNKNOWN))
}
