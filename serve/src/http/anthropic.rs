//! `POST /v1/messages` and `/v1/messages/count_tokens`, Anthropic's API: the same conversations in another form. A request is translated
//! to the fields of a chat; an answer is blocks of text, thinking and calls of tools, and as a stream events that open and close them.

mod translate;

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use serde_json::{Value, json};

use super::app::App;
use super::body::receive;
use super::error::ApiError;
use super::fields::{Fields, append};
use super::generate::{Asked, Endpoint, Head};
use super::middleware::Caller;
use super::params::{Params, model};
use super::sse::Frames;
use super::talk::{Talk, Turn};
use crate::answer::{Delta, Ended};
use crate::engine::Usage;
use crate::markup::{Call, Piece};

/// How messages are read and written.
#[derive(Debug)]
pub struct Messages {
    talk: Talk,
    turn: Turn,
    /// Blocks of a plain response.
    blocks: Vec<Value>,
    ended: Option<Ended>,
    /// Whether the context ends before `max_tokens`.
    clamped: bool,
    /// The block that is open in a stream.
    open: Option<&'static str>,
    /// Blocks that were opened.
    opened: usize,
}

/// Tokens as Anthropic counts them: those found in the cache are not part of the input.
fn usage(used: &Usage) -> Value {
    json!({
        "input_tokens": used.prompt - used.cached.min(used.prompt), "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": used.cached, "output_tokens": used.output,
    })
}

/// What a thinking block is signed with; nobody checks it, and some clients want it.
const SIGNATURE: &str = "astrai";

impl Messages {
    fn stop_reason(&self) -> &'static str {
        match self.ended {
            Some(Ended::Length) if self.clamped => "model_context_window_exceeded",
            Some(Ended::Length) => "max_tokens",
            Some(Ended::StopString(_)) => "stop_sequence",
            _ if self.turn.calls > 0 => "tool_use",
            _ => "end_turn",
        }
    }

    /// The stop sequence that was found, or null.
    fn stop_sequence(&self, head: &Head) -> Value {
        match self.ended {
            Some(Ended::StopString(place)) => json!(head.params.stops.get(place)),
            _ => Value::Null,
        }
    }

    fn message(&self, head: &Head, content: Vec<Value>, used: &Usage) -> Value {
        let reason = self.ended.map(|_| self.stop_reason());
        json!({
            "id": head.id, "type": "message", "role": "assistant", "model": head.params.model, "content": content,
            "stop_reason": reason, "stop_sequence": self.stop_sequence(head), "usage": usage(used),
        })
    }

    fn tool_use(&self, head: &Head, call: &Call) -> Value {
        let id = self.talk.call_id(&head.app, "toolu_");
        json!({"type": "tool_use", "id": id, "name": call.name, "input": {}})
    }

    /// Adds to a block of text, or begins one.
    fn add(&mut self, kind: &str, key: &str, text: String) {
        match self.blocks.last_mut() {
            Some(last) if last["type"] == *kind => append(&mut last[key], &text),
            _ => {
                let mut block = json!({"type": kind, key: text});
                if kind == "thinking" {
                    block["signature"] = SIGNATURE.into();
                }
                self.blocks.push(block);
            }
        }
    }

    fn delta_of(&self, delta: Value) -> Value {
        json!({"type": "content_block_delta", "index": self.opened.saturating_sub(1), "delta": delta})
    }

    /// Closes the block that is open, unless it is of this kind.
    fn close(&mut self, but: Option<&str>, out: &mut Frames) {
        let Some(kind) = self.open.filter(|open| but != Some(open)) else { return };
        if kind == "thinking" {
            out.event(&self.delta_of(json!({"type": "signature_delta", "signature": SIGNATURE})));
        }
        out.event(&json!({"type": "content_block_stop", "index": self.opened - 1}));
        self.open = None;
    }

    fn begin_block(&mut self, kind: &'static str, block: Value, out: &mut Frames) {
        out.event(&json!({"type": "content_block_start", "index": self.opened, "content_block": block}));
        self.opened += 1;
        self.open = Some(kind);
    }

    /// Sends a text of a kind, in the block that is open if it is of that kind.
    fn send(&mut self, kind: &'static str, key: &str, text: &str, out: &mut Frames) {
        self.close(Some(kind), out);
        if self.open.is_none() {
            let mut block = json!({"type": kind, key: ""});
            if kind == "thinking" {
                block["signature"] = "".into();
            }
            self.begin_block(kind, block, out);
        }
        out.event(&self.delta_of(json!({"type": format!("{kind}_delta"), key: text})));
    }
}

