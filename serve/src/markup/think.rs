//! Thoughts before an answer: `<think>…</think>` at its beginning, or all up to `</think>` where the prompt opened the thought.

use super::Pieces;
use super::detect::ThoughtTags;
use super::scan::{Compared, Marker, Tag};

/// Separates a thought from what follows. After the first end of a thought its tags are text.
#[derive(Debug)]
pub(super) struct Think {
    tags: ThoughtTags,
    place: Place,
    /// Whether the prompt has opened the thought.
    opened: bool,
    /// Space that came and may belong to nothing.
    space: String,
    thought: bool,
    /// Whether some of it was shown.
    shown: bool,
}

#[derive(Debug)]
enum Place {
    /// Before the opening tag.
    Before(Tag),
    Inside(Marker),
    Over,
}

impl Think {
    pub fn new(tags: ThoughtTags, opened: bool) -> Think {
        let place = Place::Before(Tag::new(tags.open()));
        Think { tags, place, opened, space: String::new(), thought: opened, shown: false }
    }

    pub fn is_inside(&self) -> bool {
        matches!(self.place, Place::Inside(_)) || self.opened && matches!(self.place, Place::Before(_))
    }

    pub fn is_over(&self) -> bool {
        matches!(self.place, Place::Over)
    }

    /// Whether there was a thought, empty or not.
    pub fn has_thought(&self) -> bool {
        self.thought
    }

    /// Takes the next character; gives what is no thought.
    pub fn push(&mut self, c: char, out: &mut Pieces) -> String {
        match &mut self.place {
            Place::Before(tag) => {
                if tag.compared().is_empty() && c.is_whitespace() {
                    self.space.push(c);
                    return String::new();
                }
                match tag.push(c) {
                    Compared::More => String::new(),
                    Compared::Whole => {
                        self.thought = true;
                        self.begin();
                        String::new()
                    }
                    Compared::Differs => {
                        let mut read = tag.compared().to_owned();
                        read.push(c);
                        self.no_tag(&read, out)
                    }
                }
            }
            Place::Inside(marker) => {
                let shown = marker.push(c);
                if marker.is_complete() {
                    self.place = Place::Over;
                } else {
                    self.show(&shown, out);
                }
                String::new()
            }
            Place::Over => c.into(),
        }
    }

    fn begin(&mut self) {
        self.space.clear();
        self.place = Place::Inside(Marker::new(self.tags.close()));
    }

    /// The text began with no opening tag.
    fn no_tag(&mut self, read: &str, out: &mut Pieces) -> String {
        if !self.opened {
            self.place = Place::Over;
            return std::mem::take(&mut self.space) + read;
        }
        self.begin();
        // The closing tag may be the first that comes.
        for c in read.chars() {
            self.push(c, out);
        }
        String::new()
    }

    /// Shows a part of the thought, but for space around it.
    fn show(&mut self, text: &str, out: &mut Pieces) {
        for c in text.chars() {
            if !c.is_whitespace() {
                out.reasoning(&std::mem::take(&mut self.space));
                out.reasoning(c.encode_utf8(&mut [0; 4]));
                self.shown = true;
            } else if self.shown {
                self.space.push(c);
            }
        }
    }

    /// Ends the text; gives what is no thought.
    pub fn finish(&mut self, out: &mut Pieces) -> String {
        match std::mem::replace(&mut self.place, Place::Over) {
            Place::Before(tag) if self.opened => {
                self.space.clear();
                self.show(tag.compared(), out);
                String::new()
            }
            Place::Before(tag) => std::mem::take(&mut self.space) + tag.compared(),
            Place::Inside(marker) => {
                self.show(&marker.held(), out);
                String::new()
            }
            Place::Over => String::new(),
        }
    }
}
