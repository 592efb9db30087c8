//! Which files are text, in which order, and how they are read.

use super::*;
use proptest::prelude::*;
use serde_json::json;

#[test]
fn folders_are_walked_in_order_and_the_rest_is_counted() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    for (name, text) in [("b/two.rs", "2"), ("b/a/one", "1"), ("c.txt", "3"), ("é.md", "4"), ("z.jsonl", "")]
    {
        put(at, name, text);
    }
    for name in [".git/x", "target/x", "b/node_modules/x", ".hidden", "out/x"] {
        put(at, name, "never");
    }
    put(at, "picture", b"\x89PNG\0\0");
    put(at, "latin.txt", b"caf\xe9 au lait");
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(at, at.join("b/loop")).unwrap();
        std::os::unix::fs::symlink("nowhere", at.join("broken")).unwrap();
        std::os::unix::fs::symlink(at.join("c.txt"), at.join("d.link")).unwrap();
    }
    let corpus = Corpus::find(&[at.to_path_buf()], &[at.join("out"), at.join("absent")]).unwrap();
    let names: Vec<_> = corpus.files().iter().map(|f| f.path.strip_prefix(at).unwrap().to_owned()).collect();
    let expected = ["b/a/one", "b/two.rs", "c.txt", "d.link", "é.md"].map(PathBuf::from);
    assert_eq!(names, expected);
    assert_eq!(corpus.skipped(), text::Skipped { binary: 2, empty: 1, other: 2, hidden: 5 });
    assert_eq!(corpus.bytes(), 5);
    let texts: Vec<String> = corpus.documents().map(|d| d.unwrap().text).collect();
    assert_eq!(texts, ["1", "2", "3", "3", "4"]);
}

#[test]
fn what_cannot_be_used_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    says(find(at), "no text found (skipped: 0 binary");
    let zip = put(at, "x.zip", b"PK\0\0");
    says(find(at), "no text found (skipped: 1 binary");
    says(find(&zip), "x.zip: holds no UTF-8 text");
    says(find(&at.join("absent")), "absent: cannot read; name a file or folder that exists");
    says(Corpus::find(&[], &[]), "no data named");
    let mut text = "good line\n".repeat(30_000).into_bytes();
    text[200_003] = 0xff;
    let late = put(at, "late.txt", &text);
    says(documents(&late), "late.txt: is not UTF-8 at byte 200003; convert it");
    let end = put(at, "end.txt", "ab\u{e9}".as_bytes().split_last().unwrap().1);
    says(documents(&end), "holds no UTF-8 text");
    let mut text = "x".repeat(20_000).into_bytes();
    text.push(0xc3);
    let end = put(at, "end.txt", text);
    says(documents(&end), "is not UTF-8 at byte 20000");
}

#[test]
fn lines_of_json_are_documents() {
    let dir = tempfile::tempdir().unwrap();
    let put = |text: &str| put(dir.path(), "x.jsonl", text);
    let path = put("\u{feff}{\"text\": \"a\\nb\", \"id\": 3}\r\n\n{\"text\": \"\"}\n{\"text\": \"c\"}");
    assert_eq!(documents(&path).unwrap(), ["a\nb", "c"]);
    says(
        documents(&put("{\"text\": \"a\"}\n{\"texts\": \"b\"}\n")),
        "line 2 is of no use (missing field `text`",
    );
    says(documents(&put("{\"text\": 3}\n")), "line 1 is of no use");
    says(documents(&put("{\"text\": \"a\"}\n[\n")), "each line must be a JSON object with a string `text`");
}

#[test]
fn long_documents_come_in_pieces() {
    let dir = tempfile::tempdir().unwrap();
    for unit in ["word 1234\n", "é", "🙂 ", "\n"] {
        let text = unit.repeat(500_000 / unit.len());
        let plain = put(dir.path(), "x.txt", &text);
        let lines =
            put(dir.path(), "x.jsonl", format!("{}\n{}\n", json!({"text": text}), json!({"text": "z"})));
        assert_eq!(documents(&plain).unwrap(), [text.as_str()]);
        assert_eq!(documents(&lines).unwrap(), [text.as_str(), "z"]);
        let corpus = find(&plain).unwrap();
        let pieces: Vec<Piece> = corpus.documents().map(Result::unwrap).collect();
        assert!(pieces.len() >= 4 && pieces.iter().all(|p| p.text.len() <= (1 << 17) + 4));
        assert_eq!(pieces.last().unwrap().read, text.len() as u64);
    }
}

#[test]
fn sizes_about_a_piece_lose_nothing() {
    let dir = tempfile::tempdir().unwrap();
    for size in [(1 << 17) - 1, 1 << 17, (1 << 17) + 1, (1 << 17) + 2, 1 << 18] {
        for bom in ["", "\u{feff}"] {
            let text = "x".repeat(size);
            let path = put(dir.path(), "x.txt", format!("{bom}{text}"));
            assert_eq!(documents(&path).unwrap(), [text]);
        }
    }
    let path = put(dir.path(), "bom.txt", "\u{feff}");
    assert_eq!(documents(&path).unwrap(), [""; 0]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever bytes a file has, it is read, skipped or refused in one line.
    #[test]
    fn any_bytes_are_read_or_refused(
        bytes in prop_oneof![
            prop::collection::vec(any::<u8>(), 0..60),
            "(\\{\"text\": ?\"?[a\\\\u0é]{0,4}\"?\\}\n?|[\\[{}\",:a]{0,3}){0,4}".prop_map(String::into_bytes),
        ],
        name in prop::sample::select(vec!["x.txt", "x.jsonl", "x.JSONL"]),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = put(dir.path(), name, &bytes);
        match documents(&path) {
            Ok(texts) if name == "x.txt" => {
                let (joined, raw) = (texts.concat(), bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes));
                prop_assert_eq!(joined.as_bytes(), raw);
            }
            Ok(_) => {}
            Err(e) => prop_assert!(!e.to_string().contains('\n')),
        }
    }
}
