//! Equal forms of every family's graphs: whatever form is taken, the values are those of the graph, bit for bit where the
//! fidelity says so; weights folded ahead give the same results from kernels.

use crate::stages::close;
use crate::stages::families::{FAMILIES, config, evaluate, machine, program};
use astrai_builders::{Cache, Logits, ModelConfig, Program, build};
use astrai_engine::machine::{Kind, Machine};
use astrai_ir::ops::Op;
use astrai_ir::{DType, Dim, Graph, Target, verify};
use astrai_passes::{self as passes, Extraction, Fidelity, Saturate, SaturationReport};
use astrai_runtime::{Options, Session, Value, compile};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

fn form(
    g: &Graph,
    fidelity: Fidelity,
    extraction: Extraction,
    trained: bool,
) -> (Graph, Vec<SaturationReport>) {
    let how = Saturate { fidelity, extraction, ..Saturate::default() };
    let (after, found) = passes::saturate(g, machine().backend().target(), how, trained).unwrap();
    verify(&after).unwrap_or_else(|e| panic!("{e}\n{after}"));
    (after, found)
}

/// The graph of a family as the stage gets it, with or without gradients.
fn ready(text: &str, storage: DType, gradient: bool) -> Graph {
    let g = passes::merge(&build(&config(text), &program(12)).unwrap()).unwrap();
    let g = passes::precision(&g, passes::Policy { storage, wide: &Default::default() }).unwrap();
    let how = passes::Gradients::default();
    let g = if gradient { passes::differentiate(&g, "loss", how).unwrap() } else { g };
    passes::canonicalise(&g).unwrap()
}

#[test]
fn every_form_means_the_same() {
    for (name, text) in FAMILIES {
        for (storage, gradient) in
            [(DType::F32, false), (DType::BF16, false), (DType::F32, true), (DType::BF16, true)]
        {
            let g = ready(text, storage, gradient);
            let want = evaluate(&g);
            for extraction in [Extraction::Cheapest, Extraction::Costliest, Extraction::Random(1)] {
                let (after, found) = form(&g, Fidelity::Exact, extraction, gradient);
                assert_eq!(evaluate(&after), want, "{name} {storage} {extraction:?}");
                assert!(found.iter().all(|f| f.saturated && f.size[1] <= 20_000), "{name}: {found:?}");
                let loose = if gradient { Fidelity::Standard } else { Fidelity::Fast };
                let (after, found) = form(&g, loose, extraction, gradient);
                let share = if storage == DType::F32 { 2e-5 } else { 0.05 };
                close(&format!("{name} {storage} {loose:?} {extraction:?}"), &evaluate(&after), &want, share);
                assert!(found.iter().all(|f| f.size[1] <= 20_000), "{name}: {found:?}");
            }
        }
    }
}

#[test]
fn the_default_changes_nothing_that_costs_the_same() {
    for (name, text) in FAMILIES {
        for storage in [DType::F32, DType::BF16] {
            let g = ready(text, storage, false);
            let (after, found) = form(&g, Fidelity::Exact, Extraction::Cheapest, false);
            assert_eq!(after.to_string(), g.to_string(), "{name} {storage}: {found:?}");
        }
    }
}

#[test]
fn the_default_adds_no_kernel() {
    for (name, text) in FAMILIES {
        for storage in [DType::F32, DType::BF16] {
            let g = build(&config(text), &program(12)).unwrap();
            let launches = |enabled: bool, gradient_of: Option<&str>| {
                let saturate = Saturate { enabled, ..Saturate::default() };
                let gradient_of = gradient_of.map(str::to_string);
                let options = Options { storage, saturate, gradient_of, ..Options::default() };
                compile(&g, machine().backend(), &options).unwrap().plan.launches()
            };
            for gradient in [None, Some("loss")] {
                let (with, without) = (launches(true, gradient), launches(false, gradient));
                assert!(with <= without, "{name} {storage} {gradient:?}: {without} launches became {with}");
            }
        }
    }
}

#[test]
fn the_search_does_not_grow_with_depth() {
    for (name, text) in FAMILIES {
        let found = |layers: usize| {
            let text = text.replace("\"num_hidden_layers\": 2", &format!("\"num_hidden_layers\": {layers}"));
            form(&ready(&text, DType::BF16, false), Fidelity::Fast, Extraction::Cheapest, false).1
        };
        let (few, many) = (found(2), found(30));
        assert_eq!((&few[0].fired, few[0].size), (&many[0].fired, many[0].size), "{name}");
    }
}

