//! The data of a run. In: its settings. Out: items to train on, items held out, the tokenizer's files and a fingerprint that
//! tells whether a resumed run would go on with the same data. Text is tokenised once, into `OUT/data`, and records of text are
//! prepared there; a tokenizer that is trained first goes to `OUT/tokenizer`.

mod prepared;

use crate::batch::Items;
use crate::checkpoint::Attachment;
use crate::data::bpe::{Bpe, BpeOptions};
use crate::data::preprocess::{Config, Preprocess};
use crate::data::store::is_prepared;
use crate::data::{
    Corpus, DataError, IDS, Kind, ShardOptions, Store, Tokenised, Tokens, WindowOptions, Windows, prepare,
};
use crate::error::Error;
use crate::evaluation::{Loaded, Task};
use crate::frozen::Scored;
use crate::settings::Settings;
use crate::strategies::Batch;
use crate::trainer::Callbacks;
use astrai_files::{System, read_text, replace};
use astrai_serve::tokenizer::{SpecialTokens, Tokenizer};
use prepared::{Cut, Found, answers_of_text, groups_of, has_frozen, held_out, of_stores, stores};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Folder of the shards, inside the run's.
const SHARDS: &str = "data";
/// Folder of a tokenizer trained for the run, inside the run's.
const TOKENIZER: &str = "tokenizer";
/// What that tokenizer was made of, beside it.
const RECORD: &str = "made.json";

/// Items of a run.
pub type Data = Arc<dyn Items<Batch> + Send + Sync>;

/// What a run trains on.
pub struct Dataset {
    /// Items to train on.
    pub train: Data,
    /// The validation set: items held out, where the run validates.
    pub validation: Option<Data>,
    /// What each validation scores the model on beside it.
    pub tasks: Vec<Loaded>,
    /// The tokenizer's files, for a checkpoint that is complete; none for bare token ids.
    pub tokenizer: Vec<Attachment>,
    /// Tokens that begin and end its texts, and fill batches; none for bare token ids.
    pub special: Option<SpecialTokens>,
    /// Tells these data from others.
    pub fingerprint: String,
    /// The records among the items, and a fingerprint of each set of them: what frozen policies score.
    pub scored: Vec<(Arc<Scored>, String)>,
}

/// What a run would read, found and checked without writing anything.
pub struct Sources {
    named: Named,
    /// The one given, or the model's; none where one is to be trained, or where ids have none.
    tokenizer: Option<Tokenizer>,
    /// What they are, for the reader.
    pub shown: String,
    /// Items to train on, where that is known before text is tokenised.
    pub windows: Option<u64>,
    /// Whether they have log-probabilities under (the reference, the policy that wrote the answers).
    pub frozen: [bool; 2],
    /// Answers of a group; 1 where there are no groups.
    pub answers: usize,
}

/// Stores, and in which ratio they are mixed.
type Mixed = (Vec<Arc<Store>>, Option<Vec<f64>>);

/// Data as the settings name them.
enum Named {
    Shards(Arc<Tokens>),
    Text(Corpus),
    /// Prepared data, and in which ratio they are mixed.
    Prepared(Mixed),
    /// Records of text, in files of JSON lines.
    Records(Vec<PathBuf>),
}

impl Sources {
    /// Looks at the data of a run. `vocabulary` is the model's, `folder` a model directory whose tokenizer serves when none is
    /// named.
    pub fn find(settings: &Settings, vocabulary: usize, folder: Option<&Path>) -> Result<Sources, Error> {
        let is_shards =
            |p: &PathBuf| p.join("meta.json").exists() || p.extension().is_some_and(|e| e == "bin");
        let kind = settings.strategy.kind();
        let masked = kind != Kind::Seq;
        let (mut frozen, mut answers) = ([false; 2], 1);
        let (named, shown, windows) = match settings.data.as_slice() {
            all if all.iter().any(|p| is_prepared(p) && (masked || !is_shards(p))) => {
                let (stores, weights) = stores(all, settings)?;
                let ids =
                    |s: &Arc<Store>| IDS.iter().filter_map(|key| s.column(key)).map(|c| c.len()).sum::<u64>();
                let numbers: u64 = stores.iter().map(ids).sum();
                let shown = format!("{numbers} tokens in {} sets of prepared data", stores.len());
                frozen = has_frozen(&stores, kind)?;
                let items = of_stores(&stores, weights.as_deref(), settings)?;
                answers = groups_of(&items.scored)?;
                (Named::Prepared((stores, weights)), shown, Some(items.train.len()))
            }
            _ if settings.data_weights.is_some() => {
                return refused(
                    "data_weights: only prepared data are mixed by weights; remove it, or prepare the data",
                );
            }
            all if masked => {
                let shown = format!("records of text in {} files or folders", all.len());
                if kind == Kind::Grpo {
                    answers = answers_of_text(all, &settings.out)?;
                }
                (Named::Records(all.to_vec()), shown, None)
            }
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
        // What is wrong in a task is known before text is tokenised.
        Task::open_all(settings.eval_task.as_deref().unwrap_or_default(), None)?;
        Ok(Sources { named, tokenizer, shown, windows, frozen, answers })
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
            Named::Prepared(named) => {
                return Dataset::of_prepared(named, sources.tokenizer, settings, vocabulary, callbacks);
            }
            Named::Records(files) => {
                let Some(tokenizer) = sources.tokenizer else { return refused(WITHOUT) };
                let config = Config::of(settings.strategy.kind(), settings.seq);
                let folder = settings.out.join(SHARDS);
                let run = Preprocess::new(config, tokenizer.clone(), &files, &folder)?;
                let made = run.run(&mut |done, all| callbacks.progress("preparing records", done, all))?;
                for (why, n) in &made.state.dropped {
                    callbacks.note(&format!("left out: {n} records ({why})"));
                }
                told_cut(made.state.cut, settings, callbacks);
                let named = stores(&[folder], settings)?;
                return Dataset::of_prepared(named, Some(tokenizer), settings, vocabulary, callbacks);
            }
        };
        // Also ids that were made just now: what counts is what is on the disk.
        let ids =
            tokens.check(vocabulary, &mut |done, all| callbacks.progress("checking tokens", done, all))?;
        let fingerprint = fingerprint(&ids, &tokens, settings);
        let (train, validation) = windows(tokens, settings)?;
        Ok(Dataset {
            train: Arc::new(Cut(train)),
            validation: validation.map(|v| Arc::new(Cut(v)) as Data),
            tasks: tasks(settings, tokenizer.as_ref(), callbacks)?,
            special: tokenizer.as_ref().map(|t| t.special().clone()),
            tokenizer: tokenizer.map_or(vec![], |t| attachments(&t)),
            fingerprint,
            scored: vec![],
        })
    }

