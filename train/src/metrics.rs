//! What a run measured. In: a row a step. Out: `metrics.jsonl`, one JSON object a line, each written whole at once; on
//! resume cut back to the checkpoint's step, so that the file is what an uninterrupted run would have written, but
//! for times. A number that is not finite is `null`, because JSON has no other word for it. The same rows as a table and for
//! TensorBoard are made beside it.

mod appended;
mod csv;
mod recorder;
mod tensorboard;

pub use csv::Csv;
pub(crate) use recorder::Recorder;
pub use tensorboard::Events;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::router::RouterStats;
use appended::Appended;
use astrai_files::{FileError, System, open, replace, shown};

/// Longest line read, in bytes.
const LONGEST: u64 = 1 << 16;

/// Measurements of one update.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Updates made, this one included.
    pub step: u64,
    /// Pass over the data, counted from 0, with its fraction.
    #[serde(deserialize_with = "number")]
    pub epoch: f64,
    /// Tokens read since the run's beginning.
    pub tokens: u64,
    /// Mean loss of the update's tokens, nats a token.
    #[serde(deserialize_with = "number")]
    pub loss: f64,
    /// Learning rate of the update.
    #[serde(deserialize_with = "number")]
    pub lr: f64,
    /// Global norm of the gradient before clipping.
    #[serde(deserialize_with = "number")]
    pub grad_norm: f64,
    /// Tokens read a second, in this update.
    #[serde(deserialize_with = "number")]
    pub tokens_per_s: f64,
    /// Wall time of the update.
    #[serde(deserialize_with = "number")]
    pub seconds: f64,
    /// Share of the machine's peak that the model's own arithmetic reached; see [`mfu`].
    #[serde(deserialize_with = "number")]
    pub mfu: f64,
    /// What the loss was multiplied by for its gradient, where weights are stored as f16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// What the routers of a model with experts did.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub router: Option<RouterStats>,
    /// What a strategy logs beside its loss, under TRL's names.
    #[serde(flatten, deserialize_with = "numbers")]
    pub metrics: BTreeMap<String, f64>,
}

/// Loss on the validation data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Validation {
    /// Updates made before it.
    pub step: u64,
    /// Mean loss, nats a token.
    #[serde(deserialize_with = "number")]
    pub val_loss: f64,
    /// A strategy's metrics, `val_` before their names, and those of `--eval-task`, as `eval/TASK/METRIC`.
    #[serde(flatten, deserialize_with = "numbers")]
    pub metrics: BTreeMap<String, f64>,
}

/// A line of the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Row {
    /// Of an update.
    Step(StepMetrics),
    /// Of a validation.
    Validation(Validation),
}

impl Row {
    /// Updates made.
    pub fn step(&self) -> u64 {
        match self {
            Row::Step(row) => row.step,
            Row::Validation(row) => row.step,
        }
    }
}

/// The fields of a row, as its line has them.
fn fields(row: &Row) -> Result<Map<String, Value>, serde_json::Error> {
    match serde_json::to_value(row)? {
        Value::Object(fields) => Ok(fields),
        _ => Ok(Map::new()),
    }
}

/// A file that takes row after row.
pub trait Writer {
    /// Appends a row. When it fails, the file is left with the whole rows it had, and the run may go on.
    ///
    /// # Errors
    /// The system refuses.
    fn add(&mut self, row: &Row) -> Result<(), FileError>;

    /// Makes all rows durable; before a checkpoint is published, so that none of its steps can be missing.
    ///
    /// # Errors
    /// The system refuses.
    fn sync(&self) -> Result<(), FileError>;
}

fn number<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(from)?.unwrap_or(f64::NAN))
}

fn numbers<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, f64>, D::Error> {
    let all = BTreeMap::<String, Option<f64>>::deserialize(from)?;
    Ok(all.into_iter().map(|(name, x)| (name, x.unwrap_or(f64::NAN))).collect())
}

/// Model flops utilisation: `flops_per_token` of forward and backward, without what is computed again, at `tokens_per_s`,
/// over the machine's `peak` in flops a second. 0 where no peak is known.
pub fn mfu(flops_per_token: f64, tokens_per_s: f64, peak: f64) -> f64 {
    if peak > 0.0 { flops_per_token * tokens_per_s / peak } else { 0.0 }
}

/// The file being written.
#[derive(Debug)]
pub struct Metrics(Appended);

impl Metrics {
    /// Starts the file anew.
    ///
    /// # Errors
    /// The system refuses.
    pub fn create(path: &Path) -> Result<Metrics, FileError> {
        replace(&System, path, b"")?;
        Ok(Metrics(Appended::open(path, 0)?))
    }

    /// Continues the file after `step`: rows of later steps and lines that cannot be read are dropped, in a copy that
    /// replaces the file. Gives a line for the user for what could not be read, but for a last line cut short.
    ///
    /// # Errors
    /// The system refuses.
    pub fn resume(path: &Path, step: u64) -> Result<(Metrics, Vec<String>), FileError> {
        let mut kept = Vec::new();
        let notes = lines(path, &mut |row, line| {
            if row.step() <= step {
                kept.extend_from_slice(line);
                kept.push(b'\n');
            }
        })?;
        replace(&System, path, &kept)?;
        Ok((Metrics(Appended::open(path, kept.len() as u64)?), notes))
    }
}

impl Writer for Metrics {
    fn add(&mut self, row: &Row) -> Result<(), FileError> {
        let mut line = serde_json::to_vec(row)
            .map_err(|e| FileError::refused(&self.0.path, format!("a row is no JSON: {e}")))?;
        line.push(b'\n');
        self.0.add(&line)
    }

    fn sync(&self) -> Result<(), FileError> {
        self.0.sync()
    }
}

/// All rows of the file, and a line for the user for what could not be read; no rows where there is no file.
///
/// # Errors
/// The system refuses.
pub fn read(path: &Path) -> Result<(Vec<Row>, Vec<String>), FileError> {
    let mut rows = Vec::new();
    let notes = lines(path, &mut |row, _| rows.push(row))?;
    Ok((rows, notes))
}

/// Gives every readable row to `take`, with its line. A last line without an end was cut short by a crash and is nothing
/// to speak of; another that cannot be read is.
fn lines(path: &Path, take: &mut dyn FnMut(Row, &[u8])) -> Result<Vec<String>, FileError> {
    let file = match open(path) {
        Err(e) if e.is_absence() => return Ok(Vec::new()),
        file => file?.0,
    };
    let mut file = BufReader::new(file);
    let (mut line, mut number, mut bad) = (Vec::new(), 0u64, Vec::new());
    loop {
        line.clear();
        let read = file.by_ref().take(LONGEST).read_until(b'\n', &mut line);
        if read.map_err(FileError::io(path, "read it"))? == 0 {
            break;
        }
        number += 1;
        let whole = line.pop_if(|last| *last == b'\n').is_some();
        if !whole && line.len() as u64 == LONGEST {
            file.skip_until(b'\n').map_err(FileError::io(path, "read it"))?;
        }
        match serde_json::from_slice(&line) {
            Ok(row) if whole => take(row, &line),
            _ if whole || line.len() as u64 == LONGEST => bad.push(number),
            _ => {}
        }
    }
    Ok(match bad.first() {
        None => Vec::new(),
        Some(first) => {
            vec![format!(
                "{}: {} lines cannot be read and are left out, the first is line {first}",
                shown(path),
                bad.len()
            )]
        }
    })
}

#[cfg(test)]
mod tests;
