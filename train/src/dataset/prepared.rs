//! Prepared data as items of a run: stores found, their records or windows, some of them held out.

use super::{Data, Mixed, refused, split_windows};
use crate::batch::Items;
use crate::data::preprocess::{DATASET, State};
use crate::data::{
    Corpus, DataError, Kind, LINE, Mixture, Records, Rows, Store, Subset, WindowOptions, Windows,
};
use crate::error::Error;
use crate::frozen::Scored;
use crate::settings::Settings;
use crate::strategies::Batch;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Most windows that are held out; more would only make validations longer.
const MOST_VALIDATION: u64 = 256;

/// Windows as items of a run.
pub(super) struct Cut(pub Windows);

impl Items<Batch> for Cut {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn append(&self, item: u64, batch: &mut Batch) -> Result<(), DataError> {
        match batch {
            Batch::Tokens(batch) => self.0.append(item, batch),
            _ => Err(DataError::Options("windows hold next tokens, and no pairs or groups".into())),
        }
    }
}

/// The prepared data under these paths. A folder of `astrai preprocess` whose configuration gives its domains weights is as
/// many sets.
pub(super) fn stores(paths: &[PathBuf], settings: &Settings) -> Result<Mixed, Error> {
    let open = |path: &Path| -> Result<Arc<Store>, Error> { Ok(Arc::new(Store::open(path)?)) };
    if let ([one], None) = (paths, &settings.data_weights)
        && one.is_dir()
        && let Some(state) = State::read(&one.join(DATASET))?
        && !state.weights.is_empty()
    {
        let mut mixed = (Vec::new(), Vec::new());
        for domain in state.domains.keys() {
            let weight = state.weights.get(domain).ok_or_else(|| {
                let path = one.join(DATASET);
                Error::Refused(format!(
                    "{}: domain {domain:?} has no weight; give each one, or none",
                    path.display()
                ))
            })?;
            mixed.0.push(open(&one.join(domain))?);
            mixed.1.push(*weight);
        }
        return Ok((mixed.0, Some(mixed.1)));
    }
    let stores = paths.iter().map(|path| open(path)).collect::<Result<_, _>>()?;
    Ok((stores, settings.data_weights.clone()))
}

/// Records of a store, where it has several and no stride asks for windows.
pub(super) fn records(store: &Arc<Store>, settings: &Settings) -> Result<Option<Records>, Error> {
    let kind = settings.strategy.kind();
    if kind == Kind::Seq
        || kind == Kind::Sft && (settings.stride.is_some() || store.need("sequence")?.segments() < 2)
    {
        return Ok(None);
    }
    let packing = kind.packing(store, settings.packing);
    let records = Records::new(store.clone(), kind, settings.seq, packing)?;
    records.check()?;
    Ok(Some(records))
}

/// Whether the stores have log-probabilities under (the reference, the policy that wrote the answers): all of them, or none.
pub(super) fn has_frozen(stores: &[Arc<Store>], kind: Kind) -> Result<[bool; 2], Error> {
    let mut has = [false; 2];
    for (has, keys) in has.iter_mut().zip(kind.frozen()) {
        let there = |s: &&Arc<Store>| !keys.is_empty() && keys.iter().all(|key| s.column(key).is_some());
        let count = stores.iter().filter(there).count();
        if count != 0 && count != stores.len() {
            return Err(Error::Refused(format!(
                "{} of {} sets of data have {}: give all of them these, or none",
                count,
                stores.len(),
                keys.join(" and ")
            )));
        }
        *has = count > 0;
    }
    Ok(has)
}

/// Answers of a group, the same in all sets.
pub(super) fn groups_of(scored: &[Arc<Scored>]) -> Result<usize, Error> {
    let sizes = scored.iter().map(|s| s.records().answers()).collect::<Result<Vec<_>, _>>()?;
    match sizes.iter().find(|n| **n != sizes[0]) {
        Some(other) => Err(Error::Refused(format!(
            "one set of data has groups of {} answers, another of {other}: group answers alike",
            sizes[0]
        ))),
        None => Ok(sizes.first().copied().unwrap_or(1)),
    }
}

