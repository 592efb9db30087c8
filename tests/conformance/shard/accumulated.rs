//! Optimiser steps of several micro-batches on ranks: each rank accumulates its own gradients, the update sums them once, and what is trained
//! is what one rank trains.

use super::{Pieces, Values, close, each, inputs, leaves, piece};
use astrai_builders::{ModelConfig, Ranks};
use astrai_engine::machine::{Kind, Machine};
use astrai_ir::ops::{Op, Weight};
use astrai_ir::shard::{STAGES, Shard};
use astrai_ir::{
    DType, Graph, Mesh, Node, Placement, Precision, Sharding, Sizes, Stage, Tensor, eval, eval_ranks,
    eval_stages,
};
use astrai_passes::{DATA, GRAD};
use astrai_train::engine::{Plan, Recipe};
use astrai_train::settings::Settings;
use std::collections::HashMap;

const EXACT: Precision = Precision { exact: true };
/// Micro-batches of a step.
const MICRO: usize = 2;

fn plan(config: &ModelConfig, sequences: usize, accumulate: bool, at: (&Mesh, usize)) -> Plan {
    let machine = Machine::new(Kind::Null, 1).unwrap();
    let recipe =
        Recipe { accumulate, storage: DType::F32, ..Settings::of_sizes(sequences as u64, 8).recipe() };
    Plan::on_ranks(config, &recipe, machine.backend(), astrai_runtime::Dump::None, at).unwrap()
}

/// Sums of tensors over data-parallel ranks, in a graph and its blocks.
fn sums(g: &Graph) -> usize {
    let sum = |n: &&Node| match &n.op {
        Op::AllReduce(o) => n.ty().rank() > 0 && o.over.iter().any(|a| DATA.contains(&&*a.name)),
        _ => false,
    };
    g.nodes().iter().filter(sum).count() + g.blocks().iter().map(|b| sums(&b.graph)).sum::<usize>()
}

/// Where the leaves of a plan's gradient lie, given their weights on one rank. Of weights that a pass has concatenated along tp each is in
/// parts.
fn placed(part: &Plan, whole: &[Weight]) -> HashMap<String, Sharding> {
    let one = |n: &Node| {
        let (name, mut sharding) = (n.op.leaf_name()?, n.sharding.clone());
        let weight = whole.iter().find(|w| w.name == name.strip_prefix(GRAD).unwrap_or(name));
        let rows: Vec<usize> = weight.map_or(vec![], |w| w.rows().iter().map(|part| part.rows).collect());
        for (axis, p) in &mut sharding {
            let Placement::Shard(Shard { dim: 0, sections }) = p else { continue };
            if axis == "tp" && sections.is_empty() && rows.len() > 1 {
                sections.clone_from(&rows);
            }
        }
        Some((name.to_string(), sharding))
    };
    part.grad.graph.nodes().iter().filter_map(one).collect()
}

fn is(sharding: &Sharding, mesh: &Mesh, placement: &Placement) -> bool {
    sharding.iter().any(|(a, p)| DATA.contains(&&**a) && mesh.size(a) > 1 && p == placement)
}

fn scalar(name: &str, x: f64) -> (String, Tensor) {
    (name.to_string(), Tensor::f32(&[], &[x as f32]))
}

#[test]
fn gradients_of_several_micro_batches_are_summed_over_ranks_once() {
    each(|name, config, ranks| {
        let few = ["llama", "qwen3_moe", "gemma2", "deepseek_v3"].contains(&name);
        if few && ranks.dp * ranks.ep > 1 {
            same_step(name, config, ranks);
        }
    });
}

