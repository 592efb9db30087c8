//! Rendering. In: a template, special tokens, a conversation. Out: the prompt. Each rendering has a thread of its own, with a
//! large stack; whatever goes wrong there is an error here.

use super::{Chat, ContentForm, Message, TemplateError, filters, limits, line, load, python, source, worker};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, Value};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{io, thread};

/// A template that has been found to be one.
#[derive(Debug)]
pub(super) struct Compiled {
    pub name: String,
    pub source: String,
    pub form: OnceLock<ContentForm>,
    /// The same for the engine.
    plain: Text,
    /// The same, with marks around what the assistant wrote.
    marked: Option<Text>,
}

/// A source for the engine.
#[derive(Debug)]
struct Text {
    source: String,
    /// Tells it from all others of this process.
    id: u64,
}

impl Text {
    fn new(source: String) -> Text {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Text { source, id: NEXT.fetch_add(1, Ordering::Relaxed) }
    }

    fn job(&self, variables: Option<Map<String, Json>>, items: usize) -> Job {
        Job { id: self.id, source: self.source.clone(), variables, items }
    }
}

/// What is to be rendered.
#[derive(Serialize, Deserialize)]
pub(super) struct Job {
    id: u64,
    source: String,
    /// None where the template is to be parsed only.
    variables: Option<Map<String, Json>>,
    /// Messages, tools and documents.
    items: usize,
}

/// What the template itself says against a conversation.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

const NAME: &str = "chat";

/// Templates that stay parsed.
const PARSED: usize = 64;

impl Compiled {
    pub(super) fn new(found: load::Found) -> Result<Compiled, TemplateError> {
        let load::Found { name, source, origin } = found;
        let (plain, marked) = (Text::new(source::plain(&source)), source::marked(&source).map(Text::new));
        let made = Compiled { plain, marked, name, source, form: OnceLock::new() };
        worker::run(&made.plain.job(None, 0), None).map_err(|e| TemplateError::File {
            path: origin,
            message: match e {
                TemplateError::Failed { line, message } => {
                    format!("template {:?}{}: {message}; mend the template", made.name, super::at(line))
                }
                other => other.to_string(),
            },
        })?;
        Ok(made)
    }

    /// Whether `generation` blocks mark what the assistant wrote.
    pub(super) fn marks_generation(&self) -> bool {
        self.marked.is_some()
    }
}

/// Jinja as transformers sets it up.
fn environment() -> Result<Environment<'static>, Error> {
    let mut env = Environment::new();
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_debug(false);
    env.remove_global("debug");
    env.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
        let said = message.to_string();
        Err(Error::new(ErrorKind::InvalidOperation, "raised").with_source(Raised(said)))
    });
    env.add_function("strftime_now", |format: &str| strftime(format));
    env.set_formatter(|out: &mut Output, _: &mut State, value: &Value| {
        out.write_str(&python::printed(value)).map_err(Error::from)
    });
    filters::add(&mut env);
    env.set_unknown_method_callback(python::method);
    env.add_function("joiner", minijinja_contrib::globals::joiner);
    Ok(env)
}

fn strftime(format: &str) -> Result<String, Error> {
    if format.len() > 1000 {
        return Err(python::invalid("strftime_now: the format is too long".into()));
    }
    jiff::fmt::strtime::format(format, &jiff::Zoned::now())
        .map_err(|e| python::invalid(format!("strftime_now: {}", line(&e.to_string()))))
}

/// Runs on a thread of its own, so that neither depth nor a panic of the engine reaches the caller.
fn on_own_thread<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, TemplateError> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("template".into()).stack_size(limits::STACK);
        let stopped = |what: &str| TemplateError::Stopped(what.to_owned());
        let spawned = thread.spawn_scoped(scope, work);
        let running = spawned.map_err(|e| stopped(&format!("there is no thread for it ({e})")))?;
        running.join().map_err(|_| stopped("its engine broke off"))
    })
}

