//! Pages of the KV state: who owns which, and which still hold something worth finding again. In: page tables that want to
//! grow, share, or go. Out: page numbers. Nothing here touches the memory itself; it is here so that what sequences may
//! read and write is decided in one place, and can be proved there.
//!
//! A page is, at any time, exactly one of
//! * *owned*: in at least one table (its reference count is the number of tables);
//! * *cached*: in no table, but full, and findable by its content;
//! * *free*.
//!
//! The prefix cache knows full pages by a chain of hashes: the key of a page is SHA-256, truncated to 128 bits, of a secret,
//! the key of the page before it, and its tokens; the first page's parent is made of the secret and the request's salt. A
//! hit is believed only after the tokens and the parent are compared. Cached pages are given away least recently used
//! first, and the pages of one table from its end, so that what many prompts share stays longest.
//!
//! A sequence of windowed layers gives back the pages at its beginning that left the window; [`groups`] says when.

pub mod groups;
#[cfg(test)]
mod tests;
mod tokens;

use std::collections::HashMap;
use std::ops::Range;

use sha2::{Digest, Sha256};

pub use tokens::{Prompt, Tokens};

/// Number of a page in the KV state.
pub type Page = u32;

/// What keeps keys of the prefix cache unpredictable.
pub type Secret = [u8; 32];

type Key = u128;

const NONE: Page = Page::MAX;

/// The pages of one sequence, in the order of its positions; none at first. Given back by [`Pages::release`].
#[derive(Debug, Default)]
pub struct Table {
    pages: Vec<Page>,
    /// Leading pages that it has no more: their numbers mean nothing.
    left: usize,
    /// Leading pages that were offered to the cache, or came from it.
    published: usize,
    /// Set when a key of this table means other tokens in the cache: nothing behind it may be published.
    collided: bool,
}

impl Table {
    /// Page numbers; those that left the window are any.
    pub fn pages(&self) -> &[Page] {
        &self.pages
    }
}

/// A doubly linked list through `Pages::links`.
#[derive(Clone, Copy, Debug)]
struct List {
    first: Page,
    last: Page,
    len: usize,
}

/// All pages of a KV state.
#[derive(Debug)]
pub struct Pages {
    size: usize,
    refs: Vec<u32>,
    /// `(previous, next)` of a page in the list it is in.
    links: Vec<(Page, Page)>,
    free: List,
    /// Cached pages, the least recently used first.
    cached: List,
    releases: u64,
    cache: Option<Cache>,
}

/// What pages hold, by content.
#[derive(Debug)]
struct Cache {
    secret: Secret,
    by_key: HashMap<Key, Page>,
    /// `(key, parent)` of a published page.
    names: Vec<Option<(Key, Key)>>,
    /// Tokens of published pages, `[pages, size]`.
    tokens: Vec<u32>,
}

impl Cache {
    fn hash(&self, parent: &[u8], tokens: &[u32]) -> Key {
        let mut hash = Sha256::new_with_prefix(self.secret);
        hash.update(parent);
        tokens.iter().for_each(|t| hash.update(t.to_le_bytes()));
        let digest: [u8; 32] = hash.finalize().into();
        digest.iter().take(16).fold(0, |key, b| key << 8 | Key::from(*b))
    }

    fn holds(&self, page: Page, parent: Key, tokens: &[u32]) -> bool {
        let at = page as usize;
        self.names[at].is_some_and(|(_, p)| p == parent)
            && self.tokens[at * tokens.len()..][..tokens.len()] == *tokens
    }

    fn publish(&mut self, page: Page, key: Key, parent: Key, tokens: &[u32]) {
        self.by_key.insert(key, page);
        self.names[page as usize] = Some((key, parent));
        self.tokens[page as usize * tokens.len()..][..tokens.len()].copy_from_slice(tokens);
    }

    fn forget(&mut self, page: Page) {
        if let Some((key, _)) = self.names[page as usize].take() {
            self.by_key.remove(&key);
        }
    }
}

