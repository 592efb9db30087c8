//! Contractions: the packed core with its prologues and epilogues, and generic dots with any dimension numbers.

use crate::kernels::table::{Fill, Table, dims, rows, run};
use crate::machines::machines;
use astrai_ir::ops::{Activation, BinaryKind, Dequant, Dot, FakeQuant, GatedAct, Gather, UnaryKind};
use astrai_ir::{Code, DType, Dim, NodeId, Tensor};

const SIZES: [u64; 10] = [1, 2, 3, 5, 7, 12, 16, 17, 33, 40];

/// `x · wᵀ` with the weight widened where it is narrow.
fn packed(t: &mut Table, dtype: DType, x: NodeId, n: usize, k: usize) -> NodeId {
    let mut w = t.weight(dtype, &[n, k]);
    if dtype != DType::F32 {
        w = t.g.cast(w, DType::F32).unwrap();
    }
    t.g.linear(x, w).unwrap()
}

#[test]
fn the_packed_core_at_odd_sizes() {
    let mut t = Table::new();
    for dtype in [DType::F32, DType::BF16] {
        for (n, k) in
            [(1usize, 1usize), (7, 3), (31, 33), (32, 32), (33, 257), (65, 64), (96, 300), (257, 31)]
        {
            let x = t.x(rows(&[k]));
            let y = packed(&mut t, dtype, x, n, k);
            t.case(&format!("{dtype} [{n}, {k}]"), y);
        }
        let x = t.x(rows(&[3, 40]));
        let y = packed(&mut t, dtype, x, 24, 40);
        t.case(&format!("{dtype} of three axes"), y);
        let x = t.x(dims(&[40]));
        let y = packed(&mut t, dtype, x, 24, 40);
        t.case(&format!("{dtype} of a vector"), y);
    }
    let x = t.input(DType::BF16, rows(&[40]), Fill::Real(-1.0, 1.0));
    let w = t.weight(DType::BF16, &[24, 40]);
    let y = t.g.linear(x, w).unwrap();
    t.case("bf16 by bf16", y);
    let program = t.compiled();
    assert!(program.plan.regions.iter().filter(|r| r.form().name() == "dot").count() >= 19);
    t.run(&SIZES);
}

/// `x · wᵀ` with a weight `[n, k]` stored as codes whose scales, of this type, are those of `group` neighbours.
fn coded(t: &mut Table, code: Code, scales: DType, x: NodeId, size: [usize; 3]) -> NodeId {
    let w = codes(t, code, scales, size, false);
    t.g.linear(x, w).unwrap()
}

/// The same with the left side rounded to integers, by groups of so many, and with offsets or not.
fn by_integers(
    t: &mut Table,
    (code, scales): (Code, DType),
    x: NodeId,
    size: [usize; 4],
    offsets: bool,
) -> NodeId {
    let [n, k, group, rounded] = size;
    let w = codes(t, code, scales, [n, k, group], offsets);
    rounded_by(t, x, rounded, w)
}

/// `x · wᵀ` with the left side rounded to integers, by groups of so many.
fn rounded_by(t: &mut Table, x: NodeId, rounded: usize, w: NodeId) -> NodeId {
    let x = t.g.push(FakeQuant { group: rounded }, &[x]).unwrap();
    t.g.linear(x, w).unwrap()
}

/// A weight `[n, k]` stored so.
pub fn codes(t: &mut Table, code: Code, scales: DType, size: [usize; 3], offsets: bool) -> NodeId {
    let values = match code {
        Code::Int4 | Code::Fp4 => Fill::Int(0, 255),
        Code::Int8 => Fill::Int(-128, 127),
        Code::Fp8 => {
            Fill::List(vec![0.0, 0.5, -448.0, 0.001953125, 3.25, -0.01171875, 0.015625, 26.0, -1.125])
        }
    };
    codes_of(t, code, scales, size, offsets, values)
}

/// The same of these codes.
fn codes_of(
    t: &mut Table,
    code: Code,
    scales: DType,
    [n, k, group]: [usize; 3],
    offsets: bool,
    values: Fill,
) -> NodeId {
    let codes = t.weight_of(code.dtype(), &[n, k / code.per_element()], values);
    let mut parts = vec![codes];
    for _ in 0..1 + usize::from(offsets) {
        parts.push(t.weight_of(scales, &[n, k / group], Fill::Real(-0.01, 0.02)));
    }
    t.g.push(Dequant { code }, &parts).unwrap()
}

