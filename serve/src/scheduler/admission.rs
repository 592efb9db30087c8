//! Who waits and may run. In: those who wait, in order, and pages. Out: running sequences with pages for all their tokens: found again, a
//! sibling's, or new ones; and the pages to copy where a sibling's is shared in part.

use super::{Scheduler, Sequence};

/// Why a waiting sequence stays where it is.
enum Admission {
    Admitted,
    /// A sibling is still computing what this one will share.
    Later,
    NoPages,
}

impl Scheduler {
    /// Lets those who wait run, in order, as far as pages, places and the step's budget go.
    pub(super) fn admit(&mut self, budget: &mut usize) {
        let (mut at, mut later) = (0, None);
        while at < self.waiting.len() && self.running.len() < self.bounds.sequences && *budget > 0 {
            let slot = self.waiting[at];
            let request = self.slots[slot as usize].as_ref().map(|s| s.id.request);
            // What one sibling waits for, all of them wait for.
            let admission = if request == later { Admission::Later } else { self.try_admit(slot) };
            match admission {
                Admission::NoPages => break,
                Admission::Later => (at, later) = (at + 1, request),
                Admission::Admitted => {
                    self.waiting.remove(at);
                    let rank = self.rank(slot);
                    let place = self.running.partition_point(|&s| self.rank(s) < rank);
                    self.running.insert(place, slot);
                    self.schedule(slot, budget);
                }
            }
        }
    }

    fn try_admit(&mut self, slot: u32) -> Admission {
        let Some(mut sequence) = self.slots[slot as usize].take() else { return Admission::Later };
        let admission = self.try_admit_taken(&mut sequence);
        self.slots[slot as usize] = Some(sequence);
        admission
    }

    fn try_admit_taken(&mut self, sequence: &mut Sequence) -> Admission {
        if self.blocked == Some((sequence.id, self.pages.releases())) {
            return Admission::NoPages;
        }
        // The last token of a prompt is never shared: what comes after it has to be computed by each.
        let known = sequence.tokens.prompt() - 1;
        let sibling = self.sibling(sequence);
        if sibling.is_some_and(|(_, computed)| computed < known) {
            return Admission::Later;
        }
        // What comes after the last token before the scored ones has to be computed too.
        let most = if sequence.embed { 0 } else { sequence.scored.unwrap_or(usize::MAX) };
        let mut found = self.pages.find(&mut sequence.table, &mut sequence.tokens, most);
        let (whole, part) = (known / self.bounds.page_size, known % self.bounds.page_size);
        let mut fork = None;
        if found < known
            && let Some(from) = sibling.and_then(|(slot, _)| self.slots[slot as usize].as_ref())
        {
            self.pages.release(&mut sequence.table);
            self.pages.fork(&from.table, whole, &mut sequence.table);
            fork = from.table.pages().get(whole).copied();
            found = known;
        }
        let length = sequence.tokens.len();
        let more = self.pages.needed(length) - sequence.table.pages().len();
        if self.pages.available() < more + self.running.len() || !self.pages.grow(&mut sequence.table, length)
        {
            self.pages.release(&mut sequence.table);
            self.blocked = Some((sequence.id, self.pages.releases()));
            return Admission::NoPages;
        }
        self.blocked = None;
        if let Some(from) = fork {
            self.counters.forks += 1;
            self.plan.copies.extend((part > 0).then(|| (from, sequence.table.pages()[whole])));
        }
        self.counters.cache_queries += length as u64;
        self.counters.cache_hits += found as u64;
        sequence.computed = found;
        sequence.cached.get_or_insert(found.min(sequence.tokens.prompt()));
        Admission::Admitted
    }

    /// The running sibling that has computed most, and how much that is.
    fn sibling(&self, sequence: &Sequence) -> Option<(u32, usize)> {
        let &Sequence { id, priority, tag, .. } = sequence;
        let first = self.running.partition_point(|&s| self.rank(s) < Some((priority, tag, id.request, 0)));
        let family = self.running[first..].iter().map_while(|&s| {
            let sibling = self.slots[s as usize].as_ref()?;
            (sibling.id.request == id.request).then_some((s, sibling.computed))
        });
        family.reduce(|best, one| if one.1 > best.1 { one } else { best })
    }
}
