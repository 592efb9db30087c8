//! Records: data whose items are not cut from a row but stand for themselves. In: a store whose keys are those of a strategy. Out:
//! a sequence, a pair, a group, a labelled answer, and batches of them. What does not belong together (a mask of another length, a
//! reward too few) is refused with the record's number and file.

use super::store::Store;
use super::windows::end_documents;
use super::{DataError, Packing};
use crate::batch::{Items, PackedBatch};
use crate::preference::{Group, GroupBatch, Labelled, LabelledBatch, Pair, PairBatch, Sample};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// What the keys of a store are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// `sequence`: every next token
    Seq,
    /// `sequence`, `loss_mask`, perhaps `position_ids`: the tokens that the mask says
    Sft,
    /// `chosen`, `rejected`, `chosen_mask`, `rejected_mask`: a better and a worse answer
    Dpo,
    /// `prompts`, `responses`, `masks`, `rewards`: several answers with their rewards
    Grpo,
    /// `sequence`, `loss_mask`, `label`: an answer, wanted or not
    Kto,
}

/// Keys of dpo's reference log-probabilities, as TRL names them.
pub const REFERENCE: [&str; 2] = ["ref_chosen_logps", "ref_rejected_logps"];

/// Keys of grpo's log-probabilities of each token of the answers, under the reference and under the policy that wrote them.
pub const LOGPS: [&str; 2] = ["ref_logps", "old_logps"];

/// Keys whose numbers are token ids.
pub const IDS: [&str; 5] = ["sequence", "chosen", "rejected", "prompts", "responses"];

impl Kind {
    /// The keys that a record of this kind must have.
    pub fn keys(self) -> &'static [&'static str] {
        match self {
            Kind::Seq => &["sequence"],
            Kind::Sft => &["sequence", "loss_mask"],
            Kind::Dpo => &["chosen", "rejected", "chosen_mask", "rejected_mask"],
            Kind::Grpo => &["prompts", "responses", "masks", "rewards"],
            Kind::Kto => &["sequence", "loss_mask", "label"],
        }
    }

    /// Keys that it may have beside them.
    pub fn optional(self) -> &'static [&'static str] {
        match self {
            Kind::Seq | Kind::Sft => &["position_ids"],
            Kind::Dpo => &REFERENCE,
            Kind::Grpo => &LOGPS,
            Kind::Kto => &[],
        }
    }

    /// The keys that have log-probabilities under (the reference, the policy that wrote the answers), each where a kind may have some.
    pub fn frozen(self) -> [&'static [&'static str]; 2] {
        match self {
            Kind::Dpo => [&REFERENCE, &[]],
            Kind::Grpo => [&["ref_logps"], &["old_logps"]],
            Kind::Seq | Kind::Sft | Kind::Kto => [&[], &[]],
        }
    }

    /// Whether some kind has this key.
    pub fn knows(key: &str) -> bool {
        let all = Kind::value_variants().iter();
        all.flat_map(|kind| kind.keys().iter().chain(kind.optional())).any(|known| *known == key)
    }

    /// How documents are treated: those of `sft` that have positions are always told apart.
    pub fn packing(self, store: &Store, asked: Packing) -> Packing {
        let apart = self == Kind::Sft && store.column("position_ids").is_some();
        if apart { Packing::Masked } else { asked }
    }

    /// The kind that a store's keys speak of.
    pub fn of(store: &Store) -> Option<Kind> {
        let all = [Kind::Dpo, Kind::Grpo, Kind::Kto, Kind::Sft, Kind::Seq];
        all.into_iter().find(|kind| kind.keys().iter().all(|key| store.column(key).is_some()))
    }
}

/// The records of a store.
#[derive(Clone, Debug)]
pub struct Records {
    store: Arc<Store>,
    kind: Kind,
    count: u64,
    /// Tokens of the longest sequence; what is longer is cut at its end.
    longest: usize,
    /// How documents packed into one record are treated.
    packing: Packing,
}

