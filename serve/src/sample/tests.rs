//! Sampling against naive references and exact probabilities.

use super::*;
use proptest::prelude::*;

/// A choice without a prompt.
fn history(s: &Sampling, seed: u64) -> History {
    History::new(Rules::new(s.clone(), &[], seed, Vec::new()), 0)
}

fn normal(n: usize, seed: u64, spread: f64) -> Vec<f32> {
    let words = |i: usize| philox([i as u32, 1, 0, 0], [seed as u32, 9]);
    let unit = |w: u32| (f64::from(w) + 0.5) / 2f64.powi(32);
    let pair = |i| (unit(words(i)[0]), unit(words(i)[1]));
    let draw = |(a, b): (f64, f64)| (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos();
    (0..n).map(|i| (spread * draw(pair(i))) as f32).collect()
}

/// Probabilities after temperature and filters, by sorting; `slack` widens (or narrows) every cut by a little.
fn naive(logits: &[f32], s: &Sampling, slack: f64) -> Vec<f64> {
    let t = f64::from(s.temperature);
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut p: Vec<f64> = logits.iter().map(|x| (f64::from(x - max) / t).exp()).collect();
    // The likeliest stays, however the cut is widened.
    let least = (f64::from(s.min_p) * (1.0 - slack)).min(1.0);
    p.iter_mut().for_each(|p| *p *= f64::from(u8::from(*p >= least)));
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|a, b| logits[*b].partial_cmp(&logits[*a]).unwrap().then(a.cmp(b)));
    if s.top_k > 0 {
        order.iter().skip(s.top_k as usize).for_each(|i| p[*i] = 0.0);
    }
    let total: f64 = p.iter().sum();
    let mut sum = 0.0;
    for i in order {
        if sum >= f64::from(s.top_p) * total * (1.0 + slack) && s.top_p < 1.0 {
            p[i] = 0.0;
        }
        sum += p[i];
    }
    let total: f64 = p.iter().sum();
    p.iter().map(|p| p / total).collect()
}

/// Ids that the filters keep, as a draw would have it, and listed.
fn kept(logits: &[f32], s: &Sampling) -> [Vec<usize>; 2] {
    let Sampler { mut softmax, mut candidates, .. } = Sampler::default();
    softmax.find_maxima(logits).unwrap();
    let kept = candidates.filter(logits, &mut softmax, s);
    let drawn = match kept {
        choose::Kept::Listed => None,
        choose::Kept::Below(mass) => {
            let ids = (0..logits.len()).filter(|&i| logits[i] >= softmax.floor);
            let ids = ids.filter(|&i| mass == u64::MAX || softmax.above(logits, i) < mass).collect();
            candidates.list_below(logits, &softmax, mass);
            Some(ids)
        }
    };
    let mut listed: Vec<usize> = candidates.listed.iter().map(|r| choose::id(*r)).collect();
    listed.sort();
    [drawn.unwrap_or_else(|| listed.clone()), listed]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn filters_keep_what_sorting_keeps(
        n in 1usize..3000,
        seed in any::<u64>(),
        spread in 0.0f64..8.0,
        coarse in any::<bool>(),
        temperature in 0.1f32..3.0,
        top_k in prop_oneof![Just(0u32), 1u32..60, 1u32..4000],
        top_p in prop_oneof![Just(1.0f32), 0.01f32..1.0],
        min_p in prop_oneof![Just(0.0f32), 0.0f32..1.0],
    ) {
        let mut logits = normal(n, seed, spread);
        if coarse {
            // Many equals, and some that are out of the question.
            logits.iter_mut().for_each(|x| *x = if *x < -6.0 { f32::NEG_INFINITY } else { x.round() });
            logits[0] = 0.0;
        }
        let s = Sampling { temperature, top_k, top_p, min_p, ..Sampling::default() };
        let (few, many) = (naive(&logits, &s, -1e-4), naive(&logits, &s, 1e-4));
        let mut drawn = history(&s, seed);
        let wanted = drawn.drawing().unwrap().token(&logits);
        let token = Sampler::default().sample(&mut logits.clone(), &mut drawn).map(|sampled| sampled.token as usize);
        prop_assert_eq!(token.ok(), wanted);
        for ids in kept(&logits, &s) {
            prop_assert!(!ids.is_empty() && ids.is_sorted());
            let is_kept = |i: &usize| ids.binary_search(i).is_ok();
            for i in 0..n {
                // What weighs nothing may be kept or not: it is never drawn.
                prop_assert!(is_kept(&i) || few[i] < 1e-30, "{i} of probability {} is missing", few[i]);
                prop_assert!(!is_kept(&i) || many[i] > 0.0 || ids.len() == 1, "{i} should not be there");
            }
        }
    }

    #[test]
    fn the_likeliest_are_in_order(n in 1usize..3000, seed in any::<u64>(), k in 0usize..40) {
        let logits: Vec<f32> = normal(n, seed, 2.0).iter().map(|x| (x * 8.0).round() / 8.0).collect();
        let mut sampler = Sampler::default();
        prop_assert!(sampler.softmax.find_maxima(&logits).is_ok());
        let top: Vec<usize> = sampler.candidates.top(&logits, &sampler.softmax, k).iter().map(|r| choose::id(*r)).collect();
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by(|a, b| logits[*b].partial_cmp(&logits[*a]).unwrap().then(a.cmp(b)));
        prop_assert_eq!(&top, &order[..k.min(n)]);
        prop_assert_eq!(sampler.softmax.argmax(&logits), order[0]);
    }
}

