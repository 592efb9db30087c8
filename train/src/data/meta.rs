//! `meta.json`: what shards of token ids hold. In: a file that this program or a user wrote, hostile until checked. Out: the
//! type of the ids, the shards in order, and what is known of where they come from.

use super::DataError;
use astrai_files::{one_line, read_present};
use serde::Serialize;
use serde_json::{Map, Value};
use std::path::{Component, Path};

/// The name of the file.
pub(super) const META: &str = "meta.json";

/// Longest file read, bytes.
pub(super) const LONGEST: u64 = 1 << 26;

/// What this program writes as `format`, and the version of it.
pub(super) const FORMAT: (&str, u64) = ("astrai-tokens", 1);

/// A line that a user can write beside shards of their own.
const EXAMPLE: &str = r#"{"dtype": "uint16", "vocab_size": 50257, "eos": 50256}"#;

/// How an id is stored, little-endian.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Width {
    /// Two bytes.
    #[default]
    Uint16,
    /// Four bytes; signed ones that are not negative read the same.
    Uint32,
    /// Eight bytes.
    Int64,
}

impl Width {
    /// Bytes of an id.
    pub fn bytes(self) -> usize {
        match self {
            Width::Uint16 => 2,
            Width::Uint32 => 4,
            Width::Int64 => 8,
        }
    }

    /// The narrowest that holds ids below `vocabulary`.
    pub fn of(vocabulary: usize) -> Width {
        if vocabulary <= 1 << 16 { Width::Uint16 } else { Width::Uint32 }
    }

    fn parse(name: &str) -> Option<Width> {
        Some(match name {
            "uint16" | "u16" | "<u2" => Width::Uint16,
            "uint32" | "u32" | "<u4" | "int32" | "i32" | "<i4" => Width::Uint32,
            "int64" | "i64" | "<i8" | "uint64" | "u64" | "<u8" => Width::Int64,
            _ => return None,
        })
    }
}

/// A file of ids.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Shard {
    /// Its name in the folder.
    pub file: String,
    /// Its ids, where `meta.json` says.
    pub tokens: Option<u64>,
}

/// What shards hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Meta {
    /// `astrai-tokens` where this program wrote it.
    pub format: Option<String>,
    /// Version of the format.
    pub version: Option<u64>,
    /// How ids are stored.
    pub dtype: Width,
    /// Ids of all shards.
    pub tokens: Option<u64>,
    /// Documents, each ended by `eos`.
    pub documents: Option<u64>,
    /// All ids are below.
    pub vocab_size: Option<u64>,
    /// The id that ends a document.
    pub eos: Option<u32>,
    /// The files; where none is named, all `.bin` files in order of names.
    pub shards: Vec<Shard>,
    /// SHA-256 of the `tokenizer.json` that made the ids.
    pub tokenizer: Option<String>,
    /// Whether special tokens written in the text were recognised.
    pub recognise: Option<bool>,
    /// Sum over the paths, sizes and times of the text.
    pub fingerprint: Option<String>,
    /// The files and folders of the text, as they were named.
    pub sources: Vec<String>,
}

impl Meta {
    /// Of an unknown origin.
    pub(super) fn new(dtype: Width) -> Meta {
        Meta { dtype, ..Meta::default() }
    }

    /// Whether this program wrote it.
    pub(super) fn is_ours(&self) -> bool {
        self.format.as_deref() == Some(FORMAT.0)
    }

    /// Reads a `meta.json`; also gives a warning for each key that means nothing here.
    ///
    /// # Errors
    /// The file is absent, unreadable, or says what cannot be.
    pub fn read(path: &Path) -> Result<(Meta, Vec<String>), DataError> {
        let bytes = read_present(path, LONGEST)?.ok_or_else(|| {
            let message = format!("no such file; write one that describes the shards, like {EXAMPLE}");
            DataError::refused(path, message)
        })?;
        Reader { path, warnings: Vec::new() }.meta(&bytes)
    }
}

/// Reads the keys one by one, so that each defect can be named.
struct Reader<'a> {
    path: &'a Path,
    warnings: Vec<String>,
}

