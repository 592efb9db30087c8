//! `tokenizer.json` into the `tokenizers` crate. In: its bytes. Out: the crate's tokenizer, and what the crate does not tell of it.
//! The crate reads a model by way of two trees of JSON, which took half of a small model's start with 150,000 tokens; a BPE, which
//! nearly all are, is read from the text itself.

use std::collections::BTreeMap;
use std::{fmt, thread};

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::{AddedToken, Tokenizer as Library};

use super::check;
use crate::files::line;

/// Text of many kinds of characters.
const PROBE: &str = "Hello, world! \u{e9}\u{fb01} \u{6f22}\u{5b57} \u{1f600}\u{200d}\n\t  42 <s> [CLS] ##ab";

/// A model that the crate reads in no time, in place of the one to come.
const NO_TOKENS: &str = r#"{"type": "BPE", "vocab": {}, "merges": []}"#;

/// More tokens than published vocabularies have; tables of more grow as they fill.
const LARGE: usize = 1 << 20;

/// A tokenizer that can be used.
pub(super) struct Parsed {
    /// The crate's.
    pub library: Library,
    /// How many times longer normalising makes a text at most.
    pub growth: f64,
    /// One more than the largest id.
    pub vocabulary: usize,
}

/// The parts of a file, each as it is written.
type Parts<'a> = BTreeMap<String, &'a RawValue>;

/// A vocabulary of about so many tokens.
struct OfSize(usize);

impl<'de> DeserializeSeed<'de> for OfSize {
    type Value = Vocab;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Vocab, D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for OfSize {
    type Value = Vocab;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a map from tokens to ids")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vocab, A::Error> {
        let mut all = Vocab::with_capacity(self.0);
        while let Some((token, id)) = map.next_entry()? {
            all.insert(token, id);
        }
        Ok(all)
    }
}

/// A token beside the vocabulary; the crate gives it the id that its model has for it, or the next one.
#[derive(Deserialize)]
struct Added {
    #[serde(rename = "id")]
    _id: u32,
    #[serde(flatten)]
    token: AddedToken,
}

/// Reads a file; truncation and padding that it asks for are switched off.
///
/// # Errors
/// It is no tokenizer, none of use, or has no token.
pub(super) fn parse(bytes: &[u8]) -> Result<Parsed, String> {
    if bytes.starts_with(b"version https://git-lfs") {
        return Err("is a Git LFS pointer, not the file itself; run `git lfs pull`".into());
    }
    let refused =
        |e: serde_json::Error| format!("is no JSON ({}); fetch the file again", line(&e.to_string()));
    let mut parts: Parts = match serde_json::from_slice(bytes) {
        Err(e) if e.is_data() => Parts::new(),
        read => read.map_err(refused)?,
    };
    let Some(model) = parts.remove("model").filter(|model| model.get().starts_with('{')) else {
        return Err(
            "has no `model`: no tokenizer.json of Hugging Face tokenizers; name the right file".into()
        );
    };
    let parsed = check::guarded(|| read(bytes, parts, model)).and_then(|parsed| parsed);
    let parsed = parsed.map_err(|e| {
        format!("is no usable tokenizer ({}); save it again with a current version", line(&e))
    })?;
    match parsed.vocabulary {
        0 => Err("holds no token; save the tokenizer again".into()),
        _ => Ok(parsed),
    }
}

