//! Published shapes on the null device: planned whole and their kernels written, on a machine that could never hold them.

use astrai_builders::config::{MlpSpec, NormPlacement, QkNorm};
use astrai_builders::{Cache, Logits, Loss, ModelConfig, Program, build, registry};
use astrai_engine::machine::{Kind, Machine};
use astrai_ir::DType;
use astrai_runtime::{Dump, Options, compile};
use astrai_train::engine::{Plan, Recipe};
use astrai_train::settings::{Settings, Storage};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// File, parameters as an independent implementation counts them, layers.
const SHAPES: [(&str, u64, u64); 16] = [
    ("llama-3.1-8b", 8_030_261_248, 32),
    ("llama-3.1-405b", 405_853_388_800, 126),
    ("llama-3.2-1b", 1_235_814_400, 16),
    ("mistral-7b-v0.1", 7_241_732_096, 32),
    ("mixtral-8x7b-v0.1", 46_702_792_704, 32),
    ("qwen2.5-0.5b", 494_032_768, 24),
    ("qwen3-8b", 8_190_735_360, 36),
    ("qwen3-32b", 32_762_123_264, 64),
    ("olmo-2-1b", 1_484_916_736, 16),
    ("glm-4-9b", 9_400_279_040, 40),
    ("phi-3-mini", 3_821_079_552, 32),
    ("gemma-2-2b", 2_614_341_888, 26),
    ("gemma-3-1b", 999_885_952, 26),
    ("qwen3-30b-a3b", 30_532_122_624, 48),
    ("qwen3-235b-a22b", 235_093_634_560, 94),
    ("gpt-oss-120b", 116_829_156_672, 36),
];

fn config(name: &str) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let places = [root.join("configs"), root.join("../shared/configs")];
    let found = places.into_iter().map(|p| p.join(format!("{name}.json"))).find(|p| p.is_file());
    if found.is_none() {
        println!("skipped: {name} is not here");
    }
    found
}

#[test]
fn published_shapes_are_planned_in_seconds() {
    let machine = Machine::new(Kind::Null, 1).unwrap();
    for (name, parameters, layers) in SHAPES {
        let Some(path) = config(name) else { continue };
        let config = ModelConfig::read(&path).unwrap().config;
        assert_eq!(config.parameter_count(), parameters, "{name}");
        for (tokens, logits) in [(8192, Logits::Last), (1, Logits::All)] {
            let started = Instant::now();
            let program =
                Program { tokens, sequences: 1, span: tokens, logits, loss: Loss::None, cache: None };
            let graph = build(&config, &program).unwrap();
            let options = Options { storage: DType::BF16, ..Options::default() };
            let program = compile(&graph, machine.backend(), &options).unwrap();
            let seconds = started.elapsed().as_secs_f64();
            let cost = program.cost().unwrap();
            let launches = program.plan.bodies.iter().map(|b| b.steps.len()).max().unwrap_or(0) as u64;
            let outside = cost.launches;
            println!(
                "{name} {tokens} tokens: {seconds:.2} s, {launches} launches a layer, arena {:.3} GB",
                cost.arena_bytes as f64 / 1e9
            );
            let stage = program.report.stages.iter().find(|s| s.name == "saturate").unwrap();
            let [_, terms, _] = program.report.searched[0].size;
            println!("  saturate: {:.2} ms, {terms} terms", stage.seconds * 1e3);
            assert!(program.report.searched.iter().all(|s| s.saturated && s.size[1] <= 20_000), "{name}");
            assert!(seconds < 10.0, "{name}: {seconds} s");
            let most = if idle(&config) > 0 { 11 } else { 7 + norms_apart(&config) };
            assert!(launches <= most, "{name}: {launches} launches a layer");
            assert!(outside <= layers * launches + 8, "{name}: {outside} launches");
            weights_are_whole(name, &config, cost.weight_bytes, parameters);
            arena_is_sane(name, &config, cost.arena_bytes, tokens);
            // Two operations a weight and token at least, but for the embedding and the head.
            let hidden = config.hidden_size as f64;
            let inner = (parameters - idle(&config)) as f64 - 2.0 * config.vocab_size as f64 * hidden;
            assert!(cost.flops as f64 >= 1.9 * inner * tokens as f64, "{name}: {} operations", cost.flops);
        }
    }
}

