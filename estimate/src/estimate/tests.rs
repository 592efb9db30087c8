//! Published shapes: parameters, weights, keys and values; ranks' sums beside the whole.

use super::*;
use crate::hardware::Kernels;
use crate::schedule::{saved, stage};
use astrai_builders::Ranks;
use astrai_engine::Machine;
use astrai_ir::DType;
use astrai_ir::ops::Op;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// File, parameters, layers and elements of a layer's keys and values of a token: by the published configurations.
const PUBLISHED: [(&str, u64, u64, u64); 18] = [
    ("llama-3.1-8b", 8_030_261_248, 32, 2 * 8 * 128),
    ("llama-3.1-405b", 405_853_388_800, 126, 2 * 8 * 128),
    ("llama-3.2-1b", 1_235_814_400, 16, 2 * 8 * 64),
    ("mistral-7b-v0.1", 7_241_732_096, 32, 2 * 8 * 128),
    ("mixtral-8x7b-v0.1", 46_702_792_704, 32, 2 * 8 * 128),
    ("qwen2.5-0.5b", 494_032_768, 24, 2 * 2 * 64),
    ("qwen3-8b", 8_190_735_360, 36, 2 * 8 * 128),
    ("qwen3-32b", 32_762_123_264, 64, 2 * 8 * 128),
    ("qwen3-30b-a3b", 30_532_122_624, 48, 2 * 4 * 128),
    ("qwen3-235b-a22b", 235_093_634_560, 94, 2 * 4 * 128),
    ("deepseek-v2-lite", 15_706_484_224, 27, 512 + 64),
    ("deepseek-v3", 671_026_404_352, 61, 512 + 64),
    ("gemma-2-2b", 2_614_341_888, 26, 2 * 4 * 256),
    ("gemma-3-1b", 999_885_952, 26, 2 * 256),
    ("phi-3-mini", 3_821_079_552, 32, 2 * 32 * 96),
    ("olmo-2-1b", 1_484_916_736, 16, 2 * 16 * 128),
    ("glm-4-9b", 9_400_279_040, 40, 2 * 2 * 128),
    ("gpt-oss-120b", 116_829_156_672, 36, 2 * 8 * 64),
];

fn config(name: &str) -> Option<ModelConfig> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/configs");
    let path: PathBuf = folder.join(format!("{name}.json"));
    if !path.is_file() {
        println!("skipped: {name} is not here");
        return None;
    }
    Some(ModelConfig::read(&path).unwrap().config)
}

fn h100() -> (Machine, Hardware) {
    let h100 = Hardware::open("h100-sxm").unwrap();
    (h100.planner(), h100)
}

#[test]
fn parameters_weights_and_kv_are_the_published_ones() {
    let (machine, h100) = h100();
    for (name, parameters, layers, kv) in PUBLISHED {
        let Some(config) = config(name) else { continue };
        let schedule = Schedule::of_one(Purpose::Decode, 2, 2048, DType::BF16);
        let e = estimate(&config, &schedule, &h100, machine.backend()).unwrap();
        assert_eq!(e.parameters, parameters, "{name}");
        let m = e.summary.memory;
        assert_eq!(m.kv_per_token, 2 * layers * kv, "{name}");
        // Windows are held with a step of prefill, wherever they begin: 128 tokens and 512 in 42 pages of 16.
        let windows: Vec<u64> =
            config.layers.iter().filter_map(|l| Some(l.attention.window? as u64)).collect();
        let held = windows.iter().max().map_or(0, |w| ((w + 512) / 16 + 2) * 16).min(2048);
        let whole = layers - windows.len() as u64;
        assert_eq!(m.kv, 4 * kv * (2048 * whole + held * windows.len() as u64), "{name}");
        // A prompt leaves in pages what decode finds there, latents not as the keys that are made of them.
        let mesh = schedule.mesh(&config).unwrap();
        let prompts = Schedule { purpose: Purpose::Prefill, ..schedule };
        let left = stage(&config, &prompts, machine.backend(), (&mesh, 0), 2).unwrap().memory;
        assert_eq!((left.kv, left.kv_per_token), (m.kv, m.kv_per_token), "{name}");
        // A GPU's kernels read weights as they lie, a tied embedding once; router corrections are no parameters.
        let of = m.weights as f64 / (2 * parameters) as f64;
        assert!((1.0..1.001).contains(&of), "{name}: {} bytes, {of}", m.weights);
        let sum: f64 = e.ranks[0].rows.iter().map(|r| r.seconds).sum();
        assert!((sum / e.summary.step - 1.0).abs() < 1e-9 && e.summary.step > 0.0, "{name}");
    }
}

