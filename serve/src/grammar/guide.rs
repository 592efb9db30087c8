//! Which token may come next in one answer. In: the tokens as they are sampled. Out: what is allowed. A thought before the answer is free, up
//! to its budget; then the grammar holds.

use std::sync::Arc;

use llguidance::Matcher;
use llguidance::toktrie::SimpleVob;

use super::Grammar;
use crate::tokenizer::Tokenizer;

/// What holds the answers of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Constraint {
    /// What an answer must be; none for anything.
    pub grammar: Option<Grammar>,
    /// The thought that may come before; none if there is none.
    pub thought: Option<Arc<Thought>>,
}

/// A thought before an answer.
#[derive(Clone, Debug)]
pub struct Thought {
    /// The model's.
    pub tokenizer: Tokenizer,
    /// Whether the prompt has opened it.
    pub opened: bool,
    /// The token that opens it.
    pub open: Option<u32>,
    /// The text that closes it.
    pub close: &'static str,
    /// Tokens that spell what closes it, for one that is too long.
    pub force: Vec<u32>,
    /// Its tokens, at most.
    pub budget: Option<usize>,
}

impl PartialEq for Thought {
    fn eq(&self, other: &Thought) -> bool {
        (self.opened, self.open, self.close, self.budget)
            == (other.opened, other.open, other.close, other.budget)
    }
}

/// The bits of a word.
const BITS: [u32; u32::BITS as usize] = {
    let mut bits = [0; u32::BITS as usize];
    let mut i = 0;
    while i < bits.len() {
        bits[i] = 1 << i;
        i += 1;
    }
    bits
};

/// Tokens that may come.
#[derive(Clone, Debug)]
pub enum Allowed {
    /// All.
    All,
    /// This one.
    Only(u32),
    /// One bit for each id.
    Some(SimpleVob),
}

impl Allowed {
    /// Makes what is not allowed impossible.
    pub fn apply(&self, logits: &mut [f32]) {
        match self {
            Allowed::All => {}
            Allowed::Only(id) => {
                let kept = logits.get(*id as usize).copied();
                logits.fill(f32::NEG_INFINITY);
                if let (Some(x), Some(kept)) = (logits.get_mut(*id as usize), kept) {
                    *x = kept;
                }
            }
            Allowed::Some(mask) => {
                let mut words = mask.as_slice().iter();
                for chunk in logits.chunks_mut(u32::BITS as usize) {
                    match words.next().copied().unwrap_or(0) {
                        u32::MAX => {}
                        0 => chunk.fill(f32::NEG_INFINITY),
                        // Without branches, so that several are done at a time.
                        word => chunk.iter_mut().zip(BITS).for_each(|(x, bit)| {
                            let lost = if word & bit == 0 { u32::MAX } else { 0 };
                            *x = f32::from_bits(x.to_bits() & !lost | f32::NEG_INFINITY.to_bits() & lost);
                        }),
                    }
                }
            }
        }
    }
}

/// Where an answer is.
#[derive(Debug)]
enum Place {
    /// Before a thought, if one comes.
    Before,
    /// Inside one, of so many tokens; the end of its text.
    Inside(usize, Vec<u8>),
    /// In what closes it: the next token of it.
    Closing(usize),
    Answer,
}

/// Guides one answer.
pub struct Guide {
    matcher: Option<Matcher>,
    thought: Option<Arc<Thought>>,
    place: Place,
}

impl std::fmt::Debug for Guide {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Guide({:?})", self.place)
    }
}

impl Clone for Guide {
    fn clone(&self) -> Guide {
        let place = match &self.place {
            Place::Before => Place::Before,
            Place::Inside(tokens, tail) => Place::Inside(*tokens, tail.clone()),
            Place::Closing(at) => Place::Closing(*at),
            Place::Answer => Place::Answer,
        };
        Guide {
            matcher: self.matcher.as_ref().map(Matcher::deep_clone),
            thought: self.thought.clone(),
            place,
        }
    }
}

impl Guide {
    /// Of an answer that begins.
    pub fn new(constraint: &Constraint) -> Guide {
        let Constraint { grammar, thought } = constraint;
        let place = match thought {
            Some(thought) if thought.opened => Place::Inside(0, Vec::new()),
            Some(_) => Place::Before,
            None => Place::Answer,
        };
        Guide { matcher: grammar.as_ref().map(Grammar::matcher), thought: thought.clone(), place }
    }

    /// What may come next.
    ///
    /// # Errors
    /// The grammar is too complex at this place; one line says so.
    pub fn allowed(&mut self) -> Result<Allowed, String> {
        if let Some(thought) = &self.thought {
            match self.place {
                Place::Inside(tokens, _) if thought.budget.is_some_and(|most| tokens >= most) => {
                    self.place = Place::Closing(0);
                }
                Place::Inside(..) => return Ok(Allowed::All),
                Place::Before | Place::Closing(_) | Place::Answer => {}
            }
            if let Place::Closing(at) = self.place {
                if let Some(id) = thought.force.get(at) {
                    return Ok(Allowed::Only(*id));
                }
                self.place = Place::Answer;
            }
        }
        let Some(matcher) = &mut self.matcher else { return Ok(Allowed::All) };
        let mut mask = matcher.compute_mask_or_eos().map_err(|e| line(&e))?;
        if let (Place::Before, Some(open)) = (&self.place, self.thought.as_ref().and_then(|t| t.open)) {
            mask.allow_token(open);
        }
        Ok(Allowed::Some(mask))
    }

    /// Whether this token may come, at much less cost than all that may; `false` also where only [`allowed`](Guide::allowed) tells.
    pub fn admits(&mut self, token: u32) -> bool {
        let answers = self.thought.is_none() || matches!(self.place, Place::Answer);
        let taken = |matcher: &mut Matcher| matcher.validate_tokens(&[token]).is_ok_and(|n| n == 1);
        answers && self.matcher.as_mut().is_some_and(taken)
    }

    /// Takes the token that came; says whether the answer is complete, so that nothing may follow.
    ///
    /// # Errors
    /// The grammar does not take it, which is a defect, or becomes too complex.
    pub fn take(&mut self, token: u32) -> Result<bool, String> {
        if let Some(thought) = &self.thought {
            match &mut self.place {
                Place::Before if thought.open == Some(token) => {
                    self.place = Place::Inside(0, Vec::new());
                    return Ok(false);
                }
                Place::Before => self.place = Place::Answer,
                Place::Inside(tokens, tail) => {
                    *tokens += 1;
                    tail.extend_from_slice(&thought.tokenizer.bytes(token));
                    let close = thought.close.as_bytes();
                    if tail.windows(close.len()).any(|part| part == close) {
                        self.place = Place::Answer;
                    } else {
                        tail.drain(..tail.len().saturating_sub(close.len()));
                    }
                    return Ok(false);
                }
                Place::Closing(at) => {
                    *at += 1;
                    if *at >= thought.force.len() {
                        self.place = Place::Answer;
                    }
                    return Ok(false);
                }
                Place::Answer => {}
            }
        }
        let Some(matcher) = &mut self.matcher else { return Ok(false) };
        matcher.consume_token(token).map_err(|e| line(&e))?;
        Ok(matcher.is_stopped())
    }
}

fn line(e: &impl std::fmt::Display) -> String {
    format!("the answer cannot go on by its grammar: {}", crate::files::line(&e.to_string()))
}
