//! Continuous batching: which tokens of which sequences the next step computes. In: sequences that come, go, and gain a token.
//! Out: a [`StepPlan`] with an entry for each of the model's programs. A pure state machine without threads or clocks, so that
//! every decision can be replayed and proved.
//!
//! A sequence waits or runs. It runs with pages for all its tokens; it is admitted only if these are there, and a page more
//! for each running sequence. Each step gives one token to every sequence that has only its newest to compute, then the
//! rest of the budget to those behind (chunked prefill), then to whoever waits and may be admitted (admission). Lower priority numbers go
//! first, then lower tags, then earlier arrivals. When a running sequence needs a page and there is none, the last in this order loses
//! its pages and waits again (preemption by recomputation). The first in order is never the last, and alone it
//! always fits: so somebody always advances, and a finite load is finished.
//!
//! Siblings (the choices of one request) share their prompt (fork): one computes it, the others wait for that. Then they share its
//! full pages and begin with a copy of the page that its last token lies in, which each computes itself, for the logits behind it: so
//! nobody writes where another reads.
//!
//! Where a model has programs of prefill and of decode instead of one for both, a sequence is in a step with tokens of its
//! prompt or with tokens of its output, never both, and the tokens of outputs together are at most as many as sequences may run.
//! Which program computes a token follows from the sequence alone, also after a preemption. Texts of which a vector is wanted
//! have a program of their own in the same steps.
//!
//! Where nobody waits, rows that are free verify tokens that are only proposed (speculation): each stands in the
//! batch as a sequence of one token with the pages of its own, so that any program verifies, and with the numbers of plain decode.
//! Their pages come and go within the step.

mod admission;
pub mod batch;
pub mod draft;
mod ngram;
pub mod plan;
mod speculate;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;

use crate::pages::groups::{Groups, Tables};
use crate::pages::{Prompt, Secret, Tokens};
use astrai_builders::Windows;
use astrai_ir::ops::Drawing;
use ngram::{Experience, Proposer};
use plan::{ProgramKind, Row, StepPlan};

/// Bounds of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Tokens a page holds.
    pub page_size: usize,
    /// Pages of the KV state.
    pub pages: usize,
    /// Pages of windowed layers, where they have their own: so many that one sequence fits.
    pub windows: Option<Windows>,
    /// Tokens computed in one step; at least `sequences`.
    pub tokens: usize,
    /// Sequences in one step.
    pub sequences: usize,
    /// Rows of a step, of sequences and of proposed tokens; at least `sequences`.
    pub rows: usize,
    /// Tokens proposed for a sequence in one step, at most; 0 for no speculation.
    pub proposed: usize,
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
    /// Of one priority, lower goes first; siblings share one.
    pub tag: u64,
    /// What there is to continue: at least one token.
    pub prompt: Arc<Prompt>,
    /// Tokens of prompt and output, at most: nothing is proposed beyond.
    pub most: usize,
    /// The first token of the prompt, from 1, that is scored by the logits before it: from there on the prompt is computed token by
    /// token. Nothing for a prompt that is not scored.
    pub scored: Option<usize>,
    /// Whether the prompt's vector is wanted: another program computes it, and it shares no page, because all of it must be computed.
    pub embed: bool,
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
    /// Of these, tokens of outputs that a program of decode computed.
    pub decoded: u64,
    /// Sequences that began with the pages of a sibling.
    pub forks: u64,
    /// Tokens proposed.
    pub proposed: u64,
    /// Of these, tokens that were sampled too.
    pub accepted: u64,
}

/// What comes before what: priority, tag, request, index.
type Rank = (i32, u64, u64, u32);

#[derive(Debug)]
struct Sequence {
    id: SequenceId,
    priority: i32,
    tag: u64,
    scored: Option<usize>,
    embed: bool,
    tokens: Tokens,
    most: usize,
    proposer: Proposer,
    /// Leading tokens whose keys and values are in the tables' pages.
    computed: usize,
    tables: Tables,
    /// Tokens found in the cache when it was first admitted.
    cached: Option<usize>,
}

impl Sequence {
    fn rank(&self) -> Rank {
        (self.priority, self.tag, self.id.request, self.id.index)
    }
}

