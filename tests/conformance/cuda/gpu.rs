//! A GPU of this machine, by `bench/gpu.sh`: the kernel tables on it against the interpreter and the emulator, and constants for the cost
//! model, a JSON line each. Tests of these names run when they are asked for; the script's own test runs them on the emulated driver.

use super::ptx::Emulator;
use super::{Case, cases, compare, compiled, forms, results};
use crate::driver::emulated;
use astrai_engine::Machine;
use astrai_engine::machine::Kind;
use astrai_estimate::measure;
use astrai_ir::ops::{Dot, ReduceKind};
use astrai_ir::{DType, Dim, Graph, Tensor};
use astrai_runtime::{Options, Session, Value, compile};
use serde_json::{Value as Json, json};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

/// True for a trial of the script: one small table, small sizes.
fn small() -> bool {
    std::env::var_os("GPU_SMALL").is_some()
}

fn gpu() -> Machine {
    Machine::new(Kind::Cuda(0), 0).unwrap_or_else(|e| panic!("{e}"))
}

/// Runs one piece of a table, and says how it ended and how far it is from the emulator's.
fn told(name: &str, piece: impl FnOnce() -> Json) -> bool {
    let started = Instant::now();
    let ended = catch_unwind(AssertUnwindSafe(piece));
    let said = ended.as_ref().err().map(|e| {
        let text = e.downcast_ref::<String>().cloned();
        text.or_else(|| e.downcast_ref::<&str>().map(|t| t.to_string()))
    });
    let seconds = started.elapsed().as_secs_f64();
    let ok = ended.is_ok();
    let line =
        json!({"table": name, "ok": ok, "seconds": seconds, "said": said.flatten(), "emulator": ended.ok()});
    println!("\n{line}");
    ok
}

/// Results of a GPU beside those of the emulator: how many there are, how many are the same bits, and the largest difference of the others,
/// as a part of a result's largest number.
fn beside(of_gpu: &[(String, Tensor)], emulated: &[(String, Tensor)]) -> Json {
    let (mut same, mut furthest) = (0, 0f64);
    for ((_, a), (_, b)) in of_gpu.iter().zip(emulated) {
        if a.to_bytes() == b.to_bytes() {
            same += 1;
            continue;
        }
        let top = b.reals().iter().filter(|x| x.is_finite()).fold(f64::MIN_POSITIVE, |m, x| m.max(x.abs()));
        let same = |x: f64, y: f64| x == y || x.is_nan() && y.is_nan();
        let apart = |i| if same(a.at(i), b.at(i)) { 0.0 } else { (a.at(i) - b.at(i)).abs() / top };
        // What is a number on one side alone is as far as can be.
        let far = (0..b.len()).map(apart).map(|x| if x.is_nan() { f64::MAX } else { x });
        furthest = far.fold(furthest, f64::max);
    }
    json!({"results": emulated.len(), "same_bits": same, "furthest": furthest})
}

fn tensors(results: Vec<(String, Value)>) -> Vec<(String, Tensor)> {
    results.into_iter().map(|(name, v)| (name, v.to_tensor().unwrap())).collect()
}

#[test]
#[ignore = "wants a CUDA device: bench/gpu.sh runs it"]
fn tables_agree_on_the_gpu() {
    let machine = gpu();
    let emulator = Emulator::of(machine.backend().target().clone()).map(|device| Machine::over(device));
    let mut ok = true;
    for form in forms::FORMS.iter().filter(|f| !small() || f.name == "pages") {
        ok &= told(form.name, || {
            let (table, most) = ((form.table)(), form.sizes[form.sizes.len() - 1]);
            table.run_on([&machine], form.sizes);
            let program = Arc::new(table.compiled_on(&machine));
            let results = |m| table.results_of(&program, m, (most, 0)).unwrap_or_else(|e| panic!("{e}"));
            emulator.as_ref().map_or(Json::Null, |e| beside(&results(&machine), &results(e)))
        });
    }
    let some = |(i, _): &(usize, &Case)| !small() || *i < 3;
    let cases = cases::cases();
    for (_, case) in cases.iter().enumerate().filter(some) {
        ok &= told(&case.name, || {
            let program = compiled(case, &machine);
            if program.check_memory(&*machine.device).is_err() {
                return Json::Null;
            }
            let (mut of_gpu, mut emulated) = (vec![], vec![]);
            for at in case.runs() {
                let got = results(case, &program, &machine, at).unwrap_or_else(|e| panic!("{e}"));
                compare(case, at, &got);
                if let Some(e) = &emulator {
                    of_gpu.extend(tensors(got));
                    emulated
                        .extend(tensors(results(case, &program, e, at).unwrap_or_else(|e| panic!("{e}"))));
                }
            }
            emulator.as_ref().map_or(Json::Null, |_| beside(&of_gpu, &emulated))
        });
    }
    assert!(ok, "a table does not agree");
}

