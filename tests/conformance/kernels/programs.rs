//! Whole programs: several outputs, outputs that are leaves, views or constants, blocks called again and again, operators
//! without a kernel, and programs written with the tensor front end.

use crate::kernels::table::{Fill, Table, compare, dims, rows, run};
use crate::machines::machine;
use astrai_ir::ops::*;
use astrai_ir::{Block, DType, Dim, Graph, NodeId, Precision, Real, Sizes, Symbol, Tape, Tensor, Type, eval};
use astrai_runtime::device::KernelCache;
use astrai_runtime::device::cpu::{Cpu, host_levels};
use astrai_runtime::{Compiled, Device, Options, Session, Value, compile};
use std::collections::HashMap;
use std::sync::Arc;

const SIZES: [u64; 4] = [1, 7, 33, 257];

#[test]
fn outputs_of_every_sort() {
    let mut t = Table::new();
    let x = t.x(rows(&[6]));
    let w = t.weight(DType::F32, &[6, 6]);
    let e = t.g.unary(UnaryKind::Exp, x).unwrap();
    let c = t.g.push(Const::new(&Tensor::f32(&[3], &[1.0, 2.0, 3.0])), &[]).unwrap();
    let one = t.g.push(Const::scalar(DType::F32, 1.5), &[]).unwrap();
    let flat = t.g.reshape(e, vec![&Dim::symbol("n") * &Dim::from(6)]).unwrap();
    let turned = t.g.permute(x, &[1, 0]).unwrap();
    let y = t.g.linear(x, w).unwrap();
    let both = t.g.reshape(y, rows(&[2, 3])).unwrap();
    let all = t.g.broadcast(one, &rows(&[2])).unwrap();
    let i = t.g.push(Iota { ty: Type::new(DType::I32, rows(&[])), axis: 0 }, &[]).unwrap();
    let wide = t.input(DType::BF16, rows(&[3]), Fill::Real(-1.0, 1.0));
    let wide2 = t.g.cast(wide, DType::F32).unwrap();
    for (name, id) in [
        ("input", x),
        ("input again", x),
        ("weight, packed too", w),
        ("value", e),
        ("value again", e),
        ("table", c),
        ("number", one),
        ("alias", flat),
        ("alias again", flat),
        ("view", turned),
        ("dot", y),
        ("alias of a dot", both),
        ("everywhere", all),
        ("iota", i),
        ("widened", wide2),
        ("before widening", wide),
    ] {
        t.case(name, id);
    }
    t.all_native().run_some(&SIZES);
}

/// A program of a kernel.
fn one_kernel() -> Compiled {
    let mut t = Table::new();
    let x = t.x(rows(&[6]));
    let y = t.g.unary(UnaryKind::Exp, x).unwrap();
    t.case("exp", y);
    t.compiled()
}

/// Builds the program's kernels, or takes them from the cache.
fn load(cpu: &Cpu, program: &Compiled) {
    cpu.load(&program.kernels.iter().flatten().collect::<Vec<_>>()).unwrap();
}

/// Threads that want the same kernels at once build them side by side, and none takes the other's half-done files.
#[test]
fn kernels_are_built_by_several_threads_at_once() {
    let Some(cpu) = &machine().cpu else { return };
    let program = one_kernel();
    for _ in 0..4 {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::open(folder.path()).unwrap();
        let prepare = || load(&cpu.with_cache(cache.clone()), &program);
        std::thread::scope(|s| (0..8).for_each(|_| _ = s.spawn(prepare)));
        let left = |end: &str| {
            let files = std::fs::read_dir(folder.path()).unwrap();
            files.filter(|f| f.as_ref().unwrap().path().extension().is_some_and(|e| e == end)).count()
        };
        assert_eq!(["so", "c", "tmp"].map(left), [1, 1, 0]);
    }
}

/// One folder keeps the objects of several levels of vector instructions; none is built twice.
#[test]
fn kernels_of_several_levels_lie_side_by_side() {
    let Some(cpu) = &machine().cpu else { return };
    let program = one_kernel();
    let folder = tempfile::tempdir().unwrap();
    let cache = KernelCache::open(folder.path()).unwrap();
    let objects = || {
        let files = std::fs::read_dir(folder.path()).unwrap().map(|f| f.unwrap());
        let objects = files.filter(|f| f.path().extension().is_some_and(|e| e == "so"));
        let mut all: Vec<_> =
            objects.map(|f| (f.path(), f.metadata().unwrap().modified().unwrap())).collect();
        all.sort();
        all
    };
    let levels = host_levels();
    for (i, isa) in levels.iter().enumerate() {
        load(&cpu.with_isa(*isa).with_cache(cache.clone()), &program);
        assert_eq!(objects().len(), i + 1, "{isa:?}");
    }
    let before = objects();
    for isa in levels {
        load(&cpu.with_isa(isa).with_cache(cache.clone()), &program);
    }
    assert_eq!(objects(), before);
}

