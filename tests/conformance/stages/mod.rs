//! The stages over the graphs of every registered family: what they must not change, what a second run must not change,
//! layer kinds compiled once, and memory that no two values share.

mod families;
mod place;
mod saturate;
mod snapshot;

use self::families::{ENCODER, FAMILIES, config, drawn, evaluate, evaluate_with, leaves, machine, program};
use astrai_builders::config::{LayerSpec, MlpSpec, NormPlacement, QkNorm};
use astrai_builders::{Cache, Logits, Loss, Program, build};
use astrai_codegen::cuda::Cuda;
use astrai_ir::json::write_json;
use astrai_ir::ops::Op;
use astrai_ir::{Backend, DType, Graph, Precision, Tensor, verify};
use astrai_passes as passes;
use astrai_runtime::{Compiled, Options, compile};
use std::collections::{BTreeMap, BTreeSet, HashMap};

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

/// Adapters of all linear layers, experts' included, are the model with W + s·B·A in the place of each W; their gradients are the slopes of the
/// loss; and routers are none.
#[test]
fn adapters_of_every_family_are_their_merged_weights() {
    let exact = Precision { exact: true };
    let value = |outs: &[(String, Tensor)], name: &str| {
        outs.iter().find(|(n, _)| n == name).map(|(_, t)| t.reals()).unwrap_or_else(|| panic!("no {name}"))
    };
    for (name, text) in FAMILIES {
        let g = build(&config(text), &program(12)).unwrap();
        let (layers, scale) = (passes::linear_layers(&g), 0.5);
        let has = |what: &str| layers.keys().any(|m| m.contains(what));
        let own_experts = g.nodes().iter().any(|n| matches!(&n.op, Op::Weight(w) if w.name.contains('*')));
        assert_eq!(has("experts.1."), own_experts, "{name}: {layers:?}");
        for layer in &config(text).layers {
            if let MlpSpec::Experts(e) = &layer.mlp {
                assert!(!layers.keys().any(|m| m.ends_with(e.names.router)), "{name}: {layers:?}");
            }
        }
        let one = |m: &String| (m.clone(), passes::Factors { rank: 2, scale });
        let adapter = passes::Adapter { modules: layers.keys().map(one).collect(), dora: false };
        let adapted = passes::adapt(&g, &adapter).unwrap();
        verify(&adapted).unwrap();
        let given = leaves(&adapted);
        let outs = evaluate_with(&adapted, &given, exact);
        assert_eq!(evaluate(&passes::merge(&adapted).unwrap()), evaluate(&adapted), "{name}: merge");
        // What each module's factors add, by the names of their tensors.
        let more: BTreeMap<&String, Vec<f64>> = layers
            .iter()
            .map(|(m, [rows, columns])| {
                let named = adapter.tensors(m, [*rows, *columns]);
                let [a, b] = [0, 1].map(|i| drawn(&named[i].0, named[i].1.iter().product()));
                let at = |i: usize| {
                    (0..2).map(|k| scale * b[i / columns * 2 + k] * a[k * columns + i % columns]).sum()
                };
                (m, (0..rows * columns).map(at).collect())
            })
            .collect();
        let mut merged = leaves(&g);
        for n in g.nodes() {
            let Op::Weight(w) = &n.op else { continue };
            let (mut x, mut first) = (merged[&w.name].reals(), 0);
            let width: usize = merged[&w.name].shape.iter().skip(1).product();
            for part in w.rows() {
                let module = part.name.strip_suffix(".weight").unwrap_or_default().to_string();
                let add = more.get(&module).into_iter().flatten();
                x[first * width..].iter_mut().zip(add).for_each(|(x, more)| *x += more);
                first += part.rows;
            }
            let shape = merged[&w.name].shape.clone();
            merged.insert(w.name.clone(), Tensor::exact(DType::F32, &shape, x));
        }
        close(name, &outs, &evaluate_with(&g, &merged, exact), 1e-6);
        let slopes = passes::differentiate(&adapted, "loss", passes::Gradients::default()).unwrap();
        let slopes = evaluate_with(&slopes, &given, exact);
        let (step, mut slope) = (1e-5, 0.0);
        let mut moved: [HashMap<String, Tensor>; 2] = [given.clone(), given.clone()];
        for (name, gradient) in &slopes {
            let Some(factor) = name.strip_prefix(passes::GRAD) else { continue };
            assert!(factor.contains(".lora_"), "{name} is trained");
            let along = drawn(name, gradient.len());
            slope += gradient.reals().iter().zip(&along).map(|(g, d)| g * d).sum::<f64>();
            for (to, by) in moved.iter_mut().zip([step, -step]) {
                let x = given[factor].reals().iter().zip(&along).map(|(x, d)| x + by * d).collect();
                to.insert(factor.into(), Tensor::exact(DType::F32, &gradient.shape, x));
            }
        }
        let [up, down] = moved.map(|m| value(&evaluate_with(&adapted, &m, exact), "loss")[0]);
        let difference = (up - down) / (2.0 * step);
        assert!((slope - difference).abs() < 1e-6 * slope.abs().max(0.1), "{name}: {slope} but {difference}");
    }
}

/// Experts of a layer are adapted alike, and without magnitudes.
#[test]
fn an_expert_alone_is_not_adapted() {
    let (_, text) = FAMILIES.iter().find(|(name, _)| *name == "mixtral").unwrap();
    let g = build(&config(text), &program(12)).unwrap();
    let of = |modules: &[&str], dora| {
        let one = |m: &&str| (format!("model.layers.1.{m}"), passes::Factors { rank: 2, scale: 1.0 });
        passes::adapt(&g, &passes::Adapter { modules: modules.iter().map(one).collect(), dora })
    };
    let all = [0, 1, 2, 3].map(|e| format!("block_sparse_moe.experts.{e}.w1"));
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    assert!(of(&all, false).is_ok() && of(&["self_attn.q_proj"], true).is_ok());
    let line = of(&all[1..], false).unwrap_err().to_string();
    assert!(line.contains("experts of a layer are adapted alike"), "{line}");
    let line = of(&all, true).unwrap_err().to_string();
    assert!(line.contains("magnitudes are not trained"), "{line}");
    let line = of(&["block_sparse_moe.gate"], false).unwrap_err().to_string();
    assert!(line.contains("is no linear layer that can be adapted"), "{line}");
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
