//! Dots on the core whose sides nobody packed: rows, columns and sums over the symbol, either side down its columns, both
//! types, prologues and epilogues, sums too long for a row on the stack; the same bits at any number of threads.

use crate::kernels::table::{Fill, Table, dims, rows, run};
use crate::machines::{host, machines};
use astrai_ir::ops::{BinaryKind, CompareKind, Dot, UnaryKind};
use astrai_ir::{DType, Dim, NodeId, Shape};

const SIZES: [u64; 6] = [1, 2, 31, 33, 65, 257];
const PAIRS: [(usize, usize); 6] = [(1, 1), (2, 33), (31, 65), (33, 2), (65, 257), (257, 31)];
const TYPES: [(DType, DType); 3] =
    [(DType::F32, DType::F32), (DType::BF16, DType::BF16), (DType::BF16, DType::F32)];

/// An input widened to f32 where it is narrow.
fn side(t: &mut Table, dtype: DType, shape: Shape) -> NodeId {
    let x = t.input(dtype, shape, Fill::Real(-1.0, 1.0));
    if dtype == DType::F32 { x } else { t.g.cast(x, DType::F32).unwrap() }
}

fn dot(t: &mut Table, a: NodeId, b: NodeId, contract: (usize, usize)) -> NodeId {
    t.g.push(Dot { batch: vec![], contract: vec![contract] }, &[a, b]).unwrap()
}

/// Every kernel that has a dot runs on the core.
fn all_on_the_core(t: &Table) {
    for r in &t.compiled().plan.regions {
        let dots = r.graph().nodes().iter().any(|n| matches!(n.op, astrai_ir::Op::Dot(_)));
        assert!(!dots || r.form().name() == "dot", "{} has a dot in loops", r.origin);
    }
}

/// Every dot may run on the matrix unit.
fn all_in_pairs(t: &Table) {
    let p = t.compiled();
    for (r, k) in p.plan.regions.iter().zip(&p.kernels).filter(|(r, _)| r.form().name() == "dot") {
        assert!(k.as_ref().unwrap().source.contains("#define PACK_PAIRS"), "{} widens its sides", r.origin);
    }
}

#[test]
fn every_form_at_odd_sizes() {
    let mut t = Table::new();
    for (i, (a, b)) in PAIRS.into_iter().enumerate() {
        let n = Dim::symbol("n");
        let (a, b) = (Dim::from(a), Dim::from(b));
        // The symbol is the rows, the rows, the columns, the sum, the sum.
        let forms = [
            ("x wT", [n.clone(), a.clone()], [b.clone(), a.clone()], (1, 1)),
            ("g w", [n.clone(), a.clone()], [a.clone(), b.clone()], (1, 0)),
            ("xT gT", [a.clone(), b.clone()], [n.clone(), a.clone()], (0, 1)),
            ("gT x", [n.clone(), a.clone()], [n.clone(), b.clone()], (0, 0)),
            ("g xT over the symbol", [a.clone(), n.clone()], [b.clone(), n.clone()], (1, 1)),
        ];
        for (f, (name, left, right, contract)) in forms.into_iter().enumerate() {
            let (dl, dr) = TYPES[(i + f) % 3];
            let (l, r) = (side(&mut t, dl, left.to_vec()), side(&mut t, dr, right.to_vec()));
            let y = dot(&mut t, l, r, contract);
            t.case(&format!("{name} {dl} {dr} {a} {b}"), y);
        }
    }
    all_on_the_core(&t);
    t.all_native().run(&SIZES);
}

