//! Formats whose arguments are bare text between tags: GLM's from 4.5 on, and Qwen3-Coder's. What type a text is, the tool's schema says.
//!
//! Bare text may have anything in it, closing tags too. It ends at a closing tag only if what must follow follows.

use std::sync::Arc;

use serde_json::Value;

use super::scan::{Compared, OneOf, Tag};
use super::{Call, Reader, Step, Tools};

/// Tags, one after the other, that end a text; space may be between them.
type End = &'static [&'static str];

/// A text up to one of several ends.
#[derive(Debug)]
struct Text {
    ends: [End; 2],
    text: String,
    /// May be the beginning of an end.
    held: String,
    /// For each end: which of its tags, and how far in it; none if the held text is not its beginning.
    places: [Option<(usize, usize)>; 2],
}

impl Text {
    fn new(ends: [End; 2]) -> Text {
        Text { ends, text: String::new(), held: String::new(), places: [Some((0, 0)); 2] }
    }

    /// Takes the next character; gives the end that is whole.
    fn push(&mut self, c: char) -> Option<usize> {
        self.held.push(c);
        for (place, end) in self.places.iter_mut().zip(self.ends) {
            let Some((tag, at)) = *place else { continue };
            *place = match end.get(tag) {
                Some(_) if at == 0 && tag > 0 && c.is_whitespace() => Some((tag, 0)),
                Some(text) if text[at..].starts_with(c) => match at + c.len_utf8() {
                    whole if whole == text.len() => Some((tag + 1, 0)),
                    at => Some((tag, at)),
                },
                _ => None,
            };
        }
        let whole = |i: &usize| self.places[*i].is_some_and(|(tag, _)| tag == self.ends[*i].len());
        if let Some(end) = (0..self.ends.len()).find(whole) {
            return Some(end);
        }
        if self.places.iter().all(Option::is_none) {
            self.give_up();
        }
        None
    }

    /// What is held is no end, but its last tag may begin one. A tag has its first character only once: this reads no more than a part
    /// of a tag again.
    fn give_up(&mut self) {
        self.places = [Some((0, 0)); 2];
        let mut held = std::mem::take(&mut self.held);
        match held.rfind('<').filter(|at| *at > 0) {
            Some(at) => {
                let rest = held.split_off(at);
                self.text.push_str(&held);
                for c in rest.chars() {
                    self.push(c);
                }
            }
            None => self.text.push_str(&held),
        }
    }

    /// Whether the text has ended, were nothing to come.
    fn is_closed(&self) -> bool {
        self.places.iter().flatten().any(|(tag, at)| *tag > 0 && *at == 0)
    }

    fn take(&mut self) -> String {
        self.held.clear();
        std::mem::take(&mut self.text)
    }
}

/// A call that is being read.
#[derive(Debug)]
struct Arguments {
    tools: Arc<Tools>,
    name: String,
    key: String,
    /// Names and the JSON of their values, as they come.
    read: Vec<(String, String)>,
}

impl Arguments {
    fn new(tools: Arc<Tools>) -> Arguments {
        Arguments { tools, name: String::new(), key: String::new(), read: Vec::new() }
    }

    fn is_named(&self) -> bool {
        let name = self.name.trim();
        !name.is_empty() && !name.contains(char::is_whitespace)
    }

    fn add(&mut self, text: &str) {
        let key = std::mem::take(&mut self.key);
        let value = self.tools.value(self.name.trim(), key.trim(), text);
        match self.read.iter_mut().find(|(name, _)| name == key.trim()) {
            Some((_, before)) => *before = value,
            None => self.read.push((key.trim().into(), value)),
        }
    }

    fn call(&mut self) -> Call {
        let read = std::mem::take(&mut self.read);
        let all: Vec<String> =
            read.into_iter().map(|(name, json)| format!("{}:{json}", Value::from(name))).collect();
        Call { name: self.name.trim().into(), arguments: format!("{{{}}}", all.join(",")) }
    }
}

const GLM_ENDS: [End; 2] = [&["</arg_value>", "<arg_key>"], &["</arg_value>", "</tool_call>"]];

/// Reads a call of GLM's after `<tool_call>`: a name, then `<arg_key>` and `<arg_value>` in turn.
#[derive(Debug)]
pub(super) struct Glm {
    arguments: Arguments,
    place: GlmPlace,
}

#[derive(Debug)]
enum GlmPlace {
    Name,
    /// A key, or the end of the call.
    Next(OneOf),
    Key(Option<Tag>),
    Value(OneOf),
    Text(Text),
}

impl Glm {
    pub fn new(tools: Arc<Tools>) -> Glm {
        Glm { arguments: Arguments::new(tools), place: GlmPlace::Name }
    }

    fn next(&mut self, c: char) -> Step {
        let GlmPlace::Next(tags) = &mut self.place else { return Step::Fail };
        match tags.push(c) {
            Ok(None) => Step::More,
            Ok(Some(0)) => {
                self.place = GlmPlace::Key(None);
                Step::More
            }
            Ok(Some(_)) => Step::Last(self.arguments.call()),
            Err(()) => Step::Fail,
        }
    }
}

