//! The two ends of one request's events. The engine holds a [`Ticket`]: however it goes away, by an answer, an error or a
//! panic, the other end gets exactly one last event. The client holds a [`Stream`]: dropping it cancels the request.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

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
}

/// What a request took: tokens, and time in the queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// In the prompt.
    pub prompt: usize,
    /// Of these, found in the prefix cache by the first choice.
    pub cached: usize,
    /// Sampled, over all choices.
    pub output: usize,
    /// From the submission until the first choice ran.
    pub queued: Duration,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// Each choice has finished, or was stopped by the client.
    Finished(Usage),
    /// The client cancelled it.
    Cancelled(Usage),
    /// It could not be answered; one line says why.
    Failed(String),
}

/// What one step did for a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// New tokens, at most one of each choice.
    pub updates: Vec<Update>,
    /// Set in the last event, and only there.
    pub end: Option<End>,
}

/// A place in the queue, from the submission until the first choice runs.
#[derive(Debug)]
pub(super) struct Place(pub Arc<Shared>, pub Instant);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.leave_queue();
    }
}

/// The engine's end.
#[derive(Debug)]
pub(super) struct Ticket {
    events: UnboundedSender<Event>,
    shared: Arc<Shared>,
    ended: bool,
}

impl Ticket {
    /// Whether nobody listens any more.
    pub fn is_closed(&self) -> bool {
        self.events.is_closed()
    }

    pub fn send(&mut self, updates: Vec<Update>) {
        // Whoever does not listen is cancelled by the next step.
        let _ = self.events.send(Event { updates, end: None });
    }

    pub fn end(mut self, updates: Vec<Update>, end: End) {
        self.ended = true;
        let _ = self.events.send(Event { updates, end: Some(end) });
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.ended {
            let why = self.shared.dead().unwrap_or("the engine has stopped").to_string();
            let _ = self.events.send(Event { updates: Vec::new(), end: Some(End::Failed(why)) });
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

pub(super) fn connect(request: u64, shared: &Arc<Shared>, commands: Sender<Command>) -> (Ticket, Stream) {
    let (sender, events) = unbounded_channel();
    let ticket = Ticket { events: sender, shared: shared.clone(), ended: false };
    (ticket, Stream { request, events, commands })
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
