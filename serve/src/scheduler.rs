//! Which tokens of which sequences the next step computes. In: sequences that come, go, and gain a token. Out: a
//! [`StepBatch`] for each of the model's programs. A pure state machine without threads or clocks, so that every decision
//! can be replayed and proved.
//!
//! This is continuous batching with chunked prefill: sequences join and leave at every step. A sequence waits or runs. It runs with pages for all its tokens; it is admitted only if these are there, and a page more
//! for each running sequence. Each step gives one token to every sequence that has only its newest to compute, then the
//! rest of the budget, in chunks, to those behind, then to whoever waits and may be admitted. Lower priority numbers go
//! first, then earlier arrivals. When a running sequence needs a page and there is none, the last in this order loses
//! its pages and waits again, to be computed anew (preemption by recomputation). The first in order is never the last, and alone it
//! always fits: so somebody always advances, and a finite load is finished.
//!
//! Siblings (the choices of one request) share the full pages of their prompt; each computes the rest of it itself, so
//! that nobody writes where another reads.
//!
//! Where tokens of answers have a program of their own, a sequence is in a step with tokens of its prompt or with tokens of its
//! answer, never both, and all the latter together are at most as many as sequences may run. Which of the two a token is hangs on
//! the sequence alone, also when its answer is computed anew.

pub mod batch;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;

use crate::pages::{Pages, Prompt, Secret, Table, Tokens};
use batch::StepBatch;

/// Bounds of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Tokens a page holds.
    pub page_size: usize,
    /// Pages of the KV state.
    pub pages: usize,
    /// Tokens computed in one step; at least `sequences`.
    pub tokens: usize,
    /// Sequences in one step.
    pub sequences: usize,
    /// Pages of a sequence, at most: the width of the page tables that the model takes.
    pub table: usize,
    /// Pages hold latents: steps list the pages in use.
    pub latents: bool,
    /// Tokens of answers are computed apart from those of prompts, at most `sequences` of them in one step.
    pub apart: bool,
}

/// A sequence that arrives.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// Its request; numbers grow with time, and siblings share one.
    pub request: u64,
    /// Which of the siblings it is.
    pub index: u32,
    /// Lower goes first.
    pub priority: i32,
    /// What there is to continue: at least one token.
    pub prompt: Arc<Prompt>,
}

/// Names a sequence from its arrival to its end, and nothing afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SequenceId {
    slot: u32,
    /// Its request.
    pub request: u64,
    /// Which of the request's siblings it is.
    pub index: u32,
}

/// What a step does for one sequence; in the order of the batch.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The sequence.
    pub id: SequenceId,
    /// Tokens computed.
    pub tokens: usize,
    /// Whether these are all it has, so that the logits are those of its next token.
    pub complete: bool,
    /// Whether they are computed apart, as tokens of an answer.
    pub apart: bool,
}

/// Counters for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Sequences that lost their pages to another.
    pub preemptions: u64,
    /// Tokens of admitted sequences.
    pub cache_queries: u64,
    /// Of these, tokens whose KV was there already.
    pub cache_hits: u64,
    /// Tokens computed.
    pub computed: u64,
    /// Of these, tokens of answers that were computed apart.
    pub apart: u64,
}

#[derive(Debug)]
struct Sequence {
    id: SequenceId,
    priority: i32,
    tokens: Tokens,
    /// Leading tokens whose keys and values are in the table's pages.
    computed: usize,
    table: Table,
    /// Tokens found in the cache when it was first admitted.
    cached: Option<usize>,
}

impl Sequence {
    fn rank(&self) -> (i32, u64, u32) {
        (self.priority, self.id.request, self.id.index)
    }
}

/// Tokens that a step may still take.
struct Budget {
    /// Of all kinds.
    tokens: usize,
    /// Of those computed apart.
    apart: usize,
}

/// Why a waiting sequence stays where it is.
enum Admission {
    Admitted,
    /// A sibling is still computing what this one will share.
    Later,
    NoPages,
}

/// The state machine.
#[derive(Debug)]
pub struct Scheduler {
    bounds: Bounds,
    pages: Pages,
    slots: Vec<Option<Sequence>>,
    vacant: Vec<u32>,
    /// Slots in the order of rank, both of them.
    waiting: VecDeque<u32>,
    running: Vec<u32>,
    /// The first that waits, and the releases of pages when it did not fit.
    stuck: Option<(SequenceId, u64)>,
    rows: Vec<Row>,
    /// Of rows that are not computed apart, and of those that are.
    batches: [StepBatch; 2],
    counters: Counters,
}

