//! Which models there are: one, under each of its names.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::app::App;
use super::error::ApiError;

fn model(app: &App, name: &str) -> Value {
    let root = app.name();
    let context = app.engine.limits().context;
    json!({
        "id": name, "object": "model", "created": app.created, "owned_by": "astrai", "root": root,
        "max_model_len": context,
    })
}

/// `GET /v1/models`
pub async fn list(State(app): State<Arc<App>>) -> Response {
    let all: Vec<Value> = app.names.iter().map(|name| model(&app, name)).collect();
    super::api::json(&json!({"object": "list", "data": all}))
}

/// `GET /v1/models/{id}`; ids may have slashes.
pub async fn one(State(app): State<Arc<App>>, name: Result<Path<String>, PathRejection>) -> Response {
    let Ok(Path(name)) = name else {
        return ApiError::body("the model's name is no UTF-8 text").into_response();
    };
    match app.names.iter().find(|n| **n == name) {
        Some(name) => super::api::json(&model(&app, name)),
        None => ApiError::unknown_model(&name).into_response(),
    }
}
