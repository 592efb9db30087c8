//! The search beside whole plans, its limits and its reasons.

use super::*;
use crate::server::{Proposals, Server};
use astrai_engine::serving::Speculation;
use astrai_ir::DType;
use astrai_runtime::Recompute;
use std::path::Path;

fn config(name: &str) -> ModelConfig {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/shapes").join(name);
    ModelConfig::read(&file).unwrap().config
}

fn search(purpose: Purpose, objective: Objective) -> Search {
    let base = Schedule::of_one(purpose, 64, 512, DType::BF16);
    Search {
        base,
        objective,
        devices: Devices::Exactly(8),
        fixed: Fixed::default(),
        fixed_batch: purpose == Purpose::Train,
        most_seconds: None,
        most_memory: None,
    }
}

/// The coarse plan of what was planned whole: its step and its memory, as multiples.
fn beside(config: &ModelConfig, hardware: &Hardware, e: &Estimate) -> [f64; 2] {
    let (s, planner) = (&e.schedule, hardware.planner());
    let batch = s.rank_batch().unwrap();
    let layers = Layers::plan(config, s, batch, planner.backend()).unwrap();
    let (pieces, update) = layers.seconds(s, batch, hardware, &s.mesh(config).unwrap()).unwrap();
    let memory = layers.memory(s, batch).total() as f64;
    [super::step(s, &pieces, update)[0] / e.summary.step, memory / e.summary.memory.total() as f64]
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
        assert!(found.rejected.iter().all(|r| !r.why.is_empty() && !r.why.contains('\n')), "{name}");
        assert!(found.considered > 20 && !found.frontier.is_empty(), "{name}");
        let best = &found.frontier[found.winner];
        assert!(found.frontier.iter().all(|e| e.summary.tokens_per_s <= best.summary.tokens_per_s), "{name}");
        // The coarse plan of those that were planned whole.
        for e in &found.frontier {
            let [step, memory] = beside(&config, &h100, e);
            let of = e.schedule.ranks;
            assert!((0.9..1.1).contains(&step), "{name} {purpose:?} {of:?}: {step}");
            assert!((0.75..1.3).contains(&memory), "{name} {purpose:?} {of:?}: {memory} of the memory");
        }
        let all = found.frontier.len() + found.between.len() + found.rejected.len();
        assert_eq!(all, found.considered, "{name}");
    }
}

/// Steps of a server: prompts in pieces, found in part, beside decode; proposals; sequences of several lengths.
#[test]
fn steps_of_a_server_count_alike_in_both_plans() {
    let h100 = Hardware::open("h100-sxm").unwrap();
    let planner = h100.planner();
    let lengths = || Some(crate::lengths::Lengths::parse("uniform:1..2048").unwrap());
    let ngram = || Proposals { how: Speculation::NGram(3), draft: None, acceptance: 0.5 };
    for (name, purpose, chunk, cached, proposals, lengths) in [
        ("qwen3-0.6b.json", Purpose::Prefill, None, 0.0, None, None),
        ("../../../shared/configs/gemma-3-1b.json", Purpose::Decode, None, 0.0, None, None),
        ("../../../shared/configs/gemma-3-1b.json", Purpose::Prefill, Some(512), 0.0, None, None),
        ("qwen3-0.6b.json", Purpose::Prefill, Some(512), 0.0, None, None),
        ("qwen3-0.6b.json", Purpose::Prefill, Some(512), 0.5, None, None),
        ("qwen3-moe-tiny.json", Purpose::Prefill, None, 0.5, None, None),
        ("qwen3-0.6b.json", Purpose::Decode, Some(512), 0.0, None, None),
        ("qwen3-0.6b.json", Purpose::Decode, None, 0.0, Some(ngram()), None),
        ("qwen3-0.6b.json", Purpose::Decode, Some(256), 0.5, Some(ngram()), lengths()),
        ("../../../shared/configs/deepseek-v2-lite.json", Purpose::Prefill, Some(512), 0.0, None, None),
        ("../../../shared/configs/deepseek-v2-lite.json", Purpose::Decode, Some(512), 0.0, None, None),
    ] {
        if name.starts_with("..")
            && !Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/shapes").join(name).is_file()
        {
            println!("skipped: {name} is not here");
            continue;
        }
        let config = config(name);
        let server = Server { proposals, chunk, cached };
        let s = Schedule { server, lengths, ..Schedule::of_one(purpose, 8, 2048, DType::BF16) };
        let e = estimate(&config, &s, &h100, planner.backend()).unwrap();
        let [step, memory] = beside(&config, &h100, &e);
        println!("{name} {purpose:?} {:?}: {step} {memory}", s.server);
        assert!((0.95..1.05).contains(&step), "{name} {purpose:?} {:?}: {step}", s.server);
        assert!((0.9..1.1).contains(&memory), "{name} {purpose:?} {:?}: {memory}", s.server);
    }
    // Prompts are tried in pieces, unless a flag says their size.
    let mut asked = search(Purpose::Prefill, Objective::Latency);
    let config = config("qwen3-0.6b.json");
    let chunks = |asked: &Search| {
        let found = asked.run(&config, &h100).unwrap();
        let all = found.rejected.iter().filter(|r| !r.whole).map(|r| r.schedule.server.chunk);
        all.collect::<std::collections::BTreeSet<_>>()
    };
    assert!(chunks(&asked).len() > 2);
    asked.base.server.chunk = Some(256);
    assert_eq!(chunks(&asked), [Some(256)].into());
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
    assert!(found.rejected.iter().any(|r| r.why.contains("more than the limit of 2.00 ms")));
    let never = Search { most_seconds: Some(1e-9), ..limited };
    assert!(never.run(&config, &h100).unwrap_err().contains("is possible"));
    let small = Hardware { memory: 1e8, ..h100.clone() };
    let line = search(Purpose::Decode, Objective::Latency).run(&config, &small).unwrap_err();
    assert!(line.contains("needs"), "{line}");
    // Less memory than the hardware's rejects more; more of it is not there.
    let needs = |found: &Found| found.rejected.iter().filter(|r| r.why.starts_with("needs ")).count();
    let within = |most_memory| {
        let limited = Search { most_memory, ..search(Purpose::Decode, Objective::Throughput) };
        limited.run(&config, &h100).unwrap()
    };
    let [none, less, more] = [None, Some(4e9), Some(1e15)].map(within);
    assert!(needs(&less) > needs(&none) && needs(&more) == needs(&none));
    assert!(less.frontier.iter().all(|e| e.summary.memory.total() <= 4_000_000_000));
    assert!(less.rejected.iter().any(|r| r.why.ends_with("of 4.0 GB") && r.memory > Some(4_000_000_000)));
}

