//! The tokenizer against the reference's ids, and against files and ids that no one should have written.

use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::sync::OnceLock;

fn golden() -> Option<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let places = ["../shared", "../../shared"].map(|p| here.join(p).join("golden/tokenizer"));
    let found = places.into_iter().find(|p| p.is_dir());
    if found.is_none() {
        static SAID: std::sync::Once = std::sync::Once::new();
        SAID.call_once(|| println!("skipped: no shared folder beside this checkout"));
    }
    found
}

fn letters() -> Value {
    let byte_char = |b: u8| match b {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => b as char,
        0x00..=0x20 => char::from_u32(256 + u32::from(b)).unwrap(),
        0x7f..=0xa0 => char::from_u32(256 + 33 + u32::from(b - 0x7f)).unwrap(),
        0xad => char::from_u32(256 + 67).unwrap(),
    };
    let mut vocabulary = serde_json::Map::new();
    (0..=255).for_each(|b| {
        vocabulary.insert(byte_char(b).to_string(), json!(b));
    });
    vocabulary.insert("ab".into(), json!(256));
    Value::Object(vocabulary)
}

/// Every byte a token, `ab` another, and one special token with id 257.
pub(crate) fn byte_level() -> Value {
    json!({"version": "1.0",
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "!"},
        "added_tokens": [{"id": 257, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": letters(), "merges": [["a", "b"]]}})
}

/// A few pieces in the sentencepiece manner; every other byte falls back.
fn fallback() -> Value {
    let mut vocabulary = serde_json::Map::new();
    (0..=255).for_each(|b| {
        vocabulary.insert(format!("<0x{b:02X}>"), json!(b));
    });
    for (i, piece) in ["▁", "a", "b", "é", "▁a"].iter().enumerate() {
        vocabulary.insert(piece.to_string(), json!(256 + i));
    }
    json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocabulary, "merges": [["▁", "a"]]}})
}

fn write(dir: &Path, name: &str, value: &Value) {
    fs::write(dir.join(name), value.to_string()).unwrap();
}

pub(crate) fn open(value: &Value) -> Tokenizer {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "tokenizer.json", value);
    Tokenizer::open(dir.path()).unwrap()
}

/// Both kinds of decoder, made once.
fn kinds() -> &'static (Tokenizer, Tokenizer) {
    static KINDS: OnceLock<(Tokenizer, Tokenizer)> = OnceLock::new();
    KINDS.get_or_init(|| (open(&byte_level()), open(&fallback())))
}

/// Byte-level tokenizers that lay spans otherwise than their tokens' lengths do, behind one that does not.
fn spanned() -> &'static [Tokenizer] {
    static KINDS: OnceLock<Vec<Tokenizer>> = OnceLock::new();
    KINDS.get_or_init(|| {
        let (mut normal, mut trimmed, mut spaced, mut stripped) =
            (byte_level(), byte_level(), byte_level(), byte_level());
        normal["normalizer"] = json!({"type": "NFC"});
        trimmed["post_processor"] = trimmed["pre_tokenizer"].clone();
        spaced["pre_tokenizer"]["add_prefix_space"] = json!(true);
        stripped["added_tokens"][0]["lstrip"] = json!(true);
        [byte_level(), normal, trimmed, spaced, stripped, fallback()].iter().map(open).collect()
    })
}

fn streamed(tokenizer: &Tokenizer, ids: &[u32], skip: bool) -> Vec<String> {
    let mut stream = tokenizer.stream(skip);
    let mut pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    pieces.push(stream.finish().unwrap());
    pieces
}

