//! Where preprocessing stands. In: a folder of results. Out: the place in the input up to which shards are written, kept in
//! `progress.json` until all is done, and then what the folder holds, in `dataset.json`. Each file is replaced whole, and after the
//! shards that it counts: what a run was killed in the middle of is removed and made again.

use crate::data::DataError;
use crate::data::store::{Layout, PROGRESS, Writer};
use astrai_files::{System, UNFINISHED, one_line, replace};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Says what a folder of prepared data holds.
pub const DATASET: &str = "dataset.json";

/// Longest file of either name, bytes.
const LONGEST: u64 = 1 << 24;

/// Shards of a domain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Domain {
    /// How many are written.
    pub shards: usize,
    /// Records read into them.
    pub records: u64,
    /// Sequences that they became by packing.
    pub sequences: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Of these, learnt ones.
    pub learnt: u64,
}

/// Where a run stands, and at its end what it made.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Version of this form: 1.
    pub version: u64,
    /// Sum over the configuration, the tokenizer and the input.
    pub fingerprint: String,
    /// The input's file at hand.
    pub file: usize,
    /// Bytes of it that are done.
    pub offset: u64,
    /// Lines of it that are done.
    pub line: u64,
    /// Records written.
    pub records: u64,
    /// Records left out, by reason.
    pub dropped: BTreeMap<String, u64>,
    /// Of those written, records that `max_seq_len` cut.
    #[serde(default)]
    pub cut: u64,
    /// What is written, by domain.
    pub domains: BTreeMap<String, Domain>,
    /// Shares in which the domains are to be mixed.
    pub weights: BTreeMap<String, f64>,
}

impl State {
    /// Reads either file; none where it is absent.
    ///
    /// # Errors
    /// It is there and is none.
    pub fn read(path: &Path) -> Result<Option<State>, DataError> {
        let Some(bytes) = astrai_files::read_present(path, LONGEST)? else { return Ok(None) };
        let state: State = serde_json::from_slice(&bytes).map_err(|e| {
            let why = one_line(&e.to_string());
            DataError::refused(
                path,
                format!("was not written by `astrai preprocess` ({why}); choose another folder"),
            )
        })?;
        match state.version {
            1 => Ok(Some(state)),
            n => Err(DataError::refused(
                path,
                format!("is of version {n}, not 1; prepare the data again elsewhere"),
            )),
        }
    }

    /// Writes either file.
    ///
    /// # Errors
    /// The system refuses.
    pub fn write(&self, path: &Path) -> Result<(), DataError> {
        let text = serde_json::to_string_pretty(self)
            .map_err(|e| DataError::refused(path, format!("cannot be written as JSON: {e}")))?;
        Ok(replace(&System, path, format!("{text}\n").as_bytes())?)
    }

    /// Refuses a folder that has lost a shard.
    ///
    /// # Errors
    /// A shard that the state counts is absent.
    pub fn check(&self, out: &Path, layout: Layout) -> Result<(), DataError> {
        for (name, domain) in &self.domains {
            let mut shards = (0..domain.shards).map(|number| Writer::path(&out.join(name), layout, number));
            if let Some(lost) = shards.find(|path| !path.exists()) {
                let message =
                    "is gone, and the folder counts it; remove the whole folder and prepare the data again";
                return Err(DataError::refused(&lost, message));
            }
        }
        Ok(())
    }

    /// Removes what was written after this state: shards that it does not count, and what is not whole.
    ///
    /// # Errors
    /// The system refuses.
    pub fn clean(&self, out: &Path, layout: Layout) -> Result<(), DataError> {
        let list = |folder: &Path| -> Result<Vec<(String, std::path::PathBuf)>, DataError> {
            let entries = fs::read_dir(folder).map_err(DataError::io(folder, "read the folder"))?;
            entries
                .map(|entry| {
                    let entry = entry.map_err(DataError::io(folder, "read the folder"))?;
                    Ok((entry.file_name().to_string_lossy().into_owned(), entry.path()))
                })
                .collect()
        };
        for (name, folder) in list(out)? {
            if name.starts_with(UNFINISHED) {
                Writer::remove(&folder)?;
                continue;
            }
            if !folder.is_dir() {
                continue;
            }
            let whole = self.domains.get(&name).map_or(0, |domain| domain.shards);
            for (inside, path) in list(&folder)? {
                let known = |number| Writer::path(&folder, layout, number) == path;
                let ours = inside.starts_with(UNFINISHED)
                    || number_of(&inside).is_some_and(|n| n >= whole && known(n));
                if ours {
                    Writer::remove(&path)?;
                }
            }
        }
        Ok(())
    }
}

/// The number in a shard's name.
fn number_of(name: &str) -> Option<usize> {
    let digits = name.split_once('_')?.1;
    digits.split('.').next()?.parse().ok()
}

/// The file that marks a folder as unfinished.
pub(super) fn progress(out: &Path) -> std::path::PathBuf {
    out.join(PROGRESS)
}
