//! The engine: one thread that owns a model and steps it as long as somebody waits for tokens. In: requests through a
//! [`Handle`]. Out: for each an own [`Stream`] of events, at most one a step, and exactly one last. One request cannot harm
//! another: what fails for one (logits that are NaN) ends that one, and a step of the model that fails, by an error or a panic, ends those in it.
//! Only a lost device, three such steps in a row, or a panic of the engine itself ends the engine: all requests are told why, and so is
//! everybody who submits afterwards.

mod active;
mod adapters;
mod core;
mod draft;
mod draw;
mod embed;
mod fair;
mod handle;
mod masks;
mod model;
mod stream;
#[cfg(test)]
mod tests;

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use self::core::Core;
use self::draft::Drafter;
use self::model::message;
use crate::pages::Secret;
use crate::request::Limits;
use handle::{Command, Shared};

pub use adapters::{AdapterId, Factor, Patch};
pub use draft::DraftModel;
pub use handle::{Handle, Stats, SubmitError};
pub use model::{Model, ModelError, PageStorage, Sizes};
pub use stream::{End, Event, Finish, Stream, Update, Usage};

/// What is said of a model that gives no vectors.
pub const NO_VECTORS: &str =
    "the server was started without vectors; start it with --embeddings last or mean";

/// How to run an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Ids that end a text.
    pub eos: Vec<u32>,
    /// Choices of requests that may wait beyond those for which a sequence is free; a request that comes when none wait
    /// may have more.
    pub queue: usize,
    /// Tokens of prompts that may wait so, at most; none for any.
    pub queue_tokens: Option<usize>,
    /// Sequences of a step, at most; none for as many as the model takes.
    pub sequences: Option<usize>,
    /// Tokens of a step, at most; none for as many as the model takes.
    pub tokens: Option<usize>,
    /// Whether full pages are kept and found again by what they hold.
    pub prefix_cache: bool,
    /// Tokens that are proposed for an answer in one step by what it said before, at most, and verified by the model; 0 for none.
    /// They take rows that the model has and no sequence uses.
    pub proposed: usize,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            eos: Vec::new(),
            queue: 256,
            queue_tokens: None,
            sequences: None,
            tokens: None,
            prefix_cache: true,
            proposed: 0,
        }
    }
}

/// Why an engine does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Sizes or settings that allow nothing, in one line.
    #[error("{0}")]
    Settings(String),
    /// No thread for it.
    #[error("the engine's thread did not start: {0}")]
    Thread(#[from] io::Error),
}

/// A running engine. Dropping it cancels what runs.
#[derive(Debug)]
pub struct Engine {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Starts the thread. It ends by [`Engine::drain`], by a failure of the model, or when the engine is dropped.
    ///
    /// # Errors
    /// The sizes or settings allow no step, or there is no thread.
    pub fn start(model: impl Model + Send + 'static, settings: &Settings) -> Result<Engine, StartError> {
        Engine::start_drafted(model, None, settings)
    }

    /// The same with a draft model that proposes tokens, over pages of its own of the same numbers.
    ///
    /// # Errors
    /// Also where the draft model has another vocabulary, other pages, or several programs.
    pub fn start_drafted(
        model: impl Model + Send + 'static,
        draft: Option<DraftModel>,
        settings: &Settings,
    ) -> Result<Engine, StartError> {
        let sizes = limit(model.sizes(), settings).map_err(StartError::Settings)?;
        let plan = model.plan();
        if let Some(draft) = &draft {
            let (own, program) = (draft.sizes(), draft.plan());
            let of_pages = |s: &Sizes| [s.vocabulary, s.page_size, s.pages];
            if of_pages(&own) != of_pages(&sizes)
                || own.windows.is_some()
                || own.sequences < sizes.sequences
                || !program.answers()
                || program.entries().len() != 1
            {
                let line = format!("the draft model does not go with the model: {own:?} beside {sizes:?}");
                return Err(StartError::Settings(line));
            }
        }
        if !plan.answers() && plan.embedding().is_none() {
            return Err(StartError::Settings(
                "the model has no program for prefill, or none for decode".into(),
            ));
        }
        let limits = Limits { vocabulary: sizes.vocabulary, context: sizes.context() };
        let shared = Arc::new(Shared::new(limits, &plan, settings, sizes.sequences));
        let (commands, received) = channel();
        let core = Core::new(model, sizes, settings, settings.prefix_cache.then(draw_secret), shared.clone())
            .drafted(draft.map(Drafter::new));
        let thread = Builder::new().name("engine".into()).spawn(move || run(core, &received))?;
        Ok(Engine { handle: Handle { shared, commands }, thread: Some(thread) })
    }

