//! Evaluation: what a model scores on tasks. In: files of JSON lines ([`Task`]), and somebody who computes log-likelihoods and
//! answers: the paged engine, or a model under training. Out: metrics with their standard errors, under the names of EleutherAI's
//! lm-evaluation-harness.
//!
//! Texts and choices are sums of log-probabilities, so that both become [`Scored`] sequences: tokens, and from which on they count.

mod during;
mod scored;
mod tally;
mod task;
#[cfg(test)]
mod tests;

pub use during::Loaded;
pub use scored::{Encoder, Scored};
pub use tally::{Metric, Outcome, Tally};
pub use task::{Answers, Line, Prompt, Question, Task, answer_tokens};
