//! Attention: grouped heads, windows, soft-caps, sinks, log-sum-exp, ragged batches, slices of a joined row, narrow types,
//! and arguments that no kernel reads in place.

use crate::kernels::table::{Fill, Table, dims, rows};
use astrai_ir::ops::{Attention, Concat, RmsNorm, Rope, RopeLayout, UnaryKind};
use astrai_ir::{DType, Dim, NodeId, Real};

const SIZES: [u64; 5] = [11, 33, 64, 65, 150];

fn attention(d: usize) -> Attention {
    let scale = Real(1.0 / (d as f64).sqrt());
    Attention {
        scale,
        causal: true,
        window: None,
        softcap: None,
        sinks: false,
        span: Dim::from(300),
        page: None,
    }
}

/// Starts of four sequences in n tokens, the third empty, from data: 0, 1, 10, 10, n.
fn starts(t: &mut Table) -> NodeId {
    let fixed = t.input(DType::I32, dims(&[4]), Fill::List(vec![0.0, 1.0, 10.0, 10.0]));
    let ones = t.input(DType::I32, rows(&[]), Fill::Int(1, 1));
    let n = t.g.reduce(astrai_ir::ops::ReduceKind::Sum, ones, &[0]).unwrap();
    let n = t.g.reshape(n, dims(&[1])).unwrap();
    t.g.push(Concat { axis: 0 }, &[fixed, n]).unwrap()
}

fn qkv(t: &mut Table, dtype: DType, (h, kv, d, dv): (usize, usize, usize, usize)) -> [NodeId; 3] {
    [rows(&[h, d]), rows(&[kv, d]), rows(&[kv, dv])].map(|s| t.input(dtype, s, Fill::Real(-2.0, 2.0)))
}

fn outputs(t: &mut Table, name: &str, a: Attention, args: &[NodeId], lse: bool) {
    let both = t.g.push(a, args).unwrap();
    let o = t.g.part(both, 0).unwrap();
    t.case(name, o);
    if lse {
        let l = t.g.part(both, 1).unwrap();
        t.case(&format!("{name}, lse"), l);
    }
}

/// The cores keep a head on their stack; wider ones run in the interpreter, the gradient's too.
#[test]
fn heads_wider_than_the_core_takes() {
    let mut t = Table::new();
    let s = starts(&mut t);
    let [q, k, v] = qkv(&mut t, DType::F32, (1, 1, 1032, 1032));
    let both = t.g.push(attention(1032), &[q, k, v, s]).unwrap();
    let o = t.g.part(both, 0).unwrap();
    t.case("wide", o);
    let one = t.g.fill(o, 1.0).unwrap();
    let dq = astrai_ir::gradient(&mut t.g, &[(o, one)], &[q]).unwrap()[0].unwrap();
    t.case("wide, dq", dq);
    t.run_some(&[11]);
}

#[test]
fn shapes_and_options() {
    let mut t = Table::new();
    let s = starts(&mut t);
    for (i, heads) in
        [(1, 1, 1, 1), (4, 2, 16, 16), (6, 2, 33, 7), (8, 1, 64, 64), (3, 3, 65, 20)].into_iter().enumerate()
    {
        let [q, k, v] = qkv(&mut t, DType::F32, heads);
        outputs(&mut t, &format!("shape {i}"), attention(heads.2), &[q, k, v, s], i % 2 == 0);
    }
    let heads = (4, 2, 16, 16);
    for (i, (causal, window, softcap)) in [
        (false, None, None),
        (true, Some(1), None),
        (true, Some(9), None),
        (true, None, Some(5.0)),
        (true, Some(70), Some(2.0)),
    ]
    .into_iter()
    .enumerate()
    {
        let [q, k, v] = qkv(&mut t, DType::F32, heads);
        let a = Attention { causal, window, softcap: softcap.map(Real), ..attention(16) };
        outputs(&mut t, &format!("option {i}"), a, &[q, k, v, s], true);
    }
    for dtype in [DType::F32, DType::BF16] {
        let [q, k, v] = qkv(&mut t, dtype, heads);
        let sinks = t.input(dtype, dims(&[4]), Fill::Real(-1.0, 3.0));
        let a = Attention { sinks: true, window: Some(20), ..attention(16) };
        outputs(&mut t, &format!("sinks {dtype}"), a, &[q, k, v, s, sinks], true);
    }
    for dtype in [DType::BF16, DType::F16] {
        let [q, k, v] = qkv(&mut t, dtype, heads);
        outputs(&mut t, &format!("{dtype}"), attention(16), &[q, k, v, s], true);
    }
    t.all_native().run(&SIZES);
}