#[test]
fn values_with_several_consumers() {
    let mut t = Table::new();
    let x = t.x(rows(&[20]));
    let w = t.weight(DType::F32, &[20]);
    let n = t.g.rms_norm(x, w, 1e-6).unwrap();
    let e = t.g.unary(UnaryKind::Tanh, n).unwrap();
    let s = t.g.push(Softmax { log: false }, &[n]).unwrap();
    let (wa, wb) = (t.weight(DType::F32, &[12, 20]), t.weight(DType::F32, &[12, 20]));
    let (a, b) = (t.g.linear(n, wa).unwrap(), t.g.linear(e, wb).unwrap());
    let y = t.g.mul(a, b).unwrap();
    t.case("a norm in three places", y);
    let q = t.g.reduce(ReduceKind::Sum, s, &[1]).unwrap();
    t.case("and a fourth", q);
    let h = t.g.add(x, e).unwrap();
    let h2 = t.g.mul(h, h).unwrap();
    let r = t.g.reduce_last(ReduceKind::Mean, h2).unwrap();
    let z = t.g.div(h, r).unwrap();
    t.case("a value in its own statistics", z);
    // Siblings with and without biases share an input, so that they are merged.
    let v = t.x(rows(&[17]));
    let mut parts = Vec::new();
    for n in [5usize, 32, 1] {
        let (w, b) = (t.weight(DType::F32, &[n, 17]), t.weight(DType::F32, &[n]));
        let y = t.g.linear(v, w).unwrap();
        parts.push(t.g.add(y, b).unwrap());
    }
    let y = t.g.push(Concat { axis: 1 }, &parts).unwrap();
    t.case("merged siblings", y);
    let p = t.g.unary(UnaryKind::Exp, parts[1]).unwrap();
    t.case("one of them", p);
    t.all_native().run_some(&SIZES);
}

#[test]
fn a_bias_across_the_columns_is_not_merged_as_one_along_them() {
    let mut t = Table::new();
    let x = t.x(dims(&[8, 5]));
    for i in 0..2 {
        let (w, b) = (t.weight(DType::F32, &[8, 5]), t.weight(DType::F32, &[8]));
        let y = t.g.linear(x, w).unwrap();
        let b = t.g.reshape(b, dims(&[8, 1])).unwrap();
        let b = t.g.push(Expand { shape: dims(&[8, 8]) }, &[b]).unwrap();
        let y = t.g.add(y, b).unwrap();
        t.case(&format!("column bias {i}"), y);
    }
    t.run_some(&[1]);
}

/// `block(x, w, b) = (act(x·wᵀ) + x·wᵀ, sum)`, with scratch of its own.
fn layer(symbols: Vec<Symbol>) -> Block {
    let mut g = Graph::new(symbols);
    let x = g.input("x", DType::F32, rows(&[16])).unwrap();
    let n = g.weight("norm", DType::F32, &[16]).unwrap();
    let (w, b) = (g.weight("w", DType::F32, &[16, 16]).unwrap(), g.weight("b", DType::F32, &[16]).unwrap());
    let w2 = g.weight("w2", DType::F32, &[16, 16]).unwrap();
    let h = g.rms_norm(x, n, 1e-6).unwrap();
    let (y, z) = (g.linear(h, w).unwrap(), g.linear(h, w2).unwrap());
    let (y, z) = (g.add(y, b).unwrap(), g.add(z, b).unwrap());
    let a = g.push(GatedAct { act: Activation::Silu }, &[y, z]).unwrap();
    let c = g.push(Cumsum { axis: 1, exclusive: false, reverse: false }, &[a]).unwrap();
    let c = g.scale(c, 0.1).unwrap();
    let y = g.add(c, x).unwrap();
    let s = g.reduce(ReduceKind::Sum, b, &[0]).unwrap();
    for (name, id) in [("y", y), ("a", a), ("s", s), ("x", x), ("w", w)] {
        g.set_output(name, id).unwrap();
    }
    Block::new("layer", g)
}

