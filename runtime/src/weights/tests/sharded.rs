//! Indices and their shards: read right, and each way of being wrong.

use super::*;

const FIRST: &str = "model-00001-of-00002.safetensors";
const SECOND: &str = "model-00002-of-00002.safetensors";

fn shard(directory: &Path, name: &str, tensors: &[&str]) {
    let list = tensors.iter().map(|t| (*t, DType::U8, &[1usize] as &[usize], &t.as_bytes()[..1]));
    write(&directory.join(name), list, &BTreeMap::new()).expect("written");
}

/// A model of two shards, `a` and `b` in the first, `c` in the second, with this index.
fn model(weight_map: &str) -> TempDir {
    let dir = directory();
    shard(dir.path(), FIRST, &["b", "a"]);
    shard(dir.path(), SECOND, &["c"]);
    put(
        dir.path(),
        "model.safetensors.index.json",
        format!("{{\"metadata\":{{}},\"weight_map\":{weight_map}}}").as_bytes(),
    );
    dir
}

fn whole() -> TempDir {
    model(&format!("{{\"a\":\"{FIRST}\",\"b\":\"{FIRST}\",\"c\":\"{SECOND}\"}}"))
}

#[test]
fn shards_are_read_as_one() {
    let dir = whole();
    for path in [dir.path().to_path_buf(), dir.path().join("model.safetensors.index.json")] {
        let checkpoint = Checkpoint::open(&path).expect("open");
        assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["b", "a", "c"]);
        for name in ["a", "b", "c"] {
            assert_eq!(checkpoint.get(name).expect("there").bytes(), name.as_bytes());
        }
        assert_eq!(checkpoint.get("c").expect("there").path, dir.path().join(SECOND));
        assert!(checkpoint.get("d").is_none());
    }
}

#[test]
fn a_tensor_the_index_omits_is_left_to_check() {
    let dir = model(&format!("{{\"a\":\"{FIRST}\",\"c\":\"{SECOND}\"}}"));
    let checkpoint = Checkpoint::open(dir.path()).expect("open");
    let expected = [("a".to_string(), vec![1]), ("c".to_string(), vec![1])];
    checkpoint.check(&expected, &|name| name == "b").expect("allowed");
    said(&checkpoint.check(&expected, &|_| false).expect_err("surplus"), &["1 tensors surplus: \"b\""]);
}

#[test]
fn shards_missing_unlisted_or_at_odds() {
    let dir = whole();
    fs::remove_file(dir.path().join(SECOND)).expect("removed");
    refused(dir.path(), &["index.json: 1 of 2 shards are missing: model-00002-of-00002", "download them"]);

    let dir = model(&format!("{{\"a\":\"{FIRST}\",\"b\":\"{FIRST}\"}}"));
    refused(dir.path(), &["shards that the index does not list: model-00002-of-00002", "download the index"]);

    let dir = model(&format!("{{\"a\":\"{FIRST}\",\"b\":\"{SECOND}\",\"c\":\"{SECOND}\"}}"));
    refused(dir.path(), &["tensor \"b\" is not in its shard", SECOND, "of one version"]);

    let dir = whole();
    shard(dir.path(), SECOND, &["c", "a"]);
    refused(dir.path(), &["tensor \"a\": in this shard and in", "download the shards again"]);

    let dir = whole();
    put(dir.path(), SECOND, b"version https://git-lfs.github.com/spec/v1\n");
    refused(dir.path(), &[SECOND, "Git LFS pointer"]);

    // Another copy of the weights, as some publishers add, is no shard.
    let dir = whole();
    put(dir.path(), "consolidated.safetensors", b"");
    Checkpoint::open(dir.path()).expect("open");
}

#[test]
fn shards_out_of_the_directory() {
    for evil in ["../x.safetensors", "/etc/passwd", "a/../../x", "./x", "..", "", "x\\u0000y"] {
        let dir = model(&format!("{{\"a\":\"{evil}\"}}"));
        refused(
            dir.path(),
            &["index.json: shard", "leads out of the model's directory", "download the index again"],
        );
    }
}

#[test]
fn indices_that_are_none() {
    let cases: [(&str, &[&str]); 9] = [
        ("", &["the index is not JSON: EOF"]),
        ("{", &["the index is not JSON"]),
        ("[]", &["bad index: invalid type: sequence, expected an object with weight_map"]),
        ("{}", &["weight_map is missing"]),
        ("{\"weight_map\":{}}", &["the index lists no tensor"]),
        ("{\"weight_map\":{\"a\":1}}", &["weight_map: \"a\": invalid type", "expected a string"]),
        ("{\"weight_map\":{\"a\":\"x\",\"a\":\"y\"}}", &["weight_map: \"a\" occurs twice"]),
        ("{\"weight_map\":{},\"weight_map\":{}}", &["weight_map occurs twice"]),
        ("<!doctype html>", &["this is a web page"]),
    ];
    for (text, words) in cases {
        let dir = directory();
        put(dir.path(), "model.safetensors.index.json", text.as_bytes());
        refused(dir.path(), &[words, &["model.safetensors.index.json: "]].concat());
    }
}