#[test]
fn axes_that_are_given_are_not_searched() {
    let h100 = Hardware::open("h100-sxm").unwrap();
    let config = config("qwen3-0.6b.json");
    let one = Fixed { tp: Some(1), pp: Some(2), ..Fixed::default() };
    let forward = Search { fixed: one, ..search(Purpose::Decode, Objective::Throughput) };
    let found = forward.run(&config, &h100).unwrap();
    let all = |found: &Found| -> Vec<Schedule> {
        let others =
            found.between.iter().map(|c| &c.schedule).chain(found.rejected.iter().map(|r| &r.schedule));
        found.frontier.iter().map(|e| &e.schedule).chain(others).cloned().collect()
    };
    assert!(all(&found).iter().all(|s| s.ranks == Ranks { tp: 1, dp: 4, ep: 1, pp: 2 }));
    let more =
        Fixed { micro: Some(4), interleave: Some(7), zero: Some(1), recompute: Some(Recompute::Full), ..one };
    let train = Search { fixed: more, ..search(Purpose::Train, Objective::Throughput) };
    let found = train.run(&config, &h100).unwrap();
    assert_eq!((found.considered, found.frontier.len()), (1, 1));
    let s = &found.frontier[0].schedule;
    assert_eq!((s.micro, s.interleave, s.zero, s.recompute), (4, 7, 1, Recompute::Full));
    for (fixed, of, part) in [
        (
            Fixed { tp: Some(3), ..one },
            &train,
            "--tp 3 --pp 2: these are 6 ranks, which do not divide --devices 8",
        ),
        (Fixed { dp: Some(2), ep: Some(1), ..one }, &train, "these are 4 ranks, not as many as --devices 8"),
        (Fixed { zero: Some(1), ..one }, &forward, "--zero 1: only training"),
        (Fixed { interleave: Some(2), ..one }, &forward, "--interleave 2: only training"),
        (Fixed { interleave: Some(3), ..one }, &train, "--interleave 3: num_hidden_layers 28"),
        (Fixed { micro: Some(5), ..one }, &train, "--micro-batches 5"),
    ] {
        let line = Search { fixed, ..of.clone() }.run(&config, &h100).unwrap_err();
        assert!(line.contains(part), "{line}");
    }
    // A plan of one data-parallel rank has no messages between several, and one of several is not of one.
    let fewer = Fixed { dp: Some(16), ..one };
    let line = Search { fixed: fewer, devices: Devices::UpTo(8), ..forward }.run(&config, &h100).unwrap_err();
    assert!(line.contains("more than --max-devices 8"), "{line}");
}

