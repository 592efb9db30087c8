//! Chat templates. In: a conversation, with the template that came with the model. Out: the prompt, to the byte what
//! transformers renders, or one line that says why there is none. The engine is `minijinja`; the modules below add what Python
//! has and it lacks, and hold a hostile template to its limits; programs call [`sandbox`] first, so that it breaks none of them.

mod filters;
mod json;
mod limits;
mod load;
mod message;
mod python;
mod render;
mod source;
#[cfg(test)]
mod tests;
mod worker;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::files::line;

pub(crate) use message::kind;
pub use message::{Message, MessageError};
pub use worker::{sandbox, sandbox_by};

/// Why there is no prompt, in one line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum TemplateError {
    /// A file holds no usable template.
    #[error("{path}: {message}", path = .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The defect and the remedy.
        message: String,
    },
    /// The template itself refuses the conversation, in its own words.
    #[error("the chat template refuses this conversation: {}", line(.0))]
    Raised(String),
    /// The request asks for what cannot be; names the field.
    #[error("{0}")]
    Request(String),
    /// The template fails on this conversation.
    #[error("the chat template fails{}: {message}; check the messages, or the template", at(*.line))]
    Failed {
        /// Where in the template, from 1.
        line: Option<usize>,
        /// What the engine says.
        message: String,
    },
    /// The template takes more than a template may.
    #[error("the chat template was stopped: {0}; use a template that comes to an end")]
    Stopped(String),
}

fn at(line: Option<usize>) -> String {
    line.map_or_else(String::new, |line| format!(" at its line {line}"))
}

/// How a template reads the content of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentForm {
    /// As a text; parts would be shown as Python shows a list.
    Text,
    /// As a list of parts only.
    Parts,
    /// As either.
    Both,
}

/// A conversation and how it is to be rendered: the arguments of `apply_chat_template`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Chat<'a> {
    /// The messages, as the template is to see them.
    pub messages: &'a [Message],
    /// JSON schemas of the tools; `None` and an empty list are not the same to a template.
    pub tools: Option<&'a [Value]>,
    /// Documents to answer from.
    pub documents: Option<&'a [Value]>,
    /// Whether the prompt ends with the beginning of an answer.
    pub add_generation_prompt: bool,
    /// Whether the prompt ends inside the last message, for the model to continue.
    pub continue_final_message: bool,
    /// Name of the template, where the model has several; otherwise `tool_use` is taken for tools and `default` without.
    pub template: Option<&'a str>,
    /// Further variables (`chat_template_kwargs`: `enable_thinking`, …); they hide special tokens of the same name.
    pub variables: Option<&'a Map<String, Value>>,
    /// Set by whoever asks when nobody waits for the prompt any more: rendering then ends.
    pub abandoned: Option<&'a AtomicBool>,
}

/// The templates of a model, ready for use from any number of threads. A clone shares everything.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    templates: Vec<render::Compiled>,
    /// Variables that hold special tokens: `bos_token`, `eos_token`, …
    tokens: Map<String, Value>,
}

impl ChatTemplate {
    /// Reads what a model's folder has: `chat_template.jinja` with `additional_chat_templates/`, or `chat_template` in
    /// `tokenizer_config.json` (a text, or a list of named ones), or `chat_template.json`; the first of these counts. Special tokens
    /// come from `tokenizer_config.json` and `special_tokens_map.json`. `None` where there is no template.
    ///
    /// # Errors
    /// A file is unreadable, is no JSON object, or holds what is no template.
    pub fn open(folder: &Path) -> Result<Option<ChatTemplate>, TemplateError> {
        let found = load::templates(folder)?;
        if found.is_empty() {
            return Ok(None);
        }
        ChatTemplate::build(found, load::tokens(folder)?).map(Some)
    }

    /// A single template, given by its text; `tokens` are variables that hold special tokens.
    ///
    /// # Errors
    /// The text is no template.
    pub fn parse(source: &str, tokens: Map<String, Value>) -> Result<ChatTemplate, TemplateError> {
        let origin = PathBuf::from("chat_template");
        ChatTemplate::build(
            vec![load::Found { name: "default".into(), source: source.into(), origin }],
            tokens,
        )
    }

