//! The engine alone: memory presets, ragged batches, and gradients that are no numbers.

use astrai_builders::ModelConfig;
use astrai_builders::config::{MlpSpec, SharedSpec};
use astrai_engine::machine::{Kind, Machine};
use astrai_engine::model::Model;
use astrai_ir::ops::{GroupScore, Groups, Random, RandomKind, Scores};
use astrai_ir::{DType, Dim, Type};
use astrai_runtime::{Dump, GRAD, Recompute};
use astrai_train::batch::PackedBatch;
use astrai_train::checkpoint::{Contents, Part, TrainerState};
use astrai_train::contents::Snapshot;
use astrai_train::engine::{Engine, Plan, Recipe, StepResult};
use astrai_train::router::RouterLosses;
use astrai_train::scaler::LossScale;
use astrai_train::update::{EXP_AVG, EXP_AVG_SQ, MASTER, MOMENT_SCALES, Optimizer, Rule};

pub const ADAMW: Rule = Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 };

/// Two sequences of up to 40 tokens in a batch.
pub fn recipe(storage: DType, rule: Rule) -> Recipe {
    Recipe {
        tokens: 80,
        sequences: 2,
        span: 40,
        storage,
        wide: vec![],
        accumulate: false,
        recompute: Recompute::Selective,
        optimizer: Optimizer { scaled: storage == DType::F16, ..Optimizer::new(rule, 0.1, Some(1.0)) },
        router: RouterLosses::default(),
        adapter: None,
        frozen: vec![],
        async_save: false,
        neftune: None,
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
    for storage in [DType::F32, DType::BF16, DType::F16] {
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
    for storage in [DType::F32, DType::BF16, DType::F16] {
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
        let mut none = PackedBatch::default();
        none.push(&[1, 2, 3], &[-100; 3]);
        let step = engine.step(&[none], 1e-3).unwrap();
        assert!(!step.applied && step.targets == 0 && step.loss.is_nan(), "{step:?}");
        assert!(state(&engine) == spoilt, "a step without a target changed something");
        engine.buffers().write(&name, |b| b.copy_from_slice(&whole)).unwrap();
        let step = engine.step(&steps, 1e-3).unwrap();
        assert!(step.applied && step.loss.is_finite(), "accumulate {accumulate}: {step:?}");
    }
}

/// All gradients of a step, of the loss as it is.
fn gradients(engine: &mut Engine, batch: &PackedBatch) -> (StepResult, Vec<Vec<f32>>) {
    let step = engine.step(std::slice::from_ref(batch), 0.0).unwrap();
    let scale = step.loss_scale.unwrap_or(1.0) as f32;
    let names: Vec<String> = engine.weights().iter().map(|w| format!("{GRAD}{}", w.name)).collect();
    let all = names.iter().filter(|n| engine.buffers().shape(n).is_some());
    (step, all.map(|n| values(engine, n).iter().map(|x| x / scale).collect()).collect())
}

fn norm<'a>(all: impl IntoIterator<Item = &'a f32>) -> f64 {
    all.into_iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt()
}

#[test]
fn gradients_of_f16_are_those_of_f32_and_scaling_keeps_what_is_small() {
    let batch = batch(&[40, 29], 1);
    let mut wide = open(&recipe(DType::F32, ADAMW));
    let (truth, want) = gradients(&mut wide, &batch);
    let off = |scale: f64| {
        let mut engine = open(&recipe(DType::F16, ADAMW));
        engine.loss_scale = Some(LossScale { scale, ..LossScale::default() });
        let (step, got) = gradients(&mut engine, &batch);
        assert!((step.loss - truth.loss).abs() < 2e-3 * truth.loss, "{} against {}", step.loss, truth.loss);
        let apart = got.iter().flatten().zip(want.iter().flatten()).map(|(a, b)| a - b).collect::<Vec<_>>();
        let norms = (step.grad_norm - truth.grad_norm).abs() / truth.grad_norm;
        assert!(norms < if scale > 1.0 { 2e-3 } else { 0.1 }, "{step:?}, {truth:?}");
        norm(&apart) / norm(want.iter().flatten())
    };
    let (scaled, small) = (off(65536.0), off(2f64.powi(-12)));
    println!("f16 gradients off by {scaled:.1e} of their norm, by {small:.1e} where the loss is small");
    assert!(scaled < 4e-3 && small > 4.0 * scaled, "{scaled:e}, {small:e}");
}

#[test]
fn a_scale_that_is_too_large_is_halved_until_the_run_goes_on() {
    let mut engine = open(&recipe(DType::F16, ADAMW));
    let mut scale = 2f64.powi(60);
    engine.loss_scale = Some(LossScale { scale, ..LossScale::default() });
    let steps = [batch(&[40, 29], 1)];
    let before = state(&engine);
    let mut skipped = 0;
    let first = loop {
        let done = engine.step(&steps, 1e-3).unwrap();
        assert_eq!(done.loss_scale, Some(scale));
        if done.applied {
            break done;
        }
        assert!(!done.grad_norm.is_finite() && state(&engine) == before, "{done:?}");
        (scale, skipped) = (scale / 2.0, skipped + 1);
        assert_eq!(engine.loss_scale.unwrap(), LossScale { scale, clean: 0, updates: 0 });
    };
    assert!(skipped > 20, "{skipped}");
    let last = (0..9).map(|_| engine.step(&steps, 1e-3).unwrap()).last().unwrap();
    let now = engine.loss_scale.unwrap();
    println!("{skipped} steps left out, then a scale of {scale}; losses {} to {}", first.loss, last.loss);
    assert!(last.loss < first.loss - 0.05 && now.updates >= 9, "{first:?}, {last:?}, {now:?}");
    // The moments count the steps that were made: the first one moves every weight by the rate.
    let one = |updates| {
        let mut engine = open(&recipe(DType::F16, ADAMW));
        (engine.steps, engine.loss_scale) = (updates, Some(LossScale { scale, ..LossScale::default() }));
        engine.step(&steps, 1e-3).unwrap();
        state(&engine)
    };
    assert!(one(0) == one(7));
}

/// Frozen: all of the first layer, and the norms.
#[test]
fn frozen_weights_stay_and_cost_nothing_and_others_move_as_ever() {
    let plain = || recipe(DType::BF16, Rule::Sgd { momentum: 0.9, nesterov: false });
    let frozen = Recipe { frozen: vec!["*layers.0.*".into(), "*norm*".into()], ..plain() };
    let steps = [batch(&[40, 29], 1)];
    let (mut engine, mut all) = (open(&frozen), open(&plain()));
    let fixed: Vec<String> = engine.weights().iter().filter(|w| w.frozen).map(|w| w.name.clone()).collect();
    let of_first = |n: &String| n.contains("layers.0.");
    assert!(
        fixed.iter().any(of_first) && fixed.iter().all(|n| of_first(n) || n.contains("norm")),
        "{fixed:?}"
    );
    let bytes = |e: &Engine, n: &str| e.buffers().read(n, <[u8]>::to_vec).unwrap();
    for name in &fixed {
        let kept: Vec<&str> = engine.buffers().names().filter(|n| n.ends_with(name.as_str())).collect();
        assert_eq!(kept, [name.as_str()], "a frozen weight has neither gradient, moments nor an f32 copy");
    }
    let before: Vec<Vec<u8>> = fixed.iter().map(|n| bytes(&engine, n)).collect();
    let trained: Vec<String> =
        engine.weights().iter().filter(|w| !w.frozen).map(|w| w.name.clone()).collect();
    let masters = |e: &Engine| trained.iter().map(|n| values(e, &format!("{MASTER}{n}"))).collect::<Vec<_>>();
    let old = masters(&engine);
    let (done, full) = (engine.step(&steps, 1e-2).unwrap(), all.step(&steps, 1e-2).unwrap());
    assert!(done.loss == full.loss && done.grad_norm < full.grad_norm, "{done:?}, {full:?}");
    // By hand: the gradient of what is trained, clipped by its own norm, and the decay of matrices.
    let clip = (1.0 / (done.grad_norm + 1e-6)).min(1.0);
    for ((name, old), new) in trained.iter().zip(&old).zip(masters(&engine)) {
        let grad = values(&engine, &format!("{GRAD}{name}"));
        assert_eq!(grad, values(&all, &format!("{GRAD}{name}")), "{name}");
        for ((p, g), new) in old.iter().zip(&grad).zip(new) {
            let want = f64::from(*p) - 1e-2 * (clip * f64::from(*g) + 0.1 * f64::from(*p));
            assert!((want - f64::from(new)).abs() < 1e-6, "{name}: {new}, by hand {want}");
        }
    }
    (0..3).for_each(|_| assert!(engine.step(&steps, 1e-2).unwrap().applied));
    assert!(fixed.iter().zip(&before).all(|(n, b)| bytes(&engine, n) == *b));
    let memory = |recipe: &Recipe| {
        let config = ModelConfig::parse(crate::train::fixture::SMALL, "small").unwrap().config;
        let machine = Machine::new(Kind::Cpu, 2).unwrap();
        Plan::new(&config, recipe, machine.backend(), Dump::None).map(|p| {
            let apart: u64 = [&p.grad, &p.update, &p.score].map(|p| p.arena_bytes().unwrap()).iter().sum();
            let memory = p.memory().unwrap();
            assert!(memory[2] < apart, "programs share what lies between kernels: {memory:?}, apart {apart}");
            memory
        })
    };
    let ([w, states, arenas], [w_all, states_all, arenas_all]) =
        (memory(&frozen).unwrap(), memory(&plain()).unwrap());
    println!("states {states} of {states_all} bytes, arenas {arenas} of {arenas_all}");
    assert!(w == w_all && states < states_all * 4 / 5 && states + arenas < states_all + arenas_all);
    let refused = |pattern: &str| {
        let e = memory(&Recipe { frozen: vec![pattern.into()], ..plain() }).unwrap_err();
        e.to_string()
    };
    assert!(refused("nothing*").contains("freeze: `nothing*` names no weight of this model"));
    assert!(refused("*").contains("nothing is left to train"));
}

/// Each token once and a table of its own: noise on what is looked up is noise on the table.
#[test]
fn noise_on_embeddings_is_drawn_by_counters() {
    let untied = crate::train::fixture::SMALL
        .replace("\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false");
    let sgd = || recipe(DType::F32, Rule::Sgd { momentum: 0.0, nesterov: false });
    let (alpha, seed) = (5.0, 11);
    let noisy = Recipe { neftune: Some((alpha, seed)), accumulate: true, ..sgd() };
    let mut batch = PackedBatch::default();
    let ids: Vec<i32> = (0..40).map(|i| i * 7 + 3).collect();
    for part in [&ids[..24], &ids[24..]] {
        batch.push(part, &part.iter().map(|id| (id + 1) % 320).collect::<Vec<_>>());
    }
    let mut engine = open_model(&untied, &noisy);
    let losses: Vec<f64> =
        (0..2).map(|_| engine.step(&[batch.clone(), batch.clone()], 0.0).unwrap().loss).collect();
    let (scored, _) = engine.score(&batch).unwrap();
    let mut quiet = open_model(&untied, &sgd());
    assert_eq!(scored, quiet.score(&batch).unwrap().0, "noise where nothing is learnt");
    let table = quiet.weights().iter().find(|w| w.name.contains("embed")).unwrap().name.clone();
    let old = values(&quiet, &table);
    let ty = Type::new(DType::F32, [Dim::from(40), Dim::from(32)]);
    let draws = Random { kind: RandomKind::Uniform, ty, stream: 0x6e65_6674 };
    let mut by_hand = |draw: i64| {
        let mut table_now = old.clone();
        for (t, id) in ids.iter().enumerate() {
            let width = alpha / f64::sqrt(32.0 * if t < 24 { 24.0 } else { 16.0 });
            for j in 0..32 {
                let noise = (2.0 * draws.draw(seed as i64, draw, t * 32 + j) - 1.0) * width;
                table_now[*id as usize * 32 + j] += noise as f32;
            }
        }
        let bytes: Vec<u8> = table_now.iter().flat_map(|x| x.to_le_bytes()).collect();
        quiet.buffers().write(&table, |b| b.copy_from_slice(&bytes)).unwrap();
        quiet.score(&batch).unwrap().0 / 40.0
    };
    for (step, loss) in losses.iter().enumerate() {
        let draw = (step as i64) << 20;
        let want = (by_hand(draw) + by_hand(draw + 1)) / 2.0;
        assert!((loss - want).abs() < 1e-6 * want, "step {step}: {loss}, by hand {want}");
    }
    assert!(losses[0] != losses[1] && (losses[0] - scored / 40.0).abs() > 1e-3, "{losses:?}, {scored}");
}

/// Codes are near what they stand for, the run learns as with numbers, and a step without a gradient leaves them as they are.
#[test]
fn moments_of_eight_bits_learn_as_those_of_thirty_two() {
    let wide = recipe(DType::F32, ADAMW);
    let mut narrow = wide.clone();
    narrow.optimizer.narrow_moments = true;
    let (mut a, mut b) = (open(&wide), open(&narrow));
    let steps = |e: &mut Engine, n: i32| -> Vec<f64> {
        (0..n).map(|i| e.step(&[batch(&[40, 29], i % 3)], 3e-3).unwrap().loss).collect()
    };
    assert_eq!(steps(&mut a, 1), steps(&mut b, 1));
    let codes = |e: &Engine, n: &str| e.buffers().read(n, <[u8]>::to_vec).unwrap();
    let mut narrowed = 0;
    for w in b.weights().iter().map(|w| w.name.clone()).collect::<Vec<_>>() {
        let first = format!("{EXP_AVG}{w}");
        if b.buffers().shape(&first).unwrap().0 == DType::F32 {
            assert_eq!(codes(&a, &first), codes(&b, &first), "small moments are numbers");
            continue;
        }
        narrowed += 1;
        let second = format!("{EXP_AVG_SQ}{w}");
        let [m_scale, v_scale] = MOMENT_SCALES.map(|p| values(&b, &format!("{p}{w}")));
        let (m, v) = (values(&a, &first), values(&a, &second));
        let block = m.len() / m_scale.len();
        let stored = 2 * m.len() + 8 * m_scale.len();
        assert!(3 * stored < 8 * m.len(), "{w}: {stored} bytes");
        for (i, (m_code, v_code)) in codes(&b, &first).into_iter().zip(codes(&b, &second)).enumerate() {
            let near = |code: f64, most: f64, power: i32, scale: f32, x: f32| {
                // Within half a code, and a little for rounding.
                let of = |c: f64| (c.max(0.0) / most).powi(power) * f64::from(scale);
                (of(code - 0.51)..=of(code + 0.51)).contains(&f64::from(x))
            };
            let (c, s) = (f64::from(m_code as i8), i / block);
            assert!(
                near(c.abs(), 127.0, 2, m_scale[s], m[i].abs()) && (c == 0.0 || (c > 0.0) == (m[i] > 0.0))
            );
            let c = f64::from(v_code);
            assert!(c >= 1.0 && (c == 1.0 || near(c, 255.0, 4, v_scale[s], v[i])), "{w}[{i}]: {c}, {}", v[i]);
        }
    }
    assert!(narrowed >= 2);
    let (a_losses, b_losses) = (steps(&mut a, 60), steps(&mut b, 60));
    let (a_last, b_last) = (a_losses[59], b_losses[59]);
    println!("after 60 steps {a_last} with moments of 32 bits, {b_last} with those of 8");
    assert!(a_last < a_losses[0] - 1.0 && (a_last - b_last).abs() < 0.05 * a_last, "{a_last}, {b_last}");
    let bytes = |e: &Engine| {
        e.buffers().names().filter(|n| n.starts_with("exp_avg")).map(|n| codes(e, n).len()).sum::<usize>()
    };
    println!("moments of {} bytes instead of {}", bytes(&b), bytes(&a));
    assert!(bytes(&b) < bytes(&a));
    let name = b.weights()[0].name.clone();
    b.buffers().write(&name, |x| x[..4].copy_from_slice(&f32::NAN.to_le_bytes())).unwrap();
    let before = state(&b);
    assert!(!b.step(&[batch(&[40, 29], 1)], 1e-3).unwrap().applied);
    assert!(state(&b) == before);
}
