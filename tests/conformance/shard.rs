//! Models on meshes. Small ones are run on all ranks in lockstep and equal the unsharded model, forward, backward and over pages.

mod accumulated;
mod planned;

use astrai_builders::{Cache, Logits, Loss, ModelConfig, Program, Ranks, build, placements};
use astrai_engine::machine::{Kind, Machine};
use astrai_ir::ops::Op;
use astrai_ir::shard::STAGES;
use astrai_ir::{
    DType, Dim, Graph, Mesh, Placement, Precision, Sharding, Sizes, Stage, Tensor, eval, eval_stages, json,
};
use astrai_passes::{
    Adapter, Factors, GRAD, Gradients, MeshSharding, adapt, canonicalise, differentiate, differentiate_over,
    factor_placements, linear_layers, pipeline, shard,
};
use astrai_train::engine::{Plan, Recipe};
use astrai_train::settings::Settings;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

type Values = HashMap<String, Tensor>;

fn found(folder: &str, name: &str) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let places = [root.join("../shared").join(folder), root.join("tests").join(folder), root.join(folder)];
    let found = places.into_iter().map(|p| p.join(name)).find(|p| p.is_file());
    if found.is_none() {
        println!("skipped: {name} is not here");
    }
    found
}

/// Numbers from -1 to 1, the same at every run.
fn noise(seed: &str, shape: &[usize], scale: f64) -> Tensor {
    let mut s = seed.bytes().fold(7u64, |h, b| h.wrapping_mul(0x100000001b3) ^ u64::from(b));
    let mut next = || {
        s = s.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((s >> 33) % 20001) as f64 / 10000.0 - 1.0
    };
    let n: usize = shape.iter().product();
    Tensor::exact(DType::F32, shape, (0..n).map(|_| scale * next()).collect())
}

/// Values for the weights and states of a graph.
fn leaves(g: &Graph) -> Values {
    let mut values = Values::new();
    for n in g.nodes() {
        if let (Op::Weight(_) | Op::State(_), Some(name)) = (&n.op, n.op.leaf_name()) {
            let shape: Vec<usize> = n.ty().shape.iter().filter_map(Dim::size).collect();
            let scale = if shape.len() == 1 { 1.0 } else { 0.3 };
            values.insert(name.to_string(), noise(name, &shape, scale));
        }
    }
    values
}

fn ints(values: &[usize]) -> Tensor {
    Tensor::int(DType::I32, &[values.len()], values.iter().map(|&v| v as i64).collect())
}

/// Inputs of sequences of these lengths, the first of them with this number, so that every sequence has its own tokens.
fn inputs(lengths: &[usize], first: usize) -> Values {
    let token = |s: usize, t: usize| (37 * (first + s) + 11 * t + 5) % 320;
    let mut values = Values::new();
    let (mut ids, mut positions, mut targets, mut starts) = (vec![], vec![], vec![], vec![0]);
    for (s, &n) in lengths.iter().enumerate() {
        for t in 0..n {
            ids.push(token(s, t));
            positions.push(t);
            targets.push(if t + 1 == n { -100 } else { token(s, t + 1) as i64 });
        }
        starts.push(ids.len());
    }
    values.insert("targets".into(), Tensor::int(DType::I32, &[ids.len()], targets));
    values.insert("last".into(), ints(&starts[1..].iter().map(|s| s - 1).collect::<Vec<_>>()));
    values.insert("input_ids".into(), ints(&ids));
    values.insert("positions".into(), ints(&positions));
    values.insert("starts".into(), ints(&starts));
    values
}

/// What a rank holds of a tensor.
fn piece(x: &Tensor, placed: &Sharding, mesh: &Mesh, rank: usize) -> Tensor {
    let at = mesh.coordinates(rank);
    placed.iter().fold(x.clone(), |x, (name, p)| match p {
        Placement::Shard(shard) => {
            let i = mesh.axes.iter().position(|a| a.name == *name).unwrap();
            shard.slice(&x, at[i], mesh.axes[i].size)
        }
        _ => x,
    })
}