/// Chi-square of draws against exact probabilities, in standard deviations above its mean.
fn deviation(s: &Sampling, logits: &[f32], seed: u64) -> f64 {
    let p = naive(logits, s, 0.0);
    let draws = 20_000;
    let mut counts = vec![0.0; p.len()];
    let mut sampler = Sampler::default();
    let mut history = history(s, seed);
    for _ in 0..draws {
        let drawn = sampler.sample(&mut logits.to_vec(), &mut history).unwrap().token;
        counts[drawn as usize] += 1.0;
        assert!(p[drawn as usize] > 0.0);
    }
    let expect = |i: usize| p[i] * f64::from(draws);
    let rare: Vec<usize> = (0..p.len()).filter(|i| expect(*i) < 5.0).collect();
    let (mut chi, mut cells) = (0.0, 0.0);
    let mut cell = |expected: f64, count: f64| {
        chi += (count - expected).powi(2) / expected;
        cells += 1.0;
    };
    (0..p.len()).filter(|i| expect(*i) >= 5.0).for_each(|i| cell(expect(i), counts[i]));
    let together = rare.iter().map(|i| expect(*i)).sum::<f64>();
    if together >= 5.0 {
        cell(together, rare.iter().map(|i| counts[*i]).sum());
    }
    (chi - (cells - 1.0)) / (2.0 * (cells - 1.0f64).max(1.0)).sqrt()
}

#[test]
fn draws_have_the_exact_distribution() {
    let logits = normal(1200, 3, 2.0);
    let plain = Sampling::default();
    let cases = [
        plain.clone(),
        Sampling { temperature: 0.6, ..plain.clone() },
        Sampling { temperature: 1.7, ..plain.clone() },
        Sampling { top_k: 40, ..plain.clone() },
        Sampling { top_p: 0.8, ..plain.clone() },
        Sampling { top_p: 0.05, ..plain.clone() },
        Sampling { top_p: 0.1, temperature: 2.5, ..plain.clone() },
        Sampling { top_p: 0.9, min_p: 0.02, temperature: 2.5, ..plain.clone() },
        Sampling { min_p: 0.05, ..plain.clone() },
        Sampling { temperature: 0.9, top_k: 100, top_p: 0.9, min_p: 0.01, ..plain },
    ];
    for (i, s) in cases.iter().enumerate() {
        let sigma = deviation(s, &logits, i as u64);
        assert!(sigma.abs() < 4.5, "{s:?}: {sigma} standard deviations");
    }
}

#[test]
fn the_exponential_is_accurate() {
    for i in 0..200_000 {
        let x = -(i as f32) * 4.4e-4;
        let (got, want) = (f64::from(Drawing::exp(x)), f64::from(x).exp());
        assert!((got - want).abs() <= want * 3e-7 || x < -87.0, "exp({x}) is {got}, should be {want}");
    }
    assert_eq!((Drawing::exp(0.0), Drawing::exp(f32::NEG_INFINITY), Drawing::exp(f32::MIN)), (1.0, 0.0, 0.0));
}

#[test]
fn a_draw_depends_on_seed_choice_and_position_only() {
    let plain = Sampling::default();
    let draw = |seed, choice, before: usize| {
        let mut h = History { generated: before, choice, ..history(&plain, seed) };
        Sampler::default().sample(&mut normal(500, 1, 0.5), &mut h).unwrap().token
    };
    let tokens: Vec<u32> = (0..32).map(|i| draw(5, 0, i)).collect();
    let mut sampler = Sampler::default();
    let mut one = history(&plain, 5);
    for (i, &token) in tokens.iter().enumerate() {
        let noise = Sampling { top_k: 3, ..Sampling::default() };
        sampler.sample(&mut normal(99, i as u64, 3.0), &mut history(&noise, i as u64)).unwrap();
        let again = sampler.sample(&mut normal(500, 1, 0.5), &mut one).unwrap();
        assert_eq!(again.token, token);
    }
    let differ = |other: &dyn Fn(usize) -> u32| tokens.iter().enumerate().any(|(i, t)| other(i) != *t);
    assert!(differ(&|i| draw(6, 0, i)) && differ(&|i| draw(5, 1, i)) && differ(&|_| draw(5, 0, 0)));
    assert!(differ(&|i| draw(5 + (1 << 32), 0, i)));
}

