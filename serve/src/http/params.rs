//! What chats and completions have in common: how to sample, when to stop, how to send. A field's type stands here, its range
//! and what is said about it in [`Sampling::checked`], which the engine holds everybody to.

use std::collections::BTreeSet;

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::app::App;
use super::error::ApiError;
use super::fields::{Fields, Read, kind};
use super::middleware::Caller;
use super::structured;
use crate::engine::AdapterId;
use crate::grammar::{Constraint, Wanted};
use crate::request::{MOST_BAD_WORDS, MOST_BIASES, MOST_STOP_IDS, Sampling};
use crate::stop::{StopError, StopStrings};
use crate::tokenizer::Skip;

/// Stop strings of a request.
const MOST_STOPS: usize = 64;

/// Bytes of a salt.
const LONGEST_SALT: usize = 256;

/// What a request asks for besides its prompt.
#[derive(Debug)]
pub struct Params {
    /// The name by which the client knows the model.
    pub model: String,
    /// The adapter that it is.
    pub adapter: Option<AdapterId>,
    pub sampling: Sampling,
    pub n: u32,
    pub stops: Vec<String>,
    pub stop_strings: StopStrings,
    pub skip: Skip,
    pub priority: i32,
    pub salt: Vec<u8>,
    pub stream: Option<StreamOptions>,
    /// What holds the answers.
    pub constraint: Option<Constraint>,
    /// The field by which a grammar was asked for, and what it must be.
    pub wanted: Option<(String, Wanted)>,
    /// Tokens of a thought, at most.
    pub thinking_budget: Option<usize>,
    /// Tokens of a prompt that are kept, its last ones.
    pub truncation: Option<usize>,
    /// Whether ids are shown beside the text.
    pub show_ids: bool,
}

/// What a stream tells besides text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamOptions {
    /// The usage, in a chunk at the end.
    pub usage: bool,
    /// The usage so far, in every chunk.
    pub continuous: bool,
}

/// Puts a field's value where it belongs.
type Set = fn(&mut Sampling, Value) -> Result<(), String>;

fn put<T: Read>(slot: &mut T, value: Value) -> Result<(), String> {
    *slot = T::read(value)?;
    Ok(())
}

/// The later row wins.
const SAMPLING: [(&str, Set); 18] = [
    ("temperature", |s, v| put(&mut s.temperature, v)),
    ("top_p", |s, v| put(&mut s.top_p, v)),
    ("top_k", |s, v| top_k(v).map(|k| s.top_k = k)),
    ("min_p", |s, v| put(&mut s.min_p, v)),
    ("repetition_penalty", |s, v| put(&mut s.repetition_penalty, v)),
    ("presence_penalty", |s, v| put(&mut s.presence_penalty, v)),
    ("frequency_penalty", |s, v| put(&mut s.frequency_penalty, v)),
    ("logit_bias", |s, v| biases(v).map(|b| s.logit_bias = b)),
    ("seed", |s, v| seed(v).map(|n| s.seed = n)),
    ("stop_token_ids", |s, v| stop_ids(v).map(|ids| s.stop_ids = ids)),
    ("max_tokens", |s, v| usize::read(v).map(|n| s.max_tokens = Some(n))),
    ("max_completion_tokens", |s, v| usize::read(v).map(|n| s.max_tokens = Some(n))),
    ("min_tokens", |s, v| put(&mut s.min_tokens, v)),
    ("ignore_eos", |s, v| put(&mut s.ignore_eos, v)),
    ("typical_p", |s, v| put(&mut s.typical_p, v)),
    ("prompt_logprobs", |s, v| u32::read(v).map(|n| s.prompt_logprobs = Some(n))),
    ("allowed_token_ids", |s, v| allowed_ids(v).map(|ids| s.allowed_ids = ids)),
    ("logprobs_mode", |_, v| match v.as_str() {
        Some("raw_logprobs") => Ok(()),
        _ => Err("must be \"raw_logprobs\"; there are no others".into()),
    }),
];

/// -1 is another way to say that all are kept.
fn top_k(value: Value) -> Result<u32, String> {
    match i128::read(value)? {
        -1 => Ok(0),
        k => u32::try_from(k).map_err(|_| format!("must be at least 1, or 0 or -1 for all tokens, not {k}")),
    }
}

/// -1 is another way to ask for none.
fn seed(value: Value) -> Result<Option<u64>, String> {
    match i128::read(value)? {
        -1 => Ok(None),
        n => match (i64::try_from(n), u64::try_from(n)) {
            (_, Ok(seed)) => Ok(Some(seed)),
            (Ok(seed), _) => Ok(Some(seed as u64)),
            _ => Err(format!("must be an integer of 64 bits, not {n}")),
        },
    }
}

