//! Texts that nobody's saver wrote: refused in one line, never a panic.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::checkpoint::manifest::Manifest;

fn trainer(text: &str) -> Result<TrainerState, FileError> {
    one_line(TrainerState::parse(text, Path::new("trainer.json")))
}

fn manifest(text: &str) -> Result<Manifest, FileError> {
    one_line(Manifest::parse(text, Path::new("manifest.json")))
}

fn one_line<T>(read: Result<T, FileError>) -> Result<T, FileError> {
    if let Err(e) = &read {
        let line = e.to_string();
        assert!(!line.contains(char::is_control) && line.len() < 4000, "{line:?}");
    }
    read
}

fn sound() -> String {
    let record = json!({"bytes": 3, "sha256": "00"});
    let files = [CONFIG, MODEL, OPTIMIZER, TRAINER].map(|name| (name.to_string(), record.clone()));
    json!({"format": 1, "step": 4, "files": Value::Object(files.into_iter().collect())}).to_string()
}

#[test]
fn what_is_refused() {
    assert!(manifest(&sound()).is_ok());
    let with = |from: &str, to: &str| manifest(&sound().replace(from, to)).expect_err(to).to_string();
    assert!(with("config.json", "../config.json").contains("lists \"../config.json\""));
    assert!(with("config.json", "manifest.json").contains("lists \"manifest.json\""));
    assert!(with("config.json", "other.json").contains("config.json is not listed"));
    assert!(with("\"format\":1", "\"format\":2").contains("use the version that wrote it"));
    assert!(with("\"bytes\":3", "\"bytes\":-3").contains("damaged: "));
    assert!(with("\"bytes\":3", "\"bytes\":3,\"more\":1").contains("damaged: "));
    let text = toy(3).trainer().text().expect("text");
    let newer = trainer(&text.replace("\"format\": 1", "\"format\": 9, \"news\": 1")).expect_err("newer");
    assert!(newer.to_string().contains("of form 9, this program reads form 1"), "{newer}");
    assert!(trainer(&text.replace("\"tokens\"", "\"token\"")).is_err());
    assert!(trainer(&text.replace("\"momentum\"", "\"momentun\"")).is_err());
    assert!(trainer(&"[".repeat(100_000)).is_err());
    let mut state = toy(3).trainer();
    state.settings.lr = f64::NAN;
    assert!(state.text().expect_err("not finite").contains("does not survive"));
    state.settings.lr = 0.1 + 0.2;
    (state.step, state.random.seed) = (u64::MAX, u64::MAX);
    assert_eq!(trainer(&state.text().expect("text")).expect("read"), state);
}

proptest! {
    #[test]
    fn any_text_is_an_answer(text in "\\PC{0,300}", bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let (_read, _read2) = (trainer(&text), manifest(&text));
        let text = String::from_utf8_lossy(&bytes);
        let (_read, _read2) = (trainer(&text), manifest(&text));
    }

    #[test]
    fn a_changed_text_is_an_answer(at in any::<prop::sample::Index>(), length in 0usize..20, put in "\\PC{0,20}") {
        for text in [toy(3).trainer().text().expect("text"), sound()] {
            let at = at.index(text.len());
            let changed = format!("{}{put}{}", &text[..at], &text[(at + length).min(text.len())..]);
            let (_read, _read2) = (trainer(&changed), manifest(&changed));
        }
    }
}
