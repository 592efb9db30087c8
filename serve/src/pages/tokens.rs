//! Tokens of sequences in pages. In: a prompt, which the choices of a request share, and what each of them samples. Out: the
//! tokens of any full page as one slice, and its key, computed once however many sequences have it.

use std::sync::{Arc, OnceLock};

use super::Key;

/// What the choices of a request begin with. They share it, so that many choices cost little more than one.
#[derive(Debug)]
pub struct Prompt {
    tokens: Vec<u32>,
    salt: Vec<u8>,
    adapter: Option<u32>,
    /// The root of its salt, then the keys of its full pages; made when they are first looked for.
    pub(super) keys: OnceLock<Box<[Key]>>,
}

impl Prompt {
    /// A prompt whose pages are found again only under an equal salt.
    pub fn new(tokens: Vec<u32>, salt: Vec<u8>) -> Arc<Prompt> {
        Prompt::adapted(tokens, salt, None)
    }

    /// The same for a sequence under the adapter of a slot; the salt must be that adapter's.
    pub fn adapted(tokens: Vec<u32>, salt: Vec<u8>, adapter: Option<u32>) -> Arc<Prompt> {
        Arc::new(Prompt { tokens, salt, adapter, keys: OnceLock::new() })
    }

    /// Its ids.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }
}

/// The tokens of one sequence.
#[derive(Debug)]
pub struct Tokens {
    prompt: Arc<Prompt>,
    size: usize,
    /// Tokens of the prompt's full pages.
    whole: usize,
    /// What follows them: the end of the prompt and what was sampled, so that no page is half here and half there.
    rest: Vec<u32>,
    /// Keys of full pages of the rest, as far as they were needed.
    keys: Vec<Key>,
    /// Whether the place where the prompt ends is part of the rest's keys.
    keyed_by_prompt_end: bool,
}

impl Tokens {
    /// A sequence that is only a prompt yet, in pages of `size` tokens.
    pub fn new(prompt: Arc<Prompt>, size: usize) -> Tokens {
        let whole = prompt.tokens.len() / size * size;
        let rest = prompt.tokens[whole..].to_vec();
        Tokens { prompt, size, whole, rest, keys: Vec::new(), keyed_by_prompt_end: false }
    }

    /// The same for a model whose program of decode rounds otherwise than its program of prefill: the prefix cache gives pages
    /// that hold sampled tokens only to a sequence whose prompt ends at the same place.
    pub fn keyed_by_prompt_end(self) -> Tokens {
        Tokens { keyed_by_prompt_end: true, ..self }
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.whole + self.rest.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens of the prompt.
    pub fn prompt(&self) -> usize {
        self.prompt.tokens.len()
    }

    /// The slot of its adapter.
    pub fn adapter(&self) -> Option<u32> {
        self.prompt.adapter
    }

    /// The token at a position.
    pub fn get(&self, position: usize) -> u32 {
        match position.checked_sub(self.whole) {
            Some(at) => self.rest[at],
            None => self.prompt.tokens[position],
        }
    }

    /// Adds a sampled token.
    pub fn push(&mut self, token: u32) {
        self.rest.push(token);
    }

    /// The tokens of a full page.
    pub(crate) fn page(&self, page: usize) -> &[u32] {
        let first = page * self.size;
        match first.checked_sub(self.whole) {
            Some(at) => &self.rest[at..][..self.size],
            None => &self.prompt.tokens[first..][..self.size],
        }
    }

    /// Makes sure that the first `pages` pages, all full, have keys; `hash` makes one of the parent's bytes and tokens.
    pub(super) fn extend_keys(&mut self, pages: usize, hash: impl Fn(&[u8], &[u32]) -> Key) {
        let shared = self.prompt.keys.get_or_init(|| {
            let mut keys = vec![hash(&self.prompt.salt, &[])];
            for page in self.prompt.tokens.chunks_exact(self.size) {
                let parent = keys[keys.len() - 1].to_le_bytes();
                keys.push(hash(&parent, page));
            }
            keys.into()
        });
        for page in shared.len() - 1 + self.keys.len()..pages {
            let of_prompt = self.prompt().saturating_sub(page * self.size) as u32;
            let mut before = [0; 20];
            before[..16].copy_from_slice(&self.parent(page).to_le_bytes());
            before[16..].copy_from_slice(&of_prompt.to_le_bytes());
            let key = hash(if self.keyed_by_prompt_end { &before } else { &before[..16] }, self.page(page));
            self.keys.push(key);
        }
    }

    /// The key of a page that has one.
    pub(super) fn key(&self, page: usize) -> Key {
        self.parent(page + 1)
    }

    /// The key of the page before; of the first, what its salt makes.
    pub(super) fn parent(&self, page: usize) -> Key {
        let shared = self.prompt.keys.get().map_or(&[][..], |keys| keys);
        shared.get(page).copied().unwrap_or_else(|| self.keys[page - shared.len()])
    }
}
