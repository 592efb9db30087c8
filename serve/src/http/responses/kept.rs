//! Conversations that later requests go on from. In: messages under the id of a response. Out: the same to whoever made them. They are in
//! memory, the oldest are forgotten first.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;

use super::super::keys::KeyHash;

/// Conversations, at most.
const MOST: usize = 4096;

/// Bytes of all conversations, about.
const LARGEST: usize = 64 << 20;

/// What is kept.
#[derive(Debug, Default)]
pub struct Kept(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    by_id: HashMap<String, One>,
    /// Ids, the oldest first.
    order: VecDeque<String>,
    bytes: usize,
}

#[derive(Debug)]
struct One {
    owner: Option<KeyHash>,
    messages: Arc<Vec<Value>>,
    bytes: usize,
}

impl Kept {
    /// Keeps a conversation of whoever calls with this key.
    pub fn add(&self, id: String, owner: Option<KeyHash>, messages: Vec<Value>) {
        let bytes = messages.iter().map(|message| message.to_string().len()).sum();
        if bytes > LARGEST {
            return;
        }
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        inner.bytes += bytes;
        inner.order.push_back(id.clone());
        inner.by_id.insert(id, One { owner, messages: Arc::new(messages), bytes });
        while inner.order.len() > MOST || inner.bytes > LARGEST {
            let oldest = inner.order.pop_front().and_then(|id| inner.by_id.remove(&id));
            inner.bytes -= oldest.map_or(inner.bytes, |one| one.bytes);
        }
    }

    /// A conversation, if it is the caller's.
    pub fn get(&self, id: &str, owner: Option<KeyHash>) -> Option<Vec<Value>> {
        let inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let one = inner.by_id.get(id).filter(|one| one.owner == owner)?;
        let messages = one.messages.clone();
        drop(inner);
        Some(messages.to_vec())
    }
}
