//! The answers of one HTTP request: one for each prompt, as many choices as asked for each. In: answers as they come. Out: one
//! sequence of steps, whose choices are numbered over all prompts, and exactly one end. Dropping it cancels what is left. Whoever asked
//! pays for what was computed, however it ended.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use super::app::App;
use super::error::ApiError;
use super::keys::KeyHash;
use super::params::Params;
use super::traces::Trace;
use crate::answer::{Answer, Delta};
use crate::engine::{End, Usage};
use crate::request::Request;

/// What is new, or the end.
#[derive(Debug)]
pub enum Progress {
    /// Of some choices, in the order in which it came.
    Deltas(Vec<Delta>),
    /// Nothing comes after it.
    End(Result<Usage, ApiError>),
}

/// Answers that are read together.
#[derive(Debug)]
pub struct Batch {
    app: Arc<App>,
    n: u32,
    /// By prompt; none when it has ended.
    answers: Vec<Option<Answer>>,
    submitted: Instant,
    caller: Option<KeyHash>,
    /// When each choice was told of last.
    told: Vec<Option<Instant>>,
    usage: Usage,
    trace: Trace,
    over: bool,
}

impl Batch {
    /// Submits the requests of one set of parameters: all of them, or none.
    ///
    /// # Errors
    /// The engine does not take one of them.
    pub fn submit(
        app: &Arc<App>,
        requests: Vec<Request>,
        params: &Params,
        caller: Option<KeyHash>,
        trace: Trace,
    ) -> Result<Batch, ApiError> {
        app.check_ready()?;
        let &Params { n, ref skip, ref stop_strings, .. } = params;
        let told = vec![None; requests.len() * n as usize];
        let prompts = requests.iter().map(|request| request.prompt.len()).sum();
        let answer = |stream| Some(Answer::new(stream, &app.tokenizer, n, stop_strings, skip.clone()));
        let answers = app.engine.submit_all(requests)?.into_iter().map(answer).collect();
        app.limiter.use_tokens(caller, prompts);
        let (submitted, usage) = (Instant::now(), Usage::default());
        Ok(Batch { app: app.clone(), n, answers, submitted, caller, told, usage, trace, over: false })
    }

    /// What comes next; nothing after the end. May be dropped and called anew.
    pub async fn next(&mut self) -> Option<Progress> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// The same for whoever waits for something else too.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Progress>> {
        if self.over {
            return Poll::Ready(None);
        }
        let mut deltas = Vec::new();
        for i in 0..self.answers.len() {
            let Some(answer) = &mut self.answers[i] else { continue };
            let Poll::Ready(step) = answer.poll_next(cx) else { continue };
            let lost = || End::Failed("the engine has stopped".into());
            let (new, end) = step.map_or_else(|| (Vec::new(), Some(lost())), |s| (s.deltas, s.end));
            let offset = i as u32 * self.n;
            deltas.extend(new.into_iter().map(|d| Delta { index: d.index + offset, ..d }));
            if let Some(end) = end
                && let Err(why) = self.end(i, end)
            {
                self.over = true;
                self.trace.fails("server_error", &why.message);
                self.leave();
                return Poll::Ready(Some(Progress::End(Err(why))));
            }
        }
        if !deltas.is_empty() {
            self.app.metrics.deltas(&deltas, &mut self.told);
            deltas.iter().filter_map(|d| d.ended).for_each(|ended| self.trace.ends(ended.name()));
            return Poll::Ready(Some(Progress::Deltas(deltas)));
        }
        if self.answers.iter().all(Option::is_none) {
            self.over = true;
            return Poll::Ready(Some(Progress::End(Ok(self.usage))));
        }
        Poll::Pending
    }

    /// Tokens sampled so far, over all choices.
    pub fn sampled(&self) -> usize {
        self.usage.output + self.answers.iter().flatten().map(Answer::sampled).sum::<usize>()
    }

    /// Ends what is left.
    fn leave(&mut self) {
        let sampled = self.answers.iter().flatten().map(Answer::sampled).sum();
        self.app.limiter.use_tokens(self.caller, sampled);
        self.answers.clear();
    }

    fn end(&mut self, i: usize, end: End) -> Result<(), ApiError> {
        let Some(answer) = self.answers[i].take() else { return Ok(()) };
        self.app.limiter.use_tokens(self.caller, answer.sampled());
        let first = answer.first_token();
        match end {
            End::Finished(usage) => {
                self.app.metrics.finished(&usage, self.n, self.submitted, first);
                self.trace.uses(&usage);
                self.usage.prompt += usage.prompt;
                self.usage.cached += usage.cached;
                self.usage.output += usage.output;
                Ok(())
            }
            // Nobody but this could have cancelled it.
            End::Cancelled(_) => Err(ApiError::internal("the request was cancelled")),
            End::Refused(why) => Err(ApiError::body(why)),
            End::Failed(why) if !self.app.is_ready() => Err(ApiError::unavailable(why)),
            End::Failed(why) => Err(ApiError::internal(why)),
        }
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if !self.over {
            self.trace.fails("cancelled", "the client has left");
        }
        self.leave();
    }
}
