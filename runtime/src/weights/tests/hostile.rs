//! Every way in which a single file or a directory can be wrong, each with the words that its user needs.

use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::process::Command;

use super::*;

/// A header of `entries` over `data` bytes is refused with `words`.
fn header_refused(entries: &str, data: usize, words: &[&str]) {
    let dir = directory();
    let path = put(dir.path(), "w.safetensors", &file_with(entries, &vec![0; data]));
    let line = refused(&path, words);
    assert!(line.contains("w.safetensors: "), "{line}");
}

#[test]
fn absent_files_and_directories_without_weights() {
    let dir = directory();
    refused(&dir.path().join("none"), &["none: no such file or directory", "give a model directory"]);
    refused(dir.path(), &["no weights here", "model.safetensors", "download"]);
    put(dir.path(), "pytorch_model.bin", b"PK");
    refused(dir.path(), &["only PyTorch weights here (pytorch_model.bin)", "convert them to safetensors"]);
    put(dir.path(), "adapter.safetensors", b"");
    refused(dir.path(), &["no model.safetensors here, but adapter.safetensors", "path of the file"]);
    put(dir.path(), "model-00001-of-00002.safetensors", b"");
    refused(dir.path(), &["shards without model.safetensors.index.json", "download the index"]);
    symlink(dir.path().join("gone"), dir.path().join("model.safetensors")).expect("a link");
    refused(dir.path(), &["model.safetensors: the link leads nowhere"]);
}

#[test]
fn what_is_no_regular_file() {
    let dir = directory();
    let pipe = dir.path().join("pipe.safetensors");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo").success());
    refused(&pipe, &["pipe.safetensors: not a regular file"]);
    refused(Path::new("/dev/zero"), &["/dev/zero: not a regular file"]);
    fs::create_dir(dir.path().join("model.safetensors")).expect("a directory");
    refused(dir.path(), &["model.safetensors: not a regular file"]);
    let socket = dir.path().join("socket");
    let _listener = UnixListener::bind(&socket).expect("a socket");
    refused(&socket, &["socket: cannot open it"]);
}

#[test]
fn files_too_short_or_lying_about_their_header() {
    let dir = directory();
    let cases: [(&[u8], &[&str]); 5] = [
        (b"", &["the file is empty", "download or copy it again"]),
        (b"1234567", &["7 bytes are too few", "download or copy it again"]),
        (&[9, 0, 0, 0, 0, 0, 0, 0, b'{', b'}'], &["claims 9 bytes, the file has 2", "cut short"]),
        (&[0xff; 16], &["claims 18446744073709551615 bytes, the limit is 100000000"]),
        (&[1, 0xe1, 0xf5, 5, 0, 0, 0, 0, b'{'], &["claims 100000001 bytes, the limit"]),
    ];
    for (bytes, words) in cases {
        refused(&put(dir.path(), "w.safetensors", bytes), words);
    }
}

#[test]
fn headers_that_are_no_header() {
    header_refused("", 0, &["the header is not JSON", "write the file anew"]);
    header_refused("{\"a\":", 0, &["bad header: tensor \"a\": EOF", "write the file anew"]);
    header_refused("{} x", 0, &["the header is not JSON: trailing characters"]);
    header_refused("[]", 0, &["bad header: invalid type: sequence, expected an object of tensors"]);
    header_refused("7", 0, &["expected an object of tensors"]);
    header_refused("null", 0, &["expected an object of tensors"]);
    let deep = "[".repeat(100_000);
    header_refused(&format!("{{\"a\":{deep}"), 0, &["tensor \"a\": expected value at line 1 column 7"]);
    let dir = directory();
    let mut bytes = file_with("{\"aaaa\":1}", b"");
    bytes[11] = 0xff;
    refused(&put(dir.path(), "w.safetensors", &bytes), &["the header is not UTF-8 at byte 11"]);
}

