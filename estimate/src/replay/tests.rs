//! Replays of small loads: every token once, what is shared, who waits, what is refused.

use super::*;
use crate::schedule::{Purpose, Schedule};
use astrai_builders::ModelConfig;
use astrai_engine::load::Workload;
use astrai_engine::serving::Room;
use astrai_ir::DType;
use std::path::{Path, PathBuf};

pub(super) const LLAMA: &str = "../tests/golden/llama/config.json";

const LOAD: Workload = Workload {
    requests: 60,
    rate: f64::INFINITY,
    input: 40,
    output: 9,
    ratio: 0.5,
    prefix: 0,
    vocabulary: 1000,
    seed: 1,
};

fn path(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(model)
}

/// A server of a model on a card: so many sequences, pages of so many tokens.
pub(super) fn costs(model: &str, sequences: usize, tokens: usize, prefix_cache: bool) -> StepCosts {
    let config = ModelConfig::read(&path(model)).unwrap().config;
    let hardware = crate::hardware::Hardware::open("h100-sxm").unwrap();
    let room = Room {
        sequences,
        tokens: Some(tokens),
        context: Some(128),
        prefix_cache,
        ..Room::of_one(DType::BF16, None)
    };
    let s = Schedule::of_one(Purpose::Decode, 1, 128, DType::BF16);
    StepCosts::plan(&config, &s, &room, &hardware, hardware.planner().backend()).unwrap()
}

fn replayed(costs: &mut StepCosts, load: &Workload, at_once: usize) -> Replayed {
    replay(costs, load.requests().map(Ok), at_once).unwrap()
}

#[test]
fn every_token_is_given_once() {
    for model in [LLAMA, "../../shared/configs/deepseek-v2-lite.json"] {
        if !path(model).is_file() {
            println!("skipped: {model} is not here");
            continue;
        }
        for prefix_cache in [false, true] {
            let mut costs = costs(model, 8, 64, prefix_cache);
            let found = replayed(&mut costs, &LOAD, 1000);
            let asked: Vec<_> = LOAD.requests().collect();
            assert_eq!(found.answered.len(), asked.len());
            let tokens: u64 = asked.iter().map(|a| a.output).sum();
            let gaps: u64 = found.between.iter().map(|b| b.1).sum();
            assert_eq!((found.answered.iter().map(|a| a.output).sum::<u64>(), gaps), (tokens, tokens - 60));
            // All but the last token of each answer are computed, and the prompts; nobody was preempted.
            let computed = asked.iter().map(|a| a.prompt.len() as u64 + a.output - 1).sum::<u64>();
            assert_eq!((found.counters.computed, found.counters.preemptions), (computed, 0), "{model}");
            let last = found.answered.iter().map(|a| a.whole).fold(0.0, f64::max);
            assert!((last / found.seconds - 1.0).abs() < 1e-9 && found.seconds > 0.0);
            let given: f64 = found
                .series
                .rows()
                .scan(0.0, |before, r| {
                    let width = r[0] - *before;
                    *before = r[0];
                    Some(r[6] * width)
                })
                .sum();
            assert!((given / tokens as f64 - 1.0).abs() < 1e-6, "{given} of {tokens}");
            assert!(found.series.most.running <= 8.0 && found.series.most.waiting > 0.0);
        }
    }
}

#[test]
fn what_is_shared_is_computed_once_and_whoever_is_alone_never_waits() {
    let load = Workload { prefix: 64, input: 5, requests: 20, ..LOAD };
    let alone = replayed(&mut costs(LLAMA, 8, 64, false), &load, 1);
    let shared = replayed(&mut costs(LLAMA, 8, 64, true), &load, 1);
    assert!(shared.counters.computed < alone.counters.computed / 2 && shared.seconds < alone.seconds);
    assert_eq!(alone.series.most.waiting, 0.0);
    let sum: f64 = alone.answered.iter().map(|a| a.whole).sum();
    assert!((sum / alone.seconds - 1.0).abs() < 1e-9, "one after another");
    // Sent slowly, requests do not meet.
    let slow = replayed(&mut costs(LLAMA, 8, 64, false), &Workload { rate: 1.0, ..load }, 1000);
    assert!(slow.seconds > 5.0 && slow.series.most.running <= 2.0);
}

#[test]
fn a_client_asks_again_while_the_step_behind_its_answer_runs() {
    let asked = |output| Ok(Asked { at: 0.0, prompt: vec![1; 16], output });
    let requests = [asked(2), asked(8), asked(2)];
    let found = replay(&mut costs(LLAMA, 8, 64, false), requests.into_iter(), 2).unwrap();
    // The second step ends the first request. The third one, whose client that was, waits for the third step, computes its prompt
    // in the fourth and its second token in the fifth; the second request needs all eight.
    assert_eq!((found.steps, found.answered.len()), (8, 3));
    let third = &found.answered[1];
    let step = third.whole - third.first;
    assert!((1.8..2.5).contains(&(third.first / step)), "{} and {step}", third.first);
    // Two that are answered by one step leave the engine idle, and ask at once.
    let alike = replay(&mut costs(LLAMA, 8, 64, false), vec![asked(3); 4].into_iter(), 2).unwrap();
    assert_eq!(alike.steps, 6);
}

#[test]
fn what_cannot_be_served_is_refused() {
    let mut costs = costs(LLAMA, 8, 64, false);
    let asked = |input: usize| Ok(Asked { at: 0.0, prompt: vec![1; input], output: 100 });
    for input in [0, 29] {
        let line = replay(&mut costs, [asked(input)].into_iter(), 1).unwrap_err();
        assert!(line.contains("request 1") && line.contains("128"), "{line}");
    }
    assert!(replay(&mut costs, [asked(28)].into_iter(), 1).is_ok());
    assert_eq!(replay(&mut costs, [Err("no".to_string())].into_iter(), 1).unwrap_err(), "no");
}
