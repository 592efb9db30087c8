//! What the endpoints for conversations have in common. In: messages, tools, and what is asked for about them. Out: the prompt, and for
//! each choice a reader of its text that separates content, reasoning and calls.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::Calls;
use super::app::App;
use super::error::ApiError;
use super::fields::{Fields, kind};
use super::forced;
use super::params::{Params, short};
use crate::answer::{Delta, Ended};
use crate::grammar::{Constraint, Thought, Wanted};
use crate::markup::{Call, CallFormat, Markup, Parser, Piece, Tools};
use crate::template::{Chat, Message};
use crate::tokenizer::Skip;

/// Tools, and documents, of a request.
const MOST_TOOLS: usize = 1024;

/// What a conversation is to the model, and how its answers are read.
#[derive(Debug)]
pub struct Talk {
    /// The prompt.
    pub text: String,
    /// Whether special tokens are to be added to it.
    pub add_special: bool,
    markup: Markup,
    /// Those whose calls are read.
    tools: Option<Arc<Tools>>,
    /// Whether the prompt ends inside a thought.
    thinking: bool,
    /// Whether there may be several calls.
    parallel: bool,
    /// Whether thoughts are told.
    shows_thoughts: bool,
    /// Calls that the answer must be.
    forced: Option<Wanted>,
    /// What holds calls that it may have in it.
    loose: Option<Wanted>,
    choice: Choice,
}

/// Which tools are shown, and which calls are wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Choice {
    /// None: the tools are not shown.
    Nothing,
    /// As the model likes.
    Auto,
    /// A call of some tool at least.
    Required,
    /// A call of this tool.
    Named(String),
}

impl Talk {
    /// Reads a conversation.
    ///
    /// # Errors
    /// A field is wrong, or the template refuses the conversation.
    pub fn read(app: &App, fields: &mut Fields) -> Result<Talk, ApiError> {
        let Some(template) = &app.template else {
            let what = "the model has no chat template; use /v1/completions";
            return Err(ApiError::field("messages", what));
        };
        let mut given = fields.raw("messages").unwrap_or_default();
        refusals_as_texts(&mut given);
        let mut messages = Message::list(given)?;
        Message::check(&messages)?;
        messages.iter().enumerate().try_for_each(|(i, message)| texts_only(i, message))?;
        let (tools, choice) = tools(fields)?;
        let parallel = fields.or("parallel_tool_calls", true)?;
        let documents: Option<Vec<Value>> = match fields.list("documents", MOST_TOOLS)? {
            none if none.is_empty() => None,
            some => Some(some),
        };
        let continue_final_message = fields.or("continue_final_message", false)?;
        let add_generation_prompt = fields.or("add_generation_prompt", !continue_final_message)?;
        let mut variables: Map<String, Value> = fields.or("chat_template_kwargs", Map::new())?;
        if let Some(effort) = fields.take::<String>("reasoning_effort")? {
            variables.entry("reasoning_effort").or_insert(effort.into());
        }
        template.adapt(&mut messages, None, tools.is_some())?;
        let text = template.render(&Chat {
            messages: &messages,
            tools: tools.as_deref(),
            documents: documents.as_deref(),
            add_generation_prompt,
            continue_final_message,
            template: None,
            variables: Some(&variables),
            abandoned: Some(&fields.abandoned),
        })?;
        let source = template.source(None, tools.is_some());
        let mut markup = source.map_or_else(|_| Markup::default(), Markup::of_template);
        match app.settings.calls {
            Calls::OfTemplate => {}
            Calls::Of(format) => markup.calls = Some(format),
            Calls::Text => markup.calls = None,
        }
        let forced = match (&choice, &tools) {
            (Choice::Required, Some(tools)) => Some((tools.clone(), parallel)),
            (Choice::Named(name), Some(tools)) => {
                let named = tools.iter().find(|tool| tool["function"]["name"] == **name);
                Some((named.cloned().into_iter().collect(), false))
            }
            _ => None,
        };
        // A model whose format is not known is held to the plainest.
        if forced.is_some() {
            markup.calls = markup.calls.or(Some(CallFormat::Llama3Json));
        }
        let forced = forced.zip(markup.calls);
        let forced = forced
            .map(|((tools, several), format)| forced::calls(app, format, &tools, several))
            .transpose()?;
        let loose = match (&choice, &tools, markup.calls) {
            (Choice::Auto, Some(tools), Some(format)) => forced::among_texts(app, format, tools, parallel)?,
            _ => None,
        };
        let shows_thoughts = fields.or("include_reasoning", true)?;
        Ok(Talk {
            // The template has put the special tokens where they belong.
            add_special: fields.or("add_special_tokens", false)?,
            thinking: markup.opens_thought(&text),
            tools: tools.map(|tools| Arc::new(Tools::new(&tools))),
            text,
            markup,
            parallel,
            shows_thoughts,
            forced,
            loose,
            choice,
        })
    }

