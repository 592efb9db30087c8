//! The checkpoints of a run. In: snapshots of an engine. Out: checkpoints, written while the run waits, or from a copy of the snapshot by a
//! thread of its own while the run goes on; never two at once. The run hears later what became of the latter.

use crate::checkpoint::{Contents, Keep, RunFolder, Saved, TrainerState};
use crate::contents::Snapshot;
use astrai_files::FileError;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

/// What became of a checkpoint.
pub(crate) struct Written {
    /// The state of the run that it holds.
    pub state: TrainerState,
    /// Where it is, or why it is not.
    pub saved: Result<Saved, FileError>,
}

/// Writes checkpoints into a run's folder.
pub(crate) struct Saver {
    folder: Arc<Mutex<RunFolder>>,
    path: PathBuf,
    keep: Keep,
    under_way: Option<JoinHandle<(Written, Vec<u8>)>>,
    /// The memory of the last copy, for the next.
    spare: Vec<u8>,
}

impl Saver {
    /// Checkpoints in this folder, of which `keep` says which stay.
    pub(crate) fn new(folder: RunFolder, keep: Keep) -> Saver {
        let path = folder.path().to_path_buf();
        Saver { folder: Arc::new(Mutex::new(folder)), path, keep, under_way: None, spare: vec![] }
    }

    /// The folder's path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a checkpoint, when the one under way is there.
    pub(crate) fn save(&self, contents: &mut dyn Contents) -> Written {
        write(&self.folder, contents, self.keep)
    }

    /// Copies a snapshot and begins to write it. [`written`](Self::written) has said before that none is under way.
    ///
    /// # Errors
    /// The snapshot cannot be read, or the system has no thread.
    pub(crate) fn begin(&mut self, snapshot: &mut Snapshot) -> Result<(), FileError> {
        let mut copy = snapshot.copied(std::mem::take(&mut self.spare))?;
        let (folder, keep) = (self.folder.clone(), self.keep);
        let work = move || (write(&folder, &mut copy, keep), copy.into_bytes());
        let thread = Builder::new().name("checkpoint".into()).spawn(work);
        self.under_way =
            Some(thread.map_err(FileError::io(&self.path, "start a thread that writes into it"))?);
        Ok(())
    }

    /// What became of the checkpoint under way, if that is known, or after waiting for it.
    pub(crate) fn written(&mut self, wait: bool) -> Option<Result<Written, FileError>> {
        let thread = self.under_way.take_if(|thread| wait || thread.is_finished())?;
        let ended = thread.join().map_err(|_| FileError::refused(&self.path, "its writer panicked"));
        Some(ended.map(|(written, memory)| {
            self.spare = memory;
            written
        }))
    }
}

fn write(folder: &Mutex<RunFolder>, contents: &mut dyn Contents, keep: Keep) -> Written {
    let state = contents.trainer();
    let folder = folder.lock().unwrap_or_else(PoisonError::into_inner);
    Written { saved: folder.save(state.step, contents, keep), state }
}