impl Records {
    /// All records of a kind, none longer than `longest` tokens.
    ///
    /// # Errors
    /// A key is absent, or keys have unequal numbers of records.
    pub fn new(
        store: Arc<Store>,
        kind: Kind,
        longest: usize,
        packing: Packing,
    ) -> Result<Records, DataError> {
        let mut count = None;
        let optional = kind.optional().iter().filter(|key| store.column(key).is_some());
        for key in kind.keys().iter().chain(optional) {
            let segments = store.need(key)?.segments();
            let (first, other) = *count.get_or_insert((*key, segments));
            if other != segments {
                let message =
                    format!("`{first}` has {other} records and `{key}` {segments}; prepare the data again");
                return Err(DataError::refused(store.path(), message));
            }
            if let Some(i) = store.misplaced(key, first) {
                let message = format!(
                    "`{key}` number {i} is of another record than `{first}` number {i}: one before has only one of them; prepare the data again"
                );
                return Err(DataError::refused(store.file_of(key, i), message));
            }
        }
        let count = count.map_or(0, |(_, n)| n as u64);
        Ok(Records { store, kind, count, longest, packing })
    }

    /// Refuses records that are empty or whose keys are of lengths that do not fit, as far as lengths tell: before a run, not in it.
    ///
    /// # Errors
    /// The first such record.
    pub fn check(&self) -> Result<(), DataError> {
        let beside: &[(&str, &str)] = match self.kind {
            Kind::Seq => &[("sequence", "position_ids")],
            Kind::Sft => &[("sequence", "loss_mask"), ("sequence", "position_ids")],
            Kind::Kto => &[("sequence", "loss_mask"), ("", "label")],
            Kind::Dpo => &[
                ("chosen", "chosen_mask"),
                ("rejected", "rejected_mask"),
                ("", REFERENCE[0]),
                ("", REFERENCE[1]),
            ],
            Kind::Grpo => &[("responses", "masks"), ("", "rewards")],
        };
        for &(ids, key) in beside {
            let Some(column) = self.store.column(key) else { continue };
            let of_ids = if ids.is_empty() { None } else { Some(self.store.need(ids)?) };
            for i in 0..self.count {
                let (numbers, at) = (column.shape(i as usize).0, i as usize);
                let want = match of_ids {
                    Some(of_ids) => of_ids.shape(at).0,
                    None if key == "rewards" => self.store.need("responses")?.shape(at).1.unwrap_or(1),
                    None => 1,
                };
                if numbers != want || want == 0 {
                    let what = match want {
                        0 => format!("`{ids}` is empty"),
                        _ => format!("`{key}` has {numbers} numbers, not {want}"),
                    };
                    return Err(self.refused(key, i, &what));
                }
            }
        }
        self.answers().map(drop)
    }

    /// Answers of each group, the same in all; 1 of other kinds.
    ///
    /// # Errors
    /// A group has another number of answers than the first.
    pub fn answers(&self) -> Result<usize, DataError> {
        if self.kind != Kind::Grpo {
            return Ok(1);
        }
        let rows = self.store.need("responses")?;
        let of = |i: u64| rows.shape(i as usize).1.unwrap_or(1);
        let first = if self.count > 0 { of(0) } else { 1 };
        match (0..self.count).find(|&i| of(i) != first) {
            Some(i) => {
                let what =
                    format!("{} answers, the first group has {first}; give each prompt as many", of(i));
                Err(self.refused("responses", i, &what))
            }
            None => Ok(first as usize),
        }
    }

    /// How many are cut because they are longer than asked for. Only what is known without reading: prompts count alone.
    pub fn cut(&self) -> u64 {
        let long = |key: &&str| {
            let column = self.store.column(key)?;
            Some((0..column.segments()).filter(|&i| column.shape(i).0 > self.longest as u64).count() as u64)
        };
        ["sequence", "chosen", "rejected", "prompts"].iter().filter_map(long).max().unwrap_or(0)
    }

