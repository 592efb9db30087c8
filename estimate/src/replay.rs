//! Serving in time. In: requests with the times at which they are sent, what a step costs. Out: what every request would have waited,
//! and what the server was doing meanwhile. The scheduler is the one that serves, with its pages, its prefix cache and its
//! preemptions; in place of a device there is a clock that each step moves by the seconds that its kernels are predicted to take.

mod costs;
mod series;

pub use costs::{Served, StepCosts};
pub use series::{Moment, Series};

use crate::Refused;
use astrai_engine::load::{Answered, Asked, draw};
use astrai_serve::pages::Prompt;
use astrai_serve::scheduler::{Arrival, Counters, Scheduler, SequenceId};
use std::collections::{HashMap, VecDeque};

/// A request under way.
struct Running {
    id: SequenceId,
    sent: f64,
    /// When its newest token came.
    newest: f64,
    /// Tokens still to come.
    left: u64,
    answered: Answered,
}

/// What came of a load.
#[derive(Debug)]
pub struct Replayed {
    /// Of each request, in the order of their ends.
    pub answered: Vec<Answered>,
    /// Seconds from a token to the next of the same request, and how often.
    pub between: Vec<(f64, u64)>,
    /// Seconds of all.
    pub seconds: f64,
    /// Steps.
    pub steps: u64,
    /// Pages that there are.
    pub pages: usize,
    /// What the scheduler counted.
    pub counters: Counters,
    /// The queue, the pages, the tokens, over time.
    pub series: Series,
}

/// Serves the requests, at most so many at once.
///
/// # Errors
/// A request that the model does not take, or a trace that cannot be read; one line.
pub fn replay(
    costs: &mut StepCosts,
    requests: impl Iterator<Item = Result<Asked, Refused>>,
    at_once: usize,
) -> Result<Replayed, Refused> {
    let mut clock = Clock::new(costs, at_once);
    let mut requests = requests.peekable();
    loop {
        let idle = clock.running.is_empty();
        while clock.someone_asks(idle)
            && let Some(next) = requests.next_if(|r| r.as_ref().map_or(true, |r| r.at <= clock.now))
        {
            clock.send(next?)?;
        }
        if clock.step(costs)? {
            continue;
        }
        match requests.peek() {
            // Nothing to do until then.
            Some(Ok(next)) => clock.now = clock.now.max(next.at),
            Some(Err(_)) => {}
            None => return Ok(clock.done()),
        }
    }
}

struct Clock {
    now: f64,
    /// Clients that have asked nothing yet.
    fresh: usize,
    /// When the others were answered that are not asking.
    answered: VecDeque<f64>,
    context: usize,
    scheduler: Scheduler,
    running: HashMap<u64, Running>,
    tokens: Vec<Option<u32>>,
    ended: Vec<SequenceId>,
    found: Replayed,
}

impl Clock {
    fn new(costs: &StepCosts, at_once: usize) -> Clock {
        // Whom a secret keeps out is not here.
        let secret = costs.served.prefix_cache.then_some([0; 32]);
        Clock {
            now: 0.0,
            fresh: at_once,
            answered: VecDeque::new(),
            context: costs.served.context,
            scheduler: Scheduler::new(costs.served.bounds, costs.plan_of_step(), secret),
            running: HashMap::new(),
            tokens: Vec::new(),
            ended: Vec::new(),
            found: Replayed {
                answered: Vec::new(),
                between: Vec::new(),
                seconds: 0.0,
                steps: 0,
                pages: 0,
                counters: Counters::default(),
                series: Series::default(),
            },
        }
    }

    /// Whether there is a client that may ask. Whoever was answered by the newest step asks again when the next one has begun: an engine
    /// does not wait for that, unless it is idle.
    fn someone_asks(&self, idle: bool) -> bool {
        let asks = |at: &f64| *at < self.now || idle;
        self.fresh > 0 || self.answered.front().is_some_and(asks)
    }

    fn send(&mut self, asked: Asked) -> Result<(), Refused> {
        let (input, request) = (asked.prompt.len(), (self.found.answered.len() + self.running.len()) as u64);
        let most = input as u64 + asked.output;
        if input == 0 || most > self.context as u64 {
            let (output, context) = (asked.output, self.context);
            return Err(format!(
                "request {}: a prompt of {input} and an answer of {output} tokens; a sequence has at most {context} (--max-model-len)",
                request + 1
            ));
        }
        let id = self.scheduler.add(Arrival {
            request,
            index: 0,
            priority: 0,
            tag: 0,
            prompt: Prompt::new(asked.prompt, vec![]),
            most: most as usize,
            scored: None,
            embed: false,
        });
        // Whoever had to wait for another's end was sent then.
        let free = if self.fresh > 0 { None } else { self.answered.pop_front() };
        self.fresh = self.fresh.saturating_sub(1);
        let sent = asked.at.max(free.unwrap_or(0.0));
        let answered = Answered { input, output: asked.output, ..Answered::default() };
        self.running.insert(request, Running { id, sent, newest: sent, left: asked.output, answered });
        Ok(())
    }

    /// A step, if there is something to compute.
    fn step(&mut self, costs: &mut StepCosts) -> Result<bool, Refused> {
        let Some(plan) = self.scheduler.plan() else { return Ok(false) };
        let before = self.now;
        self.now += costs.seconds(plan)?;
        self.found.steps += 1;
        self.tokens.clear();
        let mut given = 0;
        for row in plan.rows() {
            let token = self.running.get_mut(&row.id.request).filter(|_| row.complete).and_then(|r| {
                given += 1;
                r.answered.whole = self.now - r.sent;
                if r.left == r.answered.output {
                    r.answered.first = r.answered.whole;
                } else {
                    gap(&mut self.found.between, self.now - r.newest);
                }
                r.newest = self.now;
                r.left -= 1;
                if r.left == 0 {
                    self.ended.push(r.id);
                }
                // No two answers are alike.
                (r.left > 0).then(|| draw(row.id.request << 24 ^ r.left) as u32)
            });
            self.tokens.push(token);
        }
        let tokens = plan.tokens();
        self.scheduler.complete(&self.tokens);
        for id in self.ended.drain(..) {
            self.scheduler.remove(id);
            self.found.answered.extend(self.running.remove(&id.request).map(|r| r.answered));
            self.answered.push_back(self.now);
        }
        let pages = self.scheduler.pages();
        let moment = Moment {
            running: self.scheduler.running() as f64,
            waiting: self.scheduler.waiting() as f64,
            pages: (pages.all() - pages.free() - pages.cached()) as f64,
        };
        self.found.series.add(before, self.now - before, moment, [tokens as f64, given as f64]);
        Ok(true)
    }

    fn done(mut self) -> Replayed {
        self.found.seconds = self.now;
        self.found.counters = self.scheduler.counters();
        self.found.pages = self.scheduler.pages().all();
        self.found
    }
}

/// Rows of a step mostly waited as long as their neighbours.
fn gap(between: &mut Vec<(f64, u64)>, seconds: f64) {
    match between.last_mut() {
        Some((last, n)) if *last == seconds => *n += 1,
        _ => between.push((seconds, 1)),
    }
}

#[cfg(test)]
mod tests;
