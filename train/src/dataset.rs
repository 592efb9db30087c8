//! The data of a run. In: its settings. Out: windows to train on, windows held out, the tokenizer's files and a fingerprint that
//! tells whether a resumed run would go on with the same data. Text is tokenised once, into `OUT/data`; a tokenizer that is
//! trained first goes to `OUT/tokenizer`.

use crate::batch::Items;
use crate::checkpoint::Attachment;
use crate::data::bpe::{Bpe, BpeOptions};
use crate::data::{Corpus, DataError, ShardOptions, Tokenised, Tokens, WindowOptions, Windows, prepare};
use crate::error::Error;
use crate::settings::Settings;
use crate::trainer::Callbacks;
use astrai_files::{System, read_text, replace};
use astrai_serve::tokenizer::Tokenizer;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Folder of the shards, inside the run's.
const SHARDS: &str = "data";
/// Folder of a tokenizer trained for the run, inside the run's.
const TOKENIZER: &str = "tokenizer";
/// What that tokenizer was made of, beside it.
const RECORD: &str = "made.json";
/// Most windows that are held out; more would only make validations longer.
const MOST_VALIDATION: u64 = 256;

/// What a run trains on.
pub struct Dataset {
    /// Windows to train on.
    pub train: Windows,
    /// The validation set: windows held out, where the run validates.
    pub validation: Option<Windows>,
    /// The tokenizer's files, for a checkpoint that is complete; none for bare token ids.
    pub tokenizer: Vec<Attachment>,
    /// Tells these data from others.
    pub fingerprint: String,
}

/// What a run would read, found and checked without writing anything.
pub struct Sources {
    named: Named,
    /// The one given, or the model's; none where one is to be trained, or where ids have none.
    tokenizer: Option<Tokenizer>,
    /// What they are, for the reader.
    pub shown: String,
    /// Windows to train on, where that is known before text is tokenised.
    pub windows: Option<u64>,
}

/// Data as the settings name them.
enum Named {
    Shards(Arc<Tokens>),
    Text(Corpus),
}

impl Sources {
    /// Looks at the data of a run. `vocabulary` is the model's, `folder` a model directory whose tokenizer serves when none is
    /// named.
    pub fn find(settings: &Settings, vocabulary: usize, folder: Option<&Path>) -> Result<Sources, Error> {
        let is_shards =
            |p: &PathBuf| p.join("meta.json").exists() || p.extension().is_some_and(|e| e == "bin");
        let (named, shown, windows) = match settings.data.as_slice() {
            [one] if is_shards(one) => {
                let tokens = Arc::new(Tokens::open(one)?);
                let shown = format!("{} tokens in {}", tokens.len(), one.display());
                let (train, _) = windows(tokens.clone(), settings)?;
                (Named::Shards(tokens), shown, Some(train.len()))
            }
            all if all.iter().any(is_shards) => {
                return refused(
                    "--data: shards of ids go alone; give one folder with its meta.json, or text only",
                );
            }
            all => {
                let corpus = Corpus::find(all, std::slice::from_ref(&settings.out))?;
                let (files, bytes, skipped) = (corpus.files().len(), corpus.bytes(), corpus.skipped());
                let shown = format!("{files} files of text, {bytes} bytes (skipped: {skipped})");
                (Named::Text(corpus), shown, None)
            }
        };
        let tokenizer = tokenizer(settings, &named, vocabulary, folder)?;
        Ok(Sources { named, tokenizer, shown, windows })
    }
}

