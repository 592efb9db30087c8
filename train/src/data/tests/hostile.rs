//! `meta.json` and shards as they should not be.

use super::*;
use proptest::prelude::*;
use serde_json::json;

#[test]
fn each_defect_has_its_line() {
    let with = |meta: &str| row(&[1, 2, 3], meta).1;
    assert_eq!(with(r#"{"dtype": "uint16"}"#).unwrap().len(), 3);
    says(with(""), "meta.json: is no JSON object");
    says(with("[]"), "is no JSON object");
    says(with("{}"), "`dtype` is missing; write one of uint16");
    says(with(r#"{"dtype": "float32"}"#), "`dtype` is \"float32\"; write one of");
    says(with(r#"{"dtype": "int32"}"#), "6 bytes are no multiple of the 4 bytes of an id");
    says(with(r#"{"dtype": "uint16", "tokens": 4}"#), "says 4 tokens, the shards hold 3");
    says(with(r#"{"dtype": "uint16", "tokens": "3"}"#), "`tokens` is \"3\", no whole number");
    says(with(r#"{"dtype": "uint16", "eos": -1}"#), "`eos` is -1, no whole number");
    says(with(r#"{"dtype": "uint16", "eos": 5000000000}"#), "`eos` is no token id");
    says(
        with(r#"{"dtype": "uint16", "shards": ["../data.bin"]}"#),
        "is no plain name of a file in this folder",
    );
    says(with(r#"{"dtype": "uint16", "shards": ["/data.bin"]}"#), "is no plain name");
    says(with(r#"{"dtype": "uint16", "shards": ["absent.bin"]}"#), "absent.bin: cannot open it");
    says(with(r#"{"dtype": "uint16", "shards": 3}"#), "`shards` is no list");
    let lying = r#"{"dtype": "uint16", "shards": [{"file": "data.bin", "tokens": 9}]}"#;
    says(with(lying), "data.bin: holds 3 tokens, meta.json says 9");
    says(
        with(r#"{"format": "astrai-tokens", "version": 2, "dtype": "uint16"}"#),
        "is of another version than 1",
    );
    says(row(&[], r#"{"dtype": "uint16"}"#).1, "data.bin: is empty");
    let dir = tempfile::tempdir().unwrap();
    says(Tokens::open(dir.path()), "meta.json: no such file; write one that describes the shards");
    put(dir.path(), "meta.json", r#"{"dtype": "uint16"}"#);
    says(Tokens::open(dir.path()), "holds meta.json but no .bin file");
    fs::create_dir(dir.path().join("x.bin")).unwrap();
    says(Tokens::open(dir.path()), "not a regular file");
}

#[test]
fn a_shard_that_shrinks_under_a_run_is_an_error() {
    let (dir, tokens) = row(&[1, 2, 3, 4], r#"{"dtype": "uint16"}"#);
    let (tokens, mut ids) = (tokens.unwrap(), [0; 4]);
    tokens.copy(0, &mut ids).unwrap();
    assert_eq!(ids, [1, 2, 3, 4]);
    fs::File::options().write(true).open(dir.path().join("data.bin")).unwrap().set_len(4).unwrap();
    says(tokens.copy(0, &mut ids), "data.bin: has become shorter since it was opened");
    says(tokens.check(5, &mut quiet), "data.bin: has become shorter");
}

#[test]
fn unknown_keys_warn_and_the_older_layout_is_read() {
    let (_dir, tokens) =
        row(&[1, 2], r#"{"dtype": "<u2", "vocab": 10, "eos_token_id": 0, "author": "me", "tokens": null}"#);
    let tokens = tokens.unwrap();
    assert_eq!((tokens.meta().vocab_size, tokens.meta().eos), (Some(10), Some(0)));
    assert_eq!(tokens.warnings().len(), 1);
    assert!(tokens.warnings()[0].contains("`author` means nothing here"));
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), "sequence.bin", [7_i64, 8, 9].map(i64::to_le_bytes).concat());
    let meta = |shape: &str| {
        put(dir.path(), "meta.json", format!(r#"{{"sequence": {{"shape": {shape}, "dtype": "int64"}}}}"#))
    };
    meta("[3]");
    let tokens = Tokens::open(dir.path()).unwrap();
    let mut ids = [0; 3];
    tokens.copy(0, &mut ids).unwrap();
    assert_eq!(ids, [7, 8, 9]);
    meta("[2, 2]");
    says(Tokens::open(dir.path()), "holds 3 tokens, meta.json says 4");
    meta("[-2]");
    says(Tokens::open(dir.path()), "`sequence` has no `shape`");
}

#[test]
fn ids_beyond_the_vocabulary_are_found_wherever_they_are() {
    let (_dir, tokens) = row(&[1, 2, 300, 4], r#"{"dtype": "uint16", "vocab_size": 300}"#);
    let tokens = tokens.unwrap();
    let mut told = Vec::new();
    let sum = tokens.check(301, &mut |done, total| told.push((done, total))).unwrap();
    let (_other, others) = row(&[1, 2, 299, 4], r#"{"dtype": "uint16", "vocab_size": 300}"#);
    assert_ne!(sum, others.unwrap().check(301, &mut quiet).unwrap(), "others of the same number");
    assert_eq!(told, [(4, 4)]);
    says(tokens.check(300, &mut quiet), "data.bin: token 2 is 300, the vocabulary ends at 300");
    tokens.copy(0, &mut [0; 2]).unwrap();
    says(tokens.copy(1, &mut [0; 3]), "token 2 is 300, the vocabulary ends at 300");
    says(tokens.copy(3, &mut [0; 2]), "4 there are");
    says(tokens.copy(u64::MAX, &mut [0; 2]), "4 there are");
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), "meta.json", r#"{"dtype": "int32"}"#);
    put(dir.path(), "x.bin", [5_i32, -7].map(i32::to_le_bytes).concat());
    let tokens = Tokens::open(dir.path()).unwrap();
    says(tokens.copy(0, &mut [0; 2]), "token 1 is 4294967289, the vocabulary ends at 2147483648");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Any `meta.json` over any bytes opens to what can be read, or is refused in one line.
    #[test]
    fn any_folder_opens_or_is_refused(
        bytes in prop::collection::vec(any::<u8>(), 0..20),
        dtype in prop_oneof![Just(json!("uint16")), Just(json!("uint32")), Just(json!("int64")), Just(json!([1]))],
        key in "(tokens|vocab_size|eos|shards|format|version|documents|sequence|x)",
        value in prop_oneof![
            Just(json!("data.bin")), Just(json!(["data.bin", "data.bin"])), Just(json!([{"file": "."}])),
            Just(json!({"dtype": "uint16", "shape": [u64::MAX, 2]})), Just(json!(1e300)), Just(json!(-1)),
            (0u64..12).prop_map(|n| json!(n)),
        ],
        cut in 0usize..80,
    ) {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), "data.bin", &bytes);
        let meta = json!({"dtype": dtype, (key): value}).to_string();
        let cut = if cut > 60 { cut - 60 } else { meta.len() };
        put(dir.path(), "meta.json", &meta.as_bytes()[..cut.min(meta.len())]);
        match Tokens::open(dir.path()) {
            Ok(tokens) => {
                let mut ids = vec![0; tokens.len() as usize];
                if tokens.copy(0, &mut ids).is_ok() {
                    prop_assert!(ids.iter().all(|&id| id >= 0));
                }
                prop_assert!(tokens.check(1 << 31, &mut quiet).is_ok() || tokens.meta().dtype != Width::Uint16);
            }
            Err(e) => prop_assert!(!e.to_string().contains('\n'), "{}", e),
        }
    }
}
