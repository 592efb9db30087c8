//! The engine's loop: commands, a plan, a step, samples, events. Everything here runs on the
//! engine's thread.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::mpsc::{Receiver, RecvError};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use astrai_runtime::Threads;

use super::active::{Active, Choice};
use super::adapters::Adapters;
use super::draft::Drafter;
use super::draw::{Draw, draw};
use super::embed::Pooled;
use super::fair::Fair;
use super::handle::{Command, Shared, Stats};
use super::masks::Masks;
use super::model::{by_row, step_guarded};
use super::stream::{Emitter, End, Permits, Update, Usage};
use super::{Model, Settings, Sizes};
use crate::pages::{Prompt, Secret};
use crate::request::Request;
use crate::sample::{Rules, Sampler};
use crate::scheduler::plan::ProgramKind;
use crate::scheduler::{Arrival, Bounds, Scheduler};

/// Steps that fail one after the other before the engine gives up.
const FAILURES: u32 = 3;

/// The engine's state.
pub(super) struct Core<M> {
    model: M,
    vocabulary: usize,
    scheduler: Scheduler,
    /// One for each thread that samples.
    samplers: Vec<Mutex<Sampler>>,
    pool: Option<Arc<dyn Threads>>,
    masks: Masks,
    /// Whether masks are found while the model computes.
    beside: bool,
    fair: Fair,
    adapters: Adapters,
    drafter: Option<Drafter>,
    eos: Vec<u32>,
    /// By number, so that everything happens in one order.
    requests: BTreeMap<u64, Active>,
    tokens: Vec<Option<u32>>,
    /// Requests to which this step gave something.
    updated: Vec<u64>,
    /// Requests whose streams are still to be told that they ended.
    ended: Vec<(Emitter, Vec<Update>, End)>,
    /// Set when no more requests come; what is left at the time is ended.
    draining: Option<Option<Instant>>,
    /// Draws seeds for requests that bring none.
    seeds: RandomState,
    /// Steps that failed, of the draft model too, since the last that did not.
    failures: u32,
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
        let Sizes { page_size, pages, windows, tokens, sequences, vocabulary, .. } = sizes;
        let (rows, proposed) = (model.sizes().sequences, settings.proposed);
        let bounds = Bounds { page_size, pages, windows, tokens, sequences, rows, proposed };
        let scheduler = Scheduler::new(bounds, model.plan(), secret);
        let pages = scheduler.pages().all();
        let pool = model.pool();
        let threads = pool.as_ref().map_or(1, |p| p.threads());
        let masks = Masks::new();
        // Whoever draws tokens computes on a device of its own, and these threads wait for it.
        let beside = model.draws() || masks.beside(threads);
        let stats = Stats { pages, page: model.page_storage(), pages_free: pages, ..Stats::default() };
        shared.publish(stats);
        Core {
            model,
            vocabulary,
            scheduler,
            samplers: (0..threads).map(|_| Mutex::default()).collect(),
            pool,
            beside,
            masks,
            fair: Fair::default(),
            adapters: Adapters::default(),
            drafter: None,
            eos: settings.eos.clone(),
            requests: BTreeMap::new(),
            tokens: Vec::new(),
            updated: Vec::new(),
            ended: Vec::new(),
            draining: None,
            seeds: RandomState::new(),
            failures: 0,
            shared,
            stats,
        }
    }

    /// The same with a draft model that proposes tokens.
    pub fn drafted(mut self, drafter: Option<Drafter>) -> Core<M> {
        if drafter.is_some() {
            self.scheduler.drafts_cost(0.0);
        }
        Core { drafter, ..self }
    }

    pub fn shared(&self) -> Arc<Shared> {
        self.shared.clone()
    }

    /// Commands, then a step if there is work; waits only if there is none. `false` when all is done.
    pub fn run_once(&mut self, commands: &Receiver<Command>) -> Result<bool, String> {
        if self.requests.is_empty() && !self.adapters.wait() {
            if self.draining.is_some() {
                return Ok(false);
            }
            match commands.recv() {
                Ok(command) => self.handle_command(command),
                Err(RecvError) => return Ok(false),
            }
        }
        // It cannot be disconnected: every stream holds a way to it.
        while let Ok(command) = commands.try_recv() {
            self.handle_command(command);
        }
        self.cancel_closed();
        let in_use = |slot| self.requests.values().any(|a| a.adapter.is_some_and(|a| a.slot == slot));
        self.adapters.write(&mut self.model, in_use);
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

    fn handle_command(&mut self, command: Command) {
        match command {
            Command::Submit { request, body, emitter, permits, at } => {
                self.begin(request, *body, emitter, permits, at);
            }
            Command::Stop { request, index } => {
                let Some(active) = self.requests.get_mut(&request) else { return };
                if let Some(id) = active.take(index) {
                    self.scheduler.remove(id);
                }
                if active.is_over() {
                    let usage = active.usage;
                    self.end(request, End::Finished(usage));
                }
            }
            Command::Cancel { request } => self.cancel(request),
            Command::Adapt { adapter, patch, written } => self.adapters.add(adapter, patch, written),
            Command::Drain { until } => self.draining = Some(until),
        }
    }

    fn begin(&mut self, request: u64, body: Request, emitter: Emitter, permits: Permits, since: Instant) {
        if body.adapter.is_some_and(|adapter| !self.adapters.holds(adapter)) {
            self.stats.failed += 1;
            let why = "the adapter was unloaded before the request ran";
            return self.ended.push((emitter, Vec::new(), End::Failed(why.into())));
        }
        let tag = self.fair.arrive(&body);
        let Request { prompt, n, priority, caller: _, mut salt, sampling, constraint, embed, adapter } = body;
        // What an adapter computes is found again under it alone.
        salt.extend(adapter.iter().flat_map(|a| a.number.to_le_bytes()));
        let seed = sampling.seed.unwrap_or_else(|| self.seeds.hash_one(request));
        let mut ends = sampling.stop_ids.clone();
        if !sampling.ignore_eos {
            ends.extend_from_slice(&self.eos);
        }
        let usage = Usage { prompt: prompt.len(), ..Usage::default() };
        let most = prompt.len() + sampling.max_tokens.unwrap_or(0);
        let rules = Rules::new(sampling, &prompt, seed, ends);
        let sampling = rules.sampling();
        let from = sampling.scored_from.max(1);
        let scored = sampling.prompt_logprobs.map(|_| from).filter(|&from| from < prompt.len());
        let prompt = Prompt::adapted(prompt, salt, adapter.map(|a| a.slot));
        let choices = (0..n).map(|index| {
            let prompt = prompt.clone();
            let arrival = Arrival { request, index, priority, tag, prompt, most, scored, embed };
            Some(Choice { id: self.scheduler.add(arrival), history: None, ran: false })
        });
        let choices = choices.collect();
        let updates = Vec::new();
        let active = Active {
            emitter,
            permits,
            rules,
            constraint,
            adapter,
            tag,
            scores: scored.map(|from| (prompt, from, Vec::new())),
            pooled: embed.then(Pooled::default),
            choices,
            since,
            ran: false,
            usage,
            updates,
            failure: None,
        };
        self.requests.insert(request, active);
    }

    fn cancel(&mut self, request: u64) {
        if let Some(active) = self.requests.get(&request) {
            let usage = active.usage;
            self.end(request, End::Cancelled(usage));
        }
    }

    fn cancel_closed(&mut self) {
        let closed = self.requests.iter().filter(|(_, a)| a.emitter.is_closed()).map(|(r, _)| *r);
        let closed: Vec<u64> = closed.collect();
        closed.into_iter().for_each(|r| self.cancel(r));
    }

    /// Takes a request out; its stream is told with the next publication.
    fn end(&mut self, request: u64, end: End) {
        let Some(active) = self.requests.remove(&request) else { return };
        active.choices.iter().flatten().for_each(|c| self.scheduler.remove(c.id));
        match end {
            End::Finished(_) => self.stats.finished += 1,
            End::Cancelled(_) => self.stats.cancelled += 1,
            End::Refused(_) | End::Failed(_) => self.stats.failed += 1,
        }
        self.ended.push((active.emitter, active.updates, end));
    }

    fn step(&mut self) -> Result<(), String> {
        if let Some(drafter) = &mut self.drafter
            && let Err(why) = drafter.propose(&mut self.scheduler)
        {
            // The step goes without proposals; all do once the draft model is lost.
            self.stats.failed_drafts += 1;
            if drafter.lost() {
                self.drafter = None;
            } else {
                self.count_failure(why)?;
            }
        }
        let begun = Instant::now();
        if self.scheduler.plan().is_none() {
            return Err("the scheduler has sequences but no step for them; please report this".into());
        }
        if self.beside {
            self.begin_masks();
        }
        self.leave_draws();
        let plan = self.scheduler.planned();
        let (outputs, tokens) = match step_guarded(&mut self.model, plan) {
            Ok(stepped) => stepped,
            Err(e) => return self.fail_step(&format!("the model failed: {e}")),
        };
        let outputs = by_row(plan, outputs, self.vocabulary)?;
        let (took, single) = (begun.elapsed(), plan.rows().all(|row| row.tokens == 1));
        take_masks(&mut self.masks, &mut self.requests);
        self.updated.clear();
        let mut draws: Vec<Mutex<Draw>> = Vec::with_capacity(outputs.len());
        let mut sample = false;
        for (at, (kind, row, logits)) in outputs.into_iter().enumerate() {
            let Some(active) = self.requests.get_mut(&row.id.request) else {
                return Err("a sequence without a request; please report this".into());
            };
            if active.run(row.id.index, begun) {
                self.fair.run(active.tag);
                self.stats.prompt_tokens += active.usage.prompt as u64;
                active.usage.cached = self.scheduler.cached(row.id).unwrap_or(0);
            }
            if let ProgramKind::Embed(embedding) = kind {
                active.pooled.get_or_insert_default().add(row, logits, embedding.pooling);
                self.updated.extend(row.complete.then_some(row.id.request));
                continue;
            }
            if let Some(token) = row.proposed {
                let before = draws.last_mut().and_then(|draw| draw.get_mut().ok());
                if let Some(draw) = before.filter(|draw| draw.id == row.id) {
                    draw.proposed.push((token, logits));
                }
                continue;
            }
            active.score(row, logits, &self.samplers);
            if row.complete && active.history(row.id.index).is_some() {
                let choice = active.choices.get_mut(row.id.index as usize).and_then(Option::as_mut);
                let history = choice.and_then(|choice| choice.history.take());
                let proposed = Vec::new();
                draws.extend(history.map(|mut history| {
                    let drawn = row.drawn.then(|| history.take_drawn(tokens.get(at).copied().unwrap_or(-1)));
                    sample |= !row.drawn;
                    let sampled = drawn.into_iter().collect();
                    Mutex::new(Draw { id: row.id, logits, proposed, history, find: !self.beside, sampled })
                }));
            }
        }
        if sample {
            draw(&draws, &self.samplers, self.pool.as_deref());
        }
        let now = Instant::now();
        self.tokens.clear();
        let mut draws = draws.into_iter().peekable();
        let mut drawn = Vec::new().into_iter();
        for row in self.scheduler.rows() {
            if row.proposed.is_none() {
                let of_row = |d: &Mutex<Draw>| d.lock().is_ok_and(|d| d.id == row.id);
                let draw = draws.next_if(of_row).and_then(|d| d.into_inner().ok());
                let tokens = draw.and_then(|draw| {
                    let active = self.requests.get_mut(&draw.id.request)?;
                    self.updated.push(draw.id.request);
                    Some(active.record(draw, now, &self.eos))
                });
                drawn = tokens.unwrap_or_default().into_iter();
            }
            let token = drawn.next();
            self.stats.output_tokens += u64::from(token.is_some());
            self.tokens.push(token);
        }
        self.scheduler.complete(&self.tokens);
        if let Some(drafter) = self.drafter.as_mut().filter(|_| single) {
            drafter.compare(took, &mut self.scheduler);
        }
        self.failures = 0;
        self.stats.steps += 1;
        self.send_updates();
        Ok(())
    }

    /// Ends the requests that had tokens in a step that failed: it has written nowhere but in their pages, of which none is shared or kept.
    fn fail_step(&mut self, why: &str) -> Result<(), String> {
        self.stats.failed_steps += 1;
        self.count_failure(why.into())?;
        if self.model.lost() {
            return Err(why.into());
        }
        take_masks(&mut self.masks, &mut self.requests);
        let touched: Vec<u64> = self.scheduler.rows().map(|row| row.id.request).collect();
        self.scheduler.complete(&[]);
        touched.into_iter().for_each(|request| self.end(request, End::Failed(why.into())));
        Ok(())
    }

    /// Counts a failure; it is the engine's where too many came one after the other.
    fn count_failure(&mut self, why: String) -> Result<(), String> {
        self.failures += 1;
        if self.failures < FAILURES { Ok(()) } else { Err(why) }
    }

    /// Begins to find what may come next in the answers of this step that are held to a grammar.
    fn begin_masks(&mut self) {
        for row in self.scheduler.rows().filter(|row| row.complete) {
            let active = self.requests.get_mut(&row.id.request).filter(|active| active.constraint.is_some());
            let history = active.and_then(|active| active.history(row.id.index));
            if let Some(guide) = history.and_then(|history| history.guide.take()) {
                self.masks.want(row.id, guide);
            }
        }
        self.masks.begin();
    }

    /// Leaves to a model that draws tokens those rows of this step of which nothing but a token is wanted.
    fn leave_draws(&mut self) {
        if self.model.draws() {
            let requests = &mut self.requests;
            self.scheduler.draw(|row| {
                let active =
                    requests.get_mut(&row.id.request).filter(|active| active.constraint.is_none())?;
                active.history(row.id.index)?.drawing()
            });
        }
    }

    /// Sends what the step gave, and ends what it ended.
    fn send_updates(&mut self) {
        // A request's rows need not be neighbours when some of its choices decode and others do not.
        self.updated.sort_unstable();
        self.updated.dedup();
        for i in 0..self.updated.len() {
            let request = self.updated[i];
            let Some(active) = self.requests.get_mut(&request) else { continue };
            for i in 0..active.updates.len() {
                let Update { index, finish, .. } = active.updates[i];
                if let Some(id) = finish.and_then(|_| active.take(index)) {
                    self.scheduler.remove(id);
                }
            }
            if let Some(pooled) = active.pooled.take() {
                match pooled.vector() {
                    Ok(vector) => active.emitter.vector = Some(vector),
                    Err(why) => active.failure = Some(End::Failed(why.into())),
                }
                active.take(0).into_iter().for_each(|id| self.scheduler.remove(id));
            }
            let usage = active.usage;
            match (active.failure.take(), active.is_over()) {
                (Some(end), _) => self.end(request, end),
                (None, true) => self.end(request, End::Finished(usage)),
                (None, false) => {
                    let updates = std::mem::take(&mut active.updates);
                    active.emitter.send(updates);
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
        self.ended.drain(..).for_each(|(emitter, updates, end)| emitter.end(updates, end));
    }
}

/// Waits for what may come next, and notes it where it belongs.
fn take_masks(masks: &mut Masks, requests: &mut BTreeMap<u64, Active>) {
    while let Some((id, guide, allowed)) = masks.next() {
        if let Some(history) = requests.get_mut(&id.request).and_then(|active| active.history(id.index)) {
            (history.guide, history.allowed) = (guide, allowed);
        }
    }
}
