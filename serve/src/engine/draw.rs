//! Tokens of a step, drawn on all threads. In: a row of logits for each sequence that gets a token. Out: the tokens. Each row
//! is drawn by what belongs to it alone, so the threads change nothing but the time.

use std::sync::{Mutex, PoisonError};

use astrai_runtime::Threads;

use crate::sample::{History, SampleError, Sampled, Sampler};
use crate::scheduler::SequenceId;

/// The next token of one sequence.
pub(super) struct Draw<'a> {
    pub id: SequenceId,
    /// `[vocabulary]`; spoilt by the draw.
    pub logits: &'a mut [f32],
    pub history: History,
    /// None before the draw.
    pub sampled: Option<Result<Sampled, SampleError>>,
}

/// Draws all, with a sampler for each thread of the pool.
pub(super) fn draw(draws: &[Mutex<Draw>], samplers: &[Mutex<Sampler>], pool: Option<&dyn Threads>) {
    let some = |draws: &[Mutex<Draw>], worker: usize| {
        let Some(sampler) = samplers.get(worker) else { return };
        let mut sampler = sampler.lock().unwrap_or_else(PoisonError::into_inner);
        for draw in draws {
            let mut draw = draw.lock().unwrap_or_else(PoisonError::into_inner);
            let Draw { logits, history, sampled, .. } = &mut *draw;
            *sampled = Some(sampler.sample(logits, history));
        }
    };
    match pool.filter(|_| draws.len() > 1) {
        Some(pool) => pool.share(draws.len(), &|worker, range| some(&draws[range], worker)),
        None => some(draws, 0),
    }
}
