//! The data of a run. In: its settings. Out: windows to train on, windows held out, the tokenizer's files and a fingerprint that
//! tells whether a resumed run would go on with the same data. Text is tokenised once, into `OUT/data`; a tokenizer that is
//! trained first goes to `OUT/tokenizer`.

use crate::batch::Items;
use crate::checkpoint::Attachment;
use crate::data::bpe::{BpeOptions, Words};
use crate::data::{
    Boundaries, Corpus, DataError, Held, Made, ShardOptions, Tokens, WindowOptions, Windows, prepare,
};
use crate::error::Error;
use crate::settings::Settings;
use crate::trainer::Watch;
use astrai_serve::tokenizer::Tokenizer;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Folder of the shards, inside the run's.
const SHARDS: &str = "data";
/// Folder of a tokenizer trained for the run, inside the run's.
const TOKENIZER: &str = "tokenizer";
/// Most windows that are held out; more would only make validations longer.
const MOST_HELD: u64 = 256;

/// What a run trains on.
pub struct Dataset {
    /// Windows to train on.
    pub train: Windows,
    /// Windows held out, where the run validates.
    pub held: Option<Windows>,
    /// The tokenizer's files, for a checkpoint that is complete; none for bare token ids.
    pub tokenizer: Vec<Attachment>,
    /// Tells these data from others.
    pub fingerprint: String,
}

/// What a run would read, found out without writing anything.
pub struct Sources {
    /// Bytes of text, or ids of shards.
    pub size: u64,
    /// What they are, for the reader.
    pub shown: String,
}

/// Data as the settings name them.
enum Named {
    Shards(PathBuf),
    Text(Corpus),
}

impl Dataset {
    /// Finds, and where need be makes, the data of a run. `vocabulary` is the model's, `folder` a model directory whose
    /// tokenizer serves when none is named.
    pub fn prepare(
        settings: &Settings,
        vocabulary: usize,
        folder: Option<&Path>,
        watch: &mut dyn Watch,
    ) -> Result<Dataset, Error> {
        let (tokens, tokenizer) = match named(settings)? {
            Named::Shards(path) => {
                if settings.vocab.is_some() {
                    return refused("--vocab: shards hold ids already; remove it, or train on text");
                }
                let tokens = Tokens::open(&path)?;
                tokens.warnings().iter().for_each(|w| watch.note(w));
                let tokenizer = given_tokenizer(settings, folder).map(|p| Tokenizer::open(&p)).transpose();
                (tokens, tokenizer.map_err(DataError::from)?)
            }
            Named::Text(corpus) => {
                let tokenizer = tokenizer(settings, &corpus, folder, vocabulary, watch)?;
                fits(&tokenizer, vocabulary)?;
                let shards = settings.out.join(SHARDS);
                let options = ShardOptions::default();
                let mut progress = |done, all| watch.progress("tokenising", done, all);
                let (tokens, made) = prepare(&corpus, &tokenizer, &shards, &options, &mut progress)?;
                let skipped = corpus.skipped();
                watch.note(&format!("{} files of text; skipped: {skipped}", corpus.files().len()));
                match made {
                    Made::Again(why) => watch.note(&format!("tokenised again: {why}")),
                    Made::Reused => watch.note(&format!("using the tokens in {}", shards.display())),
                    Made::New => {}
                }
                (tokens, Some(tokenizer))
            }
        };
        tokenizer.iter().try_for_each(|t| fits(t, vocabulary))?;
        tokens.check(vocabulary, &mut |done, all| watch.progress("checking tokens", done, all))?;
        let fingerprint = fingerprint(&tokens, settings);
        let options = WindowOptions { seq: settings.seq, stride: None, boundaries: Boundaries::Ignore };
        let windows = Windows::new(Arc::new(tokens), &options)?;
        let (train, held) = match settings.eval_every {
            0 => (windows, None),
            _ => {
                let count = (windows.len() / 20).clamp(1, MOST_HELD);
                let (train, held) = windows.split(Held::Count(count))?;
                (train, Some(held))
            }
        };
        Ok(Dataset { train, held, tokenizer: tokenizer.map_or(vec![], |t| attachments(&t)), fingerprint })
    }
}

