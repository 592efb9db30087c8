//! Text to shards to windows and back.

use super::*;
use crate::batch::{IGNORED, Items, PackedBatch};
use proptest::prelude::*;
use std::sync::Arc;

fn corpus_of(texts: &[&str]) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    for (i, text) in texts.iter().enumerate() {
        put(dir.path(), &format!("text/{i:03}.txt"), text);
    }
    let text = dir.path().join("text");
    (dir, text)
}

fn options(seq: usize, stride: usize, packing: Packing) -> WindowOptions {
    WindowOptions { seq, stride: Some(stride), packing }
}

fn item(windows: &Windows, index: u64) -> PackedBatch {
    let mut batch = PackedBatch::default();
    batch.fill(windows, [index]).unwrap();
    batch
}

fn all_ids(tokens: &Tokens) -> Vec<i32> {
    let mut ids = vec![0; tokens.len() as usize];
    tokens.copy(0, &mut ids).unwrap();
    ids
}

#[test]
fn text_comes_back_through_shards_and_windows() {
    let texts = ["The first, <|endoftext|> spelt.", "zweites — Stück 🙂\r\n", "fn main() {}\n\n\tthird"];
    let (dir, text) = corpus_of(&texts);
    let out = dir.path().join("tokens");
    let options = ShardOptions { shard_tokens: 7, ..ShardOptions::default() };
    let (mut done, mut total) = (0, 0);
    let (tokens, made) = prepare(&find(&text).unwrap(), tokenizer(), &out, &options, &mut |d, t| {
        (done, total) = (d, t);
    })
    .unwrap();
    assert_eq!(made, Tokenised::New);
    assert!(total > 0 && done == total);
    let meta = tokens.meta();
    assert_eq!((meta.dtype, meta.documents, meta.eos), (Width::Uint16, Some(3), Some(0)));
    assert!(meta.shards.len() > 3 && meta.shards.iter().rev().skip(1).all(|s| s.tokens == Some(7)));
    tokens.check(400, &mut quiet).unwrap();
    let plain = WindowOptions { seq: 5, stride: None, packing: Packing::Joined };
    let tokens = Arc::new(tokens);
    let windows = Windows::new(tokens.clone(), &plain).unwrap();
    let mut ids = Vec::new();
    (0..windows.len()).for_each(|i| ids.extend(item(&windows, i).input_ids));
    let rest = tokens.len() as usize - ids.len();
    assert!(rest <= 5);
    let mut tail = vec![0; rest];
    tokens.copy(ids.len() as u64, &mut tail).unwrap();
    ids.extend(tail);
    let ids: Vec<u32> = ids.into_iter().map(|id| id as u32).collect();
    let back: Vec<String> =
        ids.split(|&id| id == 0).map(|part| tokenizer().decode(part, false).unwrap()).collect();
    assert_eq!(back, [texts[0], texts[1], texts[2], ""]);
}

#[test]
fn shards_are_made_once_and_again_for_a_reason() {
    let (dir, text) = corpus_of(&["one", "two"]);
    let out = dir.path().join("tokens");
    let make =
        |options: ShardOptions| prepare(&find(&text).unwrap(), tokenizer(), &out, &options, &mut quiet);
    let small = ShardOptions { shard_tokens: 2, ..ShardOptions::default() };
    let made = |options| make(options).map(|(_, made)| made).unwrap();
    assert_eq!(made(small), Tokenised::New);
    let before = fs::read(out.join("meta.json")).unwrap();
    assert_eq!(made(small), Tokenised::Cached);
    let shards = || fs::read_dir(&out).unwrap().count() - 1;
    let many = shards();
    put(&text, "000.txt", "uno");
    assert_eq!(made(ShardOptions::default()), Tokenised::Stale("the text has changed".into()));
    assert!(many > 1 && shards() == 1, "shards of the longer row are left");
    assert_ne!(fs::read(out.join("meta.json")).unwrap(), before);
    let recognise = ShardOptions { recognise: true, ..small };
    assert_eq!(
        made(recognise),
        Tokenised::Stale("special tokens in the text are to be read differently".into())
    );
    fs::write(out.join("data_00000.bin"), b"\0\0\0").unwrap();
    assert!(matches!(made(recognise), Tokenised::Stale(why) if why.contains("no multiple of the 2 bytes")));
    fs::remove_file(out.join("meta.json")).unwrap();
    assert_eq!(made(recognise), Tokenised::New);
    put(&out, "meta.json", "{\"dtype\": \"uint16\"}");
    says(make(small), "was not written by this program and is not overwritten");
    let inside = prepare(&find(&text).unwrap(), tokenizer(), dir.path(), &small, &mut quiet);
    says(inside, "would be among the results");
    let empty = put(dir.path(), "empty.jsonl", "{\"text\": \"\"}");
    let out = dir.path().join("none");
    says(prepare(&find(&empty).unwrap(), tokenizer(), &out, &small, &mut quiet), "all documents are empty");
    assert!(Tokens::open(&out).is_err());
}

#[test]
fn recognised_special_tokens_end_documents() {
    let (dir, text) = corpus_of(&["a<|endoftext|>b"]);
    let options = ShardOptions { recognise: true, ..ShardOptions::default() };
    let (tokens, _) =
        prepare(&find(&text).unwrap(), tokenizer(), &dir.path().join("out"), &options, &mut quiet).unwrap();
    assert_eq!(all_ids(&tokens).iter().filter(|&&id| id == 0).count(), 2);
}

