//! In: `manifest.json` and the files beside it, hostile. Out: the list of files, each of the size and hash it was written
//! with. The manifest is written last, so a folder without one was never finished.

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{CONFIG, MANIFEST, MODEL, OPTIMIZER, TRAINER, parse, step_of};
use crate::lora::ADAPTER_MODEL;
use astrai_files::{FileError, hex, one_line, open, read_text};

/// Version of the file's form.
const FORMAT: u32 = 1;
/// Longest manifest read, in bytes.
const LONGEST: u64 = 1 << 20;
/// Bytes hashed at a time.
const CHUNK: usize = 1 << 20;

/// What a file was when it was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    pub bytes: u64,
    /// SHA-256 in lower-case hexadecimal.
    pub sha256: String,
}

/// The files of a checkpoint by name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    format: u32,
    pub step: u64,
    pub files: BTreeMap<String, Record>,
}

/// Whether `name` names a file in the folder itself.
pub(super) fn is_plain(name: &str) -> bool {
    let hidden = name.starts_with('.') || name.is_empty();
    !hidden && name.len() <= 255 && !name.contains(['/', '\\']) && !name.contains(char::is_control)
}

impl Manifest {
    pub(super) fn new(step: u64) -> Manifest {
        Manifest { format: FORMAT, step, files: BTreeMap::new() }
    }

    pub(super) fn text(&self) -> Result<String, String> {
        Ok(serde_json::to_string_pretty(self).map_err(|e| e.to_string())? + "\n")
    }

    /// Reads a manifest's text; `path` names it in messages.
    pub(super) fn parse(text: &str, path: &Path) -> Result<Manifest, FileError> {
        let refused = |trouble: String| FileError::refused(path, trouble);
        let manifest: Manifest = parse(text, FORMAT, path)?;
        if let Some(name) = manifest.files.keys().find(|name| !is_plain(name) || *name == MANIFEST) {
            return Err(refused(format!("damaged: lists {:?}", one_line(name))));
        }
        let weights = if manifest.files.contains_key(ADAPTER_MODEL) { ADAPTER_MODEL } else { MODEL };
        match [CONFIG, weights, OPTIMIZER, TRAINER].iter().find(|&&name| !manifest.files.contains_key(name)) {
            Some(name) => Err(refused(format!("damaged: {name} is not listed"))),
            None => Ok(manifest),
        }
    }

    /// Reads the manifest of a checkpoint's folder and holds every file to it: presence and size of all first,
    /// because that is quick, then the hashes.
    pub(super) fn verify(folder: &Path) -> Result<Manifest, FileError> {
        let path = folder.join(MANIFEST);
        let manifest = match read_text(&path, LONGEST) {
            Err(FileError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {
                return Err(FileError::refused(folder, "incomplete: it has no manifest.json"));
            }
            text => Manifest::parse(&text?, &path)?,
        };
        if let Some(step) = step_of(folder).filter(|&step| step != manifest.step) {
            let trouble = format!("damaged: of step {}, in the folder of step {step}", manifest.step);
            return Err(FileError::refused(&path, trouble));
        }
        for (name, record) in &manifest.files {
            let path = folder.join(name);
            let kind = match fs::metadata(&path) {
                Err(e) if e.kind() == ErrorKind::NotFound => {
                    return Err(FileError::refused(&path, "missing, the manifest lists it"));
                }
                kind => kind.map_err(FileError::io(&path, "look at it"))?,
            };
            if !kind.is_file() || kind.len() != record.bytes {
                let trouble = format!("damaged: {} bytes, the manifest says {}", kind.len(), record.bytes);
                return Err(FileError::refused(&path, trouble));
            }
        }
        for (name, record) in &manifest.files {
            let path = folder.join(name);
            if hash(&path)? != record.sha256 {
                return Err(FileError::refused(&path, "damaged: its hash is not the manifest's"));
            }
        }
        Ok(manifest)
    }
}

fn hash(path: &Path) -> Result<String, FileError> {
    let (mut file, _) = open(path)?;
    let (mut hash, mut chunk) = (Sha256::new(), vec![0; CHUNK]);
    loop {
        match file.read(&mut chunk) {
            Ok(0) => return Ok(hex(hash)),
            Ok(n) => hash.update(&chunk[..n]),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(FileError::io(path, "read it")(e)),
        }
    }
}
