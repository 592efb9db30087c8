//! What all requests share.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::adapters::Adapters;
use super::error::ApiError;
use super::keys::Keys;
use super::metrics::Metrics;
use super::rates::Limiter;
use super::responses::Kept;
use super::traces::Exporter;
use super::{HttpSettings, Served};
use crate::engine::{Engine, Handle};
use crate::grammar::{CompileError, Compiler, Grammar, Wanted};
use crate::template::ChatTemplate;
use crate::tokenizer::{Tokenizer, TokenizerError};

/// A wait to be prepared that shows that requests are held up.
const STUCK: Duration = Duration::from_secs(10);

/// Bytes of text for each token of the context that are looked at first; common text has four.
const HEAD: usize = 16;

/// Bytes by which bodies are counted.
const BODY_UNIT: usize = 1 << 10;

/// What all requests share.
#[derive(Debug)]
pub struct App {
    pub engine: Handle,
    pub tokenizer: Tokenizer,
    pub template: Option<ChatTemplate>,
    pub names: Vec<String>,
    pub adapters: Adapters,
    pub settings: HttpSettings,
    /// Seconds since 1970 at the start.
    pub created: u64,
    pub metrics: Metrics,
    /// Conversations to go on from.
    pub kept: Kept,
    pub keys: Arc<Keys>,
    pub limiter: Limiter,
    /// Takes spans of requests.
    pub traces: Option<Exporter>,
    draining: AtomicBool,
    /// Requests that may be rendered and tokenised at once.
    permits: Arc<Semaphore>,
    /// Since when each request waits for one of them.
    waiting: Queue,
    /// Units of bytes that bodies may take.
    bodies: Arc<Semaphore>,
    seeds: [RandomState; 2],
    next: AtomicU64,
    /// Made when somebody first wants structured output.
    compiler: OnceLock<Result<Arc<Compiler>, String>>,
}

impl App {
    /// The state of a server, and the engine that it ends with.
    pub fn new(served: Served) -> io::Result<(App, Engine)> {
        let Served { engine, tokenizer, template, names, mut settings } = served;
        if names.is_empty() || names.iter().any(String::is_empty) {
            return Err(io::Error::other("the model needs a name, and none may be empty"));
        }
        let keys = settings.keys.clone();
        let limiter = Limiter::new(settings.rates);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let bodies = Arc::new(Semaphore::new(settings.bodies_limit.div_ceil(BODY_UNIT)));
        let adapters = Adapters::new(settings.adapters.take());
        let traces = settings.otlp_endpoint.as_ref().map(|at| Exporter::start(at, &names[0])).transpose()?;
        let vllm = settings.vllm_metrics.then(|| names[0].clone());
        let app = App {
            adapters,
            engine: engine.handle(),
            tokenizer,
            template,
            names,
            settings,
            created: now(),
            metrics: Metrics::new(vllm).map_err(io::Error::other)?,
            kept: Kept::default(),
            keys,
            limiter,
            traces,
            draining: AtomicBool::new(false),
            permits: Arc::new(Semaphore::new(cores)),
            waiting: Queue::default(),
            bodies,
            seeds: [RandomState::new(), RandomState::new()],
            next: AtomicU64::new(0),
            compiler: OnceLock::new(),
        };
        Ok((app, engine))
    }

    /// The name by which the model is told.
    pub fn name(&self) -> &str {
        &self.names[0]
    }

    pub fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Whether requests are taken.
    pub fn is_ready(&self) -> bool {
        !self.draining.load(Ordering::Acquire) && self.engine.is_ready()
    }

    /// Refuses a request where none is taken.
    ///
    /// # Errors
    /// The engine has failed, or the server is told to stop.
    pub fn check_ready(&self) -> Result<(), ApiError> {
        match self.engine.dead() {
            Some(why) => Err(ApiError::unavailable(why)),
            None if !self.is_ready() => Err(ApiError::unavailable("the server is shutting down")),
            None => Ok(()),
        }
    }

    /// 24 hexadecimal digits that nobody can foretell.
    pub fn new_id(&self) -> String {
        let n = self.next.fetch_add(1, Ordering::Relaxed);
        let [high, low] = self.seeds.each_ref().map(|s| s.hash_one(n));
        format!("{:08x}{low:016x}", high >> 32)
    }

