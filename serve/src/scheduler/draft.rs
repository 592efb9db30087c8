//! What a draft model computes, so that it can propose tokens. In: sequences that decode in the coming step, in the pages that the model has
//! them in. Out: steps of the draft model, and from what it says, proposals. Its keys and values lie in pages of its own of the same
//! numbers, so that prefixes, forks and preemption are those of the model. What lies there may be wrong, where pages went from one
//! sequence to another: then proposals are rejected, and no answer changes.
//!
//! A module of multi-token prediction stands at a position for the model's hidden state there and the token behind: it is one token ahead. What
//! it computed of proposals, from its own states, it computes again from the model's once they are tokens of the answer.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};

use super::plan::{Row, StepPlan};
use super::{Scheduler, Sequence, SequenceId};
use crate::pages::Page;

/// What the draft model has computed of a sequence.
#[derive(Debug, Default)]
struct Known {
    /// Tokens, and those that it guessed behind them.
    computed: usize,
    guessed: Vec<u32>,
    /// The page of the last of all these.
    last: Option<Page>,
    /// Of each full page what hashes all tokens up to its end.
    chains: Vec<u64>,
}

/// Proposals in the making.
#[derive(Debug)]
struct Draft {
    id: SequenceId,
    most: usize,
    /// Tokens computed, proposed ones among them; pages before this one are noted.
    computed: usize,
    noted: usize,
    proposed: Vec<u32>,
    /// Whether there are more in this step.
    done: bool,
}

/// The draft model's side of the scheduler.
#[derive(Debug)]
pub struct Drafting {
    plan: StepPlan,
    /// Tokens of a step, and positions of a sequence.
    tokens: usize,
    positions: usize,
    page_size: usize,
    /// How many tokens a position's token is ahead of it: 1 of a module.
    ahead: usize,
    known: HashMap<SequenceId, Known>,
    /// What full pages hold, by the hash of all tokens up to their end.
    held: Vec<Option<u64>>,
    hasher: RandomState,
    drafts: Vec<Draft>,
}

impl Drafting {
    /// For a draft model whose plan has one program for prompts and answers, with so many tokens a step, positions, and pages of a size.
    pub fn new(plan: StepPlan, [tokens, positions, pages, page_size]: [usize; 4]) -> Drafting {
        let (known, hasher) = (HashMap::new(), RandomState::new());
        let held = vec![None; pages];
        let ahead = usize::from(plan.entries.iter().any(|entry| entry.batch.is_module()));
        Drafting { plan, tokens, positions, page_size, ahead, known, held, hasher, drafts: vec![] }
    }

    /// Begins with the sequences that may be proposed something.
    pub fn begin(&mut self, scheduler: &mut Scheduler) {
        self.known.retain(|id, _| scheduler.get(*id).is_some());
        self.drafts.clear();
        for (id, most) in scheduler.drafted(self.positions) {
            let Some(sequence) = scheduler.get(id) else { continue };
            let [computed, noted] = self.computed(sequence);
            let proposed = Vec::with_capacity(most);
            self.drafts.push(Draft { id, most, computed, noted, proposed, done: false });
        }
    }

    /// Leading tokens of a sequence that need not be computed, but for the last; and pages whose content is noted.
    fn computed(&mut self, sequence: &Sequence) -> [usize; 2] {
        let (tokens, [pages, _], size) = (&sequence.tokens, sequence.tables.pages(), self.page_size);
        let last = tokens.len().saturating_sub(1 + self.ahead);
        let known = self.known.entry(sequence.id).or_default();
        for page in known.chains.len()..tokens.len() / size {
            let before = page.checked_sub(1).map(|page| known.chains[page]);
            known.chains.push(self.hasher.hash_one((before, tokens.page(page))));
        }
        let holds = |(page, chain): &(&Page, &u64)| self.held.get(**page as usize) == Some(&Some(**chain));
        let noted = pages.iter().zip(&known.chains).take_while(holds).count();
        let guessed = known.guessed.iter().zip(known.computed..tokens.len()).take_while(|_| self.ahead == 0);
        let agreed = known.computed + guessed.take_while(|(guess, at)| tokens.get(*at) == **guess).count();
        let end = (known.computed + known.guessed.len()).saturating_sub(1) / size;
        let same = known.last.is_some() && pages.get(end).copied() == known.last;
        [(noted * size).max(if same { agreed } else { 0 }).min(last), noted]
    }

