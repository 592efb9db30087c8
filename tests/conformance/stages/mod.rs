//! The stages over the graphs of every registered family: what they must not change, what a second run must not change,
//! layer kinds compiled once, and memory that no two values share.

mod families;
mod place;
mod saturate;
mod snapshot;

use self::families::{ENCODER, FAMILIES, config, evaluate, machine, program};
use astrai_builders::config::{LayerSpec, MlpSpec, NormPlacement, QkNorm};
use astrai_builders::{Cache, Logits, Loss, Program, build};
use astrai_codegen::cuda::Cuda;
use astrai_ir::json::write_json;
use astrai_ir::ops::Op;
use astrai_ir::{Backend, DType, Graph, Tensor, verify};
use astrai_passes as passes;
use astrai_runtime::{Compiled, Options, compile};
use std::collections::BTreeSet;

#[test]
fn every_family_is_here() {
    for model in astrai_builders::registry::MODELS {
        assert!(
            FAMILIES.iter().chain([&ENCODER]).any(|(name, _)| *name == model.name),
            "add a tiny config of `{}`",
            model.name
        );
    }
}

fn graphs() -> Vec<(String, Graph)> {
    let graph = |(name, text): &(&str, &str)| (name.to_string(), build(&config(text), &program(12)).unwrap());
    let vectors = Program { logits: Logits::None, loss: Loss::None, ..program(12) };
    let encoder = (ENCODER.0.to_string(), build(&config(ENCODER.1), &vectors).unwrap());
    FAMILIES.iter().map(graph).chain([encoder]).collect()
}

fn close(name: &str, got: &[(String, Tensor)], want: &[(String, Tensor)], share: f64) {
    for ((out, a), (_, b)) in got.iter().zip(want) {
        let top = b.reals().iter().fold(0f64, |m, x| m.max(x.abs()));
        let off = a.reals().iter().zip(b.reals()).fold(0f64, |m, (x, y)| m.max((x - y).abs()));
        assert!(off <= share * top, "{name}: {out} is off by {off} of {top}");
    }
}

#[test]
fn stages_keep_the_meaning_and_settle_at_once() {
    for (name, g) in graphs() {
        let want = evaluate(&g);
        let merged = passes::merge(&g).unwrap();
        verify(&merged).unwrap();
        assert_eq!(evaluate(&merged), want, "{name}: merge");
        assert_eq!(write_json(&passes::merge(&merged).unwrap()), write_json(&merged), "{name}: merge again");
        let dots =
            |g: &Graph| g.nodes().iter().filter(|n| matches!(n.op, Op::Dot(_) | Op::GroupedDot(_))).count();
        let (before, after) = (dots(&g.blocks()[0].graph), dots(&merged.blocks()[0].graph));
        // q|k|v, o, gate|up, down; in some checkpoints the joined ones are one tensor already. Experts have a router, and beside
        // them shared ones gate|up of all and each its down.
        let body = &g.blocks()[0].graph;
        let routers = body.nodes().iter().filter(|n| matches!(n.op, Op::Route(_))).count();
        let shared = |n: &&astrai_ir::Node| {
            n.op.leaf_name().is_some_and(|name| name.contains("shared_experts") && name.contains(".down"))
        };
        let shared = body.nodes().iter().filter(shared).count();
        // Latents are raised to keys and values, and where queries have one, to queries.
        let raised = |n: &&astrai_ir::Node| {
            n.op.leaf_name().is_some_and(|name| name.contains("kv_b_proj") || name.contains("q_b_proj"))
        };
        let raised = body.nodes().iter().filter(raised).count();
        assert!(
            after == 4 + raised + routers + shared + shared.min(1) && (after < before || name == "phi3"),
            "{name}: {before} dots became {after}"
        );
        for storage in [DType::F32, DType::BF16] {
            let stored =
                passes::precision(&merged, passes::Policy { storage, wide: &Default::default() }).unwrap();
            verify(&stored).unwrap();
            let exact = evaluate(&stored);
            close(&name, &exact, &want, if storage == DType::F32 { 0.0 } else { 0.05 });
            let plain = passes::canonicalise(&stored).unwrap();
            verify(&plain).unwrap();
            assert_eq!(evaluate(&plain), exact, "{name}: canonicalise");
            let again = passes::canonicalise(&plain).unwrap();
            assert_eq!(write_json(&again), write_json(&plain), "{name}: canonicalise again");
            if storage == DType::F32 {
                let apart = passes::decompose(&plain, |op| matches!(op, Op::Attention(_))).unwrap();
                verify(&apart).unwrap();
                close(&name, &evaluate(&apart), &exact, 2e-5);
            }
        }
    }
}

