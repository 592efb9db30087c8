//! Bodies of requests. In: frames from a connection. Out: a body that is whole, no larger than it may be, and for which there was room
//! beside the others.

use astrai_runtime::device::give_back;
use std::future::poll_fn;
use std::ops::Deref;
use std::pin::Pin;
use std::time::Duration;

use axum::body::Body;
use axum::http::StatusCode;
use http_body::Body as _;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

use super::app::App;
use super::error::ApiError;

/// The beginning of a body that is not counted among all bodies: ordinary requests are never refused for the large ones.
const FREE: usize = 64 << 10;

/// What is read of a body that is too large, to be dropped: as many bytes as bodies may have, so often, for so long.
const PASSED: usize = 4;
const PASSED_IN: Duration = Duration::from_secs(2);

/// Bodies whose memory is given back to the system.
const LARGE: usize = 1 << 20;

/// A body that has come whole, with its share of the room for bodies.
pub struct Received {
    bytes: Vec<u8>,
    /// Given back after the bytes are gone.
    room: Option<OwnedSemaphorePermit>,
}

impl Deref for Received {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        if self.bytes.len() > LARGE {
            drop(std::mem::take(&mut self.bytes));
            // The allocator would keep what a large body took for later ones.
            give_back();
        }
    }
}

/// Reads so many bytes more, and drops them.
async fn pass(body: &mut Body, most: usize) {
    let mut passed = 0;
    while passed < most
        && let Some(Ok(frame)) = poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await
    {
        passed += frame.data_ref().map_or(0, |data| data.len());
    }
}

/// A body, if it is not too large, comes in time, and there is room for it beside the others.
///
/// # Errors
/// It does not.
pub async fn receive(app: &App, mut body: Body) -> Result<Received, ApiError> {
    // There is never room for one that is larger than all bodies may be.
    let limit = app.settings.body_limit.min(app.settings.bodies_limit.saturating_add(FREE));
    let too_large = || {
        let message = format!("the body has more than the {limit} bytes that are allowed");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    };
    let mut got = Received { bytes: Vec::new(), room: None };
    let receive = async {
        while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
            let frame = frame.map_err(|_| ApiError::body("the body broke off"))?;
            let Ok(data) = frame.into_data() else { continue };
            if got.bytes.len() + data.len() > limit {
                // A client that is still sending when its connection is closed may never read why.
                let _ = timeout(PASSED_IN, pass(&mut body, limit.saturating_mul(PASSED))).await;
                return Err(too_large());
            }
            got.bytes.extend_from_slice(&data);
            if !app.grow_room(&mut got.room, got.bytes.len().saturating_sub(FREE)) {
                return Err(ApiError::unavailable("too many large bodies at a time; try again later"));
            }
        }
        Ok(())
    };
    let late = |_| ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body did not come in time");
    timeout(app.settings.body_timeout, receive).await.map_err(late)??;
    Ok(got)
}
