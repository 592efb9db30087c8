//! Answers over a model whose text is known: what is shown, when, and how it is counted.

use super::*;
use crate::engine::{Engine, Settings};
use crate::request::{Request, Sampling};
use crate::tests::alphabet::{Alphabet, EOS, tokenizer};
use std::time::Duration;

fn start() -> Engine {
    Alphabet::new().start(Settings::default())
}

fn request(prompt: &str, most: usize) -> Request {
    let prompt = tokenizer().encode(prompt, false).unwrap();
    let sampling = Sampling { temperature: 0.0, max_tokens: Some(most), ..Sampling::default() };
    Request { sampling, ..Request::new(prompt) }
}

fn answer(engine: &Engine, request: Request, stops: &[&str], include: bool) -> Answer {
    let (n, stops) = (request.n, StopStrings::new(stops, include).unwrap());
    Answer::new(engine.handle().submit(request).unwrap(), &tokenizer(), n, &stops, true)
}

/// Text and tokens of a choice, and why it ended.
type Told = (String, Vec<u32>, Option<Ended>);

/// What was told of each choice, and the end; holds every step to what steps promise.
fn collect(mut answer: Answer, n: usize) -> (Vec<Told>, End) {
    let mut choices = vec![(String::new(), Vec::new(), None); n];
    while let Some(step) = answer.blocking_next() {
        assert!(!step.deltas.is_empty() || step.end.is_some(), "a step without anything");
        for delta in step.deltas {
            let choice = &mut choices[delta.index as usize];
            assert!(choice.2.is_none(), "a delta after the last");
            assert!(!delta.text.is_empty() || delta.ended.is_some());
            choice.0.push_str(&delta.text);
            choice.1.extend(delta.tokens.iter().map(|t| t.id));
            choice.2 = delta.ended;
        }
        if let Some(end) = step.end {
            assert!(answer.blocking_next().is_none(), "a step after the last");
            return (choices, end);
        }
    }
    panic!("no end");
}

fn one(request: Request, stops: &[&str], include: bool) -> (String, usize, Ended) {
    let (mut choices, end) = collect(answer(&start(), request, stops, include), 1);
    let (text, tokens, ended) = choices.remove(0);
    let End::Finished(usage) = end else { panic!("{end:?}") };
    assert_eq!(usage.output, tokens.len());
    (text, tokens.len(), ended.unwrap())
}

#[test]
fn texts_end_for_each_reason() {
    assert_eq!(one(request("x", 5), &[], false), ("yzabc".into(), 5, Ended::Length));
    assert_eq!(one(request("6", 9), &[], false), ("789".into(), 4, Ended::Eos));
    let mut stop = request("x", 9);
    stop.sampling.stop_ids = vec![u32::from(b'c')];
    assert_eq!(one(stop, &[], false), ("yzab".into(), 5, Ended::StopId(99)));
    assert_eq!(one(request("x", 20), &["q", "cde"], false), ("yzab".into(), 7, Ended::StopString(1)));
    assert_eq!(one(request("x", 20), &["cde"], true), ("yzabcde".into(), 7, Ended::StopString(0)));
    // The stop string is complete with the last token there may be.
    assert_eq!(one(request("x", 7), &["cde"], false), ("yzab".into(), 7, Ended::StopString(0)));
    // It never becomes complete: what was held back is shown.
    assert_eq!(one(request("x", 6), &["cde"], false), ("yzabcd".into(), 6, Ended::Length));
    assert_eq!(one(request("6", 9), &["9x"], false), ("789".into(), 4, Ended::Eos));
}

#[test]
fn characters_are_never_halved() {
    assert_eq!(one(request("!", 6), &[], false), ("🙂ab".into(), 6, Ended::Length));
    // The text ends within a character.
    assert_eq!(one(request("!", 3), &[], false).0, "\u{fffd}");
    let engine = start();
    let mut steps = answer(&engine, request("!", 6), &[], false);
    let first = steps.blocking_next().unwrap().deltas.remove(0);
    assert_eq!((first.text.as_str(), first.tokens.len()), ("🙂", 4));
    assert!(steps.first_token().is_some() && steps.sampled() >= 4);
}

#[test]
fn an_ignored_end_is_left_out_or_shown() {
    let mut on = request("9", 4);
    on.sampling.ignore_eos = true;
    let shown = |skip| {
        let engine = start();
        let stream = engine.handle().submit(on.clone()).unwrap();
        let none = StopStrings::new::<&str>(&[], false).unwrap();
        collect(Answer::new(stream, &tokenizer(), 1, &none, skip), 1).0.remove(0).0
    };
    assert_eq!((shown(true), shown(false)), ("abc".into(), "<|end|>abc".into()));
}

#[test]
fn each_choice_stops_for_itself() {
    let engine = start();
    let mut several = request("x", 30);
    (several.n, several.sampling.temperature, several.sampling.seed) = (3, 1.0, Some(1));
    let (choices, end) = collect(answer(&engine, several, &["f"], false), 3);
    for (text, tokens, ended) in &choices {
        assert_eq!((text.as_str(), tokens.len(), *ended), ("yzabcde", 8, Some(Ended::StopString(0))));
    }
    assert!(matches!(end, End::Finished(usage) if usage.output == 24));
}

#[test]
fn failures_and_cancellations_are_told_once() {
    let engine = start();
    let poisoned = Request { sampling: request("x", 4).sampling, ..Request::new(vec![9, 7]) };
    let (choices, end) = collect(answer(&engine, poisoned, &[], false), 1);
    assert!(matches!(end, End::Failed(why) if why.contains("NaN")) && choices[0].2.is_none());
    let mut long = request("x", 200);
    long.sampling.logit_bias = vec![(EOS, -100.0)];
    let slow = Alphabet::paced(Duration::from_millis(5)).start(Settings::default());
    let cancelled = answer(&slow, long, &[], false);
    cancelled.cancel();
    assert!(matches!(collect(cancelled, 1).1, End::Cancelled(_)));
}
