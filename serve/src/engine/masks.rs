//! What may come next in answers that are held to a grammar, found on threads of its own while the model computes. In: guides, before a
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

/// Finds masks.
#[derive(Debug)]
pub(super) struct Masks {
    jobs: Sender<Wanted>,
    waiting: Arc<Mutex<Receiver<Wanted>>>,
    found: Receiver<Found>,
    tell: Sender<Found>,
    /// Guides that are out.
    out: usize,
    threads: usize,
    /// Threads, at most; the system is asked once, since asking reads files.
    most: usize,
}

impl Masks {
    /// Without threads yet: most engines never need one.
    pub fn new() -> Masks {
        let (jobs, waiting) = channel();
        let (tell, found) = channel();
        let most = std::thread::available_parallelism().map_or(1, usize::from).min(MOST);
        Masks { jobs, waiting: Arc::new(Mutex::new(waiting)), found, tell, out: 0, threads: 0, most }
    }

    /// Begins with a guide.
    pub fn begin(&mut self, id: SequenceId, guide: Box<Guide>) {
        self.out += 1;
        if self.threads < self.out.min(self.most) && self.start() {
            self.threads += 1;
        }
        if self.threads == 0 {
            // No thread is to be had: this one does it.
            let _ = self.tell.send(find(id, guide));
        } else if let Err(lost) = self.jobs.send((id, guide)) {
            let _ = self.tell.send(find(lost.0.0, lost.0.1));
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
                let job = waiting.lock().unwrap_or_else(PoisonError::into_inner).recv();
                // The engine has ended.
                let Ok((id, guide)) = job else { return };
                if tell.send(find(id, guide)).is_err() {
                    return;
                }
            }
        };
        Builder::new().name("masks".into()).spawn(work).is_ok()
    }
}

/// Finds what a guide allows.
pub(super) fn find(id: SequenceId, mut guide: Box<Guide>) -> Found {
    let found = guarded(|| {
        let allowed = guide.allowed();
        (guide, allowed)
    });
    match found {
        Ok((guide, allowed)) => (id, Some(guide), allowed),
        Err(_) => (id, None, Err("the grammar failed; please report this".into())),
    }
}
