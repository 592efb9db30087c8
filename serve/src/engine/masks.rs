//! What may come next in answers that are held to a grammar, found on threads of its own while the model computes, where there are cores for
//! these. In: guides, before a
//! step. Out: the same guides with what each allows, after it.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;

use astrai_files::guarded;

use crate::grammar::{Allowed, Guide};
use crate::scheduler::SequenceId;

/// Threads, at most; the model wants the processor at the same time.
const MOST: usize = 4;

/// A guide that went through, with what it allows; none if it was lost.
pub(super) type Found = (SequenceId, Option<Box<Guide>>, Result<Allowed, String>);

/// A guide whose mask is wanted.
type Wanted = (SequenceId, Box<Guide>);

/// Guides of a step that no thread has taken yet. Each thread hears of them once: to wake it for every guide would cost as much as a mask.
type Step = Arc<Mutex<Vec<Wanted>>>;

/// Finds masks.
#[derive(Debug)]
pub(super) struct Masks {
    /// Of the coming step.
    wanted: Vec<Wanted>,
    steps: Sender<Step>,
    waiting: Arc<Mutex<Receiver<Step>>>,
    found: Receiver<Found>,
    tell: Sender<Found>,
    /// Guides that are out.
    out: usize,
    threads: usize,
    /// Threads that there can be at once; the system is asked once, since asking reads files.
    cores: usize,
}

impl Masks {
    /// Without threads yet: most engines never need one.
    pub fn new() -> Masks {
        let (steps, waiting) = channel();
        let (tell, found) = channel();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let waiting = Arc::new(Mutex::new(waiting));
        Masks { wanted: Vec::new(), steps, waiting, found, tell, out: 0, threads: 0, cores }
    }

    /// Whether masks are found while a model computes on so many threads: one that has every core would wait for its own threads, which
    /// masks had driven from theirs; then whoever draws finds them, on all of these.
    pub fn beside(&self, threads: usize) -> bool {
        threads < self.cores
    }

    /// Notes a guide of the coming step.
    pub fn want(&mut self, id: SequenceId, guide: Box<Guide>) {
        self.wanted.push((id, guide));
    }

    /// Begins with all that were noted.
    pub fn begin(&mut self) {
        if self.wanted.is_empty() {
            return;
        }
        self.out += self.wanted.len();
        let helpers = self.wanted.len().min(self.cores).min(MOST);
        while self.threads < helpers && self.start() {
            self.threads += 1;
        }
        let step: Step = Arc::new(Mutex::new(std::mem::take(&mut self.wanted)));
        let told = (0..helpers.min(self.threads)).filter(|_| self.steps.send(step.clone()).is_ok()).count();
        if told == 0 {
            // No thread is to be had: this one does it.
            work_off(&step, &self.tell);
        }
    }

    /// Waits for one that was begun; nothing if none is left.
    pub fn next(&mut self) -> Option<Found> {
        self.out = self.out.checked_sub(1)?;
        self.found.recv().ok()
    }

    fn start(&self) -> bool {
        let (waiting, tell) = (self.waiting.clone(), self.tell.clone());
        let work = move || {
            loop {
                let step = waiting.lock().unwrap_or_else(PoisonError::into_inner).recv();
                // The engine has ended.
                let Ok(step) = step else { return };
                work_off(&step, &tell);
            }
        };
        Builder::new().name("masks".into()).spawn(work).is_ok()
    }
}

/// Takes guides of a step until there are none left.
fn work_off(step: &Step, tell: &Sender<Found>) {
    loop {
        let next = step.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let Some((id, guide)) = next else { return };
        // Nobody hears it when the engine has ended.
        let _ = tell.send(find(id, guide, None));
    }
}

/// Finds what a guide allows: all, for one who says the likeliest token and may.
pub(super) fn find(id: SequenceId, mut guide: Box<Guide>, likeliest: Option<u32>) -> Found {
    let found = guarded(|| {
        let free = likeliest.is_some_and(|token| guide.admits(token));
        let allowed = if free { Ok(Allowed::All) } else { guide.allowed() };
        (guide, allowed)
    });
    match found {
        Ok((guide, allowed)) => (id, Some(guide), allowed),
        Err(_) => (id, None, Err("the grammar failed; please report this".into())),
    }
}
