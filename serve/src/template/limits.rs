//! What a template may spend. A template comes with a model, so from anywhere: it may loop for ever, write without end, nest
//! values until the stack is gone. Instructions are counted by the engine (its fuel); what is counted here is text, and the
//! stack is one of our own, so that no template can take the process with it.

use minijinja::value::{Object, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of text that one rendering may make, drafts in variables included.
pub(super) const TEXT: usize = 1 << 26;

/// Instructions for any conversation, and for each message and tool more.
const FUEL: u64 = 1_000_000;
const FUEL_EACH: u64 = 5_000;

/// Conversations longer than this pay with the same fuel.
const COUNTED: usize = 10_000;

/// Stack of a rendering: values may be nested as deep as there is fuel to nest them, and they are dropped recursively.
/// The pages are taken when they are touched.
pub(super) const STACK: usize = 1 << 30;

/// Instructions that a conversation of so many messages and tools may take.
pub(super) fn fuel(items: usize) -> u64 {
    FUEL + FUEL_EACH * items.min(COUNTED) as u64
}

/// Text made so far.
#[derive(Debug, Default)]
struct Spent(AtomicUsize);

impl Object for Spent {}

const KEY: &str = "astrai.text";

/// Counts text that a template has made.
pub(super) fn spend(state: &mut State, bytes: usize) -> Result<(), Error> {
    let spent = match state.get_temp(KEY) {
        Some(value) => value,
        None => {
            let fresh = Value::from_object(Spent::default());
            state.set_temp(KEY, fresh.clone());
            fresh
        }
    };
    let before = spent.downcast_object_ref::<Spent>().map_or(0, |s| s.0.fetch_add(bytes, Ordering::Relaxed));
    if before.saturating_add(bytes) > TEXT { Err(exceeded()) } else { Ok(()) }
}

/// Bytes that a value of a list may take.
const ITEM: usize = 24;

/// Factors up to this are free.
const FACTOR: i64 = 16;

/// Counts an operand of `~` and `+`: all but the last operand are counted, so no value can grow by more than the limit.
pub(super) fn count_operand(state: &mut State, value: &Value) -> Result<Value, Error> {
    let bytes = match value.as_str() {
        Some(text) => text.len(),
        None if value.kind() == ValueKind::Number => 0,
        None => value.len().unwrap_or(0).saturating_mul(ITEM),
    };
    spend(state, bytes)?;
    Ok(value.clone())
}

/// Counts an operand of `*`: what is long or large could be repeated into something longer.
pub(super) fn count_factor(state: &mut State, value: &Value) -> Result<Value, Error> {
    match i64::try_from(value.clone()) {
        Ok(factor) if factor > FACTOR => {
            let factor = usize::try_from(factor).unwrap_or(usize::MAX);
            count(state, value, factor.saturating_mul(factor))
        }
        _ => count_operand(state, value),
    }
}

/// Counts a step whose outcome cannot be told from its operand.
pub(super) fn count(state: &mut State, value: &Value, bytes: usize) -> Result<Value, Error> {
    spend(state, bytes)?;
    Ok(value.clone())
}

/// The error of a template that writes without end.
pub(super) fn exceeded() -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("the template makes more than {TEXT} bytes of text"))
}

/// Whatever is printed goes through here, into the answer or into a variable.
pub(super) fn count_output(env: &mut Environment<'static>) {
    env.set_formatter(|out: &mut Output, state: &mut State, value: &Value| {
        let text = super::python::printed(value);
        spend(state, text.len())?;
        out.write_str(&text).map_err(Error::from)
    });
}