impl Reader<'_> {
    fn refused(&self, message: impl Into<String>) -> DataError {
        DataError::refused(self.path, message)
    }

    fn meta(mut self, bytes: &[u8]) -> Result<(Meta, Vec<String>), DataError> {
        let object: Map<String, Value> = serde_json::from_slice(bytes).map_err(|e| {
            let why = one_line(&e.to_string());
            self.refused(format!("is no JSON object ({why}); write one like {EXAMPLE}"))
        })?;
        let mut meta = match (object.get("dtype"), object.get("sequence")) {
            (None, Some(Value::Object(sequence))) => self.keyed(sequence)?,
            (dtype, _) => Meta::new(self.width(dtype)?),
        };
        for (key, value) in object.iter().filter(|(_, value)| !value.is_null()) {
            match key.as_str() {
                "dtype" | "sequence" => {}
                "format" => meta.format = Some(self.text(key, value)?),
                "version" => meta.version = Some(self.number(key, value)?),
                "tokens" => meta.tokens = Some(self.number(key, value)?),
                "documents" => meta.documents = Some(self.number(key, value)?),
                "vocab_size" | "vocabulary" | "vocab" => meta.vocab_size = Some(self.number(key, value)?),
                "eos" | "eos_token_id" | "eos_id" => {
                    let eos = u32::try_from(self.number(key, value)?);
                    meta.eos =
                        Some(eos.map_err(|_| self.refused(format!("`{key}` is no token id; mend it")))?);
                }
                "shards" => meta.shards = self.shards(value)?,
                "tokenizer" => meta.tokenizer = Some(self.text(key, value)?),
                "recognise" => meta.recognise = value.as_bool(),
                "fingerprint" => meta.fingerprint = Some(self.text(key, value)?),
                "sources" => meta.sources = self.texts(key, value)?,
                _ => self
                    .warnings
                    .push(format!("{}: `{key}` means nothing here and is left out", self.path.display())),
            }
        }
        if meta.is_ours() && meta.version != Some(FORMAT.1) {
            let message = format!("is of another version than {}; prepare the data again", FORMAT.1);
            return Err(self.refused(message));
        }
        Ok((meta, self.warnings))
    }

    /// The layout with an object for each key: `{"sequence": {"shape": [n], "dtype": "int32"}}` beside `sequence.bin`.
    fn keyed(&mut self, sequence: &Map<String, Value>) -> Result<Meta, DataError> {
        let mut meta = Meta::new(self.width(sequence.get("dtype"))?);
        let shape = sequence.get("shape").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let sizes: Option<Vec<u64>> = shape.iter().map(Value::as_u64).collect();
        let tokens = sizes.and_then(|sizes| sizes.into_iter().try_fold(1, u64::checked_mul));
        if shape.is_empty() || tokens.is_none() {
            return Err(self.refused("`sequence` has no `shape` of whole numbers; write it, like [123456]"));
        }
        meta.shards = vec![Shard { file: "sequence.bin".into(), tokens }];
        Ok(meta)
    }

    fn width(&self, dtype: Option<&Value>) -> Result<Width, DataError> {
        let width = dtype.and_then(Value::as_str).and_then(Width::parse);
        width.ok_or_else(|| {
            let said = dtype.map_or("is missing".to_owned(), |value| format!("is {}", brief(value)));
            self.refused(format!("`dtype` {said}; write one of uint16, uint32, int32, int64, like {EXAMPLE}"))
        })
    }

    fn number(&self, key: &str, value: &Value) -> Result<u64, DataError> {
        let number = value.as_u64();
        number.ok_or_else(|| self.refused(format!("`{key}` is {}, no whole number; mend it", brief(value))))
    }

    fn text(&self, key: &str, value: &Value) -> Result<String, DataError> {
        let text = value.as_str().map(str::to_owned);
        text.ok_or_else(|| self.refused(format!("`{key}` is {}, no text; mend it", brief(value))))
    }

    fn texts(&self, key: &str, value: &Value) -> Result<Vec<String>, DataError> {
        let list = value.as_array().map(Vec::as_slice).unwrap_or_default();
        list.iter().map(|value| self.text(key, value)).collect()
    }

    fn shards(&self, value: &Value) -> Result<Vec<Shard>, DataError> {
        let list = value.as_array().ok_or_else(|| self.refused("`shards` is no list of files; mend it"))?;
        let mut shards = Vec::with_capacity(list.len());
        for value in list {
            let file = self.text("shards", value.get("file").unwrap_or(value))?;
            let mut parts = Path::new(&file).components();
            if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) {
                let message = format!("shard {file:?} is no plain name of a file in this folder; mend it");
                return Err(self.refused(message));
            }
            let tokens = value.get("tokens").map(|value| self.number("tokens", value)).transpose()?;
            shards.push(Shard { file, tokens });
        }
        Ok(shards)
    }
}

/// A value short enough for a message.
fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(40) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}