    /// A way to submit requests.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Takes no more requests, finishes those there are, and ends. What is not finished after the patience is ended as
    /// failed; without a patience there is no end to it.
    pub fn drain(mut self, patience: Option<Duration>) {
        self.end(patience.and_then(|p| Instant::now().checked_add(p)));
    }

    fn end(&mut self, until: Option<Instant>) {
        // After a failure nobody receives this, and everybody has been told.
        let _ = self.handle.commands.send(Command::Drain { until });
        self.handle.shared.drain();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.end(Some(Instant::now()));
    }
}

/// The model's sizes within the settings.
fn limit(mut sizes: Sizes, settings: &Settings) -> Result<Sizes, String> {
    for (name, most, set) in [
        ("sequences", &mut sizes.sequences, settings.sequences),
        ("tokens", &mut sizes.tokens, settings.tokens),
    ] {
        if let Some(n) = set.filter(|n| n > most) {
            return Err(format!("{n} {name} a step are more than the {most} the model was compiled for"));
        }
        *most = set.unwrap_or(*most);
    }
    let Sizes { vocabulary, page_size, pages, windows, positions, tokens, sequences } = sizes;
    if [vocabulary, page_size, pages, positions, tokens, sequences, settings.queue].contains(&0) {
        return Err(format!("nothing of the engine's sizes may be 0: {sizes:?}, queue {}", settings.queue));
    }
    if tokens < sequences {
        return Err(format!(
            "{tokens} tokens a step are too few for {sequences} sequences; one each is the least"
        ));
    }
    // What a window and a step need, wherever in their pages they begin.
    if let Some(w) = windows.filter(|w| w.window == 0 || w.pages < (w.window + tokens) / page_size + 2) {
        return Err(format!("{w:?} are too few for steps of {tokens} tokens in pages of {page_size}"));
    }
    let slots = pages.checked_mul(page_size).filter(|n| i32::try_from(*n).is_ok());
    if slots.is_none() || i32::try_from(vocabulary).is_err() {
        return Err(format!(
            "{pages} pages of {page_size} tokens, or {vocabulary} ids, exceed 32-bit indices"
        ));
    }
    match settings.eos.iter().find(|id| **id as usize >= vocabulary) {
        Some(id) => Err(format!("eos: token {id} is not among the model's {vocabulary} ids")),
        None => Ok(sizes),
    }
}

/// From the keys the standard library draws for its hash tables.
fn draw_secret() -> Secret {
    let mut secret = [0; 32];
    for (i, part) in secret.chunks_mut(8).enumerate() {
        part.copy_from_slice(&RandomState::new().hash_one(i).to_le_bytes());
    }
    secret
}

fn run<M: Model>(mut core: Core<M>, commands: &Receiver<Command>) {
    let failed = loop {
        match catch_unwind(AssertUnwindSafe(|| core.run_once(commands))) {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) => return,
            Ok(Err(why)) => break why,
            Err(panic) => break format!("the engine panicked: {}", message(panic.as_ref())),
        }
    };
    core.shared().die(failed.clone());
    // Requests that this does not reach, because of another panic, are told by their emitters.
    let _ = catch_unwind(AssertUnwindSafe(move || core.fail_all(&failed)));
}