/// Elements of each weight that a rank of each stage holds.
fn held(config: &ModelConfig, s: &Schedule) -> Vec<BTreeMap<String, u64>> {
    let (machine, _) = h100();
    let of = |stage: &Stage| {
        let weights = stage.runs[0].planned.graph.nodes().iter().filter_map(|n| match &n.op {
            Op::Weight(w) => Some((w.name.clone(), w.ty.elements().size().unwrap() as u64)),
            _ => None,
        });
        weights.collect()
    };
    stages(config, s, machine.backend()).unwrap().iter().map(of).collect()
}

#[test]
fn sums_over_ranks_are_the_whole_and_what_is_replicated() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (name, ranks) in [
        ("tests/golden/llama", Ranks { pp: 2, dp: 2, ep: 1, tp: 2 }),
        ("../shared/golden/qwen3_moe", Ranks { pp: 1, dp: 1, ep: 2, tp: 2 }),
    ] {
        let file = root.join("..").join(name).join("config.json");
        if !file.is_file() {
            println!("skipped: {} is not here", file.display());
            continue;
        }
        let config = ModelConfig::read(&file).unwrap().config;
        let alone = Schedule::of_one(Purpose::Prefill, 4, 16, DType::F32);
        let whole = &held(&config, &alone)[0];
        let sharded = Schedule { ranks, ..alone };
        let mesh = sharded.mesh(&config).unwrap();
        let stages = held(&config, &sharded);
        for (weight, all) in whole {
            // A weight lies on the stages that use it, once for every rank there, or in shares.
            let on: Vec<u64> = stages.iter().filter_map(|s| s.get(weight)).copied().collect();
            assert!(!on.is_empty(), "{name}: {weight} is nowhere");
            let ranks = (mesh.ranks() / stages.len()) as u64;
            for share in on {
                let copies = share * ranks;
                assert!(
                    copies.is_multiple_of(*all) && copies / all <= ranks,
                    "{name}: {weight}: {share} of {all} elements"
                );
            }
        }
        let sum: u64 =
            stages.iter().flat_map(|s| s.values()).sum::<u64>() * (mesh.ranks() / stages.len()) as u64;
        assert!(sum >= whole.values().sum::<u64>(), "{name}");
    }
}

/// What ranks share by ZeRO is there once: dense weights over all ranks, experts over the ranks that have the same ones.
#[test]
fn shared_states_of_all_ranks_are_those_of_one() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/shapes/qwen3-moe-tiny.json");
    let config = ModelConfig::read(&file).unwrap().config;
    let (machine, _) = h100();
    let alone = Schedule { zero: 3, ..Schedule::of_one(Purpose::Train, 4, 16, DType::BF16) };
    let memory = |s: &Schedule| stages(&config, s, machine.backend()).unwrap()[0].memory;
    let parts = |m: Memory| [m.weights, m.gradients, m.optimizer];
    let whole = parts(memory(&alone));
    for (dp, ep) in [(1, 4), (2, 2), (4, 1)] {
        let s = Schedule { ranks: Ranks { dp, ep, ..alone.ranks }, ..alone.clone() };
        for (sum, whole) in parts(memory(&s)).map(|n| 4 * n).into_iter().zip(whole) {
            assert!((whole..whole + 16).contains(&sum), "dp={dp} ep={ep}: {sum} of {whole} bytes");
        }
    }
}

