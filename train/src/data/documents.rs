//! Reading text. In: files that start like text. Out: their documents in pieces of bounded size, so that neither a long file
//! nor a long document is ever held whole.

use super::DataError;
use super::text::{Kind, Source};
use serde::Deserialize;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// Bytes of a piece. Large enough that cuts do not matter to tokens, small enough to hold many.
const PIECE: usize = 1 << 17;

/// Bytes of the longest line of JSON that is read.
pub(crate) const LINE: u64 = 1 << 28;

/// Part of a document, most often all of it; never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The text.
    pub text: String,
    /// Whether the document ends here.
    pub last: bool,
    /// Bytes of the corpus read so far, for progress.
    pub read: u64,
}

/// The documents of a corpus, piece by piece. After an error there is nothing more.
#[derive(Debug)]
pub struct Documents<'a> {
    files: &'a [Source],
    /// Bytes of the files that are done.
    before: u64,
    open: Option<Reading<'a>>,
}

#[derive(Debug)]
struct Reading<'a> {
    source: &'a Source,
    file: BufReader<File>,
    /// Bytes read of this file.
    read: u64,
    lines: u64,
    /// Of a text file: bytes read and not given out.
    bytes: Vec<u8>,
    /// Of JSON lines: the document at hand, and how much of it is given out.
    text: String,
    given: usize,
}

/// A line of JSON; other keys are of no concern.
#[derive(Deserialize)]
struct Line {
    text: String,
}

impl<'a> Documents<'a> {
    pub(super) fn new(files: &'a [Source]) -> Documents<'a> {
        Documents { files, before: 0, open: None }
    }

    fn advance(&mut self) -> Result<Option<Piece>, DataError> {
        loop {
            if let Some(open) = &mut self.open {
                let piece = match open.source.kind {
                    Kind::Text => open.text_piece()?,
                    Kind::JsonLines => open.line_piece()?,
                };
                if let Some((text, last)) = piece {
                    return Ok(Some(Piece { text, last, read: self.before + open.read }));
                }
                self.before += open.read;
                self.open = None;
            }
            let Some((next, rest)) = self.files.split_first() else { return Ok(None) };
            self.files = rest;
            self.open = Some(Reading::open(next)?);
        }
    }
}

impl Iterator for Documents<'_> {
    type Item = Result<Piece, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.advance();
        if next.is_err() {
            (self.files, self.open) = (&[], None);
        }
        next.transpose()
    }
}

impl<'a> Reading<'a> {
    fn open(source: &'a Source) -> Result<Reading<'a>, DataError> {
        let (file, _) = astrai_files::open(&source.path)?;
        let file = BufReader::with_capacity(PIECE, file);
        let text = String::new();
        Ok(Reading { source, file, read: 0, lines: 0, bytes: Vec::new(), text, given: 0 })
    }

    /// The next piece of a file that is one document.
    fn text_piece(&mut self) -> Result<Option<(String, bool)>, DataError> {
        let path = &self.source.path;
        // One byte more than a piece tells whether there is more.
        let want = (PIECE + 1).saturating_sub(self.bytes.len()) as u64;
        let got = (&mut self.file).take(want).read_to_end(&mut self.bytes);
        let got = got.map_err(DataError::io(path, "read on"))?;
        let start = self.read - (self.bytes.len() - got) as u64;
        self.read += got as u64;
        let ended = (got as u64) < want;
        if start == 0 && self.bytes.starts_with("\u{feff}".as_bytes()) {
            self.bytes.drain(..3);
        }
        let text = match std::str::from_utf8(&self.bytes) {
            Ok(text) => text,
            Err(e) if e.error_len().is_none() && !ended => {
                std::str::from_utf8(&self.bytes[..e.valid_up_to()]).unwrap_or("")
            }
            Err(e) => {
                let at = self.read - self.bytes.len() as u64 + e.valid_up_to() as u64;
                let message =
                    format!("is not UTF-8 at byte {at}; convert it (iconv) or move it out of the data");
                return Err(DataError::refused(path, message));
            }
        };
        // Something is left for the next piece, so that the last one can say that it is.
        let end = if ended { text.len() } else { cut(&text[..boundary(text, text.len() - 1)]) };
        let piece = text[..end].to_owned();
        self.bytes.drain(..end);
        Ok((!piece.is_empty()).then_some((piece, ended)))
    }

    /// The next piece of a document on a line of its own.
    fn line_piece(&mut self) -> Result<Option<(String, bool)>, DataError> {
        while self.given == self.text.len() {
            if !self.next_line()? {
                return Ok(None);
            }
        }
        let rest = &self.text[self.given..];
        let end = if rest.len() <= PIECE { rest.len() } else { cut(&rest[..boundary(rest, PIECE)]) };
        let piece = rest[..end].to_owned();
        self.given += end;
        Ok(Some((piece, self.given == self.text.len())))
    }

    /// Reads the next line's document; false at the end of the file.
    fn next_line(&mut self) -> Result<bool, DataError> {
        let path = &self.source.path;
        (self.given, self.text) = (0, String::new());
        self.bytes.clear();
        let got = (&mut self.file).take(LINE + 1).read_until(b'\n', &mut self.bytes);
        let got = got.map_err(DataError::io(path, "read on"))? as u64;
        self.read += got;
        self.lines += 1;
        let refused = |why: &str| {
            let message =
                format!("line {} {why}; each line must be a JSON object with a string `text`", self.lines);
            DataError::refused(path, message)
        };
        if got > LINE {
            return Err(refused("is longer than 256 MiB"));
        }
        let first = if self.lines == 1 { self.bytes.strip_prefix("\u{feff}".as_bytes()) } else { None };
        let line = first.unwrap_or(&self.bytes).trim_ascii();
        if !line.is_empty() {
            let line: Line =
                serde_json::from_slice(line).map_err(|e| refused(&format!("is of no use ({e})")))?;
            self.text = line.text;
        }
        Ok(got > 0)
    }
}

/// The last start of a character at or before `at`.
fn boundary(text: &str, at: usize) -> usize {
    (0..=at).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

/// Where to end a piece of a text that goes on: before a line's end that follows a letter or digit, where every common
/// pre-tokenizer cuts as well; else before white space; else at the end. Not before half of the text.
fn cut(text: &str) -> usize {
    let half = text.len() / 2;
    let after = |fits: fn(char) -> bool, before: fn(char) -> bool| {
        let ends = text.char_indices().rev().take_while(|(at, _)| *at > half).filter(|(_, c)| fits(*c));
        ends.map(|(at, _)| at).find(|&at| text[..at].chars().next_back().is_some_and(before))
    };
    let line = after(|c| c == '\n', char::is_alphanumeric);
    line.or_else(|| after(char::is_whitespace, |c| !c.is_whitespace())).unwrap_or(text.len())
}

/// The next line of a file, with its end; none at the end.
///
/// # Errors
/// It cannot be read, or is longer than [`LINE`].
pub(crate) fn next_line(
    reader: &mut impl BufRead,
    path: &Path,
    number: u64,
) -> Result<Option<Vec<u8>>, DataError> {
    let mut line = Vec::new();
    let got = reader.take(LINE + 1).read_until(b'\n', &mut line);
    match got.map_err(DataError::io(path, "read on"))? as u64 {
        0 => Ok(None),
        n if n > LINE => {
            Err(DataError::refused(path, format!("line {number} is longer than 256 MiB; split it")))
        }
        _ => Ok(Some(line)),
    }
}
