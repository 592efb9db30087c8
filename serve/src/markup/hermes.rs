//! Hermes' format, also Qwen's: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one after the other.

use super::json::{Object, Read, call};
use super::scan::{Compared, Tag};
use super::{Call, Reader, Step};

/// Reads one call after its `<tool_call>`.
#[derive(Debug, Default)]
pub(super) enum Hermes {
    /// Before the object.
    #[default]
    Begun,
    Object(Object),
    /// After it; the tag that closes the call.
    Closing(Call, Option<Tag>),
}

impl Reader for Hermes {
    fn push(&mut self, c: char) -> Step {
        match self {
            Hermes::Begun if c.is_whitespace() => Step::More,
            Hermes::Begun => {
                let mut object = Object::default();
                let read = object.push(c);
                *self = Hermes::Object(object);
                if read == Read::Wrong { Step::Fail } else { Step::More }
            }
            Hermes::Object(object) => match object.push(c) {
                Read::More => Step::More,
                Read::Wrong => Step::Fail,
                Read::Whole => match call(&object.take()) {
                    Some(call) => {
                        *self = Hermes::Closing(call, None);
                        Step::More
                    }
                    None => Step::Fail,
                },
            },
            Hermes::Closing(_, None) if c.is_whitespace() => Step::More,
            Hermes::Closing(call, tag) => {
                let compared = tag.get_or_insert_with(|| Tag::new("</tool_call>")).push(c);
                match compared {
                    Compared::More => Step::More,
                    Compared::Differs => Step::Fail,
                    Compared::Whole => Step::Last(call.clone()),
                }
            }
        }
    }

    fn finish(&mut self) -> Step {
        match self {
            Hermes::Closing(call, None) => Step::Last(call.clone()),
            _ => Step::Fail,
        }
    }
}
