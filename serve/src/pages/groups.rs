//! Pages of all layers and, apart, of windowed layers. In: sequences that advance. Out: a table in each group; the second has only
//! what a window and the step at hand need, so that long sequences hold few of its pages.
//!
//! A token at position `i` sees those from `i + 1 - window` on. What lies before that of the next token to compute is given back,
//! and may still be found by its content: a prompt goes on behind the longest beginning whose pages are all in the first group, and
//! whose last window is in the second.

use astrai_builders::Windows;

use super::{Page, Pages, Secret, Table, Tokens};

/// The pages of one sequence in each group.
#[derive(Debug, Default)]
pub struct Tables {
    all: Table,
    window: Table,
}

impl Tables {
    /// Page numbers of each group, by position; none of the second where all layers have the same pages.
    pub fn pages(&self) -> [&[Page]; 2] {
        [self.all.pages(), self.window.pages()]
    }
}

/// Pages of windowed layers.
#[derive(Debug)]
struct Windowed {
    pages: Pages,
    window: usize,
    /// Tokens that a step adds to a sequence, at most.
    chunk: usize,
    /// Whether nothing lies in the pages of the other group, which are then only counted.
    every: bool,
}

impl Windowed {
    /// The first page that a token at this position sees.
    fn first(&self, position: usize) -> usize {
        (position + 1).saturating_sub(self.window) / self.pages.size
    }
}

/// All pages of a KV state.
#[derive(Debug)]
pub struct Groups {
    all: Pages,
    windowed: Option<Windowed>,
}

impl Groups {
    /// `pages` free pages of `size` tokens, and those of windowed layers, for steps that add `chunk` tokens to a sequence at most; with
    /// a prefix cache if there is a secret for it.
    pub fn new([pages, size, chunk]: [usize; 3], windows: Option<Windows>, secret: Option<Secret>) -> Groups {
        let windowed = windows.map(|Windows { pages, window, every }| {
            let pages = Pages::new(pages, size, secret);
            Windowed { pages, window, chunk, every }
        });
        Groups { all: Pages::new(pages, size, secret), windowed }
    }

    /// The groups in whose pages something lies.
    fn real(&self) -> impl Iterator<Item = &Pages> {
        let windowed = self.windowed.as_ref();
        let all = Some(&self.all).filter(|_| windowed.is_none_or(|w| !w.every));
        all.into_iter().chain(windowed.map(|w| &w.pages))
    }

    /// All pages.
    pub fn all(&self) -> usize {
        self.real().map(Pages::all).sum()
    }

    /// Pages that are free.
    pub fn free(&self) -> usize {
        self.real().map(Pages::free).sum()
    }

    /// Pages that are cached.
    pub fn cached(&self) -> usize {
        self.real().map(Pages::cached).sum()
    }

    /// How many tables gave pages back so far; while this stands, what did not fit does not fit.
    pub fn releases(&self) -> u64 {
        self.all.releases() + self.windowed.as_ref().map_or(0, |w| w.pages.releases())
    }

    /// Fills empty tables with published pages that begin the first `most` of `tokens`, and leaves out the last at least. Gives the
    /// number of tokens found.
    pub fn find(&mut self, tables: &mut Tables, tokens: &mut Tokens, most: usize) -> usize {
        let (mut pages, size) = (self.all.known(tokens, most), self.all.size);
        if let Some(w) = &mut self.windowed {
            pages = w.pages.known_from(tokens, pages, |pages| w.first(pages * size));
            w.pages.take(&mut tables.window, tokens, w.first(pages * size)..pages);
        }
        self.all.take(&mut tables.all, tokens, 0..pages);
        pages * size
    }

    /// Whether what a token at position `known` sees is still in these tables.
    pub fn has(&self, tables: &Tables, known: usize) -> bool {
        self.windowed.as_ref().is_none_or(|w| tables.window.left <= w.first(known))
    }