#[test]
fn ids_and_texts_are_the_references() {
    let Some(folder) = golden() else { return };
    let tokenizer = Tokenizer::open(&folder).unwrap();
    let cases: Value = serde_json::from_slice(&fs::read(folder.join("cases.json")).unwrap()).unwrap();
    let cases = cases["encode"].as_array().unwrap();
    assert!(cases.len() > 5);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        let decoded = case["decoded"].as_str().unwrap();
        assert_eq!(tokenizer.encode(text, false).unwrap(), ids, "{text:?}");
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), decoded);
        assert_eq!(streamed(&tokenizer, &ids, false).concat(), decoded);
        let plain = tokenizer.encode_plain(text).unwrap();
        assert_eq!(tokenizer.decode(&plain, true).unwrap(), text, "plain text survives whatever it spells");
    }
    assert_eq!(tokenizer.vocabulary(), 1024);
    let special = tokenizer.special();
    let id = |t: &Option<SpecialToken>| t.as_ref().map(|t| t.id);
    assert_eq!((id(&special.bos), id(&special.eos), id(&special.pad)), (Some(1), Some(4), Some(0)));
    assert_eq!(special.unk, None);
    let copy = tempfile::tempdir().unwrap();
    let to = copy.path().join("deep/folder");
    tokenizer.save_to(&to).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        assert_eq!(fs::read(to.join(name)).unwrap(), fs::read(folder.join(name)).unwrap());
    }
    assert_eq!(Tokenizer::open(&to.join("tokenizer.json")).unwrap().sha256(), tokenizer.sha256());
    let without = Tokenizer::open(&to).unwrap().without_files();
    assert_eq!((without.sha256(), without.file("tokenizer.json")), (tokenizer.sha256(), None));
    assert!(without.save_to(&to).unwrap_err().to_string().contains("were not kept"));
}

#[test]
fn nothing_is_cut_or_padded_unasked() {
    let (tokenizer, _) = kinds();
    assert_eq!(tokenizer.encode("xyz", true).unwrap().len(), 3);
    assert_eq!(tokenizer.encode("x", true).unwrap().len(), 1);
}

#[test]
fn special_tokens_in_a_text_are_recognised_or_spelt() {
    let (tokenizer, _) = kinds();
    assert_eq!(tokenizer.encode("ab<|end|>", false).unwrap(), [256, 257]);
    assert_eq!(tokenizer.encode_plain("ab<|end|>").unwrap().len(), 8);
    let batch = |recognise| tokenizer.encode_batch(&["ab", "<|end|>"], recognise).unwrap();
    assert_eq!(batch(true), [vec![256], vec![257]]);
    assert_eq!(batch(false)[1].len(), 7);
    assert!(tokenizer.is_special(257) && !tokenizer.is_special(256) && !tokenizer.is_special(9999));
    assert_eq!(tokenizer.decode(&[256, 257, 9999], true).unwrap(), "ab");
    assert_eq!(streamed(tokenizer, &[256, 257, 9999], true).concat(), "ab");
    assert_eq!(streamed(tokenizer, &[256, 257, 9999], false).concat(), "ab<|end|>");
}

/// A BPE that is read from its text is the one that the library reads: merges in both spellings, added tokens in and beside the vocabulary.
#[test]
fn a_tokenizer_is_the_librarys() {
    let (mut spelt, mut beside) = (byte_level(), byte_level());
    spelt["model"]["merges"] = json!(["a b"]);
    spelt["model"]["unk_token"] = json!("\u{e9}\"");
    beside["added_tokens"][0]["content"] = json!("<|other|>");
    beside["added_tokens"][0]["normalized"] = json!(true);
    beside["normalizer"] = json!({"type": "Lowercase"});
    for mut value in [byte_level(), spelt, beside, fallback()] {
        let ours = serde_json::to_value(&open(&value).shared.library).unwrap();
        (value["padding"], value["truncation"]) = (Value::Null, Value::Null);
        let library = Library::from_bytes(value.to_string()).unwrap();
        assert_eq!(ours, serde_json::to_value(&library).unwrap());
        assert_eq!(open(&value).vocabulary(), *library.get_vocab(true).values().max().unwrap() as usize + 1);
    }
}

#[test]
fn parts_come_from_both_files_in_both_spellings() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "tokenizer.json", &byte_level());
    write(
        dir.path(),
        "tokenizer_config.json",
        &json!({"eos_token": {"content": "<|end|>"}, "unk_token": null}),
    );
    write(dir.path(), "special_tokens_map.json", &json!({"bos_token": "ab", "pad_token": "<pad>"}));
    let tokenizer = Tokenizer::open(dir.path()).unwrap();
    let special = tokenizer.special();
    assert_eq!(special.eos.as_ref().unwrap().id, 257);
    assert_eq!(special.bos.as_ref().unwrap().text, "ab");
    assert_eq!((&special.pad, &special.unk), (&None, &None));
    assert_eq!(tokenizer.warnings().len(), 1);
    assert!(tokenizer.warnings()[0].contains("pad_token \"<pad>\" is not in tokenizer.json"));
}

