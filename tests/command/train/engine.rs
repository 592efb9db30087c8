//! The engine alone: memory presets, ragged batches, and gradients that are no numbers.

use astrai_builders::ModelConfig;
use astrai_builders::config::{MlpSpec, SharedSpec};
use astrai_engine::machine::{Kind, Machine};
use astrai_engine::model::Model;
use astrai_ir::DType;
use astrai_ir::ops::{GroupScore, Groups, Scores};
use astrai_runtime::{Dump, GRAD, Recompute};
use astrai_train::batch::PackedBatch;
use astrai_train::checkpoint::{Contents, Part, TrainerState};
use astrai_train::contents::Snapshot;
use astrai_train::engine::{Engine, Plan, Recipe};
use astrai_train::router::RouterLosses;
use astrai_train::update::{Optimizer, Rule};

pub const ADAMW: Rule = Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 };

/// Two sequences of up to 40 tokens in a batch.
pub fn recipe(storage: DType, rule: Rule) -> Recipe {
    Recipe {
        tokens: 80,
        sequences: 2,
        span: 40,
        storage,
        accumulate: false,
        recompute: Recompute::Selective,
        optimizer: Optimizer::new(rule, 0.1, Some(1.0)),
        router: RouterLosses::default(),
        adapter: None,
        objective: None,
    }
}

/// The small model with fresh weights.
pub fn open(recipe: &Recipe) -> Engine {
    open_model(crate::train::fixture::SMALL, recipe)
}

/// A model of this config with fresh weights.
pub fn open_model(config: &str, recipe: &Recipe) -> Engine {
    let config = ModelConfig::parse(config, "small").unwrap().config;
    let machine = Machine::new(Kind::Cpu, 2).unwrap();
    let plan = Plan::new(&config, recipe, machine.backend(), Dump::None).unwrap();
    let model = Model::fresh(config, vec![], 7);
    Engine::open(plan, model.source(), &machine.device, &mut |_, _| {}).unwrap()
}

/// Sequences of these lengths; every seventh token is not to be learnt.
pub fn batch(lengths: &[usize], seed: i32) -> PackedBatch {
    let mut batch = PackedBatch::default();
    for (s, &n) in lengths.iter().enumerate() {
        let id = |i: usize| (i as i32 * 37 + s as i32 * 101 + seed * 53 + (i * i) as i32 % 11) % 320;
        let ids: Vec<i32> = (0..n).map(id).collect();
        let targets: Vec<i32> = (1..=n).map(|i| if i % 7 == 0 { -100 } else { id(i) }).collect();
        batch.push(&ids, &targets);
    }
    batch
}

/// The bytes of a buffer as numbers.
pub fn values(engine: &Engine, name: &str) -> Vec<f32> {
    let (dtype, _) = engine.buffers().shape(name).unwrap();
    assert_eq!(dtype, DType::F32, "{name}");
    let read = |bytes: &[u8]| bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    engine.buffers().read(name, read).unwrap()
}

/// Bytes of all buffers but the gradients.
fn state(engine: &Engine) -> Vec<(String, Vec<u8>)> {
    let names = engine.buffers().names().filter(|n| !n.starts_with(GRAD));
    names.map(|n| (n.to_string(), engine.buffers().read(n, <[u8]>::to_vec).unwrap())).collect()
}

#[test]
fn memory_presets_give_the_same_bits() {
    for storage in [DType::F32, DType::BF16] {
        let train = |recompute| {
            let mut engine = open(&Recipe { recompute, ..recipe(storage, ADAMW) });
            let step = |i| engine.step(&[batch(&[40, 29], i)], 1e-3).unwrap().loss;
            let losses: Vec<f64> = (0..8).map(step).collect();
            (losses, state(&engine))
        };
        let (losses, selective) = train(Recompute::Selective);
        assert!(losses[7] < losses[0], "{losses:?}");
        for preset in [Recompute::None, Recompute::Full] {
            let (other, weights) = train(preset);
            assert_eq!(losses, other, "{storage} {preset:?}");
            assert!(weights == selective, "{storage} {preset:?}: weights");
        }
    }
}