/// Rows of the published shapes' own table: file, parameters.
fn table() -> Vec<(PathBuf, u64)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/configs");
    let Ok(text) = std::fs::read_to_string(folder.join("README.md")) else {
        println!("skipped: the table of published shapes is not here");
        return vec![];
    };
    let row = |line: &str| {
        let (file, count) = line.strip_prefix("| `")?.strip_suffix(" |")?.split_once("` | ")?;
        Some((folder.join(file), count.replace(',', "").parse().ok()?))
    };
    let rows: Vec<_> = text.lines().filter_map(row).collect();
    assert!(rows.len() >= 18, "{rows:?}");
    rows
}

#[test]
fn every_shape_of_the_table_decodes_from_pages() {
    let machine = Machine::new(Kind::Null, 1).unwrap();
    for (path, parameters) in table() {
        let text = std::fs::read_to_string(&path).unwrap();
        let raw: serde_json::Value = serde_json::from_str(&text).unwrap();
        if registry::find(raw["model_type"].as_str().unwrap()).is_none() {
            println!("skipped: {} is of no type that is built", path.display());
            continue;
        }
        let config = ModelConfig::read(&path).unwrap().config;
        assert_eq!(config.parameter_count(), parameters, "{}", path.display());
        let started = Instant::now();
        let cache = Cache { page: Cache::PAGE, pages: 8 * 256, table: 256, windows: None };
        let graph = build(&config, &Program::paged(8, 8, cache)).unwrap();
        let options = Options { storage: DType::BF16, ..Options::default() };
        let program = compile(&graph, machine.backend(), &options).unwrap();
        assert!(program.plan.regions.iter().all(|r| r.form().has_kernel()), "{}", path.display());
        let (cost, seconds) = (program.cost().unwrap(), started.elapsed().as_secs_f64());
        let name = path.file_stem().unwrap().display();
        println!("{name}: {seconds:.2} s, {} kv bytes a token", cost.kv_bytes_per_token);
        assert!(seconds < 10.0, "{name}: {seconds} s");
    }
}

#[test]
fn training_of_published_shapes_is_planned() {
    let machine = Machine::new(Kind::Null, 1).unwrap();
    for (name, parameters, layers) in SHAPES {
        let Some(path) = config(name) else { continue };
        let config = ModelConfig::read(&path).unwrap().config;
        let settings = Settings { batch: 8, seq: 4096, dtype: Storage::Bf16, ..Settings::default() };
        let recipe = settings.recipe();
        let plan = Plan::new(&config, &recipe, machine.backend(), Dump::None).unwrap();
        let [weights, states, arenas] = plan.memory().unwrap();
        assert_eq!(weights, 2 * parameters, "{name}");
        // A gradient, two moments and a master weight, four bytes each.
        assert_eq!(states, 16 * parameters, "{name}");
        // What a micro-batch adds to a layer's gradients waits for no other layer; the embedding's waits for both of its readers.
        let short = Settings { batch: 1, seq: 128, ..settings }.recipe();
        let [once, summed] = [false, true].map(|accumulate| {
            let recipe = Recipe { accumulate, ..short.clone() };
            Plan::new(&config, &recipe, machine.backend(), Dump::None).unwrap().grad.arena_bytes().unwrap()
        });
        let most = once + 4 * parameters / 10 + 8 * (config.vocab_size * config.hidden_size) as u64;
        assert!(summed < most, "{name}: {summed} bytes of values, {once} without sums");
        let kernels = plan.grad.kernels.len() + plan.update.kernels.len();
        let launches = [&plan.grad, &plan.update].map(|p| p.plan.launches() as u64);
        println!("{name}: {kernels} kernels, launches {launches:?}, arenas {:.3} GB", arenas as f64 / 1e9);
        let kinds = config.layer_kinds().0.len();
        assert!(kernels < 60 + 50 * kinds, "{name}: {kernels} kernels, however deep the model");
        let first = &config.layers[0];
        let behind = if first.norms == NormPlacement::Pre { 0 } else { 20 };
        let normed = if first.attention.qk_norm == QkNorm::None { 0 } else { 14 };
        let experts = match &first.mlp {
            MlpSpec::Dense { .. } => 0,
            MlpSpec::Experts(_) => 20,
            // Their biases and the router's.
            MlpSpec::Stacked(_) => 26,
        };
        let layer = 47 + behind + normed + experts;
        assert!(launches[0] <= layer * layers + 20, "{name}: {launches:?} launches");
        let flops: u64 = [&plan.grad, &plan.update].iter().map(|p| p.cost().unwrap().flops).sum();
        let products = (parameters - idle(&config) - (config.vocab_size * config.hidden_size) as u64) as f64;
        assert!(flops as f64 > 6.0 * products * 32768.0, "{name}: {flops} operations");
    }
}

