//! Structured output: answers held to a JSON schema, a regular expression, a list of texts, or a grammar. In: what a client wants, hostile
//! until checked. Out: a compiled [`Grammar`], and for each answer a [`Guide`] that says before each token which may come.
//!
//! The automata are `llguidance`'s. What stands before it here refuses what has no answer, or none that fits a context, keeps
//! compilation within bounds of size, depth and time, and says exactly what that library leaves open: which dates there are, how much
//! space may be between the parts of a JSON text.

mod bounds;
mod gbnf;
mod guide;
mod numbers;
mod regex;
mod schema;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;
use std::time::Duration;

use astrai_files::guarded;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::tokenizer::Tokenizer;

pub use guide::{Allowed, Constraint, Guide, Thought};

/// Time for a grammar to be compiled.
const PATIENCE: Duration = Duration::from_secs(5);

/// Compilations that went on for longer than that and have not come to their own bounds yet, at most.
const MOST_LATE: usize = 2;

/// Grammars that are kept for requests that want the same again, at most.
const MOST_KEPT: usize = 16;

/// Stack of a compilation: parsers of nested text are recursive.
const STACK: usize = 64 << 20;

/// How a compilation stands.
const RUNNING: u8 = 0;
const LATE: u8 = 1;
const DONE: u8 = 2;

/// Texts of a choice, at most.
const MOST_CHOICES: usize = 10_000;

/// Bytes of what describes an answer, at most.
const LARGEST: usize = 1 << 18;

/// What an answer must be.
#[derive(Clone, Debug, PartialEq)]
pub enum Wanted {
    /// JSON that a schema describes.
    Schema(Value),
    /// Text that a regular expression matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// Text of a grammar, in GBNF if it has `::=`, in Lark otherwise.
    Grammar(String),
    /// Text of a grammar in Lark, of this program's making.
    Lark(String),
}

/// Why there is no grammar, in one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    /// What is wanted cannot be.
    #[error("{0}")]
    Wrong(String),
    /// Nothing is known against it, but this is no time for it.
    #[error("{0}; try again later")]
    Busy(String),
}

/// A text as Lark writes it.
pub fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

impl Wanted {
    /// Any JSON object.
    pub fn object() -> Wanted {
        Wanted::Schema(json!({"type": "object"}))
    }

    /// A schema, checked, as a grammar in Lark may hold it.
    ///
    /// # Errors
    /// One line: the place and the defect.
    pub fn checked_schema(schema: Value) -> Result<Value, String> {
        schema::checked(schema)
    }

    /// A regular expression, checked, as a grammar in Lark may hold it.
    ///
    /// # Errors
    /// One line: what it is not, or what it has too much of.
    pub fn checked_regex(text: &str) -> Result<String, String> {
        regex::checked(text)
    }

    /// A sum by which equal wishes are known.
    fn sum(&self) -> [u8; 32] {
        let (kind, text) = match self {
            Wanted::Schema(schema) => (0, schema.to_string()),
            Wanted::Regex(text) => (1, text.clone()),
            Wanted::Choice(texts) => (2, json!(texts).to_string()),
            Wanted::Grammar(text) => (3, text.clone()),
            Wanted::Lark(text) => (4, text.clone()),
        };
        Sha256::new().chain_update([kind]).chain_update(text).finalize().into()
    }