    fn build(found: Vec<load::Found>, tokens: Map<String, Value>) -> Result<ChatTemplate, TemplateError> {
        let templates = found.into_iter().map(render::Compiled::new).collect::<Result<Vec<_>, _>>()?;
        Ok(ChatTemplate { shared: Arc::new(Shared { templates, tokens }) })
    }

    /// The names of the templates, `default` where there is but one.
    pub fn names(&self) -> Vec<&str> {
        self.shared.templates.iter().map(|t| t.name.as_str()).collect()
    }

    /// The source of the template that a conversation is rendered with.
    ///
    /// # Errors
    /// There is no such template.
    pub fn source(&self, name: Option<&str>, tools: bool) -> Result<&str, TemplateError> {
        self.choose(name, tools).map(|t| t.source.as_str())
    }

    /// The prompt. Keys whose value is null are not shown to the template, and the text of reasoning is under each of its names,
    /// as transformers does it.
    ///
    /// # Errors
    /// The template raises, fails or is stopped; or the request is at odds with itself.
    pub fn render(&self, chat: &Chat<'_>) -> Result<String, TemplateError> {
        let template = self.choose(chat.template, chat.tools.is_some())?;
        render::chat(template, &self.shared.tokens, chat)
    }

    /// Whether the template marks what the assistant wrote, by `{% generation %}` blocks.
    pub fn marks_generation(&self, tools: bool) -> bool {
        self.choose(None, tools).is_ok_and(render::Compiled::marks_generation)
    }

    /// The prompt, and the bytes of it that stand in `{% generation %}` blocks.
    ///
    /// # Errors
    /// Those of [`render`](Self::render); or the template has no such blocks.
    pub fn generated(&self, chat: &Chat<'_>) -> Result<(String, Vec<Range<usize>>), TemplateError> {
        let template = self.choose(chat.template, chat.tools.is_some())?;
        render::generated(template, &self.shared.tokens, chat)
    }

    /// How the template reads content, found out by trying.
    pub fn content_form(&self, name: Option<&str>, tools: bool) -> Result<ContentForm, TemplateError> {
        let template = self.choose(name, tools)?;
        Ok(*template.form.get_or_init(|| render::content_form(template, &self.shared.tokens)))
    }

    /// Makes messages of an API fit the template: parts that are texts become one text, joined by line ends, where it reads only
    /// texts, and a text becomes a part where it reads only parts; the role `developer` becomes `system` unless the template knows
    /// it.
    ///
    /// # Errors
    /// A message has a part that is no text, and the template reads only texts.
    pub fn adapt(
        &self,
        messages: &mut [Message],
        name: Option<&str>,
        tools: bool,
    ) -> Result<(), TemplateError> {
        let form = self.content_form(name, tools)?;
        let developer = self.source(name, tools)?.contains("developer");
        for (i, message) in messages.iter_mut().enumerate() {
            let adapted = match form {
                ContentForm::Text => message.join_parts(),
                ContentForm::Parts => {
                    message.split_text();
                    Ok(())
                }
                ContentForm::Both => Ok(()),
            };
            adapted.map_err(|e| TemplateError::Request(format!("messages[{i}].{e}")))?;
            if !developer && message.role() == "developer" {
                message.set_role("system");
            }
        }
        Ok(())
    }

    fn choose(&self, name: Option<&str>, tools: bool) -> Result<&render::Compiled, TemplateError> {
        let all = &self.shared.templates;
        let find = |name: &str| all.iter().find(|t| t.name == name);
        let found = match name {
            Some(name) => find(name),
            None => tools.then(|| find("tool_use")).flatten().or_else(|| find("default")),
        };
        found.ok_or_else(|| {
            let wanted = name.unwrap_or("default");
            TemplateError::Request(format!(
                "the model has no chat template {wanted:?}; name one of {:?}",
                self.names()
            ))
        })
    }
}