/// Rows of a stage are all that it does in a step: every piece, the update once, what ZeRO 3 gathers.
#[test]
fn rows_of_a_stage_are_its_time_at_work() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/shapes/qwen3-0.6b.json");
    let config = ModelConfig::read(&file).unwrap().config;
    let (machine, h100) = h100();
    let hardware = Hardware { kernels: Kernels { step: 1e-4, ..h100.kernels.clone() }, ..h100 };
    let one = Schedule::of_one(Purpose::Train, 16, 64, DType::BF16);
    let sent = |r: &Rank| r.rows.iter().filter(|r| r.work.is_sent()).map(|r| r.launches).sum::<u64>();
    for (pp, dp, micro, zero, interleave) in
        [(1, 1, 8, 0, 1), (1, 4, 1, 3, 1), (2, 2, 4, 3, 1), (2, 2, 4, 2, 1), (2, 2, 4, 1, 1), (2, 1, 8, 0, 7)]
    {
        let s = Schedule { ranks: Ranks { pp, dp, ..one.ranks }, micro, zero, interleave, ..one.clone() };
        let e = estimate(&config, &s, &hardware, machine.backend()).unwrap();
        let mut slowest = 0.0f64;
        for r in &e.ranks {
            let work = r.piece() * micro as f64 + r.update();
            let sum: f64 = r.rows.iter().map(|row| row.seconds).sum();
            assert!((sum / work - 1.0).abs() < 1e-9, "pp={pp} dp={dp}: {sum} of {work} s");
            let gathered = r.rows.iter().filter(|row| row.work.origin == "weights").map(|row| row.launches);
            assert_eq!(gathered.sum::<u64>(), if zero == 3 { 2 * micro } else { 0 });
            let launched: f64 = r.launches.iter().map(|l| r.rows[l.row].time.total()).sum();
            let plain = r.piece() + r.update();
            assert!(interleave > 1 || (launched / plain - 1.0).abs() < 1e-9, "{launched} of {plain} s");
            slowest = slowest.max(work);
        }
        let timeline = crate::report::timeline(&e).unwrap();
        let ends = timeline["traceEvents"]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|event| Some((event["ts"].as_f64()? + event["dur"].as_f64()?) / 1e6));
        let end = ends.fold(0.0, f64::max);
        assert!((0.99..1.0 + 1e-9).contains(&(end / e.summary.step)), "pp={pp}: {end} of {}", e.summary.step);
        if interleave > 1 {
            // Of the first stage's activations there are (1 + (p - 1) / (p v)) times as many: in the place of two pieces two and a seventh.
            let plain = Schedule { interleave: 1, ..s.clone() };
            let plain = estimate(&config, &plain, &hardware, machine.backend()).unwrap();
            let kept: u64 =
                saved(&stages(&config, &s, machine.backend()).unwrap()[0].runs[0].planned.plan, 28)
                    .iter()
                    .sum();
            let more = e.ranks[0].memory.activations - plain.ranks[0].memory.activations;
            assert_eq!(more, kept / interleave);
            assert_eq!(sent(&e.ranks[0]), interleave * sent(&plain.ranks[0]));
        }
        let busy = e.summary.step * (1.0 - e.summary.bubble);
        assert!((slowest..1.2 * slowest).contains(&(busy + 1e-9)), "{busy} of {slowest}");
    }
}

