//! Tasks during training. In: task files, the model's tokenizer, the longest sequence of a batch. Out: at each validation their
//! metrics, by the program that computes the loss of a batch. That program scores and does not generate.

use super::{Encoder, Outcome, Question, Scored, Tally, Task};
use crate::data::DataError;
use astrai_serve::tokenizer::Tokenizer;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A task whose sequences are at hand.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// Its name.
    pub name: String,
    lines: Vec<(Question, Vec<Scored>)>,
    /// Prompts whose beginning was cut off.
    pub cut: u64,
}

impl Loaded {
    /// Reads the files named by `--eval-task`; sequences have at most `longest` tokens.
    ///
    /// # Errors
    /// A line cannot be read or scored, or asks for a generated answer; or there is no tokenizer to read it with.
    pub fn read_all(
        paths: &[PathBuf],
        tokenizer: Option<&Tokenizer>,
        longest: usize,
    ) -> Result<Vec<Loaded>, DataError> {
        let Some(first) = paths.first() else { return Ok(Vec::new()) };
        let without = "is text, and the run has no tokenizer to read it with; give --tokenizer";
        let tokenizer = tokenizer.ok_or_else(|| DataError::refused(first, without))?;
        let encoder = Encoder::new(tokenizer, longest).map_err(DataError::Options)?;
        Task::open_all(paths, None)?.iter().map(|task| Loaded::read(task, &encoder)).collect()
    }

    fn read(task: &Task, encoder: &Encoder) -> Result<Loaded, DataError> {
        let (mut lines, mut cut) = (Vec::new(), 0);
        for line in task.lines()? {
            let line = line?;
            let scored = match &line.question {
                Question::Text(text) => encoder.text(text),
                Question::Choice { context, delimiter, choices, .. } => {
                    encoder.choices(context, delimiter, choices).map(|(scored, over)| {
                        cut += over.min(1);
                        scored
                    })
                }
                Question::Generate { .. } => {
                    Err("a generated answer needs the engine of `astrai eval`; name the task there".into())
                }
            };
            lines.push((line.question, scored.map_err(|why| task.refused(line.number, &why))?));
        }
        Ok(Loaded { name: task.name.clone(), lines, cut })
    }

    /// Its metrics and their standard errors as `eval/TASK/METRIC`, by `score`, which gives the log-likelihood of a sequence.
    ///
    /// # Errors
    /// Those of `score`.
    pub fn metrics<E>(
        &self,
        score: &mut dyn FnMut(&Scored) -> Result<f64, E>,
    ) -> Result<BTreeMap<String, f64>, E> {
        let mut tally = Tally::default();
        for (question, scored) in &self.lines {
            let sums = scored.iter().map(&mut *score).collect::<Result<Vec<f64>, E>>()?;
            match question {
                Question::Text(text) => {
                    let tokens = scored.iter().map(Scored::tokens).sum();
                    tally.add(&Outcome::of_text(text, sums.iter().sum(), tokens));
                }
                Question::Choice { choices, gold, .. } => {
                    tally.add(&Outcome::of_choices(choices, sums, *gold))
                }
                Question::Generate { .. } => {}
            }
        }
        let named = tally.metrics().into_iter().flat_map(|m| {
            let name = format!("eval/{}/{}", self.name, m.name);
            let stderr = m.stderr.map(|e| (format!("{name}_stderr"), e));
            [(name, m.value)].into_iter().chain(stderr)
        });
        Ok(named.collect())
    }
}
