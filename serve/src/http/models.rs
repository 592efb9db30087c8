//! Which models there are: one, under each of its names, and its adapters.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::app::App;
use super::error::ApiError;
use super::middleware::VERSION;

fn model(app: &App, name: &str) -> Value {
    let root = app.name();
    let context = app.engine.limits().context;
    let mut model = json!({
        "id": name, "object": "model", "created": app.created, "owned_by": "astrai", "root": root,
        "max_model_len": context,
    });
    if app.adapters.find(name).is_some() {
        model["parent"] = root.into();
    }
    model
}

/// The model's names, then those of its adapters.
fn names(app: &App) -> Vec<String> {
    app.names.iter().cloned().chain(app.adapters.names()).collect()
}

/// The same in the form of Anthropic's API.
fn anthropic(app: &App, name: &str) -> Value {
    let created = i64::try_from(app.created).ok().and_then(|s| Timestamp::from_second(s).ok());
    let created = created.unwrap_or_default().to_string();
    json!({"type": "model", "id": name, "display_name": name, "created_at": created})
}

/// `GET /v1/models`
pub async fn list(State(app): State<Arc<App>>, headers: HeaderMap) -> Response {
    let form = if headers.contains_key(VERSION) { anthropic } else { model };
    let names = names(&app);
    let all: Vec<Value> = names.iter().map(|name| form(&app, name)).collect();
    if !headers.contains_key(VERSION) {
        return super::api::json(&json!({"object": "list", "data": all}));
    }
    let [first, last] = [names.first(), names.last()];
    super::api::json(&json!({"data": all, "has_more": false, "first_id": first, "last_id": last}))
}

/// `GET /v1/models/{id}`; ids may have slashes.
pub async fn one(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    name: Result<Path<String>, PathRejection>,
) -> Response {
    let Ok(Path(name)) = name else {
        return ApiError::body("the model's name is no UTF-8 text").into_response();
    };
    match names(&app).contains(&name) {
        true if headers.contains_key(VERSION) => super::api::json(&anthropic(&app, &name)),
        true => super::api::json(&model(&app, &name)),
        false => ApiError::unknown_model(&name).into_response(),
    }
}
