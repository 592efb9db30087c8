//! `POST /tokenize` and `POST /detokenize`: what a text or a conversation is to the model; and `GET /tokenizer_info`: by which tokens a client that
//! tokenises elsewhere begins and ends texts.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use serde_json::{Value, json};

use super::app::App;
use super::body::receive;
use super::error::ApiError;
use super::fields::Fields;
use super::talk::Talk;
use super::{api, params};
use crate::tokenizer::SpecialToken;

type Work = fn(&App, Fields) -> Result<Value, ApiError>;

/// `POST /tokenize`
pub async fn tokenize(State(app): State<Arc<App>>, body: Body) -> Result<Response, ApiError> {
    answer(app, body, ids).await
}

/// `POST /detokenize`
pub async fn detokenize(State(app): State<Arc<App>>, body: Body) -> Result<Response, ApiError> {
    answer(app, body, text).await
}

/// `GET /tokenizer_info`
pub async fn tokenizer_info(State(app): State<Arc<App>>) -> Response {
    let special = app.tokenizer.special();
    let text = |token: &Option<SpecialToken>| token.as_ref().map(|token| token.text.clone());
    api::json(&json!({
        "bos_token": text(&special.bos), "eos_token": text(&special.eos), "pad_token": text(&special.pad),
        "unk_token": text(&special.unk),
    }))
}

async fn answer(app: Arc<App>, body: Body, work: Work) -> Result<Response, ApiError> {
    let content = receive(&app, body).await?;
    let shared = app.clone();
    let value = app.spawn_bounded(move |abandoned| {
        let mut fields = Fields::parse(&content, abandoned)?;
        params::model(&mut fields, &shared)?;
        work(&shared, fields)
    });
    Ok(api::json(&value.await?))
}

fn ids(app: &App, mut fields: Fields) -> Result<Value, ApiError> {
    let strings = fields.or("return_token_strs", false)?;
    let (field, (text, add_special)) = match fields.take::<String>("prompt")? {
        Some(text) => ("prompt", (text, fields.or("add_special_tokens", true)?)),
        None => {
            let Talk { text, add_special, .. } = Talk::read(app, &mut fields)?;
            ("messages", (text, add_special))
        }
    };
    let ids = app.tokenizer.encode(&text, add_special).map_err(|e| fields.refusal(field, e.message))?;
    let shown = strings.then(|| ids.iter().map(|id| app.tokenizer.token(*id)).collect::<Vec<_>>());
    let context = app.engine.limits().context;
    Ok(json!({"count": ids.len(), "max_model_len": context, "tokens": ids, "token_strs": shown}))
}

fn text(app: &App, mut fields: Fields) -> Result<Value, ApiError> {
    let ids: Vec<u32> = fields.list("tokens", usize::MAX)?;
    let known = app.tokenizer.vocabulary();
    if let Some(id) = ids.iter().find(|id| **id as usize >= known) {
        return Err(fields.refusal("tokens", format!("token {id} is not among the tokenizer's {known} ids")));
    }
    let text = app.tokenizer.decode(&ids, false).map_err(|e| fields.refusal("tokens", e.message))?;
    Ok(json!({"prompt": text}))
}
