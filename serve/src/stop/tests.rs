//! Stop strings against a search over the whole text, however it is cut.

use super::*;
use crate::tokenizer::Tokenizer;
use proptest::prelude::*;

/// The definition: the first character at which a stop string is complete, the longest of those.
fn naive(text: &str, stops: &[String], include: bool) -> (String, Option<usize>) {
    for end in (1..=text.len()).filter(|end| text.is_char_boundary(*end)) {
        let longest = stops.iter().filter(|s| text[..end].ends_with(s.as_str())).max_by_key(|s| s.len());
        if let Some(stop) = longest {
            let kept = if include { end } else { end - stop.len() };
            return (text[..kept].to_owned(), stops.iter().position(|s| s == stop));
        }
    }
    (text.to_owned(), None)
}

/// Feeds pieces; checks at each that what is held is the longest beginning of a stop string, no more and no less.
fn feed(pieces: &[&str], stops: &[String], include: bool) -> (String, Option<usize>) {
    let mut matcher = StopStrings::new(stops, include).unwrap().matcher();
    let (mut taken, mut text) = (String::new(), String::new());
    for piece in pieces {
        let shown = matcher.push(piece);
        taken.push_str(piece);
        text.push_str(&shown.text);
        if shown.stopped.is_some() {
            assert_eq!(matcher.push("more"), Shown { text: String::new(), stopped: shown.stopped });
            assert_eq!(matcher.finish(), Shown { text: String::new(), stopped: shown.stopped });
            return (text, shown.stopped);
        }
        let longest = (0..=taken.len()).find(|at| {
            taken.is_char_boundary(*at)
                && stops.iter().any(|s| s.len() > taken.len() - at && s.starts_with(&taken[*at..]))
        });
        assert_eq!(text.len(), longest.unwrap_or(taken.len()), "held back of {taken:?} with {stops:?}");
    }
    let last = matcher.finish();
    (text + &last.text, last.stopped)
}

fn strings(stops: &[&str]) -> Vec<String> {
    stops.iter().map(|s| s.to_string()).collect()
}

#[test]
fn a_stop_string_is_found_across_pieces() {
    let stops = strings(&["</s>", "END"]);
    assert_eq!(feed(&["a<", "/", "s", ">b"], &stops, false), ("a".into(), Some(0)));
    assert_eq!(feed(&["a<", "/", "s", ">b"], &stops, true), ("a</s>".into(), Some(0)));
    assert_eq!(feed(&["a<", "/", "x", "EN"], &stops, false), ("a</xEN".into(), None));
    assert_eq!(feed(&["xE", "EN", "D"], &stops, false), ("xE".into(), Some(1)));
    assert_eq!(feed(&[], &stops, false), (String::new(), None));
    assert_eq!(feed(&["abc"], &[], false), ("abc".into(), None));
}

#[test]
fn overlapping_stop_strings_end_at_the_first_character_that_completes_one() {
    assert_eq!(feed(&["xabcd"], &strings(&["abcd", "c"]), false), ("xab".into(), Some(1)));
    assert_eq!(feed(&["xab"], &strings(&["b", "ab"]), false), ("x".into(), Some(1)));
    assert_eq!(feed(&["aab", "aac"], &strings(&["aac"]), false), ("aab".into(), Some(0)));
    assert_eq!(feed(&["abab", "abac"], &strings(&["abac", "abad"]), false), ("abab".into(), Some(0)));
    assert_eq!(feed(&["xx"], &strings(&["x", "x"]), false), (String::new(), Some(0)));
}

#[test]
fn characters_of_many_bytes_stay_whole() {
    // é and è share their first byte, and so do the two faces their first three.
    assert_eq!(feed(&["aé", "è"], &strings(&["èè"]), false), ("aéè".into(), None));
    assert_eq!(feed(&["🙂", "🙃", "x"], &strings(&["🙂🙂", "🙃x"]), false), ("🙂".into(), Some(1)));
}

#[test]
fn what_cannot_be_used_is_refused_by_name() {
    let refused = StopStrings::new(&["a", ""], false).unwrap_err();
    assert_eq!(refused.to_string(), "stop[1]: is empty; give at least one character, or leave it out");
    let refused = StopStrings::new(&["a".repeat(LARGEST), "b".into()], false).unwrap_err();
    assert_eq!(refused, StopError::TooLong(LARGEST + 1));
}

