//! One turn of the engine after the other: commands, a plan, a step, samples, events. Everything here runs on the
//! engine's thread.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvError};
use std::time::Instant;

use super::handle::{Command, Shared, Stats};
use super::stream::{End, Finish, Place, Ticket, Update, Usage};
use super::{Model, Settings, Sizes};
use crate::pages::Secret;
use crate::request::{Request, Sampling};
use crate::sample::{History, Sampler};
use crate::scheduler::{Arrival, Bounds, Scheduler, SequenceId};

/// A request in the engine.
struct Active {
    ticket: Ticket,
    /// Given up when the first choice runs.
    place: Option<Place>,
    sampling: Sampling,
    /// By index; none when it has ended.
    choices: Vec<Option<Choice>>,
    usage: Usage,
    /// What this step gave.
    updates: Vec<Update>,
    failure: Option<String>,
}

struct Choice {
    id: SequenceId,
    history: History,
}

impl Active {
    fn is_over(&self) -> bool {
        self.failure.is_some() || self.choices.iter().all(Option::is_none)
    }
}

/// The engine's state.
pub(super) struct Core<M> {
    model: M,
    vocabulary: usize,
    scheduler: Scheduler,
    sampler: Sampler,
    eos: Vec<u32>,
    /// By number, so that everything happens in one order.
    requests: BTreeMap<u64, Active>,
    tokens: Vec<Option<u32>>,
    /// Requests to which this step gave something.
    touched: Vec<u64>,
    /// Requests whose streams are still to be told that they ended.
    ended: Vec<(Ticket, Vec<Update>, End)>,
    /// Set when no more requests come; what is left at the time is ended.
    draining: Option<Option<Instant>>,
    /// Draws seeds for requests that bring none.
    seeds: RandomState,
    shared: Arc<Shared>,
    stats: Stats,
}

impl<M: Model> Core<M> {
    pub fn new(
        model: M,
        sizes: Sizes,
        settings: &Settings,
        secret: Option<Secret>,
        shared: Arc<Shared>,
    ) -> Core<M> {
        let Sizes { page_size, pages, tokens, sequences, vocabulary, .. } = sizes;
        let scheduler = Scheduler::new(Bounds { page_size, pages, tokens, sequences }, secret);
        let stats = Stats { pages, pages_free: pages, ..Stats::default() };
        shared.publish(stats);
        Core {
            model,
            vocabulary,
            scheduler,
            sampler: Sampler::default(),
            eos: settings.eos.clone(),
            requests: BTreeMap::new(),
            tokens: Vec::new(),
            touched: Vec::new(),
            ended: Vec::new(),
            draining: None,
            seeds: RandomState::new(),
            shared,
            stats,
        }
    }

    pub fn shared(&self) -> Arc<Shared> {
        self.shared.clone()
    }

    /// Commands, then a step if there is work; waits only if there is none. `false` when all is done.
    pub fn turn(&mut self, commands: &Receiver<Command>) -> Result<bool, String> {
        if self.requests.is_empty() {
            if self.draining.is_some() {
                return Ok(false);
            }
            match commands.recv() {
                Ok(command) => self.obey(command),
                Err(RecvError) => return Ok(false),
            }
        }
        // It cannot be disconnected: every stream holds a way to it.
        while let Ok(command) = commands.try_recv() {
            self.obey(command);
        }
        self.drop_unheard();
        if let Some(Some(until)) = self.draining
            && Instant::now() >= until
        {
            self.fail_all("the server is shutting down");
        }
        if !self.ended.is_empty() {
            self.publish();
        }
        if !self.requests.is_empty() {
            self.step()?;
        }
        self.publish();
        Ok(true)
    }

