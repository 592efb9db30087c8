//! A compiled model behind the engine. In: a session of a paged program and its pages. Out: logits of each step, where the
//! session left them.

use std::sync::Arc;

use crate::engine::{Model, ModelError, Sizes};
use crate::scheduler::batch::StepBatch;
use astrai_builders::Cache;
use astrai_runtime::Session;
use astrai_runtime::pool::Pool;

/// A session of a program over paged keys and values.
pub struct PagedModel {
    session: Session,
    cache: Cache,
    sizes: Sizes,
    latents: bool,
}

impl PagedModel {
    /// A model of `vocabulary` tokens and `positions`, whose program takes so many `tokens` and `sequences` a step. The
    /// session was opened over the pages.
    pub fn new(
        session: Session,
        cache: Cache,
        [vocabulary, positions, tokens, sequences]: [usize; 4],
    ) -> PagedModel {
        let sizes = Sizes {
            vocabulary,
            page_size: cache.page,
            pages: cache.pages,
            positions: positions.min(cache.table * cache.page),
            tokens,
            sequences,
        };
        let latents = session.inputs().iter().any(|(name, _)| name == "pages");
        PagedModel { session, cache, sizes, latents }
    }
}

impl Model for PagedModel {
    fn sizes(&self) -> Sizes {
        self.sizes
    }

    fn table(&self) -> usize {
        self.cache.table
    }

    fn latents(&self) -> bool {
        self.latents
    }

    fn pool(&self) -> Option<Arc<Pool>> {
        Some(self.session.pool().clone())
    }

    fn step(&mut self, batch: &StepBatch) -> Result<&mut [f32], ModelError> {
        let all = batch.all();
        let given = if self.latents { &all[..] } else { &all[..all.len() - 1] };
        self.session.execute(given)?;
        let logits = self.session.floats_mut(0);
        Ok(logits.ok_or(
            "the program's first result is not the logits, of f32; this is a defect, please report it",
        )?)
    }
}
