//! Mutations of sound files: never a panic; either an error of one line, or views within bounds on which the reference reader
//! agrees.

use std::sync::LazyLock;

use proptest::prelude::*;
use safetensors::SafeTensors;

use super::super::header;
use super::*;

/// A sound file of three tensors.
static SOUND: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let dir = directory();
    let path = dir.path().join("w.safetensors");
    sample(&path);
    fs::read(&path).expect("read")
});

/// Whether `file` is accepted; what is accepted must be safe and what the reference reads.
fn judge(file: &[u8]) -> bool {
    let read = match header::read(file) {
        Ok(read) => read,
        Err(line) => {
            assert!(!line.contains('\n') && line.len() < 2500, "{line}");
            return false;
        }
    };
    let theirs = SafeTensors::deserialize(file).expect("the reference accepts what we accept");
    assert_eq!(theirs.len(), read.tensors.len());
    for t in &read.tensors {
        let bytes = &file[t.begin..t.end];
        assert_eq!(bytes.len(), t.shape.iter().product::<usize>() * t.dtype.bytes());
        let view = theirs.tensor(&t.name).expect("the same names");
        assert_eq!((view.shape(), view.data()), (&t.shape[..], bytes));
    }
    true
}

/// An edit of a file: bits flipped, a cut, bytes put in, one token of the header put in another's place.
#[derive(Debug, Clone)]
enum Edit {
    Flip(prop::sample::Index, u8),
    Cut(prop::sample::Index),
    Insert(prop::sample::Index, Vec<u8>),
    Replace(prop::sample::Index, usize, &'static str),
    Length(u64),
}

const TOKENS: [&str; 24] = [
    "0",
    "1",
    "2",
    "3",
    "24",
    "40",
    "56",
    "-1",
    "1.5",
    "1e3",
    "18446744073709551615",
    "18446744073709551616",
    "null",
    "[]",
    "{}",
    "\"a\"",
    "\"b\"",
    "\"ids\"",
    "\"F16\"",
    "\"F64\"",
    "\"dtype\"",
    "\"__metadata__\"",
    ",",
    ":",
];

fn edit() -> impl Strategy<Value = Edit> {
    let at = any::<prop::sample::Index>;
    prop_oneof![
        (at(), 0u8..8).prop_map(|(i, bit)| Edit::Flip(i, bit)),
        at().prop_map(Edit::Cut),
        (at(), prop::collection::vec(any::<u8>(), 1..9)).prop_map(|(i, bytes)| Edit::Insert(i, bytes)),
        (at(), prop::sample::select(&TOKENS[..])).prop_map(|(i, token)| Edit::Replace(i, 1, token)),
        (at(), 1usize..5, prop::sample::select(&TOKENS[..]))
            .prop_map(|(i, n, token)| Edit::Replace(i, n, token)),
        prop_oneof![any::<u64>(), 0u64..400].prop_map(Edit::Length),
    ]
}

/// Where the tokens of a JSON text begin and end.
fn tokens(text: &str) -> Vec<std::ops::Range<usize>> {
    let (mut found, mut begin) = (Vec::new(), 0);
    for (i, c) in text.char_indices() {
        if "{}[]:,".contains(c) {
            found.extend((begin < i).then_some(begin..i));
            found.push(i..i + 1);
            begin = i + 1;
        }
    }
    found
}

fn apply(file: &mut Vec<u8>, edit: &Edit) {
    match edit {
        Edit::Flip(i, bit) if !file.is_empty() => {
            let at = i.index(file.len());
            file[at] ^= 1 << bit;
        }
        Edit::Cut(i) => file.truncate(i.index(file.len() + 1)),
        Edit::Insert(i, bytes) => {
            let at = i.index(file.len() + 1);
            file.splice(at..at, bytes.iter().copied());
        }
        Edit::Replace(i, n, token) => replace(file, i, *n, token),
        Edit::Length(n) if file.len() >= 8 => file[..8].copy_from_slice(&n.to_le_bytes()),
        Edit::Flip(..) | Edit::Length(_) => {}
    }
}

/// Puts `token` in place of `n` tokens of the header and corrects the header's length, so that the edit gets past the prefix.
fn replace(file: &mut Vec<u8>, at: &prop::sample::Index, n: usize, token: &str) {
    let Some((prefix, rest)) = file.split_first_chunk::<8>() else { return };
    let length = usize::try_from(u64::from_le_bytes(*prefix)).unwrap_or(usize::MAX);
    let Some(text) = rest.get(..length).and_then(|b| std::str::from_utf8(b).ok()) else { return };
    let (all, data) = (tokens(text), rest[length..].to_vec());
    if all.is_empty() {
        return;
    }
    let first = at.index(all.len());
    let last = (first + n - 1).min(all.len() - 1);
    let edited = [&text[..all[first].start], token, &text[all[last].end..]].concat();
    *file = file_with(&edited, &data);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn mutated_files_are_refused_or_safe(edits in prop::collection::vec(edit(), 1..4)) {
        let mut file = SOUND.clone();
        for edit in &edits {
            apply(&mut file, edit);
        }
        judge(&file);
    }

    #[test]
    fn arbitrary_entries_are_refused_or_safe(
        entries in prop::collection::vec(("[ab\\\\\"]{0,2}", 0usize..10, prop::collection::vec(0usize..4, 0..3), 0usize..9, 0usize..9), 0..4),
        data in 0usize..9,
    ) {
        let names = ["U8", "I8", "BOOL", "F16", "BF16", "F32", "I32", "I64", "F8_E4M3", "F8_E5M2"];
        let list: Vec<String> = entries.iter().map(|(name, d, shape, begin, end)| {
            let name = serde_json::Value::from(name.as_str());
            format!("{name}:{{\"dtype\":\"{}\",\"shape\":{shape:?},\"data_offsets\":[{begin},{end}]}}", names[*d])
        }).collect();
        judge(&file_with(&format!("{{{}}}", list.join(",")), &vec![0; data]));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn mutated_files_on_disk_are_refused_or_readable(edits in prop::collection::vec(edit(), 0..3)) {
        let mut file = SOUND.clone();
        edits.iter().for_each(|edit| apply(&mut file, edit));
        let dir = directory();
        let path = put(dir.path(), "model.safetensors", &file);
        match Checkpoint::open(dir.path()) {
            Err(error) => { said(&error, &[&path.to_string_lossy()]); }
            Ok(checkpoint) => for name in checkpoint.names() {
                let view = checkpoint.get(name).expect("named");
                if view.dtype().is_float() {
                    view.to_f32(&mut vec![0.0; view.elements()]).expect("floats");
                } else {
                    view.to_i64().expect("integers");
                }
                checkpoint.release(name).expect("released");
            },
        }
    }
}

#[test]
fn every_single_bit_and_every_length_of_a_sound_file() {
    assert!(judge(&SOUND));
    for n in 0..SOUND.len() {
        assert!(!judge(&SOUND[..n]));
    }
    for bit in 0..8 * SOUND.len() {
        let mut file = SOUND.clone();
        file[bit / 8] ^= 1 << (bit % 8);
        judge(&file);
    }
}

#[test]
fn what_the_reference_writes_is_read() {
    use safetensors::tensor::{Dtype, TensorView, serialize};
    let data = [0u8; 64];
    let view =
        |dtype, shape: &[usize], n| TensorView::new(dtype, shape.to_vec(), &data[..n]).expect("a view");
    let list = [
        ("b", view(Dtype::F8_E4M3, &[3], 3)),
        ("a", view(Dtype::BF16, &[2, 1], 4)),
        ("c", view(Dtype::BOOL, &[], 1)),
        ("d", view(Dtype::I64, &[4, 2], 64)),
        ("e", view(Dtype::F8_E5M2, &[0, 2], 0)),
    ];
    assert!(judge(&serialize(list, None).expect("written")));
    let foreign = serialize([("x", view(Dtype::C64, &[1], 8))], None).expect("written");
    assert!(header::read(&foreign).expect_err("refused").contains("dtype C64 is not supported"));
}
