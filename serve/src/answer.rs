//! What clients see of an answer. In: the engine's events for one request. Out: for each choice the text that may be shown,
//! the tokens that made it, and why it ended; at last the usage or the failure, exactly once. The server's endpoints and
//! the command line read the same steps, so that they show the same.
//!
//! Text is held back while it may be half a character or the beginning of a stop string, and the tokens with it. The text of
//! a token that ends the answer (an eos, a stop id) is never shown; the token itself is among the tokens, so that counting
//! them gives the usage. What the engine samples between a stop string and the news of it counts nowhere.

#[cfg(test)]
mod tests;

use std::future::poll_fn;
use std::pin::pin;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use crate::engine::{End, Event, Finish, Stream, Update, Usage};
use crate::sample::Logprobs;
use crate::stop::{StopStrings, TextStream};
use crate::tokenizer::{Skip, Tokenizer, TokenizerError};

/// Why a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The model's own end of text.
    Eos,
    /// One of the request's stop ids.
    StopId(u32),
    /// A stop string, by its place in the request's list.
    StopString(usize),
    /// What the request asked for is complete.
    Complete,
    /// `max_tokens`, or the context, is used up.
    Length,
}

impl Ended {
    /// The `finish_reason` of OpenAI's API.
    pub fn name(self) -> &'static str {
        if self == Ended::Length { "length" } else { "stop" }
    }
}

/// A token of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// As asked for.
    pub logprobs: Option<Logprobs>,
}

/// What is new of one choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// The choice, from 0.
    pub index: u32,
    /// Text to show after what was shown; whole characters.
    pub text: String,
    /// Tokens since the last delta, the one that ends the choice among them.
    pub tokens: Vec<Token>,
    /// Set in the choice's last delta.
    pub ended: Option<Ended>,
    /// Of the prompt's tokens but the first, if asked for; in the answer's first delta.
    pub prompt: Vec<Logprobs>,
}

impl Delta {
    /// Adds what comes after it.
    pub fn append(&mut self, next: Delta) {
        self.index = next.index;
        self.text.push_str(&next.text);
        self.tokens.extend(next.tokens);
        self.ended = next.ended;
        self.prompt.extend(next.prompt);
    }
}

/// What is new of an answer: something of a choice, or the end, or both.
#[derive(Clone, Debug, PartialEq)]
pub struct Chunk {
    /// At most one of each choice.
    pub deltas: Vec<Delta>,
    /// Set in the last chunk, and only there. Its usage counts the tokens of all deltas.
    pub end: Option<End>,
}

/// An answer as it comes. Dropping it cancels the request.
#[derive(Debug)]
pub struct Answer {
    stream: Stream,
    choices: Vec<Choice>,
    first: Option<Instant>,
    sampled: usize,
    over: bool,
    /// Of the prompt's tokens, until a delta has them.
    prompt: Vec<Logprobs>,
}

#[derive(Debug)]
struct Choice {
    /// Gone when the choice has ended.
    text: Option<TextStream>,
    /// Whose text is held back.
    pending: Vec<Token>,
}

impl Answer {
    /// Reads the stream of a request of `n` choices. Special tokens are left out of the text as `skip` says.
    pub fn new(
        stream: Stream,
        tokenizer: &Tokenizer,
        n: u32,
        stops: &StopStrings,
        skip: impl Into<Skip>,
    ) -> Answer {
        let skip = skip.into();
        let begin =
            || Choice { text: Some(TextStream::new(tokenizer, skip.clone(), stops)), pending: vec![] };
        let choices = (0..n).map(|_| begin()).collect();
        Answer { stream, choices, first: None, sampled: 0, over: false, prompt: Vec::new() }
    }

    /// The next chunk; nothing after the last. May be dropped and called anew.
    pub async fn next(&mut self) -> Option<Chunk> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// The same for whoever waits for several answers at once.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Chunk>> {
        while !self.over {
            let event = ready!(pin!(self.stream.recv()).poll(cx));
            if let Some(chunk) = self.take(event) {
                return Poll::Ready(Some(chunk));
            }
        }
        Poll::Ready(None)
    }

    /// The same for a thread that may wait. Panics within an asynchronous runtime.
    pub fn blocking_next(&mut self) -> Option<Chunk> {
        while !self.over {
            let event = self.stream.blocking_recv();
            if let Some(chunk) = self.take(event) {
                return Some(chunk);
            }
        }
        None
    }

    /// Ends the answer; its last chunk comes soon.
    pub fn cancel(&self) {
        self.stream.cancel();
    }

    /// When the first token came.
    pub fn first_token(&self) -> Option<Instant> {
        self.first
    }

    /// Tokens so far, over all choices.
    pub fn sampled(&self) -> usize {
        self.sampled
    }

    /// What an event shows, if anything.
    fn take(&mut self, event: Option<Event>) -> Option<Chunk> {
        let lost = || Event {
            updates: vec![],
            vector: None,
            end: Some(End::Failed("the engine has stopped".into())),
        };
        let Event { updates, end, vector: _ } = event.unwrap_or_else(lost);
        let mut chunk = Chunk { deltas: Vec::new(), end: None };
        for update in updates {
            match self.update(update) {
                Ok(delta) => chunk.deltas.extend(delta),
                Err(e) => {
                    self.over = true;
                    self.stream.cancel();
                    chunk.end = Some(End::Failed(e.to_string()));
                    return Some(chunk);
                }
            }
        }
        self.over = end.is_some();
        let count = |usage: Usage| Usage { output: self.sampled, ..usage };
        chunk.end = end.map(|end| match end {
            End::Finished(usage) => End::Finished(count(usage)),
            End::Cancelled(usage) => End::Cancelled(count(usage)),
            refused_or_failed => refused_or_failed,
        });
        (!chunk.deltas.is_empty() || self.over).then_some(chunk)
    }

    fn update(&mut self, update: Update) -> Result<Option<Delta>, TokenizerError> {
        let Update { index, token, logprobs, finish, prompt } = update;
        self.prompt.extend(prompt);
        let Some(choice) = self.choices.get_mut(index as usize) else { return Ok(None) };
        let Some(text) = choice.text.as_mut() else { return Ok(None) };
        self.first.get_or_insert_with(Instant::now);
        self.sampled += 1;
        choice.pending.push(Token { id: token, logprobs });
        let mut ended = match finish {
            Some(Finish::Eos) => Some(Ended::Eos),
            Some(Finish::StopId(id)) => Some(Ended::StopId(id)),
            Some(Finish::Complete) => Some(Ended::Complete),
            Some(Finish::Length) => Some(Ended::Length),
            None => None,
        };
        let mut shown = String::new();
        let mut stopped = None;
        if matches!(ended, None | Some(Ended::Length | Ended::Complete)) {
            let piece = text.push(token)?;
            (shown, stopped) = (piece.text, piece.stopped);
        }
        if ended.is_some()
            && stopped.is_none()
            && let Some(text) = choice.text.take()
        {
            let rest = text.finish()?;
            shown.push_str(&rest.text);
            stopped = rest.stopped;
        }
        if let Some(place) = stopped {
            if ended.is_none() {
                self.stream.stop(index);
            }
            ended = Some(Ended::StopString(place));
            choice.text = None;
        }
        if shown.is_empty() && ended.is_none() {
            return Ok(None);
        }
        let (tokens, prompt) = (std::mem::take(&mut choice.pending), std::mem::take(&mut self.prompt));
        Ok(Some(Delta { index, text: shown, tokens, ended, prompt }))
    }
}
