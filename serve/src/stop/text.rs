//! From ids to shown text. In: ids of an answer, one by one. Out: whole characters up to the first stop string: the decoder's
//! stream and the stop strings in a row, so that each holds back what only it can judge.

use super::{Shown, StopMatcher, StopStrings};
use crate::tokenizer::{DecodeStream, Skip, Tokenizer, TokenizerError};

/// Text of one answer, as its ids come.
#[derive(Clone, Debug)]
pub struct TextStream {
    decode: DecodeStream,
    matcher: StopMatcher,
    /// Tokens to come whose text no stop string ends.
    free: usize,
}

impl TextStream {
    /// Begins an answer; special tokens are left out as `skip` says.
    pub fn new(tokenizer: &Tokenizer, skip: impl Into<Skip>, stops: &StopStrings) -> TextStream {
        TextStream { decode: tokenizer.stream(skip), matcher: stops.matcher(), free: stops.after }
    }

    /// Takes the next id; gives what may be shown by now. After a stop nothing is taken.
    ///
    /// # Errors
    /// The tokenizer's decoder refuses the token; the stream is then as before.
    pub fn push(&mut self, id: u32) -> Result<Shown, TokenizerError> {
        if self.matcher.stopped().is_some() {
            return Ok(self.matcher.push(""));
        }
        let piece = self.decode.push(id)?;
        if self.free > 0 {
            self.free -= 1;
            return Ok(Shown { text: piece, stopped: None });
        }
        Ok(self.matcher.push(&piece))
    }

    /// Ends the answer: all that was held back, unless it completes a stop string.
    ///
    /// # Errors
    /// The tokenizer's decoder refuses the tokens.
    pub fn finish(mut self) -> Result<Shown, TokenizerError> {
        let mut shown = self.matcher.push(&self.decode.finish()?);
        let rest = self.matcher.finish();
        shown.text.push_str(&rest.text);
        Ok(shown)
    }
}