impl Endpoint for Messages {
    const PREFIX: &'static str = "msg_";
    const PROMPT: &'static str = "messages";
    const NAMES: &'static [(&'static str, &'static str)] = &[
        ("stop", "stop_sequences"),
        ("response_format.json_schema", "output_config.format"),
        ("response_format", "output_config.format"),
        ("reasoning_effort", "output_config.effort"),
        ("thinking_token_budget", "thinking.budget_tokens"),
    ];
    const PING: &'static [u8] = b"event: ping\ndata: {\"type\": \"ping\"}\n\n";

    fn read(fields: &mut Fields, app: &App, caller: Caller) -> Result<Asked<Self>, ApiError> {
        translate::request(fields, true)?;
        let mut params = Params::read(fields, app, caller)?;
        params.one_choice(fields)?;
        let talk = Talk::read(app, fields)?;
        let ids = app.encode(Self::PROMPT, &talk.text, talk.add_special)?;
        let room = app.engine.limits().context.saturating_sub(ids.len()).max(1);
        let clamped = params.sampling.max_tokens.is_some_and(|most| most > room);
        params.sampling.max_tokens = params.sampling.max_tokens.map(|most| most.min(room));
        talk.show_markup(app, &mut params);
        talk.constraint(app, &mut params)?;
        let turn = talk.turn();
        let blocks = Vec::new();
        let messages = Messages { talk, turn, blocks, ended: None, clamped, open: None, opened: 0 };
        Ok((messages, params, vec![ids]))
    }

    fn take(&mut self, head: &Head, delta: Delta) {
        self.ended = delta.ended;
        for piece in self.turn.read(&delta) {
            match piece {
                Piece::Content(text) => self.add("text", "text", text),
                Piece::Reasoning(text) => self.add("thinking", "thinking", text),
                Piece::Call(call) => {
                    let mut block = self.tool_use(head, &call);
                    block["input"] = serde_json::from_str(&call.arguments).unwrap_or_default();
                    self.blocks.push(block);
                }
            }
        }
    }

    fn whole(mut self, head: &Head, used: &Usage) -> Value {
        let blocks = std::mem::take(&mut self.blocks);
        self.message(head, blocks, used)
    }

    fn begin(&mut self, head: &Head, out: &mut Frames) {
        let used = Usage { prompt: head.prompt, ..Usage::default() };
        out.event(&json!({"type": "message_start", "message": self.message(head, Vec::new(), &used)}));
    }

    fn delta(&mut self, head: &Head, delta: Delta, _: usize, out: &mut Frames) {
        self.ended = delta.ended;
        for piece in self.turn.read(&delta) {
            match piece {
                Piece::Content(text) => self.send("text", "text", &text, out),
                Piece::Reasoning(text) => self.send("thinking", "thinking", &text, out),
                Piece::Call(call) => {
                    self.close(None, out);
                    let block = self.tool_use(head, &call);
                    self.begin_block("tool_use", block, out);
                    let delta = json!({"type": "input_json_delta", "partial_json": call.arguments});
                    out.event(&self.delta_of(delta));
                    self.close(None, out);
                }
            }
        }
    }

    fn end(&mut self, head: &Head, used: &Usage, out: &mut Frames) {
        self.close(None, out);
        let delta = json!({"stop_reason": self.stop_reason(), "stop_sequence": self.stop_sequence(head)});
        out.event(&json!({"type": "message_delta", "delta": delta, "usage": usage(used)}));
        out.event(&json!({"type": "message_stop"}));
    }

    fn fail(&mut self, head: &Head, why: &ApiError, out: &mut Frames) {
        out.event(&why.anthropic(Some(&head.incoming.id)));
    }
}

/// `POST /v1/messages/count_tokens`
pub async fn count_tokens(
    State(app): State<Arc<App>>,
    Extension(_): Extension<Caller>,
    body: Body,
) -> Result<Response, ApiError> {
    let content = receive(&app, body).await?;
    let shared = app.clone();
    let work = move |abandoned| {
        let mut fields = Fields::parse(&content, abandoned)?;
        translate::request(&mut fields, false)?;
        model(&mut fields, &shared)?;
        let talk = Talk::read(&shared, &mut fields)?;
        Ok(shared.encode(Messages::PROMPT, &talk.text, talk.add_special)?.len())
    };
    let count = app.spawn_bounded(work).await?;
    Ok(super::api::json(&json!({"input_tokens": count})))
}
