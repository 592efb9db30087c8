//! What all requests share.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;

use super::error::ApiError;
use super::metrics::Metrics;
use super::{HttpSettings, Served};
use crate::engine::{Engine, Handle};
use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;

/// SHA-256 of an API key: all are of one length and show nothing of the key.
pub type KeyHash = [u8; 32];

/// What all requests share.
#[derive(Debug)]
pub struct App {
    pub engine: Handle,
    pub tokenizer: Tokenizer,
    pub template: Option<ChatTemplate>,
    pub names: Vec<String>,
    pub settings: HttpSettings,
    /// Seconds since 1970 at the start.
    pub created: u64,
    pub metrics: Metrics,
    keys: Vec<KeyHash>,
    draining: AtomicBool,
    /// Requests that may be rendered and tokenised at once.
    permits: Arc<Semaphore>,
    seeds: [RandomState; 2],
    next: AtomicU64,
}

impl App {
    /// The state of a server, and the engine that it ends with.
    pub fn new(served: Served) -> io::Result<(App, Engine)> {
        let Served { engine, tokenizer, template, names, settings } = served;
        if names.is_empty() || names.iter().any(String::is_empty) {
            return Err(io::Error::other("the model needs a name, and none may be empty"));
        }
        if settings.api_keys.iter().any(String::is_empty) {
            return Err(io::Error::other("an API key is empty; give one that is not, or none"));
        }
        let keys = settings.api_keys.iter().map(|k| Sha256::digest(k).into()).collect();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let app = App {
            engine: engine.handle(),
            tokenizer,
            template,
            names,
            settings,
            created: now(),
            metrics: Metrics::new().map_err(io::Error::other)?,
            keys,
            draining: AtomicBool::new(false),
            permits: Arc::new(Semaphore::new(cores)),
            seeds: [RandomState::new(), RandomState::new()],
            next: AtomicU64::new(0),
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

    pub fn wants_keys(&self) -> bool {
        !self.keys.is_empty()
    }

    /// The hash of a key, if it is one of the server's. Every key is compared, in the same time wherever it differs.
    pub fn check_key(&self, key: &[u8]) -> Option<KeyHash> {
        let sum: KeyHash = Sha256::digest(key).into();
        let same = |ours: &KeyHash| ours.iter().zip(&sum).fold(0, |d, (a, b)| d | (a ^ b)) == 0;
        self.keys.iter().fold(false, |any, ours| any | same(ours)).then_some(sum)
    }

    /// Whether callers are to be kept apart from each other.
    pub fn has_tenants(&self) -> bool {
        self.keys.len() > 1
    }

    /// 24 hexadecimal digits that nobody can foretell.
    pub fn new_id(&self) -> String {
        let n = self.next.fetch_add(1, Ordering::Relaxed);
        let [high, low] = self.seeds.each_ref().map(|s| s.hash_one(n));
        format!("{:08x}{low:016x}", high >> 32)
    }

    /// Does work that takes long on a thread of its own, no more at a time than there are cores.
    ///
    /// # Errors
    /// The work's own, or a panic of it.
    pub async fn spawn_bounded<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let broken = || ApiError::internal("the request could not be prepared");
        let permit = self.permits.clone().acquire_owned().await.map_err(|_| broken())?;
        // The work goes on when the client leaves; its permit is held until it is done.
        let work = move || (work(), drop(permit)).0;
        tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| Err(broken()))
    }
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}