fn close(what: &str, got: &Tensor, want: &Tensor) {
    assert_eq!(got.shape, want.shape, "{what}");
    let most = want.reals().iter().fold(1e-3f64, |m, x| m.max(x.abs()));
    for (a, b) in got.reals().iter().zip(want.reals()) {
        assert!((a - b).abs() <= 1e-7 * most, "{what}: {a} instead of {b}");
    }
}

/// A model in pieces: the sequences of each data rank, the mesh of a stage's ranks, the graph of a rank of each stage and what
/// ranks hold of its leaves.
struct Pieces {
    mesh: Mesh,
    shards: usize,
    stages: Vec<(Graph, HashMap<String, Sharding>)>,
}

fn pieces(
    config: &ModelConfig,
    program: &Program,
    ranks: Ranks,
    trained: bool,
    adapter: Option<&Adapter>,
) -> Pieces {
    let mut graph = build(config, program).unwrap();
    let mesh = ranks.mesh(config).unwrap();
    let mut leaves = placements(config, &mesh, &graph);
    if let Some(adapter) = adapter {
        leaves.extend(factor_placements(&graph, adapter, &leaves).unwrap());
        graph = adapt(&graph, adapter).unwrap();
    }
    let shards = MeshSharding { leaves, mesh: mesh.clone(), stage: 0, trained };
    let stage = |i: usize| {
        let part = shards.stages().map_or(graph.clone(), |axis| pipeline(&graph, axis, i).unwrap());
        let mut part = shard(&part, &shards).unwrap();
        let of = |n: &astrai_ir::Node| Some((n.op.leaf_name()?.to_string(), n.sharding.clone()));
        let placed = part.nodes().iter().filter_map(of).collect();
        // What the dump says is what was made.
        let again = json::read_json(&json::write_json(&part)).unwrap();
        assert_eq!(again.to_string(), part.to_string());
        if trained {
            let over = shards.data_axes();
            part = differentiate_over(&part, "loss", Gradients::default(), &over).unwrap();
            part = canonicalise(&part).unwrap();
        }
        (part, placed)
    };
    let stages = (0..ranks.pp).map(stage).collect();
    let axes = mesh.axes.iter().filter(|a| a.name != STAGES).cloned().collect();
    Pieces { mesh: Mesh { axes }, shards: ranks.dp * ranks.ep, stages }
}

impl Pieces {
    /// Which data rank a rank is.
    fn share(&self, rank: usize) -> usize {
        let at = self.mesh.coordinates(rank);
        at[0] * self.mesh.axes[1].size + at[1]
    }

    /// What a rank of a stage holds of a leaf; `None`: it is not there.
    fn placed(&self, stage: usize, leaf: &str) -> Option<&Sharding> {
        self.stages[stage].1.get(leaf)
    }

    /// The outputs of every rank of each stage, for the tokens of each data rank.
    fn run(&self, weights: &Values, given: &[Values]) -> Vec<Vec<Vec<(String, Tensor)>>> {
        let stage = |i: usize| {
            let of_rank = |rank: usize| {
                let sharded = |(n, t): (&String, &Tensor)| {
                    Some((n.clone(), piece(t, self.placed(i, n)?, &self.mesh, rank)))
                };
                let weights = weights.iter().filter_map(sharded);
                weights.chain(given[self.share(rank)].clone()).collect::<Values>()
            };
            let all: Vec<Values> = (0..self.mesh.ranks()).map(of_rank).collect();
            Stage { graph: &self.stages[i].0, leaves: all, sizes: self.sizes(given) }
        };
        let stages: Vec<Stage> = (0..self.stages.len()).map(stage).collect();
        eval_stages(&stages, &self.mesh, Precision { exact: true }).unwrap()
    }

