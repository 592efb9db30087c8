//! Microseconds that a token takes to sample on one thread: `cargo bench -p astrai-serve`. Rows are normal: of a model that
//! knows nothing (1), something (2.5), much (a few logits far above the rest).

use astrai_serve::request::Sampling;
use astrai_serve::sample::{History, Rules, Sampler};
use std::time::Instant;

fn row(n: usize, spread: f32, sure: bool) -> Vec<f32> {
    let mut state = 1u64;
    let mut unit = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 + 0.5) / (1 << 24) as f32
    };
    let mut normal = || (-2.0 * unit().ln()).sqrt() * (std::f32::consts::TAU * unit()).cos();
    let mut row: Vec<f32> = (0..n).map(|_| spread * normal()).collect();
    if sure {
        (0..12).for_each(|i| row[i * n / 12 + 5] += 14.0 - 0.5 * i as f32);
    }
    row
}

fn main() {
    let plain = Sampling { seed: Some(1), ..Sampling::default() };
    let ways = [
        ("greedy", Sampling { temperature: 0.0, ..plain.clone() }),
        ("temperature", plain.clone()),
        ("min-p .05", Sampling { min_p: 0.05, ..plain.clone() }),
        ("top-k 50", Sampling { top_k: 50, ..plain.clone() }),
        ("top-p .9", Sampling { top_p: 0.9, ..plain.clone() }),
        ("top-p .5", Sampling { top_p: 0.5, ..plain.clone() }),
        ("top-k 50, top-p .9", Sampling { top_k: 50, top_p: 0.9, ..plain.clone() }),
        ("20 logprobs", Sampling { logprobs: Some(20), ..plain }),
    ];
    for n in [49_152, 151_936] {
        println!("{n:>20} ids  spread 1    2.5   sure");
        for (name, sampling) in &ways {
            print!("{name:>24}");
            for (spread, sure) in [(1.0, false), (2.5, false), (2.0, true)] {
                let logits = row(n, spread, sure);
                let rules = Rules::new(sampling.clone().checked(n).unwrap(), &[1, 2, 3], 1, vec![0]);
                let (mut sampler, mut history) = (Sampler::default(), History::new(rules, 0));
                let mut best = f64::INFINITY;
                let mut spoilt = logits.clone();
                for _ in 0..9 {
                    let begun = Instant::now();
                    (0..40).for_each(|_| drop(sampler.sample(&mut spoilt, &mut history)));
                    best = best.min(begun.elapsed().as_secs_f64() / 40.0 * 1e6);
                }
                print!("{best:>8.1}");
            }
            println!();
        }
    }
}