impl Sources {
    /// Looks at the data of a run.
    pub fn find(settings: &Settings) -> Result<Sources, Error> {
        Ok(match named(settings)? {
            Named::Shards(path) => {
                let tokens = Tokens::open(&path)?;
                let shown = format!("{} tokens in {}", tokens.len(), path.display());
                Sources { size: tokens.len(), shown }
            }
            Named::Text(corpus) => {
                let files = corpus.files().len();
                let shown = format!(
                    "{files} files of text, {} bytes (skipped: {})",
                    corpus.bytes(),
                    corpus.skipped()
                );
                Sources { size: corpus.bytes(), shown }
            }
        })
    }
}

fn refused<T>(line: &str) -> Result<T, Error> {
    Err(Error::Refused(line.into()))
}

/// Shards of ids, or text.
fn named(settings: &Settings) -> Result<Named, Error> {
    let is_shards = |p: &PathBuf| p.join("meta.json").exists() || p.extension().is_some_and(|e| e == "bin");
    match settings.data.as_slice() {
        [one] if is_shards(one) => Ok(Named::Shards(one.clone())),
        all if all.iter().any(is_shards) => {
            refused("--data: shards of ids go alone; give one folder with its meta.json, or text only")
        }
        all => Ok(Named::Text(Corpus::find(all, std::slice::from_ref(&settings.out))?)),
    }
}

fn given_tokenizer(settings: &Settings, folder: Option<&Path>) -> Option<PathBuf> {
    let beside = folder.map(Path::to_path_buf).filter(|f| f.join("tokenizer.json").exists());
    settings.tokenizer.clone().or(beside)
}

/// The tokenizer of text: named, the model's, or trained on the text first.
fn tokenizer(
    settings: &Settings,
    corpus: &Corpus,
    folder: Option<&Path>,
    vocabulary: usize,
    watch: &mut dyn Watch,
) -> Result<Tokenizer, Error> {
    let Some(wanted) = settings.vocab else {
        let path = given_tokenizer(settings, folder).ok_or_else(|| {
            let line = "text needs a tokenizer: give --tokenizer FILE, or --vocab N to train one on the data";
            Error::Refused(line.into())
        })?;
        return Ok(Tokenizer::open(&path).map_err(DataError::from)?);
    };
    if wanted > vocabulary {
        let line = format!("--vocab {wanted}: the model's vocabulary is {vocabulary}; choose at most that");
        return Err(Error::Refused(line));
    }
    let kept = settings.out.join(TOKENIZER);
    if kept.join("tokenizer.json").exists() {
        watch.note(&format!("using the tokenizer in {}", kept.display()));
        return Ok(Tokenizer::open(&kept).map_err(DataError::from)?);
    }
    let total = corpus.bytes();
    let mut counted = |done, all| watch.progress("counting words", done, all);
    let words = Words::count(corpus.documents(), total, &mut counted)?;
    let mut merged = |done, all| watch.progress("training the tokenizer", done, all);
    let bpe = words.train(&BpeOptions::new(wanted), &mut merged)?;
    if bpe.vocabulary() < wanted {
        watch.note(&format!("the text gives {} tokens of the {wanted} wanted", bpe.vocabulary()));
    }
    Ok(bpe.write(&kept)?)
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

/// Which ids, and which of them are held out.
fn fingerprint(tokens: &Tokens, settings: &Settings) -> String {
    let meta = tokens.meta();
    let text = meta.fingerprint.as_deref().unwrap_or("ids");
    let tokenizer = meta.tokenizer.as_deref().unwrap_or("none");
    let held = if settings.eval_every > 0 { "held out" } else { "all" };
    format!("{text} tokenizer {tokenizer} tokens {} {held}", tokens.len())
}

fn attachments(tokenizer: &Tokenizer) -> Vec<Attachment> {
    let names = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"];
    let kept = |name: &&str| {
        let bytes = tokenizer.file(name)?.to_vec();
        Some(Attachment { name: name.to_string(), bytes })
    };
    names.iter().filter_map(kept).collect()
}
