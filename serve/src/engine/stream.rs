//! The two ends of one request's events. The engine holds a [`Emitter`]: however it goes away, by an answer, an error or a
//! panic, the other end gets exactly one last event. The client holds a [`Stream`]: dropping it cancels the request.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, error::TryRecvError, unbounded_channel};

use super::handle::{Command, Shared};
use crate::sample::Logprobs;

/// Why a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model's own end of text, which is the token with it.
    Eos,
    /// One of the request's stop ids, which is the token with it.
    StopId(u32),
    /// The request's grammar lets nothing follow.
    Complete,
    /// `max_tokens`, or the context, is used up.
    Length,
}

/// A token of one choice.
#[derive(Clone, Debug, PartialEq)]
pub struct Update {
    /// The choice, from 0.
    pub index: u32,
    /// The token, also if it ended the choice.
    pub token: u32,
    /// As asked for.
    pub logprobs: Option<Logprobs>,
    /// Set with the choice's last token.
    pub finish: Option<Finish>,
    /// Of the prompt's tokens that were to be scored; with the first token.
    pub prompt: Vec<Logprobs>,
}

/// Tokens of a request, and how long they took. All times are from the submission on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// In the prompt.
    pub prompt: usize,
    /// Of these, found in the prefix cache by the first choice.
    pub cached: usize,
    /// Sampled, over all choices.
    pub output: usize,
    /// Until its first choice ran; zero if none did.
    pub queued: Duration,
    /// Until its first token was there.
    pub first_token: Option<Duration>,
    /// Until its last token was there.
    pub last_token: Option<Duration>,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// Each choice has finished, or was stopped by the client.
    Finished(Usage),
    /// The client cancelled it.
    Cancelled(Usage),
    /// What it asks for leaves no token that may come; one line says why.
    Refused(String),
    /// It could not be answered; one line says why.
    Failed(String),
}

/// What one step did for a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// New tokens; several of a choice, in order, where some were proposed and accepted.
    pub updates: Vec<Update>,
    /// The prompt's vector, if it was wanted: of length 1, with the last event.
    pub vector: Option<Vec<f32>>,
    /// Set in the last event, and only there.
    pub end: Option<End>,
}

/// What a request's choices take, from its submission to the end of each: a place in the queue, then a sequence.
#[derive(Debug)]
pub(super) struct Permits {
    pub shared: Arc<Shared>,
    pub queued: usize,
    pub running: usize,
    /// Of the prompt, until a choice runs.
    pub tokens: usize,
}

impl Permits {
    /// One choice waits no longer: it runs.
    pub fn run(&mut self) {
        if self.queued > 0 {
            self.queued -= 1;
            self.running += 1;
            self.shared.run(std::mem::take(&mut self.tokens));
        }
    }

    /// One choice has ended, that had run or had not.
    pub fn end(&mut self, ran: bool) {
        let kind = if ran { &mut self.running } else { &mut self.queued };
        if *kind > 0 {
            *kind -= 1;
            self.shared.leave(usize::from(!ran), 0, usize::from(ran));
        }
    }
}

impl Drop for Permits {
    fn drop(&mut self) {
        self.shared.leave(self.queued, self.tokens, self.running);
    }
}

/// The engine's end.
#[derive(Debug)]
pub(super) struct Emitter {
    events: UnboundedSender<Event>,
    shared: Arc<Shared>,
    ended: bool,
    /// Goes with the last event.
    pub vector: Option<Vec<f32>>,
}

impl Emitter {
    /// Whether nobody listens any more.
    pub fn is_closed(&self) -> bool {
        self.events.is_closed()
    }

    pub fn send(&mut self, updates: Vec<Update>) {
        // Whoever does not listen is cancelled by the next step.
        let _ = self.events.send(Event { updates, vector: None, end: None });
    }

    pub fn end(mut self, updates: Vec<Update>, end: End) {
        self.ended = true;
        let _ = self.events.send(Event { updates, vector: self.vector.take(), end: Some(end) });
    }
}

impl Drop for Emitter {
    fn drop(&mut self) {
        if !self.ended {
            let why = self.shared.dead().unwrap_or("the engine has stopped").to_string();
            let _ =
                self.events.send(Event { updates: Vec::new(), vector: None, end: Some(End::Failed(why)) });
        }
    }
}

/// The client's end of a request. Dropping it cancels the request within one step.
#[derive(Debug)]
pub struct Stream {
    request: u64,
    events: UnboundedReceiver<Event>,
    commands: Sender<Command>,
}

pub(super) fn connect(request: u64, shared: &Arc<Shared>, commands: Sender<Command>) -> (Emitter, Stream) {
    let (sender, events) = unbounded_channel();
    let emitter = Emitter { events: sender, shared: shared.clone(), ended: false, vector: None };
    (emitter, Stream { request, events, commands })
}

impl Stream {
    /// Number of the request, unique in the engine.
    pub fn request(&self) -> u64 {
        self.request
    }

    /// The next event; nothing after the last. May be dropped and called anew.
    pub async fn recv(&mut self) -> Option<Event> {
        self.events.recv().await
    }

    /// The same for a thread that may wait. Panics within an asynchronous runtime.
    pub fn blocking_recv(&mut self) -> Option<Event> {
        self.events.blocking_recv()
    }

    /// The next event if there is one by now.
    ///
    /// # Errors
    /// There is none yet, or there will be none.
    pub fn try_recv(&mut self) -> Result<Event, TryRecvError> {
        self.events.try_recv()
    }

    /// Ends one choice, as by a stop string found in its text. When no choice is left, the request has finished.
    pub fn stop(&self, index: u32) {
        // An engine that is gone has sent its last event.
        let _ = self.commands.send(Command::Stop { request: self.request, index });
    }

    /// Ends the request; the last event comes within one step.
    pub fn cancel(&self) {
        let _ = self.commands.send(Command::Cancel { request: self.request });
    }
}
