//! What the engine asks of a model: a step of many sequences over a paged KV state. Everything around it is written against
//! this, and tested with a model that needs no weights.

use std::error::Error;
use std::sync::Arc;

use astrai_runtime::Threads;

use crate::scheduler::batch::StepBatch;

/// Why a step failed. The engine does not go on after it: what the KV state holds is unknown then.
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
    /// Positions of a sequence.
    pub positions: usize,
    /// Tokens of a step.
    pub tokens: usize,
    /// Sequences of a step.
    pub sequences: usize,
}

impl Sizes {
    /// Tokens one sequence may have: its positions, and as many as all pages hold.
    pub fn context(&self) -> usize {
        self.positions.min(self.pages.saturating_mul(self.page_size))
    }
}

/// A model with its KV state.
pub trait Model {
    /// What it was compiled for; never changes.
    fn sizes(&self) -> Sizes;

    /// Width of the page tables that [`step`](Self::step) is given: at least the pages of all positions.
    fn table(&self) -> usize {
        let Sizes { positions, page_size, .. } = self.sizes();
        positions.div_ceil(page_size.max(1))
    }

    /// True when pages hold latents: steps then list the pages in use.
    fn latents(&self) -> bool {
        false
    }

    /// True when tokens of answers are computed by a program of their own, apart from those of prompts: see
    /// [`step`](Self::step).
    fn apart(&self) -> bool {
        false
    }

    /// The threads it runs on, if there are any: they idle while tokens are sampled, and may help.
    fn pool(&self) -> Option<Arc<dyn Threads>> {
        None
    }

    /// Computes the tokens of two batches, the first before the second, writing their keys and values to their slots. The second
    /// has tokens of answers, at most as many as there may be sequences, and is empty where [`apart`](Self::apart) is false;
    /// where it is true, the first has tokens of prompts only. One of them may be empty. Gives for each batch the logits of each
    /// sequence's last token, `[sequences, vocabulary]`, which the engine may overwrite.
    ///
    /// # Errors
    /// The step could not be computed; the model is not asked again.
    fn step(&mut self, batches: [&StepBatch; 2]) -> Result<[&mut [f32]; 2], ModelError>;
}