    /// The sizes of each rank.
    fn sizes(&self, given: &[Values]) -> Vec<Sizes> {
        // Rows of the ranks that exchange them: those of one dp rank, along ep.
        let ep = self.mesh.axes[1].size;
        let sizes = |rank: usize| {
            let group = self.share(rank) / ep * ep;
            let sum = |name: &str| given[group..group + ep].iter().map(|v| v[name].len() as u64).sum::<u64>();
            Sizes::from([
                ("tokens_ep".to_string(), sum("input_ids")),
                ("sequences_ep".to_string(), sum("starts") - ep as u64),
                ("sequences".to_string(), given[self.share(rank)]["starts"].len() as u64 - 1),
                ("context".to_string(), given[self.share(rank)].get("pages").map_or(0, |v| v.len() as u64)),
            ])
        };
        (0..self.mesh.ranks()).map(sizes).collect()
    }
}

/// Ranks along pp, dp, ep, tp.
const MESHES: [[usize; 4]; 11] = [
    [1, 1, 1, 2],
    [1, 1, 1, 4],
    [1, 2, 1, 1],
    [1, 2, 1, 2],
    [1, 1, 2, 1],
    [1, 1, 2, 2],
    [1, 2, 2, 2],
    [2, 1, 1, 1],
    [2, 1, 1, 2],
    [2, 2, 1, 1],
    [2, 1, 2, 1],
];

/// Golden configurations and meshes that go with them. Four ranks share two key heads.
fn each(check: impl Fn(&str, &ModelConfig, Ranks)) {
    for name in [
        "llama",
        "qwen3_moe",
        "mixtral",
        "olmo2",
        "phi3",
        "qwen2",
        "gemma2",
        "astrai_gqa",
        "deepseek_v2",
        "deepseek_v3",
        "astrai_mla_moe",
        "gpt_oss",
    ] {
        let Some(path) = found("golden", &format!("{name}/config.json")) else { continue };
        let config = ModelConfig::read(&path).unwrap().config;
        for [pp, dp, ep, tp] in MESHES {
            let ranks = Ranks { pp, dp, ep, tp };
            match ranks.mesh(&config) {
                Ok(_) => check(name, &config, ranks),
                Err(e) => println!("{name}: {e}"),
            }
        }
    }
}

#[test]
fn losses_and_gradients_on_ranks_are_those_of_the_whole() {
    each(|name, config, ranks| same_losses_and_gradients(name, config, ranks, None));
}

/// Factors of all linear layers, experts' included; with magnitudes where there are none.
#[test]
fn adapters_on_ranks_are_those_of_the_whole() {
    each(|name, config, ranks| {
        if !["llama", "qwen3_moe", "phi3", "deepseek_v3", "astrai_gqa"].contains(&name) {
            return;
        }
        let layers = linear_layers(&build(config, &Program::full(1, 1)).unwrap());
        let dora = !layers.keys().any(|m| m.contains(".experts."));
        let one = |m: &String| (m.clone(), Factors { rank: 2, scale: 0.5 });
        let adapter = Adapter { modules: layers.keys().map(one).collect(), dora };
        same_losses_and_gradients(name, config, ranks, Some(&adapter));
        // What ranks share of the factors counts once in the norm: its sum is over tp, where they have parts.
        let machine = Machine::new(Kind::Null, 1).unwrap();
        let recipe = Recipe { adapter: Some(adapter), ..Settings::of_sizes(2, 8).recipe() };
        let mesh = (&ranks.mesh(config).unwrap(), 0);
        let plan = Plan::on_ranks(config, &recipe, machine.backend(), astrai_runtime::Dump::None, mesh);
        let sums = planned::counts(&plan.unwrap().update).iter().map(|(_, n)| n).sum::<u64>();
        let apart = ranks.tp > 1 || ranks.pp > 1 || (ranks.ep > 1 && !dora);
        assert_eq!(sums > 0, apart, "{name} {ranks:?}");
    });
}

