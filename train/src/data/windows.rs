//! Windows over a row of ids. In: ids, a length and a stride. Out: items for a batch: `seq` ids and, as targets, the ids that
//! follow each. Window `i` begins at `i · stride`; there are `(tokens − 1 − seq) / stride + 1` of them, so that the last
//! target exists and every window is whole.

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

/// Windows over a row of ids, all or some neighbouring ones.
#[derive(Clone, Debug)]
pub struct Windows {
    tokens: Arc<Tokens>,
    seq: usize,
    stride: u64,
    /// The id that ends a document, where attention is masked between documents.
    ends: Option<i32>,
    first: u64,
    count: u64,
}

impl Windows {
    /// All windows of `tokens`.
    ///
    /// # Errors
    /// There are fewer ids than one window needs, or documents are to be masked and `meta.json` names no eos.
    pub fn new(tokens: Arc<Tokens>, options: &WindowOptions) -> Result<Windows, DataError> {
        let WindowOptions { seq, stride, packing } = *options;
        let stride = stride.unwrap_or(seq) as u64;
        if seq == 0 || seq > i32::MAX as usize || stride == 0 {
            return Err(DataError::Options(format!(
                "windows of {seq} tokens every {stride} cannot be; choose others"
            )));
        }
        let total = tokens.len();
        if total <= seq as u64 {
            let message = format!(
                "{total} tokens of data do not fill one window of {seq} and its last target; choose at most {}, or add text",
                total - 1
            );
            return Err(DataError::Options(message));
        }
        let ends = match (packing, tokens.meta().eos) {
            (Packing::Joined, _) => None,
            (Packing::Masked, Some(eos)) => Some(eos as i32),
            (Packing::Masked, None) => {
                let message = "documents cannot be told apart: meta.json names no `eos`; name it, or choose --packing joined";
                return Err(DataError::Options(message.into()));
            }
        };
        let count = (total - 1 - seq as u64) / stride + 1;
        Ok(Windows { tokens, seq, stride, ends, first: 0, count })
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

    /// The row that the windows are cut from.
    pub fn tokens(&self) -> &Arc<Tokens> {
        &self.tokens
    }
}

impl Items for Windows {
    fn len(&self) -> u64 {
        self.count
    }

    fn append(&self, item: u64, batch: &mut PackedBatch) -> Result<(), DataError> {
        if item >= self.count {
            let message = format!("window {item} was asked for, {} there are", self.count);
            return Err(DataError::Options(message));
        }
        let begin = (self.first + item) * self.stride;
        let (ids, targets) = batch.grow(self.seq);
        self.tokens.copy(begin, ids)?;
        let last = self.seq - 1;
        targets[..last].copy_from_slice(&ids[1..]);
        self.tokens.copy(begin + self.seq as u64, &mut targets[last..])?;
        if let Some(eos) = self.ends {
            for (id, target) in ids.iter().zip(targets) {
                if *id == eos {
                    *target = IGNORED;
                }
            }
        }
        while !batch.open().is_empty() {
            let open = batch.open();
            let end = self.ends.and_then(|eos| open.iter().position(|&id| id == eos));
            let tokens = end.map_or(open.len(), |end| end + 1);
            batch.end(tokens);
        }
        Ok(())
    }
}
