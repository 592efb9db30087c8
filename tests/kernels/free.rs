//! Dots on the core whose sides nobody packed: rows, columns and sums over the symbol, either side down its columns, both
//! types, prologues and epilogues, sums too long for a row on the stack; the same bits at any number of threads.

use crate::table::{Fill, Table, dims, rows, run};
use astrai::machine::Machine;
use astrai_ir::ops::{BinaryKind, CompareKind, Dot, UnaryKind};
use astrai_ir::{Anchor, DType, Dim, NodeId, Shape};
use astrai_runtime::Device;

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
        let dots = r.graph.nodes().iter().any(|n| matches!(n.op, astrai_ir::Op::Dot(_)));
        assert!(!dots || r.anchor == Anchor::Dot, "{} has a dot in loops", r.origin);
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
    t.all_native().run(&SIZES);
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
    for (a, b) in [(65, 257), (700, 300)] {
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
    let on = |threads| run(&mut t.session_on(&Machine::new(Device::Host, threads).unwrap()), &leaves);
    assert!(on(1) == on(2), "results differ");
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
    t.run(&[1, 33, 257]);
}