#[test]
fn rows_are_rounded_where_codes_are_integers() {
    let mut t = Table::new();
    let shapes = [
        [1usize, 32, 32, 32],
        [7, 64, 32, 32],
        [33, 256, 64, 64],
        [70, 384, 96, 96],
        [40, 1056, 1056, 32],
        [129, 640, 128, 128],
        [65, 1024, 256, 128],
        [300, 1152, 1152, 192],
    ];
    for code in [Code::Int4, Code::Int8] {
        for (i, shape) in shapes.into_iter().enumerate() {
            let scales = [DType::F32, DType::BF16, DType::F16][i % 3];
            let x = t.x(rows(&[shape[1]]));
            let y = by_integers(&mut t, (code, scales), x, shape, i % 2 == 1);
            t.case(&format!("{code:?} {shape:?} {scales}"), y);
            let x = t.input(DType::BF16, rows(&[shape[1]]), Fill::Real(-1.0, 1.0));
            let x = t.g.cast(x, DType::F32).unwrap();
            let y = by_integers(&mut t, (code, scales), x, shape, i % 2 == 0);
            let y = t.g.unary(UnaryKind::Tanh, y).unwrap();
            t.case(&format!("{code:?} {shape:?} {scales} by bf16"), y);
        }
    }
    // Sums of bytes' products are as large as they can be, where codes and inputs are at their ends with one sign or with both.
    for (code, ends) in [(Code::Int4, [0.0, 255.0]), (Code::Int8, [-128.0, 127.0])] {
        for (x, w) in [(vec![1.0], 0), (vec![-1.0], 0), (vec![1.0], 1), (vec![1.0, -1.0, -1.0], 1)] {
            let (end, case) = (ends[w], format!("{code:?} of {} by {x:?}", ends[w]));
            let w = codes_of(&mut t, code, DType::F32, [40, 512, 512], false, Fill::List(vec![end]));
            let x = t.input(DType::F32, rows(&[512]), Fill::List(x));
            let y = rounded_by(&mut t, x, 128, w);
            t.case(&case, y);
        }
    }
    let program = t.compiled();
    let dots = program.plan.regions.iter().filter(|r| r.form().name() == "dot");
    // The cases at their ends are one region of each code.
    assert_eq!((dots.count(), program.plan.regions.len()), (34, 34));
    t.run_on(machines(), &SIZES);
}

#[test]
fn narrow_weights_are_read_as_codes() {
    let mut t = Table::new();
    let shapes =
        [[1usize, 32, 32], [7, 64, 32], [33, 256, 64], [70, 384, 96], [40, 1056, 1056], [129, 512, 128]];
    let short = [[5, 48, 16], [97, 320, 16]];
    let all = Code::ALL.map(|code| (code, &shapes[..]));
    let more = Code::ALL.map(|code| (code, &short[..])).into_iter().chain([(Code::Fp4, &shapes[..4])]);
    for (code, shapes) in all.into_iter().chain(more) {
        for (i, shape) in shapes.iter().copied().enumerate() {
            let scales = [DType::F32, DType::BF16, DType::F16][i % 3];
            let x = t.x(rows(&[shape[1]]));
            let y = coded(&mut t, code, scales, x, shape);
            t.case(&format!("{code:?} {shape:?} {scales}"), y);
            let x = t.input(DType::BF16, rows(&[shape[1]]), Fill::Real(-1.0, 1.0));
            let x = t.g.cast(x, DType::F32).unwrap();
            let y = coded(&mut t, code, scales, x, shape);
            let y = t.g.unary(UnaryKind::Tanh, y).unwrap();
            t.case(&format!("{code:?} {shape:?} {scales} by bf16"), y);
        }
    }
    let program = t.compiled();
    let dots = program.plan.regions.iter().filter(|r| r.form().name() == "dot");
    assert_eq!((dots.count(), program.plan.regions.len()), (56, 56));
    t.run_on(machines(), &SIZES);
}

