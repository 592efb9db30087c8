//! How much each caller may ask for: requests and tokens a minute, by key. In: requests as they come, tokens as they are used. Out: whether the
//! caller may go on, or when. A caller may use at once what a minute allows, which then grows back.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use axum::http::StatusCode;

use super::error::ApiError;
use super::keys::KeyHash;

/// Callers that are remembered; whoever has used nothing for a minute is not.
const MOST: usize = 1 << 16;

/// What a caller may use in a minute; none for any number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// Requests that generate or count.
    pub requests: Option<u32>,
    /// Tokens of prompts and answers.
    pub tokens: Option<u32>,
}

/// What callers have left.
#[derive(Debug)]
pub struct Limiter {
    rates: Rates,
    left: Mutex<HashMap<Option<KeyHash>, Left>>,
}

#[derive(Clone, Copy, Debug)]
struct Left {
    requests: f64,
    /// Below nothing where an answer was longer than what was left.
    tokens: f64,
    at: Instant,
}

/// Seconds until one is there.
fn wait(left: f64, each: Option<u32>) -> Option<f64> {
    let rate = f64::from(each?) / 60.0;
    (left < 1.0).then(|| (1.0 - left) / rate)
}

impl Limiter {
    pub fn new(rates: Rates) -> Limiter {
        Limiter { rates, left: Mutex::default() }
    }

    fn with<T>(&self, caller: Option<KeyHash>, then: impl FnOnce(&mut Left) -> T) -> T {
        let [requests, tokens] = [self.rates.requests, self.rates.tokens].map(|n| f64::from(n.unwrap_or(0)));
        let mut all = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if all.len() >= MOST {
            all.retain(|_, left| now.duration_since(left.at).as_secs() < 60);
        }
        let left = all.entry(caller).or_insert(Left { requests, tokens, at: now });
        let minutes = now.duration_since(left.at).as_secs_f64() / 60.0;
        left.requests = (left.requests + requests * minutes).min(requests);
        left.tokens = (left.tokens + tokens * minutes).min(tokens);
        left.at = now;
        then(left)
    }

    /// Counts a request.
    ///
    /// # Errors
    /// The caller has used what there is: 429, and when to try again.
    pub fn enter(&self, caller: Option<KeyHash>) -> Result<(), ApiError> {
        if self.rates == Rates::default() {
            return Ok(());
        }
        self.with(caller, |left| {
            let waits = [wait(left.requests, self.rates.requests), wait(left.tokens, self.rates.tokens)];
            let Some(seconds) = waits.into_iter().flatten().reduce(f64::max) else {
                left.requests -= 1.0;
                return Ok(());
            };
            let message = "this key has used what it may use in a minute; try again later";
            let retry_after = Some(seconds.ceil().clamp(1.0, 60.0) as u16);
            Err(ApiError { retry_after, ..ApiError::new(StatusCode::TOO_MANY_REQUESTS, message) })
        })
    }

    /// Counts tokens that were used.
    pub fn use_tokens(&self, caller: Option<KeyHash>, tokens: usize) {
        if self.rates.tokens.is_some() {
            self.with(caller, |left| left.tokens -= tokens as f64);
        }
    }
}
