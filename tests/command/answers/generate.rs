//! `astrai generate`: what comes out is what the reference computed, again and again, one at a time or many; and whatever is
//! wrong is one line.

use crate::answers::fixture::{
    feed, good, greedy, make, model, program, reference, refused, text, tokenizer, utf8,
};
use serde_json::{Value, json};
use std::fs;

fn object(args: &[&str]) -> Value {
    let line = good(args);
    assert_eq!(line.lines().count(), 1, "{line}");
    serde_json::from_str(&line).unwrap()
}

fn base() -> [&'static str; 2] {
    ["generate", text(model())]
}

#[test]
fn greedy_is_the_reference() {
    let (prompt, want) = reference();
    let flags = ["--prompt", &prompt, "--temperature", "0", "--max-tokens", "24", "--json"];
    let report = object(&[&base()[..], &flags].concat());
    assert_eq!(report["text"], want);
    let words = want.split(' ').count();
    let ended = words < 24;
    assert_eq!(report["finish_reason"], if ended { "stop" } else { "length" });
    assert_eq!(report["completion_tokens"], words + usize::from(ended), "the end is a token too");
    assert_eq!(report["prompt_tokens"], prompt.split(' ').count());
    assert_eq!(report["token_ids"].as_array().unwrap().len(), words + usize::from(ended));
    assert!(report["seconds"].as_f64() >= report["seconds_to_first_token"].as_f64());
    assert_eq!(greedy(&prompt, 24), want, "as text");
    for same in [["--min-p", "1"], ["--top-k", "1"], ["--top-p", "1e-9"]] {
        let drawn = [&base()[..], &["--prompt", &prompt, "--max-tokens", "24"], &same].concat();
        assert_eq!(good(&drawn).trim_end(), want, "{same:?} leaves the likeliest");
    }
    let flags = ["--prompt", "-", "--temperature", "0", "--max-tokens", "24"];
    let out = feed(program(&[&base()[..], &flags].concat()), &prompt);
    assert_eq!(utf8(&out.stdout).trim_end(), want, "standard input");
    let flags = ["--prompt", &prompt, "--temperature", "0", "--device", "interpreter"];
    assert!(good(&[&base()[..], &flags].concat()).starts_with(&want), "without a compiler");
}

#[test]
fn a_seed_makes_it_repeatable() {
    let draw =
        |seed| good(&[&base()[..], &["--prompt", "t9 t8", "--max-tokens", "20", "--seed", seed]].concat());
    assert_eq!(draw("7"), draw("7"));
    assert_ne!(draw("7"), draw("8"));
    for drawn in [["--seed", "7"], ["--temperature", "0"]] {
        let flags = ["--prompt", "t9 t8 t9 t8 t9", "--max-tokens", "20"];
        let plain = [&base()[..], &flags, &drawn].concat();
        for how in ["ngram", "ngram:1", "ngram:16"] {
            assert_eq!(good(&[&plain[..], &["--speculate", how]].concat()), good(&plain), "{how}");
        }
        assert_eq!(good(&[&plain[..], &["--draft", text(model())]].concat()), good(&plain), "a draft");
    }
    let other = make("other-words", |_| {});
    let words = fs::read_to_string(other.join("tokenizer.json")).unwrap().replace("\"t9\"", "\"u9\"");
    fs::write(other.join("tokenizer.json"), words).unwrap();
    let line = refused(&[&base()[..], &["--prompt", "t9", "--draft", text(&other)]].concat());
    assert!(line.contains("its vocabulary is another"), "{line}");
}

#[test]
fn stop_strings_and_templates() {
    let want = greedy("t4 t9 t10 t6", 12);
    let chat = ["--chat", "--prompt", "t9 t10", "--temperature", "0", "--max-tokens", "12"];
    let chat = [&base()[..], &chat].concat();
    assert_eq!(good(&chat).trim_end(), want);
    let third = want.split(' ').nth(2).unwrap();
    let (before, _) = want.split_once(third).unwrap();
    let report = object(&[&chat[..], &["--stop", "nowhere", "--stop", third, "--json"]].concat());
    assert_eq!((&report["text"], &report["finish_reason"]), (&json!(before), &json!("stop")));
}

