//! A compiled model behind the engine: paged attention over the KV cache. In: sessions of paged programs and their pages. Out:
//! logits of each step, where the sessions left them.
//!
//! Where another form of the model is cheaper for decode than for chunked prefill (latent attention with absorbed weights), the
//! model has a program of decode beside the program of prefill, made for as many tokens as there may be sequences. A token's
//! numbers still follow from the tokens before it, the prompt's length and nothing else, because which program computes a token
//! is a property of the token: prefill computes those of prompts, in whatever chunks; decode computes those of outputs, however
//! many go in a step: one of each sequence, or, when a sequence was preempted and is computed anew, several. A step that has
//! both kinds launches both programs, prefill first. The programs' numbers differ by rounding, and so do an output as it was
//! decoded and the same text as part of the next prompt; the prefix cache (see [`pages`](crate::pages)) therefore gives pages
//! only to sequences for which the same program would compute them.

use std::sync::Arc;

use crate::engine::{Factor, Model, ModelError, PageStorage, Patch, Sizes};
use crate::scheduler::batch::StepBatch;
use crate::scheduler::plan::{ProgramKind, StepEntry, StepPlan};
use astrai_builders::Cache;
use astrai_runtime::Threads;
use astrai_runtime::{Buffers, Session};

/// Sessions of a model's programs over the same paged keys and values.
pub struct PagedModel {
    programs: Vec<(ProgramKind, Session)>,
    cache: Cache,
    sizes: Sizes,
    storage: PageStorage,
    /// The memory of adapters, and how many there may be.
    adapters: Option<(Buffers, usize)>,
}

impl PagedModel {
    /// A model of `vocabulary` tokens and `positions`, whose programs take so many `tokens` and `sequences` a step; one of decode
    /// takes as many tokens as there may be sequences. The sessions were opened over the pages, and run in this order.
    pub fn new(
        programs: Vec<(ProgramKind, Session)>,
        cache: Cache,
        [vocabulary, positions, tokens, sequences]: [usize; 4],
    ) -> PagedModel {
        let sizes = Sizes {
            vocabulary,
            page_size: cache.page,
            pages: cache.pages,
            windows: cache.windows,
            positions: positions.min(cache.table * cache.page),
            tokens,
            sequences,
        };
        PagedModel { programs, cache, sizes, storage: PageStorage::default(), adapters: None }
    }

    /// The same whose pages hold what has this name, in so many bytes each and all together.
    pub fn holding(self, name: &'static str, [bytes, all]: [u64; 2]) -> PagedModel {
        PagedModel { storage: PageStorage { name, tokens: self.cache.page, bytes, all }, ..self }
    }

    /// The same with so many slots for adapters, whose states are in these buffers.
    pub fn with_adapters(self, adapters: Option<(Buffers, usize)>) -> PagedModel {
        PagedModel { adapters, ..self }
    }
}

impl Model for PagedModel {
    fn sizes(&self) -> Sizes {
        self.sizes
    }

    fn page_storage(&self) -> PageStorage {
        self.storage
    }

    fn plan(&self) -> StepPlan {
        let Cache { page, table, .. } = self.cache;
        let entry = |(kind, session): &(ProgramKind, Session)| {
            StepEntry::new(*kind, StepBatch::of_program(session.inputs(), page, table))
        };
        StepPlan::new(self.programs.iter().map(entry).collect())
    }

    fn pool(&self) -> Option<Arc<dyn Threads>> {
        let (_, session) = self.programs.first()?;
        Some(session.device().clone())
    }

    fn adapt(&mut self, slot: usize, patch: &Patch) -> Result<(), ModelError> {
        let Some((buffers, slots)) = self.adapters.as_ref().filter(|(_, slots)| slot < *slots) else {
            return Err("the model has no such slot for an adapter".into());
        };
        for Factor { state, bytes } in &patch.factors {
            let written = buffers.write(state, |all| {
                let part = all.len() / slots;
                let to = all.get_mut(slot * part..).and_then(|to| to.get_mut(..part));
                to.filter(|to| to.len() == bytes.len()).map(|to| to.copy_from_slice(bytes))
            })?;
            written.ok_or_else(|| format!("`{state}` of a slot does not have {} bytes", bytes.len()))?;
        }
        Ok(())
    }

    fn lost(&self) -> bool {
        self.programs.iter().any(|(_, session)| session.is_poisoned())
    }

    fn draws(&self) -> bool {
        let mut answering = self.programs.iter().filter(|(kind, _)| !matches!(kind, ProgramKind::Embed(_)));
        answering.all(|(_, session)| session.program().graph.output(TOKENS).is_some())
    }

    fn step<'m>(&'m mut self, plan: &StepPlan, logits: &mut Vec<&'m mut [f32]>) -> Result<(), ModelError> {
        self.step_drawing(plan, logits, &mut Vec::new())
    }

    fn step_drawing<'m>(
        &'m mut self,
        plan: &StepPlan,
        logits: &mut Vec<&'m mut [f32]>,
        tokens: &mut Vec<i32>,
    ) -> Result<(), ModelError> {
        let windows = self.cache.windows.map_or(0, |w| w.pages);
        for (pairs, (pages, windowed)) in
            plan.copies().iter().zip([(self.cache.pages, false), (windows, true)])
        {
            if let (false, Some((_, session))) = (pairs.is_empty(), self.programs.first()) {
                let pairs: Vec<_> = pairs.iter().map(|&(from, to)| (from as usize, to as usize)).collect();
                let these =
                    |state: &str| state.starts_with("kv.") && state.starts_with(Cache::WINDOWED) == windowed;
                session.copy_parts(&these, pages, &pairs)?;
            }
        }
        for ((_, session), entry) in self.programs.iter_mut().zip(plan.entries()) {
            if !entry.rows.is_empty() {
                logits.push(run(session, entry, tokens)?);
            }
        }
        Ok(())
    }
}

/// The name of the result that holds drawn tokens.
pub const TOKENS: &str = "tokens";

/// The logits of an entry's rows, `[sequences, vocabulary]`; those of rows that are not read hold anything. Where the program draws tokens,
/// these are added, and from a device's own memory come no logits of rows that it draws.
fn run<'m>(
    session: &'m mut Session,
    entry: &StepEntry,
    tokens: &mut Vec<i32>,
) -> Result<&'m mut [f32], ModelError> {
    let inputs = entry.batch.inputs(session.inputs());
    session.execute_rows(&inputs, Some(&|row| entry.rows.get(row).is_some_and(|r| r.read)))?;
    match session.result_of(TOKENS) {
        Some(drawn) => tokens.extend(drawn.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b))),
        None => tokens.extend(entry.rows.iter().map(|_| -1)),
    }
    let logits = session.floats_mut(0);
    Ok(logits
        .ok_or("the program's first result is not the logits, of f32; this is a defect, please report it")?)
}