    /// Ends every request, for one reason.
    pub fn fail_all(&mut self, why: &str) {
        let all: Vec<u64> = self.requests.keys().copied().collect();
        all.into_iter().for_each(|r| self.end(r, End::Failed(why.into())));
        self.publish();
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit { request, body, ticket, place } => self.begin(request, *body, ticket, place),
            Command::Stop { request, index } => {
                let Some(active) = self.requests.get_mut(&request) else { return };
                let choice = active.choices.get_mut(index as usize).and_then(Option::take);
                choice.iter().for_each(|c| self.scheduler.remove(c.id));
                if active.is_over() {
                    let usage = active.usage;
                    self.end(request, End::Finished(usage));
                }
            }
            Command::Cancel { request } => self.cancel(request),
            Command::Drain { until } => self.draining = Some(until),
        }
    }

    fn begin(&mut self, request: u64, body: Request, ticket: Ticket, place: Place) {
        let Request { prompt, n, priority, salt, sampling } = body;
        let seed = sampling.seed.unwrap_or_else(|| self.seeds.hash_one(request));
        let mut ends = sampling.stop_ids.clone();
        if !sampling.ignore_eos {
            ends.extend_from_slice(&self.eos);
        }
        let choices = (0..n).map(|index| {
            let history = History::new(&sampling, &prompt, seed, index, ends.clone());
            let arrival = Arrival { request, index, priority, prompt: prompt.clone(), salt: salt.clone() };
            Some(Choice { id: self.scheduler.add(arrival), history })
        });
        let choices = choices.collect();
        let usage = Usage { prompt: prompt.len(), ..Usage::default() };
        let updates = Vec::new();
        let active = Active { ticket, place: Some(place), sampling, choices, usage, updates, failure: None };
        self.requests.insert(request, active);
    }

    fn cancel(&mut self, request: u64) {
        if let Some(active) = self.requests.get(&request) {
            let usage = active.usage;
            self.end(request, End::Cancelled(usage));
        }
    }

    fn drop_unheard(&mut self) {
        let unheard = self.requests.iter().filter(|(_, a)| a.ticket.is_closed()).map(|(r, _)| *r);
        let unheard: Vec<u64> = unheard.collect();
        unheard.into_iter().for_each(|r| self.cancel(r));
    }

    /// Takes a request out; its stream is told with the next publication.
    fn end(&mut self, request: u64, end: End) {
        let Some(active) = self.requests.remove(&request) else { return };
        active.choices.iter().flatten().for_each(|c| self.scheduler.remove(c.id));
        match end {
            End::Finished(_) => self.stats.finished += 1,
            End::Cancelled(_) => self.stats.cancelled += 1,
            End::Failed(_) => self.stats.failed += 1,
        }
        self.ended.push((active.ticket, active.updates, end));
    }

    fn step(&mut self) -> Result<(), String> {
        let Some(batch) = self.scheduler.plan() else {
            return Err("the scheduler has sequences but no step for them; please report this".into());
        };
        let logits = self.model.step(batch).map_err(|e| format!("the model failed: {e}"))?;
        let (rows, vocabulary) = (self.scheduler.rows(), self.vocabulary);
        if logits.len() != rows.len() * vocabulary {
            let n = rows.len();
            return Err(format!("the model gave {} logits, not {n} rows of {vocabulary}", logits.len()));
        }
        self.tokens.clear();
        self.touched.clear();
        for (row, logits) in rows.iter().zip(logits.chunks_exact_mut(vocabulary)) {
            let active = self.requests.get_mut(&row.id.request);
            let Some(active) = active else {
                return Err("a sequence without a request; please report this".into());
            };
            if let Some(place) = active.place.take() {
                active.usage.queued = place.1.elapsed();
                self.stats.prompt_tokens += active.usage.prompt as u64;
                active.usage.cached = self.scheduler.cached(row.id).unwrap_or(0);
            }
            let token =
                row.complete.then(|| sample(&mut self.sampler, active, row.id, logits, &self.eos)).flatten();
            if (token.is_some() || active.failure.is_some()) && self.touched.last() != Some(&row.id.request) {
                self.touched.push(row.id.request);
            }
            self.stats.output_tokens += u64::from(token.is_some());
            self.tokens.push(token);
        }
        self.scheduler.complete(&self.tokens);
        self.stats.steps += 1;
        self.tell();
        Ok(())
    }

    /// Sends what the step gave, and ends what it ended.
    fn tell(&mut self) {
        // A request's rows need not be neighbours when some of its choices decode and others do not.
        self.touched.sort_unstable();
        self.touched.dedup();
        for request in std::mem::take(&mut self.touched) {
            let Some(active) = self.requests.get_mut(&request) else { continue };
            for update in active.updates.iter().filter(|u| u.finish.is_some()) {
                let choice = active.choices[update.index as usize].take();
                choice.iter().for_each(|c| self.scheduler.remove(c.id));
            }
            let usage = active.usage;
            match (active.failure.take(), active.is_over()) {
                (Some(why), _) => self.end(request, End::Failed(why)),
                (None, true) => self.end(request, End::Finished(usage)),
                (None, false) => {
                    let updates = std::mem::take(&mut active.updates);
                    active.ticket.send(updates);
                }
            }
        }
    }

    /// Publishes the state, then tells who ended: whoever hears of its end finds it in the state.
    fn publish(&mut self) {
        self.stats.running = self.scheduler.running();
        self.stats.waiting = self.scheduler.waiting();
        self.stats.pages_free = self.scheduler.pages().free();
        self.stats.pages_cached = self.scheduler.pages().cached();
        self.stats.scheduler = self.scheduler.counters();
        self.shared.publish(self.stats);
        self.ended.drain(..).for_each(|(ticket, updates, end)| ticket.end(updates, end));
    }
}

/// Samples for one choice, noting what its request will be told.
fn sample(
    sampler: &mut Sampler,
    active: &mut Active,
    id: SequenceId,
    logits: &mut [f32],
    eos: &[u32],
) -> Option<u32> {
    let choice = active.choices.get_mut(id.index as usize)?.as_mut()?;
    let sampled = match sampler.sample(logits, &active.sampling, &mut choice.history) {
        Ok(sampled) => sampled,
        Err(wrong) => {
            active.failure = Some(wrong.to_string());
            return None;
        }
    };
    let token = sampled.token;
    let ends = choice.history.ends().contains(&token);
    let full = active.sampling.max_tokens.is_some_and(|most| choice.history.generated() >= most);
    let finish = match ends {
        true if active.sampling.stop_ids.contains(&token) && !eos.contains(&token) => {
            Some(Finish::StopId(token))
        }
        true if active.sampling.ignore_eos => Some(Finish::StopId(token)),
        true => Some(Finish::Eos),
        false => full.then_some(Finish::Length),
    };
    active.usage.output += 1;
    active.updates.push(Update { index: id.index, token, logprobs: sampled.logprobs, finish });
    Some(token)
}
