//! Llama 3's format: objects with a name and parameters, `; ` between them, after `<|python_tag|>` or as the whole answer.

use std::sync::Arc;

use super::json::{Object, Read, call};
use super::{Reader, Step, Tools};

/// Reads calls.
#[derive(Debug)]
pub(super) struct Llama {
    object: Object,
    /// Whether an object may begin.
    between: bool,
    /// Where there was no marker: a call is then only what calls one of these.
    known: Option<Arc<Tools>>,
    /// Whether a semicolon wants another call.
    wanting: bool,
}

impl Llama {
    pub fn new(known: Option<Arc<Tools>>) -> Llama {
        Llama { object: Object::default(), between: true, known, wanting: true }
    }
}

impl Reader for Llama {
    fn push(&mut self, c: char) -> Step {
        if self.object.is_empty() {
            return match c {
                _ if c.is_whitespace() => Step::More,
                ';' if !self.between => {
                    (self.between, self.wanting) = (true, true);
                    Step::More
                }
                '{' if self.between => {
                    self.object.push(c);
                    Step::More
                }
                _ => Step::Fail,
            };
        }
        match self.object.push(c) {
            Read::More => Step::More,
            Read::Wrong => Step::Fail,
            Read::Whole => {
                let known = |name: &str| self.known.as_ref().is_none_or(|tools| tools.has(name));
                let found = call(&self.object.take()).filter(|call| known(&call.name));
                self.between = false;
                match found {
                    Some(call) => {
                        self.wanting = false;
                        Step::Call(call)
                    }
                    None => Step::Fail,
                }
            }
        }
    }

    fn finish(&mut self) -> Step {
        if self.wanting || !self.object.is_empty() { Step::Fail } else { Step::End }
    }
}
