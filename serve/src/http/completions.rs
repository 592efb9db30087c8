//! `POST /v1/completions`: prompts as they are, continued.

use serde_json::{Value, json};

use super::app::App;
use super::error::ApiError;
use super::fields::{Fields, kind};
use super::generate::{Endpoint, Head};
use super::logprobs;
use super::params::Params;
use crate::answer::{Delta, Ended};

/// Tokens of an answer when the request does not say.
const USUAL: usize = 16;

/// Prompts of a request.
const MOST_PROMPTS: usize = 256;

/// How completions are read and written.
#[derive(Debug)]
pub struct Completions {
    /// What is shown of each prompt; none without `echo`.
    echo: Vec<String>,
    /// Characters shown of each choice.
    offsets: Vec<usize>,
}

enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

/// The prompts of a request: a text, texts, ids, or lists of ids.
fn prompts(fields: &mut Fields) -> Result<Vec<Prompt>, ApiError> {
    const WHAT: &str = "must be a text, a list of texts, a list of token ids, or a list of such lists";
    let list = match fields.raw("prompt") {
        None => return Err(fields.refusal("prompt", "is missing; give a text to continue")),
        Some(Value::String(text)) => return Ok(vec![Prompt::Text(text)]),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(fields.refusal("prompt", format!("{WHAT}, not {}", kind(&other)))),
    };
    let ids =
        |list: Vec<Value>, at: &str| -> Result<Prompt, ApiError> { fields.items(at, list).map(Prompt::Ids) };
    match list.first() {
        None => return Err(fields.refusal("prompt", "is empty; give a text to continue")),
        Some(Value::Number(_)) => return Ok(vec![ids(list, "prompt")?]),
        Some(_) if list.len() > MOST_PROMPTS => {
            let what = format!("must have at most {MOST_PROMPTS} prompts, not {}", list.len());
            return Err(fields.refusal("prompt", what));
        }
        Some(_) => {}
    }
    let one = |(i, value)| match value {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(list) => ids(list, &format!("prompt[{i}]")),
        other => Err(fields.refusal(&format!("prompt[{i}]"), format!("{WHAT}, not {}", kind(&other)))),
    };
    list.into_iter().enumerate().map(one).collect()
}

impl Endpoint for Completions {
    const PREFIX: &'static str = "cmpl-";
    const PROMPT: &'static str = "prompt";
    const OBJECT: &'static str = "text_completion";
    const CHUNK: &'static str = "text_completion";

    fn read(fields: &mut Fields, params: &mut Params, app: &App) -> Result<(Self, Vec<Vec<u32>>), ApiError> {
        params.sampling.logprobs = fields.take("logprobs")?;
        let echo = fields.or("echo", false)?;
        if echo && params.sampling.logprobs.is_some() {
            let what =
                "together with logprobs needs log-probabilities of the prompt, which are not supported";
            return Err(fields.refusal("echo", what));
        }
        let add_special = fields.or("add_special_tokens", true)?;
        let (mut shown, mut all) = (Vec::new(), Vec::new());
        for prompt in prompts(fields)? {
            let wrong = |e: crate::tokenizer::TokenizerError| fields.refusal("prompt", e.message);
            let (text, ids) = match prompt {
                Prompt::Text(text) => {
                    let ids = app.encode("prompt", &text, add_special)?;
                    (text, ids)
                }
                Prompt::Ids(ids) if echo => {
                    (app.tokenizer.decode(&ids, params.skip_special).map_err(wrong)?, ids)
                }
                Prompt::Ids(ids) => (String::new(), ids),
            };
            shown.push(text);
            all.push(ids);
        }
        let most = all.iter().map(|ids| app.engine.limits().context.saturating_sub(ids.len())).min();
        params.sampling.max_tokens.get_or_insert(USUAL.min(most.unwrap_or(0)).max(1));
        let echo = if echo { shown } else { Vec::new() };
        Ok((Completions { echo, offsets: Vec::new() }, all))
    }

    fn whole(&mut self, head: &Head, choice: Delta) -> Value {
        let prompt = choice.index / head.params.n.max(1);
        let echoed = self.echo.get(prompt as usize).map_or("", String::as_str);
        let text = format!("{echoed}{}", choice.text);
        self.choice(head, Delta { text, ..choice })
    }

    fn begin(&mut self, head: &Head) -> Vec<Value> {
        let texts = std::mem::take(&mut self.echo).into_iter();
        let texts = texts.flat_map(|text| std::iter::repeat_n(text, head.params.n as usize));
        let begun = |(index, text)| Delta { index, text, ..Delta::default() };
        (0..).zip(texts).map(begun).map(|delta| self.choice(head, delta)).collect()
    }

    fn delta(&mut self, head: &Head, delta: Delta) -> Vec<Value> {
        vec![self.choice(head, delta)]
    }
}

impl Completions {
    fn choice(&mut self, head: &Head, new: Delta) -> Value {
        let Delta { index, text, tokens, ended } = new;
        let at = index as usize;
        if self.offsets.len() <= at {
            self.offsets.resize(at + 1, 0);
        }
        let shown = match head.params.sampling.logprobs {
            Some(_) => logprobs::completion(&head.app.tokenizer, &tokens, &mut self.offsets[at]),
            None => Value::Null,
        };
        json!({
            "index": index, "text": text, "logprobs": shown, "finish_reason": ended.map(Ended::name),
            "stop_reason": head.stop_reason(ended),
        })
    }
}