/// Sizes that the matrix unit takes where queries, keys and values are bf16.
#[test]
fn heads_of_whole_tiles() {
    let mut t = Table::new();
    let s = starts(&mut t);
    let shapes = [
        (1, 1, 32, 32),
        (9, 3, 64, 64),
        (8, 1, 128, 32),
        (2, 2, 96, 160),
        (16, 1, 192, 128),
        (40, 2, 32, 64),
    ];
    for (i, heads) in shapes.into_iter().enumerate() {
        let [q, k, v] = qkv(&mut t, DType::BF16, heads);
        outputs(&mut t, &format!("shape {i}"), attention(heads.2), &[q, k, v, s], i % 2 == 0);
    }
    for (i, (causal, window, softcap)) in [
        (false, None, None),
        (true, Some(1), None),
        (true, Some(9), None),
        (true, Some(70), Some(2.0)),
        (true, Some(65), None),
    ]
    .into_iter()
    .enumerate()
    {
        let [q, k, v] = qkv(&mut t, DType::BF16, (4, 2, 32, 32));
        let sinks = t.input(DType::BF16, dims(&[4]), Fill::Real(-1.0, 3.0));
        let a = Attention { causal, window, softcap: softcap.map(Real), sinks: i % 2 == 0, ..attention(32) };
        let args = [q, k, v, s, sinks];
        outputs(&mut t, &format!("option {i}"), a, &args[..if i % 2 == 0 { 5 } else { 4 }], true);
    }
    let x = t.input(DType::BF16, rows(&[8 * 32]), Fill::Real(-1.0, 1.0));
    let [q, k, v] = joined(&mut t, x, 4, 2, 32);
    outputs(&mut t, "joined", attention(32), &[q, k, v, s], false);
    t.all_native().run(&SIZES);
}

/// Values that are no finite numbers reach the queries that see them and no others, though the matrix unit multiplies what is
/// hidden by zero.
#[test]
fn hidden_values_are_never_multiplied() {
    let mut t = Table::new();
    let s = starts(&mut t);
    for (i, bad) in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN].into_iter().enumerate() {
        for window in [None, Some(9)] {
            let [q, k, _] = qkv(&mut t, DType::BF16, (6, 2, 32, 32));
            let list = (0..1009).map(|j| if j == 700 { bad } else { f64::from(j % 7) - 3.0 }).collect();
            let v = t.input(DType::BF16, rows(&[2, 32]), Fill::List(list));
            outputs(
                &mut t,
                &format!("{i}, {window:?}"),
                Attention { window, ..attention(32) },
                &[q, k, v, s],
                false,
            );
        }
    }
    t.all_native().run_some(&SIZES);
}

/// q, k and v out of one joined row.
fn joined(t: &mut Table, x: NodeId, h: usize, kv: usize, d: usize) -> [NodeId; 3] {
    let mut at = 0;
    [h, kv, kv].map(|n| {
        let s = t.g.slice(x, 1, Dim::from(at), Dim::from(n * d)).unwrap();
        at += n * d;
        t.g.reshape(s, rows(&[n, d])).unwrap()
    })
}

