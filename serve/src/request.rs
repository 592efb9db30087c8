//! What a client may ask of the engine, and what it may not. In: tokens and sampling parameters, hostile until checked.
//! Out: the same with every value in its range, or one line that names the parameter. Semantics follow the OpenAI API where
//! it has the parameter, and the common extensions of other servers where it has not.

#[cfg(test)]
mod tests;

use crate::engine::AdapterId;
use crate::grammar::Constraint;

/// More choices than any client needs; each is a sequence of its own.
pub const MOST_CHOICES: u32 = 128;

/// Tokens with a bias, at most; as many as the OpenAI API takes.
pub const MOST_BIASES: usize = 300;

/// Stop ids, at most.
pub const MOST_STOP_IDS: usize = 128;

/// Runs of tokens that may not come, at most.
pub const MOST_BAD_WORDS: usize = 1000;

/// Tokens of all of them together: each may be compared with the answer's end before each token.
const MOST_BAD_TOKENS: usize = 1 << 14;

/// Alternatives shown beside each token, at most.
pub const MOST_LOGPROBS: u32 = 20;

/// What hides in a small temperature is greedy sampling with overflow; below this there is no difference to see.
const SMALLEST_TEMPERATURE: f32 = 0.01;

/// Bias of a token, clamped to this either way.
const LARGEST_BIAS: f32 = 100.0;

/// How tokens are chosen. The logits go through, in this order: log-probabilities taken as they are; what the request's grammar
/// allows; `allowed_ids` and `bad_words`; `min_tokens`;
/// `logit_bias`; repetition, frequency and presence penalty; temperature; `typical_p`; `min_p`; `top_k`; `top_p`.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits. 0 takes the likeliest token and ignores `top_p`, `top_k` and `min_p`.
    pub temperature: f32,
    /// Keeps the `k` likeliest; 0 keeps all. Of equals, the lower id is likelier.
    pub top_k: u32,
    /// Keeps the fewest likeliest tokens that have this probability together, in (0, 1].
    pub top_p: f32,
    /// Keeps tokens at least this fraction as likely as the likeliest, in [0, 1].
    pub min_p: f32,
    /// Divides positive logits and multiplies negative ones of tokens in prompt or output; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Subtracted from logits of tokens in the output, in [-2, 2].
    pub presence_penalty: f32,
    /// The same, times how often they occur there, in [-2, 2].
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens; clamped to [-100, 100].
    pub logit_bias: Vec<(u32, f32)>,
    /// Makes the request repeatable; without one, the engine draws one.
    pub seed: Option<u64>,
    /// Log-probability of each token and of so many likeliest.
    pub logprobs: Option<u32>,
    /// Tokens that end the answer, besides the model's own.
    pub stop_ids: Vec<u32>,
    /// Tokens after which the answer ends; without, what the context leaves.
    pub max_tokens: Option<usize>,
    /// Before so many tokens nothing that ends the answer is sampled.
    pub min_tokens: usize,
    /// Lets the answer go on past the model's own end of text.
    pub ignore_eos: bool,
    /// Keeps the most typical tokens that have this probability together, in (0, 1]; 1 keeps all.
    pub typical_p: f32,
    /// Only these tokens may come; empty for any.
    pub allowed_ids: Vec<u32>,
    /// Runs of tokens that may not come.
    pub bad_words: Vec<Vec<u32>>,
    /// Log-probability of each token of the prompt from [`scored_from`](Self::scored_from) on, and of so many likeliest in its place;
    /// for one choice only.
    pub prompt_logprobs: Option<u32>,
    /// The first token of the prompt that they are wanted of, from 1; those before it are computed in chunks, or shared with other
    /// prompts that begin alike.
    pub scored_from: usize,
}

impl Sampling {
    /// Added to the largest logit, the least that a token may have by `min_p`.
    pub fn reach(&self) -> f32 {
        if self.min_p > 0.0 { self.temperature * self.min_p.ln() } else { f32::NEG_INFINITY }
    }
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: None,
            logprobs: None,
            stop_ids: Vec::new(),
            max_tokens: None,
            min_tokens: 0,
            ignore_eos: false,
            typical_p: 1.0,
            allowed_ids: Vec::new(),
            bad_words: Vec::new(),
            prompt_logprobs: None,
            scored_from: 1,
        }
    }
}

