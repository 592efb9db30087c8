//! Files are written whole or not at all, as other readers of the format want them.

use safetensors::SafeTensors;

use super::super::{Entry, Writer};
use super::*;

fn entry(name: &str, shape: &[usize]) -> Entry {
    Entry { name: name.to_string(), dtype: DType::U8, shape: shape.to_vec() }
}

fn names_in(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(directory)
        .expect("listed")
        .map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn the_reference_reader_reads_what_is_written() {
    let dir = directory();
    let path = dir.path().join("w.safetensors");
    let odd = "quote \" line\n ü";
    let metadata: BTreeMap<String, String> =
        (["z", odd, "a", "m"].iter()).map(|key| (key.to_string(), odd.to_string())).collect();
    let list =
        DType::ALL.iter().map(|d| (d.name(), *d, &[1usize, 2] as &[usize], &[1u8; 16][..2 * d.bytes()]));
    write(&path, list.chain([(odd, DType::U8, &[0usize] as &[usize], &[][..])]), &metadata).expect("written");
    let bytes = fs::read(&path).expect("read");
    let (length, head) = SafeTensors::read_metadata(&bytes).expect("a header");
    assert_eq!(length % 8, 0);
    let text = str::from_utf8(&bytes[8..8 + length]).expect("text");
    let at = |key: &str| text.find(&format!("\"{key}\":")).expect("a key");
    assert!(at("a") < at("m") && at("m") < at("z"), "free text without an order: {text}");
    assert_eq!(head.metadata().as_ref().and_then(|m| m.get(odd)).map(String::as_str), Some(odd));
    let theirs = SafeTensors::deserialize(&bytes).expect("readable");
    let ours = Checkpoint::open(&path).expect("open");
    assert_eq!(ours.metadata(), &metadata);
    assert_eq!(theirs.len(), 11);
    for name in ours.names() {
        let (a, b) = (ours.get(name).expect("ours"), theirs.tensor(name).expect("theirs"));
        assert_eq!((a.shape(), a.bytes()), (b.shape(), b.data()));
    }
}

#[test]
fn no_tensor_at_all_is_a_file_too() {
    let dir = directory();
    let path = dir.path().join("w.safetensors");
    write(&path, [], &BTreeMap::new()).expect("written");
    assert_eq!(Checkpoint::open(&path).expect("open").names().len(), 0);
}

#[test]
fn an_unfinished_file_leaves_the_old_one() {
    let dir = directory();
    let path = dir.path().join("w.safetensors");
    sample(&path);
    let old = fs::read(&path).expect("read");
    let open = Checkpoint::open(&path).expect("open");
    let entries = [entry("x", &[2]), entry("y", &[3])];

    let mut writer = Writer::create(&path, &entries, &BTreeMap::new()).expect("created");
    writer.put(&[1, 2]).expect("x");
    assert_eq!(names_in(dir.path()).len(), 2);
    drop(writer);
    assert_eq!(
        (names_in(dir.path()), fs::read(&path).expect("read")),
        (vec!["w.safetensors".to_string()], old.clone())
    );

    let mut writer = Writer::create(&path, &entries, &BTreeMap::new()).expect("created");
    said(&writer.put(&[1]).expect_err("too short"), &["tensor \"x\": 1 bytes given, its shape takes 2"]);
    writer.put(&[1, 2]).expect("x");
    said(&writer.finish().expect_err("y lacks"), &["tensor \"y\": no data"]);
    assert_eq!(
        (names_in(dir.path()), fs::read(&path).expect("read")),
        (vec!["w.safetensors".to_string()], old)
    );

    let mut writer = Writer::create(&path, &entries, &BTreeMap::new()).expect("created");
    writer.put(&[1, 2]).expect("x");
    writer.put(&[3, 4, 5]).expect("y");
    said(&writer.put(&[]).expect_err("too many"), &["after the last tensor"]);
    writer.finish().expect("finished");
    assert_eq!(names_in(dir.path()), ["w.safetensors"]);
    assert_eq!(Checkpoint::open(&path).expect("open").get("y").expect("y").bytes(), [3, 4, 5]);
    // The file that was replaced lives on under the map that was open.
    assert_eq!(open.get("ids").expect("ids").to_i64().expect("integers"), [7, -1]);
}

#[test]
fn what_the_format_cannot_hold_is_refused() {
    let dir = directory();
    let path = dir.path().join("w.safetensors");
    let none = BTreeMap::new();
    let refused = |entries: &[Entry], word: &str| {
        said(&Writer::create(&path, entries, &none).expect_err("a refusal"), &["w.safetensors: ", word]);
    };
    refused(&[entry("x", &[1]), entry("x", &[1])], "tensor \"x\" is given twice");
    refused(&[entry("__metadata__", &[1])], "cannot be called __metadata__");
    refused(&[entry("x", &[usize::MAX, 2])], "overflows the address space");
    refused(&[entry("x", &[usize::MAX]), entry("y", &[1])], "overflows the address space");
    refused(&[entry("x", &[1; 65])], "65 dimensions, the limit is 64");
    said(&write(dir.path(), [], &none).expect_err("a directory"), &["a directory has this name"]);
    said(&write(&dir.path().join("no/w"), [], &none).expect_err("no directory"), &["no/w: cannot create it"]);
    said(&write(Path::new("/dev/null/.."), [], &none).expect_err("no name"), &["/dev/null/..: "]);
    assert!(names_in(dir.path()).is_empty());
}