    /// What kind they are.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The store they lie in.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.count
    }

    fn refused(&self, key: &str, item: u64, what: &str) -> DataError {
        let message = format!("record {item}: {what}; prepare the data again");
        DataError::refused(self.store.file_of(key, item as usize), message)
    }

    fn index(&self, item: u64) -> Result<usize, DataError> {
        match item < self.count {
            true => Ok(item as usize),
            false => {
                let message = format!("record {item} was asked for, {} there are", self.count);
                Err(DataError::Options(message))
            }
        }
    }

    /// Ids and a mask of the same length, cut.
    fn masked(&self, ids: &str, mask: &str, item: u64) -> Result<Sample, DataError> {
        let index = self.index(item)?;
        let (mut ids_of, mask_of) = (self.store.record(ids, index)?, self.store.record(mask, index)?);
        if ids_of.len() != mask_of.len() {
            let what = format!("`{ids}` has {} tokens and `{mask}` {}", ids_of.len(), mask_of.len());
            return Err(self.refused(ids, item, &what));
        }
        let mut trained: Vec<bool> = mask_of.into_iter().map(|m| m != 0).collect();
        ids_of.truncate(self.longest);
        trained.truncate(self.longest);
        Ok(Sample { ids: ids_of, trained })
    }

    /// A sequence of `seq` or `sft`; without a mask all of it is learnt.
    ///
    /// # Errors
    /// There is no such record, or its keys do not fit together.
    pub fn sample(&self, item: u64) -> Result<Sample, DataError> {
        if self.kind == Kind::Seq {
            let mut ids = self.store.record("sequence", self.index(item)?)?;
            ids.truncate(self.longest);
            return Ok(Sample { trained: vec![true; ids.len()], ids });
        }
        self.masked("sequence", "loss_mask", item)
    }

    /// A pair of `dpo`.
    ///
    /// # Errors
    /// Those of [`sample`](Self::sample).
    pub fn pair(&self, item: u64) -> Result<Pair, DataError> {
        let chosen = self.masked("chosen", "chosen_mask", item)?;
        let rejected = self.masked("rejected", "rejected_mask", item)?;
        let mut reference = None;
        if REFERENCE.iter().all(|key| self.store.column(key).is_some()) {
            let one = |key| match self.store.floats(key, item as usize)?.as_slice() {
                &[x] if x.is_finite() => Ok(x),
                other => {
                    Err(self.refused(key, item, &format!("`{key}` is {other:?}, not one log-probability")))
                }
            };
            reference = Some([one(REFERENCE[0])?, one(REFERENCE[1])?]);
        }
        Ok(Pair { chosen, rejected, reference })
    }

    /// A group of `grpo`. Answers end behind the last token that their mask names.
    ///
    /// # Errors
    /// Those of [`sample`](Self::sample).
    pub fn group(&self, item: u64) -> Result<Group, DataError> {
        let index = self.index(item)?;
        let mut prompt = self.store.record("prompts", index)?;
        prompt.truncate(self.longest);
        let (rows, masks) = (self.store.rows("responses", index)?, self.store.rows("masks", index)?);
        let rewards = self.store.floats("rewards", index)?;
        let lengths = |rows: &[Vec<i32>]| rows.iter().map(Vec::len).collect::<Vec<_>>();
        if lengths(&rows) != lengths(&masks) || rows.len() != rewards.len() || rows.is_empty() {
            let what = format!(
                "`responses` are {:?} tokens, `masks` {:?}, and there are {} rewards",
                lengths(&rows),
                lengths(&masks),
                rewards.len()
            );
            return Err(self.refused("responses", item, &what));
        }
        if let Some(bad) = rewards.iter().find(|r| !r.is_finite()) {
            return Err(self.refused("rewards", item, &format!("a reward is {bad}")));
        }
        let room = self.longest - prompt.len();
        let response = |(mut ids, mask): (Vec<i32>, Vec<i32>)| {
            let mut trained: Vec<bool> = mask.into_iter().map(|m| m != 0).collect();
            let end = trained.iter().rposition(|&t| t).map_or(0, |last| last + 1).min(room);
            ids.truncate(end);
            trained.truncate(end);
            Sample { ids, trained }
        };
        let mut logps = [None, None];
        for (to, key) in logps.iter_mut().zip(LOGPS) {
            if self.store.column(key).is_some() {
                *to = Some(self.of_answers(key, item, &rows)?);
            }
        }
        let responses = rows.into_iter().zip(masks).map(response).collect();
        Ok(Group { prompt, responses, rewards, logps })
    }

    /// A number for each token of each answer.
    fn of_answers(&self, key: &str, item: u64, rows: &[Vec<i32>]) -> Result<Vec<Vec<f32>>, DataError> {
        let all = self.store.floats(key, item as usize)?;
        let tokens = rows.iter().map(Vec::len).sum::<usize>();
        if all.len() != tokens || all.iter().any(|x| !x.is_finite()) {
            let what = format!(
                "`{key}` has {} numbers for {tokens} tokens of `responses`, or one that is none",
                all.len()
            );
            return Err(self.refused(key, item, &what));
        }
        let mut rest = all.as_slice();
        let mut row = |ids: &Vec<i32>| {
            let (own, others) = rest.split_at(ids.len());
            rest = others;
            own.to_vec()
        };
        Ok(rows.iter().map(&mut row).collect())
    }

    /// An answer of `kto`.
    ///
    /// # Errors
    /// Those of [`sample`](Self::sample).
    pub fn labelled(&self, item: u64) -> Result<Labelled, DataError> {
        let sample = self.masked("sequence", "loss_mask", item)?;
        let desirable = match self.store.floats("label", item as usize)?.as_slice() {
            [x] => *x != 0.0,
            other => return Err(self.refused("label", item, &format!("`label` is {other:?}, not one"))),
        };
        Ok(Labelled { sample, desirable })
    }
}