/// Answers of the first record of text; preparing the records will tell whether others have as many.
pub(super) fn answers_of_text(paths: &[PathBuf], out: &Path) -> Result<usize, Error> {
    let corpus = Corpus::find(paths, &[out.to_path_buf()])?;
    for file in corpus.files() {
        let lines = BufReader::new(astrai_files::open(&file.path)?.0.take(LINE)).split(b'\n');
        let first = lines.map_while(Result::ok).find(|line| !line.trim_ascii().is_empty());
        let record: Option<serde_json::Value> = first.and_then(|line| serde_json::from_slice(&line).ok());
        if let Some(answers) =
            record.as_ref().and_then(|r| r["responses"].as_array()).filter(|a| !a.is_empty())
        {
            return Ok(answers.len());
        }
    }
    refused("the first record has no list of `responses`: grpo learns from groups of answers with `rewards`")
}

/// Items to train on, items held out where the run validates, and the records among them.
pub(super) struct Found {
    pub train: Data,
    pub validation: Option<Data>,
    pub scored: Vec<Arc<Scored>>,
}

/// Items of prepared data.
pub(super) fn of_stores(
    stores: &[Arc<Store>],
    weights: Option<&[f64]>,
    settings: &Settings,
) -> Result<Found, Error> {
    let (mut train, mut held): (Vec<Data>, Vec<Data>) = (Vec::new(), Vec::new());
    let mut scored = Vec::new();
    for store in stores {
        let (some, validation) = match records(store, settings)? {
            Some(records) => {
                let records = Arc::new(Scored::new(records));
                scored.push(records.clone());
                split(records, settings)?
            }
            None => {
                let kind = settings.strategy.kind();
                let packing = kind.packing(store, settings.packing);
                let rows = Rows::of(store, kind != Kind::Seq)?;
                // Text is cut into windows of one length; records fewer than fill one are a shorter one.
                let whole = (rows.len() as usize).saturating_sub(1).max(1);
                let seq = if kind == Kind::Seq { settings.seq } else { settings.seq.min(whole) };
                let options = WindowOptions { seq, stride: settings.stride, packing };
                let (train, held) = split_windows(Windows::new(rows, &options)?, settings)?;
                (Arc::new(Cut(train)) as Data, held.map(|h| Arc::new(Cut(h)) as Data))
            }
        };
        train.push(some);
        held.extend(validation);
    }
    let mixed = Mixture::new(train, weights)?;
    let validation = (!held.is_empty()).then(|| Mixture::new(held, None)).transpose()?;
    Ok(Found { train: Arc::new(mixed), validation: validation.map(|v| Arc::new(v) as Data), scored })
}

/// How many of so many items are held out.
pub(super) fn held_out(items: u64) -> u64 {
    (items / 20).clamp(1, MOST_VALIDATION)
}

/// Records to train on, and where the run validates, the last ones.
pub(super) fn split(records: Data, settings: &Settings) -> Result<(Data, Option<Data>), Error> {
    if settings.eval_every == 0 {
        return Ok((records, None));
    }
    let all = records.len();
    // What is learnt of a whole batch is also judged by whole batches.
    let least =
        if matches!(settings.strategy.kind(), Kind::Seq | Kind::Sft) { 1 } else { settings.batch as u64 };
    let count = held_out(all).next_multiple_of(least);
    if all <= count {
        return Err(Error::Refused(format!(
            "of {all} records, {count} would be held out, and none is left to train on: add records, or --eval-every 0"
        )));
    }
    let part = |first, count| Arc::new(Subset { items: records.clone(), first, count }) as Data;
    Ok((part(0, all - count), Some(part(all - count, count))))
}
