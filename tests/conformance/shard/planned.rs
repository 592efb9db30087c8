//! Published models planned for one rank: their parts add up, and their collectives are counted.

use super::found;
use astrai_builders::{Logits, ModelConfig, Program, Ranks, build, placements};
use astrai_engine::machine::{Kind, Machine};
use astrai_ir::ops::Op;
use astrai_ir::{DType, Dim, Placement};
use astrai_passes::MeshSharding;
use astrai_runtime::{Options, compile};
use astrai_train::engine::{Plan, Recipe};
use astrai_train::settings::{Settings, Storage};
use std::collections::HashMap;

fn published(name: &str) -> Option<ModelConfig> {
    Some(ModelConfig::read(&found("configs", &format!("{name}.json"))?).unwrap().config)
}

/// A published model's prefill and training step on one rank: parameters, and (kind, count) of the collectives of both.
fn planned(config: &ModelConfig, ranks: Ranks) -> (astrai_runtime::Compiled, Plan) {
    planned_at(config, ranks, 0)
}

fn planned_at(config: &ModelConfig, ranks: Ranks, stage: usize) -> (astrai_runtime::Compiled, Plan) {
    let machine = Machine::new(Kind::Null, 1).unwrap();
    let program = Program { logits: Logits::Last, ..Program::full(1, 4096) };
    let graph = build(config, &program).unwrap();
    let mesh = ranks.mesh(config).unwrap();
    let shards =
        MeshSharding { leaves: placements(config, &mesh, &graph), mesh: mesh.clone(), stage, trained: false };
    let options = Options { storage: DType::BF16, shards, ..Options::default() };
    let prefill = compile(&graph, machine.backend(), &options).unwrap();
    let settings = Settings { batch: 1, seq: 4096, dtype: Storage::Bf16, ..Settings::default() };
    let recipe = settings.recipe();
    let plan = Plan::on_ranks(config, &recipe, machine.backend(), astrai_runtime::Dump::None, (&mesh, stage))
        .unwrap();
    (prefill, plan)
}

pub(super) fn counts(program: &astrai_runtime::Compiled) -> Vec<(&'static str, u64)> {
    program.collectives().unwrap().into_iter().map(|(kind, [n, _])| (kind, n)).collect()
}

/// Elements of a rank's weights, and of those sharded along `axis`.
fn parameters(program: &astrai_runtime::Compiled, axis: &str) -> [u64; 2] {
    let mut seen = HashMap::new();
    for n in program.graph.nodes() {
        if let Op::Weight(w) = &n.op {
            let elements = w.ty.shape.iter().filter_map(Dim::size).product::<usize>() as u64;
            let sharded = n.sharding.iter().any(|(a, p)| a == axis && matches!(p, Placement::Shard(_)));
            seen.insert(w.name.clone(), (elements, sharded));
        }
    }
    let sharded = seen.values().filter(|(_, sharded)| *sharded).map(|(n, _)| n).sum();
    [seen.values().map(|(n, _)| n).sum(), sharded]
}