/// One request: a prompt, and how often and how to continue it.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Ids of the prompt.
    pub prompt: Vec<u32>,
    /// Choices: answers that differ by their draws.
    pub n: u32,
    /// Lower goes first; of equals, the caller goes first that has asked for less.
    pub priority: i32,
    /// Whose it is; all of one caller go first come, first served.
    pub caller: u64,
    /// Cached prefixes are shared only between requests of equal salt.
    pub salt: Vec<u8>,
    /// How to sample.
    pub sampling: Sampling,
    /// What holds the answers; none if they are free.
    pub constraint: Option<Constraint>,
    /// The adapter under which it is computed; none for the model itself.
    pub adapter: Option<AdapterId>,
    /// Whether the vector of the prompt is wanted, and no answer.
    pub embed: bool,
}

impl Request {
    /// One answer to a prompt, sampled from the model's own distribution.
    pub fn new(prompt: Vec<u32>) -> Request {
        let (salt, sampling) = (Vec::new(), Sampling::default());
        let (constraint, adapter) = (None, None);
        Request { prompt, n: 1, priority: 0, caller: 0, salt, sampling, constraint, adapter, embed: false }
    }
}

/// What a request is held to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Ids there are.
    pub vocabulary: usize,
    /// Tokens of prompt and answer together, at most.
    pub context: usize,
}

/// A parameter that cannot be honoured, in one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{param}: {message}")]
pub struct RequestError {
    /// The parameter, as the OpenAI API names it.
    pub param: &'static str,
    /// What is wrong and what would be right.
    pub message: String,
}

/// Refuses what does not hold.
fn ensure(holds: bool, param: &'static str, message: impl FnOnce() -> String) -> Result<(), RequestError> {
    if holds { Ok(()) } else { Err(RequestError { param, message: message() }) }
}

/// Refuses a value that does not fit; NaN fits nowhere.
fn hold(param: &'static str, value: f32, fits: bool, range: &str) -> Result<(), RequestError> {
    ensure(fits, param, || format!("must be {range}, not {value}"))
}

fn hold_ids(
    param: &'static str,
    mut ids: impl Iterator<Item = u32>,
    vocabulary: usize,
) -> Result<(), RequestError> {
    let foreign = ids.find(|id| *id as usize >= vocabulary);
    let message =
        || format!("token {} is not among the model's {vocabulary} ids", foreign.unwrap_or_default());
    ensure(foreign.is_none(), param, message)
}

