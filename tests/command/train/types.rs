//! Types of training: what stays f32 by name, and weights of bf16 that are rounded at random.

use crate::train::engine::{ADAMW, batch, open, recipe};
use crate::train::fixture::SMALL;
use astrai_builders::ModelConfig;
use astrai_engine::machine::{Kind, Machine};
use astrai_ir::{DType, Graph, Op};
use astrai_runtime::Dump;
use astrai_train::engine::{Engine, Plan, Recipe};
use astrai_train::update::{MASTER, Optimizer};

fn plan(wide: &[&str]) -> Result<Plan, String> {
    let config = ModelConfig::parse(SMALL, "small").unwrap().config;
    let machine = Machine::new(Kind::Cpu, 2).unwrap();
    Plan::new(&config, &named(wide), machine.backend(), Dump::None).map_err(|e| e.to_string())
}

fn named(wide: &[&str]) -> Recipe {
    Recipe { wide: wide.iter().map(ToString::to_string).collect(), ..recipe(DType::BF16, ADAMW) }
}

/// Types of what these operators read first.
fn read(plan: &Plan, name: &str) -> Vec<DType> {
    let of = |g: &Graph| -> Vec<DType> {
        let all = g.nodes().iter().filter(|n| n.op.name() == name);
        // What is widened only for arithmetic lies narrow in memory.
        let stored = |n: &astrai_ir::Node| match &g.node(n.args[0]).op {
            Op::Cast(c) if c.dtype == DType::F32 => g.ty(g.node(n.args[0]).args[0]).dtype,
            _ => g.ty(n.args[0]).dtype,
        };
        all.map(stored).collect()
    };
    let g = &plan.grad.graph;
    g.blocks().iter().map(|b| &b.graph).chain([g]).flat_map(of).collect()
}

#[test]
fn what_is_named_stays_wide() {
    let (plain, wide) = (plan(&[]).unwrap(), plan(&["*norm*", "linear_cross_entropy", "attention"]).unwrap());
    for (name, narrow) in [("linear_cross_entropy_grad", true), ("attention", true), ("dot", false)] {
        let [before, now] = [&plain, &wide].map(|p| read(p, name));
        assert!(!before.is_empty() && before.contains(&DType::BF16), "{name}: {before:?}");
        assert!(!narrow || now.iter().all(|ty| *ty == DType::F32), "{name}: {now:?}");
    }
    for w in &wide.weights {
        let ty = if w.name.contains("norm") { DType::F32 } else { DType::BF16 };
        assert_eq!(w.ty.dtype, ty, "{}", w.name);
    }
    // The more stays wide, the nearer is the loss to that of f32.
    let all = [&["*"][..], &astrai_runtime::ROUNDED].concat();
    let loss = |recipe: &Recipe| open(recipe).step(&[batch(&[40, 29], 1)], 1e-3).unwrap().loss;
    let exact = loss(&recipe(DType::F32, ADAMW));
    let [near, far] = [named(&all), named(&[])].map(|r| (loss(&r) - exact).abs());
    assert!(near < far, "{near} {far}");
    for (name, says) in [
        (
            "softmax",
            "precision: `softmax` is no operator that is rounded (dot, grouped_dot, attention, linear_cross_entropy)",
        ),
        ("*layers.0.input_layernorm*", "in some layers of a kind and not in others"),
        ("*q_proj*", "are one weight: name all or none"),
    ] {
        let got = plan(&[name]).map(|_| ()).unwrap_err();
        assert!(got.contains(says), "{name}: {got}");
    }
}

#[test]
fn weights_that_are_rounded_at_random_need_no_masters() {
    let of = |stochastic| {
        let plain = recipe(DType::BF16, ADAMW);
        Recipe { optimizer: Optimizer { stochastic, ..plain.optimizer.clone() }, ..plain }
    };
    let steps = [batch(&[40, 29], 1)];
    let run = |recipe: &Recipe| {
        let mut engine = open(recipe);
        let done: Vec<f64> = (0..12).map(|_| engine.step(&steps, 1e-3).unwrap().loss).collect();
        let all: Vec<Vec<f64>> = engine.weights().iter().map(|w| weights(&engine, &w.name)).collect();
        (done, all, engine.buffers().names().filter(|n| n.starts_with(MASTER)).count())
    };
    let (own, again, other, masters) =
        (run(&of(Some(5))), run(&of(Some(5))), run(&of(Some(6))), run(&of(None)));
    assert!(own.1 == again.1 && own.1 != other.1, "a seed is the draws");
    assert_eq!(own.2, 0);
    assert!(masters.2 > 0);
    let [a, b] = [&own.0, &masters.0].map(|losses| losses[0] - losses[11]);
    assert!(a > 0.1 && (a - b).abs() < 0.2 * b, "the loss fell by {a}, with masters by {b}");
    // At a rate that rounding to the nearest would lose, weights move along with the masters of another run, on average as far.
    let moved = |recipe: &Recipe, prefix: &str| {
        let mut engine = open(recipe);
        let name = engine.weights().iter().find(|w| w.name.contains("embed")).unwrap().name.clone();
        let before = weights(&engine, &format!("{prefix}{name}"));
        (0..4).for_each(|_| assert!(engine.step(&steps, 1e-5).unwrap().applied));
        let after = weights(&engine, &format!("{prefix}{name}"));
        after.iter().zip(before).map(|(a, b)| a - b).collect::<Vec<f64>>()
    };
    let (at_random, exact) = (moved(&of(Some(5)), ""), moved(&of(None), MASTER));
    let along = |x: &[f64]| x.iter().zip(&exact).map(|(a, b)| a * b).sum::<f64>();
    let part = along(&at_random) / along(&exact);
    assert!((part - 1.0).abs() < 0.2, "moved {part} as far");
}

/// Elements of a weight or of its master.
fn weights(engine: &Engine, name: &str) -> Vec<f64> {
    let (dtype, _) = engine.buffers().shape(name).unwrap();
    let read = |bytes: &[u8]| bytes.chunks(dtype.bytes()).map(|b| dtype.decode(b)).collect();
    engine.buffers().read(name, read).unwrap()
}