fn same_step(name: &str, config: &ModelConfig, ranks: Ranks) {
    let (mesh, shares) = (ranks.mesh(config).unwrap(), ranks.dp * ranks.ep);
    let whole = plan(config, 2 * shares, true, (&Mesh::default(), 0));
    let parts: Vec<Plan> = (0..ranks.pp).map(|stage| plan(config, 2, true, (&mesh, stage))).collect();
    let what = format!("{name} {ranks:?}");
    for (stage, part) in parts.iter().enumerate() {
        let at = placed(part, &whole.weights);
        let summed = at.iter().filter(|(n, p)| {
            part.weights.iter().any(|w| !w.frozen && w.name == **n) && is(p, &mesh, &Placement::Replicate)
        });
        let summed = summed.count();
        let partial = at.iter().filter(|(n, p)| n.starts_with(GRAD) && is(p, &mesh, &Placement::Partial));
        assert!(summed > 0 && partial.count() == summed, "{what}: accumulators are partial sums");
        assert_eq!([&part.grad, &part.update].map(|p| sums(&p.graph)), [0, summed], "{what}");
        let alone = plan(config, 2, false, (&mesh, stage));
        assert_eq!([&alone.grad, &alone.update].map(|p| sums(&p.graph)), [summed, 0], "{what}");
        // The sum takes the place of what is summed.
        let arenas = [part, &alone].map(|p| p.update.arena_bytes().unwrap());
        assert_eq!(arenas[0], arenas[1], "{what}");
    }
    // A step of one rank. What the accumulators held before does not matter.
    let lengths = [[3, 2], [4, 1], [2, 2], [1, 3]];
    let values = leaves(&whole.grad.graph);
    let scalars = |micro: usize| [scalar("loss_scale", 0.25), scalar("accumulate", f64::from(micro > 0))];
    let mut gradients = Values::new();
    for micro in 0..MICRO {
        let given = inputs(&lengths[..shares].concat(), 2 * micro * shares);
        let given = values.clone().into_iter().chain(gradients).chain(given).chain(scalars(micro));
        let sizes = Sizes::from([("sequences".to_string(), 2 * shares as u64)]);
        let outs = eval(&whole.grad.graph, &given.collect(), &sizes, EXACT).unwrap();
        gradients = outs.into_iter().filter(|(n, _)| n.starts_with(GRAD)).collect();
    }
    // The same on ranks.
    let of_stage = |p: &Plan| (p.grad.graph.clone(), placed(p, &whole.weights));
    let axes = mesh.axes.iter().filter(|a| a.name != STAGES).cloned().collect();
    let pieces = Pieces { mesh: Mesh { axes }, shards: shares, stages: parts.iter().map(of_stage).collect() };
    let held = |stage: usize, rank: usize, values: &Values| -> Values {
        let of = |(n, t): (&String, &Tensor)| {
            let at = pieces.placed(stage, n.strip_prefix(GRAD).unwrap_or(n))?;
            Some((n.clone(), piece(t, at, &pieces.mesh, rank)))
        };
        values.iter().filter_map(of).collect()
    };
    let every = || 0..pieces.mesh.ranks();
    let start = |stage: usize| every().map(|rank| held(stage, rank, &values)).collect::<Vec<Values>>();
    let mut states: Vec<Vec<Values>> = (0..ranks.pp).map(start).collect();
    for micro in 0..MICRO {
        let given: Vec<Values> = (0..shares).map(|i| inputs(&lengths[i], 2 * (micro * shares + i))).collect();
        let stage = |i: usize| {
            let leaves = |rank: usize| {
                let given = given[pieces.share(rank)].clone();
                states[i][rank].clone().into_iter().chain(given).chain(scalars(micro)).collect()
            };
            Stage {
                graph: &parts[i].grad.graph,
                leaves: every().map(leaves).collect(),
                sizes: pieces.sizes(&given),
            }
        };
        let stages: Vec<Stage> = (0..ranks.pp).map(stage).collect();
        let outs = eval_stages(&stages, &pieces.mesh, EXACT).unwrap();
        for (states, outs) in states.iter_mut().flatten().zip(outs.into_iter().flatten()) {
            states.extend(outs.into_iter().filter(|(n, _)| n.starts_with(GRAD)));
        }
    }
    for (stage, states) in states.iter().enumerate() {
        for (name, want) in &gradients {
            let at = placed(&parts[stage], &whole.weights).remove(name);
            let Some(at) = at else { continue };
            let over = pieces.mesh.axes.iter().filter(|a| at.contains(&(a.name.clone(), Placement::Partial)));
            for group in pieces.mesh.groups(&over.cloned().collect::<Vec<_>>()).unwrap() {
                let sum = |x: Tensor, y: &Tensor| {
                    let both = x.reals().iter().zip(y.reals()).map(|(x, y)| x + y).collect();
                    Tensor::exact(DType::F32, &x.shape, both)
                };
                let all = group[1..].iter().map(|rank| &states[*rank][name]);
                let want = piece(want, &at, &pieces.mesh, group[0]);
                close(
                    &format!("{what}, stage {stage}: {name}"),
                    &all.fold(states[group[0]][name].clone(), sum),
                    &want,
                );
            }
        }
    }
    if ranks.pp > 1 {
        return; // The norm is summed over stages, which the interpreter does not run in lockstep.
    }
    let updated = |g: &Graph, given: Values| -> Values {
        let zeros =
            leaves(g).into_iter().map(|(n, t)| (n, Tensor::exact(DType::F32, &t.shape, vec![0.0; t.len()])));
        let scalars =
            [("lr", 0.1), ("correction1", 10.0), ("correction2", 1000.0)].map(|(n, x)| scalar(n, x));
        zeros.chain(given).chain(scalars).collect()
    };
    let given = updated(&whole.update.graph, values.into_iter().chain(gradients).collect());
    let want = eval(&whole.update.graph, &given, &Sizes::new(), EXACT).unwrap();
    let update = &parts[0].update.graph;
    let given: Vec<Values> = states[0].iter().map(|s| updated(update, s.clone())).collect();
    let got = eval_ranks(update, &pieces.mesh, &given, &vec![Sizes::new(); given.len()], EXACT).unwrap();
    for (rank, outs) in got.iter().enumerate() {
        for (name, want) in &want {
            let (_, got) =
                outs.iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("{what}: no {name}"));
            let of = parts[0].weights.iter().find(|w| name.ends_with(&w.name)).map(|w| w.name.as_str());
            let at = of.and_then(|w| pieces.placed(0, w)).cloned().unwrap_or_default();
            close(&format!("{what}, rank {rank}: {name}"), got, &piece(want, &at, &pieces.mesh, rank));
        }
    }
}