/// Norms of a layer that are no prologue of a dot: behind attention and MLP, and over all heads of queries and keys.
fn norms_apart(layer: &LayerSpec) -> u64 {
    let behind = if layer.norms == NormPlacement::Pre { 0 } else { 2 };
    let whole = if layer.attention.qk_norm == QkNorm::WholeBeforeRope { 2 } else { 0 };
    behind + whole
}

fn compiled(g: &Graph, storage: DType) -> Compiled {
    compile(g, machine().backend(), &Options { storage, ..Options::default() }).unwrap()
}

#[test]
fn a_kind_of_layer_is_compiled_once_whatever_the_depth() {
    for (name, text) in FAMILIES {
        for storage in [DType::F32, DType::BF16] {
            let at = |layers: usize| {
                let text =
                    text.replace("\"num_hidden_layers\": 2", &format!("\"num_hidden_layers\": {layers}"));
                compiled(&build(&config(&text), &program(64)).unwrap(), storage)
            };
            // Enough for every kind of layer to come twice, with what its calls share.
            let (few, many) = (at(4), at(40));
            let keys = |p: &Compiled| p.plan.regions.iter().map(|r| r.piece.key()).collect::<Vec<_>>();
            assert_eq!(keys(&few), keys(&many), "{name} {storage}");
            let read = config(text);
            let (kinds, _) = read.layer_kinds();
            assert_eq!(few.plan.bodies.len(), kinds.len(), "{name}");
            let (a, b) = (few.cost().unwrap(), many.cost().unwrap());
            assert_eq!(a.arena_bytes, b.arena_bytes, "{name}: scratch is shared");
            let layer = (b.launches - a.launches) / 36;
            // The router, the choice, and twice rows in another order; of shared experts gate and up at once, each down.
            let experts = match &kinds[0].mlp {
                MlpSpec::Experts(e) => 4 + e.shared.map_or(0, |s| 1 + s.count as u64),
                MlpSpec::Stacked(_) => 4,
                MlpSpec::Dense { .. } => 0,
            };
            // Queries and keys of latents are put together of what is rotated and what is not; raising is a dot of its own.
            let latent = kinds[0].attention.latent.as_ref().map_or(0, |l| 3 + u64::from(l.q_rank.is_some()));
            let most = 8 + norms_apart(kinds[0]) + experts + latent;
            assert!(
                layer <= most && few.plan.bodies.iter().all(|b| b.steps.len() as u64 == layer),
                "{name}: {layer} launches a layer"
            );
        }
    }
}

#[test]
fn no_two_values_share_memory_while_both_are_needed() {
    for (name, g) in graphs() {
        for storage in [DType::F32, DType::BF16] {
            place::check(&compiled(&g, storage).plan).unwrap_or_else(|e| panic!("{name} {storage}: {e}"));
        }
    }
}

/// What a backend matches it emits: every form of every family, forward, backward and over pages.
#[test]
fn every_form_that_is_matched_is_emitted() {
    let machine = machine();
    let cuda = Cuda::new(machine.backend().target().clone());
    let backends: [&dyn Backend; 2] = [machine.backend(), &cuda];
    let interpreted = backends.map(|backend| {
        let (mut forms, mut interpreted) = (BTreeSet::new(), BTreeSet::new());
        for (name, text) in FAMILIES {
            let full = build(&config(text), &program(64)).unwrap();
            let cache = Cache { page: 4, pages: 16, table: 4, windows: None };
            let paged = build(&config(text), &Program::paged(24, 4, cache)).unwrap();
            for storage in [DType::F32, DType::BF16] {
                for (graph, of) in [(&full, None), (&full, Some("loss".to_string())), (&paged, None)] {
                    let options = Options { storage, gradient_of: of, ..Options::default() };
                    let made = compile(graph, backend, &options).unwrap_or_else(|e| panic!("{name}: {e}"));
                    for (region, kernel) in made.plan.regions.iter().zip(&made.kernels) {
                        assert_eq!(region.form().has_kernel(), kernel.is_some(), "{name}: {}", region.origin);
                        forms.insert(region.form().name());
                        if kernel.is_none() {
                            interpreted.extend(region.graph().nodes().iter().map(|n| n.op.name()));
                        }
                    }
                }
            }
        }
        let all = ["attention", "attention_grad", "dot", "grouped", "loops", "loss", "outer", "route"];
        assert!(all.iter().all(|f| forms.contains(f)), "{forms:?}");
        interpreted
    });
    assert_eq!(interpreted[0], interpreted[1], "what the interpreter computes is the same everywhere");
}