/// Seconds of a run of a program whose weights are already there: the least of so many.
fn seconds(machine: &Machine, graph: &Graph, runs: usize) -> f64 {
    let program = compile(graph, machine.backend(), &Options::default()).unwrap_or_else(|e| panic!("{e}"));
    let ones = |ty: &astrai_ir::Type| {
        let shape: Vec<usize> = ty.shape.iter().filter_map(|d| d.size()).collect();
        let bytes = shape.iter().product::<usize>() * ty.dtype.bytes();
        // Ones, two and a bit: no zeros, whose products take less power.
        Value { dtype: ty.dtype, shape, bytes: (0..bytes).map(|i| [0x3f, 0x40, 0x3e][i % 3]).collect() }
    };
    let leaves = graph.nodes().iter().filter_map(|n| Some((n.op.leaf_name()?.to_string(), ones(n.ty()))));
    let weights: HashMap<String, Value> = leaves.collect();
    let one = Value::f32(&[1], &[1.5]);
    let mut session = Session::new(Arc::new(program), &weights, &machine.device, &mut |_, _| {}).unwrap();
    let mut run = || {
        let started = Instant::now();
        // No row of the result is copied back.
        session.execute_rows(&[("x", &one)], Some(&|_| false)).unwrap();
        machine.device.synchronise().unwrap();
        started.elapsed().as_secs_f64()
    };
    // Eager, recorded; then replays.
    (0..2).for_each(|_| _ = run());
    (0..runs).map(|_| run()).fold(f64::INFINITY, f64::min)
}

#[test]
#[ignore = "wants a CUDA device: bench/gpu.sh runs it"]
fn constants_of_the_gpu() {
    let machine = gpu();
    let said = |name: &str, unit: &str, value: f64| {
        println!("\n{}", json!({"constant": name, "unit": unit, "value": value}))
    };
    let (side, elements, runs) = if small() { (64, 1 << 12, 2) } else { (4096, 1 << 28, 20) };
    let here = measure::here(&machine.device).unwrap_or_else(|e| panic!("{e}"));
    said("recorded launch", "s", here.launch);
    said("smallest run", "s", measure::chain(&machine.device, measure::CHAIN[0]).unwrap());
    let mut g = Graph::new(vec![]);
    let x = g.input("x", DType::F32, vec![Dim::from(1)]).unwrap();
    let line = 1 << 12;
    let [a, b] = ["a", "b"].map(|name| g.weight(name, DType::F32, &[elements / line, line]).unwrap());
    let scaled = g.mul(a, x).unwrap();
    let sum = g.add(scaled, b).unwrap();
    // Short, for there is room on the host for every result.
    let y = g.reduce(ReduceKind::Sum, sum, &[1]).unwrap();
    g.set_output("y", y).unwrap();
    said("bandwidth", "B/s", 8.0 * elements as f64 / seconds(&machine, &g, runs));
    for dtype in [DType::F32, DType::BF16] {
        let mut g = Graph::new(vec![]);
        let x = g.input("x", DType::F32, vec![Dim::from(1)]).unwrap();
        let [a, b] = ["a", "b"].map(|name| g.weight(name, dtype, &[side, side]).unwrap());
        let [a, b] = [a, b].map(|side| g.cast(side, DType::F32).unwrap());
        let y = g.push(Dot { batch: vec![], contract: vec![(1, 1)] }, &[a, b]).unwrap();
        let y = g.mul(y, x).unwrap();
        let y = g.reduce(ReduceKind::Sum, y, &[1]).unwrap();
        g.set_output("y", y).unwrap();
        let flops = 2.0 * (side as f64).powi(3);
        said(&format!("product of {dtype}"), "flop/s", flops / seconds(&machine, &g, runs));
    }
}

/// The whole script on the emulated driver, with what `gpu.sh pack` would put beside it.
#[test]
fn the_script_for_a_gpu_runs_whole() {
    let Some(driver) = emulated() else { return };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let here = std::env::current_exe().unwrap();
    let nvrtc = driver.nvrtc.parent().unwrap();
    let links = [
        (Path::new(env!("CARGO_BIN_EXE_astrai")), "astrai"),
        (&here, "kernels"),
        (nvrtc, "nvrtc"),
        (&root.join("bench/gpu.sh"), "gpu.sh"),
        (&root.join("bench/torch_lm.py"), "torch_lm.py"),
    ];
    for (from, name) in links {
        std::os::unix::fs::symlink(from, at(name)).unwrap();
    }
    std::fs::create_dir(at("golden")).unwrap();
    std::os::unix::fs::symlink(root.join("tests/golden/llama"), at("golden/llama")).unwrap();
    let out = at("out.jsonl");
    let mut script = Command::new("sh");
    script.arg(at("gpu.sh")).arg(&out).env("LD_LIBRARY_PATH", &driver.folder).env("GPU_SMALL", "1");
    let ran = script.output().unwrap();
    let text = std::fs::read_to_string(&out).unwrap_or_default();
    let lines: Vec<Json> =
        text.lines().map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{l}: {e}"))).collect();
    assert!(ran.status.success(), "{text}\n{}", String::from_utf8_lossy(&ran.stderr));
    let of = |step: &'static str| lines.iter().filter(move |l| l["step"] == step);
    for step in ["machine", "kernels", "golden", "constants", "timings"] {
        assert!(of(step).any(|l| l["exit"] == 0), "{step}: {text}");
    }
    assert!(of("kernels").any(|l| l["table"] == "pages" && l["ok"] == true), "{text}");
    // This GPU is emulated, too.
    let emulated = of("kernels").filter(|l| l["table"].is_string()).map(|l| &l["emulator"]);
    emulated
        .for_each(|e| assert!(e["results"].as_u64() > Some(0) && e["same_bits"] == e["results"], "{text}"));
    assert!(of("golden").any(|l| l["ok"] == true && l["device"] == "cuda"), "{text}");
    assert!(
        of("constants").any(|l| l["constant"] == "bandwidth" && l["value"].as_f64() > Some(0.0)),
        "{text}"
    );
    assert!(of("timings").any(|l| l["job"] == "decode" && l["tokens_per_s"].as_f64() > Some(0.0)), "{text}");
    assert!(of("sanitizer").count() > 0, "{text}");
}
