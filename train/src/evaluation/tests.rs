//! Lines as benchmarks have them and as they should not be, sequences, metrics by hand.

use super::*;
use crate::data::tests::tokenizer;
use std::fs;

fn task(text: &str) -> (tempfile::TempDir, Result<Task, crate::data::DataError>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mine.jsonl");
    fs::write(&path, text).unwrap();
    let task = Task::open(&path, None);
    (dir, task)
}

fn question(line: &str) -> Question {
    let (_dir, task) = task(line);
    let task = task.unwrap_or_else(|e| panic!("{e}"));
    let mut lines = task.lines().unwrap();
    let line = lines.next().unwrap().unwrap();
    assert!(lines.next().is_none());
    line.question
}

#[test]
fn choices_are_read_as_benchmarks_write_them() {
    for (line, right) in [
        (r#"{"prompt": "p", "choices": ["a", "b", "c"], "gold": 2}"#, 2),
        (r#"{"query": "p", "choices": ["a", "b"], "gold": 1}"#, 1),
        (r#"{"ctx": "p", "endings": ["a", "b", "c"], "label": "1", "ind": 4, "activity_label": "x"}"#, 1),
        (r#"{"question": "p", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "1"}"#, 0),
        (r#"{"question": "p", "choices": ["a", "b", "c", "d"], "answer": "D", "subject": "x"}"#, 3),
        (r#"{"question": "p", "choices": ["1", "0"], "answer": "0"}"#, 1),
        ("\u{feff}{\"prompt\": \"p\", \"choices\": [3, 4], \"target\": \"4\"}", 1),
    ] {
        let Question::Choice { context, delimiter, choices, gold } = question(line) else { panic!("{line}") };
        assert_eq!((context.as_str(), delimiter.as_str(), gold), ("p", " ", right), "{line}");
        assert!(choices.len() >= 2);
    }
}

#[test]
fn answers_are_right_or_wrong() {
    for (line, right, wrong, metric) in [
        (r#"{"prompt": "p", "answer": "Paris"}"#, " Paris\n", "Paris.", "exact_match"),
        (r#"{"question": "p", "answers": ["four", "4"]}"#, "4", "44", "exact_match"),
        (
            r#"{"question": "p", "answer": 18, "filter": "A: (-?\\d+)"}"#,
            "so A: 18 it is",
            "18",
            "exact_match",
        ),
        (
            r#"{"messages": [{"role": "user", "content": "p"}], "regex": "(?i)^yes\\b"}"#,
            "Yes, so",
            "oh yes",
            "regex_match",
        ),
    ] {
        let Question::Generate { answers, max_tokens, stop, .. } = question(line) else { panic!("{line}") };
        assert_eq!((answers.metric(), max_tokens, stop.len()), (metric, None, 0));
        assert_eq!((answers.accept(right), answers.accept(wrong)), (Ok(true), Ok(false)), "{line}");
    }
    let slow = question(r#"{"prompt": "p", "regex": "^(a+)+\\1$"}"#);
    let Question::Generate { answers, .. } = slow else { panic!() };
    assert!(answers.accept(&format!("{}b", "a".repeat(60))).unwrap_err().contains("the expression fails"));
}

#[test]
fn lines_that_cannot_be_are_named() {
    let good = r#"{"text": "x"}"#;
    for (line, words) in [
        ("{", "is no JSON object"),
        ("[]", "is no JSON object"),
        ("{}", "asks nothing"),
        (r#"{"prompt": "p"}"#, "asks nothing"),
        (r#"{"text": " "}"#, "`text` is empty"),
        (r#"{"text": 3}"#, "`text` is no text"),
        (r#"{"choices": ["a", "b"], "gold": 0}"#, "no prompt"),
        (r#"{"prompt": ["p"], "choices": ["a", "b"], "gold": 0}"#, "`prompt` is no text"),
        (r#"{"prompt": "p", "choices": ["a"], "gold": 0}"#, "at least two texts"),
        (r#"{"prompt": "p", "choices": ["a", ""], "gold": 0}"#, "at least two texts"),
        (r#"{"prompt": "p", "choices": [["a"]], "gold": 0}"#, "no text or list of texts"),
        (r#"{"prompt": "p", "choices": ["a", "b"]}"#, "which choice is right"),
        (r#"{"prompt": "p", "choices": ["a", "b"], "gold": 2}"#, "none of the 2 choices"),
        (r#"{"prompt": "p", "choices": ["a", "b"], "gold": -1}"#, "none of the 2 choices"),
        (r#"{"prompt": "p", "choices": ["a", "b"], "answer": "E"}"#, "none of the 2 choices"),
        (r#"{"prompt": "p", "regex": "("}"#, "no regular expression"),
        (r#"{"prompt": "p", "answer": "x", "filter": 3}"#, "`filter` is no text"),
        (r#"{"prompt": "p", "answer": []}"#, "no text or list of texts"),
        (r#"{"prompt": "p", "answer": "x", "max_tokens": 0}"#, "`max_tokens`"),
        (r#"{"prompt": "p", "answer": "x", "stop": 1.5e3, "max_tokens": "4"}"#, "`max_tokens`"),
    ] {
        let (_dir, refused) = task(&format!("{good}\n\n{line}\n{good}"));
        let said = refused.expect_err(line).to_string();
        assert!(
            said.contains("mine.jsonl: line 3: ") && said.contains(words) && !said.contains('\n'),
            "{said}"
        );
    }
    assert!(task("\n\n").1.unwrap_err().to_string().contains("asks nothing; give lines"));
    let (dir, _task) = task(&format!("{good}\n{good}\nnonsense"));
    assert_eq!(Task::open(&dir.path().join("mine.jsonl"), Some(2)).unwrap().count, 2);
}

/// Every token of a text is scored once, by as much as the model takes of what comes before it.
#[test]
fn windows_score_each_token_once() {
    let tokenizer = tokenizer();
    let text = "Texts are read whole, in windows of any length. ".repeat(5);
    let ids = tokenizer.encode(&text, false).unwrap();
    let special = tokenizer.special();
    let prefix = special.bos.as_ref().or(special.eos.as_ref()).map(|token| token.id);
    let whole: Vec<u32> = prefix.into_iter().chain(ids).collect();
    for longest in [2, 3, 7, 20, whole.len() - 1, whole.len(), whole.len() + 5] {
        let encoder = Encoder::new(tokenizer, longest).unwrap();
        let windows = encoder.text(&text).unwrap();
        let scored: Vec<u32> = windows.iter().flat_map(|w| w.ids[w.from..].to_vec()).collect();
        assert_eq!(scored, whole[1..], "{longest}");
        assert!(windows.iter().all(|w| w.ids.len() <= longest && w.from >= 1));
        let last = windows.last().unwrap();
        assert_eq!(last.ids.len(), longest.min(whole.len()), "the last window has what comes before it");
    }
    assert!(Encoder::new(tokenizer, 1).is_err());
}

#[test]
fn choices_follow_their_context() {
    let tokenizer = tokenizer();
    let encoder = Encoder::new(tokenizer, 100).unwrap();
    let of = |context: &str, delimiter: &str, choices: [&str; 2]| {
        let (scored, cut) = encoder.choices(context, delimiter, &choices.map(str::to_string)).unwrap();
        assert_eq!(cut, 0);
        let text = |ids: &[u32]| tokenizer.decode(ids, true).unwrap();
        scored.iter().map(|s| (text(&s.ids[..s.from]), text(&s.ids[s.from..]))).collect::<Vec<_>>()
    };
    let want =
        |context: &str, choices: [&str; 2]| choices.map(|c| (context.to_string(), c.to_string())).to_vec();
    assert_eq!(of("the text", " ", ["reads", "is"]), want("the text", [" reads", " is"]));
    assert_eq!(of("the text ", " ", ["reads", "is"]), want("the text", [" reads", " is"]));
    assert_eq!(of("the text", " ", [" reads", "is"]), want("the text", [" reads", " is"]));
    assert_eq!(of("the text", "\n", ["reads", "is"]), want("the text", ["\nreads", "\nis"]));
    assert_eq!(of("", " ", ["reads", "is"]), want("", ["reads", "is"]));
    let short = Encoder::new(tokenizer, 6).unwrap();
    let choices = ["it".to_string(), "is".to_string()];
    let (scored, cut) = short.choices(&"text ".repeat(30), " ", &choices).unwrap();
    assert_eq!((cut, scored[0].ids.len()), (2, 6));
    assert!(
        short.choices("a", " ", &["text ".repeat(30), "x".into()]).unwrap_err().contains("longer than the 6")
    );
}

#[test]
fn metrics_are_those_by_hand() {
    let mut tally = Tally::default();
    let choices = ["a".to_string(), "four".to_string()];
    // By sums the first, by length the second; then both the second.
    tally.add(&Outcome::of_choices(&choices, vec![-2.0, -4.0], 1));
    tally.add(&Outcome::of_choices(&choices, vec![-2.0, -1.0], 1));
    tally.add(&Outcome::of_choices(&choices, vec![-1.0, -1.0], 0));
    tally.add(&Outcome::Answer { metric: "exact_match", right: true });
    tally.add(&Outcome::of_text("a bc", -3.0, 2));
    tally.add(&Outcome::of_text("d", -1.0, 1));
    let all: Vec<_> = tally.metrics().into_iter().map(|m| (m.name, m)).collect();
    let of = |name: &str| {
        let (_, m) = all.iter().find(|(n, _)| *n == name).unwrap();
        (m.value, m.stderr, m.lines)
    };
    // Two of three: the sample's deviation is √(1/3), over √3.
    let (value, stderr, lines) = of("acc");
    assert!((value - 2.0 / 3.0).abs() < 1e-12 && (stderr.unwrap() - 1.0 / 3.0).abs() < 1e-12 && lines == 3);
    assert!((of("acc_norm").0 - 2.0 / 3.0).abs() < 1e-12);
    // -2, 1 and 0 above the other.
    assert!((of("margin").0 + 1.0 / 3.0).abs() < 1e-12);
    assert_eq!(of("exact_match"), (1.0, None, 1));
    assert!((of("perplexity").0 - (4.0_f64 / 3.0).exp()).abs() < 1e-12);
    assert!((of("word_perplexity").0 - (4.0_f64 / 3.0).exp()).abs() < 1e-12);
    assert!((of("byte_perplexity").0 - (4.0_f64 / 5.0).exp()).abs() < 1e-12);
    let (bits, stderr, _) = of("bits_per_byte");
    assert!((bits - 4.0 / 5.0 / std::f64::consts::LN_2).abs() < 1e-12);
    // Residuals 3 - 0.8 · 4 and 1 - 0.8, twice their squares over the bytes' sum.
    let want = (2.0_f64 * (0.2 * 0.2 + 0.2 * 0.2)).sqrt() / 5.0 / std::f64::consts::LN_2;
    assert!((stderr.unwrap() - want).abs() < 1e-12);
}
