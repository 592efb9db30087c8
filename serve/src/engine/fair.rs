//! Whose turn it is. In: requests of callers, as they come. Out: a tag for each; the lowest goes first. Every caller has a time of its own that runs by
//! what it asks for, so that whoever asks for much waits behind whoever asks for little, and nobody gains by asking for nothing for a while
//! (start-time fair queueing, Goyal et al., 1996). With one caller tags only rise: first come, first served.

use std::collections::HashMap;

use crate::request::Request;

/// Callers that are remembered beyond those that wait.
const MOST: usize = 1024;

/// Tokens of an answer that are taken for granted, whatever it may have at most: few are as long as they may be.
const USUAL: u64 = 256;

/// The times of callers.
#[derive(Debug, Default)]
pub(super) struct Fair {
    /// The tag of the last request that began to run.
    now: u64,
    /// Where each caller's next request would begin.
    next: HashMap<u64, u64>,
}

impl Fair {
    /// The tag of a request that arrives.
    pub fn arrive(&mut self, request: &Request) -> u64 {
        if self.next.len() > MOST {
            let now = self.now;
            self.next.retain(|_, next| *next > now);
        }
        let answer = request.sampling.max_tokens.map_or(USUAL, |most| USUAL.min(most as u64));
        let cost = u64::from(request.n).saturating_mul(request.prompt.len() as u64 + answer);
        let next = self.next.entry(request.caller).or_default();
        let tag = self.now.max(*next);
        *next = tag.saturating_add(cost);
        tag
    }

    /// A request begins to run.
    pub fn run(&mut self, tag: u64) {
        self.now = self.now.max(tag);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_asks_for_little_goes_before_whoever_asks_for_much() {
        let of = |caller| Request { caller, ..Request::new(vec![1; 100]) };
        let mut fair = Fair::default();
        let many: Vec<u64> = (0..5).map(|_| fair.arrive(&of(1))).collect();
        assert!(many.is_sorted_by(|a, b| a < b));
        fair.run(many[1]);
        let other = fair.arrive(&of(2));
        assert!(many[1] <= other && other < many[2]);
        // Having asked for nothing is no credit.
        fair.run(many[4]);
        assert!(fair.arrive(&of(3)) >= many[4]);
    }
}