#[test]
fn a_dense_layer_meets_twice_forward_and_twice_backward() {
    let Some(config) = published("llama-3.1-405b") else { return };
    let layers = 126;
    let (prefill, plan) = planned(&config, Ranks { pp: 1, dp: 2, ep: 1, tp: 8 });
    // Two sums a layer, one of the embedding, and the logits joined.
    assert_eq!(counts(&prefill), [("all_gather", 1), ("all_reduce", 2 * layers + 1)]);
    let [rank, sharded] = parameters(&prefill, "tp");
    assert_eq!(8 * sharded + (rank - sharded), config.parameter_count());
    let [hidden, tokens] = [config.hidden_size as u64, 4096];
    // Of two bytes an element, of the embedding four, around a ring of 8: 2 * 7/8.
    let [_, sent] = prefill.collectives().unwrap()["all_reduce"];
    assert_eq!(sent, (2 * layers * 2 + 4) * (tokens * hidden) * 2 * 7 / 8);
    let cost = prefill.cost().unwrap();
    assert!((2 * rank..2 * rank + (1 << 28)).contains(&cost.weight_bytes), "{}", cost.weight_bytes);
    assert_eq!(cost.kv_bytes_per_token, layers * 2 * 128 * 2, "one of eight key heads");
    // A few rows as wide as the stream, four bytes at most; the MLP's are narrower on a rank.
    assert!(cost.arena_bytes < 4 * tokens * 6 * hidden, "{} bytes of arena", cost.arena_bytes);
    // Backward: what q, k, v and gate, up send back; each weight's gradient over dp; forward: the embedding, the loss over
    // the vocabulary (three) and the batch.
    let weights = plan.weights.len() as u64;
    println!("{} weights, {:?}", weights, counts(&plan.grad));
    let sums = 4 * layers + 1 + 3 + 1 + weights;
    let [total, _] = plan.grad.collectives().unwrap()["all_reduce"];
    assert!((sums..=sums + 1).contains(&total), "{total} sums, {sums} expected");
    assert_eq!(counts(&plan.update), [("all_reduce", 1)]);
    // Accumulated gradients meet once a step: each weight's, and the norm over tp.
    let recipe = Recipe { accumulate: true, storage: DType::BF16, ..Settings::of_sizes(1, 4096).recipe() };
    let (machine, mesh) =
        (Machine::new(Kind::Null, 1).unwrap(), Ranks { pp: 1, dp: 2, ep: 1, tp: 8 }.mesh(&config));
    let at = (&mesh.unwrap(), 0);
    let summed = Plan::on_ranks(&config, &recipe, machine.backend(), astrai_runtime::Dump::None, at).unwrap();
    assert_eq!(summed.grad.collectives().unwrap()["all_reduce"][0], total - weights);
    assert_eq!(counts(&summed.update), [("all_reduce", weights + 1)]);
}

#[test]
fn a_layer_of_experts_exchanges_its_rows_twice() {
    let Some(config) = published("qwen3-235b-a22b") else { return };
    let layers = 94;
    let (prefill, plan) = planned(&config, Ranks { pp: 1, dp: 1, ep: 8, tp: 4 });
    assert_eq!(
        counts(&prefill),
        [("all_gather", 1), ("all_reduce", 2 * layers + 1), ("all_to_all", 2 * layers)]
    );
    let [_, sharded] = parameters(&prefill, "ep");
    let experts = layers * 3 * 128 * (config.hidden_size as u64) * 1536;
    assert_eq!(sharded, experts / 8 / 4);
    let [_, sent] = prefill.collectives().unwrap()["all_to_all"];
    assert_eq!(sent, 2 * layers * (8 * 4096 * config.hidden_size as u64) * 2 * 7 / 8);
    let [exchanges, _] = plan.grad.collectives().unwrap()["all_to_all"];
    assert_eq!(exchanges, 4 * layers);
}

#[test]
fn stages_of_a_pipeline_have_all_layers_and_send_the_stream() {
    let Some(config) = published("llama-3.2-1b") else { return };
    let (pp, hidden, tokens) = (4, config.hidden_size as u64, 4096);
    let mut total = 0;
    for stage in 0..pp {
        let (prefill, plan) = planned_at(&config, Ranks { pp, dp: 1, ep: 1, tp: 2 }, stage);
        let [rank, sharded] = parameters(&prefill, "tp");
        total += 2 * sharded + (rank - sharded);
        let sent = |p: &astrai_runtime::Compiled| p.collectives().unwrap().get("send").copied();
        let (last, stream) = (stage + 1 == pp, tokens * hidden * 2);
        assert_eq!(sent(&prefill), (!last).then_some([1, stream]), "stage {stage}");
        // The stream forward, its cotangent back, and between the first and the last the gradient of the tied embedding.
        let tied = stage == 0 || last;
        let rows = config.vocab_size as u64 / 2;
        let [count, bytes] = sent(&plan.grad).unwrap();
        let streams = u64::from(!last) + u64::from(stage > 0);
        assert_eq!(
            [count, bytes],
            [streams + u64::from(tied), streams * stream + u64::from(tied) * rows * hidden * 4]
        );
        assert_eq!(counts(&plan.update), [("all_reduce", 1)], "the norm, over tp and pp: stage {stage}");
        let cost = prefill.cost().unwrap();
        assert_eq!(
            cost.kv_bytes_per_token,
            4 * 2 * (config.kv_heads * config.head_dim) as u64,
            "no pages, a quarter of 16 layers"
        );
    }
    // The embedding is the head, too: two stages have it.
    assert_eq!(total, config.parameter_count() + (config.vocab_size * config.hidden_size) as u64);
}