/// Takes the answer, up to its limit.
#[derive(Default)]
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > limits::TEXT {
            return Err(io::Error::other(limits::exceeded().to_string()));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Does a job in this process.
pub(super) fn perform(job: &Job) -> Result<String, TemplateError> {
    on_own_thread(|| perform_here(job, &mut HashMap::new()))?
}

/// Does a job on this thread, which has [`limits::STACK`]; a template stays among those that are `parsed`.
pub(super) fn perform_here(
    job: &Job,
    parsed: &mut HashMap<u64, Environment<'static>>,
) -> Result<String, TemplateError> {
    if !parsed.contains_key(&job.id) {
        let mut env = environment().map_err(|e| failed(&e))?;
        env.add_template_owned(NAME, job.source.clone()).map_err(|e| failed(&e))?;
        if parsed.len() == PARSED {
            parsed.clear();
        }
        parsed.insert(job.id, env);
    }
    let (Some(variables), Some(env)) = (&job.variables, parsed.get(&job.id)) else {
        return Ok(String::new());
    };
    let mut env = env.clone();
    env.set_fuel(Some(limits::fuel(job.items)));
    let mut out = Bounded::default();
    let compiled = env.get_template(NAME).map_err(|e| failed(&e))?;
    compiled.render_captured_to(Value::from(Serde(variables)), &mut out).map_err(|e| failed(&e))?;
    String::from_utf8(out.0)
        .map_err(|_| TemplateError::Failed { line: None, message: "the prompt is not UTF-8".into() })
}

fn failed(e: &Error) -> TemplateError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(e);
    while let Some(one) = cause {
        if let Some(Raised(said)) = one.downcast_ref::<Raised>() {
            return TemplateError::Raised(said.clone());
        }
        cause = one.source();
    }
    let said = match e.detail() {
        Some(detail) => format!("{}: {detail}", e.kind()),
        None => e.kind().to_string(),
    };
    let source = std::error::Error::source(e).map_or_else(String::new, |s| format!(" ({s})"));
    let message = line(&format!("{said}{source}"));
    let over = limits::exceeded();
    if e.kind() == ErrorKind::OutOfFuel {
        return TemplateError::Stopped("it takes too many steps".into());
    }
    if over.detail().is_some_and(|over| message.contains(over)) {
        return TemplateError::Stopped(format!("it makes more than {} bytes of text", limits::TEXT));
    }
    TemplateError::Failed { line: e.line(), message }
}

/// Variables that the caller may not set: each has a field of its own, or would be no variable.
const RESERVED: [&str; 10] = [
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "conversation",
    "tokenize",
    "return_dict",
    "return_assistant_tokens_mask",
];

/// Where a message is cut that the model is to continue.
const MARK: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

pub(super) fn chat(
    template: &Compiled,
    tokens: &Map<String, Json>,
    chat: &Chat<'_>,
) -> Result<String, TemplateError> {
    prompt(&template.plain, &template.source, tokens, chat)
}

/// The prompt, and the bytes of it that stand in `generation` blocks.
pub(super) fn generated(
    template: &Compiled,
    tokens: &Map<String, Json>,
    chat: &Chat<'_>,
) -> Result<(String, Vec<Range<usize>>), TemplateError> {
    let refused = |what: &str| TemplateError::Request(what.to_owned());
    let marked =
        template.marked.as_ref().ok_or_else(|| refused("the chat template has no generation blocks"))?;
    let (mut text, mut blocks) = (String::new(), Vec::new());
    let mut open = None;
    let made = prompt(marked, &template.source, tokens, chat)?;
    for piece in made.split_inclusive(source::MARKS) {
        let mark = piece.chars().next_back().and_then(|c| source::MARKS.iter().position(|m| *m == c));
        text.push_str(piece.trim_end_matches(source::MARKS));
        match (mark, open) {
            (Some(0), None) => open = Some(text.len()),
            (Some(1), Some(begin)) => {
                blocks.push(begin..text.len());
                open = None;
            }
            (None, None) => {}
            _ => {
                return Err(refused(
                    "generation blocks are nested or cut, or a message holds U+FDD0; mend them",
                ));
            }
        }
    }
    Ok((text, blocks))
}