/// As of an embedding that is the head as well: rows of codes are read from the panels in which the dot wants them.
#[test]
fn rows_of_codes_are_read_from_panels() {
    let mut t = Table::new();
    for code in Code::ALL {
        for (size, offsets) in [([33, 256, 64], true), ([70, 96, 96], false)] {
            let w = codes(&mut t, code, DType::BF16, size, offsets);
            let i = t.input(DType::I32, rows(&[]), Fill::Int(0, size[0] as i64 - 1));
            let parts = t.g.node(w).args.to_vec();
            let mut row = |part: NodeId| t.g.push(Gather { axis: 0, batch: 0 }, &[part, i]).unwrap();
            let parts: Vec<NodeId> = parts.into_iter().map(&mut row).collect();
            let row = t.g.push(Dequant { code }, &parts).unwrap();
            t.case(&format!("{code:?} {size:?}"), row);
            let y = t.g.linear(row, w).unwrap();
            t.case(&format!("{code:?} {size:?} by its codes"), y);
        }
    }
    let program = t.compiled();
    assert_eq!(program.plan.regions.iter().filter(|r| r.form().name() == "dot").count(), 6);
    t.all_native().run_on(machines(), &SIZES);
}

/// A row alone is computed in vectors, several in tiles of the matrix unit, whole ones or not: bit for bit the same, also of
/// numbers that it rounds, flushes or spreads in its own way.
#[test]
fn a_row_alone_has_its_bits_among_others() {
    let special = [f64::NAN, f64::INFINITY, 1e-40, -3e38, 1e-38, -2e-38];
    let shapes = [(32, 32), (70, 96), (97, 1024), (289, 640)];
    let codes = [(None, false), (Some(Code::Int4), false), (Some(Code::Int8), false)];
    let codes = [&codes[..], &[(Some(Code::Int4), true), (Some(Code::Int8), true)]].concat();
    for ((n, k), (code, integers)) in shapes.into_iter().flat_map(|s| codes.iter().map(move |c| (s, *c))) {
        let mut t = Table::new();
        // One special number in each of the first rows, then rows of products that are subnormal.
        let number = |row: usize, at: usize| match special.get(row) {
            Some(x) if at == row * 5 + 3 => *x,
            x => ((at * 37 % 101) as f64 - 50.0) * if x.is_some() { 1e-2 } else { 3e-39 },
        };
        let list = (0..k * 9).map(|i| number(i / k, i % k)).collect();
        let x = t.input(DType::BF16, rows(&[k]), Fill::List(list));
        let x = t.g.cast(x, DType::F32).unwrap();
        let y = match code {
            None => packed(&mut t, DType::BF16, x, n, k),
            Some(code) if integers => by_integers(
                &mut t,
                (code, DType::F32),
                x,
                [n, k, if k % 128 == 0 { 128 } else { 32 }, 32],
                false,
            ),
            Some(code) => coded(&mut t, code, DType::F32, x, [n, k, 32]),
        };
        t.case("y", y);
        let all = t.values(40);
        for machine in machines() {
            let mut session = t.session_on(machine);
            let want = run(&mut session, &all)[0].1.bytes.clone();
            for few in [1, 2, 9, 16] {
                for (i, want) in want.chunks_exact(few * n * 4).enumerate() {
                    let rows = all["in0"].reals()[i * few * k..(i + 1) * few * k].to_vec();
                    let mut some = all.clone();
                    some.insert("in0".into(), Tensor::float(DType::BF16, &[few, k], rows));
                    let got = &run(&mut session, &some)[0].1.bytes;
                    assert!(got == want, "{}: {few} rows, turn {i}, of [{n}, {k}]", machine.isa());
                }
            }
        }
    }
}

#[test]
fn epilogues() {
    let mut t = Table::new();
    for dtype in [DType::F32, DType::BF16] {
        for n in [16usize, 33] {
            let next = |t: &mut Table| {
                let x = t.x(rows(&[24]));
                packed(t, dtype, x, n, 24)
            };
            let y = next(&mut t);
            let b = t.weight(DType::F32, &[n]);
            let y = t.g.add(y, b).unwrap();
            t.case(&format!("{dtype} {n} bias"), y);
            let (y, r) = (next(&mut t), t.x(rows(&[n])));
            let y = t.g.add(r, y).unwrap();
            t.case(&format!("{dtype} {n} residual"), y);
            let y = next(&mut t);
            let y = t.g.unary(UnaryKind::Tanh, y).unwrap();
            let y = t.g.mul(y, r).unwrap();
            let y = t.g.scale(y, 0.5).unwrap();
            t.case(&format!("{dtype} {n} chain"), y);
            let y = next(&mut t);
            let y = t.g.cast(y, DType::BF16).unwrap();
            t.case(&format!("{dtype} {n} narrow"), y);
            let y = next(&mut t);
            let y = t.g.cast(y, DType::I8).unwrap();
            t.case(&format!("{dtype} {n} integer"), y);
            let y = next(&mut t);
            let yy = t.g.mul(y, y).unwrap();
            t.case(&format!("{dtype} {n} square"), yy);
            let y = next(&mut t);
            let y = t.g.reshape(y, vec![&Dim::symbol("n") * &Dim::from(n)]).unwrap();
            t.case(&format!("{dtype} {n} reshaped"), y);
            let (a, b) = (next(&mut t), next(&mut t));
            let y = t.g.binary(BinaryKind::Max, a, b).unwrap();
            t.case(&format!("{dtype} {n} of two dots"), y);
            let y = next(&mut t);
            let c = t.g.compare(astrai_ir::ops::CompareKind::Gt, y, r).unwrap();
            let y = t.g.select(c, y, r).unwrap();
            t.case(&format!("{dtype} {n} selected"), y);
            let y = next(&mut t);
            let twice = t.g.scale(y, 2.0).unwrap();
            t.case(&format!("{dtype} {n} result used twice, one"), y);
            t.case(&format!("{dtype} {n} result used twice, two"), twice);
        }
    }
    t.all_native().run_some(&[1, 7, 33]);
}

