//! What the rest of the process holds of an engine: the way to submit, and what can be known without asking its thread.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use tokio::sync::oneshot;

use super::adapters::{AdapterId, Patch, Written};
use super::stream::{Emitter, Permits, Stream, connect};
use super::{NO_VECTORS, PageStorage, Settings};
use crate::request::{Limits, Request, RequestError};
use crate::scheduler::Counters;
use crate::scheduler::plan::StepPlan;

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// It cannot be answered as it is (HTTP 400).
    #[error(transparent)]
    Invalid(#[from] RequestError),
    /// As many wait as may (HTTP 429).
    #[error("the queue of {0} answers has no room for this; try again later")]
    Busy(usize),
    /// The prompts of those that wait have as many tokens as they may (HTTP 429).
    #[error("the queue of {0} tokens has no room for this; try again later")]
    Full(usize),
    /// The engine finishes what it has and takes nothing new (HTTP 503).
    #[error("the server is shutting down")]
    Draining,
    /// The engine has failed (HTTP 503).
    #[error("{0}")]
    Dead(String),
}

/// What the engine's thread is told.
#[derive(Debug)]
pub(super) enum Command {
    Submit { request: u64, body: Box<Request>, emitter: Emitter, permits: Permits, at: Instant },
    Stop { request: u64, index: u32 },
    Cancel { request: u64 },
    Adapt { adapter: AdapterId, patch: Arc<Patch>, written: Written },
    Drain { until: Option<Instant> },
}

/// The state of an engine, for metrics and health.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Choices of requests that have not run yet, also those that the engine has not seen yet.
    pub queued: usize,
    /// Sequences that run.
    pub running: usize,
    /// Sequences that wait, preempted ones among them.
    pub waiting: usize,
    /// Pages of the KV state.
    pub pages: usize,
    /// How these are stored.
    pub page: PageStorage,
    /// Of these, pages that nobody uses and nothing is known of.
    pub pages_free: usize,
    /// Of these, pages that nobody uses but the prefix cache knows.
    pub pages_cached: usize,
    /// Steps so far.
    pub steps: u64,
    /// Steps that failed, and with them the requests in them.
    pub failed_steps: u64,
    /// Steps that went without proposals because the draft model failed.
    pub failed_drafts: u64,
    /// Tokens of prompts of admitted requests.
    pub prompt_tokens: u64,
    /// Tokens sampled.
    pub output_tokens: u64,
    /// Requests that ended well.
    pub finished: u64,
    /// Requests their clients gave up.
    pub cancelled: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Counters of the scheduler.
    pub scheduler: Counters,
}

impl Stats {
    /// The part of the KV state that running sequences have, from 0 to 1.
    pub fn kv_use(&self) -> f64 {
        let used = self.pages.saturating_sub(self.pages_free + self.pages_cached);
        used as f64 / self.pages.max(1) as f64
    }
}

/// Choices of requests, from their submission to their end.
#[derive(Clone, Copy, Debug, Default)]
struct Occupancy {
    /// These have not run yet.
    queued: usize,
    /// Tokens of the prompts of requests of which none has.
    tokens: usize,
    /// These have, and hold a sequence.
    running: usize,
}

/// What both sides see.
#[derive(Debug)]
pub(super) struct Shared {
    pub limits: Limits,
    /// Whether there are answers.
    answers: bool,
    /// Numbers of a vector, where there are vectors.
    embedding: Option<usize>,
    eos: Vec<u32>,
    queue: usize,
    queue_tokens: Option<usize>,
    /// Sequences of a step, at most.
    sequences: usize,
    occupancy: Mutex<Occupancy>,
    next: AtomicU64,
    draining: AtomicBool,
    dead: OnceLock<String>,
    stats: Mutex<Stats>,
}

impl Shared {
    pub fn new(limits: Limits, plan: &StepPlan, settings: &Settings, sequences: usize) -> Shared {
        Shared {
            limits,
            answers: plan.answers(),
            embedding: plan.embedding().map(|e| e.width),
            eos: settings.eos.clone(),
            queue: settings.queue,
            queue_tokens: settings.queue_tokens,
            sequences,
            occupancy: Mutex::default(),
            next: AtomicU64::new(0),
            draining: AtomicBool::new(false),
            dead: OnceLock::new(),
            stats: Mutex::default(),
        }
    }

    fn occupancy(&self) -> MutexGuard<'_, Occupancy> {
        self.occupancy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Permits for the choices of requests, together: as many as the queue has beyond the sequences that are free, or any
    /// number when nobody waits. The engine fills free sequences at its next step, so that whoever is to have one does not wait.
    fn reserve(self: &Arc<Shared>, requests: &[Request]) -> Result<Vec<Permits>, SubmitError> {
        let of = |r: &Request| (r.n as usize, r.prompt.len());
        let (choices, tokens) = requests.iter().map(of).fold((0, 0), |(n, t), (m, u)| (n + m, t + u));
        let mut occupancy = self.occupancy();
        let free = self.sequences.saturating_sub(occupancy.running);
        if occupancy.queued > 0 && occupancy.queued + choices > self.queue + free {
            return Err(SubmitError::Busy(self.queue));
        }
        let full = |most: &usize| occupancy.queued > 0 && occupancy.tokens + tokens > *most;
        if let Some(most) = self.queue_tokens.filter(full) {
            return Err(SubmitError::Full(most));
        }
        occupancy.queued += choices;
        occupancy.tokens += tokens;
        drop(occupancy);
        let permits = |(queued, tokens)| Permits { shared: self.clone(), queued, running: 0, tokens };
        Ok(requests.iter().map(of).map(permits).collect())
    }

