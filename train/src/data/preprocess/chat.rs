//! A conversation as text, and which of it is learnt. In: messages, the template, roles. Out: the whole conversation, rendered once, with
//! the ranges that turns of learnt roles have in it: by the template's own `{% generation %}` blocks, or as what a turn adds to the
//! conversation before it. Rendering turns alone would break templates that look at the whole.

use super::config::MaskBy;
use crate::preference::Sample;
use astrai_serve::template::{Chat, ChatTemplate, Message};
use astrai_serve::tokenizer::Tokenizer;
use serde_json::{Map, Value};
use std::ops::Range;

/// Text with what is learnt of it, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Rendered {
    pub text: String,
    pub learnt: Vec<Range<usize>>,
}

/// A conversation and its template.
pub(super) struct Conversation<'a> {
    pub template: &'a ChatTemplate,
    pub messages: Vec<Message>,
    pub tools: Option<Vec<Value>>,
    pub variables: &'a Map<String, Value>,
}

impl<'a> Conversation<'a> {
    /// Reads `messages` of a record, and `tools` where it has them.
    pub fn new(
        template: &'a ChatTemplate,
        messages: Vec<Message>,
        tools: Option<&Value>,
        variables: &'a Map<String, Value>,
    ) -> Result<Conversation<'a>, String> {
        let tools = match tools {
            None | Some(Value::Null) => None,
            Some(Value::Array(list)) if list.is_empty() => None,
            Some(Value::Array(list)) => Some(list.clone()),
            Some(_) => return Err("`tools` is no list of JSON schemas".into()),
        };
        let mut messages = messages;
        template.adapt(&mut messages, None, tools.is_some()).map_err(|e| e.to_string())?;
        Ok(Conversation { template, messages, tools, variables })
    }

    fn chat(&self, messages: usize, prompt: bool) -> Chat<'_> {
        Chat {
            messages: &self.messages[..messages],
            tools: self.tools.as_deref(),
            add_generation_prompt: prompt,
            variables: Some(self.variables),
            ..Chat::default()
        }
    }

    /// The first messages, and with `prompt` the beginning of an answer.
    pub fn text(&self, messages: usize, prompt: bool) -> Result<String, String> {
        self.template.render(&self.chat(messages, prompt)).map_err(|e| e.to_string())
    }

    /// The whole conversation, and the turns in it whose role is learnt.
    pub fn render(&self, by: MaskBy, learnt: &dyn Fn(&str) -> bool) -> Result<Rendered, String> {
        let whole = self.messages.len();
        if by != MaskBy::Difference && self.template.marks_generation(self.tools.is_some()) {
            if let Some(role) =
                self.messages.iter().map(Message::role).find(|r| *r != "assistant" && learnt(r))
            {
                return Err(format!(
                    "role {role:?} is to be learnt, and {{% generation %}} blocks mark the assistant's turns only; set `mask_by` to difference"
                ));
            }
            let (text, marked) =
                self.template.generated(&self.chat(whole, false)).map_err(|e| e.to_string())?;
            let learnt = if learnt("assistant") { marked } else { vec![] };
            return Ok(Rendered { text, learnt });
        }
        if by == MaskBy::Generation {
            return Err(
                "the chat template has no {% generation %} blocks; set `mask_by` to difference".into()
            );
        }
        let text = self.text(whole, false)?;
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for (i, message) in self.messages.iter().enumerate().filter(|(_, m)| learnt(m.role())) {
            let begin = self.begin(&text, i, message.role() == "assistant")?;
            let end = if i + 1 == whole { text.len() } else { self.end(&text, i)? };
            match ranges.last_mut() {
                Some(last) if last.end == begin => last.end = end,
                _ => ranges.push(begin..end.max(begin)),
            }
        }
        Ok(Rendered { text, learnt: ranges })
    }

    /// Where the turn of message `i` begins to be the speaker's own.
    pub fn begin(&self, text: &str, i: usize, answers: bool) -> Result<usize, String> {
        if i == 0 {
            // No template renders an empty conversation; what begins an answer shows behind another one.
            let opened = if answers { self.text(1, true)? } else { String::new() };
            let plain = if answers { self.text(1, false)? } else { String::new() };
            let opening = opened.strip_prefix(&plain).unwrap_or("");
            return Ok(if text.starts_with(opening) { opening.len() } else { 0 });
        }
        let before = self.text(i, answers)?;
        if text.starts_with(&before) {
            return Ok(before.len());
        }
        // An opening that history does not show, `<think>` say, is none in the text.
        let plain = if answers { self.text(i, false)? } else { before.clone() };
        if !text.starts_with(&plain) {
            return Err(differs(i));
        }
        let common = text.bytes().zip(before.bytes()).take_while(|(a, b)| a == b).count();
        Ok((0..=common).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0))
    }

    fn end(&self, text: &str, i: usize) -> Result<usize, String> {
        let after = self.text(i + 1, false)?;
        if text.starts_with(&after) { Ok(after.len()) } else { Err(differs(i)) }
    }
}

fn differs(i: usize) -> String {
    format!(
        "messages[{i}] is rendered otherwise once more follows, so what it adds cannot be told; use a template with {{% generation %}} blocks, or end the record there"
    )
}

/// Ids of a text, and whether each lies in what is learnt. Special tokens in the text are those tokens.
pub(super) fn encode(tokenizer: &Tokenizer, rendered: &Rendered) -> Result<Sample, String> {
    let spans = tokenizer.encode_spans(&rendered.text).map_err(|e| e.to_string())?;
    let (mut ids, mut trained) = (Vec::with_capacity(spans.len()), Vec::with_capacity(spans.len()));
    let mut ranges = rendered.learnt.iter().peekable();
    for (id, span) in spans {
        while ranges.peek().is_some_and(|range| range.end < span.end) {
            ranges.next();
        }
        ids.push(id as i32);
        trained.push(ranges.peek().is_some_and(|range| range.start <= span.start));
    }
    Ok(Sample { ids, trained })
}
