//! In: `trainer.json`, hostile. Out: where a run stands. All that a resumed run needs besides tensors is numbers: the
//! sampler, the schedule and the random streams are pure functions of them.

use std::path::{Path, absolute};

use serde::{Deserialize, Serialize};

use super::parse;
use crate::scaler::LossScale;
use crate::settings::Settings;
use astrai_files::FileError;

/// Version of the file's form.
const FORMAT: u32 = 1;
/// Longest file read, in bytes.
pub(super) const LONGEST: u64 = 1 << 20;

/// State of the counter-based random numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counter {
    /// Key: the seed.
    pub seed: u64,
    /// Counter: the next step to draw for.
    pub step: u64,
}

/// What wrote the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Versions {
    /// Of astrai.
    pub astrai: String,
    /// Of the compiler of the kernels, which decides about bit-equality.
    pub compiler: String,
}

/// Where a run stands after `step` updates.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainerState {
    /// Version of this form, 1; [`new`](Self::new) sets it.
    format: u32,
    /// Updates made.
    pub step: u64,
    /// Updates of the whole run, which the schedule needs.
    pub total_steps: u64,
    /// Tokens read.
    pub tokens: u64,
    /// Passes over the data begun, counted from 0.
    pub epoch: u64,
    /// Global index of the next sample.
    pub sample: u64,
    /// Random numbers.
    pub random: Counter,
    /// What the loss is multiplied by, where weights are stored as f16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<LossScale>,
    /// Fingerprint of the data, which must be the same on resume.
    pub data: String,
    /// Fingerprint of the model beside which an adapter is trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// What wrote it.
    pub versions: Versions,
    /// Settings of the run: schedule, optimizer, dtype and the rest.
    pub settings: Settings,
}

impl TrainerState {
    /// The state of a run that has not begun.
    pub fn new(settings: Settings, total_steps: u64, data: String, compiler: String) -> TrainerState {
        let versions = Versions { astrai: env!("CARGO_PKG_VERSION").to_string(), compiler };
        let random = Counter { seed: settings.seed, step: 0 };
        // A checkpoint does not keep the process's own.
        let mut settings = Settings { on: None, ..settings };
        // Nor where that was started: a run goes on from any folder.
        let one = [&mut settings.config, &mut settings.model, &mut settings.tokenizer];
        let policies = [&mut settings.reference, &mut settings.old];
        let lists = settings.data.iter_mut().chain(settings.eval_task.iter_mut().flatten());
        for path in one.into_iter().chain(policies).flatten().chain(lists) {
            *path = absolute(&*path).unwrap_or_else(|_| path.clone());
        }
        TrainerState {
            format: FORMAT,
            step: 0,
            total_steps,
            tokens: 0,
            epoch: 0,
            sample: 0,
            random,
            loss_scale: None,
            data,
            base: None,
            versions,
            settings,
        }
    }

    /// The text of `trainer.json`.
    pub(super) fn text(&self) -> Result<String, String> {
        let text = serde_json::to_string_pretty(self).map_err(|e| e.to_string())?;
        // A state that does not read back (a number that is not finite) must not be found out on resume.
        match serde_json::from_str::<TrainerState>(&text) {
            Ok(read) if read == *self => Ok(text + "\n"),
            Ok(_) => Err("the state does not survive as JSON".to_string()),
            Err(e) => Err(format!("the state does not survive as JSON: {e}")),
        }
    }

    /// Reads the text of `trainer.json`; `path` names it in messages.
    pub(super) fn parse(text: &str, path: &Path) -> Result<TrainerState, FileError> {
        parse(text, FORMAT, path)
    }
}
