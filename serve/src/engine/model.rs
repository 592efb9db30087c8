//! What the engine asks of a model: a step of many sequences over a paged KV state. Everything around it is written against
//! this, and tested with a model that needs no weights.

use std::any::Any;
use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use astrai_builders::Windows;
use astrai_runtime::Threads;

use super::adapters::Patch;
use crate::scheduler::batch::StepBatch;
use crate::scheduler::plan::{Given, ProgramKind, StepEntry, StepPlan};

/// Why a step failed, a panic among the reasons. What the pages of its rows hold is unknown then; the engine ends their requests, and goes on with others.
pub type ModelError = Box<dyn Error + Send + Sync>;

/// What a model was compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Logits of a token.
    pub vocabulary: usize,
    /// Tokens a page of the KV state holds.
    pub page_size: usize,
    /// Pages of the KV state.
    pub pages: usize,
    /// Pages of windowed layers, where they have their own.
    pub windows: Option<Windows>,
    /// Positions of a sequence.
    pub positions: usize,
    /// Tokens of a step.
    pub tokens: usize,
    /// Sequences of a step; of one that verifies proposed tokens, each of which stands in the batch as one, with them.
    pub sequences: usize,
}

impl Sizes {
    /// Tokens one sequence may have: its positions, and as many as all pages hold.
    pub fn context(&self) -> usize {
        self.positions.min(self.pages.saturating_mul(self.page_size))
    }
}

/// How the KV state is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageStorage {
    /// Type of numbers, or what they are codes of.
    pub name: &'static str,
    /// Tokens of a page.
    pub tokens: usize,
    /// Bytes of a page, scales of codes among them.
    pub bytes: u64,
    /// Bytes of all pages: of windowed layers those that these have.
    pub all: u64,
}

/// A model with its KV state.
pub trait Model {
    /// What it was compiled for; never changes.
    fn sizes(&self) -> Sizes;

    /// How its pages are stored; never changes.
    fn page_storage(&self) -> PageStorage {
        PageStorage::default()
    }

    /// The programs it has, as a plan without rows: an entry for each, in the order in which they run, whose batch has the form
    /// that the program takes. Without other word, one program for prefill and decode, with tables of all positions' pages.
    fn plan(&self) -> StepPlan {
        let Sizes { positions, page_size, .. } = self.sizes();
        let batch = StepBatch::new(page_size, positions.div_ceil(page_size.max(1)));
        StepPlan::new(vec![StepEntry::new(ProgramKind::Mixed, batch)])
    }

    /// The threads it runs on, if there are any: they idle while tokens are sampled, and may help.
    fn pool(&self) -> Option<Arc<dyn Threads>> {
        None
    }

    /// Writes what one of its slots for adapters holds.
    ///
    /// # Errors
    /// There is no such slot, or it cannot be written; what it holds is unknown then.
    fn adapt(&mut self, _slot: usize, _patch: &Patch) -> Result<(), ModelError> {
        Err("the model has no room for adapters".into())
    }

    /// Copies the plan's pages, then computes its entries that have rows, in order, writing their keys and values to their slots; the plan has the
    /// entries of [`plan`](Self::plan). Adds to `logits`, for each entry that has rows, the logits of each row's last token,
    /// `[rows, vocabulary]`, which the engine may overwrite; of a program that makes vectors, what they are made of, `[rows, width]`.
    ///
    /// # Errors
    /// The step could not be computed, and has written to no page but those of its rows. The model is not asked again when it is [`lost`](Self::lost), or
    /// after three in a row.
    fn step<'m>(&'m mut self, plan: &StepPlan, logits: &mut Vec<&'m mut [f32]>) -> Result<(), ModelError>;

    /// Whether a step failed so that no other can be computed: the device is lost, say.
    fn lost(&self) -> bool {
        false
    }

    /// Whether [`step_drawing`](Self::step_drawing) draws tokens; never changes.
    fn draws(&self) -> bool {
        false
    }

    /// The same as [`step`](Self::step), which also draws the tokens of the rows that the plan leaves to the model; their logits hold anything.
    /// Adds to `tokens` one for each row of all entries, -1 where the logits are no distribution; those of other rows hold anything.
    ///
    /// # Errors
    /// As of [`step`](Self::step).
    fn step_drawing<'m>(
        &'m mut self,
        plan: &StepPlan,
        logits: &mut Vec<&'m mut [f32]>,
        _tokens: &mut Vec<i32>,
    ) -> Result<(), ModelError> {
        self.step(plan, logits)
    }
}

/// What a step gave: logits of each program that ran, and the tokens that the model drew.
pub(super) type Stepped<'m> = (Vec<&'m mut [f32]>, Vec<i32>);

/// [`Model::step_drawing`], of which a panic is an error as well: whatever it left half done lies in the pages of the step's rows.
///
/// # Errors
/// As of the step, or it panicked.
pub(super) fn step_guarded<'m, M: Model + ?Sized>(
    model: &'m mut M,
    plan: &StepPlan,
) -> Result<Stepped<'m>, ModelError> {
    let stepped = catch_unwind(AssertUnwindSafe(move || {
        // The model is moved in, for what the step gives borrows it.
        let (model, mut logits, mut tokens) = (model, Vec::with_capacity(plan.entries().len()), Vec::new());
        model.step_drawing(plan, &mut logits, &mut tokens).map(|()| (logits, tokens))
    }));
    stepped.unwrap_or_else(|panic| Err(format!("a step panicked: {}", message(panic.as_ref())).into()))
}

/// What a panic says.
pub(super) fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

/// What the model gave, with its program and row.
pub(super) fn by_row<'a, 'm>(
    plan: &'a StepPlan,
    outputs: Vec<&'m mut [f32]>,
    vocabulary: usize,
) -> Result<Vec<Given<'a, 'm>>, String> {
    let ran = plan.entries().iter().filter(|entry| !entry.rows.is_empty());
    let (programs, given) = (ran.clone().count(), outputs.len());
    if programs != given {
        return Err(format!("the model gave {given} outputs of {programs} programs"));
    }
    let mut all = Vec::with_capacity(plan.rows().count());
    for (entry, output) in ran.zip(outputs) {
        let width = match entry.kind {
            ProgramKind::Embed(embedding) => embedding.width,
            _ => vocabulary,
        };
        let (rows, given) = (entry.rows.len(), output.len());
        if given != rows * width {
            return Err(format!("the model gave {given} numbers, not {rows} rows of {width}"));
        }
        let each = entry.rows.iter().zip(output.chunks_exact_mut(width));
        all.extend(each.map(|(row, output)| (entry.kind, row, output)));
    }
    Ok(all)
}
