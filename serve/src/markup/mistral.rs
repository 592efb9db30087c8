//! Mistral's format: `[TOOL_CALLS]`, then a list of objects with a name and arguments, or (newer) `name[ARGS]{…}`, with or without
//! `[CALL_ID]…` before the arguments.

use super::json::{Object, Read, call, named};
use super::scan::{Compared, Tag};
use super::{Reader, Step};

/// Reads the calls after one `[TOOL_CALLS]`.
#[derive(Debug, Default)]
pub(super) struct Mistral {
    place: Place,
    object: Object,
    /// Of the newer form.
    name: String,
}

#[derive(Debug, Default)]
enum Place {
    #[default]
    Begun,
    /// In a list: before an object.
    Item,
    Object,
    /// After one.
    Separator,
    Name,
    Bracket(Bracket),
    /// After `[CALL_ID]`: the id is not used, calls get ours.
    Id,
    Arguments,
}

/// What a bracket may turn out to be.
#[derive(Debug)]
struct Bracket {
    arguments: Tag,
    id: Tag,
}

/// What names and ids are made of.
fn is_name(c: char) -> bool {
    c.is_alphanumeric() || "_-./:".contains(c)
}

impl Mistral {
    fn bracket(&mut self) -> Step {
        let mut tags = Bracket { arguments: Tag::new("[ARGS]"), id: Tag::new("[CALL_ID]") };
        tags.arguments.push('[');
        tags.id.push('[');
        self.place = Place::Bracket(tags);
        Step::More
    }

    fn object(&mut self, c: char, place: Place) -> Step {
        self.place = place;
        self.object.push(c);
        Step::More
    }
}

impl Reader for Mistral {
    fn push(&mut self, c: char) -> Step {
        match &mut self.place {
            Place::Begun if c == '[' => self.place = Place::Item,
            Place::Begun if is_name(c) => {
                self.place = Place::Name;
                self.name.push(c);
            }
            Place::Begun | Place::Item | Place::Separator if c.is_whitespace() => {}
            Place::Item if c == '{' => return self.object(c, Place::Object),
            Place::Separator if c == ',' => self.place = Place::Item,
            Place::Separator if c == ']' => return Step::End,
            Place::Name if c == '[' => return self.bracket(),
            Place::Id if c == '[' => return self.bracket(),
            Place::Name | Place::Arguments if c == '{' && self.object.is_empty() => {
                return self.object(c, Place::Arguments);
            }
            Place::Name if is_name(c) => self.name.push(c),
            Place::Id if is_name(c) => {}
            Place::Arguments if self.object.is_empty() && c.is_whitespace() => {}
            Place::Bracket(tags) => match (tags.arguments.push(c), tags.id.push(c)) {
                (Compared::Whole, _) => self.place = Place::Arguments,
                (_, Compared::Whole) => self.place = Place::Id,
                (Compared::Differs, Compared::Differs) => return Step::Fail,
                _ => {}
            },
            Place::Object | Place::Arguments if !self.object.is_empty() => {
                return match self.object.push(c) {
                    Read::More => Step::More,
                    Read::Wrong => Step::Fail,
                    Read::Whole => self.whole(),
                };
            }
            _ => return Step::Fail,
        }
        Step::More
    }

    fn finish(&mut self) -> Step {
        if matches!(self.place, Place::Separator) { Step::End } else { Step::Fail }
    }
}

impl Mistral {
    /// An object is whole.
    fn whole(&mut self) -> Step {
        let object = self.object.take();
        let in_list = matches!(self.place, Place::Object);
        let found = if in_list { call(&object) } else { named(&self.name, &object) };
        self.place = Place::Separator;
        match found {
            Some(call) if in_list => Step::Call(call),
            Some(call) => Step::Last(call),
            None => Step::Fail,
        }
    }
}