impl Dataset {
    /// Reads, and where need be makes, the data of a run for a model of this vocabulary. `resumed` is the fingerprint of
    /// the data that the run was trained on so far.
    ///
    /// # Errors
    /// The data cannot be had, do not fit, or are others than those so far; the tokens of a run that is to go on are
    /// never overwritten by others.
    pub fn prepare(
        sources: Sources,
        settings: &Settings,
        vocabulary: usize,
        resumed: Option<&str>,
        callbacks: &mut dyn Callbacks,
    ) -> Result<Dataset, Error> {
        callbacks.note(&sources.shown);
        let (tokens, tokenizer) = match sources.named {
            Named::Shards(tokens) => {
                tokens.warnings().iter().for_each(|w| callbacks.note(w));
                (tokens, sources.tokenizer)
            }
            Named::Text(corpus) => {
                let text = corpus.fingerprint();
                same(resumed, &text, settings)?;
                let tokenizer = match sources.tokenizer {
                    Some(given) => given,
                    None => trained(settings, &corpus, &text, callbacks)?,
                };
                same(resumed, &made_of(&text, &tokenizer.sha256()), settings)?;
                let shards = settings.out.join(SHARDS);
                // A tokenizer's further special tokens are of use only where the text spells them.
                let recognise = settings.special_tokens.is_some();
                let options = ShardOptions { recognise, ..ShardOptions::default() };
                let mut progress = |done, all| callbacks.progress("tokenising", done, all);
                let (tokens, made) = prepare(&corpus, &tokenizer, &shards, &options, &mut progress)?;
                match made {
                    Tokenised::Stale(why) => callbacks.note(&format!("tokenised again: {why}")),
                    Tokenised::Cached => callbacks.note(&format!("using the tokens in {}", shards.display())),
                    Tokenised::New => {}
                }
                (Arc::new(tokens), Some(tokenizer))
            }
        };
        // Also ids that were made just now: what counts is what is on the disk.
        let ids =
            tokens.check(vocabulary, &mut |done, all| callbacks.progress("checking tokens", done, all))?;
        let fingerprint = fingerprint(&ids, &tokens, settings);
        let (train, validation) = windows(tokens, settings)?;
        Ok(Dataset {
            train,
            validation,
            tokenizer: tokenizer.map_or(vec![], |t| attachments(&t)),
            fingerprint,
        })
    }
}

fn refused<T>(line: &str) -> Result<T, Error> {
    Err(Error::Refused(line.into()))
}

/// Windows to train on, and where the run validates, windows held out.
fn windows(tokens: Arc<Tokens>, settings: &Settings) -> Result<(Windows, Option<Windows>), Error> {
    let options = WindowOptions { seq: settings.seq, stride: settings.stride, packing: settings.packing };
    let all = Windows::new(tokens, &options)?;
    if settings.eval_every == 0 {
        return Ok((all, None));
    }
    if all.len() < 2 {
        return refused(
            "the data fill one window, and none is left to validate on: add text, choose a smaller --seq, or --eval-every 0",
        );
    }
    let count = (all.len() / 20).clamp(1, MOST_VALIDATION);
    let (train, validation) = all.split(count)?;
    Ok((train, Some(validation)))
}

/// The tokenizer that was named, or the model's.
fn tokenizer(
    settings: &Settings,
    named: &Named,
    vocabulary: usize,
    folder: Option<&Path>,
) -> Result<Option<Tokenizer>, Error> {
    match (named, settings.vocab) {
        (Named::Shards(_), Some(_)) => {
            return refused("--vocab: shards hold ids already; remove it, or train on text");
        }
        (Named::Text(_), Some(wanted)) if wanted > vocabulary => {
            let line =
                format!("--vocab {wanted}: the model's vocabulary is {vocabulary}; choose at most that");
            return Err(Error::Refused(line));
        }
        (Named::Text(_), Some(_)) => return Ok(None),
        _ => {}
    }
    let beside = folder.map(Path::to_path_buf).filter(|f| f.join("tokenizer.json").exists());
    match (settings.tokenizer.clone().or(beside), named) {
        (Some(path), _) => {
            let tokenizer = Tokenizer::open(&path).map_err(DataError::from)?;
            fits(&tokenizer, vocabulary)?;
            Ok(Some(tokenizer))
        }
        (None, Named::Shards(_)) => Ok(None),
        (None, Named::Text(_)) => {
            refused("text needs a tokenizer: give --tokenizer FILE, or --vocab N to train one on the data")
        }
    }
}

