//! What a model's text says besides words: thoughts and calls of tools, in the spelling that the model was trained on. In: the text of
//! one answer, cut anywhere. Out: pieces of content, of reasoning, and whole calls; where the text was cut changes nothing.
//!
//! A call is shown when it is whole, because one that turns out malformed comes back as the text it is, and what was sent cannot be taken
//! back. State machines read each character once, and none is looked at again: what is held back is compared with what must follow,
//! and given up as text at the first character that cannot.

mod bare;
mod deepseek;
mod detect;
mod harmony;
mod hermes;
mod json;
mod llama;
mod mistral;
mod scan;
#[cfg(test)]
mod tests;
mod think;
mod tools;

use std::sync::Arc;

pub use detect::{CallFormat, Markup, ThoughtTags};
pub use tools::Tools;

use bare::{Glm, QwenCoder};
use deepseek::DeepSeek;
use harmony::Harmony;
use hermes::Hermes;
use llama::Llama;
use mistral::Mistral;
use scan::Marker;
use think::Think;

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The tool's name.
    pub name: String,
    /// Its arguments: the text of a JSON object.
    pub arguments: String,
}

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Of what is said to the user.
    Content(String),
    /// Of what the model thinks before.
    Reasoning(String),
    /// A call, whole.
    Call(Call),
}

/// Pieces, in the order of the text; neighbours of a kind are one.
#[derive(Debug, Default)]
struct Pieces(Vec<Piece>);

impl Pieces {
    fn content(&mut self, text: &str) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(Piece::Content(last)) => last.push_str(text),
            _ => self.0.push(Piece::Content(text.into())),
        }
    }

    fn reasoning(&mut self, text: &str) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(Piece::Reasoning(last)) => last.push_str(text),
            _ => self.0.push(Piece::Reasoning(text.into())),
        }
    }

    fn call(&mut self, call: Call) {
        self.0.push(Piece::Call(call));
    }

    fn char(&mut self, c: char) {
        self.content(c.encode_utf8(&mut [0; 4]));
    }
}

/// What a character does to a call that is being read.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// It belongs to it.
    More,
    /// It completes a call; others may follow at once.
    Call(Call),
    /// It ends the calls and belongs to them.
    End,
    /// It completes the last call.
    Last(Call),
    /// It cannot be there: what was read since the last call is text.
    Fail,
}

/// Reads calls of one format, after the marker that opens them.
trait Reader: std::fmt::Debug + Send {
    /// Takes the next character.
    fn push(&mut self, c: char) -> Step;

    /// The text ends here: the call that lacks nothing but its closing tag, or `Fail` where more is missing; `End` where nothing was
    /// open.
    fn finish(&mut self) -> Step;
}

/// Reads one answer.
#[derive(Debug)]
pub struct Parser {
    way: Way,
}

#[derive(Debug)]
enum Way {
    Harmony(Box<Harmony>),
    Tagged { think: Option<Think>, calls: Option<Calls>, after_thought: bool },
}

impl Parser {
    /// Reads an answer to a prompt: `tools` are those whose calls are read, none if calls are text; `thinking` says that the prompt ends
    /// inside a thought.
    pub fn new(markup: Markup, tools: Option<Arc<Tools>>, thinking: bool) -> Parser {
        if markup.calls == Some(CallFormat::Harmony) {
            return Parser { way: Way::Harmony(Box::new(Harmony::new())) };
        }
        let think = markup.thoughts.map(|tags| Think::new(tags, thinking));
        let calls = markup.calls.zip(tools).map(|(format, tools)| Calls::new(format, tools));
        Parser { way: Way::Tagged { think, calls, after_thought: false } }
    }

    /// Whether what comes next is a thought, for all that is known.
    pub fn is_thinking(&self) -> bool {
        match &self.way {
            Way::Harmony(harmony) => harmony.is_thinking(),
            Way::Tagged { think, .. } => think.as_ref().is_some_and(Think::is_inside),
        }
    }

    /// Takes the next piece of text; gives what is sure by now.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        let mut out = Pieces::default();
        match &mut self.way {
            Way::Harmony(harmony) => text.chars().for_each(|c| harmony.push(c, &mut out)),
            Way::Tagged { think: None, calls: None, after_thought: false } => out.content(text),
            Way::Tagged { think, calls, after_thought } => {
                for c in text.chars() {
                    match think {
                        Some(inside) if !inside.is_over() => {
                            let outside = inside.push(c, &mut out);
                            *after_thought = inside.has_thought();
                            outside.chars().for_each(|c| content(calls, after_thought, c, &mut out));
                        }
                        _ => content(calls, after_thought, c, &mut out),
                    }
                }
            }
        }
        out.0
    }

    /// Ends the text: all that was held back.
    pub fn finish(&mut self) -> Vec<Piece> {
        let mut out = Pieces::default();
        match &mut self.way {
            Way::Harmony(harmony) => harmony.finish(&mut out),
            Way::Tagged { think, calls, after_thought } => {
                if let Some(think) = think {
                    let outside = think.finish(&mut out);
                    outside.chars().for_each(|c| content(calls, after_thought, c, &mut out));
                }
                if let Some(calls) = calls {
                    calls.finish(&mut out);
                }
            }
        }
        out.0
    }
}

