//! An answer as server-sent events. In: the batch of its answers and the form its chunks have. Out: the body of the response:
//! frames `data: {…}`, a comment whenever nothing came for a while, at last `data: [DONE]` or an error, exactly one of them.
//! When the client leaves, hyper drops the body, and with it the batch.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http_body::Frame;
use serde_json::Value;
use tokio::time::{Instant, Sleep, sleep_until};

use super::batch::{Batch, Progress};
use super::error::ApiError;
use crate::answer::Delta;
use crate::engine::Usage;

/// How the chunks of an answer look.
pub trait Form: Send + Unpin + 'static {
    /// What the stream begins with.
    fn begin(&mut self) -> Vec<Value>;
    /// What is new of a choice; `sampled` tokens came so far.
    fn delta(&mut self, delta: Delta, sampled: usize) -> Vec<Value>;
    /// The usage, if it was asked for.
    fn usage(&mut self, usage: &Usage) -> Option<Value>;
}

struct Events<F> {
    batch: Batch,
    form: F,
    /// Came before the stream was begun.
    first: Option<Progress>,
    begun: bool,
    over: bool,
    silence: Pin<Box<Sleep>>,
    patience: Duration,
}

/// Begins a stream with the first that comes of the answer, so that what fails at once has its own status; or without it, if
/// that takes long.
///
/// # Errors
/// The answer failed before it began.
pub async fn respond(mut batch: Batch, form: impl Form, patience: Duration) -> Result<Response, ApiError> {
    let first = tokio::time::timeout(patience, batch.next()).await.ok().flatten();
    if let Some(Progress::End(Err(why))) = first {
        return Err(why);
    }
    let silence = Box::pin(sleep_until(Instant::now() + patience));
    let events = Box::pin(Events { batch, form, first, begun: false, over: false, silence, patience });
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (header::HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    Ok((headers, Body::new(events)).into_response())
}

fn write(out: &mut Vec<u8>, chunk: &Value) {
    out.extend_from_slice(b"data: ");
    // Writing a value to memory does not fail.
    let _ = serde_json::to_writer(&mut *out, chunk);
    out.extend_from_slice(b"\n\n");
}

impl<F: Form> Events<F> {
    fn show(&mut self, progress: Option<Progress>) -> Vec<u8> {
        let mut out = Vec::new();
        match progress {
            Some(Progress::Deltas(deltas)) => {
                let sampled = self.batch.sampled();
                let chunks = deltas.into_iter().flat_map(|delta| self.form.delta(delta, sampled));
                chunks.for_each(|chunk| write(&mut out, &chunk));
            }
            Some(Progress::End(Ok(usage))) => {
                self.over = true;
                self.form.usage(&usage).iter().for_each(|chunk| write(&mut out, chunk));
                out.extend_from_slice(b"data: [DONE]\n\n");
            }
            Some(Progress::End(Err(why))) => {
                self.over = true;
                write(&mut out, &why.json());
            }
            None => self.over = true,
        }
        out
    }
}

impl<F: Form> http_body::Body for Events<F> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        let mut out = Vec::new();
        if !this.begun {
            this.begun = true;
            this.form.begin().iter().for_each(|chunk| write(&mut out, chunk));
        }
        while !this.over {
            let progress = match this.first.take() {
                Some(first) => Some(first),
                None if !out.is_empty() => break,
                None => match this.batch.poll_next(cx) {
                    Poll::Ready(progress) => progress,
                    Poll::Pending if this.silence.as_mut().poll(cx).is_ready() => {
                        out.extend_from_slice(b": ping\n\n");
                        break;
                    }
                    Poll::Pending => return Poll::Pending,
                },
            };
            out.append(&mut this.show(progress));
        }
        if out.is_empty() {
            return Poll::Ready(None);
        }
        this.silence.as_mut().reset(Instant::now() + this.patience);
        Poll::Ready(Some(Ok(Frame::data(out.into()))))
    }
}