/// A tokenizer trained on the text; one that was made for the same wish is used again.
fn trained(
    settings: &Settings,
    corpus: &Corpus,
    text: &str,
    callbacks: &mut dyn Callbacks,
) -> Result<Tokenizer, Error> {
    let wanted = settings.vocab.unwrap_or_default();
    let kept = settings.out.join(TOKENIZER);
    let special = settings.special_tokens.clone().unwrap_or_default();
    let mut record = json!({ "vocab": wanted, "text": text });
    if !special.is_empty() {
        record["special_tokens"] = json!(special);
    }
    let record = record.to_string();
    if read_text(&kept.join(RECORD), 1 << 20).is_ok_and(|made| made == record) {
        callbacks.note(&format!("using the tokenizer in {}", kept.display()));
        return Ok(Tokenizer::open(&kept).map_err(DataError::from)?);
    }
    let options = BpeOptions { special, ..BpeOptions::new(wanted) };
    let mut progress = |what, done, all| callbacks.progress(what, done, all);
    let bpe = Bpe::train(&options, corpus.documents(), corpus.bytes(), &mut progress)?;
    if bpe.vocabulary() < wanted {
        callbacks.note(&format!("the text gives {} tokens of the {wanted} wanted", bpe.vocabulary()));
    }
    let tokenizer = bpe.write(&kept)?;
    replace(&System, &kept.join(RECORD), record.as_bytes())?;
    Ok(tokenizer)
}

/// Every id must have a row in the embedding.
fn fits(tokenizer: &Tokenizer, vocabulary: usize) -> Result<(), Error> {
    let has = tokenizer.vocabulary();
    if has <= vocabulary {
        return Ok(());
    }
    Err(Error::Refused(format!(
        "{}: the tokenizer has {has} tokens, the model's vocabulary {vocabulary}; use the model's own tokenizer, or a larger vocab_size",
        tokenizer.path().display()
    )))
}

/// The fingerprint's beginning: text and tokenizer.
fn made_of(text: &str, tokenizer: &str) -> String {
    format!("{text} tokenizer {tokenizer}")
}

/// Where the ids come from, which of them are held out, and the sum of them all.
fn fingerprint(ids: &str, tokens: &Tokens, settings: &Settings) -> String {
    let (text, tokenizer) = (tokens.meta().fingerprint.as_deref(), tokens.meta().tokenizer.as_deref());
    let made = made_of(text.unwrap_or("none"), tokenizer.unwrap_or("none"));
    let held = if settings.eval_every > 0 { "held out" } else { "all" };
    format!("{made} tokens {} {held} ids {ids}", tokens.len())
}

/// Refuses text or a tokenizer other than those of the run so far, before anything is written over.
fn same(resumed: Option<&str>, beginning: &str, settings: &Settings) -> Result<(), Error> {
    if resumed.is_none_or(|all| all.starts_with(beginning)) {
        return Ok(());
    }
    let data = settings.out.join(SHARDS);
    let mut remedy = "restore it".to_string();
    if data.join("meta.json").exists() {
        remedy += &format!(", or go on with the tokens made then: --data {}", data.display());
        if settings.vocab.is_some() {
            remedy += &format!(" --tokenizer {}", settings.out.join(TOKENIZER).display());
        }
    }
    let why = "the text or its tokenizer is not what the run was trained on (paths, sizes or times differ)";
    Err(Error::Refused(format!("{why}; {remedy}")))
}

fn attachments(tokenizer: &Tokenizer) -> Vec<Attachment> {
    let names = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"];
    let kept = |name: &&str| {
        let bytes = tokenizer.file(name)?.to_vec();
        Some(Attachment { name: name.to_string(), bytes })
    };
    names.iter().filter_map(kept).collect()
}