fn read(bytes: &[u8], mut parts: Parts, model: &RawValue) -> Result<Parsed, String> {
    let said = |e: serde_json::Error| e.to_string();
    let part = |name: &str| parts.get(name).map(|part| serde_json::from_str::<Value>(part.get())).transpose();
    let growth =
        check::growth(part("decoder").map_err(said)?.as_ref(), part("normalizer").map_err(said)?.as_ref())?;
    let model: Parts = serde_json::from_str(model.get()).map_err(said)?;
    let (mut library, most) = if model.get("type").is_some_and(|kind| kind.get() == r#""BPE""#) {
        let added = parts.remove("added_tokens").map_or("[]", RawValue::get);
        let added: Vec<Added> = serde_json::from_str(added).map_err(said)?;
        let (model, most) = bpe(model)?;
        parts.insert("model".into(), serde_json::from_str(NO_TOKENS).map_err(said)?);
        let rest = serde_json::to_vec(&parts).map_err(said)?;
        let mut library = Library::from_bytes(rest).map_err(|e| e.to_string())?;
        library.with_model(model);
        library.add_tokens(added.into_iter().map(|added| added.token)).map_err(|e| e.to_string())?;
        let added = library.get_added_tokens_decoder().into_keys().max();
        (library, most.max(added))
    } else {
        let library = Library::from_bytes(bytes).map_err(|e| e.to_string())?;
        let most = library.get_vocab(true).into_values().max();
        (library, most)
    };
    library.with_padding(None);
    library.with_truncation(None).map_err(|e| e.to_string())?;
    // What the library only notices at work is noticed here.
    if let Ok(probe) = library.encode_fast(PROBE, true) {
        let _decoded = library.decode(probe.get_ids(), false);
    }
    Ok(Parsed { library, growth, vocabulary: most.map_or(0, |id| id as usize + 1) })
}

/// A BPE, whose merges are read beside its vocabulary, and its largest id.
fn bpe(mut parts: Parts) -> Result<(BPE, Option<u32>), String> {
    let said = |e: serde_json::Error| e.to_string();
    let (Some(vocab), Some(merges)) = (parts.remove("vocab"), parts.remove("merges")) else {
        return Err("its model lacks vocab or merges".into());
    };
    parts.insert("vocab".into(), serde_json::from_str("{}").map_err(said)?);
    parts.insert("merges".into(), serde_json::from_str("[]").map_err(said)?);
    let rest = serde_json::to_string(&parts).map_err(said)?;
    let rest: BPE = serde_json::from_str(&rest).map_err(said)?;
    let (vocab, merges) = thread::scope(|scope| {
        let merges = scope.spawn(|| pairs(merges.get()));
        // A colon for each token, and some in texts: a text of nothing else takes no memory for it.
        let tokens = vocab.get().bytes().filter(|b| *b == b':').count();
        let vocab =
            OfSize(tokens.min(LARGE)).deserialize(&mut serde_json::Deserializer::from_str(vocab.get()));
        (vocab.map_err(said), merges.join())
    });
    let (vocab, merges) = (vocab?, merges.map_err(|_| "its merges cannot be read")??);
    let most = vocab.values().max().copied();
    let mut builder = BPE::builder().vocab_and_merges(vocab, merges);
    if let Some(prefix) = &rest.continuing_subword_prefix {
        builder = builder.continuing_subword_prefix(prefix.clone());
    }
    let mut bpe = builder.build().map_err(|e| e.to_string())?;
    bpe.dropout = rest.dropout;
    bpe.unk_token = rest.unk_token;
    bpe.end_of_word_suffix = rest.end_of_word_suffix;
    bpe.fuse_unk = rest.fuse_unk;
    bpe.byte_fallback = rest.byte_fallback;
    bpe.ignore_merges = rest.ignore_merges;
    Ok((bpe, most))
}

/// Merges in either spelling: pairs of tokens, or lines with a space between two.
fn pairs(merges: &str) -> Result<Merges, String> {
    let said = |e: serde_json::Error| e.to_string();
    if !merges.strip_prefix('[').is_some_and(|list| list.trim_start().starts_with('"')) {
        return serde_json::from_str(merges).map_err(said);
    }
    let lines: Vec<String> = serde_json::from_str(merges).map_err(said)?;
    let two = |line: &String| {
        let two = line.split_once(' ').filter(|(_, second)| !second.contains(' '));
        let (first, second) = two.ok_or_else(|| format!("the merge {line:?} is not of two tokens"))?;
        Ok((first.to_string(), second.to_string()))
    };
    // The format of merges.txt begins with a line of its version.
    lines.iter().filter(|line| !line.starts_with("#version")).map(two).collect()
}