#[test]
fn many_long_stop_strings_are_followed_at_once() {
    let stops: Vec<String> = (0..30).map(|i| "ab".repeat(900) + &format!("{i:02}")).collect();
    let text = "ab".repeat(200_000) + "17";
    let shown = StopStrings::new(&stops, false).unwrap().matcher().push(&text);
    assert_eq!((shown.text.len(), shown.stopped), (text.len() - 1802, Some(17)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_cut_gives_what_a_search_over_the_whole_text_gives(
        text in "[abé🙂🙃]{0,24}",
        stops in prop::collection::vec("[abé🙂🙃]{1,5}", 0..6),
        cuts in prop::collection::vec(0usize..96, 0..8),
        include: bool,
    ) {
        let mut cuts: Vec<usize> =
            cuts.into_iter().filter(|at| *at <= text.len() && text.is_char_boundary(*at)).collect();
        cuts.extend([0, text.len()]);
        cuts.sort();
        let pieces: Vec<&str> = cuts.windows(2).map(|w| &text[w[0]..w[1]]).collect();
        prop_assert_eq!(feed(&pieces, &stops, include), naive(&text, &stops, include));
    }
}

/// A tokenizer whose every byte is a token, and 256 a special one.
fn bytes() -> Tokenizer {
    let letter = |b: u8| match b {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => b as char,
        0x00..=0x20 => char::from_u32(256 + u32::from(b)).unwrap(),
        0x7f..=0xa0 => char::from_u32(256 + 33 + u32::from(b - 0x7f)).unwrap(),
        0xad => char::from_u32(256 + 67).unwrap(),
    };
    let vocabulary: serde_json::Map<String, serde_json::Value> =
        (0..=255u8).map(|b| (letter(b).to_string(), b.into())).collect();
    let file = serde_json::json!({"version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [{"id": 256, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "normalizer": null, "post_processor": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": []}});
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
    Tokenizer::open(dir.path()).unwrap()
}

fn stream(tokenizer: &Tokenizer, ids: &[u32], stops: &[&str], skip: bool) -> (Vec<String>, Option<usize>) {
    let stops = StopStrings::new(stops, false).unwrap();
    let mut stream = TextStream::new(tokenizer, skip, &stops);
    let mut pieces: Vec<String> = ids.iter().map(|id| stream.push(*id).unwrap().text).collect();
    let last = stream.finish().unwrap();
    pieces.push(last.text);
    (pieces, last.stopped)
}

#[test]
fn ids_become_text_up_to_the_stop_string() {
    let tokenizer = bytes();
    let ids: Vec<u32> = "é→STOP!".bytes().map(u32::from).collect();
    let (pieces, stopped) = stream(&tokenizer, &ids, &["STOP"], true);
    assert_eq!((pieces.concat().as_str(), stopped), ("é→", Some(0)));
    assert_eq!(pieces[..5], ["", "é", "", "", "→"], "a character comes with its last byte");
    let (pieces, stopped) = stream(&tokenizer, &ids[..8], &["STOP"], true);
    assert_eq!((pieces.concat().as_str(), stopped), ("é→STO", None));
    assert_eq!(pieces.last().map(String::as_str), Some("STO"), "what was held back comes at the end");
}

#[test]
fn a_stop_string_can_end_in_what_the_end_lets_out() {
    let tokenizer = bytes();
    let ids = [0x61, 0xc3];
    assert_eq!(stream(&tokenizer, &ids, &["\u{fffd}"], true).1, Some(0));
    assert_eq!(stream(&tokenizer, &ids, &["b"], true).0.concat(), "a\u{fffd}");
}

#[test]
fn special_tokens_are_shown_or_skipped() {
    let tokenizer = bytes();
    let ids = [0x61, 256, 0x62];
    assert_eq!(stream(&tokenizer, &ids, &["ab"], true).1, Some(0));
    assert_eq!(stream(&tokenizer, &ids, &["ab"], false).0.concat(), "a<|end|>b");
    let (pieces, stopped) = stream(&tokenizer, &ids, &["end|>b"], false);
    assert_eq!((pieces.concat().as_str(), stopped), ("a<|", Some(0)));
}
