//! `POST /v1/responses`, OpenAI's newer API: items in, items out, and as a stream events that say what becomes of each. A request may go on
//! from an earlier response, which is kept in memory for a while.

mod kept;
mod translate;

use serde_json::{Map, Value, json};

use super::app::App;
use super::error::ApiError;
use super::fields::Fields;
use super::generate::{Asked, Endpoint, Head};
use super::logprobs;
use super::middleware::Caller;
use super::params::Params;
use super::sse::Frames;
use super::talk::{Said, Talk, Turn};
use crate::answer::{Delta, Ended, Token};
use crate::engine::Usage;
use crate::markup::{Call, Piece};

pub use kept::Kept;

/// How responses are read and written.
#[derive(Debug)]
pub struct Responses {
    talk: Talk,
    turn: Turn,
    /// Fields of the request that a response repeats.
    repeated: Map<String, Value>,
    /// The conversation up to this request, to go on from; none if it is not to be kept.
    messages: Option<Vec<Value>>,
    said: Said,
    /// Items that are whole.
    items: Vec<Value>,
    /// The item that is open: a message, or a thought.
    open: Option<Open>,
    /// Tokens with log-probabilities whose text has not come yet.
    untold: Vec<Token>,
    ended: Option<Ended>,
    sequence: u64,
}

#[derive(Debug)]
struct Open {
    thought: bool,
    id: String,
    text: String,
    /// Of the tokens of the text, if they are asked for.
    logprobs: Vec<Value>,
}

impl Open {
    /// The item, its text at this state.
    fn item(&self, status: &str) -> Value {
        let content: Vec<Value> = (status != "in_progress").then(|| self.part()).into_iter().collect();
        match self.thought {
            true => {
                json!({"id": self.id, "type": "reasoning", "summary": [], "content": content, "status": status})
            }
            false => json!({
                "id": self.id, "type": "message", "role": "assistant", "content": content, "status": status,
            }),
        }
    }

    fn part(&self) -> Value {
        match self.thought {
            true => json!({"type": "reasoning_text", "text": self.text}),
            false => json!({
                "type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs,
            }),
        }
    }

    /// What events about its text begin with.
    fn kind(&self) -> &'static str {
        if self.thought { "response.reasoning_text" } else { "response.output_text" }
    }
}

impl Responses {
    fn event(&mut self, kind: &str, fields: Value, out: &mut Frames) {
        let mut event = json!({"type": kind, "sequence_number": self.sequence});
        self.sequence += 1;
        if let (Some(event), Value::Object(fields)) = (event.as_object_mut(), fields) {
            event.extend(fields);
        }
        out.event(&event);
    }

    /// An event about the part that is open, with more fields.
    fn of_part(&mut self, kind: &str, more: Value, out: &mut Frames) {
        let Some(open) = &self.open else { return };
        let mut fields = json!({"item_id": open.id, "output_index": self.items.len(), "content_index": 0});
        if let (Some(fields), Value::Object(more)) = (fields.as_object_mut(), more) {
            fields.extend(more);
        }
        self.event(kind, fields, out);
    }

    fn open(&mut self, thought: bool, head: &Head, out: &mut Frames) {
        if self.open.as_ref().is_some_and(|open| open.thought == thought) {
            return;
        }
        self.close("completed", out);
        let id = format!("{}{}", if thought { "rs_" } else { "msg_" }, head.app.new_id());
        let open = Open { thought, id, text: String::new(), logprobs: Vec::new() };
        let (item, part) = (open.item("in_progress"), open.part());
        self.open = Some(open);
        let at = self.items.len();
        self.event("response.output_item.added", json!({"output_index": at, "item": item}), out);
        self.of_part("response.content_part.added", json!({"part": part}), out);
    }

    fn add(&mut self, head: &Head, text: &str, out: &mut Frames) {
        let tokens = std::mem::take(&mut self.untold);
        let Some(open) = &mut self.open else { return };
        open.text.push_str(text);
        let kind = format!("{}.delta", open.kind());
        let mut more = json!({"delta": text});
        if !open.thought {
            let logprobs = logprobs::each(&head.app.tokenizer, &tokens).unwrap_or_default();
            more["logprobs"] = json!(logprobs);
            open.logprobs.extend(logprobs);
        }
        self.of_part(&kind, more, out);
    }

    fn close(&mut self, status: &str, out: &mut Frames) {
        let Some(open) = &self.open else { return };
        let (kind, text, part, item) =
            (format!("{}.done", open.kind()), open.text.clone(), open.part(), open.item(status));
        let mut done = json!({"text": text});
        if !open.thought {
            done["logprobs"] = json!(open.logprobs);
        }
        self.of_part(&kind, done, out);
        self.of_part("response.content_part.done", json!({"part": part}), out);
        let at = self.items.len();
        self.event("response.output_item.done", json!({"output_index": at, "item": item}), out);
        self.items.push(item);
        self.open = None;
    }

