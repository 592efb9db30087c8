//! The bytes of one token. A token may be a part of a character; its bytes are told where its text cannot be.

use super::Tokenizer;
use super::byte_level::byte;

impl Tokenizer {
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
