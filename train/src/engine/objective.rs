//! Steps by an objective: batches of a strategy instead of next tokens.

use super::inputs::{ACCUMULATE, LR};
use super::{Engine, StepResult};
use crate::batch::PackedBatch;
use crate::strategies::{self, Batch, Frozen, METRIC, Strategy};
use astrai_runtime::{Error, Session, Value};
use std::collections::BTreeMap;

impl Engine {
    /// [`step`](Self::step) by the recipe's objective, on the micro-batches of a step.
    ///
    /// # Errors
    /// A batch is of another strategy, or log-probabilities of frozen policies are missing; the device failed.
    pub fn learn(&mut self, window: &[Batch], lr: f64) -> Result<StepResult, Error> {
        let Some(objective) = self.recipe.objective.clone() else {
            fn tokens(batch: &Batch) -> Option<&PackedBatch> {
                if let Batch::Tokens(batch) = batch { Some(batch) } else { None }
            }
            return self.next_tokens(window.iter().filter_map(tokens), lr);
        };
        self.check(window.len())?;
        self.metrics.clear();
        let (mut loss, mut targets) = (0.0, 0);
        let (own, scale) = (self.scale(), self.scale() / objective.denominator(window));
        for (i, batch) in window.iter().enumerate() {
            self.inputs.of_micro_batch(i, window.len(), &self.recipe.router, own);
            self.noise(&batch.sequences().starts, i);
            let more = &self.inputs.values[ACCUMULATE..LR];
            targets += judge(&mut self.grad, &*objective, (batch, window), scale, more)?;
            let alone = self.grad.scalar("objective").or(self.grad.scalar("loss"));
            loss += f64::from(alone.unwrap_or(f32::NAN)) / own;
            self.loads.add(&self.grad);
            self.metrics.add(&self.grad, &*objective, batch);
        }
        self.update(loss, targets, window.len(), lr)
    }

    /// The objective on batches that are not learnt; its metrics are then [`metrics`](Self::metrics).
    ///
    /// # Errors
    /// As [`learn`](Self::learn).
    pub fn judge(&mut self, window: &[Batch]) -> Result<f64, Error> {
        let Some(objective) = self.recipe.objective.clone() else {
            return Err(Error::Input("there is no objective".into()));
        };
        self.metrics.clear();
        let (mut loss, scale) = (0.0, 1.0 / objective.denominator(window));
        for batch in window {
            judge(&mut self.score, &*objective, (batch, window), scale, &[])?;
            loss += f64::from(self.score.scalar("loss").unwrap_or(f32::NAN));
            self.metrics.add(&self.score, &*objective, batch);
        }
        Ok(loss)
    }

    /// Metrics of the objective by name, of the last step or judgement: means over its micro-batches.
    pub fn metrics(&self) -> BTreeMap<String, f64> {
        self.metrics.means()
    }
}

/// Runs an objective's program on a batch of a step; answers the targets that count.
fn judge(
    session: &mut Session,
    objective: &dyn Strategy,
    (batch, window): (&Batch, &[Batch]),
    scale: f64,
    more: &[(&'static str, Value)],
) -> Result<usize, Error> {
    let sequences = batch.sequences();
    let frozen = Frozen::of(&sequences);
    let own = strategies::inputs(objective, (batch, window), &frozen, scale).map_err(Error::Input)?;
    let has = |name: &str| session.inputs().iter().any(|(n, _)| n == name);
    let given: Vec<_> = own.iter().chain(more).filter(|(n, _)| has(n)).map(|(n, v)| (*n, v)).collect();
    session.execute(&given)?;
    Ok(sequences.valid())
}

/// Sums of an objective's metrics over micro-batches.
#[derive(Default)]
pub(super) struct Metrics {
    /// Names of the program's outputs.
    outputs: Vec<String>,
    sums: BTreeMap<String, f64>,
    count: f64,
}

impl Metrics {
    pub(super) fn of(program: &Session) -> Metrics {
        let names = program.program().graph.outputs().iter().map(|(name, _)| name.clone());
        Metrics { outputs: names.filter(|n| n.starts_with(METRIC)).collect(), ..Metrics::default() }
    }

    fn clear(&mut self) {
        self.sums.clear();
        self.count = 0.0;
    }

    fn add(&mut self, run: &Session, objective: &dyn Strategy, batch: &Batch) {
        let mut add = |name: &str, x| *self.sums.entry(name.to_string()).or_default() += x;
        for name in &self.outputs {
            add(name.strip_prefix(METRIC).unwrap_or(name), f64::from(run.scalar(name).unwrap_or(f32::NAN)));
        }
        objective.observed(batch).into_iter().for_each(|(name, x)| add(name, x));
        self.count += 1.0;
    }

    fn means(&self) -> BTreeMap<String, f64> {
        self.sums.iter().map(|(name, sum)| (name.clone(), sum / self.count)).collect()
    }
}
