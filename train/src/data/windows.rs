//! Windows over a row of ids. In: ids, a length and a stride. Out: items for a batch: `seq` ids and, as targets, the ids that
//! follow each. Window `i` begins at `i · stride`; there are `(tokens − 1 − seq) / stride + 1` of them, so that the last
//! target exists and every window is whole. Beside the ids may lie a mask, by which targets are learnt or not, and positions, which
//! say where documents begin; padding is never told by an id.

use super::store::{River, Store};
use super::{DataError, Tokens};
use crate::batch::{IGNORED, Items, PackedBatch};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// How attention treats documents that share a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Packing {
    /// Documents of a window are one sequence: attention and positions run across them
    #[default]
    Joined,
    /// Each is a sequence of its own (intra-document masking): attention and positions restart, no target crosses the boundary
    Masked,
}

/// How to cut a row of ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowOptions {
    /// Ids of a window, without the one that is only a target.
    pub seq: usize,
    /// From the start of one window to the next; `seq` if not given.
    pub stride: Option<usize>,
    /// How attention treats documents that share a window.
    pub packing: Packing,
}

/// A long row of numbers that windows are cut from.
pub trait Row: std::fmt::Debug + Send + Sync {
    /// How many there are.
    fn len(&self) -> u64;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies those from number `from` on.
    ///
    /// # Errors
    /// There are not as many, or they cannot be read.
    fn copy(&self, from: u64, to: &mut [i32]) -> Result<(), DataError>;
}

impl Row for Tokens {
    fn len(&self) -> u64 {
        Tokens::len(self)
    }

    fn copy(&self, from: u64, to: &mut [i32]) -> Result<(), DataError> {
        Tokens::copy(self, from, to)
    }
}

/// Rows that lie beside each other: ids, and where a key is there, a mask and positions.
#[derive(Clone, Debug)]
pub struct Rows {
    ids: Arc<dyn Row>,
    /// Not zero where a token is learnt.
    mask: Option<Arc<dyn Row>>,
    /// Positions in documents: a document begins where they do not rise.
    positions: Option<Arc<dyn Row>>,
    /// The id that ends a document, where one is known.
    eos: Option<u32>,
}

impl Rows {
    /// `sequence` of a store, and with `masked` its `loss_mask`; `position_ids` where they are.
    ///
    /// # Errors
    /// The store has no such key.
    pub fn of(store: &Arc<Store>, masked: bool) -> Result<Rows, DataError> {
        let river = |key| River::new(store, key).map(|river| Arc::new(river) as Arc<dyn Row>);
        let positions = store.column("position_ids").map(|_| river("position_ids")).transpose()?;
        let mask = if masked { Some(river("loss_mask")?) } else { None };
        Ok(Rows { ids: river("sequence")?, mask, positions, eos: store.eos() })
    }

    /// How many numbers all rows have: the shortest decides.
    pub(crate) fn len(&self) -> u64 {
        let beside = [&self.mask, &self.positions].into_iter().flatten();
        beside.map(|row| row.len()).fold(self.ids.len(), u64::min)
    }
}

impl From<Arc<Tokens>> for Rows {
    fn from(tokens: Arc<Tokens>) -> Rows {
        let eos = tokens.meta().eos;
        Rows { ids: tokens, mask: None, positions: None, eos }
    }
}

/// Windows over a row of ids, all or some neighbouring ones.
#[derive(Clone, Debug)]
pub struct Windows {
    rows: Rows,
    seq: usize,
    stride: u64,
    /// What tells documents of a window apart, where attention is masked between them.
    apart: Apart,
    first: u64,
    count: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Apart {
    /// Nothing: a window is one sequence.
    No,
    /// This id ends a document.
    Ends(i32),
    /// A position that does not rise begins one.
    Positions,
}

/// A window as it is stored, and as training sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// Number of its first token in the row.
    pub begin: u64,
    /// `[seq]`
    pub input_ids: Vec<i32>,
    /// The ids one further. `[seq]`
    pub target_ids: Vec<i32>,
    /// Whether each target is learnt, as the data say. `[seq]`, where they do
    pub loss_mask: Option<Vec<i32>>,
    /// `[seq]`, where the data have them
    pub position_ids: Option<Vec<i32>>,
}

impl Windows {
    /// All windows of `tokens`.
    ///
    /// # Errors
    /// There are fewer ids than one window needs, or documents are to be masked and the data do not say where they end.
    pub fn new(rows: impl Into<Rows>, options: &WindowOptions) -> Result<Windows, DataError> {
        let rows = rows.into();
        let WindowOptions { seq, stride, packing } = *options;
        let stride = stride.unwrap_or(seq) as u64;
        if seq == 0 || seq > i32::MAX as usize || stride == 0 {
            return Err(DataError::Options(format!(
                "windows of {seq} tokens every {stride} cannot be; choose others"
            )));
        }
        let total = rows.len();
        if total <= seq as u64 {
            let less = if total > 1 { format!("choose at most {}, or ", total - 1) } else { String::new() };
            let message = format!(
                "{total} tokens of data do not fill one window of {seq} and its last target; {less}add text"
            );
            return Err(DataError::Options(message));
        }
        let apart = match (packing, &rows.positions, rows.eos) {
            (Packing::Joined, ..) => Apart::No,
            (Packing::Masked, Some(_), _) => Apart::Positions,
            (Packing::Masked, None, Some(eos)) => Apart::Ends(eos as i32),
            (Packing::Masked, None, None) => {
                let message = "documents cannot be told apart: meta.json names no `eos`, and there is no key `position_ids`; name it, or choose --packing joined";
                return Err(DataError::Options(message.into()));
            }
        };
        let count = (total - 1 - seq as u64) / stride + 1;
        Ok(Windows { rows, seq, stride, apart, first: 0, count })
    }

