//! `POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`: adapters of the model by name, each in a slot. In: names and folders,
//! hostile. Out: which adapter a name is. A name means one adapter from when it is loaded until it is unloaded; its slot is written anew
//! when the last request that uses it has ended.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::json;

use super::app::App;
use super::body::{Received, receive};
use super::error::ApiError;
use super::fields::Fields;
use super::params::short;
use crate::engine::{AdapterId, Patch};

/// Bytes of a name.
const LONGEST_NAME: usize = 256;

/// Reads an adapter's folder; an error is one line.
type Read = dyn Fn(&Path) -> Result<Patch, String> + Send + Sync;

/// An adapter that the engine has.
pub type Loaded = (String, AdapterId);

/// Adapters of a server.
#[derive(Clone)]
pub struct AdapterSettings {
    /// Adapters at once.
    pub slots: u32,
    /// Those that are there when it begins.
    pub loaded: Vec<Loaded>,
    /// Reads more.
    pub read: Arc<Read>,
}

impl fmt::Debug for AdapterSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AdapterSettings({} of {})", self.loaded.len(), self.slots)
    }
}

/// What slots are for.
#[derive(Debug, Default)]
struct Known {
    /// By name; none while one is being loaded.
    names: BTreeMap<String, Option<AdapterId>>,
    free: Vec<u32>,
    /// Adapters so far.
    next: u64,
}

/// The adapters of a server by name.
pub struct Adapters {
    known: Mutex<Known>,
    read: Option<Arc<Read>>,
}

impl fmt::Debug for Adapters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.known.fmt(f)
    }
}

impl Adapters {
    /// Those of a server; without settings there are none, ever.
    pub fn new(settings: Option<AdapterSettings>) -> Adapters {
        let Some(AdapterSettings { slots, loaded, read }) = settings else {
            return Adapters { known: Mutex::default(), read: None };
        };
        let taken = |slot: &u32| loaded.iter().any(|(_, adapter)| adapter.slot == *slot);
        let free = (0..slots).rev().filter(|slot| !taken(slot)).collect();
        let next = loaded.iter().map(|(_, adapter)| adapter.number + 1).max().unwrap_or(0);
        let names = loaded.into_iter().map(|(name, adapter)| (name, Some(adapter))).collect();
        Adapters { known: Mutex::new(Known { names, free, next }), read: Some(read) }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The adapter of a name.
    pub fn find(&self, name: &str) -> Option<AdapterId> {
        self.known().names.get(name).copied().flatten()
    }

    /// Names of all that are loaded.
    pub fn names(&self) -> Vec<String> {
        let known = self.known();
        known.names.iter().filter(|(_, adapter)| adapter.is_some()).map(|(name, _)| name.clone()).collect()
    }
}

/// A slot for an adapter that is being loaded; given back, with its name, unless the adapter is kept.
struct Place {
    app: Arc<App>,
    name: String,
    adapter: AdapterId,
}

impl Place {
    /// A slot that is free.
    ///
    /// # Errors
    /// The name is taken or none, or all slots are.
    fn take(app: Arc<App>, name: String) -> Result<Place, ApiError> {
        let refuse = |what: String| Err(ApiError::field("lora_name", what));
        if name.is_empty() || name.len() > LONGEST_NAME {
            return refuse(format!("must have from 1 to {LONGEST_NAME} bytes, not {}", name.len()));
        }
        let mut known = app.adapters.known();
        if app.names.contains(&name) || known.names.contains_key(&name) {
            return refuse(format!("{:?} is taken; unload it, or give another name", short(&name)));
        }
        let Some(slot) = known.free.pop() else {
            return refuse("there is no room for another adapter; unload one, or start the server with more --max-adapters".into());
        };
        let adapter = AdapterId { slot, number: known.next };
        known.next += 1;
        known.names.insert(name.clone(), None);
        drop(known);
        Ok(Place { app, name, adapter })
    }

    /// From here on the name is the adapter.
    fn keep(self) {
        self.app.adapters.known().names.insert(self.name.clone(), Some(self.adapter));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut known = self.app.adapters.known();
        if known.names.get(&self.name) == Some(&None) {
            known.names.remove(&self.name);
            known.free.push(self.adapter.slot);
        }
    }
}

/// `POST /v1/load_lora_adapter`
pub async fn load(State(app): State<Arc<App>>, body: Body) -> Result<Response, ApiError> {
    app.check_ready()?;
    let content = receive(&app, body).await?;
    // It goes on when the client leaves: what was begun is whole.
    let loaded = tokio::spawn(loaded(app, content));
    let name = loaded.await.map_err(|_| ApiError::internal("the adapter could not be loaded"))??;
    Ok(super::api::json(&json!({"id": name, "object": "model", "loaded": true})))
}

async fn loaded(app: Arc<App>, content: Received) -> Result<String, ApiError> {
    let shared = app.clone();
    let read = move |abandoned| {
        let mut fields = Fields::parse(&content, abandoned)?;
        let [name, path] = ["lora_name", "lora_path"].map(|field| {
            fields.take::<String>(field)?.ok_or_else(|| ApiError::field(field, "is missing; give a text"))
        });
        let (name, path) = (name?, path?);
        let read = shared.adapters.read.clone().ok_or_else(none)?;
        let place = Place::take(shared, name)?;
        let patch = read(Path::new(&path)).map_err(|wrong| ApiError::field("lora_path", wrong))?;
        Ok((place, patch))
    };
    let (place, patch) = app.spawn_bounded(read).await?;
    let written = app.engine.adapt(place.adapter, patch).await;
    written.map_err(|_| ApiError::unavailable("the server is shutting down"))?.map_err(ApiError::internal)?;
    let name = place.name.clone();
    place.keep();
    Ok(name)
}

/// `POST /v1/unload_lora_adapter`
pub async fn unload(State(app): State<Arc<App>>, body: Body) -> Result<Response, ApiError> {
    let content = receive(&app, body).await?;
    let shared = app.clone();
    let name = app.spawn_bounded(move |abandoned| {
        let mut fields = Fields::parse(&content, abandoned)?;
        let name: Option<String> = fields.take("lora_name")?;
        let name = name.ok_or_else(|| ApiError::field("lora_name", "is missing; give a text"))?;
        shared.adapters.read.as_ref().ok_or_else(none)?;
        let mut known = shared.adapters.known();
        let Some(Some(adapter)) = known.names.get(&name).copied() else {
            let what = format!("{:?} is no adapter that is loaded; /v1/models lists those", short(&name));
            return Err(ApiError { status: StatusCode::NOT_FOUND, ..ApiError::field("lora_name", what) });
        };
        known.names.remove(&name);
        known.free.push(adapter.slot);
        Ok(name)
    });
    Ok(super::api::json(&json!({"id": name.await?, "object": "model", "loaded": false})))
}

fn none() -> ApiError {
    let what = "the server has no room for adapters; start it with --adapter NAME=DIR or --max-adapters";
    ApiError::new(StatusCode::NOT_FOUND, what)
}
