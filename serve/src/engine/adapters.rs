//! Adapters in an engine. In: factors for a slot. Out: whether a slot holds what a request wants. A slot is written between steps, when no
//! request uses it any more.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use tokio::sync::oneshot;

use super::Model;

/// An adapter that was loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterId {
    /// Where it lies.
    pub slot: u32,
    /// Its number, which no other has.
    pub number: u64,
}

/// A part of a state that is a slot's.
#[derive(Clone)]
pub struct Factor {
    /// The state's name.
    pub state: String,
    /// The part, in the state's type.
    pub bytes: Vec<u8>,
}

/// All that a slot holds for one adapter.
#[derive(Clone)]
pub struct Patch {
    /// Of every state one.
    pub factors: Vec<Factor>,
}

impl fmt::Debug for Patch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Patch of {} factors", self.factors.len())
    }
}

/// Tells that an adapter is there, or why not.
pub(super) type Written = oneshot::Sender<Result<(), String>>;

/// What the slots hold, and what is to be written.
#[derive(Debug, Default)]
pub(super) struct Adapters {
    held: BTreeMap<u32, u64>,
    pending: Vec<(AdapterId, Arc<Patch>, Written)>,
}

impl Adapters {
    /// Notes what is to be written.
    pub fn add(&mut self, adapter: AdapterId, patch: Arc<Patch>, written: Written) {
        self.pending.push((adapter, patch, written));
    }

    /// Whether something is to be written.
    pub fn wait(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Whether an adapter is in its slot.
    pub fn holds(&self, adapter: AdapterId) -> bool {
        self.held.get(&adapter.slot) == Some(&adapter.number)
    }

    /// Writes what waits for no request.
    pub fn write(&mut self, model: &mut impl Model, in_use: impl Fn(u32) -> bool) {
        for (adapter, patch, written) in std::mem::take(&mut self.pending) {
            if in_use(adapter.slot) {
                self.pending.push((adapter, patch, written));
                continue;
            }
            self.held.remove(&adapter.slot);
            let done = model.adapt(adapter.slot as usize, &patch).map_err(|e| e.to_string());
            if done.is_ok() {
                self.held.insert(adapter.slot, adapter.number);
            }
            // Nobody may wait for it any more.
            let _ = written.send(done);
        }
    }
}