    /// Compiles what answers must be; `field` asked for it.
    ///
    /// # Errors
    /// It cannot be, or takes too long.
    pub fn compile(&self, field: &str, wanted: Wanted) -> Result<Grammar, ApiError> {
        let new = || {
            let (vocabulary, eos) = (self.engine.limits().vocabulary, self.engine.eos());
            Compiler::new(&self.tokenizer, vocabulary, eos).map(Arc::new)
        };
        let compiler = self.compiler.get_or_init(new).as_ref().map_err(ApiError::internal)?;
        compiler.compile(wanted).map_err(|e| match e {
            CompileError::Wrong(wrong) => ApiError::field(field, wrong),
            CompileError::Busy(_) => ApiError::unavailable(format!("{field}: {e}")),
        })
    }

    /// Does work that takes long on a thread of its own, no more at a time than there are cores. What the work is given is set
    /// when the client has left; the permit is held until the work has given way.
    ///
    /// # Errors
    /// The work's own, or a panic of it.
    pub async fn spawn_bounded<T: Send + 'static>(
        &self,
        work: impl FnOnce(Arc<AtomicBool>) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let broken = || ApiError::internal("the request could not be prepared");
        let waiting = Waiting::since_now(&self.waiting);
        let permit = self.permits.clone().acquire_owned().await.map_err(|_| broken())?;
        drop(waiting);
        let client = Client::default();
        let left = client.left.clone();
        let work = move || (work(left), drop(permit)).0;
        tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| Err(broken()))
    }

    /// Ids of the text of a field that is to fit the context. The beginning of a text that is far too long is enough to tell, and
    /// spares the time and memory that all of it would take.
    ///
    /// # Errors
    /// It does not fit, or holds what the vocabulary cannot express.
    pub fn encode(&self, field: &str, text: &str, add_special: bool) -> Result<Vec<u32>, ApiError> {
        let wrong = |e: TokenizerError| ApiError::field(field, e.message);
        let context = self.engine.limits().context;
        let most = context.saturating_mul(HEAD).min(text.len());
        let head = (0..=most).rfind(|at| text.is_char_boundary(*at)).unwrap_or(0);
        if head < text.len() / 2 {
            // Tokens of a beginning differ from those of the whole where it is cut; twice the context leaves no doubt.
            let tokens = self.tokenizer.encode(&text[..head], add_special).map_err(wrong)?.len();
            if tokens > context.saturating_mul(2) {
                return Err(ApiError::beyond_context(field, format!("more than {tokens}"), context));
            }
        }
        self.tokenizer.encode(text, add_special).map_err(wrong)
    }

    /// Whether requests have waited for long to be prepared.
    pub fn is_stuck(&self) -> bool {
        is_stuck(&self.waiting)
    }

    /// Makes the room that a body takes of that for all bodies so many bytes; false where there are not as many left.
    pub fn grow_room(&self, room: &mut Option<OwnedSemaphorePermit>, bytes: usize) -> bool {
        let held = room.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let more = u32::try_from(bytes.div_ceil(BODY_UNIT).saturating_sub(held)).unwrap_or(u32::MAX);
        let Ok(permit) = self.bodies.clone().try_acquire_many_owned(more) else { return false };
        match room {
            Some(held) => held.merge(permit),
            none => *none = Some(permit),
        }
        true
    }
}

/// A client that waits for its request to be prepared; when it leaves, this is dropped.
#[derive(Default)]
struct Client {
    left: Arc<AtomicBool>,
}

impl Drop for Client {
    fn drop(&mut self) {
        self.left.store(true, Ordering::Relaxed);
    }
}

type Queue = Mutex<BTreeMap<u64, Instant>>;

fn is_stuck(queue: &Queue) -> bool {
    let waiting = queue.lock().unwrap_or_else(PoisonError::into_inner);
    waiting.values().next().is_some_and(|since| since.elapsed() > STUCK)
}

/// A request's place among those that wait to be prepared.
struct Waiting<'a> {
    queue: &'a Queue,
    place: u64,
}

impl Waiting<'_> {
    fn since_now(queue: &Queue) -> Waiting<'_> {
        let mut all = queue.lock().unwrap_or_else(PoisonError::into_inner);
        let place = all.last_key_value().map_or(0, |(last, _)| last + 1);
        all.insert(place, Instant::now());
        Waiting { queue, place }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.place);
    }
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_wait_shows_that_requests_are_held_up() {
        let queue = Queue::default();
        let long_ago = Instant::now().checked_sub(2 * STUCK).unwrap();
        queue.lock().unwrap().insert(0, long_ago);
        let waits = Waiting::since_now(&queue);
        assert!(is_stuck(&queue));
        queue.lock().unwrap().remove(&0);
        assert!(!is_stuck(&queue));
        drop(waits);
        assert!(queue.lock().unwrap().is_empty());
    }
}
