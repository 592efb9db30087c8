//! Conversations that later requests go on from. In: messages under the id of a response. Out: the same to whoever made them. They are in
//! memory. When there is no room left, the oldest of whoever keeps most are forgotten first: nobody loses what is kept by another's doing.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;

use super::super::keys::KeyHash;

/// Conversations, at most.
const MOST: usize = 4096;

/// Bytes of memory that all conversations take, about.
const LARGEST: usize = 64 << 20;

/// Bytes that each counts at least, which bounds their number too.
const LEAST: usize = LARGEST / MOST;

/// Bytes of a value, of an entry of an object without its value, and of what the allocator keeps of each text and table.
const VALUE: usize = size_of::<Value>();
const ENTRY: usize = size_of::<String>() + 2 * size_of::<usize>();
const ALLOCATED: usize = 2 * size_of::<usize>();

/// What is kept.
#[derive(Debug, Default)]
pub struct Kept(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    by_id: HashMap<String, One>,
    owners: HashMap<Option<KeyHash>, Share>,
    bytes: usize,
}

/// What one caller keeps.
#[derive(Debug, Default)]
struct Share {
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

/// Bytes of memory of a value, about.
fn size(value: &Value) -> usize {
    VALUE
        + match value {
            Value::Null | Value::Bool(_) | Value::Number(_) => 0,
            Value::String(text) => ALLOCATED + text.len(),
            Value::Array(items) => ALLOCATED + items.iter().map(size).sum::<usize>(),
            Value::Object(entries) => {
                let entry = |(key, value): (&String, &Value)| ENTRY + ALLOCATED + key.len() + size(value);
                2 * ALLOCATED + entries.iter().map(entry).sum::<usize>()
            }
        }
}

impl Kept {
    /// Keeps a conversation of whoever calls with this key.
    pub fn add(&self, id: String, owner: Option<KeyHash>, messages: Vec<Value>) {
        let bytes = messages.iter().map(size).sum::<usize>().max(LEAST);
        if bytes > LARGEST {
            return;
        }
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let share = inner.owners.entry(owner).or_default();
        share.bytes += bytes;
        share.order.push_back(id.clone());
        inner.bytes += bytes;
        inner.by_id.insert(id, One { owner, messages: Arc::new(messages), bytes });
        while inner.bytes > LARGEST && inner.forget() {}
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

impl Inner {
    /// Forgets the oldest conversation of whoever keeps most; false if there is none.
    fn forget(&mut self) -> bool {
        let most = self.owners.iter_mut().max_by_key(|(_, share)| share.bytes);
        let Some((owner, share)) = most.map(|(owner, share)| (*owner, share)) else { return false };
        let oldest = share.order.pop_front().and_then(|id| self.by_id.remove(&id));
        let bytes = oldest.map_or(share.bytes, |one| one.bytes);
        share.bytes -= bytes;
        self.bytes -= bytes;
        if share.order.is_empty() {
            self.owners.remove(&owner);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn nobody_is_forgotten_by_anothers_doing_and_memory_is_counted() {
        let (kept, [mine, theirs]) = (Kept::default(), [Some([1; 32]), Some([2; 32])]);
        let message = json!({"role": "user", "content": ""});
        kept.add("mine".into(), mine, vec![message.clone()]);
        // As text they are a fourteenth of the bytes.
        let many = vec![message.clone(); 10_000];
        (0..100).for_each(|i| kept.add(format!("large{i}"), theirs, many.clone()));
        let state = || {
            let inner = kept.0.lock().unwrap();
            (inner.by_id.len(), inner.bytes)
        };
        assert!(state().0 < 64 && state().1 <= LARGEST, "{:?}", state());
        (0..2 * MOST).for_each(|i| kept.add(format!("small{i}"), theirs, vec![message.clone()]));
        assert_eq!(state(), (MOST, LARGEST));
        assert!(kept.get("mine", mine).is_some() && kept.get("mine", theirs).is_none());
        assert!(kept.get("small0", theirs).is_none() && kept.get("small8191", theirs).is_some());
        kept.add("whole".into(), mine, vec![json!("x".repeat(LARGEST))]);
        assert!(kept.get("whole", mine).is_none() && kept.get("mine", mine).is_some());
    }
}