    fn call(&mut self, head: &Head, call: &Call, out: &mut Frames) {
        self.close("completed", out);
        let (at, id) = (self.items.len(), format!("fc_{}", head.app.new_id()));
        let mut item = json!({
            "id": id, "type": "function_call", "call_id": self.talk.call_id(&head.app, "call_"),
            "name": call.name, "arguments": "", "status": "in_progress",
        });
        self.event("response.output_item.added", json!({"output_index": at, "item": item}), out);
        let fields = json!({"item_id": id, "output_index": at, "delta": call.arguments});
        self.event("response.function_call_arguments.delta", fields, out);
        let fields = json!({
            "item_id": id, "output_index": at, "name": call.name, "arguments": call.arguments,
        });
        self.event("response.function_call_arguments.done", fields, out);
        item["arguments"] = json!(call.arguments);
        item["status"] = json!("completed");
        self.event("response.output_item.done", json!({"output_index": at, "item": item}), out);
        self.items.push(item);
    }

    fn read_delta(&mut self, head: &Head, delta: &Delta, out: &mut Frames) {
        let thought = self.turn.reasoning;
        let pieces = self.turn.read(delta);
        self.said.add(pieces.clone());
        if head.params.sampling.logprobs.is_some() && self.turn.reasoning == thought {
            let hidden = usize::from(matches!(delta.ended, Some(Ended::Eos | Ended::StopId(_))));
            self.untold.extend(delta.tokens[..delta.tokens.len().saturating_sub(hidden)].iter().cloned());
        }
        for piece in pieces {
            match piece {
                Piece::Content(text) => {
                    self.open(false, head, out);
                    self.add(head, &text, out);
                }
                Piece::Reasoning(text) => {
                    self.open(true, head, out);
                    self.add(head, &text, out);
                }
                Piece::Call(call) => {
                    self.untold.clear();
                    self.call(head, &call, out);
                }
            }
        }
        self.ended = delta.ended;
    }

    /// The response at a state; with what was used at the end.
    fn response(&self, head: &Head, status: &str, used: Option<&Usage>, error: Value) -> Value {
        let usage = used.map(|used| {
            json!({
                "input_tokens": used.prompt, "input_tokens_details": {"cached_tokens": used.cached},
                "output_tokens": used.output, "total_tokens": used.prompt + used.output,
                "output_tokens_details": {"reasoning_tokens": self.turn.reasoning},
            })
        });
        let why = (status == "incomplete").then(|| json!({"reason": "max_output_tokens"}));
        let sampling = &head.params.sampling;
        let mut response = json!({
            "id": head.id, "object": "response", "created_at": head.created, "status": status, "error": error,
            "incomplete_details": why, "model": head.params.model, "output": self.items,
            "temperature": sampling.temperature, "top_p": sampling.top_p, "usage": usage,
        });
        if let Some(response) = response.as_object_mut() {
            response.extend(self.repeated.clone());
        }
        response
    }

    fn status(&self) -> &'static str {
        if self.ended == Some(Ended::Length) { "incomplete" } else { "completed" }
    }

    /// Keeps the conversation, to go on from.
    fn keep(&mut self, head: &Head) {
        let Some(mut messages) = self.messages.take() else { return };
        messages.push(translate::message(&self.said, &self.items));
        head.app.kept.add(head.id.clone(), head.caller.0, messages);
    }
}

/// A conversation, and the ids of its prompt.
fn prompt(app: &App, fields: &mut Fields) -> Result<(Talk, Vec<u32>), ApiError> {
    // Several items may be one message.
    let of_items = |e: ApiError| match e.param.as_deref() {
        Some(param) if param.starts_with("messages") => e.about(Responses::PROMPT.into()),
        _ => e,
    };
    let talk = Talk::read(app, fields).map_err(of_items)?;
    let ids = app.encode(Responses::PROMPT, &talk.text, talk.add_special)?;
    Ok((talk, ids))
}

