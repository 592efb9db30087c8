//! In: a checkpoint's folder, a run's folder or a model directory, all hostile. Out: tensors, state and texts, held to the
//! manifest before anything is believed; where the newest checkpoint is not sound, the one before, and why.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use astrai_runtime::weights::Checkpoint;

use super::manifest::Manifest;
use super::state::{LONGEST, TrainerState};
use super::{Attachment, CONFIG, LATEST, MODEL, OPTIMIZER, TRAINER, step_of};
use crate::lora::{ADAPTER_CONFIG, ADAPTER_MODEL};
use astrai_files::{FileError, read, read_text, shown};

/// Longest config.json read, in bytes.
const LONGEST_CONFIG: u64 = 16 << 20;
/// Longest tokenizer's file read, in bytes.
const LONGEST_ATTACHMENT: u64 = 256 << 20;
/// A checkpoint that agrees with its manifest.
#[derive(Debug)]
pub struct Opened {
    /// Its folder.
    pub path: PathBuf,
    /// Text of `config.json`.
    pub config: String,
    /// Where the run stands.
    pub trainer: TrainerState,
    /// The weights, or those of the adapter.
    pub model: Checkpoint,
    /// Master weights and moments.
    pub optimizer: Checkpoint,
    /// Files of the tokenizer.
    pub tokenizer: Vec<Attachment>,
}

/// The newest sound checkpoint of a run.
#[derive(Debug)]
pub struct Latest {
    /// The checkpoint.
    pub checkpoint: Opened,
    /// What was wrong with newer ones, a line each, for the user.
    pub notes: Vec<String>,
}

/// Opens the checkpoint in the folder `path`.
///
/// # Errors
/// A file is missing, differs from the manifest, or says what this program cannot read.
pub fn open(path: &Path) -> Result<Opened, FileError> {
    let manifest = Manifest::verify(path)?;
    let trainer = path.join(TRAINER);
    let trainer = TrainerState::parse(&read_text(&trainer, LONGEST)?, &trainer)?;
    if trainer.step != manifest.step {
        let trouble = format!("of step {}, the manifest of step {}", trainer.step, manifest.step);
        return Err(FileError::refused(&path.join(TRAINER), trouble));
    }
    let read = |name: &String| {
        let bytes = read(&path.join(name), LONGEST_ATTACHMENT)?;
        Ok(Attachment { name: name.clone(), bytes })
    };
    let names = manifest.files.keys();
    let own = [CONFIG, MODEL, OPTIMIZER, TRAINER, ADAPTER_CONFIG, ADAPTER_MODEL];
    let tokenizer = names.filter(|name| !own.contains(&name.as_str()));
    let model = if manifest.files.contains_key(ADAPTER_MODEL) { ADAPTER_MODEL } else { MODEL };
    Ok(Opened {
        path: path.to_path_buf(),
        config: read_text(&path.join(CONFIG), LONGEST_CONFIG)?,
        trainer,
        model: weights(&path.join(model))?,
        optimizer: weights(&path.join(OPTIMIZER))?,
        tokenizer: tokenizer.map(read).collect::<Result<_, FileError>>()?,
    })
}

/// Opens the newest sound checkpoint of the run in `out`; none if there is no checkpoint at all.
///
/// # Errors
/// There are checkpoints and none is sound (all reasons, in one line), or `out` cannot be listed.
pub fn open_latest(out: &Path) -> Result<Option<Latest>, FileError> {
    let all = steps(out)?;
    let mut notes = Vec::new();
    if let Some(note) = wrong_pointer(out, &all) {
        notes.push(note);
    }
    for (_, path) in &all {
        match open(path) {
            Ok(checkpoint) => return Ok(Some(Latest { checkpoint, notes })),
            Err(e) => notes.push(e.to_string()),
        }
    }
    if all.is_empty() {
        return Ok(None);
    }
    let trouble =
        format!("no checkpoint here is sound ({}); give another --out to start anew", notes.join("; "));
    Err(FileError::refused(out, trouble))
}

/// The checkpoints' folders in `out`, newest first; none where `out` is not.
pub(super) fn steps(out: &Path) -> Result<Vec<(u64, PathBuf)>, FileError> {
    let entries = match fs::read_dir(out) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(FileError::io(out, "list it"))?,
    };
    let mut all = Vec::new();
    for entry in entries {
        let path = entry.map_err(FileError::io(out, "list it"))?.path();
        if let Some(step) = step_of(&path).filter(|_| path.is_dir()) {
            all.push((step, path));
        }
    }
    all.sort_by(|a, b| b.cmp(a));
    Ok(all)
}

/// What is wrong with `latest`. That it lags behind is not: the process was stopped between publishing and pointing.
fn wrong_pointer(out: &Path, all: &[(u64, PathBuf)]) -> Option<String> {
    let path = out.join(LATEST);
    let text = match read_text(&path, 256) {
        Ok(text) => text,
        Err(FileError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => return None,
        Err(e) => return Some(e.to_string()),
    };
    let known = all.iter().any(|(_, p)| p.file_name().is_some_and(|name| name == text.trim_end()));
    (!known).then(|| format!("{}: names no checkpoint that is here", shown(&path)))
}

fn weights(path: &Path) -> Result<Checkpoint, FileError> {
    Checkpoint::open(path).map_err(|e| {
        // The weights' own line begins with the file's name, which this error says already.
        let line = e.to_string();
        let trouble = line.strip_prefix(&format!("{}: ", shown(path))).unwrap_or(&line).to_string();
        FileError::refused(path, trouble)
    })
}