#[test]
fn targets_are_the_next_tokens_and_stop_where_documents_do() {
    let (_dir, tokens) = row(&[5, 6, 0, 7, 0, 0, 8, 9], r#"{"dtype": "uint16", "eos": 0, "vocab_size": 10}"#);
    let tokens = Arc::new(tokens.unwrap());
    let plain = Windows::new(tokens.clone(), &options(7, 7, Packing::Joined)).unwrap();
    let whole = item(&plain, 0);
    assert_eq!(whole.input_ids, [5, 6, 0, 7, 0, 0, 8]);
    assert_eq!(whole.targets, [6, 0, 7, 0, 0, 8, 9]);
    assert_eq!((whole.starts.as_slice(), whole.valid()), (&[0, 7][..], 7));
    let apart = Windows::new(tokens, &options(7, 7, Packing::Masked)).unwrap();
    let apart = item(&apart, 0);
    assert_eq!(apart.input_ids, whole.input_ids);
    assert_eq!(apart.targets, [6, 0, IGNORED, 0, IGNORED, IGNORED, 9]);
    assert_eq!(apart.positions, [0, 1, 2, 0, 1, 0, 0]);
    assert_eq!(apart.starts, [0, 3, 5, 6, 7]);
    assert_eq!(apart.valid(), 4);
}

#[test]
fn windows_that_cannot_be_are_refused() {
    let (_dir, tokens) = row(&[1, 2, 3, 4, 5], r#"{"dtype": "uint16"}"#);
    let tokens = Arc::new(tokens.unwrap());
    let new = |o| Windows::new(tokens.clone(), &o);
    says(new(options(5, 1, Packing::Joined)), "5 tokens of data do not fill one window of 5");
    says(new(options(0, 1, Packing::Joined)), "cannot be");
    says(new(options(2, 0, Packing::Joined)), "cannot be");
    says(new(options(2, 2, Packing::Masked)), "names no `eos`");
    let windows = new(options(2, 1, Packing::Joined)).unwrap();
    assert_eq!(windows.len(), 3);
    let mut batch = PackedBatch::default();
    says(batch.fill(&windows, [0, 3]), "window 3 was asked for, 3 there are");
    assert_eq!(batch, PackedBatch::default());
    says(windows.clone().split(3), "cannot be held out");
    says(windows.clone().split(0), "cannot be held out");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn windows_cover_all_tokens_but_a_short_tail(total in 2usize..90, seq in 1usize..20, stride in 1usize..25) {
        let ids: Vec<u16> = (0..total as u16).collect();
        let (_dir, tokens) = row(&ids, r#"{"dtype": "uint16"}"#);
        let windows = Windows::new(Arc::new(tokens.unwrap()), &options(seq, stride, Packing::Joined));
        if total <= seq {
            prop_assert!(windows.is_err());
            return Ok(());
        }
        let windows = windows.unwrap();
        prop_assert_eq!(windows.len(), ((total - 1 - seq) / stride + 1) as u64);
        let mut seen = vec![false; total];
        for i in 0..windows.len() {
            let batch = item(&windows, i);
            prop_assert_eq!(batch.input_ids[0] as u64, i * stride as u64);
            for (id, target) in batch.input_ids.iter().zip(&batch.targets) {
                prop_assert_eq!(id + 1, *target);
                seen[*id as usize] = true;
            }
        }
        let reached = (windows.len() as usize - 1) * stride + seq;
        prop_assert!(total - 1 - reached < stride, "another window would fit");
        let within = |at: usize| at < reached && (stride <= seq || at % stride < seq);
        (0..total).for_each(|at| assert_eq!(seen[at], within(at), "token {at}"));
    }

    #[test]
    fn what_is_held_out_is_not_trained_on(seq in 1usize..9, stride in 1usize..12, count in 1u64..8) {
        let ids: Vec<u16> = (0..100).collect();
        let (_dir, tokens) = row(&ids, r#"{"dtype": "uint16"}"#);
        let windows = Windows::new(Arc::new(tokens.unwrap()), &options(seq, stride, Packing::Joined)).unwrap();
        let Ok((train, held)) = windows.clone().split(count) else { return Ok(()) };
        prop_assert_eq!(held.len(), count);
        let last = item(&train, train.len() - 1);
        let first = item(&held, 0);
        prop_assert!(last.input_ids.last() < first.input_ids.first());
        prop_assert_eq!(item(&held, count - 1), item(&windows, windows.len() - 1));
        let lost = windows.len() - count - train.len();
        prop_assert!(lost <= (seq / stride) as u64, "{} windows lost", lost);
        if stride >= seq {
            prop_assert_eq!(lost, 0);
        }
    }

    /// However the row is cut into shards and stored, it reads the same.
    #[test]
    fn shards_join_without_a_seam(ids in prop::collection::vec(0u16..99, 2..60), cut in 1usize..59, wide: bool) {
        let cut = cut.min(ids.len() - 1);
        let dir = tempfile::tempdir().unwrap();
        let write = |ids: &[u16]| -> Vec<u8> {
            let narrow = ids.iter().flat_map(|id| id.to_le_bytes());
            if wide { ids.iter().flat_map(|&id| i32::from(id).to_le_bytes()).collect() } else { narrow.collect() }
        };
        put(dir.path(), "b.bin", write(&ids[cut..]));
        put(dir.path(), "a.bin", write(&ids[..cut]));
        put(dir.path(), "meta.json", if wide { r#"{"dtype": "int32"}"# } else { r#"{"dtype": "uint16"}"# });
        let tokens = Tokens::open(dir.path()).unwrap();
        prop_assert_eq!(all_ids(&tokens), ids.iter().map(|&id| i32::from(id)).collect::<Vec<_>>());
        let one = Tokens::open(&dir.path().join("b.bin")).unwrap();
        prop_assert_eq!(one.len() as usize, ids.len() - cut);
    }
}
