//! Logits in, a token out. The draw for a token depends on the request's seed, the choice and the token's position and
//! on nothing else: whatever shares the batch, and however often a sequence is computed anew, it gets the same tokens. One
//! pass over the vocabulary finds what greedy and plain sampling need; filters look again only where likely tokens are.

mod choose;
mod survey;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use astrai_ir::ops::philox;

use crate::request::Sampling;
use choose::{Candidates, Filter};
use survey::Survey;

/// Logits that are no distribution: NaN, positive infinity, or none above negative infinity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the model gave logits that are no distribution at position {position} (NaN or infinite)")]
pub struct SampleError {
    /// Position of the token that was to be sampled.
    pub position: usize,
}

/// Log-probabilities of the model's own distribution, before anything is done to it.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// Of the token that was chosen; negative infinity is possible when a bias made it.
    pub chosen: f32,
    /// Of the likeliest, likeliest first.
    pub top: Vec<(u32, f32)>,
}

/// A token, and what was asked about it.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// Its id.
    pub token: u32,
    /// As many as the request asked for.
    pub logprobs: Option<Logprobs>,
}

/// What sampling remembers of one sequence.
#[derive(Clone, Debug)]
pub struct History {
    seed: u64,
    choice: u32,
    prompt: usize,
    generated: usize,
    /// What may not come before `min_tokens`.
    ends: Vec<u32>,
    /// Tokens of prompt and output and how often they are in the output; only for requests with penalties.
    counts: Option<HashMap<u32, u32>>,
}

impl History {
    /// Of a sequence that begins; `ends` are all ids that will end it.
    pub fn new(sampling: &Sampling, prompt: &[u32], seed: u64, choice: u32, ends: Vec<u32>) -> History {
        let penalties = sampling.presence_penalty != 0.0 || sampling.frequency_penalty != 0.0;
        let repetition = sampling.repetition_penalty != 1.0;
        let known = if repetition { prompt } else { &[] };
        let counts = (penalties || repetition).then(|| known.iter().map(|&t| (t, 0)).collect());
        History { seed, choice, prompt: prompt.len(), generated: 0, ends, counts }
    }

    /// Tokens sampled so far.
    pub fn generated(&self) -> usize {
        self.generated
    }

    /// Ids that end the sequence.
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// A number in [0, 1) for the token at `position`.
    fn uniform(&self, position: usize) -> f64 {
        let position = position as u64;
        let counter = [0, self.choice, position as u32, (position >> 32) as u32];
        let words = philox(counter, [self.seed as u32, (self.seed >> 32) as u32]);
        let bits = u64::from(words[0]) << 32 | u64::from(words[1]);
        (bits >> 11) as f64 * 2f64.powi(-53)
    }

    /// Does to the logits all that comes before the temperature.
    fn adjust(&self, logits: &mut [f32], sampling: &Sampling) {
        if self.generated < sampling.min_tokens {
            self.ends.iter().for_each(|&id| logits[id as usize] = f32::NEG_INFINITY);
        }
        sampling.logit_bias.iter().for_each(|&(id, bias)| logits[id as usize] += bias);
        let Some(counts) = &self.counts else { return };
        for (&token, &count) in counts {
            let x = &mut logits[token as usize];
            let r = sampling.repetition_penalty;
            // A tiny divisor would make an infinity, which is no one's fault but has no distribution.
            *x = (if *x > 0.0 { (*x / r).min(f32::MAX) } else { *x * r })
                - sampling.frequency_penalty * count as f32;
            if count > 0 {
                *x -= sampling.presence_penalty;
            }
        }
    }

    fn record(&mut self, token: u32) {
        self.generated += 1;
        if let Some(counts) = &mut self.counts {
            *counts.entry(token).or_insert(0) += 1;
        }
    }
}

/// Space for sampling, used for one row after the other.
#[derive(Clone, Debug, Default)]
pub struct Sampler {
    survey: Survey,
    candidates: Candidates,
}

impl Sampler {
    /// Samples the next token of a sequence and remembers it. The parameters must be [checked](Sampling::checked) for a
    /// vocabulary no larger than the row; the row is spoilt.
    ///
    /// # Errors
    /// The logits are no distribution.
    pub fn sample(
        &mut self,
        logits: &mut [f32],
        sampling: &Sampling,
        history: &mut History,
    ) -> Result<Sampled, SampleError> {
        let position = history.prompt + history.generated;
        let wrong = SampleError { position };
        let mut shown = None;
        if let Some(top) = sampling.logprobs {
            if !self.survey.take(logits, Some(1.0)) {
                return Err(wrong);
            }
            let log = f64::from(self.survey.max) + self.survey.total.ln();
            let of = |x: f32| (f64::from(x) - log) as f32;
            let ranks = self.candidates.top(logits, &self.survey, top as usize);
            shown =
                Some((log, ranks.iter().map(|&r| (choose::id(r) as u32, of(choose::logit(r)))).collect()));
        }
        // Adjusting spoils the row, so what the chosen token had is read afterwards only if nothing was adjusted.
        let adjusts = history.counts.is_some()
            || !sampling.logit_bias.is_empty()
            || history.generated < sampling.min_tokens;
        let raw = (shown.is_some() && adjusts).then(|| logits.to_vec());
        if adjusts {
            history.adjust(logits, sampling);
        }
        let token = self.choose(logits, sampling, history.uniform(position)).ok_or(wrong)?;
        let x = raw.as_deref().unwrap_or(logits)[token];
        history.record(token as u32);
        let logprobs = shown.map(|(log, top)| Logprobs { chosen: (f64::from(x) - log) as f32, top });
        Ok(Sampled { token: token as u32, logprobs })
    }

    fn choose(&mut self, logits: &[f32], sampling: &Sampling, u: f64) -> Option<usize> {
        if sampling.temperature == 0.0 {
            return self.survey.take(logits, None).then(|| self.survey.argmax(logits));
        }
        if !self.survey.take(logits, Some(sampling.temperature)) {
            return None;
        }
        let &Sampling { temperature, top_p, min_p, .. } = sampling;
        let filter = Filter { temperature, top_k: sampling.top_k as usize, top_p, min_p };
        if filter.top_k == 0 && top_p == 1.0 && min_p == 0.0 {
            return Some(self.survey.at(logits, u));
        }
        self.candidates.filter(logits, &self.survey, &filter);
        self.candidates.at(&self.survey, u)
    }
}
