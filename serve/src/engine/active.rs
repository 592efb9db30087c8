//! A request in the engine, from its admission to its end. In: what was asked for, rows of its choices, tokens drawn for them. Out: what its
//! client is told.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::adapters::AdapterId;
use super::draw::{Draw, finish};
use super::embed::Pooled;
use super::stream::{Emitter, End, Permits, Update, Usage};
use crate::grammar::Constraint;
use crate::pages::Prompt;
use crate::sample::{History, Logprobs, Rules, SampleError, Sampled, Sampler};
use crate::scheduler::SequenceId;
use crate::scheduler::plan::Row;

/// A request in the engine.
pub(super) struct Active {
    pub emitter: Emitter,
    /// Given up choice by choice, as they end.
    pub permits: Permits,
    pub rules: Arc<Rules>,
    pub constraint: Option<Constraint>,
    pub adapter: Option<AdapterId>,
    /// Its place among those that wait.
    pub tag: u64,
    /// Where log-probabilities of the prompt are wanted: its tokens, from which on, and those that are known.
    pub scores: Option<(Arc<Prompt>, usize, Vec<Logprobs>)>,
    /// Where the prompt's vector is wanted: what is known of it.
    pub pooled: Option<Pooled>,
    /// By index; none when it has ended.
    pub choices: Vec<Option<Choice>>,
    pub since: Instant,
    /// Whether a choice has run.
    pub ran: bool,
    pub usage: Usage,
    /// What this step gave.
    pub updates: Vec<Update>,
    /// Why it ends without an answer.
    pub failure: Option<End>,
}

pub(super) struct Choice {
    pub id: SequenceId,
    /// Made when it first runs: what waits takes no more than its place.
    pub history: Option<History>,
    pub ran: bool,
}

/// What the request itself rules out, or its grammar, is its own fault; the model is not.
fn failure(wrong: &SampleError) -> End {
    let why = wrong.to_string();
    if matches!(wrong, SampleError::Model(_)) { End::Failed(why) } else { End::Refused(why) }
}

impl Active {
    pub fn is_over(&self) -> bool {
        self.failure.is_some() || self.choices.iter().all(Option::is_none)
    }

    /// Notes that a choice runs at this time; says whether it is the request's first.
    pub fn run(&mut self, index: u32, now: Instant) -> bool {
        let choice = self.choices.get_mut(index as usize).and_then(Option::as_mut);
        let Some(choice) = choice.filter(|c| !c.ran) else { return false };
        choice.ran = true;
        self.permits.run();
        let first = !std::mem::replace(&mut self.ran, true);
        if first {
            self.usage.queued = now.duration_since(self.since);
        }
        first
    }

    /// Notes the log-probability of the token of the prompt that comes after a row, if it is wanted and not known.
    pub fn score(&mut self, row: &Row, logits: &[f32], samplers: &[Mutex<Sampler>]) {
        let top = self.rules.sampling().prompt_logprobs.unwrap_or(0);
        let Some((prompt, from, known)) = &mut self.scores else { return };
        let Some(token) = prompt.tokens().get(row.at).filter(|_| *from + known.len() == row.at) else {
            return;
        };
        let Some(sampler) = samplers.first() else { return };
        let mut sampler = sampler.lock().unwrap_or_else(PoisonError::into_inner);
        match sampler.score(logits, *token, top, row.at) {
            Ok(score) => known.push(score),
            Err(wrong) => self.failure = Some(failure(&wrong)),
        }
    }

    /// What sampling remembers of a choice, made when it first runs.
    pub fn history(&mut self, index: u32) -> Option<&mut History> {
        let choice = self.choices.get_mut(index as usize).and_then(Option::as_mut)?;
        let (rules, constraint) = (&self.rules, self.constraint.as_ref());
        let new = || History::new(rules.clone(), index).held(constraint);
        Some(choice.history.get_or_insert_with(new))
    }

    /// Ends a choice; gives its sequence.
    pub fn take(&mut self, index: u32) -> Option<SequenceId> {
        let choice = self.choices.get_mut(index as usize)?.take()?;
        self.permits.end(choice.ran);
        Some(choice.id)
    }

    /// Notes what was drawn for a choice: what its request will be told. Gives the tokens.
    pub fn record(&mut self, draw: Draw, now: Instant, eos: &[u32]) -> Vec<u32> {
        let Draw { id, history, sampled, .. } = draw;
        let mut tokens = Vec::with_capacity(sampled.len());
        let mut left = sampled.len();
        for sampled in sampled {
            left -= 1;
            let sampled = match sampled {
                Ok(sampled) => sampled,
                Err(wrong) => {
                    self.failure = Some(failure(&wrong));
                    return tokens;
                }
            };
            // Whatever more was drawn follows one that does not end the choice.
            let finish = if left == 0 { finish(&self.rules, &sampled, &history, eos) } else { None };
            let Sampled { token, logprobs, .. } = sampled;
            let time = now.duration_since(self.since);
            self.usage.output += 1;
            self.usage.first_token.get_or_insert(time);
            self.usage.last_token = Some(time);
            let prompt = self.scores.take().map_or_else(Vec::new, |(.., known)| known);
            self.updates.push(Update { index: id.index, token, logprobs, finish, prompt });
            tokens.push(token);
        }
        if let Some(Some(choice)) = self.choices.get_mut(id.index as usize) {
            choice.history = Some(history);
        }
        tokens
    }
}