    /// Lets empty tables share the full pages of the `known` tokens that begin others, which [have](Self::has) them.
    pub fn fork(&mut self, from: &Tables, known: usize, to: &mut Tables) {
        let pages = known / self.all.size;
        self.all.fork(&from.all, 0..pages, &mut to.all);
        if let Some(w) = &mut self.windowed {
            w.pages.fork(&from.window, w.first(known)..pages, &mut to.window);
        }
    }

    /// Whether there are pages for `tokens` tokens, of which `computed` are, and `spare` more in each group.
    pub fn fits(&self, tables: &Tables, [computed, tokens]: [usize; 2], spare: usize) -> bool {
        let room = |pages: &Pages, table, tokens| pages.lacks(table, tokens) + spare <= pages.available();
        let windowed = self.windowed.as_ref();
        room(&self.all, &tables.all, tokens)
            && windowed.is_none_or(|w| room(&w.pages, &tables.window, tokens.min(computed + w.chunk)))
    }

    /// Makes tables hold `tokens` tokens, of which `computed` are: the second what the next step may add. Or leaves them as they are
    /// and says `false` if there are too few pages.
    pub fn grow(&mut self, tables: &mut Tables, [computed, tokens]: [usize; 2]) -> bool {
        self.fits(tables, [computed, tokens], 0)
            && self.all.grow(&mut tables.all, tokens)
            && self
                .windowed
                .as_mut()
                .is_none_or(|w| w.pages.grow(&mut tables.window, tokens.min(computed + w.chunk)))
    }

    /// Publishes the pages of which all tokens are computed.
    pub fn publish(&mut self, tables: &mut Tables, tokens: &mut Tokens, computed: usize) {
        self.all.publish(&mut tables.all, tokens, computed);
        if let Some(w) = &mut self.windowed {
            w.pages.publish(&mut tables.window, tokens, computed);
        }
    }

    /// Gives back what the token behind `computed` others does not see.
    pub fn leave(&mut self, tables: &mut Tables, computed: usize) {
        if let Some(w) = &mut self.windowed {
            w.pages.leave(&mut tables.window, w.first(computed));
        }
    }

    /// Takes all pages from tables, which may then be filled anew for the same tokens.
    pub fn release(&mut self, tables: &mut Tables) {
        self.all.release(&mut tables.all);
        if let Some(w) = &mut self.windowed {
            w.pages.release(&mut tables.window);
        }
    }

    /// Takes the pages from tables that `tokens` tokens do not need; none of them was published.
    pub fn truncate(&mut self, tables: &mut Tables, tokens: usize) {
        self.all.truncate(&mut tables.all, tokens);
        if let Some(w) = &mut self.windowed {
            w.pages.truncate(&mut tables.window, tokens);
        }
    }
}

#[cfg(test)]
impl Groups {
    /// What must hold at any time, given the tables of all sequences and how many tokens of each are computed.
    pub(crate) fn check<'a>(
        &self,
        all: impl Iterator<Item = (&'a Tables, usize)> + Clone,
    ) -> Result<(), String> {
        self.all.check(all.clone().map(|(t, _)| &t.all))?;
        let Some(w) = &self.windowed else { return Ok(()) };
        w.pages.check(all.clone().map(|(t, _)| &t.window))?;
        let most = (w.window + w.chunk) / w.pages.size + 2;
        for (table, computed) in all.map(|(t, computed)| (&t.window, computed)) {
            if table.left > w.first(computed) || table.pages.len() - table.left > most {
                return Err(format!("{table:?} of {computed} tokens in windows of {}", w.window));
            }
        }
        Ok(())
    }

    /// Pages that `tokens` tokens need in the first group.
    pub(crate) fn needed(&self, tokens: usize) -> usize {
        self.all.needed(tokens)
    }

    /// Pages of the first group that tables have.
    pub(crate) fn owned(&self) -> usize {
        self.all.all() - self.all.available()
    }

    /// Pages of windowed layers that tables have.
    pub(crate) fn owned_by_windows(&self) -> usize {
        self.windowed.as_ref().map_or(0, |w| w.pages.all() - w.pages.available())
    }
}
