//! The routers' losses: what transformers computes for its own, in value and gradient; AstrAI's beside it; and that they enter only
//! when asked for. Golden cases that are not here are skipped.

use crate::train::engine::{batch, recipe};
use crate::train::fixture::{fails, good, small};
use astrai_builders::ModelConfig;
use astrai_builders::config::{Balance, MlpSpec};
use astrai_engine::machine::{Kind, Machine};
use astrai_engine::model::Model;
use astrai_ir::DType;
use astrai_runtime::weights::Checkpoint;
use astrai_runtime::{Dump, Recompute};
use astrai_train::batch::PackedBatch;
use astrai_train::engine::{Engine, Plan, Recipe, StepResult};
use astrai_train::router::RouterLosses;
use astrai_train::update::Rule;
use std::path::Path;

const PLAIN: Rule = Rule::Sgd { momentum: 0.0, nesterov: false };

fn losses(load_balancing: f64, z_loss: f64) -> RouterLosses {
    RouterLosses { count_loads: true, load_balancing, z_loss }
}

/// Gradients of the batches with these factors, nothing moved.
fn step(model: &Model, router: RouterLosses, batches: &[PackedBatch]) -> (StepResult, Engine) {
    let machine = Machine::new(Kind::Cpu, 2).unwrap();
    let recipe =
        Recipe { accumulate: true, router, recompute: Recompute::Selective, ..recipe(DType::F32, PLAIN) };
    let plan = Plan::new(&model.config, &recipe, machine.backend(), Dump::None).unwrap();
    let mut engine = Engine::open(plan, model.source(), &machine.device, &mut |_, _| {}).unwrap();
    (engine.step(batches, 0.0).unwrap(), engine)
}

fn close(what: &str, got: f64, want: f64) {
    assert!((got - want).abs() <= 2e-5 * want.abs(), "{what}: {got}, the reference has {want}");
}

/// Case, `load_balancing_loss_func`, mean squared log-sum-exp, and the norm of all gradients with 2 times the one and with 0.3
/// times the other, of the golden `input_ids` predicting their next; computed with transformers in f32.
const REFERENCE: [(&str, [f64; 4]); 2] = [
    ("qwen3_moe", [2.5016446, 10.977465, 10.0293903, 9.4206982]),
    ("mixtral", [2.1010704, 5.0834546, 7.3828444, 8.7273979]),
];

#[test]
fn the_losses_are_the_references() {
    for (name, [balance, z, norm_balance, norm_z]) in REFERENCE {
        let case = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/golden").join(name);
        if !case.is_dir() {
            println!("skipped: golden case {name} is not here");
            continue;
        }
        let model = Model::open(&case, false).unwrap();
        let golden = Checkpoint::open(&case.join("golden.safetensors")).unwrap();
        let ids = golden.get("input_ids").unwrap();
        let (seq, ids) = (ids.shape()[1], ids.to_i64().unwrap());
        let mut batch = PackedBatch::default();
        for row in ids.chunks(seq) {
            let row: Vec<i32> = row.iter().map(|t| *t as i32).collect();
            batch.push(&row[..seq - 1], &row[1..]);
        }
        let batch = [batch];
        let (plain, _) = step(&model, RouterLosses::default(), &batch);
        assert_eq!(plain.router, None);
        let (seen, _) = step(&model, losses(0.0, 0.0), &batch);
        assert_eq!(
            (seen.loss, seen.grad_norm),
            (plain.loss, plain.grad_norm),
            "{name}: watching changes nothing"
        );
        assert!(seen.router.is_some_and(|r| r.router_balance.is_none() && r.load_entropy > 0.5));
        for (factors, norm) in [((2.0, 0.0), norm_balance), ((0.0, 0.3), norm_z)] {
            let (done, _) = step(&model, losses(factors.0, factors.1), &batch);
            let router = done.router.unwrap();
            close("balance", router.router_balance.unwrap(), balance);
            close("z", router.router_z.unwrap(), z);
            close("norm", done.grad_norm, norm);
            assert_eq!(done.loss, plain.loss, "{name}: the loss told is the cross-entropy");
        }
    }
}