impl Sampling {
    /// Checks all but what depends on the prompt, and brings the values into the form the sampler expects.
    ///
    /// # Errors
    /// A value is out of its range, NaN or infinite.
    pub fn checked(mut self, vocabulary: usize) -> Result<Sampling, RequestError> {
        let s = &self;
        let finite = |v: f32| v.is_finite() && v.abs() <= 2.0;
        hold("temperature", s.temperature, (0.0..=100.0).contains(&s.temperature), "from 0 to 100")?;
        hold("top_p", s.top_p, s.top_p > 0.0 && s.top_p <= 1.0, "above 0 and at most 1")?;
        hold("typical_p", s.typical_p, s.typical_p > 0.0 && s.typical_p <= 1.0, "above 0 and at most 1")?;
        hold("min_p", s.min_p, (0.0..=1.0).contains(&s.min_p), "from 0 to 1")?;
        let r = s.repetition_penalty;
        hold("repetition_penalty", r, r > 0.0 && r.is_finite(), "positive and finite")?;
        hold("presence_penalty", s.presence_penalty, finite(s.presence_penalty), "from -2 to 2")?;
        hold("frequency_penalty", s.frequency_penalty, finite(s.frequency_penalty), "from -2 to 2")?;
        let runs = s.bad_words.len();
        ensure(runs <= MOST_BAD_WORDS, "bad_words", || {
            format!("has {runs} runs of tokens; give at most {MOST_BAD_WORDS}")
        })?;
        for (param, n, most) in [
            ("logit_bias", s.logit_bias.len(), MOST_BIASES),
            ("stop_token_ids", s.stop_ids.len(), MOST_STOP_IDS),
            ("bad_words", s.bad_words.iter().map(Vec::len).sum(), MOST_BAD_TOKENS),
            ("allowed_token_ids", s.allowed_ids.len(), vocabulary),
        ] {
            ensure(n <= most, param, || format!("has {n} tokens; give at most {most}"))?;
        }
        for (id, bias) in &s.logit_bias {
            ensure(bias.is_finite(), "logit_bias", || format!("of token {id} must be a number, not {bias}"))?;
        }
        hold_ids("logit_bias", s.logit_bias.iter().map(|b| b.0), vocabulary)?;
        hold_ids("stop_token_ids", s.stop_ids.iter().copied(), vocabulary)?;
        hold_ids("allowed_token_ids", s.allowed_ids.iter().copied(), vocabulary)?;
        hold_ids("bad_words", s.bad_words.iter().flatten().copied(), vocabulary)?;
        for (param, n) in [("top_logprobs", s.logprobs), ("prompt_logprobs", s.prompt_logprobs)] {
            let n = n.unwrap_or(0);
            ensure(n <= MOST_LOGPROBS, param, || format!("must be at most {MOST_LOGPROBS}, not {n}"))?;
        }
        ensure(s.max_tokens != Some(0), "max_tokens", || "must be at least 1, not 0".into())?;
        if self.temperature == 0.0 {
            (self.top_k, self.top_p, self.min_p, self.typical_p) = (0, 1.0, 0.0, 1.0);
        } else {
            self.temperature = self.temperature.max(SMALLEST_TEMPERATURE);
        }
        self.logit_bias.iter_mut().for_each(|(_, bias)| *bias = bias.clamp(-LARGEST_BIAS, LARGEST_BIAS));
        Ok(self)
    }
}

impl Request {
    /// Checks the whole; `sampling.max_tokens` is set afterwards.
    ///
    /// # Errors
    /// A value is out of its range, a token is none, or the prompt and what is asked for do not fit the context.
    pub fn checked(mut self, limits: Limits) -> Result<Request, RequestError> {
        let Limits { vocabulary, context } = limits;
        let length = self.prompt.len();
        ensure(length > 0, "prompt", || "is empty; it must have at least one token".into())?;
        ensure(length < context + usize::from(self.embed), "prompt", || {
            format!("has {length} tokens, the context {context}; shorten the prompt")
        })?;
        hold_ids("prompt", self.prompt.iter().copied(), vocabulary)?;
        if self.embed {
            let one = Request {
                priority: self.priority,
                caller: self.caller,
                adapter: self.adapter,
                embed: true,
                ..Request::new(self.prompt)
            };
            return Ok(one);
        }
        let n = self.n;
        ensure((1..=MOST_CHOICES).contains(&n), "n", || {
            format!("must be from 1 to {MOST_CHOICES}, not {n}")
        })?;
        self.sampling = self.sampling.checked(vocabulary)?;
        ensure(n == 1 || self.sampling.temperature != 0.0, "n", || {
            "must be 1 at temperature 0, where all choices would be the same".into()
        })?;
        ensure(n == 1 || self.sampling.prompt_logprobs.is_none(), "n", || {
            "must be 1 with log-probabilities of the prompt".into()
        })?;
        let room = context - length;
        let most = self.sampling.max_tokens.unwrap_or(room);
        ensure(most <= room, "max_tokens", || {
            format!(
                "{most} and the {length} tokens of the prompt exceed the context of {context}; at most {room}"
            )
        })?;
        let least = self.sampling.min_tokens;
        ensure(least <= most, "min_tokens", || {
            format!("{least} is more than the {most} tokens the answer may have")
        })?;
        self.sampling.max_tokens = Some(most);
        Ok(self)
    }
}