    /// The same in the library's terms.
    ///
    /// # Errors
    /// One line that says what cannot be.
    fn grammar(self) -> Result<TopLevelGrammar, String> {
        match self {
            Wanted::Schema(schema) => {
                if schema.to_string().len() > LARGEST {
                    return Err(format!("the schema has more than {LARGEST} bytes"));
                }
                Ok(TopLevelGrammar::from_json_schema(schema::checked(schema)?))
            }
            Wanted::Regex(text) => Ok(TopLevelGrammar::from_regex(&regex::checked(&text)?)),
            Wanted::Choice(texts) if texts.is_empty() => Err("is empty; give a text at least".into()),
            Wanted::Choice(texts) if texts.len() > MOST_CHOICES => {
                Err(format!("has {} texts; give at most {MOST_CHOICES}", texts.len()))
            }
            Wanted::Choice(texts) => {
                let quoted: Vec<String> = texts.iter().map(|text| quoted(text)).collect();
                let lark = format!("start: CHOICE\nCHOICE: {}\n", quoted.join(" | "));
                within(&lark).map(|()| TopLevelGrammar::from_lark(lark))
            }
            Wanted::Lark(text) => within(&text).map(|()| TopLevelGrammar::from_lark(text)),
            Wanted::Grammar(text) => {
                within(&text)?;
                let lark = if text.contains("::=") { gbnf::to_lark(&text)? } else { bounds::lark(text)? };
                Ok(TopLevelGrammar::from_lark(lark))
            }
        }
    }
}

/// Refuses the text of a grammar that is too long.
pub(crate) fn within(text: &str) -> Result<(), String> {
    if text.len() > LARGEST { Err(format!("has more than {LARGEST} bytes")) } else { Ok(()) }
}

/// A compiled grammar. A clone shares it.
#[derive(Clone)]
pub struct Grammar(Arc<Mutex<Matcher>>);

impl Grammar {
    /// A matcher at the beginning of a text.
    fn matcher(&self) -> Matcher {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).deep_clone()
    }

    /// Whether a whole text is an answer; of a grammar that was compiled for bytes.
    pub fn accepts(&self, text: &str) -> bool {
        let mut matcher = self.matcher();
        text.bytes().all(|byte| matcher.try_consume_tokens(&[byte.into()]).is_ok_and(|taken| taken == 1))
            && matcher.is_accepting().unwrap_or(false)
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Grammar")
    }
}

impl PartialEq for Grammar {
    /// The same compilation.
    fn eq(&self, other: &Grammar) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Compiles grammars for one vocabulary.
pub struct Compiler {
    factory: ParserFactory,
    late: AtomicUsize,
    /// What was compiled, by the sum of what was wanted; the last wanted is at the end.
    kept: Mutex<VecDeque<([u8; 32], Grammar)>>,
}

impl fmt::Debug for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Compiler")
    }
}

impl Compiler {
    /// For a model of `vocabulary` ids, of which `eos` end a text.
    ///
    /// # Errors
    /// The vocabulary is none that the library takes.
    pub fn new(tokenizer: &Tokenizer, vocabulary: usize, eos: &[u32]) -> Result<Compiler, String> {
        Compiler::of_words((0..vocabulary as u32).map(|id| word(tokenizer, id)).collect(), eos)
    }

    /// For a vocabulary of the 256 bytes.
    ///
    /// # Errors
    /// As above; it is one that the library takes.
    pub fn of_bytes() -> Result<Compiler, String> {
        Compiler::of_words((0..=u8::MAX).map(|byte| vec![byte]).collect(), &[])
    }

    fn of_words(mut words: Vec<Vec<u8>>, eos: &[u32]) -> Result<Compiler, String> {
        // Where nothing ends a text, a token that no model has stands for the end.
        let eos = if eos.is_empty() { &[words.len() as u32][..] } else { eos };
        words.push(b"\xFF<|end|>".to_vec());
        let info = TokRxInfo::new(words.len() as u32, eos[0]);
        let trie = TokTrie::from(&info, &words).with_eos_tokens(eos);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
            .map_err(|e| format!("the vocabulary cannot be used for grammars: {e}"))?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.max_lexer_states = 50_000;
        limits.max_grammar_size = 200_000;
        limits.verbose_errors = false;
        Ok(Compiler { factory, late: AtomicUsize::new(0), kept: Mutex::default() })
    }