/// What data-parallel ranks send of gradients in a step, in all-reduces of all of them: one, however many pieces there are; where gradients are
/// shared half of one with each piece, and where weights are not shared half of one with the update.
#[test]
fn gradients_are_summed_once_a_step() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/shapes/qwen3-moe-tiny.json");
    let config = ModelConfig::read(&file).unwrap().config;
    let (machine, h100) = h100();
    let base = Schedule::of_one(Purpose::Train, 32, 64, DType::BF16);
    for (dp, ep) in [(4, 1), (2, 2)] {
        let ranks = Ranks { dp, ep, ..base.ranks };
        let sent = |micro, zero| {
            let s = Schedule { ranks, micro, zero, ..base.clone() };
            let e = estimate(&config, &s, &h100, machine.backend()).unwrap();
            let mut sums = [0; 2];
            for r in e.ranks[0].rows.iter().filter(|r| r.work.origin != "weights") {
                for m in r.work.messages.iter().filter(|m| m.operator != "all_to_all") {
                    let bytes = m.traffic.bytes.size().unwrap_or(0) as u64;
                    let of_norm = bytes == 4;
                    sums[usize::from(r.program == "update")] +=
                        if of_norm { 0 } else { m.traffic.sent(bytes) * r.launches };
                }
            }
            sums
        };
        let [one, none] = sent(1, 0);
        assert!(one > 0 && none == 0, "dp={dp} ep={ep}: {one} and {none} bytes");
        for (micro, zero, pieces, update) in [
            (1, 1, 1.0, 0.0),
            (4, 0, 0.0, 1.0),
            (4, 1, 0.0, 1.0),
            (1, 2, 0.5, 0.5),
            (4, 2, 2.0, 0.5),
            (4, 3, 2.0, 0.0),
        ] {
            let of = sent(micro, zero).map(|bytes| bytes as f64 / one as f64);
            let near = of.into_iter().zip([pieces, update]).all(|(a, b): (f64, f64)| (a - b).abs() < 1e-3);
            assert!(near, "dp={dp} ep={ep}, {micro} pieces, ZeRO {zero}: {of:?}");
        }
    }
}

#[test]
fn the_roofline_is_never_beaten_and_ranks_take_less() {
    let Some(config) = config("qwen3-8b") else { return };
    let (machine, h100) = h100();
    let one = Schedule::of_one(Purpose::Decode, 1, 1024, DType::BF16);
    let e = estimate(&config, &one, &h100, machine.backend()).unwrap();
    // 15.1 GB of weights that a token reads, at 3.35 TB/s.
    assert!(e.summary.step > 4.5e-3 && e.summary.step < 9e-3, "{} s", e.summary.step);
    let eight = Schedule { ranks: Ranks { tp: 8, ..one.ranks }, ..one.clone() };
    let shared = estimate(&config, &eight, &h100, machine.backend()).unwrap();
    assert!(shared.summary.step < e.summary.step / 2.0 && shared.summary.parts[2] > 0.0);
    for wrong in [
        Schedule { ranks: Ranks { tp: 3, ..one.ranks }, ..one.clone() },
        Schedule { ranks: Ranks { dp: 2, ..one.ranks }, ..one.clone() },
        Schedule { ranks: Ranks { ep: 2, ..one.ranks }, batch: 2, ..one.clone() },
        Schedule { zero: 1, ..one.clone() },
        Schedule { micro: 2, ..one.clone() },
    ] {
        let line = estimate(&config, &wrong, &h100, machine.backend()).unwrap_err();
        assert!(!line.contains('\n') && line.contains(['=', '-']), "{line}");
    }
}

#[test]
fn sequences_of_several_lengths_read_and_hold_what_there_is() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/shapes/qwen3-0.6b.json");
    let config = ModelConfig::read(&file).unwrap().config;
    let (machine, h100) = h100();
    let of = |seq, lengths: Option<&str>| {
        let lengths = lengths.map(|text| crate::lengths::Lengths::parse(text).unwrap());
        let s = Schedule { lengths, ..Schedule::of_one(Purpose::Decode, 8, seq, DType::BF16) };
        estimate(&config, &s, &h100, machine.backend()).unwrap().summary
    };
    // Lengths of 160, 480, .. 2400.
    let [short, mixed, long] = [of(1280, None), of(2400, Some("uniform:1..2560")), of(2400, None)];
    assert!((mixed.memory.kv as f64 / short.memory.kv as f64 - 1.0).abs() < 0.01);
    assert!(
        short.step * 0.99 < mixed.step && mixed.step < long.step,
        "{} {} {}",
        short.step,
        mixed.step,
        long.step
    );
}
