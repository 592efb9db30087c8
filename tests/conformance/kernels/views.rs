//! Elements in other places: views and chains of them, concat, pad, iota, gather.

use crate::kernels::table::{Fill, Table, dims, rows, run};
use astrai_ir::ops::{Concat, Expand, Gather, Iota, Pad, Slice, UnaryKind};
use astrai_ir::{DType, Dim, NodeId, Real, Tensor, Type};
use std::collections::HashMap;

const SIZES: [u64; 7] = [1, 7, 31, 33, 65, 257, 300];

fn n() -> Dim {
    Dim::symbol("n")
}

/// The view itself, and a function of it.
fn both(t: &mut Table, name: &str, id: NodeId) {
    t.case(name, id);
    let e = if t.g.ty(id).dtype == DType::F32 {
        t.g.unary(UnaryKind::Tanh, id).unwrap()
    } else {
        t.g.cast(id, DType::F32).unwrap()
    };
    t.case(&format!("{name}, used"), e);
}

#[test]
fn views_and_chains_of_views() {
    let mut t = Table::new();
    for last in [1usize, 7, 32, 65] {
        let x = t.x(rows(&[last, 3]));
        let y = t.g.reshape(x, vec![n(), Dim::from(3 * last)]).unwrap();
        both(&mut t, &format!("merge {last}"), y);
        let y = t.g.reshape(x, vec![&n() * &Dim::from(last), Dim::from(3)]).unwrap();
        both(&mut t, &format!("merge the symbol {last}"), y);
        let y = t.g.reshape(y, vec![&n() * &Dim::from(3 * last)]).unwrap();
        both(&mut t, &format!("flat {last}"), y);
        let y = t.g.reshape(x, rows(&[3, last])).unwrap();
        both(&mut t, &format!("regroup {last}"), y);
        for axes in [[0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let y = t.g.permute(x, &axes).unwrap();
            both(&mut t, &format!("permute {axes:?} {last}"), y);
            let shape = t.g.ty(y).shape.clone();
            let flat = t.g.reshape(y, vec![&n() * &Dim::from(3 * last)]).unwrap();
            both(&mut t, &format!("permute {axes:?} {last}, flat"), flat);
            let back = t.g.reshape(flat, vec![&shape[0] * &shape[1], shape[2].clone()]).unwrap();
            let back = t.g.permute(back, &[1, 0]).unwrap();
            both(&mut t, &format!("permute {axes:?} {last}, flat and on"), back);
        }
        if last > 1 {
            let y = t.g.slice(x, 1, Dim::from(1), Dim::from(last - 1)).unwrap();
            both(&mut t, &format!("slice {last}"), y);
            let y = t.g.permute(y, &[2, 1, 0]).unwrap();
            let y = t.g.slice(y, 0, Dim::from(1), Dim::from(2)).unwrap();
            both(&mut t, &format!("slice of slice {last}"), y);
            let y = t.g.reshape(y, vec![Dim::from(2 * (last - 1)), n()]).unwrap();
            both(&mut t, &format!("slice of slice {last}, merged"), y);
        }
        let y = t.g.slice(x, 0, &n() - &Dim::from(1), Dim::from(1)).unwrap();
        both(&mut t, &format!("last row {last}"), y);
    }
    let v = t.x(rows(&[1, 5]));
    let y = t.g.push(Expand { shape: rows(&[7, 5]) }, &[v]).unwrap();
    both(&mut t, "expand", y);
    let y = t.g.permute(y, &[1, 0, 2]).unwrap();
    let y = t.g.reshape(y, vec![&n() * &Dim::from(7), Dim::from(5)]).unwrap();
    both(&mut t, "expand, permuted and merged", y);
    let w = t.x(dims(&[5]));
    let y = t.g.broadcast(w, &rows(&[5])).unwrap();
    both(&mut t, "expand to the symbol", y);
    let small = t.input(DType::I8, rows(&[4]), Fill::Int(-100, 100));
    let y = t.g.permute(small, &[1, 0]).unwrap();
    both(&mut t, "permute bytes", y);
    t.all_native().run_loops(&SIZES);
}

#[test]
fn concat_and_pad() {
    let mut t = Table::new();
    for (i, lens) in [[1usize, 1, 1], [7, 1, 32], [32, 31, 2], [64, 65, 33]].into_iter().enumerate() {
        let parts: Vec<NodeId> = lens.iter().map(|&l| t.x(rows(&[l]))).collect();
        let y = t.g.push(Concat { axis: 1 }, &parts).unwrap();
        both(&mut t, &format!("concat {i}"), y);
        let y = t.g.slice(y, 1, Dim::from(lens[0]), Dim::from(lens[1] + 1)).unwrap();
        both(&mut t, &format!("concat {i}, sliced across"), y);
        let wide = t.g.unary(UnaryKind::Exp, parts[0]).unwrap();
        let y = t.g.push(Concat { axis: 1 }, &[wide, parts[1], wide]).unwrap();
        both(&mut t, &format!("concat {i} of values"), y);
    }
    let (a, b) = (t.x(rows(&[3])), t.x(rows(&[3])));
    let y = t.g.push(Concat { axis: 0 }, &[a, b]).unwrap();
    both(&mut t, "concat along the symbol", y);
    let y = t.g.permute(y, &[1, 0]).unwrap();
    both(&mut t, "concat along the symbol, permuted", y);
    let (a, b) = (t.x(rows(&[])), t.x(rows(&[])));
    let y = t.g.push(Concat { axis: 0 }, &[a, b, a]).unwrap();
    both(&mut t, "concat of vectors", y);
    for (i, (before, after)) in [(0usize, 1usize), (1, 0), (3, 4), (32, 1)].into_iter().enumerate() {
        let x = t.x(rows(&[7]));
        for axis in [0, 1] {
            let p = Pad {
                axis,
                before: before.into(),
                after: after.into(),
                value: Real(if i == 1 { f64::NEG_INFINITY } else { 0.5 }),
            };
            let y = t.g.push(p, &[x]).unwrap();
            both(&mut t, &format!("pad {i} of axis {axis}"), y);
            let y =
                t.g.push(
                    Pad { axis: 1 - axis, before: 1usize.into(), after: 0usize.into(), value: Real(-1.0) },
                    &[y],
                )
                .unwrap();
            let shape = vec![Dim::product(&t.g.ty(y).shape)];
            let y = t.g.reshape(y, shape).unwrap();
            both(&mut t, &format!("pad {i} of axis {axis}, twice and flat"), y);
        }
    }
    let x = t.input(DType::I32, rows(&[]), Fill::Int(-5, 5));
    let y = t.g.push(Pad { axis: 0, before: n(), after: 2usize.into(), value: Real(-7.0) }, &[x]).unwrap();
    both(&mut t, "pad of integers by the symbol", y);
    t.all_native().run_loops(&SIZES);
}

#[test]
fn iota_and_gather() {
    let mut t = Table::new();
    for dtype in [DType::I64, DType::I32, DType::F32, DType::U8, DType::BF16] {
        for axis in [0, 1] {
            let y = t.g.push(Iota { ty: Type::new(dtype, rows(&[5])), axis }, &[]).unwrap();
            t.case(&format!("iota {dtype} {axis}"), y);
        }
    }
    let table = t.x(dims(&[11, 5]));
    for dtype in [DType::I32, DType::I64, DType::U8, DType::I8] {
        let i = t.input(dtype, rows(&[]), Fill::Int(0, 10));
        let y = t.g.gather(table, i, 0).unwrap();
        both(&mut t, &format!("rows by {dtype}"), y);
    }
    let i = t.input(DType::I32, rows(&[3]), Fill::Int(0, 4));
    let y = t.g.gather(table, i, 1).unwrap(); // [11, n, 3]
    both(&mut t, "columns", y);
    let y = t.g.permute(y, &[1, 2, 0]).unwrap();
    both(&mut t, "columns, permuted", y);
    let x = t.x(rows(&[4, 6]));
    for (axis, batch, shape) in [
        (1usize, 1usize, rows(&[3])),
        (2, 1, rows(&[2])),
        (2, 2, rows(&[4, 3])),
        (2, 0, dims(&[7])),
        (1, 1, rows(&[])),
    ] {
        let top = if axis == 1 { 3 } else { 5 };
        let i = t.input(DType::I32, shape, Fill::Int(0, top));
        let y = t.g.push(Gather { axis, batch }, &[x, i]).unwrap();
        both(&mut t, &format!("gather {axis} {batch} {top} {i}"), y);
    }
    let i = t.input(DType::I32, dims(&[]), Fill::Int(2, 2));
    let y = t.g.gather(table, i, 0).unwrap();
    both(&mut t, "one row", y);
    t.all_native().run_loops(&[7, 31, 33, 257]);
}

#[test]
fn indices_out_of_range_take_the_nearest_row() {
    let mut t = Table::new();
    let x = t.named("x", DType::F32, dims(&[5, 3]), Fill::Real(-1.0, 1.0));
    let i = t.named("i", DType::I64, rows(&[]), Fill::Int(0, 4));
    let y = t.g.gather(x, i, 0).unwrap();
    t.case("y", y);
    let mut s = t.session();
    let x = Tensor::f32(&[5, 3], &(0..15).map(|i| i as f32).collect::<Vec<_>>());
    let far = vec![-1, i64::MIN, 5, i64::MAX, 1 << 40, 2];
    let leaves = HashMap::from([("x".into(), x), ("i".into(), Tensor::int(DType::I64, &[6], far))]);
    let y = run(&mut s, &leaves)[0].1.to_f32();
    let first: Vec<f32> = y.chunks(3).map(|r| r[0]).collect();
    assert_eq!(first, [0.0, 0.0, 12.0, 12.0, 12.0, 6.0]);
}

#[test]
fn no_size_may_be_zero() {
    let mut t = Table::new();
    let x = t.named("x", DType::F32, rows(&[3]), Fill::Real(-1.0, 1.0));
    let y = t.g.push(Slice { axis: 1, start: 1usize.into(), len: 1usize.into() }, &[x]).unwrap();
    t.case("y", y);
    let mut s = t.session();
    let empty = astrai_runtime::Value::f32(&[0, 3], &[]);
    let e = s.run(&[("x", &empty)]).unwrap_err().to_string();
    assert!(e.contains("`n` is 0"), "{e}");
    let large = astrai_runtime::Value::f32(&[301, 3], &[0.0; 903]);
    let e = s.run(&[("x", &large)]).unwrap_err().to_string();
    assert!(e.contains("`n` is 301"), "{e}");
    let e = s.run(&[]).unwrap_err().to_string();
    assert!(e.contains("`x` is missing"), "{e}");
}
