//! Text and token ids. In: `tokenizer.json` with the files beside it that name special tokens. Out: ids for text, text for
//! ids, whole or token by token. The merging itself is the `tokenizers` crate's, so that ids are those of the reference; this
//! module is here for what that crate leaves open: errors that name the file and the remedy, special tokens, no silent
//! truncation, copies beside a checkpoint, and a stream that never shows half a character.

mod byte_level;
mod bytes;
mod check;
mod parse;
mod special;
mod stream;
#[cfg(test)]
pub(crate) mod tests;

use std::fs;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;

use sha2::{Digest, Sha256};
use tokenizers::{DecoderWrapper, Model, Tokenizer as Library};

use crate::files::line;
use astrai_files::{hex, read_present};

use bytes::Pieces;
use parse::Parsed;

pub use special::{Skip, SpecialToken, SpecialTokens};
pub use stream::DecodeStream;

/// What makes a folder a tokenizer's; whatever of it is there is copied by [`Tokenizer::save_to`].
pub const FILES: [&str; 8] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
];

/// Larger than any published tokenizer by an order of magnitude; whoever names the weights by mistake learns it at once.
const LARGEST: u64 = 1 << 28;

/// Why a tokenizer cannot be used, in one line: the file, the defect, the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {message}", path = .path.display())]
pub struct TokenizerError {
    /// The file or folder.
    pub path: PathBuf,
    /// The defect and the remedy.
    pub message: String,
}

impl TokenizerError {
    fn new(path: &Path, message: impl Into<String>) -> TokenizerError {
        TokenizerError { path: path.to_path_buf(), message: message.into() }
    }
}

/// A tokenizer, ready for use from any number of threads. A clone shares everything.
#[derive(Clone)]
pub struct Tokenizer {
    shared: Arc<Shared>,
}

struct Shared {
    path: PathBuf,
    library: Library,
    /// The same, but special tokens written in a text are text; made when it is asked for, for it has a vocabulary of its own.
    plain: OnceLock<Library>,
    /// How many times longer normalising makes a text at most.
    growth: f64,
    byte_level: bool,
    /// The bytes of each id, where they tell the spans of a text; made when they are asked for.
    pieces: OnceLock<Option<Pieces>>,
    vocabulary: usize,
    special: SpecialTokens,
    warnings: Vec<String>,
    /// SHA-256 of `tokenizer.json`, where its contents are not kept.
    sha256: Option<String>,
    /// Names and contents, as they were read, unless nobody copies them.
    files: Vec<(&'static str, Vec<u8>)>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({}, {} ids)", self.shared.path.display(), self.shared.vocabulary)
    }
}

impl Tokenizer {
    /// Opens a `tokenizer.json`, or the one in a model's folder, with `tokenizer_config.json` and `special_tokens_map.json`
    /// beside it where they are. Truncation and padding that the file asks for are switched off: nothing is cut unasked.
    ///
    /// # Errors
    /// The file is absent, unreadable, no tokenizer, or holds no token; or one of its neighbours is no JSON object.
    pub fn open(path: &Path) -> Result<Tokenizer, TokenizerError> {
        let (file, folder) = locate(path)?;
        let main = read(&file)?;
        let Parsed { library, growth, vocabulary } =
            parse::parse(&main).map_err(|message| TokenizerError::new(&file, message))?;
        let mut files = vec![(FILES[0], main)];
        for name in &FILES[1..] {
            let beside = folder.join(name);
            if beside.is_file() {
                files.push((name, read(&beside)?));
            }
        }
        let (special, warnings) = special::read(&folder, &files, |token| library.token_to_id(token))?;
        let byte_level = library.get_decoder().is_some_and(|d| matches!(d, DecoderWrapper::ByteLevel(_)));
        let shared = Shared {
            path: file,
            library,
            plain: OnceLock::new(),
            growth,
            byte_level,
            pieces: OnceLock::new(),
            vocabulary,
            special,
            warnings,
            sha256: None,
            files,
        };
        Ok(Tokenizer { shared: Arc::new(shared) })
    }

