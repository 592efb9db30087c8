//! States: next versions lie where the last ones did, an optimiser's step is one kernel, sums go on from run to run.

use crate::kernels::table::{Fill, Table, compare, dims, run};
use crate::machines::machine;
use astrai_ir::ops::{BinaryKind, Call, Scatter, ScatterKind, Store, UnaryKind};
use astrai_ir::{Block, DType, Graph, NodeId, Tensor, Type};
use astrai_passes::{Destination, GRAD, Gradients};
use astrai_runtime::device::reference::Reference;
use astrai_runtime::{Device, Options, Session, compile};
use std::collections::HashMap;
use std::sync::Arc;

fn state(t: &mut Table, name: &str, shape: &[usize]) -> NodeId {
    t.state(name, Type::new(DType::F32, dims(shape)), Fill::Real(0.1, 1.0))
}

fn store(t: &mut Table, name: &str, state: NodeId, value: NodeId) {
    let next = t.g.push(Store {}, &[state, value]).unwrap();
    t.case(name, next);
}

/// m' = m/2 + g, v' = v/2 + g², w' = w - m'/sqrt(v') · lr, w rounded besides.
fn optimiser(t: &mut Table, tag: &str, shape: &[usize], lr: NodeId) {
    let [w, m, v, d] = ["w", "m", "v", "g"].map(|n| state(t, &format!("{tag}{n}"), shape));
    let narrow = t.state(&format!("{tag}narrow"), Type::new(DType::BF16, dims(shape)), Fill::Real(0.0, 1.0));
    let g = &mut t.g;
    let (half, dd) = (g.scale(m, 0.5).unwrap(), g.mul(d, d).unwrap());
    let next_m = g.add(half, d).unwrap();
    let half = g.scale(v, 0.5).unwrap();
    let next_v = g.add(half, dd).unwrap();
    let root = g.unary(UnaryKind::Sqrt, next_v).unwrap();
    let step = g.div(next_m, root).unwrap();
    let lr = g.broadcast(lr, &dims(shape)).unwrap();
    let step = g.mul(step, lr).unwrap();
    let next_w = g.sub(w, step).unwrap();
    let rounded = g.cast(next_w, DType::BF16).unwrap();
    for (n, s, v) in [("m'", m, next_m), ("v'", v, next_v), ("w'", w, next_w), ("narrow'", narrow, rounded)] {
        store(t, &format!("{tag}{n}"), s, v);
    }
}

#[test]
fn an_optimisers_step_is_one_kernel_in_place() {
    let mut t = Table::new();
    let _ = t.input(DType::F32, crate::kernels::table::rows(&[]), Fill::Real(0.0, 1.0));
    let lr = t.named("lr", DType::F32, dims(&[]), Fill::Real(0.1, 0.2));
    for (tag, shape) in [("a.", &[5, 37][..]), ("b.", &[5, 37]), ("c.", &[9001]), ("d.", &[2, 3, 16])] {
        optimiser(&mut t, tag, shape, lr);
    }
    let program = t.compiled();
    assert_eq!(program.plan.launches(), 4);
    assert_eq!(program.plan.regions.len(), 3, "the first two are one kernel");
    let piece = &program.plan.regions[0].piece;
    assert_eq!((piece.reads.len(), piece.write_types().len(), piece.in_place.len()), (5, 4, 3));
    t.all_native().run_loops(&[1, 4]);
}

#[test]
fn values_that_cannot_lie_in_the_state_are_copied_there() {
    let mut t = Table::new();
    let x = t.named("x", DType::F32, dims(&[4, 8]), Fill::Real(-1.0, 1.0));
    let unused = t.input(DType::F32, crate::kernels::table::rows(&[]), Fill::Real(0.0, 1.0));
    t.case("unused", unused);
    let (a, b, c, d) = (
        state(&mut t, "a", &[4, 8]),
        state(&mut t, "b", &[8, 4]),
        state(&mut t, "c", &[4, 8]),
        state(&mut t, "d", &[4, 8]),
    );
    // An input, the transpose of what is overwritten, a value that is also a result, a value for two states.
    store(&mut t, "input", a, x);
    let flipped = t.g.permute(b, &[1, 0]).unwrap();
    let flipped = t.g.reshape(flipped, dims(&[8, 4])).unwrap();
    let flipped = t.g.unary(UnaryKind::Neg, flipped).unwrap();
    store(&mut t, "flipped", b, flipped);
    let y = t.g.binary(BinaryKind::Mul, c, x).unwrap();
    t.case("y", y);
    store(&mut t, "result", c, y);
    let z = t.g.binary(BinaryKind::Sub, x, y).unwrap();
    store(&mut t, "d'", d, z);
    t.all_native().run_loops(&[3]);
}

#[test]
fn a_version_is_read_before_it_is_overwritten_or_refused() {
    let mut t = Table::new();
    let unused = t.input(DType::F32, crate::kernels::table::rows(&[]), Fill::Real(0.0, 1.0));
    let s = state(&mut t, "s", &[4]);
    let next = t.g.scale(s, 2.0).unwrap();
    store(&mut t, "s'", s, next);
    let late = t.g.unary(UnaryKind::Exp, s).unwrap();
    t.case("late", late);
    t.case("unused", unused);
    t.all_native().run_loops(&[1]);
    // No order of kernels has both versions.
    let next = t.g.output("s'").unwrap();
    let both = t.g.add(next, s).unwrap();
    t.case("both", both);
    let e = compile(&t.g, machine().backend(), &Options::default()).unwrap_err().to_string();
    assert!(e.contains("overwrites"), "{e}");
}

