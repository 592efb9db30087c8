//! Proposed tokens in a step. In: what sequences have left of it. Out: rows behind those of their sequences, and nothing of what was
//! rejected when the step is over.

use super::plan::Row;
use super::{Bounds, Scheduler, SequenceId};

/// What a step has left for proposed tokens.
pub(super) struct Spare {
    rows: usize,
}

impl Scheduler {
    /// What the coming step can give to proposed tokens: nothing while somebody waits, and never what others will want of it.
    pub(super) fn spare(&self) -> Spare {
        let (Bounds { tokens, rows, proposed, .. }, running) = (self.bounds, self.running.len());
        if proposed == 0 || !self.waiting.is_empty() {
            return Spare { rows: 0 };
        }
        let wanted: usize = self.running.iter().map(|&slot| self.remaining(slot)).sum();
        Spare { rows: rows.saturating_sub(running).min(tokens.saturating_sub(wanted)) }
    }

    /// Proposes what may come behind the newest token of a sequence, whose row is the last of its entry.
    pub(super) fn propose(&mut self, slot: u32, spare: &mut Spare, budget: &mut usize) {
        if spare.rows == 0 {
            return;
        }
        let Some(sequence) = &mut self.slots[slot as usize] else { return };
        let length = sequence.tokens.len();
        let decodes = sequence.computed + 1 == length && sequence.computed >= sequence.tokens.prompt();
        let Some(entry) = self.plan.entries.iter_mut().find(|e| e.kind.decodes()).filter(|_| decodes) else {
            return;
        };
        let most = sequence.most.saturating_sub(length + 1);
        let most = most.min(self.bounds.proposed).min(spare.rows).min(entry.room);
        let suggested = std::mem::take(&mut sequence.proposer.suggested);
        let proposed = match self.drafts {
            Some(_) => &suggested[..suggested.len().min(most)],
            None => sequence.proposer.propose(&sequence.tokens, most),
        };
        let all = [sequence.computed, length + proposed.len()];
        let others = self.running.len();
        if !self.pages.fits(&sequence.tables, all, others) || !self.pages.grow(&mut sequence.tables, all) {
            return;
        }
        let row = Row {
            id: sequence.id,
            tokens: 1,
            at: length,
            complete: true,
            read: true,
            proposed: None,
            drawn: false,
        };
        let rows =
            (1..).zip(proposed).map(|(i, &token)| Row { at: length + i, proposed: Some(token), ..row });
        entry.rows.extend(rows);
        spare.rows -= proposed.len();
        entry.room -= proposed.len();
        *budget -= proposed.len();
    }

    /// Sequences for which a draft model is to propose tokens, and how many of those whose positions it has: they get pages for these.
    pub(super) fn drafted(&mut self, positions: usize) -> Vec<(SequenceId, usize)> {
        let (mut spare, others, mut found) = (self.spare(), self.running.len(), Vec::new());
        for &slot in &self.running {
            let Some(sequence) = &mut self.slots[slot as usize] else { continue };
            let (length, computed) = (sequence.tokens.len(), sequence.computed);
            if spare.rows == 0 || computed + 1 != length || computed < sequence.tokens.prompt() {
                continue;
            }
            let most = sequence.most.saturating_sub(length + 1).min(positions.saturating_sub(length));
            let most = sequence.proposer.worth(most.min(self.bounds.proposed).min(spare.rows));
            let all = [computed, length + most];
            if most > 0
                && self.pages.fits(&sequence.tables, all, others)
                && self.pages.grow(&mut sequence.tables, all)
            {
                spare.rows -= most;
                self.proposing.push(sequence.id);
                found.push((sequence.id, most));
            }
        }
        found
    }

    /// Notes what a draft model proposes for the coming step.
    pub(super) fn suggest(&mut self, id: SequenceId, tokens: Vec<u32>) {
        if let Some(Some(sequence)) = self.slots.get_mut(id.slot as usize) {
            sequence.proposer.suggested = tokens;
        }
    }

    /// Proposals are a draft model's from now on, each of which costs this part of a step.
    pub fn drafts_cost(&mut self, part: f32) {
        self.drafts = Some(part);
    }

    /// Takes back what rejected proposals hold, and lets proposers learn from the step.
    pub(super) fn settle(&mut self) {
        for id in self.proposing.drain(..) {
            let Some(Some(sequence)) = self.slots.get_mut(id.slot as usize) else { continue };
            sequence.proposer.suggested.clear();
            let [proposed, accepted] =
                sequence.proposer.learn(&mut self.experience, self.drafts.unwrap_or(0.0));
            self.counters.proposed += proposed;
            self.counters.accepted += accepted;
            self.pages.truncate(&mut sequence.tables, sequence.tokens.len());
        }
    }
}
