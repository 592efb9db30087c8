//! The step plan: which program of the model computes which tokens of which sequences in one step. In: from the model, the
//! programs it has; from the scheduler, rows. Out: for the model, pages to copy and a batch for each of its programs; for the engine,
//! the rows whose logits are sampled.

use astrai_builders::config::Pooling;
use astrai_ir::ops::Drawing;

use super::SequenceId;
use super::batch::StepBatch;
use crate::pages::Page;

/// Which tokens a program computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramKind {
    /// Tokens of prompts and of outputs, side by side in one batch.
    Mixed,
    /// Tokens of prompts, in chunks.
    Prefill,
    /// Tokens of outputs, at most as many in a step as there may be sequences.
    Decode,
    /// Tokens of texts of which a vector is wanted; in place of logits it gives what the vector is made of.
    Embed(Embedding),
}

/// What a program gives of each row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Embedding {
    /// The final hidden state of the row's last token, or the mean over the row's tokens.
    pub pooling: Pooling,
    /// Numbers of a vector.
    pub width: usize,
    /// Whether a text is computed in one step, because every token sees all others.
    pub whole: bool,
}

impl ProgramKind {
    /// Whether the program computes tokens of prompts.
    pub fn prefills(self) -> bool {
        matches!(self, ProgramKind::Mixed | ProgramKind::Prefill)
    }

    /// Whether the program computes tokens of outputs.
    pub fn decodes(self) -> bool {
        matches!(self, ProgramKind::Mixed | ProgramKind::Decode)
    }
}

/// What a program gave of a row, and which program.
pub type Given<'a, 'm> = (ProgramKind, &'a Row, &'m mut [f32]);

/// What a step does for one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The sequence.
    pub id: SequenceId,
    /// Tokens computed.
    pub tokens: usize,
    /// Tokens of the sequence up to the last of these: the place of the next one.
    pub at: usize,
    /// Whether these are all that the sequence has, so that the row's logits are those of its next token and are sampled.
    pub complete: bool,
    /// Whether the row's logits are read: sampled, or the prompt's next token scored by them.
    pub read: bool,
    /// The row's only token where it is proposed and not sampled yet. Such rows stand behind the complete row of their sequence;
    /// their logits count if sampling gives what is proposed.
    pub proposed: Option<u32>,
    /// Whether the model draws the row's token; its logits are not read then.
    pub drawn: bool,
}

/// What one program computes in a step; nothing while it has no rows.
#[derive(Clone, Debug)]
pub struct StepEntry {
    /// Which tokens the program computes.
    pub kind: ProgramKind,
    /// One row a sequence and one a proposed token, in the order of the batch.
    pub rows: Vec<Row>,
    /// The program's inputs for these rows.
    pub batch: StepBatch,
    /// Tokens that the entry may still take in this step.
    pub(super) room: usize,
}

impl StepEntry {
    /// An entry without rows; `batch` is an empty one in the form that the program takes.
    pub fn new(kind: ProgramKind, batch: StepBatch) -> StepEntry {
        StepEntry { kind, rows: Vec::new(), batch, room: 0 }
    }
}

/// One entry for each program of a model, in the order in which the programs run. Refilled in place from step to step.
#[derive(Clone, Debug)]
pub struct StepPlan {
    pub(super) entries: Vec<StepEntry>,
    pub(super) copies: [Vec<(Page, Page)>; 2],
}

impl StepPlan {
    /// A plan of these programs, in the order in which they run.
    pub fn new(entries: Vec<StepEntry>) -> StepPlan {
        StepPlan { entries, copies: Default::default() }
    }

    /// All entries, those without rows among them.
    pub fn entries(&self) -> &[StepEntry] {
        &self.entries
    }

    /// Pages that are copied before anything is computed, each pair's first to its second, in this order: those of all layers, and those
    /// of windowed layers.
    pub fn copies(&self) -> &[Vec<(Page, Page)>; 2] {
        &self.copies
    }

    /// The rows of all entries, in the order of the entries.
    pub fn rows(&self) -> impl Iterator<Item = &Row> {
        self.entries.iter().flat_map(|entry| &entry.rows)
    }

    /// Lets the model draw the tokens of those complete rows of which this says how. A row behind which tokens are proposed is not asked about:
    /// what comes after it hangs on its token.
    pub(super) fn draw(&mut self, mut how: impl FnMut(&Row) -> Option<Drawing>) {
        for entry in self.entries.iter_mut().filter(|e| !matches!(e.kind, ProgramKind::Embed(_))) {
            for i in 0..entry.rows.len() {
                let proposes = entry.rows[i..].iter().take(2).any(|row| row.proposed.is_some());
                let row = &mut entry.rows[i];
                if let Some(drawing) = Some(&*row).filter(|row| row.complete && !proposes).and_then(&mut how)
                {
                    entry.batch.draw(i, &drawing);
                    (row.drawn, row.read) = (true, false);
                }
            }
        }
    }

    /// Tokens computed by all entries.
    pub fn tokens(&self) -> usize {
        self.rows().map(|row| row.tokens).sum()
    }

    /// Whether there is a program for every token, of prompts and of outputs: the model gives answers.
    pub fn answers(&self) -> bool {
        self.entries.iter().any(|e| e.kind.prefills()) && self.entries.iter().any(|e| e.kind.decodes())
    }

    /// Whether outputs are computed by another program than prompts, and so with other rounding.
    pub fn separates_decode(&self) -> bool {
        self.entries.iter().any(|e| e.kind == ProgramKind::Decode)
    }

    /// What the program gives that makes vectors, if there is one.
    pub fn embedding(&self) -> Option<Embedding> {
        self.entries.iter().find_map(|e| match e.kind {
            ProgramKind::Embed(embedding) => Some(embedding),
            _ => None,
        })
    }
}