fn stop_ids(value: Value) -> Result<Vec<u32>, String> {
    let list = Vec::<Value>::read(value)?;
    if list.len() > MOST_STOP_IDS {
        return Err(format!("must have at most {MOST_STOP_IDS} items, not {}", list.len()));
    }
    list.into_iter().map(u32::read).collect()
}

fn allowed_ids(value: Value) -> Result<Vec<u32>, String> {
    match Vec::<Value>::read(value)?.into_iter().map(u32::read).collect::<Result<Vec<u32>, _>>()? {
        none if none.is_empty() => Err("is empty; allow a token at least, or leave it out".into()),
        ids => Ok(ids),
    }
}

/// Words that may not come, as runs of tokens: at the beginning of a text and, with a space before them, within one.
fn bad_words(fields: &mut Fields, app: &App) -> Result<Vec<Vec<u32>>, ApiError> {
    let words: Vec<String> = fields.list("bad_words", MOST_BAD_WORDS / 2)?;
    let mut runs = BTreeSet::new();
    for (i, word) in words.iter().map(|word| word.trim_start_matches(' ')).enumerate() {
        if word.is_empty() {
            return Err(fields.refusal(&format!("bad_words[{i}]"), "is empty; give a word, or leave it out"));
        }
        for text in [word.to_owned(), format!(" {word}")] {
            runs.insert(app.encode("bad_words", &text, false)?);
        }
    }
    Ok(runs.into_iter().filter(|ids| !ids.is_empty()).collect())
}

/// How many tokens of the prompt are kept, its last ones; none for all.
fn truncation(fields: &mut Fields, app: &App, most: Option<usize>) -> Result<Option<usize>, ApiError> {
    match fields.take::<i128>("truncate_prompt_tokens")? {
        None => Ok(None),
        // What the context has room for.
        Some(-1) => Ok(Some(app.engine.limits().context.saturating_sub(most.unwrap_or(1)).max(1))),
        Some(n) => match usize::try_from(n) {
            Ok(n) if n > 0 => Ok(Some(n)),
            _ => Err(fields.refusal("truncate_prompt_tokens", format!("must be at least 1, or -1, not {n}"))),
        },
    }
}

fn biases(value: Value) -> Result<Vec<(u32, f32)>, String> {
    let entries = Map::read(value)?;
    if entries.len() > MOST_BIASES {
        return Err(format!("must have at most {MOST_BIASES} tokens, not {}", entries.len()));
    }
    let one = |(token, bias): (String, Value)| {
        let id = token.parse().map_err(|_| format!("{:?} is no token id", short(&token)))?;
        Ok((id, f32::read(bias).map_err(|wrong| format!("token {id}: {wrong}"))?))
    };
    entries.into_iter().map(one).collect()
}

/// As much of a client's text as an error may repeat.
pub fn short(text: &str) -> &str {
    text.char_indices().nth(64).map_or(text, |(at, _)| &text[..at])
}

/// A field that would change the answer, and is not supported: the values that ask for nothing, and what to do.
type Refused = (&'static str, fn(&Value) -> bool, &'static str);

const NOTHING: fn(&Value) -> bool = |_| false;
const FALSE: fn(&Value) -> bool = |v| v == &Value::Bool(false);
const TRUE: fn(&Value) -> bool = |v| v == &Value::Bool(true);
const EMPTY: fn(&Value) -> bool = |v| {
    v.as_str().is_some_and(str::is_empty)
        || v.as_array().is_some_and(Vec::is_empty)
        || v.as_object().is_some_and(Map::is_empty)
};

const REFUSED: [Refused; 10] = [
    ("use_beam_search", FALSE, "beam search is not supported; leave it out"),
    ("suffix", EMPTY, "filling in is not supported; leave it out"),
    ("functions", EMPTY, "is obsolete and not supported; use tools"),
    ("function_call", |v| v == "none" || v == "auto", "is obsolete and not supported; use tools"),
    ("modalities", |v| v == &serde_json::json!(["text"]), "only text is supported; leave it out"),
    ("audio", NOTHING, "audio is not supported; leave it out"),
    ("web_search_options", NOTHING, "searching the web is not supported; leave it out"),
    ("chat_template", NOTHING, "a template of the request's own is not allowed; the model's is used"),
    ("spaces_between_special_tokens", TRUE, "is not supported; leave it out"),
    ("lora", NOTHING, "is not supported; an adapter is asked for by its name, as model"),
];

impl Params {
    /// Refuses several choices, where an answer is one.
    ///
    /// # Errors
    /// There are to be several.
    pub fn one_choice(&self, fields: &Fields) -> Result<(), ApiError> {
        match self.n {
            1 => Ok(()),
            n => Err(fields.refusal("n", format!("must be 1, not {n}; /v1/chat/completions gives several"))),
        }
    }