#[test]
fn entries_of_the_wrong_form() {
    let one = |entry: &str, words: &[&str]| {
        let words: Vec<&str> = words.iter().chain(&["tensor \"a\""]).copied().collect();
        header_refused(&format!("{{\"a\":{entry}}}"), 4, &words);
    };
    let with_shape = |shape: &str, words: &[&str]| {
        one(&format!("{{\"dtype\":\"F32\",\"shape\":{shape},\"data_offsets\":[0,4]}}"), words);
    };
    one("7", &["expected an object with dtype"]);
    one("{\"dtype\":\"F32\",\"shape\":[1]}", &["missing field `data_offsets`"]);
    one(
        "{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}",
        &["duplicate field `dtype`"],
    );
    one("{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"x\":1}", &["unknown field `x`"]);
    one(
        "{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]}",
        &["trailing characters at line 1 column"],
    );
    one("{\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,4]}", &["expected value at line 1 column"]);
    header_refused(
        "{\"a\":{\"dtype\":\"F64\",\"shape\":[1],\"data_offsets\":[0,8]}}",
        8,
        &["tensor \"a\": dtype F64 is not supported", "convert", "BF16"],
    );
    one(
        "{\"dtype\":\"Q4\\n\",\"shape\":[1],\"data_offsets\":[0,4]}",
        &["unknown variant `Q4\u{fffd}`, expected one of `BOOL`"],
    );
    with_shape("[-1]", &["`-1`, expected usize at line 1 column"]);
    with_shape("[1.0]", &["floating point `1.0`, expected usize"]);
    with_shape("[1e2]", &["floating point `100.0`, expected usize"]);
    with_shape("[18446744073709551616]", &["floating point `1.8446744073709552e+19`, expected usize"]);
    with_shape("[\"1\"]", &["invalid type: string \"1\", expected usize"]);
    with_shape("{}", &["expected a sequence"]);
    with_shape("[4294967296,4294967296]", &["overflows the address space"]);
    with_shape("[9223372036854775807]", &["overflows the address space"]);
    with_shape("[2]", &["F32 [2] at data_offsets [0, 4]: its shape takes another number of bytes"]);
    with_shape(&format!("[{}1]", "1,".repeat(64)), &["65 dimensions, the limit is 64"]);
}

#[test]
fn keys_given_twice() {
    let entry =
        |begin: usize| format!("{{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[{begin},{}]}}", begin + 1);
    header_refused(
        &format!("{{\"a\":{},\"\\u0061\":{}}}", entry(0), entry(1)),
        2,
        &["tensor \"a\": described twice"],
    );
    header_refused(&format!("{{\"a\":{0},\"a\":{0}}}", entry(0)), 1, &["tensor \"a\": described twice"]);
    header_refused("{\"__metadata__\":{},\"__metadata__\":{}}", 0, &["__metadata__ occurs twice"]);
    header_refused("{\"__metadata__\":{\"k\":\"\",\"k\":\"\"}}", 0, &["__metadata__: \"k\" occurs twice"]);
    header_refused(
        "{\"__metadata__\":{\"k\":1}}",
        0,
        &["__metadata__: \"k\": invalid type", "expected a string"],
    );
}

#[test]
fn ranges_that_do_not_tile_the_file() {
    let two = |a: (usize, usize), b: (usize, usize), data: usize, words: &[&str]| {
        let entry = |(x, y): (usize, usize)| {
            let size = y.saturating_sub(x);
            format!("{{\"dtype\":\"I8\",\"shape\":[{size}],\"data_offsets\":[{x},{y}]}}")
        };
        header_refused(&format!("{{\"a\":{},\"b\":{}}}", entry(a), entry(b)), data, words);
    };
    let begin = "offsets must begin where the tensor before ends";
    two((0, 4), (8, 4), 8, &["tensor \"b\", I8 [0] at data_offsets [8, 4]", "not after their own end"]);
    two(
        (0, 4),
        (4, 9),
        8,
        &["tensor \"b\": data_offsets end at 9, the file has 8 bytes of data", "cut short"],
    );
    two((0, 4), (4, usize::MAX), 8, &["tensor \"b\", I8 [", "overflows the address space"]);
    two((0, 5), (4, 8), 8, &["tensor \"b\", I8 [4] at data_offsets [4, 8]", begin]);
    two((4, 8), (0, 8), 8, &["tensor \"a\"", begin]);
    two((0, 3), (4, 8), 8, &["tensor \"b\"", begin]);
    two((1, 4), (4, 8), 8, &["tensor \"a\", I8 [3] at data_offsets [1, 4]", begin]);
    two((0, 4), (4, 8), 9, &["the last 1 bytes belong to no tensor"]);
}

#[test]
fn other_things_under_the_name() {
    let dir = directory();
    let cases: [(&[u8], &str); 6] = [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 1\n", "Git LFS pointer"),
        (b"\n<!DOCTYPE html><html>", "web page"),
        (b"<html><body>", "web page"),
        (b"PK\x03\x04\x00\x00\x08\x08", "PyTorch file"),
        (b"GGUF\x03\x00\x00\x00", "GGUF file"),
        (b"{\"error\":\"no\"}", "a JSON text"),
    ];
    for (bytes, what) in cases {
        refused(&put(dir.path(), "model.safetensors", bytes), &["model.safetensors: this is a", what]);
    }
    // A length of 123 begins with the byte of a brace and is no text.
    let header = format!("{:123}", "{nonsense");
    refused(&put(dir.path(), "w.safetensors", &file_with(&header, b"")), &["the header is not JSON"]);
}

#[test]
fn long_and_unprintable_names_stay_on_one_short_line() {
    let name = format!("x\\n{}", "y".repeat(100_000));
    let line_of = |entry: &str| header_refused(&format!("{{\"{name}\":{entry}}}"), 0, &["…\": "]);
    line_of("{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}");
    line_of("7");
    header_refused(&format!("\"{name}\""), 0, &["…"]);
}