#[test]
fn a_block_called_several_times() {
    let mut t = Table::new();
    let block = t.g.add_block(Arc::new(layer(t.g.symbols.clone())));
    let mut x = t.x(rows(&[16]));
    for i in 0..4u32 {
        let n = t.weight(DType::F32, &[16]);
        let (w, b) = (t.weight(DType::F32, &[16, 16]), t.weight(DType::F32, &[16]));
        let w2 = t.weight(DType::F32, &[16, 16]);
        let call = t.g.push(Call { block, layer: i }, &[x, n, w, b, w2]).unwrap();
        x = t.g.part(call, 0).unwrap();
        let a = t.g.part(call, 1).unwrap();
        let e = t.g.unary(UnaryKind::Tanh, a).unwrap();
        t.case(&format!("inner {i}"), e);
        if i % 2 == 0 {
            for (part, name) in [(2, "sum"), (3, "input"), (4, "weight")] {
                let p = t.g.part(call, part).unwrap();
                t.case(&format!("{name} {i}"), p);
            }
        }
    }
    t.case("last", x);
    t.case("last again", x);
    let program = t.compiled();
    assert_eq!(program.plan.bodies.len(), 1);
    t.run_some(&SIZES);
}

/// `inner` of `inner` inside a block.
#[test]
fn blocks_that_call_blocks() {
    let mut t = Table::new();
    let symbols = t.g.symbols.clone();
    let mut g = Graph::new(symbols.clone());
    let (x, w) = (g.input("x", DType::F32, rows(&[8])).unwrap(), g.weight("w", DType::F32, &[8, 8]).unwrap());
    let y = g.linear(x, w).unwrap();
    let y = g.unary(UnaryKind::Tanh, y).unwrap();
    g.set_output("y", y).unwrap();
    let inner = Arc::new(Block::new("inner", g));
    let mut g = Graph::new(symbols);
    let x = g.input("x", DType::F32, rows(&[8])).unwrap();
    let (a, b) = (g.weight("a", DType::F32, &[8, 8]).unwrap(), g.weight("b", DType::F32, &[8, 8]).unwrap());
    let block = g.add_block(inner);
    let y = g.push(Call { block, layer: 0 }, &[x, a]).unwrap();
    let y = g.push(Call { block, layer: 1 }, &[y, b]).unwrap();
    let y = g.add(y, x).unwrap();
    g.set_output("y", y).unwrap();
    let block = t.g.add_block(Arc::new(Block::new("outer", g)));
    let x = t.x(rows(&[8]));
    let (a, b) = (t.weight(DType::F32, &[8, 8]), t.weight(DType::F32, &[8, 8]));
    let y = t.g.push(Call { block, layer: 0 }, &[x, a, b]).unwrap();
    let y = t.g.push(Call { block, layer: 1 }, &[y, b, a]).unwrap();
    t.case("y", y);
    t.run_some(&[1, 7]);
}

