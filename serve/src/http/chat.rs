//! `POST /v1/chat/completions`: a conversation, put through the model's template and continued. Thoughts and calls of tools that the
//! model writes come in fields of their own.

use serde_json::{Map, Value, json};

use super::app::App;
use super::error::ApiError;
use super::fields::Fields;
use super::generate::{Asked, Endpoint, Head, MOST_CHOICES, usage};
use super::logprobs;
use super::middleware::Caller;
use super::params::Params;
use super::sse::Frames;
use super::talk::{Said, Talk, Turn};
use crate::answer::{Delta, Ended, Token};
use crate::engine::Usage;
use crate::markup::{Call, Piece};
use crate::request::MOST_LOGPROBS;

/// The type of a plain response.
const OBJECT: &str = "chat.completion";

/// The type of a chunk of a stream.
const CHUNK: &str = "chat.completion.chunk";

/// How chats are read and written.
#[derive(Debug)]
pub struct ChatCompletions {
    talk: Talk,
    choices: Vec<Choice>,
}

#[derive(Debug)]
struct Choice {
    turn: Turn,
    /// Of a plain response.
    said: Said,
    tokens: Vec<Token>,
    ended: Option<Ended>,
}

/// How many likeliest tokens are shown beside each, if any are.
fn likeliest(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let on = fields.or("logprobs", false)?;
    match (on, fields.take::<u32>("top_logprobs")?) {
        (_, Some(top)) if top > MOST_LOGPROBS => {
            Err(fields.refusal("top_logprobs", format!("must be at most {MOST_LOGPROBS}, not {top}")))
        }
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(fields.refusal("top_logprobs", "needs logprobs; set it to true")),
    }
}

/// Log-probabilities of the tokens that are shown, if asked for: one that ends the answer is not.
fn shown_logprobs(head: &Head, tokens: &[Token], ended: Option<Ended>) -> Value {
    let hidden = usize::from(matches!(ended, Some(Ended::Eos | Ended::StopId(_))));
    match head.params.sampling.logprobs {
        Some(_) => logprobs::chat(&head.app.tokenizer, &tokens[..tokens.len().saturating_sub(hidden)]),
        None => Value::Null,
    }
}

impl ChatCompletions {
    fn call(&self, head: &Head, Call { name, arguments }: Call) -> Value {
        let id = self.talk.call_id(&head.app, "call_");
        json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
    }

    /// Tokens of thoughts, over all choices.
    fn reasoning(&self) -> usize {
        self.choices.iter().map(|choice| choice.turn.reasoning).sum()
    }

    /// What is new of a message, as deltas of chunks of their own.
    fn deltas(&self, head: &Head, piece: Piece, calls: &mut usize) -> Vec<Value> {
        match piece {
            Piece::Content(text) => vec![json!({"content": text})],
            Piece::Reasoning(text) => vec![json!({"reasoning_content": text, "reasoning": text})],
            Piece::Call(mut call) => {
                let index = *calls;
                *calls += 1;
                let arguments = std::mem::take(&mut call.arguments);
                let mut first = self.call(head, call);
                first["index"] = json!(index);
                let rest = json!({"index": index, "function": {"arguments": arguments}});
                [first, rest].map(|call| json!({"tool_calls": [call]})).into()
            }
        }
    }
}

impl Endpoint for ChatCompletions {
    const PREFIX: &'static str = "chatcmpl-";
    const PROMPT: &'static str = "messages";

    fn read(fields: &mut Fields, app: &App, caller: Caller) -> Result<Asked<Self>, ApiError> {
        let mut params = Params::read(fields, app, caller)?;
        params.sampling.logprobs = likeliest(fields)?;
        if params.sampling.prompt_logprobs.is_some() {
            return Err(fields.refusal("prompt_logprobs", "is for /v1/completions; leave it out"));
        }
        if fields.or("echo", false)? {
            return Err(fields.refusal("echo", "is for /v1/completions; leave it out"));
        }
        let talk = Talk::read(app, fields)?;
        let ids = app.encode(Self::PROMPT, &talk.text, talk.add_special)?;
        talk.show_markup(app, &mut params);
        talk.constraint(app, &mut params)?;
        let choice = |_| Choice { turn: talk.turn(), said: Said::default(), tokens: Vec::new(), ended: None };
        let choices = (0..params.n.min(MOST_CHOICES as u32)).map(choice).collect();
        Ok((ChatCompletions { talk, choices }, params, vec![ids]))
    }