fn same_losses_and_gradients(name: &str, config: &ModelConfig, ranks: Ranks, adapter: Option<&Adapter>) {
    let lengths = [[3, 2], [4, 1], [2, 2], [1, 3]];
    let shares = ranks.dp * ranks.ep;
    let program = |n: u64| Program { logits: Logits::None, loss: Loss::Mean, ..Program::full(2 * n, 8) };
    let of_rank = pieces(config, &program(1), ranks, true, adapter);
    assert_eq!(of_rank.shards, shares);
    let mut global = build(config, &program(shares as u64)).unwrap();
    if let Some(adapter) = adapter {
        global = adapt(&global, adapter).unwrap();
    }
    let weights = leaves(&global);
    let global = differentiate(&global, "loss", Gradients::default()).unwrap();
    let all = inputs(&lengths[..shares].concat(), 0);
    let want: Vec<(String, Tensor)> = {
        let given = weights.clone().into_iter().chain(all).collect();
        let sizes = Sizes::from([("sequences".to_string(), 2 * shares as u64)]);
        eval(&global, &given, &sizes, Precision { exact: true }).unwrap()
    };
    let given: Vec<Values> = (0..shares).map(|i| inputs(&lengths[i], 2 * i)).collect();
    let got = of_rank.run(&weights, &given);
    for (label, want) in &want {
        let mut stages = 0;
        for (stage, ranks_of) in got.iter().enumerate() {
            for (rank, outs) in ranks_of.iter().enumerate() {
                let Some((_, got)) = outs.iter().find(|(n, _)| n == label) else { continue };
                let want = match label.strip_prefix(GRAD) {
                    Some(w) => piece(want, of_rank.placed(stage, w).unwrap(), &of_rank.mesh, rank),
                    None => want.clone(),
                };
                close(&format!("{name} {ranks:?}, stage {stage}, rank {rank}: {label}"), got, &want);
                stages += usize::from(rank == 0);
            }
        }
        assert!(stages > 0, "{name} {ranks:?}: no rank has {label}");
    }
}

#[test]
fn prefill_over_pages_on_ranks_is_that_of_the_whole() {
    each(|name, config, ranks| {
        let cache = Cache { page: 4, pages: 2, table: 1, windows: None };
        let program = Program { logits: Logits::Last, ..Program::paged(8, 2, cache) };
        let of_rank = pieces(config, &program, ranks, false, None);
        let global = build(config, &program).unwrap();
        let weights = leaves(&global);
        let shares = ranks.dp * ranks.ep;
        let given = |i: usize| {
            let mut values = inputs(&[3, 2], 2 * i);
            values.insert("slots".into(), ints(&[0, 1, 2, 4, 5]));
            values.insert("tables".into(), Tensor::int(DType::I32, &[2, 1], vec![0, 1]));
            values.insert("lens".into(), ints(&[3, 2]));
            if config.caches_latents() {
                values.insert("pages".into(), ints(&[0, 1]));
            }
            values.remove("targets");
            values
        };
        let given: Vec<Values> = (0..shares).map(given).collect();
        let got = of_rank.run(&weights, &given);
        for rank in 0..of_rank.mesh.ranks() {
            let values = weights.clone().into_iter().chain(given[of_rank.share(rank)].clone()).collect();
            let context = Sizes::from([("context".to_string(), 2)]);
            let want = eval(&global, &values, &context, Precision { exact: true }).unwrap();
            for (label, want) in &want {
                let has = |stage: &usize| got[*stage][rank].iter().any(|(n, _)| n == label);
                let stage = (0..ranks.pp).find(has).unwrap_or_else(|| panic!("{name} {ranks:?}: no {label}"));
                let (_, got) = got[stage][rank].iter().find(|(n, _)| n == label).unwrap();
                let want = match of_rank.placed(stage, label) {
                    Some(state) => piece(want, state, &of_rank.mesh, rank),
                    None => want.clone(),
                };
                close(&format!("{name} {ranks:?}, stage {stage}, rank {rank}: {label}"), got, &want);
            }
        }
    });
}
