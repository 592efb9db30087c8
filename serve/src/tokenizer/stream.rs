//! Ids in, one at a time; text out as soon as it is sure. A token may end inside a character: what could still become
//! another character is held back, so that whoever reads the stream never sees a half. The pieces joined are what decoding
//! all ids at once gives: always with a byte-level decoder, and wherever bytes form characters with one that falls back to
//! bytes (it spoils valid neighbours of a broken byte, which a stream has shown by then).

use super::byte_level::ByteDecoder;
use super::{Skip, Tokenizer, TokenizerError};

/// What stands for bytes that form no character, or no character yet.
const BROKEN: char = '\u{fffd}';

/// Tokens decoded at once, at most, unless they are one unfinished character: a decoder may treat the first token of a text
/// differently, so that some must go before.
const WINDOW: usize = 8;

/// Tokens after which a run of broken bytes is no character in the making.
const PATIENCE: usize = 8;

/// Decodes a stream of ids.
#[derive(Clone, Debug)]
pub struct DecodeStream {
    tokenizer: Tokenizer,
    skip: Skip,
    decoding: Decoding,
}

#[derive(Clone, Debug)]
enum Decoding {
    /// Each token's bytes are known without its neighbours.
    Bytes(ByteDecoder),
    /// Tokens are decoded with some that were before.
    Window(Window),
}

#[derive(Clone, Debug, Default)]
struct Window {
    /// Context, then what is not shown whole.
    ids: Vec<u32>,
    /// Of `ids`, those of which some text is not shown yet.
    fresh: usize,
    /// Text of `ids` that is shown.
    shown: String,
}

impl DecodeStream {
    pub(super) fn new(tokenizer: Tokenizer, skip: Skip) -> DecodeStream {
        let decoding = match tokenizer.shared.byte_level {
            true => Decoding::Bytes(ByteDecoder::default()),
            false => Decoding::Window(Window::default()),
        };
        DecodeStream { tokenizer, skip, decoding }
    }

    /// Takes the next id; gives the text that is sure by now, often all of it, sometimes none.
    ///
    /// # Errors
    /// The tokenizer's decoder refuses the token; the stream is then as before.
    pub fn push(&mut self, id: u32) -> Result<String, TokenizerError> {
        let Some(token) = self.tokenizer.token_text(id, &self.skip) else {
            return Ok(String::new());
        };
        match &mut self.decoding {
            Decoding::Bytes(bytes) => Ok(bytes.push(&token)),
            Decoding::Window(window) => window.push(&self.tokenizer, id),
        }
    }

    /// Ends the stream: what was held back, as whole decoding would show it.
    ///
    /// # Errors
    /// The tokenizer's decoder refuses the tokens.
    pub fn finish(self) -> Result<String, TokenizerError> {
        match self.decoding {
            Decoding::Bytes(bytes) => Ok(bytes.finish()),
            Decoding::Window(window) => window.finish(&self.tokenizer),
        }
    }
}

impl Window {
    fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String, TokenizerError> {
        self.ids.push(id);
        let text = tokenizer.decode(&self.ids, false).inspect_err(|_| {
            self.ids.pop();
        })?;
        self.fresh += 1;
        // Decoders with byte fallback spoil a whole run of bytes until it is complete.
        let broken = text.len() - text.trim_end_matches(BROKEN).len();
        let held = if self.fresh >= PATIENCE { 0 } else { broken };
        let new = text[..text.len() - held].strip_prefix(self.shown.as_str()).map(str::to_owned);
        match new {
            // What is shown already reads differently now: wait while a character may be in the making, then go on without
            // context.
            None if held > 0 => return Ok(String::new()),
            None => {
                let new = tokenizer.decode(&self.ids[self.ids.len() - self.fresh..], false)?;
                self.forget(tokenizer)?;
                return Ok(new);
            }
            Some(_) if held == 0 && self.ids.len() >= WINDOW => self.forget(tokenizer)?,
            Some(_) => {
                self.fresh = if held == 0 { 0 } else { self.fresh };
                self.shown.clear();
                self.shown.push_str(&text[..text.len() - held]);
            }
        }
        Ok(new.unwrap_or_default())
    }

    /// Keeps only the tokens that were shown last, so that a long stream costs no more per token than a short one. Only done
    /// where text was shown whole, or a character would lose its first half.
    fn forget(&mut self, tokenizer: &Tokenizer) -> Result<(), TokenizerError> {
        self.ids.drain(..self.ids.len() - self.fresh);
        self.fresh = 0;
        self.shown = tokenizer.decode(&self.ids, false)?;
        Ok(())
    }

    fn finish(self, tokenizer: &Tokenizer) -> Result<String, TokenizerError> {
        let text = tokenizer.decode(&self.ids, false)?;
        match text.strip_prefix(self.shown.as_str()) {
            Some(rest) => Ok(rest.to_owned()),
            None => tokenizer.decode(&self.ids[self.ids.len() - self.fresh..], false),
        }
    }
}
