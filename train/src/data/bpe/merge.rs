//! The merging itself. In: words with their counts. Out: tokens as bytes, and pairs in the order in which they were merged.
//! Pairs wait in a heap by frequency; an entry that is out of date is put back when it comes up, and a merge touches only the
//! words that hold the pair.

use super::super::Progress;
use super::BpeOptions;
use super::file::byte_to_char;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};

/// Bytes of the longest token.
const LONGEST: usize = 128;

type Pair = (u32, u32);

#[derive(Default)]
struct Occurrences {
    count: u64,
    /// Words in which the pair occurs or occurred.
    words: Vec<u32>,
}

struct Word {
    tokens: Vec<u32>,
    count: u64,
}

/// What merging gives.
pub(super) struct Merged {
    /// Bytes of each token after the special ones.
    pub tokens: Vec<Vec<u8>>,
    /// Ids of the pairs, the first merged first.
    pub merges: Vec<Pair>,
}

pub(super) struct Merger<'a> {
    options: &'a BpeOptions,
    /// Id of the first token that is not special.
    first: u32,
    words: Vec<Word>,
    pairs: HashMap<Pair, Occurrences>,
    heap: BinaryHeap<(u64, Reverse<Pair>)>,
    /// Id of each token by its bytes.
    ids: HashMap<Vec<u8>, u32>,
    merged: Merged,
}

impl<'a> Merger<'a> {
    pub fn new(words: &[(&[u8], u64)], options: &'a BpeOptions) -> Merger<'a> {
        let first = options.all_special().count() as u32;
        let mut bytes: Vec<u8> = (0..=255).collect();
        bytes.sort_unstable_by_key(|&byte| byte_to_char(byte));
        let tokens: Vec<Vec<u8>> = bytes.into_iter().map(|byte| vec![byte]).collect();
        let ids: HashMap<_, _> = tokens.iter().cloned().zip(first..).collect();
        let words: Vec<Word> = words
            .iter()
            .map(|&(word, count)| Word { tokens: word.iter().map(|byte| ids[&[*byte][..]]).collect(), count })
            .collect();
        let mut merger = Merger {
            options,
            first,
            words,
            pairs: HashMap::new(),
            heap: BinaryHeap::new(),
            ids,
            merged: Merged { tokens, merges: Vec::new() },
        };
        for (at, word) in merger.words.iter().enumerate() {
            for pair in word.tokens.windows(2) {
                let seen = merger.pairs.entry((pair[0], pair[1])).or_default();
                seen.count += word.count;
                if seen.words.last() != Some(&(at as u32)) {
                    seen.words.push(at as u32);
                }
            }
        }
        merger.heap = merger.pairs.iter().map(|(pair, seen)| (seen.count, Reverse(*pair))).collect();
        merger
    }

    pub fn run(mut self, progress: Progress<'_>) -> Merged {
        let wanted = self.options.vocabulary as u64;
        let mut known: HashSet<Pair> = HashSet::new();
        let have = |merger: &Self| u64::from(merger.first) + merger.merged.tokens.len() as u64;
        while have(&self) < wanted {
            let Some((pair, at_least)) = self.most_frequent() else { break };
            if at_least < self.options.min_frequency.max(1) {
                break;
            }
            let Some(id) = self.token(pair) else { continue };
            // The same letters may come from another pair, and the pair may come up again thereby.
            if known.insert(pair) {
                self.merged.merges.push(pair);
            }
            self.apply(pair, id);
            if have(&self).is_multiple_of(64) {
                progress(have(&self), wanted);
            }
        }
        progress(wanted, wanted);
        self.merged
    }

    /// Takes the most frequent pair out of the heap.
    fn most_frequent(&mut self) -> Option<(Pair, u64)> {
        loop {
            let (count, Reverse(pair)) = self.heap.pop()?;
            let now = self.pairs.get(&pair).map_or(0, |seen| seen.count);
            match now {
                0 => {}
                now if now == count => return Some((pair, now)),
                now => self.heap.push((now, Reverse(pair))),
            }
        }
    }

    fn bytes(&self, id: u32) -> &[u8] {
        &self.merged.tokens[(id - self.first) as usize]
    }

    /// The token that a pair becomes; none if it would be too long, or be spelt like a special token.
    fn token(&mut self, (left, right): Pair) -> Option<u32> {
        let joined = [self.bytes(left), self.bytes(right)].concat();
        let spelt: String = joined.iter().map(|&byte| byte_to_char(byte)).collect();
        if joined.len() > LONGEST || self.options.all_special().any(|token| token == spelt) {
            return None;
        }
        let new = self.first + self.merged.tokens.len() as u32;
        let id = *self.ids.entry(joined.clone()).or_insert(new);
        if id == new {
            self.merged.tokens.push(joined);
        }
        Some(id)
    }

    /// Merges a pair wherever it is.
    fn apply(&mut self, pair: Pair, id: u32) {
        let Some(seen) = self.pairs.remove(&pair) else { return };
        let mut more: HashSet<Pair> = HashSet::new();
        for at in seen.words {
            let word = &mut self.words[at as usize];
            let found = |pairs: &[u32]| (pairs[0], pairs[1]) == pair;
            if !word.tokens.windows(2).any(found) {
                continue;
            }
            for old in word.tokens.windows(2) {
                if let Some(seen) = self.pairs.get_mut(&(old[0], old[1])) {
                    seen.count -= word.count;
                }
            }
            join(&mut word.tokens, pair, id);
            for new in word.tokens.windows(2) {
                let new = (new[0], new[1]);
                let seen = self.pairs.entry(new).or_default();
                seen.count += word.count;
                if (new.0 == id || new.1 == id) && seen.words.last() != Some(&at) {
                    seen.words.push(at);
                    more.insert(new);
                }
            }
        }
        for pair in more {
            self.heap.push((self.pairs[&pair].count, Reverse(pair)));
        }
    }
}

/// Replaces each occurrence of the pair, from the left.
fn join(tokens: &mut Vec<u32>, (left, right): Pair, id: u32) {
    let (mut from, mut to) = (0, 0);
    while from < tokens.len() {
        let whole = tokens[from] == left && tokens.get(from + 1) == Some(&right);
        tokens[to] = if whole { id } else { tokens[from] };
        from += 1 + usize::from(whole);
        to += 1;
    }
    tokens.truncate(to);
}
