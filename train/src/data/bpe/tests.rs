//! Training: known merges, equal files from equal text, ids that the library and the splitting agree on.

use super::*;
use proptest::prelude::*;

fn attempt(texts: &[&str], options: &BpeOptions) -> Result<Bpe, DataError> {
    let pieces = texts.iter().map(|text| Ok(Piece { text: text.to_string(), last: true, read: 0 }));
    Bpe::train(options, pieces, 0, &mut |_, _, _| {})
}

fn train(texts: &[&str], options: &BpeOptions) -> Bpe {
    attempt(texts, options).unwrap()
}

const SAMPLE: &str =
    "low low low low low lower lower newest newest newest newest newest newest widest widest widest";

#[test]
fn the_textbook_merges_come_out() {
    let dir = tempfile::tempdir().unwrap();
    let bpe = train(&[SAMPLE], &BpeOptions::new(268));
    let tokenizer = bpe.write(dir.path()).unwrap();
    assert_eq!((bpe.vocabulary(), tokenizer.vocabulary()), (268, 268));
    let token = |id: u32| tokenizer.token(id).unwrap();
    assert_eq!((token(0), token(1)), ("<|endoftext|>".into(), "<|pad|>".into()));
    assert_eq!((token(258), token(259), token(260)), ("es".into(), "est".into(), "lo".into()));
    assert_eq!(tokenizer.special().eos.as_ref().unwrap().id, 0);
    assert_eq!(tokenizer.special().pad.as_ref().unwrap().id, 1);
    let text = "lowest é 🙂\r\n\0 <|endoftext|>";
    let ids = tokenizer.encode(text, true).unwrap();
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
    assert_eq!(ids.last(), Some(&0));
}

#[test]
fn equal_text_gives_equal_tokenizers_and_little_text_small_ones() {
    let source = [include_str!("../bpe.rs"), include_str!("../shards.rs"), include_str!("../documents.rs")];
    let options = BpeOptions::new(900);
    let first = train(&source, &options);
    assert_eq!(first.vocabulary(), 900);
    for _ in 0..3 {
        assert_eq!(train(&source, &options), first);
    }
    assert_eq!(train(&["no pair twice"], &options).vocabulary(), 258);
}

#[test]
fn special_tokens_are_never_learnt_and_bad_ones_refused() {
    let text = "<|x|> ".repeat(50);
    let mut options = BpeOptions::new(300);
    options.special = vec!["<|x|>".into()];
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = train(&[&text], &options).write(dir.path()).unwrap();
    assert_eq!(tokenizer.encode("<|x|>", false).unwrap(), [2]);
    assert!(!tokenizer.encode_plain("<|x|>").unwrap().contains(&2));
    // A word that the text is full of, whole and within others.
    options.special = vec!["ab".into()];
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = train(&[&"ab cab abc ".repeat(50)], &options).write(dir.path()).unwrap();
    assert_eq!(tokenizer.encode("ab", false).unwrap(), [2]);
    assert!(!tokenizer.encode_plain("ab cab abc").unwrap().contains(&2));
    let says = |options: &BpeOptions, what: &str| {
        let said = attempt(&["a"], options).unwrap_err().to_string();
        assert!(said.contains(what), "{said}");
    };
    says(&BpeOptions::new(257), "make 258 at least");
    says(&BpeOptions { pad: "x".into(), ..BpeOptions::new(300) }, "too short");
    says(&BpeOptions { pad: "<|endoftext|>".into(), ..BpeOptions::new(300) }, "named twice");
    assert!(attempt(&[], &BpeOptions::new(300)).unwrap_err().to_string().contains("no text"));
}

#[test]
fn text_beyond_the_bound_is_left_out() {
    let pieces = |texts: &[&str]| -> Vec<_> {
        texts.iter().map(|text| Ok(Piece { text: text.to_string(), last: true, read: 0 })).collect()
    };
    let on = |texts: &[&str], most| {
        Bpe::train_on(&BpeOptions::new(268), pieces(texts), most, 0, &mut |_, _, _| {}).unwrap()
    };
    let (most, other) = (SAMPLE.len() as u64, "other words, other words");
    assert_eq!(on(&[SAMPLE, other], most), on(&[SAMPLE], u64::MAX));
    assert_ne!(on(&[SAMPLE, other], most + other.len() as u64), on(&[SAMPLE], u64::MAX));
}

#[test]
fn tokens_stay_short_of_a_line() {
    let dir = tempfile::tempdir().unwrap();
    let text = "a".repeat(100_000);
    let tokenizer = train(&[&text], &BpeOptions::new(400)).write(dir.path()).unwrap();
    assert!((0..tokenizer.vocabulary() as u32).all(|id| tokenizer.token(id).unwrap().len() <= 128));
    let ids = tokenizer.encode(&text, false).unwrap();
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Every word that was counted is one that encoding makes: with room for all merges, each is one token.
    #[test]
    fn words_are_the_librarys(text in "[a-c1 \n\t'é…s🙂]{1,40}") {
        let dir = tempfile::tempdir().unwrap();
        let text = text.repeat(2);
        let options = BpeOptions { min_frequency: 1, ..BpeOptions::new(2000) };
        let tokenizer = train(&[&text], &options).write(dir.path()).unwrap();
        let ids = tokenizer.encode(&text, false).unwrap();
        prop_assert_eq!(ids.len() as u64, Words::new(&options).unwrap().of(&text).unwrap().len() as u64);
        prop_assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
    }
}