#[test]
fn schedules_of_different_numbers_of_devices_are_compared_by_the_device() {
    let h100 = Hardware::open("h100-sxm").unwrap();
    let config = config("qwen3-0.6b.json");
    let upto = Search {
        devices: Devices::UpTo(6),
        fixed: Fixed { zero: Some(0), recompute: Some(Recompute::Selective), ..Fixed::default() },
        ..search(Purpose::Train, Objective::Latency)
    };
    let found = upto.run(&config, &h100).unwrap();
    let devices: Vec<usize> = found.frontier.iter().map(|e| e.summary.devices).collect();
    assert_eq!((devices.first(), devices.last(), found.winner), (Some(&4), Some(&1), 0), "{devices:?}");
    let each: Vec<f64> =
        found.frontier.iter().map(|e| e.summary.tokens_per_s / e.summary.devices as f64).collect();
    assert!(each.is_sorted(), "{each:?}");
    let best = Search { objective: Objective::Throughput, ..upto.clone() }.run(&config, &h100).unwrap();
    assert_eq!(best.winner, best.frontier.len() - 1);
    // Of the same plan for several numbers of data-parallel ranks each has its own messages.
    for e in &found.frontier {
        let [step, _] = beside(&config, &h100, e);
        let own = found_step(&upto, &config, &h100, &e.schedule);
        assert!((own / e.summary.step / step - 1.0).abs() < 0.02, "{:?}", e.schedule.ranks);
    }
    // Devices that cannot hold the weights are rejected whole.
    let small = Hardware { memory: 4e9, ..h100 };
    let found = upto.run(&config, &small).unwrap();
    let line =
        |r: &&Rejected| r.whole && r.why.contains("of each of 1 devices for weights and moments alone");
    assert_eq!(found.rejected.iter().filter(line).count(), 1);
}

/// Seconds of a step by the plan that a search makes for schedules with more data-parallel ranks, too.
fn found_step(of: &Search, config: &ModelConfig, hardware: &Hardware, s: &Schedule) -> f64 {
    let wide = Schedule { ranks: Ranks { dp: 64, ..s.ranks }, batch: 64, micro: 1, ..s.clone() };
    let planner = hardware.planner();
    let layers = Layers::plan(config, &wide, s.rank_batch().unwrap(), planner.backend()).unwrap();
    of.one(s, &layers, hardware).unwrap().step
}

#[test]
fn interleaved_pipelines_and_contexts_are_coarse_and_whole_alike() {
    let h100 = Hardware::open("h100-sxm").unwrap();
    let config = config("qwen3-0.6b.json");
    let planner = h100.planner();
    let ranks = Ranks { pp: 4, dp: 1, ep: 1, tp: 1 };
    let train = Schedule { ranks, micro: 8, ..search(Purpose::Train, Objective::Latency).base };
    let decode = Schedule { purpose: Purpose::Decode, ranks, seq: 4096, ..train.clone() };
    let lengths = crate::lengths::Lengths::parse("uniform:1..4096").ok();
    let mut steps = Vec::new();
    for s in
        [train.clone(), Schedule { interleave: 7, ..train }, decode.clone(), Schedule { lengths, ..decode }]
    {
        let e = estimate(&config, &s, &h100, planner.backend()).unwrap();
        let [step, memory] = beside(&config, &h100, &e);
        assert!((0.9..1.1).contains(&step), "{:?} {}: {step}", s.purpose, s.interleave);
        assert!((0.75..1.3).contains(&memory), "{:?} {}: {memory} of the memory", s.purpose, s.interleave);
        steps.push((e.summary.step, e.summary.memory.total()));
    }
    // Stages wait less for one another and keep more; half of the keys are read in less time and kept in less memory.
    assert!(steps[1].0 < steps[0].0 && steps[1].1 > steps[0].1, "{steps:?}");
    assert!(steps[3].0 < steps[2].0 && steps[3].1 < steps[2].1, "{steps:?}");
    // Interleaved are all that its rules allow.
    let of = Search { fixed_batch: true, ..search(Purpose::Train, Objective::Latency) };
    let ways: Vec<(u64, u64)> =
        of.variants(&config, ranks).unwrap().iter().map(|s| (s.micro, s.interleave)).collect();
    assert!(ways.contains(&(8, 7)) && !ways.contains(&(2, 7)) && !ways.iter().any(|(_, v)| *v == 2));
}

/// What is left of a prompt is what decode finds there, without decode being planned.
#[test]
fn a_prompt_leaves_what_decode_reads() {
    let h100 = Hardware::open("h100-sxm").unwrap();
    let planner = h100.planner();
    for name in ["qwen3-0.6b.json", "qwen3-moe-tiny.json"] {
        let config = config(name);
        let ranks = Ranks { pp: 2, dp: 1, ep: 1, tp: 2 };
        let kept = [Purpose::Prefill, Purpose::Decode].map(|purpose| {
            let s = Schedule { ranks, ..Schedule::of_one(purpose, 4, 512, DType::BF16) };
            let m = estimate(&config, &s, &h100, planner.backend()).unwrap().summary.memory;
            (m.kv, m.kv_per_token)
        });
        assert_eq!(kept[0], kept[1], "{name}");
        assert!(kept[0].0 > 0 && kept[0].1 > 0, "{name}");
    }
}