#[test]
fn prologues() {
    let mut t = Table::new();
    for dtype in [DType::F32, DType::BF16] {
        for k in [32usize, 37] {
            let x = t.x(rows(&[k]));
            let w = t.weight(DType::F32, &[k]);
            let x = t.g.rms_norm(x, w, 1e-6).unwrap();
            let y = packed(&mut t, dtype, x, 20, k);
            t.case(&format!("{dtype} {k} norm"), y);
            let (a, b) = (t.x(rows(&[k])), t.x(rows(&[k])));
            let x = t.g.push(GatedAct { act: Activation::Silu }, &[a, b]).unwrap();
            let y = packed(&mut t, dtype, x, 20, k);
            t.case(&format!("{dtype} {k} gated"), y);
            let joined = t.x(rows(&[2 * k]));
            let (a, b) = (
                t.g.slice(joined, 1, Dim::from(0), Dim::from(k)).unwrap(),
                t.g.slice(joined, 1, Dim::from(k), Dim::from(k)).unwrap(),
            );
            let x = t.g.push(GatedAct { act: Activation::GeluTanh }, &[a, b]).unwrap();
            let y = packed(&mut t, dtype, x, 20, k);
            t.case(&format!("{dtype} {k} gated halves"), y);
            let x = t.input(DType::BF16, rows(&[k]), Fill::Real(-1.0, 1.0));
            let x = t.g.cast(x, DType::F32).unwrap();
            let y = packed(&mut t, dtype, x, 20, k);
            t.case(&format!("{dtype} {k} cast"), y);
            let x = t.x(vec![Dim::from(k), Dim::symbol("n")]);
            let x = t.g.permute(x, &[1, 0]).unwrap();
            let y = packed(&mut t, dtype, x, 20, k);
            t.case(&format!("{dtype} {k} permuted"), y);
            let (table, i) = (t.x(dims(&[9, k])), t.input(DType::I32, rows(&[]), Fill::Int(0, 8)));
            let x = t.g.gather(table, i, 0).unwrap();
            let y = packed(&mut t, dtype, x, 20, k);
            t.case(&format!("{dtype} {k} gathered"), y);
        }
    }
    // The dot of a dot; the weight used as an embedding too.
    let x = t.x(rows(&[20]));
    let h = packed(&mut t, DType::F32, x, 33, 20);
    let h = t.g.unary(UnaryKind::Sigmoid, h).unwrap();
    let y = packed(&mut t, DType::BF16, h, 7, 33);
    t.case("two layers", y);
    for dtype in [DType::F32, DType::BF16] {
        let w = t.weight(dtype, &[40, 12]);
        let wide = if dtype == DType::F32 { w } else { t.g.cast(w, DType::F32).unwrap() };
        let i = t.input(DType::I32, rows(&[]), Fill::Int(0, 39));
        let x = t.g.gather(wide, i, 0).unwrap();
        let y = t.g.linear(x, wide).unwrap();
        t.case(&format!("tied {dtype}"), y);
        let back = t.g.push(Dot { batch: vec![], contract: vec![(1, 0)] }, &[y, wide]).unwrap();
        t.case(&format!("tied {dtype}, back"), back);
        let p = t.g.permute(wide, &[1, 0]).unwrap();
        t.case(&format!("tied {dtype}, itself"), p);
    }
    t.all_native().run_some(&[1, 7, 33, 40]);
}

