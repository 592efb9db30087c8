//! Stop strings. In: text of an answer, piece by piece, cut wherever tokens end. Out: the text that may be shown, and the stop
//! string that ended it. Only what could be the beginning of a stop string is held back, so a stream lags as little as it can, and
//! what comes out never depends on where the pieces were cut.

mod text;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

pub use text::TextStream;

/// Bytes of all stop strings of a request; far beyond any use, and a bound on the memory of one.
const LARGEST: usize = 1 << 16;

/// Why stop strings cannot be used; names the field.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StopError {
    /// An empty string would stop everything.
    #[error("stop[{0}]: is empty; give at least one character, or leave it out")]
    Empty(usize),
    /// Too much of them.
    #[error("stop: {0} bytes of stop strings are too many; give at most {LARGEST}")]
    TooLong(usize),
}

/// The stop strings of a request. A clone shares them.
///
/// The text ends with the stop string that is complete first; of several complete at the same character, with the longest.
#[derive(Clone, Debug)]
pub struct StopStrings {
    /// After Aho and Corasick, "Efficient string matching" (1975): a node is a beginning of some stop string.
    nodes: Arc<[Node]>,
    include: bool,
    /// Tokens of an answer whose text is not looked at.
    after: usize,
}

#[derive(Debug, Default)]
struct Node {
    /// Longer beginnings by one more byte.
    next: BTreeMap<u8, u32>,
    /// The longest proper suffix that is a beginning too.
    fail: u32,
    /// Length in bytes.
    depth: u32,
    /// The longest stop string that ends here: its place in the list and its length.
    hit: Option<(u32, u32)>,
}

/// What a piece of text, or the end of it, brings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    /// Text to show.
    pub text: String,
    /// The place in the list of the stop string that ended the text; nothing comes after it.
    pub stopped: Option<usize>,
}

impl StopStrings {
    /// Prepares stop strings; `include` shows the one that ends the text as part of it.
    ///
    /// # Errors
    /// One is empty, or they are too long.
    pub fn new<S: AsRef<str>>(stops: &[S], include: bool) -> Result<StopStrings, StopError> {
        let total = stops.iter().map(|s| s.as_ref().len()).fold(0, usize::saturating_add);
        if total > LARGEST {
            return Err(StopError::TooLong(total));
        }
        let mut nodes = vec![Node::default()];
        for (i, stop) in stops.iter().map(AsRef::as_ref).enumerate() {
            if stop.is_empty() {
                return Err(StopError::Empty(i));
            }
            let mut at = 0;
            for (depth, byte) in (1..).zip(stop.bytes()) {
                let fresh = nodes.len() as u32;
                let next = *nodes[at].next.entry(byte).or_insert(fresh);
                if next == fresh {
                    nodes.push(Node { depth, ..Node::default() });
                }
                at = next as usize;
            }
            nodes[at].hit.get_or_insert((i as u32, stop.len() as u32));
        }
        link(&mut nodes);
        Ok(StopStrings { nodes: nodes.into(), include, after: 0 })
    }

    /// The same, to be found in the text that comes after so many tokens of an answer.
    pub fn after(self, tokens: usize) -> StopStrings {
        StopStrings { after: tokens, ..self }
    }

    /// A matcher at the beginning of a text.
    pub fn matcher(&self) -> StopMatcher {
        StopMatcher { stops: self.clone(), state: 0, held: String::new(), stopped: None }
    }
}

/// The longest beginning that a text ends with: after `state` and one more byte.
fn step(nodes: &[Node], mut state: u32, byte: u8) -> u32 {
    loop {
        let node = &nodes[state as usize];
        match node.next.get(&byte) {
            Some(next) => return *next,
            None if state == 0 => return 0,
            None => state = node.fail,
        }
    }
}

/// Finds the suffixes, shorter beginnings first.
fn link(nodes: &mut [Node]) {
    let mut order = VecDeque::from([0]);
    while let Some(parent) = order.pop_front() {
        let fallback = nodes[parent as usize].fail;
        for (byte, node) in nodes[parent as usize].next.clone() {
            // A single byte has no suffix but the empty one.
            let fail = if parent == 0 { 0 } else { step(nodes, fallback, byte) };
            let inherited = nodes[fail as usize].hit;
            let linked = &mut nodes[node as usize];
            linked.fail = fail;
            linked.hit = linked.hit.or(inherited);
            order.push_back(node);
        }
    }
}

/// Finds stop strings in a text that comes in pieces.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: StopStrings,
    state: u32,
    /// Not shown yet: a beginning of a stop string.
    held: String,
    stopped: Option<usize>,
}

impl StopMatcher {
    /// Takes the next piece; gives what may be shown. After a stop nothing is taken.
    pub fn push(&mut self, piece: &str) -> Shown {
        if self.stopped.is_some() {
            return Shown { text: String::new(), stopped: self.stopped };
        }
        let before = self.held.len();
        self.held.push_str(piece);
        for (i, byte) in piece.bytes().enumerate() {
            self.state = step(&self.stops.nodes, self.state, byte);
            if let Some((stop, length)) = self.stops.nodes[self.state as usize].hit {
                let end = before + i + 1;
                self.held.truncate(if self.stops.include { end } else { end - length as usize });
                self.stopped = Some(stop as usize);
                return Shown { text: std::mem::take(&mut self.held), stopped: self.stopped };
            }
        }
        let keep = self.stops.nodes[self.state as usize].depth as usize;
        let rest = self.held.split_off(self.held.len() - keep);
        Shown { text: std::mem::replace(&mut self.held, rest), stopped: None }
    }

    /// Ends the text: what was held back is no stop string after all.
    pub fn finish(self) -> Shown {
        let text = if self.stopped.is_some() { String::new() } else { self.held };
        Shown { text, stopped: self.stopped }
    }

    /// The stop string that ended the text.
    pub fn stopped(&self) -> Option<usize> {
        self.stopped
    }
}

#[cfg(test)]
mod tests;
