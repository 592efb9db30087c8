//! What a template may spend. A template comes with a model, so from anywhere: it may loop for ever, write without end, nest
//! values until the stack is gone. Steps are counted by the engine (its fuel) and the prompt is bounded here; time, memory and
//! stack are the limits of the process that renders ([`worker`](super::worker)).

use minijinja::{Error, ErrorKind};
use std::time::Duration;

/// Bytes of a prompt, and of a text that a filter makes.
pub(super) const TEXT: usize = 1 << 26;

/// Time for a rendering, which ordinarily takes a millisecond.
pub(super) const TIME: Duration = Duration::from_secs(5);

/// Address space of a process that renders, bytes.
pub(super) const MEMORY: u64 = 1 << 30;

/// Stack of a rendering. Values may be nested as deep as there is fuel to nest them, and they are dropped recursively.
/// The pages are taken when they are touched.
pub(super) const STACK: usize = 1 << 28;

/// Instructions for any conversation, and for each message and tool more.
const FUEL: u64 = 1_000_000;
const FUEL_EACH: u64 = 5_000;

/// Conversations longer than this pay with the same fuel.
const COUNTED: usize = 10_000;

/// Instructions that a conversation of so many messages and tools may take.
pub(super) fn fuel(items: usize) -> u64 {
    FUEL + FUEL_EACH * items.min(COUNTED) as u64
}

/// The error of a template that writes without end.
pub(super) fn exceeded() -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("the template makes more than {TEXT} bytes of text"))
}
