//! The search beside whole plans, its limits and its reasons.

use super::*;
use astrai_ir::DType;
use std::path::Path;

fn config(name: &str) -> ModelConfig {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/shapes").join(name);
    ModelConfig::read(&file).unwrap().config
}

fn search(purpose: Purpose, objective: Objective) -> Search {
    let base = Schedule::of_one(purpose, 64, 512, DType::BF16);
    Search { base, objective, devices: 8, fixed_batch: purpose == Purpose::Train, most_seconds: None }
}

#[test]
fn the_coarse_plan_is_the_whole_one_and_nobody_is_rejected_without_a_reason() {
    let h100 = Hardware::open("h100-sxm").unwrap();
    for (name, purpose) in [
        ("qwen3-0.6b.json", Purpose::Decode),
        ("qwen3-moe-tiny.json", Purpose::Decode),
        ("qwen3-0.6b.json", Purpose::Train),
    ] {
        let config = config(name);
        let found = search(purpose, Objective::Throughput).run(&config, &h100).unwrap();
        assert!(found.rejected.iter().all(|(_, why)| !why.is_empty() && !why.contains('\n')), "{name}");
        assert!(found.considered > 20 && !found.frontier.is_empty(), "{name}");
        let best = &found.frontier[found.winner];
        assert!(found.frontier.iter().all(|e| e.summary.tokens_per_s <= best.summary.tokens_per_s), "{name}");
        // The coarse plan of those that were planned whole.
        let planner = h100.planner();
        for e in &found.frontier {
            let s = &e.schedule;
            let batch = s.rank_batch().unwrap();
            let layers = Layers::plan(&config, s, batch, planner.backend()).unwrap();
            let mesh = s.mesh(&config).unwrap();
            let (pieces, update) = layers.seconds(s, batch, &h100, &mesh).unwrap();
            let memory = layers.memory(s, batch);
            let coarse = super::step(s, &pieces, update)[0];
            let of = coarse / e.summary.step;
            assert!((0.9..1.1).contains(&of), "{name} {purpose:?} {:?}: {of}", s.ranks);
            let of = memory.total() as f64 / e.summary.memory.total() as f64;
            assert!((0.75..1.3).contains(&of), "{name} {purpose:?} {:?}: {of} of the memory", s.ranks);
        }
    }
}

#[test]
fn limits_are_kept() {
    let h100 = Hardware::open("h100-sxm").unwrap();
    let config = config("qwen3-0.6b.json");
    let limited = Search { most_seconds: Some(2e-3), ..search(Purpose::Decode, Objective::Goodput) };
    let found = limited.run(&config, &h100).unwrap();
    assert!(found.frontier.iter().all(|e| e.summary.step <= 2.2e-3));
    assert!(found.rejected.iter().any(|(_, why)| why.contains("more than the limit of 2.00 ms")));
    let never = Search { most_seconds: Some(1e-9), ..limited };
    assert!(never.run(&config, &h100).unwrap_err().contains("is possible"));
    let small = Hardware { memory: 1e8, ..h100 };
    let line = search(Purpose::Decode, Objective::Latency).run(&config, &small).unwrap_err();
    assert!(line.contains("needs"), "{line}");
}