impl Scheduler {
    /// An empty one; with a secret, full pages are cached. All bounds are positive.
    pub fn new(bounds: Bounds, secret: Option<Secret>) -> Scheduler {
        Scheduler {
            bounds,
            pages: Pages::new(bounds.pages, bounds.page_size, secret),
            slots: Vec::new(),
            vacant: Vec::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            stuck: None,
            rows: Vec::new(),
            batches: [(); 2].map(|()| match bounds.latents {
                true => StepBatch::of_latents(bounds.page_size, bounds.table),
                false => StepBatch::new(bounds.page_size, bounds.table),
            }),
            counters: Counters::default(),
        }
    }

    /// Lets a sequence wait. It must fit alone: prompt and what will be sampled, but for the last, within all pages.
    pub fn add(&mut self, arrival: Arrival) -> SequenceId {
        let Arrival { request, index, priority, prompt } = arrival;
        let slot = self.vacant.pop().unwrap_or(self.slots.len() as u32);
        if slot as usize == self.slots.len() {
            self.slots.push(None);
        }
        let id = SequenceId { slot, request, index };
        let mut tokens = Tokens::new(prompt, self.bounds.page_size);
        if self.bounds.apart {
            tokens = tokens.apart();
        }
        let sequence = Sequence { id, priority, tokens, computed: 0, table: Table::default(), cached: None };
        self.slots[slot as usize] = Some(sequence);
        self.wait(slot);
        id
    }

    /// Ends a sequence, finished or not, between steps or between [`Scheduler::plan`] and [`Scheduler::complete`].
    /// One that has ended already stays so.
    pub fn remove(&mut self, id: SequenceId) {
        if self.get(id).is_none() {
            return;
        }
        self.running.retain(|&s| s != id.slot);
        self.waiting.retain(|&s| s != id.slot);
        if let Some(mut sequence) = self.slots[id.slot as usize].take() {
            self.pages.release(&mut sequence.table);
            self.vacant.push(id.slot);
        }
        self.stuck = None;
    }

    /// What the next step computes, by program; nothing if there is nothing to compute.
    pub fn plan(&mut self) -> Option<[&StepBatch; 2]> {
        self.rows.clear();
        let preempted = self.grow();
        let mut budget = Budget { tokens: self.bounds.tokens, apart: self.bounds.sequences };
        // Those with one token left first: nobody waits for another's prompt.
        for decode in [true, false] {
            for at in 0..self.running.len() {
                let left = self.left(self.running[at]);
                if left > 0 && budget.tokens > 0 && (left == 1) == decode {
                    self.schedule(self.running[at], &mut budget);
                }
            }
        }
        if !preempted {
            self.admit(&mut budget);
        }
        if self.bounds.apart {
            self.rows.sort_unstable_by_key(|row| row.apart);
        }
        self.fill();
        if self.rows.is_empty() { None } else { Some(self.batches.each_ref()) }
    }

    /// What the last plan holds for each sequence, the first batch's before the second's.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Ends the step of the last plan: what it computed is computed, and each complete row gains its token. A sequence
    /// that is given none has nothing left to compute and stays idle until it is removed.
    pub fn complete(&mut self, tokens: &[Option<u32>]) {
        for (row, token) in self.rows.drain(..).zip(tokens) {
            let Some(Some(sequence)) = self.slots.get_mut(row.id.slot as usize) else { continue };
            if sequence.id != row.id {
                continue;
            }
            self.counters.computed += row.tokens as u64;
            self.counters.apart += if row.apart { row.tokens as u64 } else { 0 };
            sequence.computed += row.tokens;
            self.pages.publish(&mut sequence.table, &mut sequence.tokens, sequence.computed);
            if let Some(token) = token.filter(|_| row.complete) {
                sequence.tokens.push(token);
            }
        }
    }

    /// Sequences that run.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Sequences that wait, preempted ones among them.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// The pages.
    pub fn pages(&self) -> &Pages {
        &self.pages
    }

    /// Counters since the beginning.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Tokens of the prompt that were in the cache when the sequence was first admitted; nothing if it was not yet.
    pub fn cached(&self, id: SequenceId) -> Option<usize> {
        self.get(id).and_then(|s| s.cached)
    }

    fn get(&self, id: SequenceId) -> Option<&Sequence> {
        self.slots.get(id.slot as usize)?.as_ref().filter(|s| s.id == id)
    }

    fn rank(&self, slot: u32) -> Option<(i32, u64, u32)> {
        self.slots[slot as usize].as_ref().map(Sequence::rank)
    }

    /// Tokens a sequence has to compute.
    fn left(&self, slot: u32) -> usize {
        self.slots[slot as usize].as_ref().map_or(0, |s| s.tokens.len() - s.computed)
    }

