//! Element by element: every function on every type that it takes, casts between all types, selections, constants.

use crate::kernels::table::{Fill, Table, dims, rows};
use astrai_ir::ops::{Activation, BinaryKind, CompareKind, Const, GatedAct, Random, RandomKind, UnaryKind};
use astrai_ir::{DType, Real, Tensor, Type};

const FLOATS: [DType; 5] = [DType::F32, DType::BF16, DType::F16, DType::F8E4M3, DType::F8E5M2];
const INTS: [DType; 4] = [DType::I64, DType::I32, DType::I8, DType::U8];
const SIZES: [u64; 9] = [1, 7, 31, 32, 33, 63, 65, 257, 300];

fn range(kind: UnaryKind) -> Fill {
    match kind {
        UnaryKind::Log | UnaryKind::Sqrt | UnaryKind::Rsqrt => Fill::Real(0.1, 6.0),
        _ => Fill::Real(-3.0, 3.0),
    }
}

#[test]
fn unary_of_every_type() {
    let mut t = Table::new();
    for dtype in FLOATS {
        for kind in UnaryKind::ALL.into_iter().filter(|k| *k != UnaryKind::Not) {
            let x = t.input(dtype, rows(&[]), range(kind));
            let y = t.g.unary(kind, x).unwrap();
            t.case(&format!("{kind:?} {dtype}"), y);
        }
    }
    for dtype in [DType::I64, DType::I32, DType::I8] {
        for kind in [UnaryKind::Neg, UnaryKind::Abs] {
            let edge = if dtype == DType::I8 { -128.0 } else { -2_147_480_001.0 };
            let fill = Fill::List(vec![0.0, -1.0, 5.0, edge, 127.0]);
            let (x, w) = (t.input(dtype, rows(&[3]), fill.clone()), t.input(dtype, rows(&[3]), fill));
            let y = t.g.unary(kind, x).unwrap();
            t.case(&format!("{kind:?} {dtype}"), y);
            let y = t.g.unary(kind, w).unwrap();
            // What follows sees the value as its type holds it.
            let wide = t.g.cast(y, DType::I64).unwrap();
            t.case(&format!("{kind:?} {dtype} wide"), wide);
        }
    }
    let b = t.input(DType::Bool, rows(&[]), Fill::Int(0, 1));
    let y = t.g.unary(UnaryKind::Not, b).unwrap();
    t.case("not", y);
    t.all_native().run_loops(&SIZES);
}

#[test]
fn special_numbers_stay_special() {
    let mut t = Table::new();
    let all = vec![f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0, 1e-42, -1e-42, 3e38, -3e38];
    let x = t.input(DType::F32, rows(&[]), Fill::List(all.clone()));
    let y = t.input(DType::F32, rows(&[]), Fill::List([all.as_slice(), &[2.0]].concat()));
    for kind in UnaryKind::ALL {
        let wild = [UnaryKind::Not, UnaryKind::Sin, UnaryKind::Cos].contains(&kind);
        if !wild {
            let v = t.g.unary(kind, x).unwrap();
            t.case(&format!("{kind:?}"), v);
        }
    }
    for kind in BinaryKind::ALL.into_iter().filter(|k| ![BinaryKind::And, BinaryKind::Or].contains(k)) {
        let v = t.g.binary(kind, x, y).unwrap();
        t.case(&format!("{kind:?}"), v);
    }
    for kind in CompareKind::ALL {
        let v = t.g.compare(kind, x, y).unwrap();
        t.case(&format!("{kind:?}"), v);
    }
    t.all_native().run_loops(&[1, 9, 90]);
}

#[test]
fn binary_and_compare_of_every_type() {
    let mut t = Table::new();
    for dtype in FLOATS {
        for kind in BinaryKind::ALL.into_iter().filter(|k| ![BinaryKind::And, BinaryKind::Or].contains(k)) {
            let fill = if kind == BinaryKind::Pow { Fill::Real(0.1, 3.0) } else { Fill::Real(-3.0, 3.0) };
            let (a, b) = (t.input(dtype, rows(&[]), fill), t.input(dtype, rows(&[]), Fill::Real(0.5, 2.5)));
            let y = t.g.binary(kind, a, b).unwrap();
            t.case(&format!("{kind:?} {dtype}"), y);
        }
    }
    use BinaryKind::*;
    for dtype in INTS {
        let low = if dtype == DType::U8 { 0 } else { -100 };
        let (a, b) = (
            t.input(dtype, rows(&[]), Fill::List(vec![low as f64, 100.0, 3.0, 1.0, 77.0])),
            t.input(dtype, rows(&[]), Fill::Int(1, 90)),
        );
        for kind in [Add, Sub, Mul, Div, Max, Min] {
            let y = t.g.binary(kind, a, b).unwrap();
            t.case(&format!("{kind:?} {dtype}"), y);
            // A value that is no output is never stored in its narrow type.
            let twice = t.g.binary(Mul, a, b).unwrap();
            let y = t.g.binary(kind, twice, b).unwrap();
            let wide = t.g.cast(y, DType::I64).unwrap();
            t.case(&format!("{kind:?} {dtype} wide"), wide);
        }
    }
    for dtype in [FLOATS.as_slice(), &INTS].concat() {
        let (a, b) =
            (t.input(dtype, rows(&[2]), Fill::Int(0, 3)), t.input(dtype, rows(&[2]), Fill::Int(0, 3)));
        for kind in CompareKind::ALL {
            let y = t.g.compare(kind, a, b).unwrap();
            t.case(&format!("{kind:?} {dtype}"), y);
        }
        let c = t.input(DType::Bool, rows(&[2]), Fill::Int(0, 1));
        let y = t.g.select(c, a, b).unwrap();
        t.case(&format!("select {dtype}"), y);
    }
    let (a, b) =
        (t.input(DType::Bool, rows(&[]), Fill::Int(0, 1)), t.input(DType::Bool, rows(&[]), Fill::Int(0, 1)));
    for kind in [And, Or] {
        let y = t.g.binary(kind, a, b).unwrap();
        t.case(&format!("{kind:?}"), y);
    }
    t.all_native().run_loops(&SIZES);
}