#[test]
fn views_prologues_and_epilogues() {
    let mut t = Table::new();
    let (joined, w) = (t.x(rows(&[60])), t.x(dims(&[20, 33])));
    let x = t.g.slice(joined, 1, Dim::from(40), Dim::from(20)).unwrap();
    let y = dot(&mut t, x, w, (1, 0));
    t.case("a slice of joined rows", y);
    let heads = t.g.reshape(joined, rows(&[3, 20])).unwrap();
    let y = dot(&mut t, heads, w, (2, 0));
    t.case("rows of two axes", y);
    let left = t.x(rows(&[7]));
    let y = dot(&mut t, left, heads, (0, 0));
    t.case("columns of two axes", y);
    let y = t.g.push(Dot { batch: vec![], contract: vec![(1, 1), (0, 0)] }, &[heads, heads]).unwrap();
    t.case("a sum over two axes, in another order", y);
    let s = t.weight(DType::F32, &[20]);
    let norm = t.g.rms_norm(x, s, 1e-6).unwrap();
    let y = dot(&mut t, norm, w, (1, 0));
    t.case("a norm before", y);
    let (g, h) = (t.x(rows(&[9])), t.x(rows(&[33])));
    let g = t.g.unary(UnaryKind::Tanh, g).unwrap();
    let h = t.g.unary(UnaryKind::Exp, h).unwrap();
    let y = dot(&mut t, g, h, (0, 0));
    t.case("expressions down their columns", y);
    let so_far = t.x(dims(&[9, 33]));
    let (u, v) = (t.x(rows(&[9])), t.x(rows(&[33])));
    let y = dot(&mut t, u, v, (0, 0));
    let y = t.g.add(so_far, y).unwrap();
    t.case("accumulated", y);
    let y = dot(&mut t, v, u, (0, 0));
    let y = t.g.cast(y, DType::BF16).unwrap();
    t.case("narrow", y);
    let (bias, r) = (t.weight(DType::F32, &[33]), t.x(rows(&[33])));
    let y = dot(&mut t, x, w, (1, 0));
    let y = t.g.add(y, bias).unwrap();
    let y = t.g.binary(BinaryKind::Max, y, r).unwrap();
    let quarter = t.g.fill(r, 0.25).unwrap();
    let c = t.g.compare(CompareKind::Gt, r, quarter).unwrap();
    let y = t.g.select(c, y, r).unwrap();
    t.case("a chain", y);
    let (a, b) = (t.input(DType::BF16, rows(&[24]), Fill::Real(-1.0, 1.0)), t.weight(DType::BF16, &[24, 40]));
    let y = dot(&mut t, a, b, (1, 0));
    let y = t.g.add(y, y).unwrap();
    t.case("narrow arithmetic", y);
    all_on_the_core(&t);
    t.all_native().run_some(&SIZES);
}

#[test]
fn sums_longer_than_a_row_on_the_stack() {
    let mut t = Table::new();
    let k = (1 << 17) + 33;
    let x = t.input(DType::F32, rows(&[k]), Fill::Int(-2, 2));
    let w = t.input(DType::BF16, dims(&[3, k]), Fill::Int(-2, 2));
    let w = t.g.cast(w, DType::F32).unwrap();
    let y = t.g.linear(x, w).unwrap();
    t.case("in memory", y);
    let x2 = t.g.scale(x, 0.5).unwrap();
    let w2 = t.weight(DType::F32, &[2, k]);
    let w2 = t.g.unary(UnaryKind::Floor, w2).unwrap();
    let y = t.g.linear(x2, w2).unwrap();
    t.case("an expression", y);
    let w3 = t.weight(DType::F32, &[2, k]);
    let zero = t.g.scale(x, 0.0).unwrap();
    let y = t.g.linear(zero, w3).unwrap();
    t.case("a weight", y);
    all_on_the_core(&t);
    t.all_native().run(&[1, 3]);
}

#[test]
fn bits_do_not_depend_on_threads() {
    let mut t = Table::new();
    for (a, b) in [(65, 257), (700, 300), (1700, 290)] {
        for (dl, dr) in TYPES {
            let (l, r) = (side(&mut t, dl, rows(&[a])), side(&mut t, dr, rows(&[b])));
            let y = dot(&mut t, l, r, (0, 0));
            t.case(&format!("{dl} {dr} {a} {b}"), y);
            let w = side(&mut t, dr, dims(&[b, a]));
            let y = dot(&mut t, l, w, (1, 1));
            t.case(&format!("{dl} {dr} {a} {b} forward"), y);
        }
    }
    let leaves = t.values(257);
    let on = |threads| run(&mut t.session_on(&host(threads)), &leaves);
    assert!(on(1) == on(2), "results differ");
}

/// An input of bf16 values, widened.
fn wide(t: &mut Table, shape: Shape) -> NodeId {
    side(t, DType::BF16, shape)
}

