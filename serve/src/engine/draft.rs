//! The draft model of an engine, or the module of its model. In: the scheduler before a step. Out: its proposals for that step, and what they cost beside it: whether they
//! pay is for those who propose to decide.

use std::time::{Duration, Instant};

use super::model::{Model, step_guarded};
use crate::scheduler::Scheduler;
use crate::scheduler::draft::Drafting;

/// A smaller model of the same vocabulary.
pub type DraftModel = Box<dyn Model + Send>;

/// Weight of the newest time in an average, if it is longer and if it is shorter. A thread that loses its core makes a step longer, nothing makes
/// one shorter than it is.
const NEWEST: [f32; 2] = [0.1, 0.5];

/// The part of a step that a proposal costs at most: of what is always right, some are made.
const MOST: f32 = 0.9;

/// Runs the draft model.
pub(super) struct Drafter {
    model: DraftModel,
    drafting: Drafting,
    vocabulary: usize,
    /// Seconds of a step of one token each: of the draft model, of the model.
    seconds: [Option<f32>; 2],
}

impl Drafter {
    /// For a model of these pages; the draft model has as many.
    pub fn new(model: DraftModel) -> Drafter {
        let sizes = model.sizes();
        let plan = model.plan();
        let drafting = Drafting::new(plan, [sizes.tokens, sizes.positions, sizes.pages, sizes.page_size]);
        Drafter { model, drafting, vocabulary: sizes.vocabulary, seconds: [None; 2] }
    }

    /// Proposes tokens for the coming step, the likeliest each, which the draft model draws itself if it can.
    pub fn propose(&mut self, scheduler: &mut Scheduler) -> Result<(), String> {
        self.drafting.begin(scheduler);
        let draws = self.model.draws();
        while let Some(plan) = self.drafting.next(scheduler, draws) {
            let begun = Instant::now();
            let single = plan.rows().all(|row| row.tokens == 1);
            let stepped = step_guarded(&mut *self.model, plan);
            let (outputs, drawn) = stepped.map_err(|e| format!("the draft model failed: {e}"))?;
            let tokens: Vec<Option<u32>> = match draws {
                // Of logits that are no distribution there is no token.
                true => drawn.into_iter().map(|token| u32::try_from(token).ok()).collect(),
                false => {
                    outputs.iter().flat_map(|l| l.chunks(self.vocabulary)).map(likeliest).map(Some).collect()
                }
            };
            if single {
                note(&mut self.seconds[0], begun.elapsed());
            }
            self.drafting.take(&tokens);
        }
        self.drafting.end(scheduler);
        Ok(())
    }

    /// Whether the draft model is lost, and need not be asked again.
    pub fn lost(&self) -> bool {
        self.model.lost()
    }

    /// Notes what a step of the model took whose rows are of one token each.
    pub fn compare(&mut self, step: Duration, scheduler: &mut Scheduler) {
        note(&mut self.seconds[1], step);
        if let [Some(draft), Some(step)] = self.seconds {
            scheduler.drafts_cost((draft / step.max(f32::MIN_POSITIVE)).min(MOST));
        }
    }
}

/// Takes a time into an average, as at most twice of what that was.
fn note(average: &mut Option<f32>, took: Duration) {
    let took = took.as_secs_f32();
    let [longer, shorter] = NEWEST;
    *average = Some(match *average {
        None => took,
        Some(average) if took > average => average + (took.min(2.0 * average) - average) * longer,
        Some(average) => average + (took - average) * shorter,
    });
}

/// The id of the greatest logit, the first of several.
fn likeliest(logits: &[f32]) -> u32 {
    let best =
        |(best, most): (usize, f32), (id, x): (usize, &f32)| if *x > most { (id, *x) } else { (best, most) };
    logits.iter().enumerate().fold((0, f32::NEG_INFINITY), best).0 as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_in_which_the_thread_lost_its_core_changes_little() {
        let (mut average, usual) = (None, Duration::from_micros(100));
        // The first is a hundred times as long: seven usual ones make up for it.
        for took in [10_000, 100, 100, 100, 100, 100, 100, 100] {
            note(&mut average, Duration::from_micros(took));
        }
        assert!(average.unwrap() < 2.0 * usual.as_secs_f32(), "{average:?}");
        (0..20).for_each(|_| note(&mut average, usual));
        note(&mut average, Duration::from_secs(1));
        assert!(average.unwrap() < 1.11 * usual.as_secs_f32(), "{average:?}");
        // What stays longer is learnt.
        (0..100).for_each(|_| note(&mut average, 3 * usual));
        assert!(average.unwrap() > 2.9 * usual.as_secs_f32(), "{average:?}");
    }
}
