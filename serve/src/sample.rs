//! Logits in, a token out. The draw for a token depends on the request's seed, the choice and the token's position and
//! on nothing else: whatever shares the batch, and however often a sequence is computed anew, it gets the same tokens. One
//! pass over the vocabulary is enough for greedy sampling, two for plain; filters look again only where likely tokens are.

mod choose;
mod masks;
mod softmax;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::Arc;

use astrai_ir::ops::{Drawing, philox};

use crate::grammar::{Allowed, Constraint, Guide};
use crate::request::Sampling;
use choose::Candidates;
use softmax::{InvalidLogits, Softmax};

/// Why there is no token at a position.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    /// The model's own logits are NaN, positive infinity, or all negative infinity.
    #[error("the model gave logits that are no distribution at position {0} (NaN or infinite)")]
    Model(usize),
    /// They were sound before the request's parameters.
    #[error(
        "no token is left at position {0}: grammar, min_tokens, stop ids, biases and penalties rule out all; relax them"
    )]
    Request(usize),
    /// The request's grammar has no way on; one line says why.
    #[error("{0}")]
    Grammar(String),
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
    /// Whether the request's grammar lets nothing follow.
    pub complete: bool,
}

/// How the tokens of a request are drawn: what its choices have in common.
#[derive(Debug)]
pub struct Rules {
    sampling: Sampling,
    seed: u64,
    /// Tokens of the prompt.
    prompt: usize,
    /// What may not come before `min_tokens`.
    ends: Vec<u32>,
    /// Distinct tokens of the prompt, if repetition is penalised.
    known: Vec<u32>,
}

impl Rules {
    /// Of a request with checked parameters; `ends` are all ids that end a choice.
    pub fn new(sampling: Sampling, prompt: &[u32], seed: u64, ends: Vec<u32>) -> Arc<Rules> {
        let mut known = if sampling.repetition_penalty == 1.0 { vec![] } else { prompt.to_vec() };
        known.sort_unstable();
        known.dedup();
        Arc::new(Rules { sampling, seed, prompt: prompt.len(), ends, known })
    }

    /// The parameters.
    pub fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    /// Ids that end a choice.
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }

    fn penalises(&self) -> bool {
        let s = &self.sampling;
        s.repetition_penalty != 1.0 || s.presence_penalty != 0.0 || s.frequency_penalty != 0.0
    }
}

/// What sampling remembers of one sequence.
#[derive(Clone, Debug)]
pub struct History {
    rules: Arc<Rules>,
    choice: u32,
    generated: usize,
    /// Tokens of the output and how often they are there; only for requests with penalties.
    counts: HashMap<u32, u32>,
    /// The last tokens, as many as the longest of the words that may not come.
    recent: Vec<u32>,
    /// Says what may come; none if anything may, or while it is asked elsewhere.
    pub(crate) guide: Option<Box<Guide>>,
    /// What it said of the next token.
    pub(crate) allowed: Result<Allowed, String>,
}

impl History {
    /// Of a choice that begins.
    pub fn new(rules: Arc<Rules>, choice: u32) -> History {
        let counts = HashMap::new();
        let recent = Vec::new();
        History { rules, choice, generated: 0, counts, recent, guide: None, allowed: Ok(Allowed::All) }
    }

    /// The same, held by a constraint.
    pub fn held(self, constraint: Option<&Constraint>) -> History {
        History { guide: constraint.map(|c| Box::new(Guide::new(c))), ..self }
    }

    /// Tokens sampled so far.
    pub fn generated(&self) -> usize {
        self.generated
    }

    /// Whether nothing follows the token that was just sampled.
    pub(crate) fn has_ended(&self, sampled: &Sampled) -> bool {
        let full = self.rules.sampling.max_tokens.is_some_and(|most| self.generated >= most);
        full || sampled.complete || self.rules.ends.contains(&sampled.token)
    }

    fn position(&self) -> usize {
        self.rules.prompt + self.generated
    }

