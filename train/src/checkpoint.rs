//! Checkpoints. In: the engine's tensors, streamed from where they lie, and the run's state. Out: `OUT/step_000020/`, which
//! is there whole or not at all, and the same things back, checked against the manifest. The folder's
//! rename is the moment of truth: before it the older checkpoints stand, after it the new one does, whatever stops the
//! process. `config.json`, `model.safetensors` and the tokenizer's files make it a model directory for transformers; an adapter's
//! `adapter_config.json` and `adapter_model.safetensors` one for PEFT.

mod compatible;
mod folder;
mod manifest;
mod open;
mod save;
mod state;
mod stream;
#[cfg(test)]
mod tests;

use std::path::Path;

use astrai_runtime::weights::Entry;
use serde::Deserialize;
use serde::de::DeserializeOwned;

pub use compatible::{check_compatible, check_same_data};
pub use folder::{Keep, Resumed, RunFolder};
pub use open::{Latest, Opened, open, open_latest};
pub use save::Saved;
pub use state::{Counter, TrainerState, Versions};

use astrai_files::{FileError, one_line};

pub(crate) const CONFIG: &str = "config.json";
pub(crate) const MODEL: &str = "model.safetensors";
pub(crate) const OPTIMIZER: &str = "optimizer.safetensors";
pub(crate) const TRAINER: &str = "trainer.json";
pub(crate) const MANIFEST: &str = "manifest.json";
/// Names the newest checkpoint's folder, for people and scripts.
pub(crate) const LATEST: &str = "latest";

/// Which tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The weights, in the names, shapes and dtype of the model's family; or an adapter's, in PEFT's names.
    Model,
    /// Master weights and moments.
    Optimizer,
}

/// A small file kept as it is: one of the tokenizer's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// Name without a folder.
    pub name: String,
    /// Content.
    pub bytes: Vec<u8>,
}

/// Takes the bytes of one tensor, piece after piece: row-major, little-endian.
pub type Sink<'a> = dyn FnMut(&[u8]) -> Result<(), FileError> + 'a;

/// What a checkpoint is made of; the engine's side of a save.
pub trait Contents {
    /// Text of `config.json`.
    fn config(&self) -> String;
    /// Files of the tokenizer, for a model directory that is complete.
    fn tokenizer(&self) -> &[Attachment];
    /// Text of `adapter_config.json`, where the weights are an adapter's: the folder is then one that PEFT reads.
    fn adapter(&self) -> Option<String> {
        None
    }
    /// State of the run after the step.
    fn trainer(&self) -> TrainerState;
    /// Names, types and shapes, in the order of the file.
    fn entries(&self, part: Part) -> Vec<Entry>;
    /// Gives the bytes of one entry to `sink`, in as many pieces as is convenient; a piece may be a view of the engine's
    /// memory, it is hashed and written before the call returns.
    ///
    /// # Errors
    /// Those of `sink`, passed on, or the engine's own ([`FileError::Refused`] with the tensor's name).
    fn write(&mut self, part: Part, entry: &Entry, sink: &mut Sink) -> Result<(), FileError>;
}

/// Reads the text of a JSON file of this form; `path` names it in messages.
fn parse<T: DeserializeOwned>(text: &str, form: u32, path: &Path) -> Result<T, FileError> {
    #[derive(Deserialize)]
    struct Form {
        format: u32,
    }
    let damaged = |e: serde_json::Error| FileError::refused(path, one_line(&format!("damaged: {e}")));
    let Form { format } = serde_json::from_str(text).map_err(damaged)?;
    if format != form {
        let trouble =
            format!("of form {format}, this program reads form {form}: use the version that wrote it");
        return Err(FileError::refused(path, trouble));
    }
    serde_json::from_str(text).map_err(damaged)
}

/// Name of the folder of `step`.
pub fn folder_name(step: u64) -> String {
    format!("step_{step:06}")
}

/// The step of a checkpoint's folder, from its name.
pub(crate) fn step_of(path: &Path) -> Option<u64> {
    let name = path.file_name()?.to_str()?;
    let step: u64 = name.strip_prefix("step_")?.parse().ok()?;
    (folder_name(step) == name).then_some(step)
}
