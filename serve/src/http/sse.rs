//! An answer as server-sent events. In: the batch of its answers and the endpoint that writes its chunks. Out: the body of the response:
//! frames `data: {…}`, a comment whenever nothing came for a while, at last `data: [DONE]` or an error, exactly one of them.
//! When the client leaves, hyper drops the body, and with it the batch.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http_body::Frame;
use serde_json::Value;
use tokio::time::{Instant, Sleep, sleep_until};

use super::batch::{Batch, Progress};
use super::error::ApiError;
use super::generate::{self, Endpoint, Head};

struct Events<E> {
    batch: Batch,
    endpoint: E,
    head: Head,
    /// Came before the stream was begun.
    first: Option<Progress>,
    begun: bool,
    over: bool,
    keep_alive: Pin<Box<Sleep>>,
    interval: Duration,
}

/// Begins a stream with the first that comes of the answer, so that what fails at once has its own status; or without it, if
/// that takes long.
///
/// # Errors
/// The answer failed before it began.
pub async fn respond(mut batch: Batch, endpoint: impl Endpoint, head: Head) -> Result<Response, ApiError> {
    let interval = head.app.settings.keep_alive;
    let first = tokio::time::timeout(interval, batch.next()).await.ok().flatten();
    if let Some(Progress::End(Err(why))) = first {
        return Err(why);
    }
    let keep_alive = Box::pin(sleep_until(Instant::now() + interval));
    let events =
        Box::pin(Events { batch, endpoint, head, first, begun: false, over: false, keep_alive, interval });
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-cache"),
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    Ok((headers, Body::new(events)).into_response())
}

fn write(out: &mut Vec<u8>, chunk: &Value) {
    out.extend_from_slice(b"data: ");
    // Writing a value to memory does not fail.
    let _ = serde_json::to_writer(&mut *out, chunk);
    out.extend_from_slice(b"\n\n");
}

impl<E: Endpoint> Events<E> {
    fn write(&self, out: &mut Vec<u8>, choices: Vec<Value>, sampled: usize) {
        choices.into_iter().for_each(|choice| write(out, &self.head.chunk(E::CHUNK, choice, sampled)));
    }

    fn show(&mut self, progress: Option<Progress>) -> Vec<u8> {
        let mut out = Vec::new();
        match progress {
            Some(Progress::Deltas(deltas)) => {
                let sampled = self.batch.sampled();
                for delta in deltas {
                    let choices = self.endpoint.delta(&self.head, delta);
                    self.write(&mut out, choices, sampled);
                }
            }
            Some(Progress::End(Ok(usage))) => {
                self.over = true;
                if self.head.params.stream.is_some_and(|options| options.usage) {
                    let mut chunk = self.head.object(E::CHUNK, Vec::new());
                    chunk["usage"] = generate::usage(&usage);
                    write(&mut out, &chunk);
                }
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

impl<E: Endpoint> http_body::Body for Events<E> {
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
            let choices = this.endpoint.begin(&this.head);
            this.write(&mut out, choices, 0);
        }
        while !this.over {
            let progress = match this.first.take() {
                Some(first) => Some(first),
                None if !out.is_empty() => break,
                None => match this.batch.poll_next(cx) {
                    Poll::Ready(progress) => progress,
                    Poll::Pending if this.keep_alive.as_mut().poll(cx).is_ready() => {
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
        this.keep_alive.as_mut().reset(Instant::now() + this.interval);
        Poll::Ready(Some(Ok(Frame::data(out.into()))))
    }
}
