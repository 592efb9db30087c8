//! `POST /v1/completions`: prompts as they are, continued.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::app::App;
use super::error::ApiError;
use super::fields::{Fields, kind};
use super::generate::{Asked, Endpoint, Head, MOST_CHOICES, usage};
use super::logprobs;
use super::middleware::Caller;
use super::params::Params;
use super::sse::Frames;
use crate::answer::{Delta, Ended, Token};
use crate::engine::Usage;
use crate::grammar::Constraint;
use crate::sample::Logprobs;
use crate::tokenizer::Skip;

/// Tokens of an answer when the request does not say.
const USUAL: usize = 16;

/// Prompts of a request.
const MOST_PROMPTS: usize = 256;

/// The type of an answer, and of its chunks.
const OBJECT: &str = "text_completion";

/// How completions are read and written.
#[derive(Debug)]
pub struct Completions {
    /// What is shown of each prompt; none without `echo`.
    echo: Vec<String>,
    /// Whether log-probabilities of the prompts are shown among those of the answers.
    echo_scores: bool,
    /// Whether nothing is to follow the prompts: what is sampled, for the engine samples a token at least, is not shown.
    echo_alone: bool,
    /// Ids of the prompts whose log-probabilities are wanted.
    prompts: Vec<Vec<u32>>,
    /// Choices of which tokens were shown.
    begun: BTreeSet<u32>,
    /// Characters shown of each choice.
    offsets: Vec<usize>,
    /// Of a plain response.
    choices: Vec<Delta>,
}

/// A text, or its ids.
pub enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

/// The texts of a field, `most` of them: a text, texts, ids, or lists of ids.
///
/// # Errors
/// It is something else, absent, or empty.
pub fn prompts(fields: &mut Fields, field: &'static str, most: usize) -> Result<Vec<Prompt>, ApiError> {
    const WHAT: &str = "must be a text, a list of texts, a list of token ids, or a list of such lists";
    let list = match fields.raw(field) {
        None => return Err(fields.refusal(field, "is missing; give a text")),
        Some(Value::String(text)) => return Ok(vec![Prompt::Text(text)]),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(fields.refusal(field, format!("{WHAT}, not {}", kind(&other)))),
    };
    let ids =
        |list: Vec<Value>, at: &str| -> Result<Prompt, ApiError> { fields.items(at, list).map(Prompt::Ids) };
    match list.first() {
        None => return Err(fields.refusal(field, "is empty; give a text")),
        Some(Value::Number(_)) => return Ok(vec![ids(list, field)?]),
        Some(_) if list.len() > most => {
            let what = format!("must have at most {most} texts, not {}", list.len());
            return Err(fields.refusal(field, what));
        }
        Some(_) => {}
    }
    let one = |(i, value)| match value {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(list) => ids(list, &format!("{field}[{i}]")),
        other => Err(fields.refusal(&format!("{field}[{i}]"), format!("{WHAT}, not {}", kind(&other)))),
    };
    list.into_iter().enumerate().map(one).collect()
}

impl Endpoint for Completions {
    const PREFIX: &'static str = "cmpl-";
    const PROMPT: &'static str = "prompt";
    const NAMES: &'static [(&'static str, &'static str)] = &[("top_logprobs", "logprobs")];
    const OPERATION: &'static str = "text_completion";

    fn read(fields: &mut Fields, app: &App, caller: Caller) -> Result<Asked<Self>, ApiError> {
        let limit = ["max_completion_tokens", "max_tokens"].into_iter().find(|name| fields.has(name));
        let none = limit.filter(|name| fields.peek(name).and_then(Value::as_u64) == Some(0));
        let echo_alone = none.is_some() && fields.peek("echo") == Some(&Value::Bool(true));
        if let Some(name) = none.filter(|_| echo_alone) {
            fields.put(name, 1.into());
        }
        let mut params = Params::read(fields, app, caller)?;
        if params.thinking_budget.is_some() {
            return Err(fields.refusal("thinking_token_budget", "is for conversations; leave it out"));
        }
        params.sampling.logprobs = fields.take("logprobs")?;
        if let Some((field, wanted)) = params.wanted.take() {
            let grammar = Some(app.compile(&field, wanted)?);
            params.constraint = Some(Constraint { grammar, thought: None });
        }
        let echo = fields.or("echo", false)?;
        let echo_scores = echo && params.sampling.logprobs.is_some();
        let top = params.sampling.logprobs;
        params.sampling.prompt_logprobs = params.sampling.prompt_logprobs.or(top.filter(|_| echo));
        let add_special = fields.or("add_special_tokens", true)?;
        let (mut shown, mut all) = (Vec::new(), Vec::new());
        for prompt in prompts(fields, "prompt", MOST_PROMPTS)? {
            let wrong = |e: crate::tokenizer::TokenizerError| fields.refusal("prompt", e.message);
            let (text, ids) = match prompt {
                Prompt::Text(text) => {
                    let ids = app.encode("prompt", &text, add_special)?;
                    (text, ids)
                }
                Prompt::Ids(ids) if echo => {
                    (app.tokenizer.decode(&ids, params.skip != Skip::Nothing).map_err(wrong)?, ids)
                }
                Prompt::Ids(ids) => (String::new(), ids),
            };
            shown.push(text);
            all.push(ids);
        }
        let most = all.iter().map(|ids| app.engine.limits().context.saturating_sub(ids.len())).min();
        params.sampling.max_tokens.get_or_insert(USUAL.min(most.unwrap_or(0)).max(1));
        let echo = if echo { shown } else { Vec::new() };
        let choices = vec![Delta::default(); all.len().saturating_mul(params.n as usize).min(MOST_CHOICES)];
        let prompts = if params.sampling.prompt_logprobs.is_some() { all.clone() } else { Vec::new() };
        let (offsets, begun) = (Vec::new(), BTreeSet::new());
        Ok((Completions { echo, echo_scores, echo_alone, prompts, offsets, begun, choices }, params, all))
    }

