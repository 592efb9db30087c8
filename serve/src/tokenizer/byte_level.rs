//! Byte-level vocabularies (GPT-2's): each character of a token stands for a byte. In: tokens of a stream. Out: the text that
//! is sure by now, as decoding the whole at once shows it, for the cost of the new token alone.

/// Characters that are no printable byte themselves begin here, in the order of the bytes they stand for.
const OTHERS: u32 = 0x100;

/// The byte that a character stands for.
pub(super) fn byte(c: char) -> Option<u8> {
    match (c, u32::from(c).wrapping_sub(OTHERS)) {
        ('!'..='~' | '\u{a1}'..='\u{ac}' | '\u{ae}'..='\u{ff}', _) => u8::try_from(c).ok(),
        (_, n @ 0..33) => Some(n as u8),
        (_, n @ 33..67) => Some(n as u8 - 33 + 0x7f),
        (_, 67) => Some(0xad),
        _ => None,
    }
}

/// Decodes tokens; holds the bytes of a character that is not complete.
#[derive(Clone, Debug, Default)]
pub(super) struct ByteDecoder(Vec<u8>);

impl ByteDecoder {
    /// Takes a token; gives all but an unfinished character.
    pub fn push(&mut self, token: &str) -> String {
        let before = self.0.len();
        for c in token.chars() {
            match byte(c) {
                Some(b) => self.0.push(b),
                // An added token is spelt as it is.
                None => {
                    self.0.truncate(before);
                    self.0.extend(token.bytes());
                    break;
                }
            }
        }
        let mut text = String::new();
        let mut done = 0;
        for chunk in self.0.utf8_chunks() {
            let (valid, invalid) = (chunk.valid(), chunk.invalid());
            text.push_str(valid);
            done += valid.len() + invalid.len();
            let last = done == self.0.len();
            if last && !invalid.is_empty() && is_beginning(invalid) {
                done -= invalid.len();
            } else if !invalid.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        self.0.drain(..done);
        text
    }

    /// What is left at the end: a character that never came to its end.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.0).into_owned()
    }
}

/// Whether more bytes could make a character of these.
fn is_beginning(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|e| e.error_len().is_none())
}