    fn wait(&mut self, slot: u32) {
        let rank = self.rank(slot);
        let at = self.waiting.partition_point(|&s| self.rank(s) < rank);
        self.waiting.insert(at, slot);
    }

    /// Gives each running sequence pages for all its tokens; while there are too few, the last loses its own. Says whether one
    /// did.
    fn grow(&mut self) -> bool {
        let (mut at, before) = (0, self.counters.preemptions);
        while at < self.running.len() {
            let slot = self.running[at] as usize;
            let Some(sequence) = &mut self.slots[slot] else { break };
            if self.pages.grow(&mut sequence.table, sequence.tokens.len()) {
                at += 1;
            } else {
                self.preempt();
            }
        }
        self.counters.preemptions > before
    }

    fn preempt(&mut self) {
        let Some(slot) = self.running.pop() else { return };
        if let Some(sequence) = &mut self.slots[slot as usize] {
            self.pages.release(&mut sequence.table);
            sequence.computed = 0;
        }
        self.counters.preemptions += 1;
        self.wait(slot);
    }

    /// Puts as many tokens of a running sequence into the step as the budget allows.
    fn schedule(&mut self, slot: u32, budget: &mut Budget) {
        let Some(sequence) = &self.slots[slot as usize] else { return };
        let left = sequence.tokens.len() - sequence.computed;
        let of_prompt = sequence.tokens.prompt().saturating_sub(sequence.computed);
        let apart = self.bounds.apart && of_prompt == 0;
        let most = match (self.bounds.apart, apart) {
            (true, true) => budget.apart,
            (true, false) => of_prompt,
            (false, _) => left,
        };
        let tokens = left.min(most).min(budget.tokens);
        if tokens == 0 {
            return;
        }
        self.rows.push(Row { id: sequence.id, tokens, complete: tokens == left, apart });
        budget.tokens -= tokens;
        budget.apart -= if apart { tokens } else { 0 };
    }

    fn admit(&mut self, budget: &mut Budget) {
        let (mut at, mut later) = (0, None);
        while at < self.waiting.len() && self.running.len() < self.bounds.sequences && budget.tokens > 0 {
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
        if self.stuck == Some((sequence.id, self.pages.releases())) {
            return Admission::NoPages;
        }
        // The last token of a prompt is never shared: what comes after it has to be computed by each.
        let whole = (sequence.tokens.prompt() - 1) / self.bounds.page_size;
        let sibling = self.sibling(sequence.id, sequence.priority);
        if sibling.is_some_and(|(_, computed)| computed < whole * self.bounds.page_size) {
            return Admission::Later;
        }
        let mut found = self.pages.find(&mut sequence.table, &mut sequence.tokens);
        if found < whole * self.bounds.page_size
            && let Some(from) = sibling.and_then(|(slot, _)| self.slots[slot as usize].as_ref())
        {
            self.pages.release(&mut sequence.table);
            self.pages.fork(&from.table, whole, &mut sequence.table);
            found = whole * self.bounds.page_size;
        }
        let length = sequence.tokens.len();
        let more = self.pages.needed(length) - sequence.table.pages().len();
        if self.pages.available() < more + self.running.len() || !self.pages.grow(&mut sequence.table, length)
        {
            self.pages.release(&mut sequence.table);
            self.stuck = Some((sequence.id, self.pages.releases()));
            return Admission::NoPages;
        }
        self.stuck = None;
        self.counters.cache_queries += length as u64;
        self.counters.cache_hits += found as u64;
        sequence.computed = found;
        sequence.cached.get_or_insert(found.min(sequence.tokens.prompt()));
        Admission::Admitted
    }

    /// The running sibling that has computed most, and how much that is.
    fn sibling(&self, id: SequenceId, priority: i32) -> Option<(u32, usize)> {
        let first = self.running.partition_point(|&s| self.rank(s) < Some((priority, id.request, 0)));
        let family = self.running[first..].iter().map_while(|&s| {
            let sibling = self.slots[s as usize].as_ref()?;
            (sibling.id.request == id.request).then_some((s, sibling.computed))
        });
        family.reduce(|best, one| if one.1 > best.1 { one } else { best })
    }

    /// Writes the batches of the rows.
    fn fill(&mut self) {
        let first = self.rows.partition_point(|row| !row.apart);
        self.batches[0].expect(first);
        self.batches[1].expect(self.rows.len() - first);
        for row in &self.rows {
            if let Some(s) = self.slots[row.id.slot as usize].as_ref() {
                let tokens = (s.computed..s.computed + row.tokens).map(|at| s.tokens.get(at));
                self.batches[usize::from(row.apart)].append(tokens, s.computed, s.table.pages());
            }
        }
    }
}