    /// Random bits for the next token; each draw for it has its own.
    fn word(&self, draw: usize) -> u64 {
        let position = self.position() as u64;
        let counter = [draw as u32, self.choice, position as u32, (position >> 32) as u32];
        let words = philox(counter, [self.rules.seed as u32, (self.rules.seed >> 32) as u32]);
        u64::from(words[0]) << 32 | u64::from(words[1])
    }

    /// How the next token is drawn where the logits lie; none where something is done to them first, or more is wanted of them.
    pub(crate) fn drawing(&self) -> Option<Drawing> {
        let rules = &*self.rules;
        let s = &rules.sampling;
        let shown = s.logprobs.is_some() || s.prompt_logprobs.is_some();
        let held = self.guide.is_some() || !matches!(self.allowed, Ok(Allowed::All));
        if shown || held || self.changes() {
            return None;
        }
        if s.temperature == 0.0 {
            return Some(Drawing::GREEDY);
        }
        // What is drawn first is dropped by top-p alone.
        let again = s.top_p < 1.0;
        Some(Drawing {
            inverse: 1.0 / s.temperature,
            reach: s.reach(),
            top_p: s.top_p,
            top_k: s.top_k,
            words: std::array::from_fn(|draw| if draw == 0 || again { self.word(draw) } else { 0 }),
        })
    }

    /// Whether the request has something done to the logits before one is drawn.
    fn changes(&self) -> bool {
        let s = &self.rules.sampling;
        let forbids = !(s.allowed_ids.is_empty() && s.bad_words.is_empty()) || s.typical_p < 1.0;
        forbids || self.generated < s.min_tokens || !s.logit_bias.is_empty() || self.rules.penalises()
    }

    /// Remembers the token that was drawn so; below 0 there was none.
    pub(crate) fn take_drawn(&mut self, token: i32) -> Result<Sampled, SampleError> {
        let token = u32::try_from(token).map_err(|_| SampleError::Model(self.position()))?;
        let complete = self.record(token)?;
        Ok(Sampled { token, logprobs: None, complete })
    }

    /// Does to the logits all that comes before the temperature; what was there before goes to `raw`, first come first.
    fn adjust(&self, logits: &mut [f32], raw: &mut Vec<(u32, f32)>) {
        let rules = &*self.rules;
        let s = &rules.sampling;
        let mut change = |id: u32, to: &dyn Fn(f32) -> f32| {
            let x = &mut logits[id as usize];
            raw.push((id, *x));
            *x = to(*x);
        };
        if self.generated < s.min_tokens {
            rules.ends.iter().for_each(|&id| change(id, &|_| f32::NEG_INFINITY));
        }
        s.logit_bias.iter().for_each(|&(id, bias)| change(id, &|x| x + bias));
        let r = s.repetition_penalty;
        // A tiny divisor would make an infinity, which is no one's fault but has no distribution.
        let repeated = |x: f32| if x > 0.0 { (x / r).min(f32::MAX) } else { x * r };
        for &id in rules.known.iter().filter(|id| !self.counts.contains_key(id)) {
            change(id, &repeated);
        }
        for (&id, &count) in &self.counts {
            let less = s.frequency_penalty * count as f32 + s.presence_penalty;
            change(id, &|x| repeated(x) - less);
        }
    }

    /// Remembers a token; says whether nothing may follow.
    fn record(&mut self, token: u32) -> Result<bool, SampleError> {
        self.generated += 1;
        if self.rules.penalises() {
            *self.counts.entry(token).or_insert(0) += 1;
        }
        let longest = self.rules.sampling.bad_words.iter().map(Vec::len).max().unwrap_or(0);
        if longest > 1 {
            self.recent.push(token);
            self.recent.drain(..self.recent.len().saturating_sub(longest - 1));
        }
        let taken = self.guide.as_mut().map(|guide| guide.take(token));
        taken.unwrap_or(Ok(false)).map_err(SampleError::Grammar)
    }
}

/// Space for sampling, used for one row after the other.
#[derive(Clone, Debug, Default)]
pub struct Sampler {
    softmax: Softmax,
    candidates: Candidates,
    /// Logits that were adjusted, as the model gave them.
    raw: Vec<(u32, f32)>,
}

