//! Steps of a server: pieces beside the whole, proposals, prompts beside decode, rows sent to experts.

use super::*;
use crate::estimate::{Estimate, estimate};
use crate::hardware::Hardware;
use astrai_builders::Ranks;
use astrai_ir::DType;
use std::path::Path;

fn config(file: &str) -> ModelConfig {
    ModelConfig::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file)).unwrap().config
}

fn of(config: &ModelConfig, s: Schedule) -> Estimate {
    let h100 = Hardware::open("h100-sxm").unwrap();
    estimate(config, &s, &h100, h100.planner().backend()).unwrap()
}

/// Operations of attention in a step.
fn attention(e: &Estimate) -> f64 {
    let rows = e.ranks[0].rows.iter().filter(|r| r.work.form == "attention");
    rows.map(|r| r.time.flops * r.launches as f64).sum()
}

#[test]
fn rows_see_and_read_the_keys_before_them() {
    // By counting: of 10 tokens those from 4 on, of windows of 3 and of all.
    let rows = Rows { tokens: 7, sequences: 1, groups: vec![Group { count: 1.0, tokens: 7.0, at: 10.0 }] };
    let count = |w: u64| (4..=10u64).map(|at| at.min(w)).sum::<u64>() as f64;
    for window in [3, 5, 7, 10, 99] {
        assert_eq!(rows.seen(Some(window)), count(window), "{window}");
        assert_eq!(rows.held(Some(window)), 10u64.min(window + 6) as f64, "{window}");
    }
    assert_eq!((rows.seen(None), rows.held(None), rows.pages()), (count(99), 10.0, 1));
}

#[test]
fn chunks_together_are_the_prompt_and_what_is_found_is_not_computed() {
    let config = config("bench/shapes/qwen3-0.6b.json");
    let with = |chunk, cached| {
        let server = Server { chunk, cached, ..Server::default() };
        let s = Schedule { server, ..Schedule::of_one(Purpose::Prefill, 4, 2048, DType::BF16) };
        of(&config, s)
    };
    let whole = with(None, 0.0);
    for chunk in [1 << 20, 4096, 2048, 512, 100] {
        let pieces = with(Some(chunk), 0.0);
        // All pairs of the prompt, whatever the pieces; the plan without pages counts the half of the square.
        let part = attention(&pieces) / attention(&whole);
        assert!((part - 1.0).abs() < 2e-2, "{chunk}: {part}");
        assert!(pieces.summary.step > whole.summary.step * 0.99, "{chunk}");
        assert_eq!(pieces.summary.memory.kv, whole.summary.memory.kv);
        let sum: f64 = pieces.ranks[0].rows.iter().map(|r| r.seconds).sum();
        assert!((sum / pieces.summary.step - 1.0).abs() < 1e-9, "{chunk}");
    }
    let half = with(None, 0.5);
    assert!((attention(&half) / attention(&whole) - 0.75).abs() < 5e-3);
    assert!(half.summary.step < 0.65 * whole.summary.step);
    assert_eq!(half.summary.memory.kv, whole.summary.memory.kv);
}

