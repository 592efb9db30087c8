//! The text that `quickstart` trains on. In: what the user names, or nothing. Out: files of text, something to continue, ids to
//! run the model on.

use crate::failure::{Failure, bail};
use astrai_ir::DType;
use astrai_runtime::weights;
use astrai_serve::tokenizer::Tokenizer;
use astrai_train::data::Corpus;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What of the repository holds text; folders of runs that may lie beside are no part of it.
const OWN: [&str; 11] = [
    "README.md",
    "bench",
    "builders",
    "cli",
    "codegen",
    "ir",
    "passes",
    "runtime",
    "serve",
    "tests",
    "train",
];

/// Less text than this teaches nothing, bytes.
const LEAST: u64 = 20_000;

/// Letters of the text that the trained model continues, at most.
const PROMPT: usize = 160;

/// Text found.
pub(super) struct Text {
    /// Files and folders, as `astrai train --data` takes them.
    pub(super) roots: Vec<PathBuf>,
    /// Their files.
    pub(super) corpus: Corpus,
}

impl Text {
    /// The text in `given`, or in the sources of astrai where nothing is given; not what lies in `folder`.
    pub(super) fn find(given: &[PathBuf], folder: &Path) -> Result<Text, Failure> {
        let roots = match given {
            [] => own().ok_or(
                "no text found to train on: give some with --data FOLDER, or run this inside astrai's repository",
            )?,
            given => given.to_vec(),
        };
        let corpus = Corpus::find(&roots, &[folder.to_path_buf()]).map_err(|e| e.to_string())?;
        if corpus.bytes() < LEAST {
            let bytes = corpus.bytes();
            bail!("{bytes} bytes of text teach nothing: give {LEAST} at least, with --data FOLDER");
        }
        Ok(Text { roots, corpus })
    }

    /// The first words of a file in the middle.
    pub(super) fn prompt(&self) -> Result<String, Failure> {
        let middle = self.corpus.bytes() / 2;
        for piece in self.corpus.documents() {
            let piece = piece.map_err(|e| e.to_string())?;
            let start: String = piece.text.trim_start().chars().take(PROMPT).collect();
            // The last word may be half of one.
            let whole = start.rsplit_once(' ').map_or(start.as_str(), |(words, _)| words);
            if piece.read >= middle && !whole.is_empty() {
                return Ok(whole.to_string());
            }
        }
        Err("the text holds no words".into())
    }

    /// Writes `input_ids`, i64 `shape`, of the text's beginning.
    pub(super) fn write_ids(
        &self,
        path: &Path,
        tokenizer: &Tokenizer,
        shape: [usize; 2],
    ) -> Result<(), Failure> {
        let count = shape[0] * shape[1];
        let mut ids: Vec<u32> = Vec::new();
        for piece in self.corpus.documents() {
            let piece = piece.map_err(|e| e.to_string())?;
            ids.extend(tokenizer.encode_plain(&piece.text).map_err(|e| e.to_string())?);
            if ids.len() >= count {
                break;
            }
        }
        let bytes: Vec<u8> =
            ids.iter().cycle().take(count).flat_map(|i| i64::from(*i).to_le_bytes()).collect();
        let tensor = ("input_ids", DType::I64, shape.as_slice(), bytes.as_slice());
        Ok(weights::write(path, [tensor], &BTreeMap::new())?)
    }
}

/// The repository that the program runs in, or was built in.
pub(super) fn repository() -> Option<PathBuf> {
    let from = [std::env::current_dir(), std::env::current_exe()];
    let above = from.iter().flatten().flat_map(|p| p.ancestors());
    above.into_iter().find(|p| p.join("runtime/src/compile.rs").is_file()).map(Path::to_path_buf)
}

fn own() -> Option<Vec<PathBuf>> {
    let root = repository()?;
    let paths = OWN.iter().map(|name| near(&root.join(name))).filter(|p| p.exists());
    Some(paths.collect())
}

/// A path as seen from the current folder, where it is inside.
pub(super) fn near(path: &Path) -> PathBuf {
    let here = std::env::current_dir().ok();
    here.and_then(|here| path.strip_prefix(here).ok()).unwrap_or(path).to_path_buf()
}
