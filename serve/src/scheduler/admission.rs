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
        let first = self.first_of(sequence);
        let siblings = self.running[first..].iter().map_while(|&s| {
            self.slots[s as usize].as_ref().filter(|other| other.id.request == sequence.id.request)
        });
        if siblings.clone().map(|s| s.computed).max().is_some_and(|most| most < known) {
            return Admission::Later;
        }
        let mut siblings = siblings.filter(|s| s.computed >= known && self.pages.has(&s.tables, known));
        let sibling = siblings.next().map(|s| s.id.slot as usize);
        // What comes after the last token before the scored ones has to be computed too.
        let most = if sequence.embed { 0 } else { sequence.scored.unwrap_or(usize::MAX) };
        let mut found = self.pages.find(&mut sequence.tables, &mut sequence.tokens, most);
        let sibling = sibling.and_then(|s| self.slots[s].as_ref()).filter(|_| found < known);
        if let Some(from) = sibling {
            self.pages.release(&mut sequence.tables);
            self.pages.fork(&from.tables, known, &mut sequence.tables);
            found = known;
        }
        let all = [found, sequence.tokens.len()];
        let others = self.running.len();
        if !self.pages.fits(&sequence.tables, all, others) || !self.pages.grow(&mut sequence.tables, all) {
            self.pages.release(&mut sequence.tables);
            self.blocked = Some((sequence.id, self.pages.releases()));
            return Admission::NoPages;
        }
        self.blocked = None;
        if let Some(from) = sibling {
            self.counters.forks += 1;
            let (part, whole) = (known % self.bounds.page_size, known / self.bounds.page_size);
            let both = from.tables.pages().into_iter().zip(sequence.tables.pages());
            let pairs = both.filter_map(|(from, to)| Some((*from.get(whole)?, *to.get(whole)?)));
            let copies = self.plan.copies.iter_mut().zip(pairs.filter(|_| part > 0));
            copies.for_each(|(copies, pair)| copies.push(pair));
        }
        self.counters.cache_queries += sequence.tokens.len() as u64;
        self.counters.cache_hits += found as u64;
        sequence.computed = found;
        sequence.cached.get_or_insert(found.min(sequence.tokens.prompt()));
        Admission::Admitted
    }

    /// Where those that run and are not before all siblings of a sequence begin.
    fn first_of(&self, sequence: &Sequence) -> usize {
        let &Sequence { id, priority, tag, .. } = sequence;
        self.running.partition_point(|&s| self.rank(s) < Some((priority, tag, id.request, 0)))
    }
}