    /// Compiles what is wanted, on a thread of its own, in bounded time; what was compiled lately is found again.
    ///
    /// # Errors
    /// What is wanted is wrong or takes too long, or others take too long.
    pub fn compile(self: &Arc<Compiler>, wanted: Wanted) -> Result<Grammar, CompileError> {
        let sum = wanted.sum();
        if let Some(known) = self.known(&sum) {
            return Ok(known);
        }
        let compiler = self.clone();
        let made = self.bounded(PATIENCE, move || compiler.build(wanted.grammar()?))?;
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == MOST_KEPT {
            kept.pop_front();
        }
        kept.push_back((sum, made.clone()));
        Ok(made)
    }

    /// What was compiled of a wish with this sum.
    fn known(&self, sum: &[u8; 32]) -> Option<Grammar> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let at = kept.iter().position(|(known, _)| known == sum)?;
        let found = kept.remove(at)?;
        let grammar = found.1.clone();
        kept.push_back(found);
        Some(grammar)
    }

    /// Does work on a thread of its own and waits so long for it. Work that goes on for longer counts as late until it ends, by a
    /// panic too.
    fn bounded<T: Send + 'static>(
        self: &Arc<Compiler>,
        patience: Duration,
        work: impl FnOnce() -> Result<T, String> + Send + 'static,
    ) -> Result<T, CompileError> {
        if self.late.load(Ordering::Acquire) >= MOST_LATE {
            return Err(CompileError::Busy("other grammars take long to compile".into()));
        }
        let (send, receive) = channel();
        let (compiler, place) = (self.clone(), Arc::new(AtomicU8::new(RUNNING)));
        let ours = place.clone();
        let work = move || {
            let failed =
                |said: String| format!("the grammar library fails on it: {}", crate::files::line(&said));
            let made = guarded(work).map_err(failed).and_then(|made| made);
            // Nobody may wait any more.
            let _ = send.send(made);
            if ours.swap(DONE, Ordering::AcqRel) == LATE {
                compiler.late.fetch_sub(1, Ordering::AcqRel);
            }
        };
        let started = Builder::new().name("grammar".into()).stack_size(STACK).spawn(work);
        started.map_err(|e| CompileError::Busy(format!("there is no thread to compile it: {e}")))?;
        match receive.recv_timeout(patience) {
            Ok(made) => made.map_err(CompileError::Wrong),
            Err(RecvTimeoutError::Disconnected) => Err(CompileError::Wrong("cannot be compiled".into())),
            Err(RecvTimeoutError::Timeout) => {
                self.late.fetch_add(1, Ordering::AcqRel);
                if place.compare_exchange(RUNNING, LATE, Ordering::AcqRel, Ordering::Acquire).is_err() {
                    self.late.fetch_sub(1, Ordering::AcqRel);
                }
                let seconds = patience.as_secs();
                Err(CompileError::Wrong(format!("takes longer than {seconds} s to compile; make it simpler")))
            }
        }
    }

    fn build(&self, grammar: TopLevelGrammar) -> Result<Grammar, String> {
        let plain = |e: String| {
            match &e {
            e if e.contains("NoExtensionBias") => "matches no text".into(),
            e if e.contains("coerce_one_of") => "oneOf: several of its schemas may fit the same value; tell them apart by a constant, or use anyOf".into(),
            e => crate::files::line(e),
        }
        };
        let mut matcher = Matcher::new(self.factory.create_parser(grammar));
        if let Some(wrong) = matcher.get_error() {
            return Err(plain(wrong));
        }
        // The first mask shows whether there is an answer at all, and is the most costly.
        let mask = matcher.compute_mask_or_eos().map_err(|e| plain(e.to_string()))?;
        if mask.is_zero() && !matcher.is_stopped() {
            return Err("no text of this model's tokens can begin an answer".into());
        }
        Ok(Grammar(Arc::new(Mutex::new(matcher))))
    }
}

/// Bytes by which the library knows a token: special ones are marked, so that no text is taken for them.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let mut bytes = tokenizer.bytes(id);
    if tokenizer.is_special(id) {
        bytes.insert(0, TokTrie::SPECIAL_TOKEN_MARKER);
    }
    bytes
}
