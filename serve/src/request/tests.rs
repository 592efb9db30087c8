//! Each parameter at the edges of its range and beyond.

use super::*;

const LIMITS: Limits = Limits { vocabulary: 100, context: 16 };

fn param(request: Request) -> &'static str {
    request.checked(LIMITS).map_or_else(|e| e.param, |_| "")
}

fn with(change: impl Fn(&mut Sampling)) -> &'static str {
    let mut request = Request::new(vec![1, 2, 3]);
    change(&mut request.sampling);
    param(request)
}

#[test]
fn numbers_are_held_to_their_ranges() {
    type Set = fn(&mut Sampling, f32);
    let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
    let cases: [(&str, Set, &[f32], &[f32]); 6] = [
        ("temperature", |s, v| s.temperature = v, &[0.0, -0.0, 1e-9, 2.0, 100.0], &[-1e-9, 101.0]),
        ("top_p", |s, v| s.top_p = v, &[1e-9, 1.0], &[0.0, -0.1, 1.01]),
        ("min_p", |s, v| s.min_p = v, &[0.0, 1.0], &[-0.1, 1.01]),
        ("repetition_penalty", |s, v| s.repetition_penalty = v, &[1e-3, 1.0, 9.0], &[0.0, -1.0]),
        ("presence_penalty", |s, v| s.presence_penalty = v, &[-2.0, 2.0], &[-2.1, 2.1]),
        ("frequency_penalty", |s, v| s.frequency_penalty = v, &[-2.0, 2.0], &[-2.1, 2.1]),
    ];
    for (name, set, good, bad) in cases {
        good.iter().for_each(|v| assert_eq!(with(|s| set(s, *v)), "", "{name} {v}"));
        bad.iter().chain(&odd).for_each(|v| assert_eq!(with(|s| set(s, *v)), name, "{name} {v}"));
    }
    odd.iter().for_each(|v| assert_eq!(with(|s| s.logit_bias = vec![(1, *v)]), "logit_bias"));
}

#[test]
fn ids_must_be_the_models() {
    assert_eq!(with(|s| s.logit_bias = vec![(99, 1.0)]), "");
    assert_eq!(with(|s| s.logit_bias = vec![(100, 1.0)]), "logit_bias");
    assert_eq!(with(|s| s.stop_ids = vec![u32::MAX]), "stop_token_ids");
    assert_eq!(param(Request::new(vec![100])), "prompt");
}

#[test]
fn lengths_are_held_to_the_context() {
    assert_eq!(param(Request::new(vec![])), "prompt");
    assert_eq!(param(Request::new(vec![0; 15])), "");
    assert_eq!(param(Request::new(vec![0; 16])), "prompt");
    assert_eq!(with(|s| s.max_tokens = Some(13)), "");
    assert_eq!(with(|s| s.max_tokens = Some(14)), "max_tokens");
    assert_eq!(with(|s| s.max_tokens = Some(usize::MAX)), "max_tokens");
    assert_eq!(with(|s| s.max_tokens = Some(0)), "max_tokens");
    assert_eq!(with(|s| s.min_tokens = 14), "min_tokens");
    assert_eq!(with(|s| (s.min_tokens, s.max_tokens) = (3, Some(2))), "min_tokens");
    let whole = Request::new(vec![0; 5]).checked(LIMITS).unwrap();
    assert_eq!(whole.sampling.max_tokens, Some(11));
}

#[test]
fn counts_are_held_to_what_is_useful() {
    let n = |n: u32, temperature: f32| {
        let mut request = Request::new(vec![1]);
        (request.n, request.sampling.temperature) = (n, temperature);
        param(request)
    };
    assert_eq!([n(0, 1.0), n(128, 1.0), n(129, 1.0), n(u32::MAX, 1.0)], ["n", "", "n", "n"]);
    assert_eq!([n(1, 0.0), n(2, 0.0)], ["", "n"]);
    assert_eq!(with(|s| s.logprobs = Some(20)), "");
    assert_eq!(with(|s| s.logprobs = Some(21)), "top_logprobs");
}

#[test]
fn lists_are_no_longer_than_is_useful() {
    assert_eq!(with(|s| s.logit_bias = vec![(1, 1.0); 300]), "");
    assert_eq!(with(|s| s.logit_bias = vec![(1, 1.0); 301]), "logit_bias");
    assert_eq!(with(|s| s.stop_ids = vec![1; 128]), "");
    assert_eq!(with(|s| s.stop_ids = vec![1; 129]), "stop_token_ids");
    assert_eq!(with(|s| s.bad_words = vec![vec![1; 16]; 1000]), "");
    assert_eq!(with(|s| s.bad_words = vec![vec![1]; 1001]), "bad_words");
    assert_eq!(with(|s| s.bad_words = vec![vec![1; 17]; 1000]), "bad_words");
}

#[test]
fn greedy_forgets_what_it_does_not_use_and_biases_are_clamped() {
    let sampling = Sampling { temperature: 0.0, top_k: 5, top_p: 0.5, min_p: 0.5, ..Sampling::default() };
    let greedy = sampling.checked(100).unwrap();
    assert_eq!((greedy.top_k, greedy.top_p, greedy.min_p), (0, 1.0, 0.0));
    let tiny = Sampling { temperature: 1e-6, logit_bias: vec![(3, -1e9)], ..Sampling::default() };
    let tiny = tiny.checked(100).unwrap();
    assert_eq!((tiny.temperature, tiny.logit_bias), (0.01, vec![(3, -100.0)]));
}