#[test]
fn training_of_every_shape_of_the_table_is_planned() {
    let machine = Machine::new(Kind::Null, 1).unwrap();
    for (path, parameters) in table() {
        let config = ModelConfig::read(&path).unwrap().config;
        let settings = Settings { batch: 1, seq: 4096, dtype: Storage::Bf16, ..Settings::default() };
        let started = Instant::now();
        let plan = Plan::new(&config, &settings.recipe(), machine.backend(), Dump::None).unwrap();
        let [_, states, _] = plan.memory().unwrap();
        let (name, seconds) = (path.file_stem().unwrap().display(), started.elapsed().as_secs_f64());
        println!("{name}: {seconds:.2} s");
        for p in [&plan.grad, &plan.update] {
            let slow = p.plan.regions.iter().position(|r| !r.form().has_kernel());
            assert_eq!(slow, None, "{name}: a region without a kernel");
        }
        assert_eq!(states, 16 * parameters, "{name}");
        assert!(seconds < 10.0, "{name}: {seconds} s");
    }
}

/// Norms of a layer that are no prologue of a dot: behind attention and MLP, and over all heads of queries and keys.
fn norms_apart(config: &ModelConfig) -> u64 {
    let layer = &config.layers[0];
    let behind = if layer.norms == NormPlacement::Pre { 0 } else { 2 };
    let whole = if layer.attention.qk_norm == QkNorm::WholeBeforeRope { 2 } else { 0 };
    behind + whole
}

/// Two bytes a parameter; a tied embedding is held twice, as rows and as panels, and panels are padded.
fn weights_are_whole(name: &str, config: &ModelConfig, bytes: u64, parameters: u64) {
    let table = 2 * (config.vocab_size * config.hidden_size) as u64;
    let most = (2 * parameters + table) as f64 * 1.01;
    assert!(bytes >= 2 * parameters && (bytes as f64) < most, "{name}: {bytes} bytes of weights");
}

/// Parameters of the experts that a token does not meet.
fn idle(config: &ModelConfig) -> u64 {
    let of = |mlp: &MlpSpec| match mlp {
        MlpSpec::Experts(e) => 3 * (e.count - e.chosen) * e.intermediate * config.hidden_size,
        MlpSpec::Stacked(e) => 3 * (e.count - e.chosen) * e.intermediate * config.hidden_size,
        MlpSpec::Dense { .. } => 0,
    };
    config.layers.iter().map(|l| of(&l.mlp) as u64).sum()
}

/// A few rows of the widest values of a layer at a time, f32 at most, and the logits.
fn arena_is_sane(name: &str, config: &ModelConfig, bytes: u64, tokens: u64) {
    let mlp = &config.layer_kinds().0[0].mlp;
    let rows = match mlp {
        MlpSpec::Experts(e) => e.chosen,
        MlpSpec::Stacked(e) => e.chosen,
        MlpSpec::Dense { .. } => 1,
    };
    let wide = 2 * (config.hidden_size.max(mlp.intermediate()) * rows) as u64;
    let most = 4 * (3 * tokens * wide + config.vocab_size as u64) + (64 << 10);
    assert!(bytes < most, "{name}: an arena of {bytes} bytes, expected below {most}");
}
