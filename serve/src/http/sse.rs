//! An answer as server-sent events. In: the batch of its answers and the endpoint that writes its frames. Out: the body of the response:
//! frames, something whenever nothing came for a while, at last the endpoint's last frame or an error, exactly one of them.
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
use super::generate::{Endpoint, Head};

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

/// Frames that are to be sent.
#[derive(Debug, Default)]
pub struct Frames(Vec<u8>);

impl Frames {
    /// Adds a frame with data alone.
    pub fn data(&mut self, data: &Value) {
        self.raw("data: ");
        // Writing a value to memory does not fail.
        let _ = serde_json::to_writer(&mut self.0, data);
        self.raw("\n\n");
    }

    /// Adds a frame whose event is the type that its data has.
    pub fn event(&mut self, data: &Value) {
        self.raw("event: ");
        self.raw(data["type"].as_str().unwrap_or("message"));
        self.raw("\n");
        self.data(data);
    }

    /// Adds text as it is.
    pub fn raw(&mut self, text: &str) {
        self.0.extend_from_slice(text.as_bytes());
    }
}

impl<E: Endpoint> Events<E> {
    fn show(&mut self, progress: Option<Progress>, out: &mut Frames) {
        self.over = !matches!(progress, Some(Progress::Deltas(_)));
        match progress {
            Some(Progress::Deltas(deltas)) => {
                let sampled = self.batch.sampled();
                deltas.into_iter().for_each(|delta| self.endpoint.delta(&self.head, delta, sampled, out));
            }
            Some(Progress::End(Ok(used))) => self.endpoint.end(&self.head, &used, out),
            Some(Progress::End(Err(why))) => {
                self.endpoint.fail(&self.head, &why, out);
                let _ = self.head.incoming.failure.set(why.message);
            }
            None => {}
        }
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
        let mut out = Frames::default();
        if !this.begun {
            this.begun = true;
            this.endpoint.begin(&this.head, &mut out);
        }
        while !this.over {
            let progress = match this.first.take() {
                Some(first) => Some(first),
                None if !out.0.is_empty() => break,
                None => match this.batch.poll_next(cx) {
                    Poll::Ready(progress) => progress,
                    Poll::Pending if this.keep_alive.as_mut().poll(cx).is_ready() => {
                        out.0.extend_from_slice(E::PING);
                        break;
                    }
                    Poll::Pending => return Poll::Pending,
                },
            };
            this.show(progress, &mut out);
        }
        if out.0.is_empty() {
            return Poll::Ready(None);
        }
        this.keep_alive.as_mut().reset(Instant::now() + this.interval);
        Poll::Ready(Some(Ok(Frame::data(out.0.into()))))
    }
}