#[test]
fn each_defect_has_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let says = |words: &str| {
        let said = Tokenizer::open(at).unwrap_err().to_string();
        assert!(said.contains(words) && !said.contains('\n'), "{said:?} lacks {words:?}");
    };
    says("holds no tokenizer.json");
    fs::write(at.join("tokenizer.model"), b"x").unwrap();
    says("AutoTokenizer");
    let file = at.join("tokenizer.json");
    fs::write(&file, b"version https://git-lfs.github.com/spec/v1\n").unwrap();
    says("git lfs pull");
    fs::write(&file, b"{").unwrap();
    says("is no JSON");
    fs::write(&file, b"{\"vocab\": 3}").unwrap();
    says("no `model`");
    fs::write(&file, b"{\"model\": {\"type\": \"New\"}}").unwrap();
    says("is no usable tokenizer");
    write(at, "tokenizer.json", &json!({"model": {"type": "BPE", "vocab": {}, "merges": []}}));
    says("holds no token");
    write(at, "tokenizer.json", &json!({"model": {"type": "BPE", "vocab": {"a": 0}}}));
    says("its model lacks vocab or merges");
    write(at, "tokenizer.json", &json!({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a a a"]}}));
    says("the merge \"a a a\" is not of two tokens");
    write(at, "tokenizer.json", &json!({"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}));
    says("is no usable tokenizer");
    write(at, "tokenizer.json", &byte_level());
    fs::write(at.join("tokenizer_config.json"), b"[]").unwrap();
    says("is no JSON object");
    write(at, "tokenizer_config.json", &json!({"eos_token": 3}));
    says("`eos_token` is neither");
    let absent = Tokenizer::open(&at.join("absent.json")).unwrap_err().to_string();
    assert!(absent.contains("absent.json: no such file"), "{absent}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever ids come, the stream shows what whole decoding does, and no part of it too early.
    #[test]
    fn a_byte_level_stream_is_whole_decoding(ids in prop::collection::vec(0u32..259, 0..40), skip: bool) {
        let (tokenizer, _) = kinds();
        prop_assert_eq!(streamed(tokenizer, &ids, skip).concat(), tokenizer.decode(&ids, skip).unwrap());
    }

    #[test]
    fn text_streams_by_whole_characters(text in "[ab é€🙂\u{301}]{0,24}") {
        for tokenizer in [&kinds().0, &kinds().1] {
            let ids = tokenizer.encode(&text, false).unwrap();
            let pieces = streamed(tokenizer, &ids, false);
            prop_assert!(pieces.iter().all(|p| !p.contains('\u{fffd}')), "{:?}", pieces);
            prop_assert_eq!(pieces.concat(), tokenizer.decode(&ids, false).unwrap());
        }
    }

    /// Spans told by tokens' lengths are those that the library keeps: normalised, stripped and trimmed texts too.
    #[test]
    fn spans_are_the_librarys(text in "(ab| |é|€|🙂|e\u{301}|\u{e9}|<\\|end\\|>|\n){0,16}") {
        for tokenizer in spanned() {
            let whole = tokenizer.shared.library.encode(text.as_str(), false).unwrap();
            let spans = tokenizer.encode_spans(&text).unwrap();
            prop_assert_eq!(spans.iter().map(|s| s.0).collect::<Vec<_>>(), whole.get_ids());
            prop_assert_eq!(spans.iter().map(|s| (s.1.start, s.1.end)).collect::<Vec<_>>(), whole.get_offsets());
        }
    }

    #[test]
    fn a_fallback_stream_never_fails(ids in prop::collection::vec(0u32..263, 0..60)) {
        let tokenizer = &kinds().1;
        let pieces = streamed(tokenizer, &ids, false);
        prop_assert!(pieces.concat().len() <= 3 * ids.len() + 8);
    }

    /// A damaged file opens or is refused; it never panics.
    #[test]
    fn damaged_files_do_not_panic(cut in 0usize..6000, with in "[\\[\\]{}\",:0-9a-z\\\\]{0,6}", gone in 0usize..40) {
        let dir = tempfile::tempdir().unwrap();
        let mut text = byte_level().to_string().into_bytes();
        let cut = cut.min(text.len());
        let end = (cut + gone).min(text.len());
        text.splice(cut..end, with.bytes());
        fs::write(dir.path().join("tokenizer.json"), text).unwrap();
        if let Ok(tokenizer) = Tokenizer::open(dir.path()) {
            let ids = tokenizer.encode("ab c", false).unwrap_or_default();
            prop_assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocabulary()));
        }
    }
}