#[test]
fn decode_with_proposals_and_with_prompts_beside_it() {
    let config = config("bench/shapes/qwen3-0.6b.json");
    let decode = Schedule::of_one(Purpose::Decode, 8, 2048, DType::BF16);
    let alone = of(&config, decode.clone()).summary;
    let with = |acceptance| {
        let proposals = Some(Proposals { how: Speculation::NGram(3), draft: None, acceptance });
        let server = Server { proposals, ..Server::default() };
        of(&config, Schedule { server, ..decode.clone() }).summary
    };
    let [never, always] = [with(0.0), with(1.0)];
    assert_eq!(never.period, always.period);
    assert!(never.step > alone.step && (never.step / always.step - 4.0).abs() < 1e-9);
    assert!((always.tokens_per_s / never.tokens_per_s - 4.0).abs() < 1e-9);
    let draft = Proposals { how: Speculation::Draft(3), draft: Some(config.clone()), acceptance: 1.0 };
    let server = Server { proposals: Some(draft), ..Server::default() };
    let drafted = of(&config, Schedule { server, ..decode.clone() });
    // Three runs of the model itself, and a step that verifies.
    let runs = drafted.summary.period - always.period;
    assert!((2.9..3.3).contains(&(runs / alone.step)), "{runs} of {}", alone.step);
    assert_eq!(drafted.summary.memory.weights, 2 * alone.memory.weights);
    let server = Server { chunk: Some(512), cached: 0.5, ..Server::default() };
    let beside = of(&config, Schedule { server, ..decode.clone() }).summary;
    let [ttft, tokens] = beside.beside.unwrap();
    assert!(beside.step > alone.step && (ttft / beside.step - 2.0).abs() < 1e-9);
    // A half of each prompt is found, so that two steps take all of it.
    assert!((tokens * beside.period / 1024.0 - 1.0).abs() < 1e-9);
    // As many tokens as asked for, of several prompts where one has fewer; whatever proposes has them, too.
    for (chunk, prompts) in [(100, 1), (1500, 1), (8192, 4)] {
        let server = Server { chunk: Some(chunk), ..Server::default() };
        let s = Schedule { server, ..decode.clone() };
        let rows = s.rows("forward", 8).unwrap();
        assert_eq!((rows.tokens, rows.sequences), (8 + chunk, 8 + prompts));
        let e = of(&config, s.clone());
        assert!(e.summary.mfu[0] < 0.8, "{chunk}: {:?}", e.summary.mfu);
        assert_eq!(e.summary.memory.kv, alone.memory.kv / 8 * (8 + prompts));
        let draft = Proposals { how: Speculation::Draft(3), draft: Some(config.clone()), acceptance: 1.0 };
        let server = Server { proposals: Some(draft), ..s.server.clone() };
        let drafted = of(&config, Schedule { server, ..s });
        assert_eq!(drafted.summary.memory.kv, 2 * e.summary.memory.kv);
        assert!(drafted.summary.period > 2.0 * e.summary.period, "{chunk}");
    }
    for (server, s) in [
        (Server { cached: 0.5, ..Server::default() }, decode.clone()),
        (
            Server { chunk: Some(5), ..Server::default() },
            Schedule { purpose: Purpose::Train, ..decode.clone() },
        ),
        (
            Server {
                proposals: Some(Proposals { how: Speculation::Module(1), draft: None, acceptance: 0.5 }),
                ..Server::default()
            },
            decode.clone(),
        ),
    ] {
        let line = Schedule { server, ..s }.mesh(&config).unwrap_err();
        assert!(line.starts_with("--") && !line.contains('\n'), "{line}");
    }
}

#[test]
fn a_module_is_divided_as_its_model_and_rows_of_experts_are_sent_as_told() {
    let file = "../shared/configs/deepseek-v3.json";
    if !Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file).is_file() {
        println!("skipped: {file} is not here");
        return;
    }
    let config = config(file);
    let ranks = Ranks { pp: 1, dp: 1, ep: 64, tp: 1 };
    let plain = Schedule { ranks, ..Schedule::of_one(Purpose::Decode, 512, 1024, DType::BF16) };
    let e = of(&config, plain.clone());
    let proposals = Some(Proposals { how: Speculation::Module(1), draft: None, acceptance: 0.8 });
    let server = Server { proposals, ..Server::default() };
    let with = of(&config, Schedule { server, ..plain.clone() });
    // One layer of 61 more, its experts divided by 64, and the matrix that joins both inputs.
    let more = with.summary.memory.weights - e.summary.memory.weights;
    assert!(more < e.summary.memory.weights / 30, "{more}");
    let sent = |e: &Estimate| e.summary.parts[2];
    let dispatch = |imbalance, dtype, by_nodes| {
        let dispatch = crate::schedule::Dispatch { imbalance, dtype, by_nodes };
        of(&config, Schedule { dispatch, ..plain.clone() })
    };
    let uneven = dispatch(2.0, None, false);
    assert!(sent(&uneven) > 1.5 * sent(&e) && uneven.summary.parts[0] > e.summary.parts[0]);
    assert_eq!(uneven.summary.memory, e.summary.memory);
    let narrow = dispatch(1.0, Some(DType::F8E4M3), false);
    let nodes = dispatch(1.0, Some(DType::F8E4M3), true);
    assert!(sent(&narrow) < sent(&e) && sent(&nodes) < sent(&narrow));
    assert!(e.summary.memory.buffers > 0);
}

/// Within a node a token goes once to each rank of its experts.
#[test]
fn ranks_of_one_node_are_sent_a_token_once() {
    let config = config("bench/shapes/qwen3-moe-tiny.json");
    for ep in [2, 8] {
        let ranks = Ranks { pp: 1, dp: 1, ep, tp: 1 };
        let s = Schedule { ranks, ..Schedule::of_one(Purpose::Decode, 4096, 256, DType::BF16) };
        let dispatch = crate::schedule::Dispatch { by_nodes: true, ..s.dispatch };
        let [all, once] = [s.clone(), Schedule { dispatch, ..s }].map(|s| of(&config, s).summary.parts[2]);
        assert!(once < 0.95 * all, "{ep}: {once} of {all}");
    }
}