    fn take(&mut self, _: &Head, delta: Delta) {
        let Some(choice) = self.choices.get_mut(delta.index as usize) else { return };
        choice.said.add(choice.turn.read(&delta));
        choice.tokens.extend(delta.tokens);
        choice.ended = delta.ended;
    }

    fn whole(mut self, head: &Head, used: &Usage) -> Value {
        let reasoning = self.reasoning();
        let mut choices = Vec::with_capacity(self.choices.len());
        for (index, choice) in std::mem::take(&mut self.choices).into_iter().enumerate() {
            let Choice { turn, said, tokens, ended } = choice;
            let mut message = Map::new();
            message.insert("role".into(), json!("assistant"));
            message.insert("content".into(), said.content());
            message.insert("refusal".into(), Value::Null);
            if !said.reasoning.is_empty() {
                message.insert("reasoning_content".into(), json!(said.reasoning));
                message.insert("reasoning".into(), json!(said.reasoning));
            }
            if !said.calls.is_empty() {
                let calls: Vec<Value> = said.calls.into_iter().map(|call| self.call(head, call)).collect();
                message.insert("tool_calls".into(), json!(calls));
            }
            let mut choice = json!({
                "index": index, "message": message, "logprobs": shown_logprobs(head, &tokens, ended),
                "finish_reason": ended.map_or("stop", |ended| turn.finish_reason(ended)),
                "stop_reason": head.stop_reason(ended),
            });
            head.show_ids(&mut choice, index as u32, &tokens, true);
            choices.push(choice);
        }
        let mut whole = head.object(OBJECT, choices);
        whole["usage"] = usage(used, reasoning);
        whole
    }

    fn begin(&mut self, head: &Head, out: &mut Frames) {
        let delta = json!({"role": "assistant", "content": ""});
        for index in 0..head.params.n {
            let mut choice = json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null});
            head.show_ids(&mut choice, index, &[], true);
            out.data(&head.chunk(CHUNK, choice, 0));
        }
    }

    /// What is shown, and by itself that it ends.
    fn delta(&mut self, head: &Head, delta: Delta, sampled: usize, out: &mut Frames) {
        let index = delta.index;
        let Some(choice) = self.choices.get_mut(index as usize) else { return };
        let mut calls = choice.turn.calls;
        let pieces = choice.turn.read(&delta);
        let end = delta.ended.map(|ended| choice.turn.finish_reason(ended));
        let Delta { tokens, ended, .. } = delta;
        let mut shown = shown_logprobs(head, &tokens, ended);
        let mut new: Vec<Value> =
            pieces.into_iter().flat_map(|piece| self.deltas(head, piece, &mut calls)).collect();
        if new.is_empty() && !shown.is_null() {
            new.push(json!({"content": ""}));
        }
        if new.is_empty() && head.params.show_ids && !tokens.is_empty() {
            new.push(json!({"content": ""}));
        }
        for (i, delta) in new.into_iter().enumerate() {
            // Of all tokens, with the first of what they show.
            let logprobs = shown.take();
            let mut choice =
                json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": null});
            head.show_ids(&mut choice, index, if i == 0 { &tokens } else { &[] }, false);
            out.data(&head.chunk(CHUNK, choice, sampled));
        }
        if let Some(reason) = end {
            let choice = json!({
                "index": index, "delta": {}, "logprobs": null, "finish_reason": reason,
                "stop_reason": head.stop_reason(ended),
            });
            out.data(&head.chunk(CHUNK, choice, sampled));
        }
    }

    fn end(&mut self, head: &Head, used: &Usage, out: &mut Frames) {
        head.done(CHUNK, used, self.reasoning(), out);
    }
}