fn prompt(
    text: &Text,
    source: &str,
    tokens: &Map<String, Json>,
    chat: &Chat<'_>,
) -> Result<String, TemplateError> {
    let refused = |what: &str| Err(TemplateError::Request(what.to_owned()));
    if chat.messages.is_empty() {
        return refused("messages: is empty; give at least one message");
    }
    if chat.continue_final_message && chat.add_generation_prompt {
        return refused("continue_final_message: excludes add_generation_prompt; set one of them");
    }
    let mut variables = tokens.clone();
    for (key, value) in chat.variables.into_iter().flatten() {
        if RESERVED.contains(&key.as_str()) {
            return refused(&format!(
                "chat_template_kwargs.{key}: is not for a template to receive; remove it"
            ));
        }
        variables.insert(key.clone(), value.clone());
    }
    let mut messages: Vec<Json> = chat.messages.iter().map(|m| Json::Object(m.as_seen())).collect();
    let last = if chat.continue_final_message { Some(mark(&mut messages, source)?) } else { None };
    let list = |list: Option<&[Json]>| list.map_or(Json::Null, |list| Json::Array(list.to_vec()));
    let items =
        messages.len() + chat.tools.map_or(0, <[Json]>::len) + chat.documents.map_or(0, <[Json]>::len);
    variables.insert("messages".into(), Json::Array(messages));
    variables.insert("tools".into(), list(chat.tools));
    variables.insert("documents".into(), list(chat.documents));
    variables.insert("add_generation_prompt".into(), Json::Bool(chat.add_generation_prompt));
    let prompt = worker::run(&text.job(Some(variables), items), chat.abandoned)?;
    match last {
        Some(last) => cut(prompt, &last),
        None => Ok(prompt),
    }
}

/// Marks the end of the last message's text; gives that text.
fn mark(messages: &mut [Json], source: &str) -> Result<String, TemplateError> {
    let refused = |what: &str| TemplateError::Request(format!("continue_final_message: {what}"));
    let none = || refused("the last message has no text to continue");
    if !source.contains("content") {
        return Err(refused("the chat template shows no content"));
    }
    let text = match messages.last_mut().and_then(|m| m.get_mut("content")) {
        Some(Json::String(text)) => text,
        Some(Json::Array(parts)) => match parts.iter_mut().rev().find_map(|part| part.get_mut("text")) {
            Some(Json::String(text)) => text,
            _ => return Err(none()),
        },
        _ => return Err(none()),
    };
    let whole = text.clone();
    text.push_str(MARK);
    Ok(whole)
}

/// Cuts the prompt where the last message ends; its trailing blanks go where the template drops them.
fn cut(mut prompt: String, last: &str) -> Result<String, TemplateError> {
    let at = prompt.rfind(MARK.trim_end()).filter(|_| prompt.contains(last.trim()));
    let at = at.ok_or_else(|| {
        TemplateError::Request(
            "continue_final_message: the chat template does not show the last message as it is".into(),
        )
    })?;
    let kept = if prompt[at..].starts_with(MARK) { at } else { prompt[..at].trim_end().len() };
    prompt.truncate(kept);
    Ok(prompt)
}

/// Renders a message both ways and looks whether its text comes out.
pub(super) fn content_form(template: &Compiled, tokens: &Map<String, Json>) -> ContentForm {
    const NEEDLE: &str = "astrai content needle";
    let shows = |content: Json, spoilt: &str| {
        let message = Message::of("user", content);
        let one = Chat { messages: &[message], add_generation_prompt: true, ..Chat::default() };
        let prompt = chat(template, tokens, &one);
        prompt.is_ok_and(|p| p.contains(NEEDLE) && !p.contains(spoilt))
    };
    let parts = serde_json::json!([{"type": "text", "text": NEEDLE}]);
    let quoted = [format!("'{NEEDLE}'"), format!("\"{NEEDLE}\"")];
    let takes_parts = quoted.iter().all(|spoilt| shows(parts.clone(), spoilt));
    match (takes_parts, shows(Json::String(NEEDLE.into()), "\0")) {
        (true, true) => ContentForm::Both,
        (true, false) => ContentForm::Parts,
        (false, _) => ContentForm::Text,
    }
}