/// Sides of bf16 values at sizes that fill no block of 32, with sums over one block of depth, several and none.
#[test]
fn sides_of_bf16_in_every_orientation() {
    let mut t = Table::new();
    let sizes =
        [(1, 7, 31), (7, 33, 1), (31, 1, 33), (33, 65, 7), (64, 31, 96), (40, 300, 131), (300, 33, 1601)];
    for (i, (m, n, k)) in sizes.into_iter().enumerate() {
        let forms = [
            ("x wT", [m, k], [n, k], (1, 1)),
            ("g w", [m, k], [k, n], (1, 0)),
            ("gT x", [k, m], [k, n], (0, 0)),
        ];
        for (f, (name, left, right, contract)) in forms.into_iter().enumerate() {
            let (l, r) = (wide(&mut t, dims(&left)), wide(&mut t, dims(&right)));
            let mut y = dot(&mut t, l, r, contract);
            match (i + f) % 4 {
                0 => {}
                1 => y = t.g.cast(y, DType::BF16).unwrap(),
                2 => {
                    let so_far = t.x(dims(&[m, n]));
                    y = t.g.add(so_far, y).unwrap();
                }
                _ => {
                    let bias = t.weight(DType::BF16, &[n]);
                    let bias = t.g.cast(bias, DType::F32).unwrap();
                    let sum = t.g.add(y, bias).unwrap();
                    let sum = t.g.unary(UnaryKind::Tanh, sum).unwrap();
                    y = t.g.cast(sum, DType::BF16).unwrap();
                }
            }
            t.case(&format!("{name} {m} {n} {k}"), y);
        }
    }
    all_on_the_core(&t);
    all_in_pairs(&t);
    t.all_native().run(&[1]);
}

#[test]
fn bf16_sides_over_the_symbol_behind_views_and_prologues() {
    let mut t = Table::new();
    let (x, w) = (wide(&mut t, rows(&[66])), wide(&mut t, dims(&[35, 33])));
    let half = t.g.slice(x, 1, Dim::from(33), Dim::from(33)).unwrap();
    let forward = dot(&mut t, half, w, (1, 1));
    t.case("rows over the symbol, of a slice", forward);
    let g = wide(&mut t, rows(&[35]));
    let back = dot(&mut t, g, w, (1, 0));
    t.case("the left side's gradient", back);
    let narrow = dot(&mut t, g, half, (0, 0));
    let narrow = t.g.cast(narrow, DType::BF16).unwrap();
    t.case("the right side's gradient", narrow);
    for (name, rounded) in [("a rounded expression", true), ("an expression that is not rounded", false)] {
        let mut left = t.g.unary(UnaryKind::Tanh, half).unwrap();
        if rounded {
            left = t.g.cast(left, DType::BF16).unwrap();
            left = t.g.cast(left, DType::F32).unwrap();
        }
        let y = dot(&mut t, left, w, (1, 1));
        t.case(name, y);
    }
    let f32s = t.x(rows(&[35]));
    let mixed = dot(&mut t, f32s, w, (1, 0));
    t.case("one side of f32", mixed);
    all_on_the_core(&t);
    t.all_native().run_some(&SIZES);
}

/// The layer below with every side a bf16 value, as storage in bf16 makes it.
#[test]
fn a_trained_layer_in_bf16() {
    let mut t = Table::new();
    let x = wide(&mut t, rows(&[33]));
    let weight = |t: &mut Table, shape| {
        let w = t.weight(DType::BF16, shape);
        t.g.cast(w, DType::F32).unwrap()
    };
    let rounded = |t: &mut Table, y| {
        let y = t.g.cast(y, DType::BF16).unwrap();
        t.g.cast(y, DType::F32).unwrap()
    };
    let (w1, w2) = (weight(&mut t, &[65, 33]), weight(&mut t, &[31, 65]));
    let h = t.g.linear(x, w1).unwrap();
    let h = rounded(&mut t, h);
    let h = t.g.unary(UnaryKind::Tanh, h).unwrap();
    let h = rounded(&mut t, h);
    let y = t.g.linear(h, w2).unwrap();
    let y = rounded(&mut t, y);
    let y = t.g.mul(y, y).unwrap();
    let loss = t.g.reduce(astrai_ir::ops::ReduceKind::Sum, y, &[0, 1]).unwrap();
    t.case("loss", loss);
    let t = t.gradient_of("loss");
    all_on_the_core(&t);
    all_in_pairs(&t);
    t.run_some(&[1, 33, 257]);
}

