//! The bytes of tokens, and where the tokens of a text lie in it. A token may be a part of a character; its bytes are told where its
//! text cannot be.

use super::byte_level::byte;
use super::{Tokenizer, TokenizerError, check};
use std::ops::Range;

/// A text that shows what a tokenizer does to spaces.
const PLAIN: &str = "Hello world";

/// The bytes of every id, one after another.
pub(super) struct Pieces {
    bytes: Vec<u8>,
    /// Where each id's begin; one more than there are ids.
    begins: Vec<u32>,
}

impl Tokenizer {
    /// Ids of `text` with the bytes of it that each stands for. Special tokens written in it are recognised, none is added. A token
    /// of half a character stands for all of it.
    ///
    /// # Errors
    /// The text holds what the vocabulary cannot express.
    pub fn encode_spans(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>, TokenizerError> {
        // The library's own spans cost a third of its time, and byte-level tokens tell them by their bytes.
        if let Some(pieces) = self.shared.pieces.get_or_init(|| self.pieces()) {
            let ids = self.encode(text, false)?;
            if let Some(spans) = pieces.covering(&ids, text) {
                return Ok(spans);
            }
        }
        self.library_spans(text)
    }

    /// The same as the library tells it.
    fn library_spans(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>, TokenizerError> {
        let library = &self.shared.library;
        let encode = || {
            check::fits(library.get_normalizer(), self.shared.growth, text)?;
            let encoding = library.encode(text, false).map_err(|e| e.to_string())?;
            let spans = encoding.get_offsets().iter().map(|&(begin, end)| begin..end);
            Ok(encoding.get_ids().iter().copied().zip(spans).collect())
        };
        let done = check::guarded(encode).and_then(|done| done);
        done.map_err(|e| self.error("cannot encode this text", &e))
    }

    /// The bytes of all ids; none where a plain text shows that the spans are others: a space is put before it, or spaces are trimmed.
    fn pieces(&self) -> Option<Pieces> {
        let plain = self.shared.byte_level.then(|| self.library_spans(PLAIN).ok()).flatten()?;
        let mut pieces = Pieces { bytes: vec![], begins: vec![0] };
        for id in 0..self.shared.vocabulary as u32 {
            pieces.bytes.extend(self.bytes(id));
            pieces.begins.push(pieces.bytes.len() as u32);
        }
        let ids: Vec<u32> = plain.iter().map(|(id, _)| *id).collect();
        (pieces.covering(&ids, PLAIN)? == plain).then_some(pieces)
    }

    /// Bytes that an id stands for in the middle of a text; none for an id that the vocabulary does not have.
    pub fn bytes(&self, id: u32) -> Vec<u8> {
        let Some(token) = self.token(id) else { return Vec::new() };
        if self.shared.library.get_added_vocabulary().simple_id_to_token(id).is_some() {
            return token.into_bytes();
        }
        if self.shared.byte_level {
            return token.chars().flat_map(char_bytes).collect();
        }
        let byte = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
        match byte.filter(|b| b.len() == 2).and_then(|b| u8::from_str_radix(b, 16).ok()) {
            Some(byte) => vec![byte],
            None => token.replace('\u{2581}', " ").into_bytes(),
        }
    }
}

/// What a character of a byte-level vocabulary stands for; one that is none of it is spelt as it is.
fn char_bytes(c: char) -> Vec<u8> {
    byte(c).map_or_else(|| c.to_string().into_bytes(), |b| vec![b])
}

impl Pieces {
    fn of(&self, id: u32) -> Option<&[u8]> {
        let (begin, end) = (self.begins.get(id as usize)?, self.begins.get(id as usize + 1)?);
        self.bytes.get(*begin as usize..*end as usize)
    }

    /// The spans of `ids`, if their bytes one after another are the text: neither normalised nor stripped.
    fn covering(&self, ids: &[u32], text: &str) -> Option<Vec<(u32, Range<usize>)>> {
        let mut rest = text.as_bytes();
        let mut spans = Vec::with_capacity(ids.len());
        for &id in ids {
            let begin = text.len() - rest.len();
            rest = rest.strip_prefix(self.of(id)?)?;
            let end = text.len() - rest.len();
            let whole = |at: &usize| text.is_char_boundary(*at);
            let (begin, end) = ((0..=begin).rev().find(whole)?, (end..=text.len()).find(whole)?);
            spans.push((id, begin..end));
        }
        rest.is_empty().then_some(spans)
    }
}
