//! A file of metrics as a hook. In: the rows of a run. Out: each in the file; where there is no room the next wait behind it, so that
//! none is missing, and no checkpoint is published before the rows of its steps are durable.

use super::{Row, StepMetrics, Validation, Writer};
use crate::error::Error;
use crate::hooks::{At, Hook};
use astrai_files::FileError;
use std::collections::VecDeque;

/// A writer, and the rows for which there was no room.
pub(crate) struct Recorder<W> {
    writer: W,
    waiting: VecDeque<Row>,
}

impl<W: Writer> Recorder<W> {
    pub(crate) fn new(writer: W) -> Recorder<W> {
        Recorder { writer, waiting: VecDeque::new() }
    }

    /// Writes a row; that there is no room is told once.
    fn record(&mut self, row: Row) -> Result<(), Error> {
        let told = !self.waiting.is_empty();
        self.waiting.push_back(row);
        match self.write_waiting() {
            Err(e) if !told => Err(Error::Refused(format!("{e}; what was measured waits until it can"))),
            _ => Ok(()),
        }
    }

    fn write_waiting(&mut self) -> Result<(), FileError> {
        while let Some(row) = self.waiting.front() {
            self.writer.add(row)?;
            self.waiting.pop_front();
        }
        Ok(())
    }
}

impl<W: Writer> Hook for Recorder<W> {
    fn on_optimizer_step(&mut self, _: &At, row: &StepMetrics) -> Result<(), Error> {
        self.record(Row::Step(row.clone()))
    }

    fn on_validation(&mut self, _: &At, row: &Validation) -> Result<(), Error> {
        self.record(Row::Validation(row.clone()))
    }

    /// A checkpoint without the rows before it would be resumed with a gap.
    fn on_saving(&mut self, _: &At) -> Result<(), Error> {
        self.write_waiting()?;
        Ok(self.writer.sync()?)
    }
}