    /// Windows to train on, and the last `count`, held out for validation. Windows that share an input with those held out are in
    /// neither.
    ///
    /// # Errors
    /// Either part would be empty.
    pub fn split(self, count: u64) -> Result<(Windows, Windows), DataError> {
        let left = self.count.saturating_sub(count);
        // Window i reads up to i · stride + seq - 1, which is to stay below left · stride.
        let fits = (left * self.stride).checked_sub(self.seq as u64).map_or(0, |room| room / self.stride + 1);
        let train = fits.min(left);
        if count == 0 || train == 0 {
            let message =
                format!("of {} windows, {count} cannot be held out; hold out fewer, or add text", self.count);
            return Err(DataError::Options(message));
        }
        let held = Windows { first: self.first + left, count, ..self.clone() };
        Ok((Windows { count: train, ..self }, held))
    }

    /// Ids of a window.
    pub fn seq(&self) -> usize {
        self.seq
    }

    /// A window as it is stored.
    ///
    /// # Errors
    /// There is no such window, or its data cannot be read.
    pub fn window(&self, item: u64) -> Result<Window, DataError> {
        let begin = self.begin(item)?;
        let read = |row: &dyn Row, from: u64| {
            let mut all = vec![0; self.seq];
            row.copy(from, &mut all).map(|()| all)
        };
        Ok(Window {
            begin,
            input_ids: read(&*self.rows.ids, begin)?,
            target_ids: read(&*self.rows.ids, begin + 1)?,
            loss_mask: self.rows.mask.as_deref().map(|mask| read(mask, begin + 1)).transpose()?,
            position_ids: self.rows.positions.as_deref().map(|row| read(row, begin)).transpose()?,
        })
    }

    fn begin(&self, item: u64) -> Result<u64, DataError> {
        if item >= self.count {
            let message = format!("window {item} was asked for, {} there are", self.count);
            return Err(DataError::Options(message));
        }
        Ok((self.first + item) * self.stride)
    }
}

impl Items for Windows {
    fn len(&self) -> u64 {
        self.count
    }

    fn append(&self, item: u64, batch: &mut PackedBatch) -> Result<(), DataError> {
        let begin = self.begin(item)?;
        let (ids, targets) = batch.grow(self.seq);
        self.rows.ids.copy(begin, ids)?;
        let last = self.seq - 1;
        targets[..last].copy_from_slice(&ids[1..]);
        self.rows.ids.copy(begin + self.seq as u64, &mut targets[last..])?;
        // Only data of several keys have a mask or positions; bare ids are read without allocation.
        if let Some(mask) = &self.rows.mask {
            let mut learnt = vec![0; self.seq];
            mask.copy(begin + 1, &mut learnt)?;
            targets.iter_mut().zip(learnt).filter(|(_, m)| *m == 0).for_each(|(target, _)| *target = IGNORED);
        }
        match self.apart {
            Apart::No => batch.end(self.seq),
            Apart::Ends(eos) => {
                targets
                    .iter_mut()
                    .zip(ids)
                    .filter(|(_, id)| **id == eos)
                    .for_each(|(target, _)| *target = IGNORED);
                while !batch.open().is_empty() {
                    let open = batch.open();
                    let end = open.iter().position(|&id| id == eos);
                    let tokens = end.map_or(open.len(), |end| end + 1);
                    batch.end(tokens);
                }
            }
            Apart::Positions => {
                let Some(row) = &self.rows.positions else { return Ok(()) };
                let mut positions = vec![0; self.seq + 1];
                // Whether the token behind the window begins a document is known only where there is one.
                let known = (row.len() - begin).min(self.seq as u64 + 1) as usize;
                row.copy(begin, &mut positions[..known])?;
                end_documents(batch, &positions[..known], self.seq);
            }
        }
        Ok(())
    }
}

/// Ends a sequence before each position that does not rise, of the `tokens` that are open; the target that begins another
/// document is masked.
pub(super) fn end_documents(batch: &mut PackedBatch, positions: &[i32], tokens: usize) {
    let mut length = 1;
    for t in 1..tokens {
        if positions[t] <= positions[t - 1] {
            batch.mask_target(length - 1);
            batch.end(length);
            length = 0;
        }
        length += 1;
    }
    if positions.len() > tokens && positions[tokens] <= positions[tokens - 1] {
        batch.mask_target(length - 1);
    }
    batch.end(length);
}