#[test]
fn casts_between_all_types() {
    let mut t = Table::new();
    let reals = vec![0.0, -0.0, 0.4, -0.6, 1.5, 2.5, 3.1, 100.7, 0.001, 2e-3, 17.0, 120.0, 1e-7];
    for from in DType::ALL {
        let fill = if from.is_float() {
            Fill::List(reals.clone())
        } else {
            Fill::Int(0, if from == DType::Bool { 1 } else { 127 })
        };
        let x = t.input(from, rows(&[]), fill);
        for to in DType::ALL {
            let y = t.g.cast(x, to).unwrap();
            t.case(&format!("{from} to {to}"), y);
            let back = t.g.cast(y, DType::F32).unwrap();
            let twice = t.g.add(back, back).unwrap();
            t.case(&format!("{from} to {to}, twice"), twice);
        }
    }
    t.all_native().run_loops(&[1, 13, 257]);
}

#[test]
fn casts_at_the_edges_of_the_types() {
    let mut t = Table::new();
    let wild = vec![
        f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        3e9,
        -3e9,
        1e19,
        -1e19,
        300.0,
        -1.0,
        -129.0,
        447.0,
        449.0,
        470.0,
        6e4,
        7e4,
        1e38,
    ];
    for from in [DType::F32, DType::BF16, DType::F16] {
        let x = t.input(from, rows(&[]), Fill::List(wild.clone()));
        for to in DType::ALL {
            let y = t.g.cast(x, to).unwrap();
            t.case(&format!("{from} to {to}"), y);
        }
    }
    for from in [DType::I64, DType::I32, DType::I8] {
        let x = t.input(
            from,
            rows(&[]),
            Fill::List(vec![-1.0, -128.0, 255.0, 256.0, 70000.0, -70001.0, 16_777_217.0]),
        );
        for to in DType::ALL {
            let y = t.g.cast(x, to).unwrap();
            t.case(&format!("{from} to {to}"), y);
        }
    }
    t.all_native().run_loops(&[1, 16, 33]);
}

#[test]
fn gated_activations_constants_and_scalars() {
    let mut t = Table::new();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for act in [Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::Swish(Real(1.702))]
        {
            let (a, b) = (
                t.input(dtype, rows(&[33]), Fill::Real(-6.0, 6.0)),
                t.input(dtype, rows(&[33]), Fill::Real(-2.0, 2.0)),
            );
            let y = t.g.push(GatedAct { act }, &[a, b]).unwrap();
            t.case(&format!("{act:?} {dtype}"), y);
        }
    }
    for dtype in DType::ALL {
        let fill = if dtype.is_float() { Fill::Real(0.0, 4.0) } else { Fill::Int(0, 1) };
        let table = Const::new(&fill.tensor(7, dtype, &[2, 7]));
        let c = t.g.push(table, &[]).unwrap();
        t.case(&format!("table {dtype}"), c);
        let sum = t.g.cast(c, DType::F32).unwrap();
        let sum = t.g.scale(sum, -0.75).unwrap();
        t.case(&format!("table {dtype} scaled"), sum);
        let one = t.g.push(Const::scalar(dtype, 1.0), &[]).unwrap();
        t.case(&format!("scalar {dtype}"), one);
    }
    for x in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 1e-45, 16_777_217.0] {
        let v = t.x(rows(&[]));
        let y = t.g.scale(v, x).unwrap();
        t.case(&format!("times {x}"), y);
    }
    let scalar = t.x(dims(&[]));
    let y = t.g.unary(UnaryKind::Exp, scalar).unwrap();
    t.case("scalar", y);
    let both = t.g.add(scalar, y).unwrap();
    let v = t.x(rows(&[3]));
    let y = t.g.mul(v, both).unwrap();
    t.case("scalar broadcast", y);
    let big = t.input(DType::I64, rows(&[]), Fill::List(vec![0.0, 1.0]));
    let c = Const::new(&Tensor::int(DType::I64, &[], vec![(1 << 53) + 1]));
    let c = t.g.push(c, &[]).unwrap();
    let y = t.g.add(big, c).unwrap();
    t.case("an integer beyond f64", y);
    t.all_native().run_loops(&SIZES);
}

#[test]
fn random_numbers_are_those_of_their_counters() {
    let mut t = Table::new();
    let seed = t.input(DType::I64, vec![], Fill::List(vec![-77_000_000_001.0]));
    let step = t.input(DType::I64, vec![], Fill::List(vec![3_000_000_000_005.0]));
    let x = t.input(DType::F32, rows(&[5]), Fill::Real(-3.0, 3.0));
    for stream in [0, 9] {
        let ty = Type::new(DType::F32, rows(&[5]));
        let drawn = t.g.push(Random { kind: RandomKind::Uniform, ty, stream }, &[seed, step]).unwrap();
        t.case(&format!("stream {stream}"), drawn);
        let sum = t.g.add(drawn, x).unwrap();
        t.case(&format!("stream {stream}, added"), sum);
    }
    t.all_native().run_loops(&SIZES);
}