/// The state machine.
#[derive(Debug)]
pub struct Scheduler {
    bounds: Bounds,
    pages: Groups,
    slots: Vec<Option<Sequence>>,
    vacant: Vec<u32>,
    /// Slots in the order of rank, both of them.
    waiting: VecDeque<u32>,
    running: Vec<u32>,
    /// The first that waits, and the releases of pages when it did not fit.
    blocked: Option<(SequenceId, u64)>,
    plan: StepPlan,
    /// Sequences with proposed tokens in the step.
    proposing: Vec<SequenceId>,
    experience: Experience,
    /// What a proposal of a draft model costs of a step; none where sequences propose themselves.
    drafts: Option<f32>,
    counters: Counters,
}

impl Scheduler {
    /// A scheduler without sequences, for a model of these programs; with a secret, full pages stay in the prefix cache. All
    /// bounds are positive, and the plan [answers](StepPlan::answers) or gives vectors.
    pub fn new(bounds: Bounds, plan: StepPlan, secret: Option<Secret>) -> Scheduler {
        let Bounds { page_size, pages, windows, tokens, .. } = bounds;
        Scheduler {
            bounds,
            pages: Groups::new([pages, page_size, tokens], windows, secret),
            slots: Vec::new(),
            vacant: Vec::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            blocked: None,
            plan,
            proposing: Vec::new(),
            experience: Experience::default(),
            drafts: None,
            counters: Counters::default(),
        }
    }

