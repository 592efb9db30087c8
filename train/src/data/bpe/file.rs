//! The files of a trained tokenizer, in the layout of Hugging Face tokenizers and transformers.

use super::super::DataError;
use super::super::meta::write_whole;
use super::BpeOptions;
use super::merge::Merged;
use astrai_serve::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};
use std::path::Path;

/// A trained byte-level BPE.
#[derive(Clone, Debug, PartialEq)]
pub struct Bpe {
    vocabulary: usize,
    model: Value,
    config: Value,
}

impl Bpe {
    pub(super) fn new(options: &BpeOptions, merged: Merged) -> Bpe {
        let Merged { tokens, merges } = merged;
        let special: Vec<&str> = options.all_special().collect();
        let spelt: Vec<String> =
            tokens.iter().map(|token| token.iter().map(|&byte| byte_to_char(byte)).collect()).collect();
        let all = special.iter().copied().chain(spelt.iter().map(String::as_str));
        let vocabulary: Map<String, Value> =
            all.enumerate().map(|(id, t)| (t.to_owned(), json!(id))).collect();
        let part = |id: u32| spelt[id as usize - special.len()].as_str();
        let merges: Vec<[&str; 2]> = merges.iter().map(|&(a, b)| [part(a), part(b)]).collect();
        let added = special.iter().enumerate().map(|(id, token)| {
            json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        });
        let byte_level = |prefix: bool, trim: bool| json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": trim, "use_regex": true});
        let model = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Vec<_>>(),
            "normalizer": null, "pre_tokenizer": byte_level(false, true), "post_processor": byte_level(true, false),
            "decoder": byte_level(true, true),
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                "vocab": vocabulary, "merges": merges}});
        let config = json!({
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": options.eos, "pad_token": options.pad,
            "clean_up_tokenization_spaces": false, "model_max_length": 1_000_000_000_000_000_000_u64});
        Bpe { vocabulary: special.len() + spelt.len(), model, config }
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
        for (name, value) in [("tokenizer_config.json", &self.config), ("tokenizer.json", &self.model)] {
            write_whole(&dir.join(name), format!("{value:#}\n").as_bytes())?;
        }
        Ok(Tokenizer::open(dir)?)
    }
}

/// The character that stands for a byte in a byte-level vocabulary (GPT-2's `bytes_to_unicode`): printable ones stand for
/// themselves, the others for U+0100 and on, in order.
pub(super) fn byte_to_char(byte: u8) -> char {
    let shifted = match byte {
        0x00..=0x20 => u32::from(byte),
        0x7f..=0xa0 => u32::from(byte) - 0x7f + 33,
        0xad => 67,
        _ => return char::from(byte),
    };
    char::from_u32(256 + shifted).unwrap_or(char::REPLACEMENT_CHARACTER)
}