impl Pages {
    /// `pages` free pages of `size` tokens each (both positive), with a prefix cache if there is a secret for it.
    pub fn new(pages: usize, size: usize, secret: Option<Secret>) -> Pages {
        let empty = List { first: NONE, last: NONE, len: 0 };
        let cache = secret.map(|secret| Cache {
            secret,
            by_key: HashMap::with_capacity(pages),
            names: vec![None; pages],
            tokens: vec![0; pages * size],
        });
        let links = vec![(NONE, NONE); pages];
        let mut all =
            Pages { size, refs: vec![0; pages], links, free: empty, cached: empty, releases: 0, cache };
        (0..pages as Page).rev().for_each(|page| all.append(page));
        all
    }

    /// All of them.
    pub fn all(&self) -> usize {
        self.refs.len()
    }

    /// Pages that are free.
    pub fn free(&self) -> usize {
        self.free.len
    }

    /// Pages that are cached.
    pub fn cached(&self) -> usize {
        self.cached.len
    }

    /// Pages that tables may still take: the free and the cached.
    pub fn available(&self) -> usize {
        self.free.len + self.cached.len
    }

    /// How many tables were released so far; while this stands, what did not fit does not fit.
    pub fn releases(&self) -> u64 {
        self.releases
    }

    /// Pages that `tokens` tokens need.
    pub fn needed(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.size)
    }

    /// How many published pages, one after the other, begin the first `most` of `tokens`; at least the last token is left out,
    /// because somebody has to compute what comes after it.
    pub fn known(&self, tokens: &mut Tokens, most: usize) -> usize {
        let most = tokens.len().min(most).saturating_sub(1) / self.size;
        self.extend_keys(tokens, most);
        (0..most).take_while(|&block| self.lookup(tokens, block).is_some()).count()
    }

    /// The most pages, up to `pages`, behind which one can go on where of so many only those from `from` of their number on are needed.
    pub fn known_from(&self, tokens: &Tokens, pages: usize, from: impl Fn(usize) -> usize) -> usize {
        let mut pages = pages;
        // Whatever number needs the last page that is missing needs it too.
        while let Some(missing) = (from(pages)..pages).rev().find(|b| self.lookup(tokens, *b).is_none()) {
            pages = missing;
        }
        pages
    }

    /// Lets an empty table share these published pages of its tokens, as if those before had left it.
    pub fn take(&mut self, table: &mut Table, tokens: &Tokens, pages: Range<usize>) {
        table.pages.resize(pages.start, 0);
        (table.left, table.published) = (pages.start, pages.end);
        for block in pages {
            let Some(page) = self.lookup(tokens, block) else { break };
            self.share(page);
            table.pages.push(page);
        }
    }

    /// The published page that holds what the tokens of a page say, which have a key.
    fn lookup(&self, tokens: &Tokens, block: usize) -> Option<Page> {
        let cache = self.cache.as_ref()?;
        let page = *cache.by_key.get(&tokens.key(block))?;
        cache.holds(page, tokens.parent(block), tokens.page(block)).then_some(page)
    }

    /// Lets an empty table share these pages of another, which must be full of tokens that both have, as if those before had left it.
    pub fn fork(&mut self, from: &Table, pages: Range<usize>, to: &mut Table) {
        to.pages.extend_from_slice(&from.pages[..pages.end]);
        (to.left, to.published, to.collided) = (pages.start, pages.end, from.collided);
        from.pages[pages].iter().for_each(|&page| self.share(page));
    }

    /// Takes the first `pages` pages from a table; what was published of them can still be found.
    pub fn leave(&mut self, table: &mut Table, pages: usize) {
        self.releases += u64::from(pages > table.left);
        for at in table.left..pages {
            self.drop_one(table.pages[at]);
        }
        table.left = table.left.max(pages);
    }

    /// Pages that a table lacks to hold `tokens` tokens.
    fn lacks(&self, table: &Table, tokens: usize) -> usize {
        self.needed(tokens).saturating_sub(table.pages.len())
    }

    /// Makes a table hold `tokens` tokens, or leaves it as it is and says `false` if there are too few pages.
    pub fn grow(&mut self, table: &mut Table, tokens: usize) -> bool {
        let more = self.lacks(table, tokens);
        if more > self.available() {
            return false;
        }
        for _ in 0..more {
            // Of the free pages the last that was in use, whose memory is there.
            let from = if self.free.len > 0 { self.free.last } else { self.cached.first };
            self.unlink(from);
            if let Some(cache) = &mut self.cache {
                cache.forget(from);
            }
            self.refs[from as usize] = 1;
            table.pages.push(from);
        }
        true
    }

    /// Publishes the pages of which all tokens are computed; `tokens` are those of the sequence, of which the first
    /// `computed` are in the KV state.
    pub fn publish(&mut self, table: &mut Table, tokens: &mut Tokens, computed: usize) {
        let full = computed / self.size;
        if table.published >= full || table.collided {
            return;
        }
        self.extend_keys(tokens, full);
        let Some(cache) = &mut self.cache else { return };
        for block in table.published..full {
            let (key, parent, content) = (tokens.key(block), tokens.parent(block), tokens.page(block));
            match cache.by_key.get(&key) {
                // Two sequences computed the same at the same time: one copy is enough to be found.
                Some(&page) if cache.holds(page, parent, content) => {}
                Some(_) => {
                    table.collided = true;
                    return;
                }
                None => cache.publish(table.pages[block], key, parent, content),
            }
        }
        table.published = full;
    }

    /// Takes all pages from a table, which may then be filled anew for the same tokens.
    pub fn release(&mut self, table: &mut Table) {
        self.releases += 1;
        self.cut(table, 0);
        (table.published, table.collided) = (0, false);
    }

    /// Takes the pages from a table that `tokens` tokens do not need; none of them was published.
    pub fn truncate(&mut self, table: &mut Table, tokens: usize) {
        if table.pages.len() > self.needed(tokens) {
            self.releases += 1;
            self.cut(table, self.needed(tokens));
        }
    }

    /// Takes pages from the end until so many are left.
    fn cut(&mut self, table: &mut Table, pages: usize) {
        while table.pages.len() > pages.max(table.left)
            && let Some(page) = table.pages.pop()
        {
            self.drop_one(page);
        }
        table.pages.truncate(pages);
        table.left = table.left.min(pages);
    }

    /// A table has a page no more.
    fn drop_one(&mut self, page: Page) {
        self.refs[page as usize] -= 1;
        if self.refs[page as usize] == 0 {
            self.append(page);
        }
    }

    fn extend_keys(&self, tokens: &mut Tokens, pages: usize) {
        if let Some(cache) = &self.cache {
            tokens.extend_keys(pages, |parent, tokens| cache.hash(parent, tokens));
        }
    }

    fn share(&mut self, page: Page) {
        if self.refs[page as usize] == 0 {
            self.unlink(page);
        }
        self.refs[page as usize] += 1;
    }

    fn is_published(&self, page: Page) -> bool {
        self.cache.as_ref().is_some_and(|c| c.names[page as usize].is_some())
    }

    /// The list of a page that no table has.
    fn list(&mut self, page: Page) -> &mut List {
        if self.is_published(page) { &mut self.cached } else { &mut self.free }
    }

    fn append(&mut self, page: Page) {
        let list = self.list(page);
        let last = std::mem::replace(&mut list.last, page);
        list.len += 1;
        match last {
            NONE => list.first = page,
            _ => self.links[last as usize].1 = page,
        }
        self.links[page as usize] = (last, NONE);
    }

    fn unlink(&mut self, page: Page) {
        let (before, after) = self.links[page as usize];
        let list = self.list(page);
        list.len -= 1;
        if before == NONE {
            list.first = after;
        }
        if after == NONE {
            list.last = before;
        }
        if before != NONE {
            self.links[before as usize].1 = after;
        }
        if after != NONE {
            self.links[after as usize].0 = before;
        }
    }
}