#[test]
fn what_is_no_distribution_is_an_error() {
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    let shown = Sampling { logprobs: Some(2), ..Sampling::default() };
    let filtered = Sampling { top_p: 0.5, ..Sampling::default() };
    for s in [Sampling::default(), greedy, shown, filtered] {
        for wrong in [f32::NAN, f32::INFINITY] {
            for at in [0, 511, 512, 699] {
                let mut logits = normal(700, 1, 1.0);
                logits[at] = wrong;
                let mut h = History::new(Rules::new(s.clone(), &[1; 4], 1, vec![]), 0);
                let error = Sampler::default().sample(&mut logits, &mut h).unwrap_err();
                assert_eq!((error, h.generated()), (SampleError::Model(4), 0));
            }
        }
        let none = Sampler::default().sample(&mut [f32::NEG_INFINITY; 5], &mut history(&s, 1));
        assert_eq!(none, Err(SampleError::Model(0)));
    }
}

#[test]
fn penalties_biases_and_bans_are_as_specified() {
    let s = Sampling {
        repetition_penalty: 2.0,
        presence_penalty: 0.25,
        frequency_penalty: 0.5,
        logit_bias: vec![(4, -1.0), (0, 2.0)],
        min_tokens: 4,
        ..Sampling::default()
    };
    let mut h = History::new(Rules::new(s, &[0, 1, 1], 0, vec![5]), 0);
    [1, 2, 2].into_iter().for_each(|t| assert_eq!(h.record(t), Ok(false)));
    let (before, mut raw) = ([1.0, -1.0, 4.0, 0.5, 0.5, 9.0], Vec::new());
    let mut logits = before;
    h.adjust(&mut logits, &mut raw);
    let (one, two) = (-2.0 - 0.5 - 0.25, 2.0 - 2.0 * 0.5 - 0.25);
    assert_eq!(logits, [1.5, one, two, 0.5, -0.5, f32::NEG_INFINITY]);
    for (id, x) in before.iter().enumerate().filter(|(id, x)| logits[*id] != **x) {
        assert_eq!(raw.iter().find(|(i, _)| *i as usize == id), Some(&(id as u32, *x)));
    }
    assert_eq!(h.record(3), Ok(false));
    let mut logits = [0.0; 6];
    h.adjust(&mut logits, &mut raw);
    assert_eq!(logits[5], 0.0);
}

#[test]
fn what_the_request_rules_out_is_not_the_models_fault() {
    let s = Sampling { min_tokens: 2, ..Sampling::default() };
    for logprobs in [None, Some(1)] {
        let s = Sampling { logprobs, ..s.clone() };
        let mut h = History::new(Rules::new(s, &[1, 2], 0, vec![0, 2]), 0);
        let mut row = [1.0, f32::NEG_INFINITY, 2.0];
        let error = Sampler::default().sample(&mut row, &mut h).unwrap_err();
        assert_eq!(error, SampleError::Request(2));
    }
}

#[test]
fn log_probabilities_are_the_models_own() {
    let logits = normal(900, 4, 2.0);
    let sum = logits.iter().map(|x| f64::from(*x).exp()).sum::<f64>().ln();
    let bias = Sampling { logit_bias: vec![(17, 100.0)], logprobs: Some(3), ..Sampling::default() };
    let cold = Sampling { temperature: 0.0, logprobs: Some(0), ..Sampling::default() };
    for s in [bias, cold, Sampling { logprobs: Some(5), temperature: 0.5, top_k: 4, ..Sampling::default() }] {
        let sampled = Sampler::default().sample(&mut logits.clone(), &mut history(&s, 2)).unwrap();
        let shown = sampled.logprobs.unwrap();
        let of = |id: u32| f64::from(logits[id as usize]) - sum;
        assert!((f64::from(shown.chosen) - of(sampled.token)).abs() < 1e-5);
        assert_eq!(Some(shown.top.len() as u32), s.logprobs);
        assert!(shown.top.iter().all(|(id, p)| (f64::from(*p) - of(*id)).abs() < 1e-5));
        assert!(shown.top.is_sorted_by(|a, b| a.1 >= b.1));
    }
}