    fn take(&mut self, _: &Head, delta: Delta) {
        let delta = self.shown(delta);
        if let Some(choice) = self.choices.get_mut(delta.index as usize) {
            choice.append(delta);
        }
    }

    fn whole(mut self, head: &Head, used: &Usage) -> Value {
        let n = head.params.n.max(1);
        let mut choices = Vec::with_capacity(self.choices.len());
        for (index, taken) in (0..).zip(std::mem::take(&mut self.choices)) {
            let echoed = self.echo.get((index / n) as usize).map_or("", String::as_str);
            let echoed = if self.echo_scores { "" } else { echoed };
            let text = format!("{echoed}{}", taken.text);
            choices.push(self.choice(head, Delta { index, text, ..taken }));
        }
        let mut whole = head.object(OBJECT, choices);
        whole["usage"] = usage(&self.used(used), 0);
        whole
    }

    fn begin(&mut self, head: &Head, out: &mut Frames) {
        // With log-probabilities it comes with them.
        if self.echo_scores {
            return;
        }
        let texts = std::mem::take(&mut self.echo).into_iter();
        let texts = texts.flat_map(|text| std::iter::repeat_n(text, head.params.n as usize));
        for (index, text) in (0..).zip(texts) {
            let choice = self.choice(head, Delta { index, text, ..Delta::default() });
            out.data(&head.chunk(OBJECT, choice, 0));
        }
    }

    fn delta(&mut self, head: &Head, delta: Delta, sampled: usize, out: &mut Frames) {
        let delta = self.shown(delta);
        let choice = self.choice(head, delta);
        out.data(&head.chunk(OBJECT, choice, if self.echo_alone { 0 } else { sampled }));
    }

    fn end(&mut self, head: &Head, used: &Usage, out: &mut Frames) {
        head.done(OBJECT, &self.used(used), 0, out);
    }
}

impl Completions {
    /// What is shown of a delta.
    fn shown(&self, delta: Delta) -> Delta {
        match self.echo_alone {
            true => Delta {
                text: String::new(),
                tokens: Vec::new(),
                ended: delta.ended.map(|_| Ended::Length),
                ..delta
            },
            false => delta,
        }
    }

    fn used(&self, used: &Usage) -> Usage {
        Usage { output: if self.echo_alone { 0 } else { used.output }, ..*used }
    }

    fn choice(&mut self, head: &Head, new: Delta) -> Value {
        let Delta { index, mut text, mut tokens, ended, prompt } = new;
        let first = !tokens.is_empty() && self.begun.insert(index);
        let answer = tokens.clone();
        let scored = self.scored(index, prompt);
        if let Some(scored) = scored.as_ref().filter(|_| self.echo_scores) {
            let of = (index / head.params.n.max(1)) as usize;
            text.insert_str(0, self.echo.get(of).map_or("", String::as_str));
            tokens.splice(0..0, scored.iter().cloned());
        }
        let at = index as usize;
        if self.offsets.len() <= at {
            self.offsets.resize(at + 1, 0);
        }
        let shown = match head.params.sampling.logprobs {
            Some(_) => logprobs::completion(&head.app.tokenizer, &tokens, &mut self.offsets[at]),
            None => Value::Null,
        };
        let mut choice = json!({
            "index": index, "text": text, "logprobs": shown, "finish_reason": ended.map(Ended::name),
            "stop_reason": head.stop_reason(ended),
        });
        if let Some(scored) = scored.filter(|_| !self.echo_scores) {
            choice["prompt_logprobs"] = logprobs::prompt(&head.app.tokenizer, &scored);
        }
        head.show_ids(&mut choice, index, &answer, first);
        choice
    }

    /// The prompt's tokens with their log-probabilities, where they have come.
    fn scored(&mut self, index: u32, known: Vec<Logprobs>) -> Option<Vec<Token>> {
        // One choice a prompt has them; a prompt of one token has none, but is shown.
        let ids = self.prompts.get_mut(index as usize).map(std::mem::take).filter(|ids| !ids.is_empty())?;
        let logprobs = std::iter::once(None).chain(known.into_iter().map(Some));
        Some(ids.into_iter().zip(logprobs).map(|(id, logprobs)| Token { id, logprobs }).collect())
    }
}