impl Sampler {
    /// Samples the next token of a sequence and remembers it. The row must be no shorter than the vocabulary that the
    /// parameters were checked for; it is spoilt.
    ///
    /// # Errors
    /// The logits are no distribution.
    pub fn sample(&mut self, logits: &mut [f32], history: &mut History) -> Result<Sampled, SampleError> {
        let rules = history.rules.clone();
        let position = history.position();
        let shown = match rules.sampling.logprobs {
            None => None,
            Some(top) => {
                self.softmax.find_maxima(logits).map_err(|_| SampleError::Model(position))?;
                Some(self.logprobs(logits, top as usize))
            }
        };
        let allowed =
            std::mem::replace(&mut history.allowed, Ok(Allowed::All)).map_err(SampleError::Grammar)?;
        allowed.apply(logits);
        let forbids = masks::forbid(logits, &rules.sampling, &history.recent);
        let held = forbids || !matches!(allowed, Allowed::All);
        self.raw.clear();
        history.adjust(logits, &mut self.raw);
        if shown.is_none() || held || !self.raw.is_empty() {
            self.softmax.find_maxima(logits).map_err(|wrong| match wrong {
                InvalidLogits::Nothing if held || self.raw.iter().any(|(_, x)| *x > f32::NEG_INFINITY) => {
                    SampleError::Request(position)
                }
                _ => SampleError::Model(position),
            })?;
        }
        if rules.sampling.typical_p < 1.0 {
            masks::keep_typical(logits, &mut self.softmax, &rules.sampling);
            self.softmax.find_maxima(logits).map_err(|_| SampleError::Model(position))?;
        }
        let chosen = self.choose(logits, &rules.sampling, &|draw| history.word(draw));
        let token = chosen.ok_or(SampleError::Model(position))? as u32;
        let x = self.raw.iter().find(|(id, _)| *id == token).map_or(logits[token as usize], |(_, x)| *x);
        let complete = history.record(token)?;
        if complete && history.generated < rules.sampling.min_tokens {
            return Err(SampleError::Request(position + 1));
        }
        let logprobs = shown.map(|(log, top)| Logprobs { chosen: (f64::from(x) - log) as f32, top });
        Ok(Sampled { token, logprobs, complete })
    }

    /// The token that comes next where no grammar forbids it; nothing where more than that is to be asked.
    pub(crate) fn likeliest(&mut self, logits: &[f32], history: &History) -> Option<u32> {
        let asked = history.rules.sampling.temperature > 0.0 || history.changes();
        let found = !asked && self.softmax.find_maxima(logits).is_ok();
        found.then(|| self.softmax.argmax(logits) as u32)
    }

    /// Log-probability of a token that comes next without being drawn, and of the likeliest in its place.
    ///
    /// # Errors
    /// The logits are no distribution.
    pub fn score(
        &mut self,
        logits: &[f32],
        token: u32,
        top: u32,
        position: usize,
    ) -> Result<Logprobs, SampleError> {
        self.softmax.find_maxima(logits).map_err(|_| SampleError::Model(position))?;
        let (log, top) = self.logprobs(logits, top as usize);
        let x = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
        Ok(Logprobs { chosen: (f64::from(x) - log) as f32, top })
    }

    /// Logarithm of the sum of a scanned row, and the likeliest of it.
    fn logprobs(&mut self, logits: &[f32], top: usize) -> (f64, Vec<(u32, f32)>) {
        self.softmax.sum_weights(logits, 1.0, f32::NEG_INFINITY);
        let log = f64::from(self.softmax.max) + self.softmax.total.ln();
        let of = |x: f32| (f64::from(x) - log) as f32;
        let ranks = self.candidates.top(logits, &self.softmax, top);
        (log, ranks.iter().map(|&r| (choose::id(r) as u32, of(choose::logit(r)))).collect())
    }

    /// Draws from a scanned row.
    fn choose(&mut self, logits: &[f32], sampling: &Sampling, word: &dyn Fn(usize) -> u64) -> Option<usize> {
        if sampling.temperature == 0.0 {
            return Some(self.softmax.argmax(logits));
        }
        let kept = self.candidates.filter(logits, &mut self.softmax, sampling);
        self.candidates.draw(logits, &self.softmax, kept, word)
    }
}