#[test]
fn what_does_not_divide_is_refused_by_its_key() {
    let Some(path) = found("golden", "mixtral/config.json") else { return };
    let config = ModelConfig::read(&path).unwrap().config;
    let refused = |dp, ep, tp| Ranks { pp: 1, dp, ep, tp }.mesh(&config).unwrap_err();
    assert!(refused(1, 1, 3).starts_with("num_attention_heads 4 does not divide by tp=3"));
    assert!(refused(1, 3, 1).contains("num_local_experts") && refused(1, 3, 1).contains("ep=3"));
    let llama = ModelConfig { model_type: "llama", ..config.clone() };
    assert!(Ranks { pp: 1, dp: 1, ep: 1, tp: 4 }.mesh(&llama).is_ok());
    let odd = ModelConfig { kv_heads: 3, heads: 12, ..config };
    assert!(
        Ranks { pp: 1, dp: 1, ep: 1, tp: 4 }.mesh(&odd).unwrap_err().starts_with("num_key_value_heads 3")
    );
}

/// The command: a rank's share in the summary, placements in the dump, and one line for what cannot be.
#[test]
fn the_command_plans_one_rank() {
    let Some(path) = found("golden", "qwen3_moe/config.json") else { return };
    let run = |args: &[&str]| {
        let out = std::process::Command::new(env!("CARGO_BIN_EXE_astrai"))
            .arg("compile")
            .arg(&path)
            .args(args)
            .output();
        let out = out.unwrap();
        let text = |b: Vec<u8>| String::from_utf8(b).unwrap();
        (out.status.code(), text(out.stdout), text(out.stderr))
    };
    let (code, out, err) = run(&["--mesh", "tp=2,ep=2", "--batch", "2", "--seq", "8", "--json"]);
    assert_eq!(code, Some(0), "{err}");
    let summary: serde_json::Value = serde_json::from_str(&out).unwrap();
    let of = |s: &serde_json::Value, key: &str| s[key].as_u64().unwrap();
    assert!(of(&summary, "rank_parameters") < of(&summary, "parameters") / 2, "{summary}");
    assert_eq!(summary["collectives"]["all_to_all"]["count"], 4, "two layers of experts: {summary}");
    let (_, out, _) = run(&["--mesh", "tp=2", "--dump-after", "shard"]);
    assert!(out.contains("@ tp=shard(0)") && out.contains("all_reduce"), "{out}");
    let (_, out, err) = run(&["--mesh", "tp=2,dp=2", "--batch", "2", "--seq", "8", "--for", "train"]);
    assert!(out.contains("all reduce"), "{out}{err}");
    let (_, out, _) = run(&["--mesh", "pp=2", "--stage", "1", "--dump-after", "pipeline"]);
    assert!(out.contains("recv") && out.contains("pp=stage(1)") && !out.contains("embed_tokens"), "{out}");
    let (_, out, _) = run(&["--mesh", "pp=2", "--stage", "1"]);
    assert!(out.starts_with("stage               1 of 2, from 0"), "{out}");
    let Some(gemma) = found("golden", "gemma2/config.json") else { return };
    let args = ["compile", "--mesh", "pp=2", "--dump-after", "pipeline"].map(std::ffi::OsStr::new);
    let first =
        std::process::Command::new(env!("CARGO_BIN_EXE_astrai")).args(args).arg(gemma).output().unwrap();
    let first = String::from_utf8(first.stdout).unwrap();
    assert!(
        first.contains("send") && !first.contains("model.norm.weight"),
        "1 + w is made where it is used: {first}"
    );
    for (args, line) in [
        (&["--mesh", "pp=9"][..], "num_hidden_layers 3 are fewer than pp=9"),
        (&["--mesh", "pp=2", "--stage", "2"], "--stage 2: --mesh has 2 along pp"),
        (&["--mesh", "tp=3"], "num_attention_heads 4 does not divide by tp=3"),
        (&["--mesh", "dp=2"], "--batch 1 does not divide by the 2 ranks"),
        (&["--mesh", "tp=2", "--device", "cpu"], "planned only; use --device null"),
    ] {
        let (code, _, err) = run(args);
        assert!(code == Some(1) && err.contains(line) && err.lines().count() == 1, "{args:?}: {err}");
    }
    for bad in ["tp", "zp=2", "tp=2,tp=2", "tp=0"] {
        assert_eq!(run(&["--mesh", bad]).0, Some(2), "{bad}");
    }
}