/// Gradients added over two runs are twice those of one; the first run of a sum forgets what was there.
#[test]
fn gradients_add_up_from_run_to_run() {
    let mut t = Table::new();
    let x = t.x(crate::kernels::table::rows(&[40]));
    let (w, v) = (t.weight_named("w", DType::F32, &[33, 40]), t.weight_named("v", DType::F32, &[33]));
    let y = t.g.linear(x, w).unwrap();
    let y = t.g.unary(UnaryKind::Tanh, y).unwrap();
    let shape = t.g.ty(y).shape.clone();
    let v = t.g.broadcast(v, &shape).unwrap();
    let y = t.g.mul(y, v).unwrap();
    let loss = t.g.reduce(astrai_ir::ops::ReduceKind::Sum, y, &[0, 1]).unwrap();
    t.case("loss", loss);
    let leaves = t.values(7);
    let plain = t.gradient_of("loss");
    let want = run(&mut plain.session(), &leaves);
    let reference: Arc<dyn Device> = Arc::new(Reference::default());
    let own = &machine().device;
    for (to, device) in [
        (Destination::States, own),
        (Destination::Accumulators, own),
        (Destination::Accumulators, &reference),
    ] {
        let gradients = Gradients { to, ..Gradients::default() };
        let options = Options { gradient_of: Some("loss".into()), gradients, ..Options::default() };
        let program = Arc::new(compile(&plain.g, device.backend(), &options).unwrap());
        assert!(program.kernels.iter().all(|k| k.is_some() == (device.name() == own.name())));
        let mut states = astrai_runtime::Buffers::new(device);
        states.add("grad.w", DType::F32, &[33, 40]).unwrap();
        states.add("grad.v", DType::F32, &[33]).unwrap();
        states.write("grad.w", |b| b.fill(0xff)).unwrap();
        let weights: HashMap<_, _> =
            ["w", "v"].map(|n| (n.to_string(), astrai_runtime::Value::from_tensor(&leaves[n]))).into();
        let mut session = Session::over(program, &weights, &states, &mut |_, _| {}).unwrap();
        let mut leaves = leaves.clone();
        for i in 0..2 {
            leaves.insert("accumulate".into(), Tensor::f32(&[], &[i as f32]));
            let (got, want) = (run(&mut session, &leaves)[0].1.to_tensor(), want[0].1.to_tensor());
            compare(&got.unwrap(), &want.unwrap(), 1e-6).unwrap();
        }
        let times = if to == Destination::Accumulators { 2.0 } else { 1.0 };
        for (name, value) in &want[1..] {
            let (dtype, shape) = states.shape(name).unwrap();
            let got = states.read(name, |b| Tensor::from_bytes(dtype, shape, b)).unwrap().unwrap();
            assert!(name.starts_with(GRAD));
            let twice: Vec<f32> = value.to_f32().iter().map(|x| x * times).collect();
            compare(&got, &Tensor::f32(shape, &twice), 1e-6).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
    }
}

/// Neither a body nor the rows of a scatter are computed over a state that they read elsewhere than where they write.
#[test]
fn what_reads_a_state_elsewhere_is_not_computed_over_it() {
    let mut t = Table::new();
    let unused = t.input(DType::F32, crate::kernels::table::rows(&[]), Fill::Real(0.0, 1.0));
    t.case("unused", unused);
    let flip = |g: &mut Graph, x: NodeId| {
        let flipped = g.permute(x, &[1, 0]).unwrap();
        let exp = g.unary(UnaryKind::Exp, flipped).unwrap();
        g.scale(exp, 0.5).unwrap()
    };
    let mut body = Graph::new(t.g.symbols.clone());
    let x = body.input("x", DType::F32, dims(&[6, 6])).unwrap();
    let (once, also) = (flip(&mut body, x), body.unary(UnaryKind::Neg, x).unwrap());
    body.set_output("once", once).unwrap();
    body.set_output("also", also).unwrap();
    let block = t.g.add_block(Arc::new(Block::new("flip", body)));
    let a = state(&mut t, "a", &[6, 6]);
    let call = t.g.push(Call { block, layer: 0 }, &[a]).unwrap();
    let (flipped, also) = (t.g.part(call, 0).unwrap(), t.g.part(call, 1).unwrap());
    store(&mut t, "called", a, flipped);
    t.case("also", also);
    let b = state(&mut t, "b", &[6, 6]);
    let sums = flip(&mut t.g, b);
    let at = t.named("at", DType::I32, dims(&[3]), Fill::List(vec![4.0, 0.0, 4.0]));
    let rows = t.named("rows", DType::F32, dims(&[3, 6]), Fill::Real(-1.0, 1.0));
    let op = Scatter { axis: 0, batch: 0, kind: ScatterKind::Add };
    let sums = t.g.push(op, &[sums, at, rows]).unwrap();
    store(&mut t, "scattered", b, sums);
    t.run_loops(&[3]);
}
