//! A compiled model behind the engine. In: sessions of paged programs and their pages. Out: logits of each step, where the
//! sessions left them.
//!
//! Where another form of the model is cheaper for one token of each sequence than for chunks of prompts (latent attention whose
//! queries go to the latents), there is a second program, made for as many tokens as there may be sequences. What is promised
//! does not hang on it: a token's numbers follow from the tokens before it, the prompt's length and nothing else. For that, which
//! program computes a token is a property of the token. Those of prompts are computed by the first, in whatever chunks; those of
//! answers by the second, however many go in a step: one of each sequence, or, when a sequence lost its pages and comes again,
//! several. A step that has both kinds launches both programs, prompts first. Between the programs' numbers lies rounding, and so
//! it does between an answer as it was decoded and the same text as part of the next prompt; pages are therefore found again
//! (see [`pages`](crate::pages)) only for tokens that the same program would compute.

use std::sync::Arc;

use crate::engine::{Model, ModelError, Sizes};
use crate::scheduler::batch::StepBatch;
use astrai_builders::Cache;
use astrai_runtime::Session;
use astrai_runtime::Threads;

/// Sessions of one or two programs over the same paged keys and values.
pub struct PagedModel {
    session: Session,
    /// Of the program for tokens of answers.
    answers: Option<Session>,
    cache: Cache,
    sizes: Sizes,
    latents: bool,
}

impl PagedModel {
    /// A model of `vocabulary` tokens and `positions`, whose program takes so many `tokens` and `sequences` a step. The
    /// session was opened over the pages, as was the one of a program for tokens of answers, which takes as many as there may be
    /// sequences.
    pub fn new(
        session: Session,
        answers: Option<Session>,
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
        PagedModel { session, answers, cache, sizes, latents }
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

    fn apart(&self) -> bool {
        self.answers.is_some()
    }

    fn pool(&self) -> Option<Arc<dyn Threads>> {
        Some(self.session.device().clone())
    }

    fn step(&mut self, [prompts, answers]: [&StepBatch; 2]) -> Result<[&mut [f32]; 2], ModelError> {
        let latents = self.latents;
        let first = run(&mut self.session, prompts, latents)?;
        let second = match &mut self.answers {
            Some(session) => run(session, answers, latents)?,
            None => &mut [],
        };
        Ok([first, second])
    }
}

/// The logits of a batch; none of an empty one.
fn run<'a>(session: &'a mut Session, batch: &StepBatch, latents: bool) -> Result<&'a mut [f32], ModelError> {
    if batch.sequences() == 0 {
        return Ok(&mut []);
    }
    let all = batch.all();
    let given = if latents { &all[..] } else { &all[..all.len() - 1] };
    session.execute(given)?;
    let logits = session.floats_mut(0);
    Ok(logits
        .ok_or("the program's first result is not the logits, of f32; this is a defect, please report it")?)
}