/// Weights that change stay row-major, and gradients are those of the interpreter.
#[test]
fn a_trained_layer() {
    let mut t = Table::new();
    let x = t.x(rows(&[33]));
    let (w1, w2) = (t.weight(DType::F32, &[65, 33]), t.weight(DType::F32, &[31, 65]));
    let h = t.g.linear(x, w1).unwrap();
    let h = t.g.unary(UnaryKind::Tanh, h).unwrap();
    let y = t.g.linear(h, w2).unwrap();
    let y = t.g.mul(y, y).unwrap();
    let loss = t.g.reduce(astrai_ir::ops::ReduceKind::Sum, y, &[0, 1]).unwrap();
    t.case("loss", loss);
    let t = t.gradient_of("loss");
    assert!(t.compiled().plan.weights.iter().all(|w| w.layout == astrai_ir::Layout::Rows));
    all_on_the_core(&t);
    t.run_some(&[1, 33, 257]);
}

/// Products of f32 numbers lose at most the last place of the sum of magnitudes with every level of instructions, and in the root
/// mean square the matrix unit, which has each number in three pieces of bf16, loses less than any vectors.
#[test]
fn sides_of_f32_keep_their_precision() {
    const K: usize = 768;
    let mut t = Table::new();
    let (x, w) = (t.x(rows(&[K])), t.x(dims(&[35, K])));
    let y = dot(&mut t, x, w, (1, 1));
    t.case("y", y);
    all_in_pairs(&t);
    let leaves = t.values(70);
    let (x, w) = (leaves["in0"].reals(), leaves["in1"].reals());
    let mut losses = vec![];
    for machine in machines() {
        let got = run(&mut t.session_on(machine), &leaves)[0].1.to_tensor().unwrap();
        let mut squares = 0.0;
        for (i, got) in got.reals().iter().enumerate() {
            let (x, w) = (&x[i / 35 * K..][..K], &w[i % 35 * K..][..K]);
            let exact: f64 = x.iter().zip(w).map(|(a, b)| a * b).sum();
            let magnitude: f64 = x.iter().zip(w).map(|(a, b)| (a * b).abs()).sum();
            let lost = (got - exact).abs() / magnitude;
            assert!(lost < 2f64.powi(-22), "{}: element {i} lost {lost:e}", machine.isa());
            squares += lost * lost;
        }
        losses.push((machine.isa(), squares));
    }
    if let Some((_, by_pieces)) = losses.iter().find(|(isa, _)| *isa == "amx") {
        let vectors = losses.iter().filter(|(isa, _)| *isa != "amx");
        assert!(vectors.clone().all(|(_, by_vectors)| by_pieces < by_vectors), "{losses:?}");
    }
}

/// What is not finite stays so; what is nearly nothing changes nothing.
#[test]
fn special_numbers_of_f32_sides() {
    const K: usize = 40;
    let special = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e-42, -1e-42, 3e38, -3e38, 1e-31];
    let mut list = vec![0.0; K * special.len()];
    special.iter().enumerate().for_each(|(i, x)| list[i * (K + 3)] = *x);
    let mut t = Table::new();
    let x = t.input(DType::F32, rows(&[K]), Fill::List(list));
    let w = t.input(DType::F32, dims(&[33, K]), Fill::Real(0.5, 1.0));
    let y = dot(&mut t, x, w, (1, 1));
    t.case("y", y);
    all_in_pairs(&t);
    let leaves = t.values(special.len() as u64);
    let w = leaves["in1"].reals();
    for machine in machines() {
        let got = run(&mut t.session_on(machine), &leaves)[0].1.to_tensor().unwrap().reals();
        for (i, got) in got.iter().enumerate() {
            let want = special[i / 33] * w[i % 33 * K + i / 33 * 3];
            let close = (got - want).abs() <= want.abs() * 1e-6 + 1e-40;
            assert!(close || !want.is_finite() && !got.is_finite(), "{}: {got}, not {want}", machine.isa());
        }
    }
}
