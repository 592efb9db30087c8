//! Tokens of a step, drawn on all threads. In: a row of logits for each sequence that gets a token. Out: the tokens. Each row
//! is drawn by what belongs to it alone, so the threads change nothing but the time. Behind a token that was proposed, and is
//! drawn, the next is drawn at once.

use std::sync::{Mutex, PoisonError};

use astrai_runtime::Threads;

use super::masks::find;
use super::stream::Finish;
use crate::sample::{History, Rules, SampleError, Sampled, Sampler};
use crate::scheduler::SequenceId;

/// The next tokens of one sequence.
pub(super) struct Draw<'a> {
    pub id: SequenceId,
    /// `[vocabulary]`; spoilt by the draw.
    pub logits: &'a mut [f32],
    /// Proposed tokens, and the logits behind each.
    pub proposed: Vec<(u32, &'a mut [f32])>,
    pub history: History,
    /// Whether what its grammar allows is still to be found.
    pub find: bool,
    /// Empty before the draw, unless the model drew; one token, and one more for each of the proposed that was drawn.
    pub sampled: Vec<Result<Sampled, SampleError>>,
}

impl Draw<'_> {
    fn run(&mut self, sampler: &mut Sampler) {
        let Draw { id, logits, proposed, history, find, sampled } = self;
        if !sampled.is_empty() {
            return;
        }
        if *find {
            allow(*id, history, sampler, logits);
        }
        sampled.push(sampler.sample(logits, history));
        for (token, logits) in proposed {
            match sampled.last() {
                Some(Ok(last)) if last.token == *token && !history.has_ended(last) => {}
                _ => return,
            }
            allow(*id, history, sampler, logits);
            sampled.push(sampler.sample(logits, history));
        }
    }
}

/// Finds what may come next in an answer, where a grammar holds it.
fn allow(id: SequenceId, history: &mut History, sampler: &mut Sampler, logits: &[f32]) {
    if let Some(guide) = history.guide.take() {
        let likeliest = sampler.likeliest(logits, history);
        (_, history.guide, history.allowed) = find(id, guide, likeliest);
    }
}

/// Draws all, with a sampler for each thread of the pool.
pub(super) fn draw(draws: &[Mutex<Draw>], samplers: &[Mutex<Sampler>], pool: Option<&dyn Threads>) {
    let some = |draws: &[Mutex<Draw>], worker: usize| {
        let Some(sampler) = samplers.get(worker) else { return };
        let mut sampler = sampler.lock().unwrap_or_else(PoisonError::into_inner);
        for draw in draws {
            draw.lock().unwrap_or_else(PoisonError::into_inner).run(&mut sampler);
        }
    };
    match pool.filter(|_| draws.len() > 1) {
        Some(pool) => pool.share(draws.len(), &|worker, range| some(&draws[range], worker)),
        None => some(draws, 0),
    }
}

/// Why a token ends its choice, if it does.
pub(super) fn finish(rules: &Rules, sampled: &Sampled, history: &History, eos: &[u32]) -> Option<Finish> {
    let (sampling, token) = (rules.sampling(), sampled.token);
    match rules.ends().contains(&token) {
        true if sampling.stop_ids.contains(&token) && !eos.contains(&token) => Some(Finish::StopId(token)),
        true if sampling.ignore_eos => Some(Finish::StopId(token)),
        true => Some(Finish::Eos),
        false if sampled.complete => Some(Finish::Complete),
        false => history.has_ended(sampled).then_some(Finish::Length),
    }
}