    /// What holds the answers: what the request wants, calls that must be, the budget of thoughts.
    ///
    /// # Errors
    /// It cannot be compiled, or contradicts itself.
    pub fn constraint(&self, app: &App, params: &mut Params) -> Result<(), ApiError> {
        let wanted = match (&self.forced, params.wanted.take()) {
            (Some(calls), None) => Some(("tools".to_owned(), calls.clone())),
            (Some(_), Some((field, _))) => {
                return Err(ApiError::field(
                    field,
                    "cannot be together with a tool_choice that asks for calls",
                ));
            }
            (None, wanted) => wanted.or_else(|| Some(("tools".to_owned(), self.loose.clone()?))),
        };
        let grammar = wanted.map(|(field, wanted)| app.compile(&field, wanted)).transpose()?;
        let thought = self.thought(app, params.thinking_budget)?;
        if grammar.is_some() || thought.as_ref().is_some_and(|t| t.budget.is_some()) {
            params.constraint = Some(Constraint { grammar, thought: thought.map(Arc::new) });
        }
        Ok(())
    }

    /// The thought that may come before an answer; none where the prompt has closed it.
    fn thought(&self, app: &App, budget: Option<usize>) -> Result<Option<Thought>, ApiError> {
        let id = |text: &str| app.tokenizer.id(text);
        let (opened, open, close, force) = match (self.markup.calls, self.markup.thoughts) {
            // Forced calls have no thought before them: the header is part of the grammar.
            (Some(CallFormat::Harmony), _) if self.forced.is_some() => return Ok(None),
            (Some(CallFormat::Harmony), _) => {
                let force = "<|end|><|start|>assistant<|channel|>final<|message|>";
                (true, None, "<|channel|>final<|message|>", force.to_owned())
            }
            (_, Some(tags)) if self.text.trim_end().ends_with(tags.close()) => return Ok(None),
            (_, Some(tags)) => {
                (self.thinking, id(tags.open()), tags.close(), format!("\n{}\n\n", tags.close()))
            }
            (_, None) => return Ok(None),
        };
        let wrong = |e: crate::tokenizer::TokenizerError| ApiError::internal(e.message);
        let force = app.tokenizer.encode(&force, false).map_err(wrong)?;
        let tokenizer = app.tokenizer.clone();
        Ok(Some(Thought { tokenizer, opened, open, close, force, budget }))
    }

    /// Has the answers' text show the special tokens by which it is read.
    pub fn show_markup(&self, app: &App, params: &mut Params) {
        if params.skip != Skip::Nothing {
            let tokens = self.markup.tokens(self.tools.is_some());
            params.skip = Skip::AllBut(tokens.iter().filter_map(|token| app.tokenizer.id(token)).collect());
        }
    }

    /// A reader of one answer.
    pub fn turn(&self) -> Turn {
        let parser = Parser::new(self.markup, self.tools.clone(), self.thinking);
        let named = matches!(self.choice, Choice::Named(_));
        let (parallel, shows_thoughts) = (self.parallel && !named, self.shows_thoughts);
        Turn { parser, parallel, named, shows_thoughts, calls: 0, reasoning: 0 }
    }

    /// An id for a call. Mistral's templates take none but those of nine letters and digits.
    pub fn call_id(&self, app: &App, prefix: &str) -> String {
        let id = app.new_id();
        match self.markup.calls {
            Some(CallFormat::Mistral) => id[..9].into(),
            _ => format!("{prefix}{id}"),
        }
    }
}

/// Reads the text of one answer.
#[derive(Debug)]
pub struct Turn {
    parser: Parser,
    parallel: bool,
    /// Whether the request named the tool.
    named: bool,
    shows_thoughts: bool,
    /// Calls that were shown.
    pub calls: usize,
    /// Tokens of thoughts.
    pub reasoning: usize,
}

impl Turn {
    /// What a delta shows.
    pub fn read(&mut self, delta: &Delta) -> Vec<Piece> {
        let before = self.parser.is_thinking();
        let mut pieces = self.parser.push(&delta.text);
        if before || self.parser.is_thinking() {
            self.reasoning += delta.tokens.len();
        }
        if delta.ended.is_some() {
            pieces.extend(self.parser.finish());
        }
        pieces.retain(|piece| {
            let call = matches!(piece, Piece::Call(_));
            let hidden = !self.shows_thoughts && matches!(piece, Piece::Reasoning(_));
            let shown = !hidden && (!call || self.parallel || self.calls == 0);
            self.calls += usize::from(call && shown);
            shown
        });
        pieces
    }

