//! What a step of a serving engine takes beside its program. In: a shape, a machine. Out: seconds of a step, for scheduling and passing tokens
//! on, and seconds in which sampling looks at one logit; measured on the engine itself, with one request and with several at a time.

use crate::Refused;
use astrai_builders::ModelConfig;
use astrai_engine::load::draw;
use astrai_engine::machine::{Machine, median};
use astrai_engine::model::Model as Weights;
use astrai_engine::serving::{KvMemory, Room, steps};
use astrai_ir::DType;
use astrai_runtime::device::Threads;
use astrai_serve::engine::{End, Engine, Model, ModelError, PageStorage, Sizes, Stream};
use astrai_serve::request::{Request, Sampling};
use astrai_serve::scheduler::plan::StepPlan;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Instant;

/// Tokens of a prompt and of its answer.
const PROMPT: u64 = 16;
const ANSWER: u64 = 64;
/// Requests at a time.
const AT_ONCE: [u64; 2] = [1, 8];
/// How often each is measured; the one in the middle counts.
const TRIES: usize = 3;

/// Seconds that a model has taken, and its steps.
#[derive(Default)]
struct Taken {
    seconds: f64,
    steps: u64,
}

/// A model whose steps are timed.
struct Timed<M> {
    model: M,
    taken: Arc<Mutex<Taken>>,
}

impl<M: Model> Model for Timed<M> {
    fn sizes(&self) -> Sizes {
        self.model.sizes()
    }

    fn page_storage(&self) -> PageStorage {
        self.model.page_storage()
    }

    fn plan(&self) -> StepPlan {
        self.model.plan()
    }

    fn pool(&self) -> Option<Arc<dyn Threads>> {
        self.model.pool()
    }

    fn step<'m>(&'m mut self, plan: &StepPlan, logits: &mut Vec<&'m mut [f32]>) -> Result<(), ModelError> {
        let started = Instant::now();
        let done = self.model.step(plan, logits);
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.seconds += started.elapsed().as_secs_f64();
        taken.steps += 1;
        done
    }
}

/// Seconds of a step beside its program, and seconds for each logit that is looked at.
///
/// # Errors
/// The engine does not start, or fails; one line.
pub fn turns(config: &ModelConfig, machine: &Machine) -> Result<[f64; 2], Refused> {
    let most = AT_ONCE[1] as usize;
    let room = Room {
        sequences: most,
        tokens: Some(PROMPT as usize * most),
        context: Some((PROMPT + ANSWER) as usize),
        kv: Some(KvMemory::Share(1.0)),
        queue: most,
        prefix_cache: false,
        ..Room::of_one(DType::BF16, None)
    };
    let weights = Weights::fresh(config.clone(), vec![], 0);
    let model = steps(&weights, &room, machine, &mut |_| {}).map_err(|e| e.to_string())?;
    let taken = Arc::new(Mutex::new(Taken::default()));
    let take = || std::mem::take(&mut *taken.lock().unwrap_or_else(PoisonError::into_inner));
    let timed = Timed { model, taken: taken.clone() };
    let engine = Engine::start(timed, &room.settings()).map_err(|e| e.to_string())?;
    let mut beside = AT_ONCE.map(|_| Vec::new());
    for (beside, at_once) in beside.iter_mut().zip(AT_ONCE) {
        for _ in 0..TRIES {
            take();
            let started = Instant::now();
            answer(&engine, at_once, config.vocab_size as u64)?;
            let Taken { seconds, steps } = take();
            beside.push((started.elapsed().as_secs_f64() - seconds) / steps.max(1) as f64);
        }
    }
    engine.drain(None);
    let [one, several] = beside.map(|tries| median(tries).unwrap_or(0.0));
    let row = ((several - one) / (AT_ONCE[1] - AT_ONCE[0]) as f64).max(0.0);
    Ok([(one - row).max(0.0), row / config.vocab_size as f64])
}

/// So many requests at once, to their ends.
fn answer(engine: &Engine, at_once: u64, vocab: u64) -> Result<(), Refused> {
    let handle = engine.handle();
    let send = |i: u64| {
        let prompt = (i * PROMPT..(i + 1) * PROMPT).map(|n| (draw(n) % vocab) as u32);
        let mut request = Request::new(prompt.collect());
        let max_tokens = Some(ANSWER as usize);
        request.sampling = Sampling { temperature: 0.0, max_tokens, ..Sampling::default() };
        handle.submit(request).map_err(|e| e.to_string())
    };
    let streams: Result<Vec<_>, Refused> = (0..at_once).map(send).collect();
    // Each client is woken for each of its tokens, as those of a server are.
    let ended = |mut stream: Stream| loop {
        match stream.blocking_recv().ok_or("the engine ended without an answer")?.end {
            None => {}
            Some(End::Refused(why) | End::Failed(why)) => return Err(why),
            Some(_) => return Ok(()),
        }
    };
    thread::scope(|scope| {
        let clients: Vec<_> = streams?.into_iter().map(|stream| scope.spawn(|| ended(stream))).collect();
        let joined = |client: thread::ScopedJoinHandle<'_, Result<(), Refused>>| {
            client.join().map_err(|_| "a client ended without its answer".to_string())?
        };
        clients.into_iter().try_for_each(joined)
    })
}
