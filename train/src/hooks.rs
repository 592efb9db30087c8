//! Hook points of a run. In: its moments, in the order of the trait below. Out: calls of whatever hears them: the screen, the files of
//! metrics, users' commands. No hook changes a step, so that a run is the same with any of them.

mod command;

pub use command::{Commands, When};

use crate::checkpoint::TrainerState;
use crate::error::Error;
use crate::metrics::{StepMetrics, Validation};
use std::path::Path;

/// Where a run stands when a hook is called.
#[derive(Clone, Copy, Debug)]
pub struct At<'a> {
    /// The run's folder.
    pub out: &'a Path,
    /// Its state; [`step`](TrainerState::step) is the number of updates made.
    pub state: &'a TrainerState,
}

/// What hears a run. An error is told to the user and the run goes on; only [`on_saving`](Hook::on_saving) keeps something from happening.
pub trait Hook {
    /// The run begins, or goes on from a checkpoint.
    fn on_train_begin(&mut self, _: &At) -> Result<(), Error> {
        Ok(())
    }

    /// A pass over the data begins, or goes on after a resume.
    fn on_epoch_begin(&mut self, _: &At) -> Result<(), Error> {
        Ok(())
    }

    /// The batches of the next update are about to be read.
    fn on_batch_begin(&mut self, _: &At) -> Result<(), Error> {
        Ok(())
    }

    /// An update was made, or left out for its gradient.
    fn on_optimizer_step(&mut self, _: &At, _: &StepMetrics) -> Result<(), Error> {
        Ok(())
    }

    /// The validation data and tasks were scored.
    fn on_validation(&mut self, _: &At, _: &Validation) -> Result<(), Error> {
        Ok(())
    }

    /// A checkpoint is about to be written; it is not if this fails.
    fn on_saving(&mut self, _: &At) -> Result<(), Error> {
        Ok(())
    }

    /// A checkpoint was published, in this folder.
    fn on_checkpoint(&mut self, _: &At, _: &Path) -> Result<(), Error> {
        Ok(())
    }

    /// All of an update is done, with its validation and its checkpoint.
    fn on_batch_end(&mut self, _: &At) -> Result<(), Error> {
        Ok(())
    }

    /// All of the data were read once more.
    fn on_epoch_end(&mut self, _: &At) -> Result<(), Error> {
        Ok(())
    }

    /// The run ends with an error.
    fn on_error(&mut self, _: &At, _: &Error) -> Result<(), Error> {
        Ok(())
    }

    /// The run is complete or was asked to stop, and its last checkpoint is there.
    fn on_train_end(&mut self, _: &At) -> Result<(), Error> {
        Ok(())
    }
}