#[test]
fn arguments_in_place_and_what_follows() {
    let mut t = Table::new();
    let s = starts(&mut t);
    let row = t.x(rows(&[8 * 16 + 5]));
    let row = t.g.slice(row, 1, Dim::from(5), Dim::from(8 * 16)).unwrap();
    let [q, k, v] = joined(&mut t, row, 4, 2, 16);
    outputs(&mut t, "joined", attention(16), &[q, k, v, s], false);
    let narrow = t.input(DType::BF16, rows(&[8 * 16]), Fill::Real(-1.0, 1.0));
    let wide = t.g.cast(narrow, DType::F32).unwrap();
    let args = joined(&mut t, wide, 4, 2, 16);
    let both = t.g.push(attention(16), &[args[0], args[1], args[2], s]).unwrap();
    let o = t.g.part(both, 0).unwrap();
    let o = t.g.cast(o, DType::BF16).unwrap();
    t.case("narrow in and out", o);
    let w = t.weight(DType::F32, &[16]);
    let (c, sn) = (t.x(rows(&[8])), t.x(rows(&[8])));
    let rope = |t: &mut Table, x| {
        let n = t.g.push(RmsNorm { eps: Real(1e-6) }, &[x, w]).unwrap();
        t.g.push(Rope { layout: RopeLayout::Half, dim: 16 }, &[n, c, sn]).unwrap()
    };
    let (q2, k2) = (rope(&mut t, q), rope(&mut t, k));
    let both = t.g.push(attention(16), &[q2, k2, v, s]).unwrap();
    let o = t.g.part(both, 0).unwrap();
    let flat = t.g.reshape(o, rows(&[64])).unwrap();
    let wo = t.weight(DType::BF16, &[33, 64]);
    let wo = t.g.cast(wo, DType::F32).unwrap();
    let y = t.g.linear(flat, wo).unwrap();
    t.case("normed, rotated, projected", y);
    let heads_first = t.x(vec![Dim::from(4), Dim::symbol("n"), Dim::from(16)]);
    let hf = t.g.permute(heads_first, &[1, 0, 2]).unwrap();
    let both = t.g.push(attention(16), &[hf, k, v, s]).unwrap();
    let o = t.g.part(both, 0).unwrap();
    let o = t.g.permute(o, &[1, 0, 2]).unwrap();
    t.case("heads first", o);
    let l = t.g.part(both, 1).unwrap();
    let l = t.g.unary(UnaryKind::Exp, l).unwrap();
    t.case("heads first, weights", l);
    t.all_native().run_some(&SIZES);
}

#[test]
fn arguments_that_are_not_in_memory() {
    let mut t = Table::new();
    let s = starts(&mut t);
    let [q, k, v] = qkv(&mut t, DType::F32, (4, 2, 8, 8));
    let one = t.x(rows(&[1, 8]));
    let all = t.g.broadcast(one, &rows(&[4, 8])).unwrap();
    outputs(&mut t, "one key head repeated", attention(8), &[q, all, all, s], false);
    let zero = t.g.fill(k, 0.0).unwrap();
    outputs(&mut t, "constant keys", attention(8), &[q, zero, v, s], false);
    let across = t.x(vec![Dim::from(8), Dim::symbol("n"), Dim::from(2)]);
    let across = t.g.permute(across, &[1, 2, 0]).unwrap();
    outputs(&mut t, "keys across", attention(8), &[q, across, v, s], false);
    let ints = t.input(DType::I8, rows(&[2, 8]), Fill::Int(-3, 3));
    let ints = t.g.cast(ints, DType::F32).unwrap();
    outputs(&mut t, "integer keys", attention(8), &[q, ints, v, s], false);
    let lossy = t.input(DType::BF16, rows(&[2, 8]), Fill::List(vec![1e-9, 1.0, 70000.0, -2.0]));
    let lossy = t.g.cast(lossy, DType::F16).unwrap();
    let lossy = t.g.cast(lossy, DType::F32).unwrap();
    let big = t.g.fill(lossy, 1000.0).unwrap();
    let lossy = t.g.binary(astrai_ir::ops::BinaryKind::Min, lossy, big).unwrap();
    outputs(&mut t, "lossy keys", attention(8), &[q, lossy, v, s], false);
    let heads = t.x(dims(&[5]));
    let sinks = t.g.slice(heads, 0, Dim::from(1), Dim::from(4)).unwrap();
    outputs(
        &mut t,
        "sinks of a slice",
        Attention { sinks: true, ..attention(8) },
        &[q, k, v, s, sinks],
        false,
    );
    let both = t.g.push(Attention { softcap: Some(Real(3.0)), ..attention(8) }, &[q, k, v, s]).unwrap();
    let l = t.g.part(both, 1).unwrap();
    t.case("log-sum-exp alone", l);
    let both = t.g.push(Attention { window: Some(3), ..attention(8) }, &[q, k, v, s]).unwrap();
    let o = t.g.part(both, 0).unwrap();
    let o = t.g.scale(o, 3.0).unwrap();
    let o = t.g.cast(o, DType::I8).unwrap();
    t.case("rounded to integers", o);
    let both = t.g.push(Attention { window: Some(4), ..attention(8) }, &[q, k, v, s]).unwrap();
    let o = t.g.part(both, 0).unwrap();
    let o = t.g.cast(o, DType::U8).unwrap();
    let o = t.g.cast(o, DType::Bool).unwrap();
    t.case("rounded straight to integers", o);
    let program = t.compiled();
    assert!(program.plan.regions.iter().any(|r| r.form().name() == "attention"));
    t.run_some(&[11, 65]);
}