impl Reader for Glm {
    fn push(&mut self, c: char) -> Step {
        match &mut self.place {
            GlmPlace::Name if c != '<' && (c != '\n' || self.arguments.name.trim().is_empty()) => {
                self.arguments.name.push(c);
            }
            GlmPlace::Name if !self.arguments.is_named() => return Step::Fail,
            GlmPlace::Name => {
                self.place = GlmPlace::Next(OneOf::new(&["<arg_key>", "</tool_call>"]));
                return self.next(c);
            }
            GlmPlace::Next(_) => return self.next(c),
            GlmPlace::Key(None) if c != '<' => self.arguments.key.push(c),
            GlmPlace::Key(tag) => match tag.get_or_insert_with(|| Tag::new("</arg_key>")).push(c) {
                Compared::More => {}
                Compared::Whole => self.place = GlmPlace::Value(OneOf::new(&["<arg_value>"])),
                Compared::Differs => return Step::Fail,
            },
            GlmPlace::Value(tags) => match tags.push(c) {
                Ok(None) => {}
                Ok(Some(_)) => self.place = GlmPlace::Text(Text::new(GLM_ENDS)),
                Err(()) => return Step::Fail,
            },
            GlmPlace::Text(text) => {
                let Some(end) = text.push(c) else { return Step::More };
                self.arguments.add(&text.take());
                self.place = GlmPlace::Key(None);
                if end == 1 {
                    return Step::Last(self.arguments.call());
                }
            }
        }
        Step::More
    }

    fn finish(&mut self) -> Step {
        match &mut self.place {
            GlmPlace::Text(text) if text.is_closed() => self.arguments.add(&text.take()),
            _ => return Step::Fail,
        }
        Step::Last(self.arguments.call())
    }
}

const QWEN_ENDS: [End; 2] =
    [&["</parameter>", "<parameter="], &["</parameter>", "</function>", "</tool_call>"]];

/// Reads a call of Qwen3-Coder's after `<tool_call>`: `<function=NAME>`, then for each argument `<parameter=KEY>` and a text on lines of
/// its own.
#[derive(Debug)]
pub(super) struct QwenCoder {
    arguments: Arguments,
    place: QwenPlace,
}

#[derive(Debug)]
enum QwenPlace {
    Function(OneOf),
    Name,
    /// A parameter, or the end of the function.
    Next(OneOf),
    Key,
    Text(Text),
    /// The end of a function without arguments.
    Closing(OneOf),
}

impl QwenCoder {
    pub fn new(tools: Arc<Tools>) -> QwenCoder {
        let place = QwenPlace::Function(OneOf::new(&["<function="]));
        QwenCoder { arguments: Arguments::new(tools), place }
    }

    /// Adds an argument: the line ends around its text are not part of it.
    fn add(&mut self, text: &str) {
        let text = text.strip_prefix('\n').unwrap_or(text);
        self.arguments.add(text.strip_suffix('\n').unwrap_or(text));
    }
}

impl Reader for QwenCoder {
    fn push(&mut self, c: char) -> Step {
        match &mut self.place {
            QwenPlace::Function(tags) => match tags.push(c) {
                Ok(None) => {}
                Ok(Some(_)) => self.place = QwenPlace::Name,
                Err(()) => return Step::Fail,
            },
            QwenPlace::Name if c != '>' => self.arguments.name.push(c),
            QwenPlace::Name if !self.arguments.is_named() => return Step::Fail,
            QwenPlace::Name => self.place = QwenPlace::Next(OneOf::new(&["<parameter=", "</function>"])),
            QwenPlace::Next(tags) => match tags.push(c) {
                Ok(None) => {}
                Ok(Some(0)) => self.place = QwenPlace::Key,
                Ok(Some(_)) => self.place = QwenPlace::Closing(OneOf::new(&["</tool_call>"])),
                Err(()) => return Step::Fail,
            },
            QwenPlace::Key if c != '>' => self.arguments.key.push(c),
            QwenPlace::Key => self.place = QwenPlace::Text(Text::new(QWEN_ENDS)),
            QwenPlace::Text(text) => {
                let Some(end) = text.push(c) else { return Step::More };
                let text = text.take();
                self.add(&text);
                self.place = QwenPlace::Key;
                if end == 1 {
                    return Step::Last(self.arguments.call());
                }
            }
            QwenPlace::Closing(tags) => match tags.push(c) {
                Ok(None) => {}
                Ok(Some(_)) => return Step::Last(self.arguments.call()),
                Err(()) => return Step::Fail,
            },
        }
        Step::More
    }

    fn finish(&mut self) -> Step {
        match &mut self.place {
            QwenPlace::Text(text) if text.is_closed() => {
                let text = text.take();
                self.add(&text);
            }
            QwenPlace::Closing(tags) if tags.is_idle() => {}
            _ => return Step::Fail,
        }
        Step::Last(self.arguments.call())
    }
}
