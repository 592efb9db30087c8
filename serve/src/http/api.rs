//! Which path leads where.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::Value;

use super::anthropic::{self, Messages};
use super::app::App;
use super::chat::ChatCompletions;
use super::completions::Completions;
use super::error::ApiError;
use super::generate::generate;
use super::responses::Responses;
use super::{adapters, embeddings, metrics, models, page, texts};

/// All paths. A slash at the end changes nothing.
pub fn routes(app: Arc<App>) -> Router {
    let mut router = Router::new();
    for end in ["", "/"] {
        let at = |path: &str| format!("{path}{end}");
        router = router
            .route(&at("/health"), get(health))
            .route(&at("/ready"), get(ready))
            .route(&at("/metrics"), get(metrics::show))
            .route(&at("/openapi.json"), get(openapi))
            .route(&at("/v1/models"), get(models::list))
            .route(&at("/v1/chat/completions"), post(generate::<ChatCompletions>))
            .route(&at("/v1/completions"), post(generate::<Completions>))
            .route(&at("/v1/responses"), post(generate::<Responses>))
            .route(&at("/v1/messages"), post(generate::<Messages>))
            .route(&at("/v1/messages/count_tokens"), post(anthropic::count_tokens))
            .route(&at("/v1/embeddings"), post(embeddings::embeddings))
            .route(&at("/v1/score"), post(embeddings::score))
            .route(&at("/score"), post(embeddings::score))
            .route(&at("/v1/rerank"), post(embeddings::rerank))
            .route(&at("/v2/rerank"), post(embeddings::rerank))
            .route(&at("/rerank"), post(embeddings::rerank))
            .route(&at("/v1/load_lora_adapter"), post(adapters::load))
            .route(&at("/v1/unload_lora_adapter"), post(adapters::unload))
            .route(&at("/tokenize"), post(texts::tokenize))
            .route(&at("/tokenizer_info"), get(texts::tokenizer_info))
            .route(&at("/detokenize"), post(texts::detokenize));
    }
    router
        .route("/", get(page::show))
        .route("/v1/models/{*id}", get(models::one))
        .fallback(nowhere)
        .method_not_allowed_fallback(wrong_method)
        .with_state(app)
}

/// A response of JSON.
pub fn json(body: &Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

async fn nowhere(method: Method) -> Response {
    if method == Method::OPTIONS {
        return StatusCode::NO_CONTENT.into_response();
    }
    ApiError::new(StatusCode::NOT_FOUND, "there is nothing at this path; the API is under /v1")
        .into_response()
}

async fn wrong_method(method: Method) -> Response {
    if method == Method::OPTIONS {
        return StatusCode::NO_CONTENT.into_response();
    }
    let message = format!("{method} is not for this path");
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message).into_response()
}

/// `GET /health`: whether the process should be left alive.
async fn health(State(app): State<Arc<App>>) -> Response {
    match app.engine.dead() {
        None if app.is_stuck() => {
            ApiError::unavailable("requests wait for long to be prepared").into_response()
        }
        None => json(&serde_json::json!({"status": "ok"})),
        Some(why) => ApiError::unavailable(why).into_response(),
    }
}

/// `GET /openapi.json`: what paths there are, and what goes in and comes out.
async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], include_str!("openapi.json")).into_response()
}

/// `GET /ready`: whether requests should be sent here.
async fn ready(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    app.check_ready()?;
    Ok(json(&serde_json::json!({"status": "ready"})))
}