#[test]
fn operators_without_a_kernel_run_in_the_interpreter() {
    let mut t = Table::new();
    let x = t.x(rows(&[9]));
    let e = t.g.unary(UnaryKind::Exp, x).unwrap();
    let top = t.g.push(Topk { k: 3 }, &[e]).unwrap();
    for i in 0..2 {
        let p = t.g.part(top, i).unwrap();
        t.case(&format!("topk {i}"), p);
    }
    let best = t.g.push(Argmax { axis: 1 }, &[e]).unwrap();
    t.case("argmax", best);
    let p = t.g.part(top, 1).unwrap();
    let picked = t.g.push(Gather { axis: 1, batch: 1 }, &[x, p]).unwrap();
    let picked = t.g.scale(picked, 2.0).unwrap();
    t.case("what topk picked", picked);
    for reverse in [false, true] {
        let c = t.g.push(Cumsum { axis: 0, exclusive: reverse, reverse }, &[e]).unwrap();
        let c = t.g.unary(UnaryKind::Log, c).unwrap();
        let c = if reverse { t.g.slice(c, 0, Dim::from(0), Dim::from(1)).unwrap() } else { c };
        t.case(&format!("cumsum {reverse}"), c);
    }
    let i = t.input(DType::I32, rows(&[]), Fill::Int(0, 10));
    let to = t.x(dims(&[11, 9]));
    for kind in [ScatterKind::Add, ScatterKind::Set] {
        let y = t.g.push(Scatter { axis: 0, batch: 0, kind }, &[to, i, e]).unwrap();
        let y = t.g.scale(y, 0.5).unwrap();
        if kind == ScatterKind::Add {
            t.case(&format!("scatter {kind:?}"), y);
        }
    }
    let cache = t.state("cache", Type::new(DType::F32, dims(&[300, 9])), Fill::Real(-1.0, 1.0));
    let at = t.g.push(Iota { ty: Type::new(DType::I32, rows(&[])), axis: 0 }, &[]).unwrap();
    let y = t.g.push(Store {}, &[cache, at, e]).unwrap();
    t.case("store", y);
    let (seed, step) =
        (t.input(DType::I64, dims(&[]), Fill::Int(5, 5)), t.input(DType::I64, dims(&[]), Fill::Int(2, 2)));
    let r =
        t.g.push(
            Random { kind: RandomKind::Normal, ty: Type::new(DType::F32, rows(&[4])), stream: 3 },
            &[seed, step],
        )
        .unwrap();
    let r = t.g.scale(r, 2.0).unwrap();
    t.case("random", r);
    // A packed weight that an operator without a kernel reads row by row.
    let w = t.weight(DType::F32, &[40, 9]);
    let y = t.g.linear(x, w).unwrap();
    t.case("dot", y);
    let c = t.g.push(Cumsum { axis: 1, exclusive: false, reverse: false }, &[w]).unwrap();
    t.case("cumsum of its weight", c);
    let wb = t.weight(DType::BF16, &[33, 9]);
    let wide = t.g.cast(wb, DType::F32).unwrap();
    let y = t.g.linear(x, wide).unwrap();
    t.case("dot, bf16", y);
    let c = t.g.push(Cumsum { axis: 1, exclusive: false, reverse: false }, &[wb]).unwrap();
    t.case("cumsum of its weight, bf16", c);
    let program = t.compiled();
    assert!(program.plan.regions.iter().filter(|r| !r.form().has_kernel()).count() >= 7);
    t.run_some(&[1, 7, 33]);
}

#[test]
fn the_gradient_of_attention_and_of_a_loss() {
    let mut t = Table::new();
    let s = t.input(DType::I32, dims(&[2]), Fill::List(vec![0.0, 9.0]));
    let op = Attention {
        scale: Real(0.35),
        causal: true,
        window: None,
        softcap: None,
        sinks: false,
        span: Dim::from(9),
        page: None,
    };
    let [q, k, v] = [[9, 4, 8], [9, 2, 8], [9, 2, 8]].map(|s| t.x(dims(&s)));
    let both = t.g.push(op, &[q, k, v, s]).unwrap();
    let o = t.g.part(both, 0).unwrap();
    let w = t.weight(DType::F32, &[13, 32]);
    let flat = t.g.reshape(o, dims(&[9, 32])).unwrap();
    let targets = t.input(DType::I32, dims(&[9]), Fill::Int(-1, 12));
    let loss =
        t.g.push(
            LinearCrossEntropy { label_smoothing: Real(0.1), softcap: None, statistics: false },
            &[flat, w, targets],
        )
        .unwrap();
    t.case("loss", loss);
    let ones = t.g.fill(loss, 1.0).unwrap();
    let grads = astrai_ir::gradient(&mut t.g, &[(loss, ones)], &[q, k, v, w]).unwrap();
    for (name, g) in ["dq", "dk", "dv", "dw"].iter().zip(grads) {
        t.case(name, g.unwrap());
    }
    t.run_some(&[1]);
}

