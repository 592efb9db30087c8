//! Training a tokenizer: byte-level byte-pair encoding (Sennrich et al. 2016; Radford et al. 2019). In: text. Out:
//! `tokenizer.json` and `tokenizer_config.json` as transformers reads them. Text is split into words
//! here, as GPT-2 does; the `tokenizers` crate counts them and makes tokens of the most frequent pairs; of equally frequent pairs
//! the one with the smaller ids comes first, so that equal text gives equal files. Beside the splitting stands here what that
//! crate leaves open: bounds on words and text, special tokens that are never learnt, and errors.

#[cfg(test)]
mod tests;

use super::{DataError, Piece};
use astrai_files::{System, replace};
use astrai_serve::tokenizer::Tokenizer;
use fancy_regex::Regex;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::mpsc::sync_channel;
use std::thread;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer as Library, Trainer};

/// How GPT-2 splits text into words; the `ByteLevel` pre-tokenizer of `tokenizer.json` does the same, and is slower.
const PATTERN: &str = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Bytes of the longest word that is counted whole; a longer one (a picture in base64, say) counts as several.
const WORD: usize = 1024;

/// Bytes of the longest token.
const LONGEST: usize = 128;

/// Bytes of text that words are counted of, from the beginning: the library counts in i32, and more text teaches little.
const MOST: u64 = i32::MAX as u64;

/// Pieces that are read ahead of counting.
const AHEAD: usize = 16;

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

/// A trained byte-level BPE.
#[derive(Clone, Debug, PartialEq)]
pub struct Bpe {
    vocabulary: usize,
    model: String,
    config: Value,
}

impl Bpe {
    /// Trains on the words of `pieces`, at most 2 GiB of them, on all cores. `progress` is told bytes read of `total`, the bytes of the corpus, then
    /// that tokens are made of those wanted.
    ///
    /// # Errors
    /// The options contradict themselves, a piece cannot be read, or there is no text.
    pub fn train(
        options: &BpeOptions,
        pieces: impl IntoIterator<Item = Result<Piece, DataError>>,
        total: u64,
        progress: &mut dyn FnMut(&'static str, u64, u64),
    ) -> Result<Bpe, DataError> {
        Bpe::train_on(options, pieces, MOST, total, progress)
    }

    /// The same on so many bytes of the pieces at most.
    fn train_on(
        options: &BpeOptions,
        pieces: impl IntoIterator<Item = Result<Piece, DataError>>,
        most: u64,
        total: u64,
        progress: &mut dyn FnMut(&'static str, u64, u64),
    ) -> Result<Bpe, DataError> {
        options.check()?;
        let failed = |e: tokenizers::Error| DataError::Options(format!("a tokenizer cannot be trained: {e}"));
        let special: Vec<AddedToken> = options.all_special().map(|t| AddedToken::from(t, true)).collect();
        let mut trainer = BpeTrainer::builder()
            .vocab_size(options.vocabulary)
            .min_frequency(options.min_frequency)
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .special_tokens(special.clone())
            // The crate wants tokens shorter than this.
            .max_token_length(Some(LONGEST + 1))
            .show_progress(false)
            .build();
        let words = Words::new(options).map_err(|e| failed(e.into()))?;
        let (send, receive) = sync_channel(AHEAD);
        let mut bytes = 0;
        let (read, counted) = thread::scope(|scope| {
            let counting = scope.spawn(|| trainer.feed(receive.into_iter(), |text| words.of(text)));
            let mut some = pieces.into_iter().map_while(|piece: Result<Piece, DataError>| {
                bytes += piece.as_ref().map_or(0, |p| p.text.len() as u64);
                (bytes <= most).then_some(piece)
            });
            let read: Result<(), DataError> = some.try_for_each(|piece| {
                let Piece { text, read, .. } = piece?;
                progress("counting words", read, total);
                // Nobody listens only after an error, which is reported below.
                let _ = send.send(text);
                Ok(())
            });
            drop(send);
            (read, counting.join())
        });
        read?;
        counted
            .unwrap_or_else(|_| Err("counting words stopped unexpectedly; report this".into()))
            .map_err(failed)?;
        if bytes == 0 {
            let message = "there is no text to train a tokenizer on; name files with text";
            return Err(DataError::Options(message.into()));
        }
        let mut model = BPE::default();
        let wanted = options.vocabulary as u64;
        progress("training the tokenizer", 0, wanted);
        trainer.train(&mut model).map_err(failed)?;
        progress("training the tokenizer", wanted, wanted);
        let mut library = Library::new(model);
        library
            .with_pre_tokenizer(Some(ByteLevel::new(false, true, true)))
            .with_post_processor(Some(ByteLevel::new(true, false, true)))
            .with_decoder(Some(ByteLevel::new(true, true, true)))
            .add_special_tokens(special)
            .map_err(failed)?;
        let config = json!({
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": options.eos, "pad_token": options.pad,
            "clean_up_tokenization_spaces": false, "model_max_length": 1_000_000_000_000_000_000_u64});
        let model = library.to_string(true).map_err(failed)?;
        Ok(Bpe { vocabulary: library.get_vocab_size(true), model, config })
    }

    /// Tokens, special ones included.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Writes `tokenizer.json` and `tokenizer_config.json` into the folder `dir`, which is made where it is absent, and
    /// opens them.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write(&self, dir: &Path) -> Result<Tokenizer, DataError> {
        std::fs::create_dir_all(dir).map_err(DataError::io(dir, "make the folder"))?;
        replace(&System, &dir.join("tokenizer_config.json"), format!("{:#}\n", self.config).as_bytes())?;
        replace(&System, &dir.join("tokenizer.json"), format!("{}\n", self.model).as_bytes())?;
        Ok(Tokenizer::open(dir)?)
    }
}

/// Splits text into words, each byte a character as in GPT-2's vocabulary.
struct Words<'a> {
    pattern: Regex,
    /// Printable bytes stand for themselves, the others for U+0100 and on, in order.
    chars: [char; 256],
    options: &'a BpeOptions,
}

impl Words<'_> {
    fn new(options: &BpeOptions) -> Result<Words<'_>, fancy_regex::Error> {
        let alphabet = ByteLevel::alphabet();
        let mut others = '\u{100}'..;
        let mut of_byte = |byte| if alphabet.contains(&byte) { Some(byte) } else { others.next() };
        let chars = std::array::from_fn(|byte| of_byte(char::from(byte as u8)).unwrap_or_default());
        Ok(Words { pattern: Regex::new(PATTERN)?, chars, options })
    }

    /// The words of `text`. Those that spell a special token are left out, so that it is never learnt.
    fn of(&self, text: &str) -> tokenizers::Result<Vec<String>> {
        let mut words = Vec::new();
        for word in self.pattern.find_iter(text) {
            for part in word?.as_str().as_bytes().chunks(WORD) {
                let part: String = part.iter().map(|&byte| self.chars[usize::from(byte)]).collect();
                if !self.options.all_special().any(|token| part.contains(token)) {
                    words.push(part);
                }
            }
        }
        Ok(words)
    }
}