/// Numbers of f16 are widened in memory, weights and activations alike, and the core multiplies them.
#[test]
fn the_core_multiplies_what_was_f16() {
    let mut t = Table::new();
    let x = |t: &mut Table, width: usize| {
        let x = t.input(DType::F16, rows(&[width]), Fill::Real(-1.0, 1.0));
        t.g.cast(x, DType::F32).unwrap()
    };
    for (n, k) in [(7, 3), (33, 257), (65, 64)] {
        let x = x(&mut t, k);
        let y = packed(&mut t, DType::F16, x, n, k);
        t.case(&format!("[{n}, {k}]"), y);
    }
    let (a, b) = (x(&mut t, 33), x(&mut t, 40));
    let y = t.g.push(Dot { batch: vec![], contract: vec![(0, 0)] }, &[a, b]).unwrap();
    t.case("over rows", y);
    let program = t.compiled();
    assert_eq!(program.plan.regions.iter().filter(|r| r.form().name() == "dot").count(), 4);
    t.all_native().run_some(&[1, 7, 40]);
}

#[test]
fn a_cast_that_loses_values_is_not_looked_through() {
    let mut t = Table::new();
    for (weight, through) in
        [(DType::F32, DType::I32), (DType::BF16, DType::F16), (DType::F32, DType::F8E4M3)]
    {
        let (x, w) = (t.x(rows(&[16])), t.weight(weight, &[8, 16]));
        let w = t.g.scale(w, 1.0).unwrap();
        let w = t.g.cast(w, through).unwrap();
        let w = t.g.cast(w, DType::F32).unwrap();
        let y = t.g.linear(x, w).unwrap();
        t.case(&format!("{weight} through {through}"), y);
    }
    t.run_some(&[1, 7]);
}

#[test]
fn generic_dots() {
    let mut t = Table::new();
    type Pairs = Vec<(usize, usize)>;
    let numbers: [(&[usize], &[usize], Pairs, Pairs); 9] = [
        (&[7], &[7, 5], vec![], vec![(1, 0)]),
        (&[7], &[5, 7], vec![], vec![(1, 1)]),
        (&[3, 7], &[7, 3, 2], vec![], vec![(1, 1), (2, 0)]),
        (&[3, 7], &[3, 7, 4], vec![(1, 0)], vec![(2, 1)]),
        (&[3, 7], &[4, 7, 3], vec![(1, 2)], vec![(2, 1)]),
        (&[3, 7], &[3, 4, 7], vec![(1, 0), (2, 2)], vec![]),
        (&[3], &[5], vec![], vec![]),
        (&[33], &[33], vec![], vec![(1, 0)]),
        (&[2, 65], &[65, 31], vec![], vec![(2, 0)]),
    ];
    for (i, (l, r, batch, contract)) in numbers.into_iter().enumerate() {
        let (a, b) = (t.x(rows(l)), t.x(dims(r)));
        let y = t.g.push(Dot { batch: batch.clone(), contract: contract.clone() }, &[a, b]).unwrap();
        t.case(&format!("generic {i}"), y);
        let y = t.g.unary(UnaryKind::Tanh, y).unwrap();
        t.case(&format!("generic {i} and on"), y);
        let (a, b) = (
            t.input(DType::BF16, rows(l), Fill::Real(-1.0, 1.0)),
            t.input(DType::BF16, dims(r), Fill::Real(-1.0, 1.0)),
        );
        let y = t.g.push(Dot { batch, contract }, &[a, b]).unwrap();
        t.case(&format!("generic {i} bf16"), y);
    }
    let (a, b) = (t.x(rows(&[6])), t.x(rows(&[4])));
    let y = t.g.push(Dot { batch: vec![], contract: vec![(0, 0)] }, &[a, b]).unwrap();
    t.case("over the symbol", y);
    let y = t.g.push(Dot { batch: vec![(0, 0)], contract: vec![] }, &[a, b]).unwrap();
    t.case("batched over the symbol", y);
    let y = t.g.push(Dot { batch: vec![], contract: vec![(0, 0), (1, 1)] }, &[a, a]).unwrap();
    t.case("with itself", y);
    let w = t.weight(DType::F32, &[6, 9]);
    let y = t.g.push(Dot { batch: vec![], contract: vec![(1, 0)] }, &[a, w]).unwrap();
    t.case("a weight the other way round", y);
    let wt = t.g.permute(w, &[1, 0]).unwrap();
    let y = t.g.linear(a, wt).unwrap();
    t.case("a permuted weight", y);
    t.all_native().run_some(&[1, 7, 33]);
}