/// A perceptron with its gradients, written with the front end, through the hall.
#[test]
fn a_program_of_the_front_end() {
    let t = Tape::new();
    let (x, labels) = (t.input("x", DType::F32, [12, 5]), t.input("labels", DType::I32, [12]));
    let (w1, b1) = (t.weight("w1", DType::F32, &[5, 33]), t.weight("b1", DType::F32, &[33]));
    let (w2, b2) = (t.weight("w2", DType::F32, &[33, 4]), t.weight("b2", DType::F32, &[4]));
    let hidden = (x.matmul(&w1) + &b1).gelu();
    let logp = (hidden.matmul(&w2) + &b2).log_softmax(-1);
    let loss = -(logp.clone() * labels.one_hot(4, DType::F32)).sum(&[-1], false).mean(&[], false);
    let grads = loss.backward(&[&w1, &b1, &w2, &b2]);
    let outs = [
        ("loss", &loss),
        ("logp", &logp),
        ("dw1", &grads[0]),
        ("db1", &grads[1]),
        ("dw2", &grads[2]),
        ("db2", &grads[3]),
    ];
    let g = t.finish(&outs).unwrap();
    let real = Fill::Real(-1.0, 1.0);
    let leaves: HashMap<String, Tensor> =
        [("x", vec![12, 5]), ("w1", vec![5, 33]), ("b1", vec![33]), ("w2", vec![33, 4]), ("b2", vec![4])]
            .into_iter()
            .enumerate()
            .map(|(i, (n, s))| (n.to_string(), real.tensor(i as u64, DType::F32, &s)))
            .chain([("labels".to_string(), Fill::Int(0, 3).tensor(9, DType::I32, &[12]))])
            .collect();
    let want = eval(&g, &leaves, &Sizes::new(), Precision::default()).unwrap();
    let m = machine();
    let program = Arc::new(compile(&g, m.backend(), &Options::default()).unwrap());
    let source: HashMap<String, Value> =
        leaves.iter().map(|(n, t)| (n.clone(), Value::from_tensor(t))).collect();
    let mut s = Session::new(program, &source, &m.device, &mut |_, _| {}).unwrap();
    let got = run(&mut s, &leaves);
    for ((name, got), (_, want)) in got.iter().zip(&want) {
        compare(&got.to_tensor().unwrap(), want, 2e-5).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    assert_eq!(got.len(), 6);
}

#[test]
fn symbols_may_have_the_names_of_a_kernels_own_variables() {
    for name in ["row", "dims", "i1", "v2", "end", "int", "stop", "acc", "l", "w0", "r0", "scratch"] {
        let mut g = Graph::new(vec![Symbol { name: name.into(), min: 1, max: 9, multiple_of: 1 }]);
        let n = Dim::symbol(name);
        let x = g.input("x", DType::F32, vec![n.clone(), Dim::from(5)]).unwrap();
        let w = g.weight("w", DType::F32, &[4, 5]).unwrap();
        let s = g.push(Softmax { log: false }, &[x]).unwrap();
        let y = g.linear(s, w).unwrap();
        let z = g.reduce(ReduceKind::Sum, x, &[0, 1]).unwrap();
        let p = g.permute(y, &[1, 0]).unwrap();
        let outs: [(&str, NodeId); 3] = [("y", y), ("z", z), ("p", p)];
        outs.iter().for_each(|(n, id)| g.set_output(n, *id).unwrap());
        let m = machine();
        let program = Arc::new(compile(&g, m.backend(), &Options::default()).unwrap());
        let leaf = |seed, shape: &[usize]| Fill::Real(-1.0, 1.0).tensor(seed, DType::F32, shape);
        let leaves =
            HashMap::from([("x".to_string(), leaf(1, &[7, 5])), ("w".to_string(), leaf(2, &[4, 5]))]);
        let source: HashMap<String, Value> =
            leaves.iter().map(|(n, t)| (n.clone(), Value::from_tensor(t))).collect();
        let mut s = Session::new(program, &source, &m.device, &mut |_, _| {})
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        let want = eval(&g, &leaves, &Sizes::new(), Precision::default()).unwrap();
        for ((out, got), (_, want)) in run(&mut s, &leaves).iter().zip(&want) {
            compare(&got.to_tensor().unwrap(), want, 2e-5).unwrap_or_else(|e| panic!("{name} {out}: {e}"));
        }
    }
}

#[test]
fn a_size_that_no_multiple_allows_is_refused() {
    let mut g = Graph::new(vec![Symbol { name: "n".into(), min: 4, max: 16, multiple_of: 4 }]);
    let x = g.input("x", DType::F32, vec![Dim::symbol("n")]).unwrap();
    let y = g.scale(x, 2.0).unwrap();
    g.set_output("y", y).unwrap();
    let m = machine();
    let program = Arc::new(compile(&g, m.backend(), &Options::default()).unwrap());
    let none: HashMap<String, Value> = HashMap::new();
    let mut s = Session::new(program, &none, &m.device, &mut |_, _| {}).unwrap();
    let e = s.run(&[("x", &Value::f32(&[6], &[0.0; 6]))]).unwrap_err().to_string();
    assert!(e.contains("multiple of 4"), "{e}");
    assert!(s.run(&[("x", &Value::f32(&[8], &[0.0; 8]))]).is_ok());
}
