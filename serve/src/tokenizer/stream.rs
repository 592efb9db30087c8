//! Ids in, one at a time; text out as soon as it is sure. A token may end inside a character: what could still become
//! another character is held back, so that whoever reads the stream never sees a half. The pieces joined are what decoding
//! all ids at once gives: always with a byte-level decoder, and wherever bytes form characters with one that falls back to
//! bytes (it spoils valid neighbours of a broken byte, which a stream has shown by then).

use super::{Tokenizer, TokenizerError};

/// What stands for bytes that form no character, or no character yet.
const BROKEN: char = '\u{fffd}';

/// Tokens kept as context: a decoder may treat the first token of a text differently, and a character of four bytes may
/// have come from as many tokens.
const CONTEXT: usize = 4;

/// Tokens after which a run of broken bytes is no character in the making.
const PATIENCE: usize = 8;

/// Decodes a stream of ids.
#[derive(Clone, Debug)]
pub struct DecodeStream {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// Context, then what is not shown whole.
    ids: Vec<u32>,
    /// Of `ids`, those of which some text is not shown yet.
    fresh: usize,
    /// Text of `ids` that is shown.
    shown: String,
}

impl DecodeStream {
    pub(super) fn new(tokenizer: Tokenizer, skip_special: bool) -> DecodeStream {
        DecodeStream { tokenizer, skip_special, ids: Vec::new(), fresh: 0, shown: String::new() }
    }

    /// Takes the next id; gives the text that is sure by now, often all of it, sometimes none.
    ///
    /// # Errors
    /// The tokenizer's decoder refuses the token; the stream is then as before.
    pub fn push(&mut self, id: u32) -> Result<String, TokenizerError> {
        if self.tokenizer.token(id).is_none() || (self.skip_special && self.tokenizer.is_special(id)) {
            return Ok(String::new());
        }
        self.ids.push(id);
        self.fresh += 1;
        let text = self.tokenizer.decode(&self.ids, false).inspect_err(|_| {
            self.ids.pop();
            self.fresh -= 1;
        })?;
        let held = self.held(&text);
        let Some(new) = text[..text.len() - held].strip_prefix(self.shown.as_str()).map(str::to_owned) else {
            return self.restart(held == 0);
        };
        self.forget(held == 0)?;
        Ok(new)
    }

    /// Ends the stream: what was held back, as whole decoding would show it.
    ///
    /// # Errors
    /// The tokenizer's decoder refuses the tokens.
    pub fn finish(self) -> Result<String, TokenizerError> {
        let text = self.tokenizer.decode(&self.ids, false)?;
        match text.strip_prefix(self.shown.as_str()) {
            Some(rest) => Ok(rest.to_owned()),
            None => self.tokenizer.decode(&self.ids[self.ids.len() - self.fresh..], false),
        }
    }

    /// Bytes at the end of `text` that may still turn into another character. Byte-level decoders show an unfinished character
    /// as exactly one U+FFFD; those with byte fallback spoil the whole run of bytes until it is complete.
    fn held(&self, text: &str) -> usize {
        if self.tokenizer.shared.byte_level {
            return if text.ends_with(BROKEN) { BROKEN.len_utf8() } else { 0 };
        }
        if self.fresh >= PATIENCE { 0 } else { text.len() - text.trim_end_matches(BROKEN).len() }
    }

    /// What is shown already reads differently now: wait while a character may be in the making, then go on without context.
    fn restart(&mut self, sure: bool) -> Result<String, TokenizerError> {
        if !sure {
            return Ok(String::new());
        }
        let new = self.tokenizer.decode(&self.ids[self.ids.len() - self.fresh..], false)?;
        self.forget(true)?;
        Ok(new)
    }

    /// Drops what no longer matters, so that a long stream costs no more per token than a short one. Bytes that fall back are
    /// only cut where text was shown whole, or a character would lose its first half.
    fn forget(&mut self, whole: bool) -> Result<(), TokenizerError> {
        let old = match (self.tokenizer.shared.byte_level, whole) {
            (true, _) => self.ids.len().saturating_sub(CONTEXT),
            (false, true) => self.ids.len() - self.fresh,
            (false, false) => 0,
        };
        self.ids.drain(..old);
        self.fresh = if whole { 0 } else { self.fresh.min(self.ids.len()) };
        let text = self.tokenizer.decode(&self.ids, false)?;
        let held = if whole { 0 } else { self.held(&text) };
        self.shown = text[..text.len() - held].to_owned();
        Ok(())
    }
}