#[test]
fn the_models_recommendation_fills_in_for_flags() {
    let folder = make("recommended", |_| {});
    let file = folder.join("generation_config.json");
    let want = greedy("t9 t8", 12);
    let run = |flags: &[&str]| {
        let all = ["generate", text(&folder), "--prompt", "t9 t8", "--max-tokens", "12"];
        good(&[&all[..], flags].concat()).trim_end().to_string()
    };
    fs::write(&file, r#"{"do_sample": true, "temperature": 0, "top_k": 20}"#).unwrap();
    assert_eq!(run(&[]), want);
    assert_ne!(run(&["--temperature", "3", "--top-k", "0", "--seed", "1"]), want, "flags win");
    let first: u32 = want.split(' ').next().unwrap()[1..].parse().unwrap();
    fs::write(&file, json!({"temperature": 0, "eos_token_id": [first]}).to_string()).unwrap();
    assert_eq!(run(&[]), "", "its end of text is heeded too");
    fs::write(&file, r#"{"temperature": -3}"#).unwrap();
    let line = refused(&["generate", text(&folder), "--prompt", "t1"]);
    assert!(line.contains("generation_config.json") && line.contains("temperature"), "{line}");
}

#[test]
fn what_is_wrong_is_one_line() {
    let with = |flags: &[&str]| refused(&[&base()[..], &["--prompt", "t9 t8"], flags].concat());
    for (flags, words) in [
        (["--temperature", "NaN"], "--temperature: must be from 0 to 100"),
        (["--temperature", "inf"], "--temperature"),
        (["--temperature=-1", "--json"], "--temperature"),
        (["--top-p", "0"], "--top-p: must be above 0"),
        (["--top-p", "NaN"], "--top-p"),
        (["--min-p", "2"], "--min-p"),
        (["--repetition-penalty", "0"], "--repetition-penalty"),
        (["--max-tokens", "1000"], "at most 126"),
        (["--max-tokens", "4294967295"], "at most 126"),
        (["--max-model-len", "4096"], "at most 128 positions"),
        (["--max-model-len", "2"], "--prompt: has 2 tokens, the context 2"),
        (["--kv-memory", "1KiB"], "give more --kv-memory"),
        (["--kv-memory", "900TiB"], "are free"),
        (["--stop", ""], "empty"),
        (["--device", "null"], "--device"),
    ] {
        let line = with(&flags);
        assert!(line.contains(words), "{flags:?}: {line}");
    }
    let long = "t9 ".repeat(200);
    let line = refused(&[&base()[..], &["--prompt", &long]].concat());
    assert!(line.contains("200 tokens") && line.contains("context 128"), "{line}");
    assert!(refused(&[&base()[..], &["--prompt", ""]].concat()).contains("no tokens"));
    assert!(refused(&["generate", "no/such", "--prompt", "t1"]).contains("no/such"));
    for usage in [
        &["--max-tokens", "0"][..],
        &["--kv-memory", "4 bananas"],
        &["--top-k=-1"],
        &["--seed", "x"],
        &["--max-model-len", "1"],
        &["--max-seqs", "4"],
        &["--batch", "x"],
    ] {
        let out = program(&[&base()[..], &["--prompt", "t1"], usage].concat()).output().unwrap();
        assert_eq!(out.status.code(), Some(2), "{usage:?}: {}", utf8(&out.stderr));
    }
    assert_eq!(program(&base()).output().unwrap().status.code(), Some(2), "no prompt");
}

#[test]
fn folders_that_lack_something_are_told_what() {
    let folder = make("lacking", |_| {});
    let run = |flags: &[&str]| refused(&[&["generate", text(&folder), "--prompt", "t9"], flags].concat());
    fs::remove_file(folder.join("chat_template.jinja")).unwrap();
    let line = run(&["--chat"]);
    assert!(line.contains("no chat template") && line.contains("without --chat"), "{line}");
    assert!(refused(&["chat", text(&folder)]).contains("no chat template"));
    fs::write(folder.join("tokenizer.json"), tokenizer(321).to_string()).unwrap();
    assert!(run(&[]).contains("321 tokens, the model 320"));
    fs::write(folder.join("tokenizer.json"), "{").unwrap();
    assert!(run(&[]).contains("tokenizer.json"));
    fs::remove_file(folder.join("tokenizer.json")).unwrap();
    assert!(run(&[]).contains("no tokenizer.json"));
}

#[test]
fn a_batch_is_answered_in_order_as_if_each_were_alone() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("in.jsonl");
    let lines: Vec<Value> = (0..11)
        .map(|i| match i {
            3 => json!({"messages": [{"role": "system", "content": "t8"}, {"role": "user", "content": "t9 t10"}]}),
            7 => json!({"prompt": "t20 t21", "max_tokens": 3, "temperature": 5.0, "seed": 4}),
            _ => json!({"prompt": "t11 ".repeat(i + 1)}),
        })
        .collect();
    let whole: String = lines.iter().map(|l| format!("{l}\n\n")).collect();
    fs::write(&file, &whole).unwrap();
    let flags = ["--temperature", "0", "--max-tokens", "9"];
    let run = [&base()[..], &["--batch", text(&file), "--max-seqs", "3"], &flags].concat();
    let out = good(&run);
    let texts: Vec<String> = out
        .lines()
        .map(|l| serde_json::from_str::<Value>(l).unwrap()["text"].as_str().unwrap().into())
        .collect();
    assert_eq!(texts.len(), lines.len());
    for (i, got) in texts.iter().enumerate() {
        let want = match i {
            3 => greedy("t7 t8 t4 t9 t10 t6", 9),
            7 => good(
                &[
                    &base()[..],
                    &["--prompt", "t20 t21", "--max-tokens", "3", "--temperature", "5", "--seed", "4"],
                ]
                .concat(),
            )
            .trim_end()
            .into(),
            _ => greedy(&"t11 ".repeat(i + 1), 9),
        };
        assert_eq!(*got, want, "line {i}");
    }
    let wrong = format!(
        "{{\"prompt\": \"t9\"}}\n{{\"prompt\": \"t9\", \"tempratur\": 1}}\n[]\n{{}}\n{{\"prompt\": \"\"}}\n\
         {{\"prompt\": \"t9\", \"top_p\": 0}}\n{{\"prompt\": \"{}\"}}\n{{\"messages\": 3}}\n{{\"prompt\": \"t9\", \"stop\": \"\"}}\n{{\"prompt\": \"t9\"}}\n",
        "t9 ".repeat(300)
    );
    let out = feed(program(&[&base()[..], &["--batch", "-"], &flags].concat()), &wrong);
    let answers: Vec<Value> = utf8(&out.stdout).lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!((out.status.code(), answers.len()), (Some(1), 10), "{}", utf8(&out.stderr));
    let errors: Vec<usize> = (0..10).filter(|i| answers[*i]["error"].is_string()).collect();
    assert_eq!(errors, [1, 2, 3, 4, 5, 6, 7, 8], "{answers:?}");
    assert_eq!(answers[0], answers[9]);
    assert!(utf8(&out.stderr).contains("8 of 10"), "{}", utf8(&out.stderr));
    assert!(refused(&[&base()[..], &["--batch", "no/such"]].concat()).contains("no/such"));
}