    /// What the draft model computes next; nothing when all is proposed. Where it draws its tokens, logits are not read.
    pub fn next(&mut self, scheduler: &Scheduler, drawn: bool) -> Option<&StepPlan> {
        let ahead = self.ahead;
        let entry = self.plan.entries.first_mut()?;
        entry.rows.clear();
        let mut budget = self.tokens;
        for draft in self.drafts.iter().filter(|d| !d.done && d.proposed.len() < d.most) {
            let Some(sequence) = scheduler.get(draft.id) else { continue };
            let length = sequence.tokens.len() - ahead + draft.proposed.len();
            let tokens = (length - draft.computed).min(budget);
            let at = draft.computed + tokens;
            let complete = at == length;
            if tokens > 0 {
                let id = draft.id;
                let read = complete && !drawn;
                entry.rows.push(Row { id, tokens, at, complete, read, proposed: None, drawn });
            }
            budget -= tokens;
        }
        entry.batch.reset_for(entry.rows.len());
        let mut drafts = self.drafts.iter();
        for row in &entry.rows {
            let (sequence, draft) = scheduler.get(row.id).zip(drafts.find(|d| d.id == row.id))?;
            let (first, length, [pages, _]) =
                (draft.computed, sequence.tokens.len(), sequence.tables.pages());
            let token = |at: usize| match at.checked_sub(length) {
                Some(guess) => draft.proposed[guess],
                None => sequence.tokens.get(at),
            };
            entry.batch.append((first + ahead..row.at + ahead).map(token), first, [pages, &[]], None);
            if ahead > 0 && row.complete {
                entry.batch.keep_next(row.at, pages);
            }
            for page in &pages[first / self.page_size..row.at.div_ceil(self.page_size)] {
                self.held[*page as usize] = None;
            }
        }
        (!entry.rows.is_empty()).then_some(&self.plan)
    }

    /// Takes what the draft model would say behind each row, in their order, if it says anything. Of a row that is not complete it counts for
    /// nothing.
    pub fn take(&mut self, tokens: &[Option<u32>]) {
        let rows = self.plan.entries.iter().flat_map(|entry| &entry.rows);
        let mut drafts = self.drafts.iter_mut();
        for (row, token) in rows.zip(tokens) {
            let Some(draft) = drafts.find(|d| d.id == row.id) else { return };
            draft.computed += row.tokens;
            draft.done = !row.complete || token.is_none();
            draft.proposed.extend(token.filter(|_| row.complete));
        }
    }

    /// Gives the proposals to the scheduler, and notes what is computed.
    pub fn end(&mut self, scheduler: &mut Scheduler) {
        for Draft { id, computed, noted, proposed, .. } in self.drafts.drain(..) {
            let Some((sequence, known)) = scheduler.get(id).zip(self.known.get_mut(&id)) else { continue };
            let (length, [pages, _]) = (sequence.tokens.len(), sequence.tables.pages());
            known.computed = computed.min(length - self.ahead);
            known.guessed = proposed[..computed - known.computed].to_vec();
            known.last = computed.checked_sub(1).and_then(|at| pages.get(at / self.page_size)).copied();
            let full = known.computed / self.page_size;
            for (page, chain) in pages.iter().zip(&known.chains).take(full).skip(noted) {
                self.held[*page as usize] = Some(*chain);
            }
            scheduler.suggest(id, proposed);
        }
    }
}
