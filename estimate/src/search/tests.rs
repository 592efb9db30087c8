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

/// Steps whose time is messages of gradients: of few tokens, over links between nodes.
#[test]
fn sums_of_gradients_count_alike_in_both_plans() {
    let h100 = Hardware::open("h100-sxm").unwrap();
    // Each piece would send the gradient of a tied embedding from stage to stage, which the coarse plan leaves out.
    let (config, planner) =
        (ModelConfig { tie_embeddings: false, ..config("qwen3-0.6b.json") }, h100.planner());
    let base = Schedule::of_one(Purpose::Train, 128, 64, DType::BF16);
    for (pp, dp, micro, zero) in [
        (1, 16, 1, 0),
        (1, 16, 1, 2),
        (1, 16, 8, 0),
        (2, 16, 8, 0),
        (1, 16, 8, 1),
        (2, 16, 8, 1),
        (1, 16, 8, 2),
        (4, 16, 4, 2),
        (1, 16, 8, 3),
    ] {
        let s = Schedule { ranks: Ranks { pp, dp, ..base.ranks }, micro, zero, ..base.clone() };
        let (batch, mesh) = (s.rank_batch().unwrap(), s.mesh(&config).unwrap());
        let layers = Layers::plan(&config, &s, batch, planner.backend()).unwrap();
        let (pieces, update) = layers.seconds(&s, batch, &h100, &mesh).unwrap();
        let whole = estimate(&config, &s, &h100, planner.backend()).unwrap();
        let updates = whole.ranks.iter().map(|r| r.update()).fold(0.0, f64::max);
        let of = [super::step(&s, &pieces, update)[0] / whole.summary.step, update / updates];
        println!("pp={pp} dp={dp}, {micro} pieces, ZeRO {zero}: {of:?}");
        // The coarse plan has each stage send both ways, which counts in pieces of so few tokens.
        let near = (0.8..1.2).contains(&of[0]) && (0.9..1.1).contains(&of[1]);
        assert!(near, "pp={pp} dp={dp}, {micro} pieces, ZeRO {zero}: {of:?}");
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