    /// The `finish_reason` of OpenAI's API, for which a call that was asked for by name is a plain stop.
    pub fn finish_reason(&self, ended: Ended) -> &'static str {
        let called = ended != Ended::Length && self.calls > 0 && !self.named;
        if called { "tool_calls" } else { ended.name() }
    }
}

/// What was said in an answer.
#[derive(Debug, Default)]
pub struct Said {
    pub content: String,
    pub reasoning: String,
    pub calls: Vec<Call>,
}

impl Said {
    pub fn add(&mut self, pieces: Vec<Piece>) {
        for piece in pieces {
            match piece {
                Piece::Content(text) => self.content.push_str(&text),
                Piece::Reasoning(text) => self.reasoning.push_str(&text),
                Piece::Call(call) => self.calls.push(call),
            }
        }
    }

    /// Content as a message has it: none beside calls or thoughts is null.
    pub fn content(&self) -> Value {
        let alone = self.calls.is_empty() && self.reasoning.is_empty();
        if self.content.is_empty() && !alone { Value::Null } else { json!(self.content) }
    }
}

/// A refusal among an assistant's parts is what it said.
fn refusals_as_texts(messages: &mut Value) {
    for message in messages.as_array_mut().into_iter().flatten() {
        let parts = message.get_mut("content").and_then(Value::as_array_mut);
        for part in parts.into_iter().flatten().filter(|part| part["type"] == "refusal") {
            *part = json!({"type": "text", "text": part["refusal"]});
        }
    }
}

fn texts_only(i: usize, message: &Message) -> Result<(), ApiError> {
    let parts = message.fields().get("content").and_then(Value::as_array);
    for (j, part) in parts.into_iter().flatten().enumerate() {
        let what = part.get("type").and_then(Value::as_str).unwrap_or("");
        if what != "text" {
            let field = format!("messages[{i}].content[{j}].type");
            let wrong = format!("only \"text\" is supported, not {:?}; remove the part", short(what));
            return Err(ApiError::field(field, wrong));
        }
    }
    Ok(())
}

/// The tools that the template is to show, if any, and what is to be done with them.
fn tools(fields: &mut Fields) -> Result<(Option<Vec<Value>>, Choice), ApiError> {
    let tools: Vec<Map<String, Value>> = fields.list("tools", MOST_TOOLS)?;
    for (i, tool) in tools.iter().enumerate() {
        let function = tool.get("function").and_then(Value::as_object);
        if tool.get("type").and_then(Value::as_str) != Some("function") {
            return Err(fields.refusal(&format!("tools[{i}].type"), "must be \"function\""));
        }
        let name = function.and_then(|f| f.get("name")).and_then(Value::as_str);
        if name.is_none_or(str::is_empty) {
            let what = "must be an object with a name";
            return Err(fields.refusal(&format!("tools[{i}].function"), what));
        }
        if function.and_then(|f| f.get("parameters")).is_some_and(|p| !p.is_object() && !p.is_null()) {
            let what = "must be a JSON schema, an object";
            return Err(fields.refusal(&format!("tools[{i}].function.parameters"), what));
        }
        let kind = function.and_then(|f| f.get("parameters")?.get("type")?.as_str());
        if kind.is_some_and(|kind| kind != "object") {
            let what = "must be \"object\": arguments have names";
            return Err(fields.refusal(&format!("tools[{i}].function.parameters.type"), what));
        }
    }
    let choice = choice(fields)?;
    let named = |name: &str| tools.iter().any(|tool| tool["function"]["name"] == *name);
    match &choice {
        Choice::Required if tools.is_empty() => {
            return Err(fields.refusal("tool_choice", "is \"required\", but there are no tools"));
        }
        Choice::Named(name) if !named(name) => {
            return Err(fields.refusal("tool_choice", format!("no tool is called {:?}", short(name))));
        }
        _ => {}
    }
    let tools: Vec<Value> = tools.into_iter().map(Value::Object).collect();
    let shown = choice != Choice::Nothing && !tools.is_empty();
    Ok((shown.then_some(tools), choice))
}

fn choice(fields: &mut Fields) -> Result<Choice, ApiError> {
    const WHAT: &str =
        "must be \"none\", \"auto\", \"required\", or {\"type\": \"function\", \"function\": {\"name\": …}}";
    match fields.raw("tool_choice") {
        None => Ok(Choice::Auto),
        Some(Value::String(word)) => match word.as_str() {
            "auto" => Ok(Choice::Auto),
            "none" => Ok(Choice::Nothing),
            "required" => Ok(Choice::Required),
            other => Err(fields.refusal("tool_choice", format!("{WHAT}, not {:?}", short(other)))),
        },
        Some(object) => match object["function"]["name"].as_str() {
            Some(name) if object["type"] == "function" => Ok(Choice::Named(name.into())),
            _ => Err(fields.refusal("tool_choice", format!("{WHAT}, not {}", kind(&object)))),
        },
    }
}