/// The choice's correction is a weight that no step moves: it has no gradient and no moments, and checkpoints hold it.
#[test]
fn a_fixed_weight_stays_as_it_is() {
    let text = r#"{"model_type": "mixtral", "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64,
        "num_local_experts": 6}"#;
    let mut config = ModelConfig::parse(text, "config.json").unwrap().config;
    for layer in &mut config.layers {
        let MlpSpec::Experts(e) = &mut layer.mlp else { panic!() };
        (e.correction, e.scores, e.scale) = (true, Scores::Sigmoid, 2.5);
        e.groups = Some(Groups { count: 3, kept: 2, score: GroupScore::BestTwo });
        e.shared = Some(SharedSpec { count: 2, intermediate: 40 });
    }
    let machine = Machine::new(Kind::Cpu, 2).unwrap();
    for storage in [DType::F32, DType::BF16] {
        let recipe = recipe(storage, ADAMW);
        let plan = Plan::new(&config, &recipe, machine.backend(), Dump::None).unwrap();
        let model = Model::fresh(config.clone(), vec![], 7);
        let mut engine = Engine::open(plan, model.source(), &machine.device, &mut |_, _| {}).unwrap();
        let fixed: Vec<_> = engine.weights().iter().filter(|w| w.frozen).map(|w| w.name.clone()).collect();
        assert_eq!(fixed.len(), 2);
        let bias = [0.3f32, -0.1, 0.2, 0.0, -0.4, 0.1];
        for name in &fixed {
            assert!(engine.buffers().names().all(|n| n == name || !n.ends_with(name.as_str())));
            let bytes: Vec<u8> = bias.iter().flat_map(|x| x.to_le_bytes()).collect();
            engine.buffers().write(name, |b| b.copy_from_slice(&bytes)).unwrap();
        }
        let steps: Vec<f64> =
            (0..6).map(|_| engine.step(&[batch(&[40, 29], 1)], 1e-3).unwrap().loss).collect();
        assert!(steps[5] < steps[0], "{storage}: {steps:?}");
        fixed.iter().for_each(|name| assert_eq!(values(&engine, name), bias));
        let (config, state) = (String::new(), TrainerState::new(Default::default(), 1, "".into(), "".into()));
        let entries = Snapshot::new(&engine, &config, &[], state).entries(Part::Model);
        let held = |name: &String| entries.iter().any(|e| e.name == *name && e.dtype == DType::F32);
        assert!(fixed.iter().all(held), "{storage}");
    }
}

#[test]
fn a_ragged_batch_is_its_sequences_alone() {
    let plain = Rule::Sgd { momentum: 0.0, nesterov: false };
    let mut engine = open(&Recipe { accumulate: true, ..recipe(DType::F32, plain) });
    for lengths in [[37, 12], [1, 40], [40, 23]] {
        let both = batch(&lengths, 3);
        let mut alone = Vec::new();
        for bounds in both.starts.windows(2).map(|b| b[0] as usize..b[1] as usize) {
            let mut one = PackedBatch::default();
            one.push(&both.input_ids[bounds.clone()], &both.targets[bounds]);
            alone.push(one);
        }
        let (together, count) = engine.score(&both).unwrap();
        let each: Vec<(f64, usize)> = alone.iter().map(|b| engine.score(b).unwrap()).collect();
        let sum: f64 = each.iter().map(|(loss, _)| loss).sum();
        assert_eq!(count, each.iter().map(|(_, n)| n).sum::<usize>());
        assert!((together - sum).abs() <= 1e-6 * sum, "{lengths:?}: {together} against {sum}");

        let names: Vec<String> = engine.weights().iter().map(|w| format!("{GRAD}{}", w.name)).collect();
        let mut gradients = |batches: &[PackedBatch]| {
            let step = engine.step(batches, 0.0).unwrap();
            assert_eq!(step.targets, count);
            assert!((step.loss - sum / count as f64).abs() <= 1e-6 * step.loss, "{lengths:?}");
            names.iter().map(|n| values(&engine, n)).collect::<Vec<_>>()
        };
        let (once, dealt) = (gradients(&[both]), gradients(&alone));
        for ((a, b), name) in once.iter().zip(&dealt).zip(&names) {
            let top = a.iter().fold(0f32, |m, x| m.max(x.abs()));
            let off = a.iter().zip(b).fold(0f32, |m, (x, y)| m.max((x - y).abs()));
            assert!(top > 0.0 && off <= 2e-6 * top, "{lengths:?} {name}: off by {off} of {top}");
        }
    }
}

#[test]
fn a_gradient_that_is_no_number_costs_one_step_and_no_more() {
    for accumulate in [false, true] {
        let mut engine = open(&Recipe { accumulate, ..recipe(DType::F32, ADAMW) });
        let name = engine.weights()[0].name.clone();
        let whole = engine.buffers().read(&name, <[u8]>::to_vec).unwrap();
        engine.buffers().write(&name, |b| b[..4].copy_from_slice(&f32::NAN.to_le_bytes())).unwrap();
        let (spoilt, steps) = (state(&engine), [batch(&[40, 29], 1)]);
        assert!(!engine.step(&steps, 1e-3).unwrap().applied);
        assert!(state(&engine) == spoilt, "a step without a gradient changed something");
        engine.buffers().write(&name, |b| b.copy_from_slice(&whole)).unwrap();
        let step = engine.step(&steps, 1e-3).unwrap();
        assert!(step.applied && step.loss.is_finite(), "accumulate {accumulate}: {step:?}");
    }
}
