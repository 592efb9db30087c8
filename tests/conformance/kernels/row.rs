//! Rows: reductions over every set of axes, norms, softmax, rotary embedding, and what is fused around them.

use crate::kernels::table::{Fill, Table, dims, rows};
use astrai_ir::ops::{LayerNorm, ReduceKind, RmsNorm, Rope, RopeLayout, Slice, Softmax, UnaryKind};
use astrai_ir::{DType, Dim, Real};

const SIZES: [u64; 6] = [1, 7, 31, 33, 65, 257];

#[test]
fn reductions_of_every_kind_over_every_set_of_axes() {
    let mut t = Table::new();
    let sets: [&[usize]; 7] = [&[0], &[1], &[2], &[0, 1], &[0, 2], &[1, 2], &[0, 1, 2]];
    for kind in ReduceKind::ALL {
        // Products of powers of two are exact in any order.
        let exact = Fill::List(vec![0.5, 2.0, -1.0, 1.0, 1.0]);
        let fill = if kind == ReduceKind::Prod { exact } else { Fill::Real(0.2, 2.0) };
        let x = t.input(DType::F32, rows(&[3, 17]), fill);
        for axes in sets {
            let y = t.g.reduce(kind, x, axes).unwrap();
            t.case(&format!("{kind:?} {axes:?}"), y);
        }
        for last in [1, 7, 31, 32, 33, 63, 65, 257] {
            let x = t.input(DType::F32, rows(&[last]), Fill::Real(0.5, 1.2));
            let y = t.g.reduce(kind, x, &[1]).unwrap();
            t.case(&format!("{kind:?} of {last}"), y);
        }
    }
    for dtype in [DType::I64, DType::I32, DType::I8, DType::U8] {
        for kind in [ReduceKind::Sum, ReduceKind::Max, ReduceKind::Min, ReduceKind::Prod] {
            let prod = kind == ReduceKind::Prod;
            let x = t.input(dtype, rows(&[7]), Fill::Int(i64::from(prod), if prod { 2 } else { 100 }));
            let y = t.g.reduce(kind, x, &[1]).unwrap();
            t.case(&format!("{kind:?} {dtype}"), y);
            let y = t.g.reduce(if prod { ReduceKind::Sum } else { kind }, x, &[0]).unwrap();
            let wide = t.g.cast(y, DType::I64).unwrap();
            t.case(&format!("{kind:?} {dtype} wide"), wide);
        }
    }
    for dtype in [DType::BF16, DType::F16] {
        for kind in ReduceKind::ALL {
            let x = t.input(dtype, rows(&[33]), Fill::Real(0.9, 1.1));
            let y = t.g.reduce(kind, x, &[1]).unwrap();
            t.case(&format!("{kind:?} {dtype}"), y);
        }
    }
    t.all_native().run_loops(&SIZES);
}

#[test]
fn fused_reductions() {
    let mut t = Table::new();
    let x = t.x(rows(&[33]));
    let e = t.g.unary(UnaryKind::Exp, x).unwrap();
    let sum = t.g.reduce_last(ReduceKind::Sum, e).unwrap();
    let y = t.g.div(e, sum).unwrap();
    t.case("softmax by hand", y);
    let m = t.g.reduce(ReduceKind::Mean, x, &[0, 1]).unwrap();
    let m = t.g.broadcast(m, &rows(&[33])).unwrap();
    let y = t.g.sub(x, m).unwrap();
    t.case("centred by the whole mean", y);
    let p = t.g.permute(x, &[1, 0]).unwrap();
    let y = t.g.reduce(ReduceKind::Max, p, &[0]).unwrap();
    t.case("over a permuted axis", y);
    let s = t.g.push(Slice { axis: 1, start: 1usize.into(), len: 31usize.into() }, &[x]).unwrap();
    let y = t.g.reduce(ReduceKind::Sum, s, &[1]).unwrap();
    t.case("over a slice", y);
    let cut = t.g.reshape(x, rows(&[11, 3])).unwrap();
    let y = t.g.reduce(ReduceKind::Min, cut, &[1]).unwrap();
    let y2 = t.g.reduce(ReduceKind::Sum, y, &[1]).unwrap();
    t.case("a reduction of a reduction", y2);
    let bits = t.input(DType::I32, rows(&[5]), Fill::Int(0, 3));
    let three = t.g.fill(bits, 2.0).unwrap();
    let hit = t.g.compare(astrai_ir::ops::CompareKind::Eq, bits, three).unwrap();
    let count = t.g.cast(hit, DType::I32).unwrap();
    let y = t.g.reduce(ReduceKind::Sum, count, &[0]).unwrap();
    t.case("a count", y);
    t.all_native().run_loops(&SIZES);
}

