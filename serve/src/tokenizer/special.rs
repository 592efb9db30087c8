//! Special tokens by their part. In: `tokenizer_config.json` and, for what it leaves open, the older
//! `special_tokens_map.json`. Out: which token begins and ends a text, pads a batch, stands for the unknown.

use super::TokenizerError;
use crate::files::object;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

/// A token with a part to play.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecialToken {
    /// Its id.
    pub id: u32,
    /// Its text.
    pub text: String,
}

/// The tokens with a part to play, where the files name them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Begins a text.
    pub bos: Option<SpecialToken>,
    /// Ends a text.
    pub eos: Option<SpecialToken>,
    /// Fills a batch; never to be told from data by its id.
    pub pad: Option<SpecialToken>,
    /// Stands for what the vocabulary lacks.
    pub unk: Option<SpecialToken>,
}

/// Which special tokens decoding leaves out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Skip {
    /// None.
    Nothing,
    /// All but these ids, which mark something in the text.
    AllBut(Arc<[u32]>),
}

impl Skip {
    /// Whether decoding leaves out this special token.
    pub(super) fn leaves_out(&self, id: u32) -> bool {
        match self {
            Skip::Nothing => false,
            Skip::AllBut(kept) => !kept.contains(&id),
        }
    }
}

impl From<bool> for Skip {
    /// All of them, or none.
    fn from(all: bool) -> Skip {
        if all { Skip::AllBut(Arc::new([])) } else { Skip::Nothing }
    }
}

/// Where to look, the newer file first.
const SOURCES: [&str; 2] = ["tokenizer_config.json", "special_tokens_map.json"];

/// Reads the parts, and a warning for each token that is named but is not in the vocabulary.
pub(super) fn read(
    folder: &Path,
    files: &[(&'static str, Vec<u8>)],
    id: impl Fn(&str) -> Option<u32>,
) -> Result<(SpecialTokens, Vec<String>), TokenizerError> {
    let mut sources = Vec::new();
    for (name, bytes) in files.iter().filter(|(name, _)| SOURCES.contains(name)) {
        let path = folder.join(name);
        let found = object(bytes).map_err(|message| TokenizerError::new(&path, message))?;
        sources.push((path, found));
    }
    let mut warnings = Vec::new();
    let mut find = |key: &str| -> Result<Option<SpecialToken>, TokenizerError> {
        for (path, object) in &sources {
            let Some(text) = text(path, key, object.get(key))? else { continue };
            match id(&text) {
                Some(id) => return Ok(Some(SpecialToken { id, text })),
                None => warnings.push(format!(
                    "{}: {key} {text:?} is not in tokenizer.json and is left out",
                    path.display()
                )),
            }
        }
        Ok(None)
    };
    let special = SpecialTokens {
        bos: find("bos_token")?,
        eos: find("eos_token")?,
        pad: find("pad_token")?,
        unk: find("unk_token")?,
    };
    Ok((special, warnings))
}

/// A token is written as its text, or as an object whose `content` is the text; null and absence say that there is none.
fn text(path: &Path, key: &str, value: Option<&Value>) -> Result<Option<String>, TokenizerError> {
    let content = match value {
        Some(Value::Object(object)) => object.get("content"),
        other => other,
    };
    match (value, content) {
        (None | Some(Value::Null), _) => Ok(None),
        (_, Some(Value::String(text))) => Ok(Some(text.clone())),
        _ => {
            let message =
                format!("`{key}` is neither a text nor an object with `content`; mend it or remove it");
            Err(TokenizerError::new(path, message))
        }
    }
}