    /// The same without the files' contents, for whoever copies no tokenizer: [`file`](Self::file) finds none, and
    /// [`save_to`](Self::save_to) refuses.
    #[must_use]
    pub fn without_files(mut self) -> Tokenizer {
        let sha256 = self.sha256();
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            (shared.sha256, shared.files) = (Some(sha256), vec![]);
        }
        self
    }

    /// Ids of `text`. Special tokens written in it are recognised; `add_special` also adds those that the tokenizer puts
    /// around a text (a bos, say).
    ///
    /// # Errors
    /// The text holds what the vocabulary cannot express.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        self.encode_by(&self.shared.library, text, add_special)
    }

    fn encode_by(
        &self,
        library: &Library,
        text: &str,
        add_special: bool,
    ) -> Result<Vec<u32>, TokenizerError> {
        let encode = || {
            check::fits(library.get_normalizer(), self.shared.growth, text)?;
            let encoding = library.encode_fast(text, add_special).map_err(|e| e.to_string())?;
            Ok(encoding.get_ids().to_vec())
        };
        let done = check::guarded(encode).and_then(|done| done);
        done.map_err(|e| self.error("cannot encode this text", &e))
    }

    /// Ids of `text` as mere text: a special token written in it is spelt, never recognised, and none is added. This is how
    /// text of unknown origin is read.
    ///
    /// # Errors
    /// The text holds what the vocabulary cannot express.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let plain = self.shared.plain.get_or_init(|| {
            let mut plain = self.shared.library.clone();
            plain.set_encode_special_tokens(true);
            plain
        });
        self.encode_by(plain, text, false)
    }

    /// Ids of each text, on all cores; nothing is added. With `recognise`, special tokens written in the texts are those
    /// tokens, otherwise they are spelt.
    ///
    /// # Errors
    /// A text holds what the vocabulary cannot express.
    pub fn encode_batch(&self, texts: &[&str], recognise: bool) -> Result<Vec<Vec<u32>>, TokenizerError> {
        let next = AtomicUsize::new(0);
        let all: Vec<OnceLock<Result<Vec<u32>, TokenizerError>>> =
            texts.iter().map(|_| OnceLock::new()).collect();
        // Ids are taken out by the thread that encodes: what the library builds around them is large, and costly to free elsewhere.
        let work = || {
            while let Some((text, slot)) = {
                let at = next.fetch_add(1, Ordering::Relaxed);
                texts.get(at).zip(all.get(at))
            } {
                slot.get_or_init(
                    || if recognise { self.encode(text, false) } else { self.encode_plain(text) },
                );
            }
        };
        let threads = thread::available_parallelism().map_or(1, NonZero::get).min(texts.len());
        thread::scope(|scope| {
            (1..threads).for_each(|_| drop(scope.spawn(work)));
            work();
        });
        all.into_iter().filter_map(OnceLock::into_inner).collect()
    }

    /// Text of `ids`; special tokens are left out with `skip_special`. Bytes that form no character show as U+FFFD, ids that
    /// the vocabulary does not have as nothing.
    ///
    /// # Errors
    /// The tokenizer's decoder refuses these tokens.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TokenizerError> {
        let decode = || self.shared.library.decode(ids, skip_special).map_err(|e| e.to_string());
        let done = check::guarded(decode).and_then(|done| done);
        done.map_err(|e| self.error("cannot decode these ids", &e))
    }

    /// A stream that turns ids into text one by one, leaving out special tokens, or some of them, or none.
    pub fn stream(&self, skip: impl Into<Skip>) -> DecodeStream {
        DecodeStream::new(self.clone(), skip.into())
    }

    /// One more than the largest id: the least number of rows a model's embedding must have.
    pub fn vocabulary(&self) -> usize {
        self.shared.vocabulary
    }

    /// The id of a token, given by its text in the vocabulary.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.shared.library.token_to_id(token)
    }

    /// The text in the vocabulary of an id.
    pub fn token(&self, id: u32) -> Option<String> {
        self.shared.library.id_to_token(id)
    }

    /// Whether the id is a special token, which [`decode`](Self::decode) can leave out.
    pub fn is_special(&self, id: u32) -> bool {
        let added = self.shared.library.get_added_vocabulary();
        added.simple_id_to_token(id).is_some_and(|token| added.is_special_token(&token))
    }

    /// What [`decode`](Self::decode) gives its decoder for an id; `None` for what it leaves out.
    fn token_text(&self, id: u32, skip: &Skip) -> Option<String> {
        let library = &self.shared.library;
        let added = library.get_added_vocabulary();
        let token = added.simple_id_to_token(id).or_else(|| library.get_model().id_to_token(id))?;
        (!skip.leaves_out(id) || !added.is_special_token(&token)).then_some(token)
    }

    /// The tokens with a part to play.
    pub fn special(&self) -> &SpecialTokens {
        &self.shared.special
    }

    /// What is odd about the files but does no harm, a line each.
    pub fn warnings(&self) -> &[String] {
        &self.shared.warnings
    }

    /// The `tokenizer.json` that was opened.
    pub fn path(&self) -> &Path {
        &self.shared.path
    }

    /// The contents of a file that was read with the tokenizer, `tokenizer_config.json` or `chat_template.jinja` say.
    pub fn file(&self, name: &str) -> Option<&[u8]> {
        self.shared.files.iter().find(|(n, _)| *n == name).map(|(_, bytes)| bytes.as_slice())
    }

    /// SHA-256 of `tokenizer.json`, in hexadecimal: equal sums give equal ids.
    pub fn sha256(&self) -> String {
        let read = || hex(Sha256::new_with_prefix(self.file(FILES[0]).unwrap_or_default()));
        self.shared.sha256.clone().unwrap_or_else(read)
    }

    /// Writes the tokenizer's files, as they were read, into the folder `dir`, which is made where it is absent.
    ///
    /// # Errors
    /// A file cannot be written, or their contents were [let go](Self::without_files).
    pub fn save_to(&self, dir: &Path) -> Result<(), TokenizerError> {
        let failed = |path: &Path, e: std::io::Error| TokenizerError::new(path, format!("cannot write: {e}"));
        if self.shared.files.is_empty() {
            return Err(TokenizerError::new(
                dir,
                "the tokenizer's files were not kept; open it anew to copy them",
            ));
        }
        fs::create_dir_all(dir).map_err(|e| failed(dir, e))?;
        for (name, bytes) in &self.shared.files {
            let path = dir.join(name);
            fs::write(&path, bytes).map_err(|e| failed(&path, e))?;
        }
        Ok(())
    }

    fn error(&self, what: &str, e: &str) -> TokenizerError {
        TokenizerError::new(&self.shared.path, format!("{what}: {}", line(e)))
    }
}

/// `tokenizer.json` and the folder it lies in.
fn locate(path: &Path) -> Result<(PathBuf, PathBuf), TokenizerError> {
    if !path.is_dir() {
        let folder = path.parent().unwrap_or(Path::new("")).to_path_buf();
        return Ok((path.to_path_buf(), folder));
    }
    let file = path.join(FILES[0]);
    if file.exists() {
        return Ok((file, path.to_path_buf()));
    }
    let older = ["tokenizer.model", "vocab.json", "vocab.txt"].into_iter().find(|n| path.join(n).exists());
    Err(TokenizerError::new(
        path,
        match older {
            Some(name) => format!(
                "holds {name} but no tokenizer.json; write one with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            ),
            None => "holds no tokenizer.json; name the folder or file that does".into(),
        },
    ))
}

fn read(path: &Path) -> Result<Vec<u8>, TokenizerError> {
    let failed = |message: String| TokenizerError::new(path, message);
    let found = read_present(path, LARGEST).map_err(|e| failed(e.trouble()))?;
    found.ok_or_else(|| failed("no such file; name a tokenizer.json or its folder".into()))
}