    /// Lets a sequence wait. It must fit alone: prompt and what will be sampled, but for the last, within all pages.
    pub fn add(&mut self, arrival: Arrival) -> SequenceId {
        let Arrival { request, index, priority, tag, prompt, most, scored, embed } = arrival;
        let slot = self.vacant.pop().unwrap_or(self.slots.len() as u32);
        if slot as usize == self.slots.len() {
            self.slots.push(None);
        }
        let id = SequenceId { slot, request, index };
        let mut tokens = Tokens::new(prompt, self.bounds.page_size);
        if self.plan.separates_decode() {
            tokens = tokens.keyed_by_prompt_end();
        }
        let tables = Tables::default();
        let proposer = Proposer::new(self.experience, self.drafts.unwrap_or(0.0));
        let sequence = Sequence {
            id,
            priority,
            tag,
            scored,
            embed,
            tokens,
            most,
            proposer,
            computed: 0,
            tables,
            cached: None,
        };
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
            self.pages.release(&mut sequence.tables);
            self.vacant.push(id.slot);
        }
        self.blocked = None;
    }

    /// What the next step computes; nothing if there is nothing to compute.
    pub fn plan(&mut self) -> Option<&StepPlan> {
        self.plan.copies.iter_mut().for_each(Vec::clear);
        for entry in &mut self.plan.entries {
            entry.rows.clear();
            entry.room = match entry.kind {
                ProgramKind::Decode => self.bounds.rows,
                ProgramKind::Mixed | ProgramKind::Prefill | ProgramKind::Embed(_) => self.bounds.tokens,
            };
        }
        let preempted = self.grow();
        let mut budget = self.bounds.tokens;
        let mut spare = self.spare();
        // Those with one token left first: nobody waits for another's prompt. Where there are no answers it is one of a text.
        let answers = self.plan.answers();
        for decode in [true, false] {
            for at in 0..self.running.len() {
                let left = self.remaining(self.running[at]);
                if left > 0 && budget > 0 && (left == 1 && answers) == decode {
                    self.schedule(self.running[at], &mut budget);
                    self.propose(self.running[at], &mut spare, &mut budget);
                }
            }
        }
        if !preempted {
            self.admit(&mut budget);
        }
        self.fill();
        self.plan.rows().next().is_some().then_some(&self.plan)
    }

    /// The last plan.
    pub fn planned(&self) -> &StepPlan {
        &self.plan
    }

    /// Lets the model draw the tokens of those complete rows of the last plan of which this says how.
    pub fn draw(&mut self, how: impl FnMut(&Row) -> Option<Drawing>) {
        self.plan.draw(how);
    }

    /// What the last plan holds for each sequence, in the order of the plan's entries.
    pub fn rows(&self) -> impl Iterator<Item = &Row> {
        self.plan.rows()
    }

    /// Ends the step of the last plan: what it computed is computed, and each complete row gains its token. A sequence
    /// that is given none has nothing left to compute and stays idle until it is removed. A proposed token whose row is given none
    /// was not accepted, and all behind it were not: nothing of them is left.
    pub fn complete(&mut self, tokens: &[Option<u32>]) {
        let rows = self.plan.entries.iter_mut().flat_map(|e| e.rows.drain(..).map(|row| (e.kind, row)));
        for ((kind, row), token) in rows.zip(tokens) {
            let Some(Some(sequence)) = self.slots.get_mut(row.id.slot as usize) else { continue };
            if sequence.id != row.id {
                continue;
            }
            self.counters.computed += row.tokens as u64;
            self.counters.decoded += if kind == ProgramKind::Decode { row.tokens as u64 } else { 0 };
            if row.proposed.is_some() {
                self.proposing.push(row.id);
                sequence.proposer.proposed += 1;
                if token.is_none() {
                    continue;
                }
                sequence.proposer.accepted += 1;
            }
            sequence.computed += row.tokens;
            if !sequence.embed {
                self.pages.publish(&mut sequence.tables, &mut sequence.tokens, sequence.computed);
            }
            self.pages.leave(&mut sequence.tables, sequence.computed);
            if let Some(token) = token.filter(|_| row.complete) {
                sequence.tokens.push(token);
            }
        }
        self.settle();
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
    pub fn pages(&self) -> &Groups {
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

    fn rank(&self, slot: u32) -> Option<Rank> {
        self.slots[slot as usize].as_ref().map(Sequence::rank)
    }

    /// Tokens a sequence has to compute.
    fn remaining(&self, slot: u32) -> usize {
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
            if self.pages.grow(&mut sequence.tables, [sequence.computed, sequence.tokens.len()]) {
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
            self.pages.release(&mut sequence.tables);
            sequence.computed = 0;
        }
        self.counters.preemptions += 1;
        self.wait(slot);
    }

    /// Puts as many tokens of a running sequence into the step as the budget allows.
    fn schedule(&mut self, slot: u32, budget: &mut usize) {
        let Some(sequence) = &self.slots[slot as usize] else { return };
        let left = sequence.tokens.len() - sequence.computed;
        let of_prompt = sequence.tokens.prompt().saturating_sub(sequence.computed);
        let computes = |kind: ProgramKind| match kind {
            ProgramKind::Embed(_) => sequence.embed,
            _ if sequence.embed => false,
            _ if of_prompt > 0 => kind.prefills(),
            _ => kind.decodes(),
        };
        let Some(entry) = self.plan.entries.iter_mut().find(|e| computes(e.kind)) else { return };
        // A program that only prefills stops where the prompt ends.
        let most = if entry.kind == ProgramKind::Prefill { of_prompt } else { left };
        let scored = sequence.scored.filter(|_| of_prompt > 0);
        let most = scored.map_or(most, |from| most.min(from.saturating_sub(sequence.computed).max(1)));
        let tokens = most.min(entry.room).min(*budget);
        if matches!(entry.kind, ProgramKind::Embed(embedding) if embedding.whole && tokens < left) {
            // It is first in the next step, or nearer to that.
            *budget = 0;
            return;
        }
        if tokens == 0 {
            return;
        }
        let at = sequence.computed + tokens;
        let complete = tokens == left;
        let read = complete || scored.is_some_and(|from| at >= from);
        entry.rows.push(Row { id: sequence.id, tokens, at, complete, read, proposed: None, drawn: false });
        entry.room -= tokens;
        *budget -= tokens;
    }

    /// Writes each entry's batch from its rows.
    fn fill(&mut self) {
        for entry in &mut self.plan.entries {
            entry.batch.reset_for(entry.rows.len());
            for row in &entry.rows {
                if let Some(s) = self.slots[row.id.slot as usize].as_ref() {
                    let first = row.at - row.tokens;
                    let tokens = (first..row.at).map(|at| row.proposed.unwrap_or_else(|| s.tokens.get(at)));
                    entry.batch.append(tokens, first, s.tables.pages(), s.tokens.adapter());
                }
            }
            entry.batch.group();
        }
    }
}