    /// Reads the fields; what is left of them is the endpoint's own.
    ///
    /// # Errors
    /// The model is not here, a field is of the wrong type, or it asks for what is not supported.
    pub fn read(fields: &mut Fields, app: &App, caller: Caller) -> Result<Params, ApiError> {
        let (model, adapter) = model(fields, app)?;
        for (name, harmless, what) in REFUSED {
            if fields.raw(name).is_some_and(|value| !harmless(&value)) {
                return Err(fields.refusal(name, what));
            }
        }
        let wanted = structured::wanted(fields, &app.tokenizer)?;
        let mut sampling = app.settings.sampling.clone();
        for (name, set) in SAMPLING {
            if let Some(value) = fields.raw(name) {
                set(&mut sampling, value).map_err(|wrong| fields.refusal(name, wrong))?;
            }
        }
        sampling.bad_words = bad_words(fields, app)?;
        let sampling = sampling.checked(app.engine.limits().vocabulary)?;
        let most = sampling.max_tokens;
        let n = fields.or("n", 1)?;
        if fields.take::<u32>("best_of")?.is_some_and(|best| best != n) {
            return Err(fields.refusal("best_of", "must equal n; choosing among more is not supported"));
        }
        let stops = stops(fields)?;
        let stop_strings = StopStrings::new(&stops, fields.or("include_stop_str_in_output", false)?);
        let stop_strings =
            stop_strings.map(|stops| stops.after(sampling.min_tokens)).map_err(|e| match e {
                StopError::Empty(i) => {
                    ApiError::field(format!("stop[{i}]"), "is empty; give a character at least")
                }
                StopError::TooLong(n) => {
                    fields.refusal("stop", format!("{n} bytes of stop strings are too many"))
                }
            })?;
        Ok(Params {
            model,
            adapter,
            sampling,
            n,
            stops,
            stop_strings,
            skip: fields.or("skip_special_tokens", true)?.into(),
            priority: fields.or("priority", 0)?,
            salt: salt(fields, app, caller)?,
            stream: stream(fields)?,
            constraint: None,
            wanted,
            thinking_budget: fields.take("thinking_token_budget")?,
            truncation: truncation(fields, app, most)?,
            show_ids: fields.or("return_token_ids", false)?,
        })
    }
}

/// The name of the model that is asked for, or of the one there is; and the adapter that it is.
///
/// # Errors
/// It is not here.
pub fn model(fields: &mut Fields, app: &App) -> Result<(String, Option<AdapterId>), ApiError> {
    let name = fields.take::<String>("model")?.unwrap_or_else(|| app.name().into());
    if app.names.contains(&name) {
        return Ok((name, None));
    }
    match app.adapters.find(&name) {
        Some(adapter) => Ok((name, Some(adapter))),
        None => Err(ApiError::unknown_model(short(&name))),
    }
}

fn stops(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    match fields.raw("stop") {
        None => Ok(Vec::new()),
        Some(Value::String(none)) if none.is_empty() => {
            Err(fields.refusal("stop", "is empty; give a character at least, or leave it out"))
        }
        Some(Value::String(one)) => Ok(vec![one]),
        Some(Value::Array(list)) if list.len() > MOST_STOPS => {
            let n = list.len();
            Err(fields.refusal("stop", format!("must have at most {MOST_STOPS} texts, not {n}")))
        }
        Some(Value::Array(list)) => fields.items("stop", list),
        Some(other) => {
            Err(fields.refusal("stop", format!("must be a text or a list of texts, not {}", kind(&other))))
        }
    }
}

/// Cached prefixes are the caller's own where there are several callers, and the salt's own where one is given.
fn salt(fields: &mut Fields, app: &App, caller: Caller) -> Result<Vec<u8>, ApiError> {
    let salt: String = fields.or("cache_salt", String::new())?;
    if salt.len() > LONGEST_SALT {
        let n = salt.len();
        return Err(fields.refusal("cache_salt", format!("must have at most {LONGEST_SALT} bytes, not {n}")));
    }
    let caller = caller.0.filter(|_| app.keys.are_several());
    if caller.is_none() && salt.is_empty() {
        return Ok(Vec::new());
    }
    let sum = Sha256::new().chain_update(caller.unwrap_or_default()).chain_update(salt);
    Ok(sum.finalize().to_vec())
}

fn stream(fields: &mut Fields) -> Result<Option<StreamOptions>, ApiError> {
    let on = fields.or("stream", false)?;
    let Some(mut options) = fields.object("stream_options")? else {
        return Ok(on.then(StreamOptions::default));
    };
    if !on {
        return Err(fields.refusal("stream_options", "is for streams only; set stream, or leave it out"));
    }
    let usage = options.or("include_usage", false)?;
    Ok(Some(StreamOptions { usage, continuous: options.or("continuous_usage_stats", false)? }))
}