    /// Checks every number of prepared data and puts them together.
    fn of_prepared(
        (stores, weights): Mixed,
        tokenizer: Option<Tokenizer>,
        settings: &Settings,
        vocabulary: usize,
        callbacks: &mut dyn Callbacks,
    ) -> Result<Dataset, Error> {
        let mut sums = Vec::new();
        for store in &stores {
            store.warnings().iter().for_each(|w| callbacks.note(w));
            let mut progress = |done, all| callbacks.progress("checking tokens", done, all);
            sums.push(store.check(&IDS, vocabulary, &mut progress)?);
        }
        let Found { train, validation, scored } = of_stores(&stores, weights.as_deref(), settings)?;
        if settings.stride.is_none() {
            told_cut(scored.iter().map(|s| s.records().cut()).sum(), settings, callbacks);
        }
        let beside = stores.first().map(|s| s.path()).filter(|p| p.join("tokenizer.json").exists());
        let tokenizer = match (tokenizer, beside) {
            (Some(tokenizer), _) => Some(tokenizer),
            (None, Some(folder)) => Some(Tokenizer::open(folder).map_err(DataError::from)?),
            (None, None) => None,
        };
        let held = if settings.eval_every > 0 { "held out" } else { "all" };
        let mixed = weights.map_or(String::new(), |w| format!(" weights {w:?}"));
        let strategy = settings.strategy.kind().keys().join(" ");
        let fingerprint = format!("{strategy} {}{mixed} {held}", sums.join(" "));
        let of_set = |sum: String| format!("{strategy} {sum} up to {}", settings.seq);
        Ok(Dataset {
            train,
            validation,
            tasks: tasks(settings, tokenizer.as_ref(), callbacks)?,
            special: tokenizer.as_ref().map(|t| t.special().clone()),
            tokenizer: tokenizer.map_or(vec![], |t| attachments(&t)),
            scored: scored.into_iter().zip(sums.into_iter().map(of_set)).collect(),
            fingerprint,
        })
    }
}

fn told_cut(records: u64, settings: &Settings, callbacks: &mut dyn Callbacks) {
    if records > 0 {
        let line =
            format!("{records} records are longer than --seq {} and are cut at their end", settings.seq);
        callbacks.note(&line);
    }
}

const WITHOUT: &str =
    "records of text need a tokenizer with a chat template: give --tokenizer, or --model with one";

fn refused<T>(line: &str) -> Result<T, Error> {
    Err(Error::Refused(line.into()))
}

/// Windows to train on, and where the run validates, windows held out.
fn windows(tokens: Arc<Tokens>, settings: &Settings) -> Result<(Windows, Option<Windows>), Error> {
    let options = WindowOptions { seq: settings.seq, stride: settings.stride, packing: settings.packing };
    split_windows(Windows::new(tokens, &options)?, settings)
}

fn split_windows(all: Windows, settings: &Settings) -> Result<(Windows, Option<Windows>), Error> {
    if settings.eval_every == 0 {
        return Ok((all, None));
    }
    if all.len() < 2 {
        return refused(
            "the data fill one window, and none is left to validate on: add text, choose a smaller --seq, or --eval-every 0",
        );
    }
    let count = held_out(all.len());
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
        (Named::Shards(_) | Named::Prepared(..), Some(_)) => {
            return refused("--vocab: shards hold ids already; remove it, or train on text");
        }
        (Named::Records(_), Some(_)) => return refused(WITHOUT),
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
        (None, Named::Shards(_) | Named::Prepared(..)) => Ok(None),
        (None, Named::Records(_)) => refused(WITHOUT),
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

/// The tasks of `--eval-task`, read for sequences of the run's length.
fn tasks(
    settings: &Settings,
    tokenizer: Option<&Tokenizer>,
    callbacks: &mut dyn Callbacks,
) -> Result<Vec<Loaded>, Error> {
    let all = Loaded::read_all(settings.eval_task.as_deref().unwrap_or_default(), tokenizer, settings.seq)?;
    for task in all.iter().filter(|task| task.cut > 0) {
        callbacks.note(&format!(
            "{}: the beginnings of {} prompts are cut off by --seq {}",
            task.name, task.cut, settings.seq
        ));
    }
    Ok(all)
}

fn attachments(tokenizer: &Tokenizer) -> Vec<Attachment> {
    let names = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"];
    let kept = |name: &&str| {
        let bytes = tokenizer.file(name)?.to_vec();
        Some(Attachment { name: name.to_string(), bytes })
    };
    names.iter().filter_map(kept).collect()
}