/// `2·(x·A)·B + b + c` behind a norm, in a session of kernels and in one of the interpreter.
#[test]
fn folded_weights_run() {
    let (t, k) = (Dim::from(5), 48);
    let mut g = Graph::new(vec![]);
    let x = g.input("x", DType::F32, vec![t, k.into()]).unwrap();
    let mut source = HashMap::new();
    let mut weight = |g: &mut Graph, name: &str, shape: &[usize]| {
        let values =
            (0..shape.iter().product()).map(|i| ((i * 37 + name.len() * 11) % 101) as f32 / 101.0 - 0.5);
        let bytes = values.flat_map(f32::to_le_bytes).collect();
        source.insert(name.to_string(), Value { dtype: DType::F32, shape: shape.to_vec(), bytes });
        g.weight(name, DType::F32, shape).unwrap()
    };
    let gain = weight(&mut g, "gain", &[k]);
    let (a, b) = (weight(&mut g, "a", &[40, k]), weight(&mut g, "bb", &[k, 40]));
    let (bias, more) = (weight(&mut g, "bias", &[k]), weight(&mut g, "more_bias", &[k]));
    let n = g.rms_norm(x, gain, 1e-5).unwrap();
    let low = g.linear(n, a).unwrap();
    let y = g.linear(low, b).unwrap();
    let mut y = g.scale(y, 2.0).unwrap();
    for bias in [bias, more] {
        y = g.add(y, bias).unwrap();
    }
    g.set_output("y", y).unwrap();
    let input = Value {
        dtype: DType::F32,
        shape: vec![5, k],
        bytes: (0..5 * k).flat_map(|i| ((i * 13 % 29) as f32 / 29.0 - 0.4).to_le_bytes()).collect(),
    };
    let run = |device: Kind, fidelity: Fidelity| {
        let machine = Machine::new(device, 2).unwrap();
        let saturate = Saturate { fidelity, ..Saturate::default() };
        let program = compile(&g, machine.backend(), &Options { saturate, ..Options::default() }).unwrap();
        let counts = (program.plan.launches(), program.derived.len());
        let mut session = Session::new(Arc::new(program), &source, &machine.device, &mut |_, _| {}).unwrap();
        let y = session.run(&[("x", &input)]).unwrap().remove(0).1;
        let values: Vec<f32> = y.bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        (counts, values)
    };
    for device in [Kind::Cpu, Kind::Interpreter] {
        let ((before, none), want) = run(device, Fidelity::Exact);
        let ((after, derived), got) = run(device, Fidelity::Fast);
        println!("{device:?}: {before} launches, {after} with {derived} derived weights");
        assert!(none == 0 && derived >= 2 && after < before);
        let top = want.iter().fold(0f32, |m, x| m.max(x.abs()));
        assert!(want.iter().zip(&got).all(|(a, b)| (a - b).abs() <= 2e-5 * top), "{want:?}\n{got:?}");
    }
}

/// Peaks of an H100 (data sheet), and of the host of `bench/RESULTS.md` (measured).
fn machines() -> [Target; 2] {
    let host = machine().backend().target().clone();
    let h100 = Target {
        name: "h100".into(),
        units: 132,
        flops: vec![(DType::F32, 67e12), (DType::BF16, 989e12)],
        bandwidth: 3.35e12,
        launch: 3e-6,
        memory: 80 << 30,
        ..host.clone()
    };
    let flops = vec![(DType::F32, 416e9), (DType::BF16, 3.4e12)];
    [h100, Target { flops, bandwidth: 58e9, ..host }]
}

/// Heads of keys that attention reads in each body, and whether any body gathers pages.
fn key_heads(g: &Graph) -> (Vec<usize>, bool) {
    let bodies = || g.blocks().iter().map(|b| &b.graph);
    let heads = bodies().flat_map(|b| {
        let attention = b.nodes().iter().filter(|n| matches!(n.op, Op::Attention(_)));
        attention.filter_map(|n| b.ty(n.args[1]).shape[1].size())
    });
    let wide = |b: &Graph| b.nodes().iter().any(|n| matches!(n.op, Op::Gather(_)) && n.ty().rank() == 3);
    (heads.collect(), bodies().any(wide))
}

/// DeepSeek-V3 as published: latents are read where they lie in decode, keys and values are made of them in prefill.
#[test]
fn published_latents_are_absorbed_by_cost_alone() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/configs/deepseek-v3.json");
    if !path.is_file() {
        return println!("skipped: deepseek-v3.json is not here");
    }
    let config = ModelConfig::read(&path).unwrap().config;
    let cache = Cache { page: 16, pages: 256, table: 256, windows: None };
    let full = Program { logits: Logits::Last, ..Program::full(1, 4096) };
    for target in machines() {
        for storage in [DType::F32, DType::BF16] {
            let form = |program: &Program, fidelity: Fidelity| {
                let g = passes::merge(&build(&config, program).unwrap()).unwrap();
                let g = passes::precision(&g, passes::Policy { storage, wide: &Default::default() }).unwrap();
                let g = passes::canonicalise(&g).unwrap();
                let how = Saturate { fidelity, ..Saturate::default() };
                let (after, found) = passes::saturate(&g, &target, how, false).unwrap();
                verify(&after).unwrap();
                assert!(found.iter().all(|f| f.saturated && f.size[1] <= 20_000), "{found:?}");
                key_heads(&after)
            };
            let name = format!("{} {storage}", target.name);
            let decode = Program::paged(1, 1, cache);
            assert_eq!(form(&decode, Fidelity::Standard), (vec![1, 1], false), "{name} decode");
            assert_eq!(form(&decode, Fidelity::Exact), (vec![128, 128], true), "{name} exact decode");
            assert_eq!(form(&full, Fidelity::Standard), (vec![128, 128], false), "{name} prefill");
            let paged = Program::paged(4096, 1, cache);
            assert_eq!(form(&paged, Fidelity::Standard).0, [128, 128], "{name} prefill over pages");
        }
    }
}
