//! Training a tokenizer: byte-level byte-pair encoding (Sennrich et al. 2016; Radford et al. 2019). In: text. Out:
//! `tokenizer.json` and `tokenizer_config.json` as transformers reads them. The text is split into words by the published
//! pattern of GPT-2, the words are counted, and the pair of tokens that is most frequent becomes a token until there are
//! enough; of equally frequent pairs the one with the smaller ids comes first, so that equal text gives equal files.

mod file;
mod merge;
#[cfg(test)]
mod tests;

use super::{DataError, Piece, Progress};
use fancy_regex::Regex;
use std::collections::HashMap;
use std::num::NonZero;
use std::thread;

pub use file::Bpe;

/// How GPT-2 splits text into words; the `ByteLevel` pre-tokenizer of `tokenizer.json` stands for the same.
const PATTERN: &str = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Bytes of the longest word that is counted whole; a longer one (a picture in base64, say) counts as several.
const WORD: usize = 1024;

/// Bytes of text that the threads take at a time.
const BATCH: usize = 1 << 23;

/// What kind of tokenizer to train.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BpeOptions {
    /// Tokens wanted, special ones and the 256 bytes included. Little text gives fewer.
    pub vocabulary: usize,
    /// Ends a document; the first id.
    pub eos: String,
    /// The padding token; the second id.
    pub pad: String,
    /// Further special tokens, those of a chat template say.
    pub special: Vec<String>,
    /// A pair that occurs less often than this is not merged.
    pub min_frequency: u64,
}

impl BpeOptions {
    /// `<|endoftext|>` and `<|pad|>`, and pairs that occur at least twice.
    pub fn new(vocabulary: usize) -> BpeOptions {
        let (eos, pad) = ("<|endoftext|>".into(), "<|pad|>".into());
        BpeOptions { vocabulary, eos, pad, special: Vec::new(), min_frequency: 2 }
    }

    /// All special tokens, in the order of their ids.
    fn all_special(&self) -> impl Iterator<Item = &str> {
        [&self.eos, &self.pad].into_iter().chain(&self.special).map(String::as_str)
    }

    fn check(&self) -> Result<(), DataError> {
        let special: Vec<&str> = self.all_special().collect();
        for (i, token) in special.iter().enumerate() {
            if token.chars().count() < 2 || special[..i].contains(token) {
                let message = format!("special token {token:?} is too short or named twice; choose another");
                return Err(DataError::Options(message));
            }
        }
        let least = 256 + special.len();
        if !(least..=1 << 24).contains(&self.vocabulary) {
            let have = self.vocabulary;
            let message = format!(
                "a vocabulary of {have} is out of reach: 256 bytes and {} special tokens make {least} at least, {} are the most",
                special.len(),
                1 << 24
            );
            return Err(DataError::Options(message));
        }
        Ok(())
    }
}

/// How often each word occurs in a text.
#[derive(Clone, Debug, Default)]
pub struct WordCounts {
    counts: HashMap<Box<[u8]>, u64>,
    bytes: u64,
}

impl WordCounts {
    /// Counts the words of `pieces`, on all cores. `progress` is told bytes read of `total`, the bytes of the corpus.
    ///
    /// # Errors
    /// A piece cannot be read, or there is no text.
    pub fn count(
        pieces: impl IntoIterator<Item = Result<Piece, DataError>>,
        total: u64,
        progress: Progress<'_>,
    ) -> Result<WordCounts, DataError> {
        let pattern =
            Regex::new(PATTERN).map_err(|e| DataError::Options(format!("the pattern of words: {e}")))?;
        let mut threads =
            vec![WordCounts::default(); thread::available_parallelism().map_or(1, NonZero::get)];
        let (mut batch, mut bytes) = (Vec::new(), 0);
        for piece in pieces {
            let piece = piece?;
            bytes += piece.text.len();
            batch.push(piece.text);
            if bytes >= BATCH {
                count_batch(&mut threads, &pattern, &batch)?;
                (bytes, batch) = (0, Vec::new());
                progress(piece.read, total);
            }
        }
        count_batch(&mut threads, &pattern, &batch)?;
        progress(total, total);
        let mut all = WordCounts::default();
        for part in threads {
            all.bytes += part.bytes;
            part.counts.into_iter().for_each(|(word, n)| *all.counts.entry(word).or_default() += n);
        }
        match all.bytes {
            0 => Err(DataError::Options(
                "there is no text to train a tokenizer on; name files with text".into(),
            )),
            _ => Ok(all),
        }
    }

    /// Bytes of text that were counted.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Different words.
    pub fn len(&self) -> usize {
        self.counts.len()
    }

    /// Whether no word was counted.
    pub fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }

    /// Merges pairs until the vocabulary is full. `progress` is told tokens made of those wanted.
    ///
    /// # Errors
    /// The options contradict themselves.
    pub fn train(&self, options: &BpeOptions, progress: Progress<'_>) -> Result<Bpe, DataError> {
        options.check()?;
        let mut words: Vec<(&[u8], u64)> = self.counts.iter().map(|(word, n)| (&**word, *n)).collect();
        words.sort_unstable();
        Ok(Bpe::new(options, merge::Merger::new(&words, options).run(progress)))
    }

    fn add(&mut self, pattern: &Regex, text: &str) -> Result<(), DataError> {
        for word in pattern.find_iter(text) {
            let word =
                word.map_err(|e| DataError::Options(format!("text cannot be split into words: {e}")))?;
            for part in word.as_str().as_bytes().chunks(WORD) {
                match self.counts.get_mut(part) {
                    Some(n) => *n += 1,
                    None => drop(self.counts.insert(part.into(), 1)),
                }
            }
        }
        self.bytes += text.len() as u64;
        Ok(())
    }
}

fn count_batch(threads: &mut [WordCounts], pattern: &Regex, batch: &[String]) -> Result<(), DataError> {
    let share = batch.len().div_ceil(threads.len()).max(1);
    let mut done = Vec::new();
    thread::scope(|scope| {
        let each = threads.iter_mut().zip(batch.chunks(share));
        let run = |(words, texts): (&'_ mut WordCounts, &'_ [String])| {
            texts.iter().try_for_each(|text| words.add(pattern, text))
        };
        let handles: Vec<_> = each.map(|pair| scope.spawn(move || run(pair))).collect();
        done.extend(handles.into_iter().map(|handle| handle.join()));
    });
    done.into_iter().try_for_each(|result| match result {
        Ok(result) => result,
        Err(_) => Err(DataError::Options("counting words stopped unexpectedly; report this".into())),
    })
}