#[test]
fn norms_and_softmax() {
    let mut t = Table::new();
    for last in [1usize, 7, 31, 32, 33, 63, 65, 257] {
        let x = t.x(rows(&[last]));
        let (w, b) = (t.weight(DType::F32, &[last]), t.weight(DType::F32, &[last]));
        let y = t.g.rms_norm(x, w, 1e-5).unwrap();
        t.case(&format!("rms_norm {last}"), y);
        for log in [false, true] {
            let y = t.g.push(Softmax { log }, &[x]).unwrap();
            t.case(&format!("softmax {log} {last}"), y);
        }
        if last > 1 {
            let y = t.g.push(LayerNorm { eps: Real(1e-5) }, &[x, w, b]).unwrap();
            t.case(&format!("layer_norm {last}"), y);
        }
    }
    for dtype in [DType::BF16, DType::F16] {
        let (x, w) = (t.input(dtype, rows(&[3, 40]), Fill::Real(-2.0, 2.0)), t.weight(dtype, &[40]));
        let b = t.weight(dtype, &[40]);
        let y = t.g.push(RmsNorm { eps: Real(1e-6) }, &[x, w]).unwrap();
        t.case(&format!("rms_norm {dtype}"), y);
        let y = t.g.push(Softmax { log: false }, &[x]).unwrap();
        t.case(&format!("softmax {dtype}"), y);
        let y = t.g.push(LayerNorm { eps: Real(1e-5) }, &[x, w, b]).unwrap();
        t.case(&format!("layer_norm {dtype}"), y);
    }
    // A norm between other things, a softmax of a norm, a norm of one head's slice.
    let x = t.x(rows(&[4, 16]));
    let w = t.weight(DType::F32, &[16]);
    let e = t.g.scale(x, 1.5).unwrap();
    let y = t.g.rms_norm(e, w, 1e-6).unwrap();
    let y = t.g.push(Softmax { log: false }, &[y]).unwrap();
    let y = t.g.add(y, x).unwrap();
    t.case("norm, softmax, residual", y);
    let s = t.g.slice(x, 1, Dim::from(1), Dim::from(2)).unwrap();
    let y = t.g.rms_norm(s, w, 1e-6).unwrap();
    let y = t.g.permute(y, &[1, 0, 2]).unwrap();
    t.case("norm of heads, permuted", y);
    let v = t.x(dims(&[40]));
    let y = t.g.push(Softmax { log: true }, &[v]).unwrap();
    t.case("softmax of a vector", y);
    t.all_native().run_loops(&SIZES);
}

#[test]
fn rope_of_both_layouts_whole_and_partial() {
    let mut t = Table::new();
    for layout in [RopeLayout::Half, RopeLayout::Interleaved] {
        for (d, dim) in [(2usize, 2usize), (8, 8), (8, 6), (16, 4), (33, 32), (64, 64)] {
            let x = t.x(rows(&[3, d]));
            let (c, s) = (t.x(rows(&[dim / 2])), t.x(rows(&[dim / 2])));
            let y = t.g.push(Rope { layout, dim }, &[x, c, s]).unwrap();
            t.case(&format!("{layout:?} {dim} of {d}"), y);
            let twice = t.g.scale(y, 2.0).unwrap();
            let flat = t.g.reshape(twice, rows(&[3 * d])).unwrap();
            t.case(&format!("{layout:?} {dim} of {d}, flat"), flat);
        }
        let joined = t.x(rows(&[5 * 16 + 3]));
        let (c, s) = (t.x(rows(&[8])), t.x(rows(&[8])));
        let heads = t.g.slice(joined, 1, Dim::from(17), Dim::from(48)).unwrap();
        let heads = t.g.reshape(heads, rows(&[3, 16])).unwrap();
        let w = t.weight(DType::F32, &[16]);
        let n = t.g.rms_norm(heads, w, 1e-6).unwrap();
        let y = t.g.push(Rope { layout, dim: 16 }, &[n, c, s]).unwrap();
        t.case(&format!("{layout:?} of normed heads of a joined row"), y);
        let (xb, cb) = (
            t.input(DType::BF16, rows(&[2, 16]), Fill::Real(-1.0, 1.0)),
            t.input(DType::BF16, rows(&[8]), Fill::Real(-1.0, 1.0)),
        );
        let y = t.g.push(Rope { layout, dim: 16 }, &[xb, cb, cb]).unwrap();
        t.case(&format!("{layout:?} bf16"), y);
        let y = t.g.slice(y, 2, Dim::from(3), Dim::from(9)).unwrap();
        t.case(&format!("{layout:?} bf16, sliced"), y);
    }
    t.all_native().run_loops(&SIZES);
}
