//! DeepSeek's format: `<｜tool▁calls▁begin｜>`, then for each call `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, its arguments as a
//! block of JSON, `<｜tool▁call▁end｜>`; from V3.1 on the name comes before the separator and the arguments as they are.

use super::json::{Object, Read, named};
use super::scan::{Compared, OneOf, Tag};
use super::{Call, Reader, Step};

const SEPARATOR: &str = "<｜tool▁sep｜>";
const FENCE: &str = "```";

/// Reads calls after `<｜tool▁calls▁begin｜>`.
#[derive(Debug)]
pub(super) struct DeepSeek {
    place: Place,
    /// Before the separator: the kind, or the name.
    kind: String,
    name: String,
    object: Object,
    call: Option<Call>,
    any: bool,
}

#[derive(Debug)]
enum Place {
    /// Another call, or the end.
    Between(OneOf),
    Kind,
    Separator(Tag),
    /// After the separator: a name, or arguments.
    Name,
    Fence(Tag),
    /// After the fence: `json`, then arguments.
    Language,
    Object,
    /// The end of the block, or of the call.
    Closing(OneOf),
    End(OneOf),
}

fn between() -> Place {
    Place::Between(OneOf::new(&["<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"]))
}

impl Default for DeepSeek {
    fn default() -> DeepSeek {
        let (kind, name) = (String::new(), String::new());
        DeepSeek { place: between(), kind, name, object: Object::default(), call: None, any: false }
    }
}

impl DeepSeek {
    fn begin_object(&mut self, c: char) {
        self.object.push(c);
        self.place = Place::Object;
    }

    fn end_call(&mut self) -> Step {
        self.place = between();
        self.any = true;
        self.call.take().map_or(Step::Fail, Step::Call)
    }
}

impl Reader for DeepSeek {
    fn push(&mut self, c: char) -> Step {
        match &mut self.place {
            Place::Between(tags) => match tags.push(c) {
                Ok(Some(0)) => {
                    self.kind.clear();
                    self.name.clear();
                    self.place = Place::Kind;
                }
                Ok(Some(_)) if self.any => return Step::End,
                Ok(Some(_)) | Err(()) => return Step::Fail,
                Ok(None) => {}
            },
            Place::Kind if c == '<' => {
                let mut tag = Tag::new(SEPARATOR);
                tag.push(c);
                self.place = Place::Separator(tag);
            }
            Place::Kind if c != '\n' => self.kind.push(c),
            Place::Separator(tag) => match tag.push(c) {
                Compared::More => {}
                Compared::Whole => self.place = Place::Name,
                Compared::Differs => return Step::Fail,
            },
            Place::Name if c == '{' && self.name.trim().is_empty() => {
                self.name = std::mem::take(&mut self.kind);
                self.begin_object(c);
            }
            Place::Name if c == '\n' && !self.name.trim().is_empty() => {
                self.place = Place::Fence(Tag::new(FENCE));
            }
            Place::Name => self.name.push(c),
            // The fence is one character three times, and may only begin where nothing else is.
            Place::Fence(tag) => match tag.push(c) {
                Compared::More => {}
                Compared::Whole => self.place = Place::Language,
                Compared::Differs if tag.compared().is_empty() && c.is_whitespace() => {}
                Compared::Differs => return Step::Fail,
            },
            Place::Language if c == '{' => self.begin_object(c),
            Place::Language if c.is_alphanumeric() || c.is_whitespace() => {}
            Place::Object => match self.object.push(c) {
                Read::More => {}
                Read::Wrong => return Step::Fail,
                Read::Whole => {
                    self.call = named(&self.name, &self.object.take());
                    if self.call.is_none() {
                        return Step::Fail;
                    }
                    self.place = Place::Closing(OneOf::new(&[FENCE, "<｜tool▁call▁end｜>"]));
                }
            },
            Place::Closing(tags) => match tags.push(c) {
                Ok(None) => {}
                Ok(Some(0)) => self.place = Place::End(OneOf::new(&["<｜tool▁call▁end｜>"])),
                Ok(Some(_)) => return self.end_call(),
                Err(()) => return Step::Fail,
            },
            Place::End(tags) => match tags.push(c) {
                Ok(None) => {}
                Ok(Some(_)) => return self.end_call(),
                Err(()) => return Step::Fail,
            },
            Place::Kind | Place::Language => return Step::Fail,
        }
        Step::More
    }

    fn finish(&mut self) -> Step {
        match &self.place {
            Place::Between(tags) if tags.is_idle() && self.any => Step::End,
            Place::Closing(tags) | Place::End(tags) if tags.is_idle() => self.end_call(),
            _ => Step::Fail,
        }
    }
}