impl Items for Records {
    fn len(&self) -> u64 {
        self.count
    }

    fn append(&self, item: u64, batch: &mut PackedBatch) -> Result<(), DataError> {
        let Sample { ids, trained } = self.sample(item)?;
        if ids.is_empty() {
            return Err(self.refused("sequence", item, "`sequence` is empty"));
        }
        if self.packing == Packing::Joined || self.store.column("position_ids").is_none() {
            batch.push_trained(&ids, &trained);
            return Ok(());
        }
        let mut positions = self.store.record("position_ids", item as usize)?;
        positions.truncate(self.longest);
        if positions.len() != ids.len() {
            let what = format!("`sequence` has {} tokens and `position_ids` {}", ids.len(), positions.len());
            return Err(self.refused("sequence", item, &what));
        }
        batch.grow_trained(&ids, &trained);
        end_documents(batch, &positions, ids.len());
        Ok(())
    }
}

impl Items<PairBatch> for Records {
    fn len(&self) -> u64 {
        self.count
    }

    fn append(&self, item: u64, batch: &mut PairBatch) -> Result<(), DataError> {
        let pair = self.pair(item)?;
        for (key, sample) in [("chosen", &pair.chosen), ("rejected", &pair.rejected)] {
            if sample.ids.is_empty() {
                return Err(self.refused(key, item, &format!("`{key}` is empty")));
            }
        }
        batch.push(&pair);
        Ok(())
    }
}

impl Items<GroupBatch> for Records {
    fn len(&self) -> u64 {
        self.count
    }

    fn append(&self, item: u64, batch: &mut GroupBatch) -> Result<(), DataError> {
        let group = self.group(item)?;
        if group.prompt.is_empty() {
            return Err(self.refused("prompts", item, "`prompts` is empty"));
        }
        batch.push(&group)
    }
}

impl Items<LabelledBatch> for Records {
    fn len(&self) -> u64 {
        self.count
    }

    fn append(&self, item: u64, batch: &mut LabelledBatch) -> Result<(), DataError> {
        let record = self.labelled(item)?;
        if record.sample.ids.is_empty() {
            return Err(self.refused("sequence", item, "`sequence` is empty"));
        }
        let prompt = record.sample.prompt();
        if prompt == 0 {
            return Err(self.refused(
                "sequence",
                item,
                "kto compares answers to a prompt, and there is none",
            ));
        }
        // The same one whatever the batch, so that the reference's log-probabilities can be computed beforehand.
        let mut other = self.labelled((item + 1) % self.count)?.sample;
        let end = other.prompt().saturating_add(self.longest.saturating_sub(prompt));
        other.ids.truncate(end);
        other.trained.truncate(end);
        batch.push(&record, &other);
        Ok(())
    }
}

/// Rows of unequal length as a padded matrix, as in the files of grpo and the batches of AstrAI. Padding is 0, in the front
/// with `left`; the mask beside it tells it from id 0. Gives the rows, and a mask of what is no padding.
pub fn padded(rows: &[Vec<i32>], left: bool) -> (Vec<Vec<i32>>, Vec<Vec<i32>>) {
    let width = rows.iter().map(Vec::len).max().unwrap_or(0);
    let pad = |row: &[i32]| {
        let zeros = vec![0; width - row.len()];
        if left { [zeros.as_slice(), row].concat() } else { [row, zeros.as_slice()].concat() }
    };
    let ones: Vec<Vec<i32>> = rows.iter().map(|row| vec![1; row.len()]).collect();
    (rows.iter().map(|r| pad(r)).collect(), ones.iter().map(|r| pad(r)).collect())
}