/// A character outside of thoughts. Space between a thought and what follows belongs to neither.
fn content(calls: &mut Option<Calls>, after_thought: &mut bool, c: char, out: &mut Pieces) {
    if *after_thought && c.is_whitespace() {
        return;
    }
    *after_thought = false;
    match calls {
        Some(calls) => calls.push(c, out),
        None => out.char(c),
    }
}

/// Finds calls in text.
#[derive(Debug)]
struct Calls {
    format: CallFormat,
    tools: Arc<Tools>,
    marker: Marker,
    /// Whether nothing but space has come.
    fresh: bool,
    /// Space that is content unless a call follows.
    space: String,
    /// Reads what follows a marker.
    reader: Option<Box<dyn Reader>>,
    /// What it has read since the last call, the marker included.
    held: String,
}

impl Calls {
    fn new(format: CallFormat, tools: Arc<Tools>) -> Calls {
        Calls {
            format,
            tools,
            marker: Marker::new(format.marker()),
            fresh: true,
            space: String::new(),
            reader: None,
            held: String::new(),
        }
    }

    fn reader(&self) -> Box<dyn Reader> {
        match self.format {
            CallFormat::Hermes => Box::new(Hermes::default()),
            CallFormat::Llama3Json => Box::new(Llama::new(None)),
            CallFormat::Mistral => Box::new(Mistral::default()),
            CallFormat::DeepseekV3 => Box::new(DeepSeek::default()),
            CallFormat::Glm4 => Box::new(Glm::new(self.tools.clone())),
            // Harmony has a way of its own, and never comes here.
            CallFormat::Qwen3Coder | CallFormat::Harmony => Box::new(QwenCoder::new(self.tools.clone())),
        }
    }

    fn push(&mut self, c: char, out: &mut Pieces) {
        let Some(reader) = &mut self.reader else { return self.text(c, out) };
        match reader.push(c) {
            Step::More => self.held.push(c),
            Step::Call(call) => {
                self.held.clear();
                out.call(call);
            }
            Step::Last(call) => {
                self.close();
                out.call(call);
            }
            Step::End => self.close(),
            Step::Fail => {
                out.content(&self.held);
                self.close();
                self.text(c, out);
            }
        }
    }

    fn close(&mut self) {
        self.held.clear();
        self.reader = None;
    }

    /// A character outside of calls.
    fn text(&mut self, c: char, out: &mut Pieces) {
        // Models of Llama's write a call without a marker, as the whole answer.
        if self.fresh && c == '{' && self.format == CallFormat::Llama3Json {
            let mut reader = Box::new(Llama::new(Some(self.tools.clone())));
            reader.push(c);
            self.open(reader);
            self.held.push(c);
            return;
        }
        self.fresh &= c.is_whitespace();
        if self.marker.is_idle() && c.is_whitespace() {
            self.space.push(c);
            return;
        }
        let shown = self.marker.push(c);
        if self.marker.is_complete() {
            self.marker.restart();
            let reader = self.reader();
            self.open(reader);
            self.held.push_str(self.format.marker());
        } else if !shown.is_empty() {
            out.content(&std::mem::take(&mut self.space));
            self.show(&shown, out);
        }
    }

    /// Shows text, but for space at its end.
    fn show(&mut self, text: &str, out: &mut Pieces) {
        let words = text.trim_end();
        out.content(words);
        self.space.push_str(&text[words.len()..]);
    }

    /// A call begins; the space before it is kept until it is known to be one.
    fn open(&mut self, reader: Box<dyn Reader>) {
        self.fresh = false;
        self.held = std::mem::take(&mut self.space);
        self.reader = Some(reader);
    }

    fn finish(&mut self, out: &mut Pieces) {
        if let Some(mut reader) = self.reader.take() {
            match reader.finish() {
                Step::Call(call) | Step::Last(call) => {
                    self.held.clear();
                    out.call(call);
                }
                Step::End => self.held.clear(),
                Step::More | Step::Fail => {}
            }
        }
        let rest =
            [&*std::mem::take(&mut self.space), &*std::mem::take(&mut self.held), &*self.marker.held()];
        rest.into_iter().for_each(|text| out.content(text));
        self.marker.restart();
    }
}