/// The same, without its oldest turns where it leaves no room for an answer of so many tokens. What is left begins with something that
/// the user said; instructions stay.
fn fitting(app: &App, fields: &mut Fields, most: usize) -> Result<(Talk, Vec<u32>), ApiError> {
    let room = app.engine.limits().context.saturating_sub(most);
    let is_short = |read: &Result<(Talk, Vec<u32>), ApiError>| match read {
        Ok((_, ids)) => ids.len() <= room,
        Err(e) => e.code != Some("context_length_exceeded"),
    };
    let mut best = prompt(app, &mut fields.clone());
    if is_short(&best) {
        return best;
    }
    let messages: Vec<Value> = fields.or("messages", Vec::new())?;
    let kept = messages.iter().take_while(|message| message["role"] == "system").count();
    let is_turn = |at: &usize| messages[*at]["role"] == "user";
    let turns: Vec<usize> = (kept + 1..messages.len()).filter(is_turn).collect();
    let (mut low, mut high) = (0, turns.len());
    while low < high {
        let middle = (low + high) / 2;
        let mut shorter = fields.clone();
        shorter.put("messages", [&messages[..kept], &messages[turns[middle]..]].concat().into());
        let read = prompt(app, &mut shorter);
        match is_short(&read) {
            true => (best, high) = (read, middle),
            false => low = middle + 1,
        }
    }
    best
}

impl Endpoint for Responses {
    const PREFIX: &'static str = "resp_";
    const PROMPT: &'static str = "input";
    const NAMES: &'static [(&'static str, &'static str)] = &[
        ("max_tokens", "max_output_tokens"),
        ("max_completion_tokens", "max_output_tokens"),
        ("response_format.json_schema", "text.format"),
        ("response_format", "text.format"),
        ("reasoning_effort", "reasoning.effort"),
    ];

    fn read(fields: &mut Fields, app: &App, caller: Caller) -> Result<Asked<Self>, ApiError> {
        let repeated = translate::repeated(fields);
        let before = match fields.take::<String>("previous_response_id")? {
            None => Vec::new(),
            Some(id) => app.kept.get(&id, caller.0).ok_or_else(|| {
                let what = "is not among the responses that are kept; send the whole conversation as input";
                ApiError {
                    status: axum::http::StatusCode::NOT_FOUND,
                    ..fields.refusal("previous_response_id", what)
                }
            })?,
        };
        let messages = translate::request(fields, before)?;
        let likeliest = translate::likeliest(fields)?;
        let keep = fields.or("store", true)?;
        let shortens = match fields.take::<String>("truncation")?.as_deref() {
            None | Some("disabled") => false,
            Some("auto") => true,
            Some(_) => return Err(fields.refusal("truncation", "must be \"auto\" or \"disabled\"")),
        };
        let mut params = Params::read(fields, app, caller)?;
        params.one_choice(fields)?;
        params.sampling.logprobs = likeliest;
        let (talk, ids) = match shortens {
            false => prompt(app, fields)?,
            true => fitting(app, fields, params.sampling.max_tokens.unwrap_or(1))?,
        };
        talk.show_markup(app, &mut params);
        talk.constraint(app, &mut params)?;
        let (turn, said, items) = (talk.turn(), Said::default(), Vec::new());
        let messages = keep.then_some(messages);
        let responses = Responses {
            talk,
            turn,
            repeated,
            messages,
            said,
            items,
            open: None,
            untold: vec![],
            ended: None,
            sequence: 0,
        };
        Ok((responses, params, vec![ids]))
    }

    fn take(&mut self, head: &Head, delta: Delta) {
        // The items are made as in a stream that nobody reads.
        self.read_delta(head, &delta, &mut Frames::default());
    }

    fn whole(mut self, head: &Head, used: &Usage) -> Value {
        self.close(self.status(), &mut Frames::default());
        self.keep(head);
        self.response(head, self.status(), Some(used), Value::Null)
    }

    fn begin(&mut self, head: &Head, out: &mut Frames) {
        for kind in ["response.created", "response.in_progress"] {
            let response = self.response(head, "in_progress", None, Value::Null);
            self.event(kind, json!({"response": response}), out);
        }
    }

    fn delta(&mut self, head: &Head, delta: Delta, _: usize, out: &mut Frames) {
        self.read_delta(head, &delta, out);
    }

    fn end(&mut self, head: &Head, used: &Usage, out: &mut Frames) {
        let status = self.status();
        self.close(status, out);
        self.keep(head);
        let response = self.response(head, status, Some(used), Value::Null);
        self.event(&format!("response.{status}"), json!({"response": response}), out);
    }

    fn fail(&mut self, head: &Head, why: &ApiError, out: &mut Frames) {
        self.close("incomplete", out);
        let code = match why.status.as_u16() {
            429 => "rate_limit_exceeded",
            500.. => "server_error",
            _ => "invalid_prompt",
        };
        let error = json!({"code": code, "message": why.message});
        let response = self.response(head, "failed", None, error);
        self.event("response.failed", json!({"response": response}), out);
    }
}
