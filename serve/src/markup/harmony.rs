//! Harmony, the format of gpt-oss: messages, each with a header and a body, `<|start|>assistant<|channel|>…<|message|>…<|end|>`. The
//! channel `analysis` is a thought, a message to a function is a call, the rest is said to the user. The first header's beginning
//! is the end of the prompt. The tags are tokens of their own, which no other text makes.

use super::Pieces;
use super::json::named;
use super::scan::{Compared, Tag};

/// Tokens that mark messages.
pub(super) const TOKENS: [&str; 7] =
    ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"];

/// Bytes of a header; a text without one is no header from here on.
const LONGEST: usize = 512;

/// Reads messages.
#[derive(Debug)]
pub(super) struct Harmony {
    place: Place,
    /// Of a header, the tags among them; or of a call's body.
    held: String,
    /// May be the beginning of a tag: one comparison for each tag.
    tags: Vec<Tag>,
    /// What these were equal to.
    read: String,
    /// Space that is shown if more follows.
    space: String,
    /// Whether the body has shown something.
    shown: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    Header,
    Thought,
    Content,
    /// The body of a call of this function.
    Call(String),
    /// After a message, before the next one's header.
    Between,
}

impl Harmony {
    pub fn new() -> Harmony {
        Harmony {
            place: Place::Header,
            held: String::new(),
            tags: Vec::new(),
            read: String::new(),
            space: String::new(),
            shown: false,
        }
    }

    pub fn is_thinking(&self) -> bool {
        self.place == Place::Thought
    }

    pub fn push(&mut self, c: char, out: &mut Pieces) {
        if !self.read.is_empty() {
            self.tags.retain_mut(|tag| tag.push(c) != Compared::Differs);
            if self.tags.is_empty() {
                let read = std::mem::take(&mut self.read);
                self.text(&read, out);
            } else {
                self.read.push(c);
                if TOKENS.contains(&self.read.as_str()) {
                    let read = std::mem::take(&mut self.read);
                    self.tag(&read, out);
                }
                return;
            }
        }
        if c == '<' {
            self.read.push(c);
            self.tags = TOKENS.map(Tag::new).into();
            for tag in &mut self.tags {
                tag.push(c);
            }
        } else {
            self.text(c.encode_utf8(&mut [0; 4]), out);
        }
    }

    fn tag(&mut self, tag: &str, out: &mut Pieces) {
        match tag {
            "<|message|>" if self.place == Place::Header => {
                self.place = body(&std::mem::take(&mut self.held));
                (self.shown, self.space) = (false, String::new());
            }
            // A message may begin where the last was not closed.
            "<|start|>" => {
                self.close(out);
                self.place = Place::Header;
            }
            "<|end|>" | "<|call|>" | "<|return|>" => self.close(out),
            _ if self.place == Place::Between => {
                self.place = Place::Header;
                self.held.push_str(tag);
            }
            _ if self.place == Place::Header => self.held.push_str(tag),
            // Within a body it has no meaning.
            _ => self.text(tag, out),
        }
    }

    fn text(&mut self, text: &str, out: &mut Pieces) {
        match &self.place {
            Place::Header => {
                self.held.push_str(text);
                if self.held.len() > LONGEST {
                    self.place = Place::Content;
                    self.shown = false;
                    let held = std::mem::take(&mut self.held);
                    self.text(&held, out);
                }
            }
            Place::Call(_) => self.held.push_str(text),
            Place::Between => {}
            Place::Thought | Place::Content => {
                for c in text.chars() {
                    if c.is_whitespace() {
                        self.space.push(c);
                        continue;
                    }
                    let space = std::mem::take(&mut self.space);
                    let space = if self.shown { &*space } else { "" };
                    let shown = format!("{space}{c}");
                    match self.place {
                        Place::Thought => out.reasoning(&shown),
                        _ => out.content(&shown),
                    }
                    self.shown = true;
                }
            }
        }
    }

    /// Ends a message.
    fn close(&mut self, out: &mut Pieces) {
        let held = std::mem::take(&mut self.held);
        match std::mem::replace(&mut self.place, Place::Between) {
            Place::Call(name) => match named(&name, &held) {
                Some(call) => out.call(call),
                None => out.content(&held),
            },
            // Text without a header.
            Place::Header if !held.trim().is_empty() => out.content(&held),
            _ => {}
        }
        self.space.clear();
    }

    /// Ends the text: the tag that closes its last message is often not part of it.
    pub fn finish(&mut self, out: &mut Pieces) {
        let read = std::mem::take(&mut self.read);
        self.text(&read, out);
        self.close(out);
    }
}

/// What the body of a message with this header is.
fn body(header: &str) -> Place {
    let word = |after: &str| {
        let (_, rest) = header.split_once(after)?;
        Some(rest.split(|c: char| c.is_whitespace() || c == '<').next().unwrap_or(""))
    };
    match (word("to=").and_then(|to| to.strip_prefix("functions.")), word("<|channel|>")) {
        (Some(name), _) => Place::Call(name.into()),
        (None, Some("analysis")) => Place::Thought,
        _ => Place::Content,
    }
}