    /// A choice runs now, the first of a prompt of so many tokens or, with 0, another.
    pub fn run(&self, tokens: usize) {
        let mut occupancy = self.occupancy();
        occupancy.queued -= 1;
        occupancy.tokens -= tokens;
        occupancy.running += 1;
    }

    /// So many that waited, with so many tokens, and so many that ran, have ended.
    pub fn leave(&self, queued: usize, tokens: usize, running: usize) {
        let mut occupancy = self.occupancy();
        occupancy.queued -= queued;
        occupancy.tokens -= tokens;
        occupancy.running -= running;
    }

    pub fn dead(&self) -> Option<&str> {
        self.dead.get().map(String::as_str)
    }

    pub fn die(&self, why: String) {
        // The first reason is the cause, later ones its consequences.
        let _ = self.dead.set(why);
    }

    pub fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    pub fn publish(&self, stats: Stats) {
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner) = stats;
    }
}

/// A way to the engine, for any number of threads.
#[derive(Clone, Debug)]
pub struct Handle {
    pub(super) shared: Arc<Shared>,
    pub(super) commands: Sender<Command>,
}

impl Handle {
    /// Hands a request to the engine. Its events come through the stream, the last of them exactly once.
    ///
    /// # Errors
    /// The request is invalid, too many wait, or the engine takes none (any more).
    pub fn submit(&self, request: Request) -> Result<Stream, SubmitError> {
        let mut streams = self.submit_all(vec![request])?;
        streams.pop().ok_or(SubmitError::Draining)
    }

    /// The same for requests that are taken all, or none of them: together they are never too many where nobody waits.
    ///
    /// # Errors
    /// As [`submit`](Self::submit), of any of them.
    pub fn submit_all(&self, requests: Vec<Request>) -> Result<Vec<Stream>, SubmitError> {
        if let Some(why) = self.shared.dead() {
            return Err(SubmitError::Dead(why.into()));
        }
        if self.shared.draining.load(Ordering::Acquire) {
            return Err(SubmitError::Draining);
        }
        let checked = requests.into_iter().map(|request| {
            let missing = match request.embed {
                true if self.embedding().is_none() => Some(NO_VECTORS),
                false if !self.shared.answers => {
                    Some("is an encoder, which gives vectors and no answers; use /v1/embeddings")
                }
                _ => None,
            };
            match missing {
                Some(message) => Err(RequestError { param: "model", message: message.into() }),
                None => request.checked(self.shared.limits),
            }
        });
        let requests = checked.collect::<Result<Vec<Request>, RequestError>>()?;
        let permits = self.shared.reserve(&requests)?;
        requests.into_iter().zip(permits).map(|(body, permits)| self.send(Box::new(body), permits)).collect()
    }

    fn send(&self, body: Box<Request>, permits: Permits) -> Result<Stream, SubmitError> {
        let request = self.shared.next.fetch_add(1, Ordering::Relaxed);
        let (emitter, stream) = connect(request, &self.shared, self.commands.clone());
        let command = Command::Submit { request, body, emitter, permits, at: Instant::now() };
        // The thread may end at any moment; a command it never reads ends its request as it is dropped.
        match self.commands.send(command) {
            Ok(()) => Ok(stream),
            Err(_) => {
                Err(self.shared.dead().map_or(SubmitError::Draining, |why| SubmitError::Dead(why.into())))
            }
        }
    }

    /// Has the model's slot for an adapter written, once no request uses what it held; says when that is done, or why it is not. Where
    /// the engine ends before, there is no word.
    pub fn adapt(&self, adapter: AdapterId, patch: Patch) -> oneshot::Receiver<Result<(), String>> {
        let (written, done) = oneshot::channel();
        // An engine that has ended drops the command, which closes the channel.
        let _ = self.commands.send(Command::Adapt { adapter, patch: Arc::new(patch), written });
        done
    }

    /// What requests are held to.
    pub fn limits(&self) -> Limits {
        self.shared.limits
    }

    /// Numbers of a text's vector; none where the model gives no vectors.
    pub fn embedding(&self) -> Option<usize> {
        self.shared.embedding
    }

    /// Ids that end a text.
    pub fn eos(&self) -> &[u32] {
        &self.shared.eos
    }

    /// The state after the last step.
    pub fn stats(&self) -> Stats {
        let stats = *self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner);
        Stats { queued: self.shared.occupancy().queued, ..stats }
    }

    /// Why the engine is dead, if it is.
    pub fn dead(&self) -> Option<&str> {
        self.shared.dead()
    }

    /// Whether the engine takes requests.
    pub fn is_ready(&self) -> bool {
        self.dead().is_none() && !self.shared.draining.load(Ordering::Acquire)
    }
}