fn mixture() -> ModelConfig {
    let text = r#"{"model_type": "mixtral", "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64,
        "num_local_experts": 6, "initializer_range": 0.3}"#;
    ModelConfig::parse(text, "config.json").unwrap().config
}

#[test]
fn layers_together_and_apart() {
    let alike = |layers: usize, balance| {
        let mut config = mixture();
        config.layers.truncate(layers);
        config.num_layers = layers;
        for layer in &mut config.layers {
            let MlpSpec::Experts(e) = &mut layer.mlp else { panic!() };
            e.balance = balance;
        }
        let model = Model::fresh(config, vec![], 7);
        step(&model, losses(1.0, 0.0), &[batch(&[40, 29], 1)]).0.router.unwrap().router_balance.unwrap()
    };
    // Of one layer, with two experts a token, they differ by the number of choices.
    close("one layer", alike(1, Balance::Global), 2.0 * alike(1, Balance::PerLayer));
    let (together, apart) = (alike(2, Balance::Global), alike(2, Balance::PerLayer));
    assert!(apart > 1.0 && (together - 2.0 * apart).abs() > 1e-3, "{together} {apart}");
}

/// The loss of all terms along the gradient by the routers, against its difference.
#[test]
fn gradients_are_differences() {
    let model = Model::fresh(mixture(), vec![], 7);
    let batches = [batch(&[40, 29], 1), batch(&[23], 2)];
    let (balance, z) = (0.7, 0.05);
    let (_, mut engine) = step(&model, losses(balance, z), &batches);
    let routers: Vec<String> =
        engine.weights().iter().map(|w| w.name.clone()).filter(|n| n.ends_with("gate.weight")).collect();
    assert_eq!(routers.len(), 2);
    for name in &routers {
        let gradient = crate::train::engine::values(&engine, &format!("{}{name}", astrai_runtime::GRAD));
        let square: f64 = gradient.iter().map(|x| f64::from(*x).powi(2)).sum();
        let before = crate::train::engine::values(&engine, name);
        let mut at = |h: f64| {
            let moved: Vec<u8> = before
                .iter()
                .zip(&gradient)
                .flat_map(|(x, d)| (x + (h * f64::from(*d)) as f32).to_le_bytes())
                .collect();
            engine.buffers().write(name, |b| b.copy_from_slice(&moved)).unwrap();
            let done = engine.step(&batches, 0.0).unwrap();
            let router = done.router.unwrap();
            let total = done.loss + balance * router.router_balance.unwrap() + z * router.router_z.unwrap();
            (total, [router.load_entropy, router.load_imbalance_mean])
        };
        // Small enough that no token changes its experts.
        let h = 2e-3 / square.sqrt();
        let ((up, loads), (down, same)) = (at(h), at(-h));
        at(0.0);
        assert_eq!(loads, same, "{name}: a choice changed");
        let slope = (up - down) / (2.0 * h);
        assert!((slope - square).abs() <= 2e-2 * square, "{name}: {slope} along a gradient of {square}");
    }
}

#[test]
fn rows_tell_of_routers_and_dense_models_refuse_their_losses() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.json");
    let text = mixture().save().to_string();
    std::fs::write(&config, text).unwrap();
    let flags = ["--steps", "2", "--batch", "2", "--router-aux-loss-coef", "0.01"];
    let data = crate::train::fixture::shared().join("run/data");
    let run = |out: &str| {
        let mut c = crate::train::fixture::command(&dir.path().join(out));
        c.arg("--config").arg(&config).arg("--data").arg(&data).args(["--seq", "32"]);
        c
    };
    good(run("with").args(flags));
    let rows = |out: &str| std::fs::read_to_string(dir.path().join(out).join("metrics.jsonl")).unwrap();
    for key in ["router_balance", "router_z", "load_imbalance_max", "load_entropy", "dead_expert_fraction"] {
        assert!(rows("with").lines().all(|l| l.contains(key)), "{key}: {}", rows("with"));
    }
    good(run("without").args(&flags[..4]));
    assert!(rows("without").contains("load_entropy") && !rows("without").contains("router_balance"));
    let (line, _) = fails(small(&dir.path().join("dense")).args(flags));
    assert!(line.contains("router_aux_loss_coef: 0.01, but the model has no experts"), "{line}");
}
