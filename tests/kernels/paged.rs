//! Keys and values in pages: rows stored into states, attention that finds its keys by tables.

use crate::table::{Fill, Table, dims, machine, machines, rows};
use astrai_ir::ops::{Attention, BinaryKind, RmsNorm, Rope, RopeLayout, Store, UnaryKind};
use astrai_ir::{Anchor, DType, Dim, NodeId, Real, Type};

fn paged(d: usize, page: usize) -> Attention {
    let (scale, span) = (Real(1.0 / (d as f64).sqrt()), Dim::from(90));
    Attention { scale, causal: true, window: None, softcap: None, sinks: false, span, page: Some(page) }
}

/// Queries of a chunk, of a decoded token, of nothing and of a whole prompt: starts, tables of scattered pages, keys.
fn bounds(t: &mut Table, page: usize) -> ([NodeId; 3], usize) {
    let lens = [75usize, 66, 0, 6];
    let width = 90usize.div_ceil(page);
    let pages = 4 * width + 3;
    let number = |i: usize| if i % width < lens[i / width].div_ceil(page) { i * 7 % pages } else { 1 << 30 };
    // Seven and the number of pages have no common factor.
    assert!(!pages.is_multiple_of(7));
    let list = |v: Vec<usize>| Fill::List(v.into_iter().map(|x| x as f64).collect());
    let starts = t.input(DType::I32, dims(&[5]), list(vec![0, 9, 10, 10, 16]));
    let tables = t.input(DType::I32, dims(&[4, width]), list((0..4 * width).map(number).collect()));
    let lens = t.input(DType::I32, dims(&[4]), list(lens.to_vec()));
    ([starts, tables, lens], pages * page)
}

fn attend(
    t: &mut Table,
    name: &str,
    op: Attention,
    dtype: DType,
    (h, kv, d, dv): (usize, usize, usize, usize),
) {
    let page = op.page.unwrap();
    let ([starts, tables, lens], rows) = bounds(t, page);
    let q = t.input(dtype, dims(&[16, h, d]), Fill::Real(-2.0, 2.0));
    let k = t.state(&format!("{name}.k"), Type::new(dtype, dims(&[rows, kv, d])), Fill::Real(-2.0, 2.0));
    let v = t.state(&format!("{name}.v"), Type::new(dtype, dims(&[rows, kv, dv])), Fill::Real(-2.0, 2.0));
    let mut args = vec![q, k, v, starts, tables, lens];
    if op.sinks {
        args.push(t.input(dtype, dims(&[h]), Fill::Real(-1.0, 3.0)));
    }
    let both = t.g.push(op, &args).unwrap();
    for i in 0..2 {
        let part = t.g.part(both, i).unwrap();
        t.case(&format!("{name}, {i}"), part);
    }
}

#[test]
fn attention_over_pages() {
    let mut t = Table::new();
    let unused = t.x(rows(&[]));
    t.case("unused", unused);
    for page in [1, 2, 16, 64] {
        attend(&mut t, &format!("page {page}"), paged(16, page), DType::F32, (4, 2, 16, 16));
    }
    for (i, heads) in [(1, 1, 1, 1), (6, 2, 33, 7), (16, 16, 64, 64), (9, 3, 64, 64)].into_iter().enumerate()
    {
        attend(&mut t, &format!("shape {i}"), paged(heads.2, 16), DType::F32, heads);
    }
    // One query of bf16 keys has a way of its own where the heads of a group are few.
    let groups =
        [(9, 3, 64, 64), (2, 2, 32, 48), (8, 4, 128, 128), (8, 1, 32, 16), (7, 1, 64, 80), (10, 1, 32, 32)];
    for (i, heads) in groups.into_iter().enumerate() {
        for (page, window) in [(16, None), (4, Some(30))] {
            let op = Attention { window, ..paged(heads.2, page) };
            attend(&mut t, &format!("group {i}, page {page}"), op, DType::BF16, heads);
        }
    }
    let heads = (4, 2, 16, 16);
    for (i, (causal, window, softcap)) in
        [(false, None, None), (true, Some(1), None), (true, Some(70), None), (true, Some(9), Some(2.0))]
            .into_iter()
            .enumerate()
    {
        let op = Attention { causal, window, softcap: softcap.map(Real), ..paged(16, 8) };
        attend(&mut t, &format!("option {i}"), op, DType::F32, heads);
    }
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let op = Attention { sinks: true, window: Some(20), ..paged(16, 4) };
        attend(&mut t, &format!("sinks {dtype}"), op, dtype, heads);
    }
    t.all_native().run(&[1]);
}

/// A query alone reads values where they lie; among others they pass through the matrix unit. Bit for bit the same, also with
/// values that are no finite numbers, seen or not.
#[test]
fn a_query_alone_has_its_bits_among_others() {
    const KEYS: usize = 200;
    let mut t = Table::new();
    let unused = t.x(rows(&[]));
    t.case("unused", unused);
    let list = |v: &[usize]| Fill::List(v.iter().map(|&x| x as f64).collect());
    let tables = t.input(DType::I32, dims(&[1, 13]), list(&[4, 1, 7, 0, 9, 2, 12, 5, 3, 11, 8, 6, 10]));
    let lens = t.input(DType::I32, dims(&[1]), list(&[KEYS]));
    let [many, one] = [40, 1].map(|n| t.input(DType::I32, dims(&[2]), list(&[0, n])));
    let mut names = vec![];
    for (h, kv, d, dv) in [(2, 2, 64, 64), (8, 4, 128, 128), (3, 1, 32, 96), (4, 1, 96, 64), (5, 1, 64, 64)] {
        for (window, bad) in [(None, 0.0), (None, f64::INFINITY), (Some(70), f64::NAN), (Some(120), 1e-38)] {
            let span = Dim::from(208);
            let op = Attention { window, span, ..paged(d, 16) };
            let name = format!("{h} {kv} {d} {dv} {window:?}");
            let state = |t: &mut Table, part: &str, d: usize, fill| {
                t.state(&format!("{name} {bad} {part}"), Type::new(DType::BF16, dims(&[208, kv, d])), fill)
            };
            let k = state(&mut t, "k", d, Fill::Real(-2.0, 2.0));
            // A row of page 7, which holds keys 32 to 47; and one of page 8, of 160 to 175.
            let at = |i: usize| {
                i / (kv * dv) == 7 * 16 + 3 && i.is_multiple_of(5) || i == (8 * 16 + 5) * kv * dv + 2
            };
            let scale = if bad == 1e-38 { 1e-38 } else { 1.0 }; // times weights: subnormal
            let value = |i| if at(i) { bad } else { scale * (f64::from((i * 29 % 83) as u32) / 41.0 - 1.0) };
            let v = state(&mut t, "v", dv, Fill::List((0..208 * kv * dv).map(value).collect()));
            let q = t.input(DType::BF16, dims(&[40, h, d]), Fill::Real(-2.0, 2.0));
            let last = t.g.slice(q, 0, Dim::from(39), Dim::from(1)).unwrap();
            for (which, (q, starts)) in [("many", (q, many)), ("one", (last, one))] {
                let both = t.g.push(op.clone(), &[q, k, v, starts, tables, lens]).unwrap();
                let part = t.g.part(both, 0).unwrap();
                t.case(&format!("{name} {bad} {which}"), part);
            }
            names.push(format!("{name} {bad}"));
        }
    }
    let leaves = t.values(1);
    for machine in machines() {
        let results = crate::table::run(&mut t.session_on(machine), &leaves);
        let bytes = |name: String| &results.iter().find(|(n, _)| *n == name).unwrap().1.bytes;
        for name in &names {
            let (all, one) = (bytes(format!("{name} many")), bytes(format!("{name} one")));
            assert!(all.ends_with(one), "{}: {name}", machine.simd().name());
        }
    }
}

/// A state and the rows of `n` values: skipped ones, repeated ones, the last of all.
fn stored(t: &mut Table, name: &str, dtype: DType, shape: &[usize]) -> [NodeId; 2] {
    let state = t.state(name, Type::new(dtype, dims(shape)), Fill::Int(-9, 9));
    let last = shape[0] as f64 - 1.0;
    let at = Fill::List(vec![3.0, -1.0, 0.0, last, 3.0, 7.0, 3.0, 8.0, 16.0, 0.0, -1.0]);
    [state, t.input(DType::I32, rows(&[]), at)]
}

fn store(t: &mut Table, name: &str, [state, at]: [NodeId; 2], value: NodeId) {
    let next = t.g.push(Store {}, &[state, at, value]).unwrap();
    t.case(name, next);
}

#[test]
fn rows_are_stored_where_the_state_lies() {
    let mut t = Table::new();
    for (i, shape) in [&[20][..], &[21, 1], &[20, 37], &[33, 3, 16], &[40, 2, 3, 5]].into_iter().enumerate() {
        let s = stored(&mut t, &format!("s{i}"), DType::F32, shape);
        let value = t.x(rows(&shape[1..]));
        store(&mut t, &format!("shape {i}"), s, value);
    }
    for dtype in [DType::I32, DType::I8, DType::F16] {
        let s = stored(&mut t, &format!("s{dtype}"), dtype, &[19, 5]);
        let value = t.input(dtype, rows(&[5]), Fill::Int(-9, 9));
        store(&mut t, &format!("{dtype}"), s, value);
    }
    // What a cache stores: normed, rotated, rounded; a slice of a joined row.
    let joined = t.x(rows(&[3 * 16 + 5]));
    let k = t.g.slice(joined, 1, Dim::from(5), Dim::from(48)).unwrap();
    let k = t.g.reshape(k, rows(&[3, 16])).unwrap();
    let (c, s, w) = (t.x(rows(&[6])), t.x(rows(&[6])), t.weight(DType::F32, &[16]));
    for (i, layout) in [RopeLayout::Half, RopeLayout::Interleaved].into_iter().enumerate() {
        let n = t.g.push(RmsNorm { eps: Real(1e-6) }, &[k, w]).unwrap();
        let r = t.g.push(Rope { layout, dim: 12 }, &[n, c, s]).unwrap();
        let r = t.g.cast(r, DType::BF16).unwrap();
        let s = stored(&mut t, &format!("cache{i}"), DType::BF16, &[32, 3, 16]);
        store(&mut t, &format!("cache {i}"), s, r);
    }
    let s = stored(&mut t, "slice", DType::BF16, &[32, 3, 16]);
    let narrow = t.g.cast(k, DType::BF16).unwrap();
    store(&mut t, "slice'", s, narrow);
    // Rows that are computed; the state read before.
    let [state, _] = stored(&mut t, "computed", DType::F32, &[35, 8]);
    let at = t.input(DType::I32, rows(&[]), Fill::Int(-1, 33));
    let one = t.g.fill(at, 1.0).unwrap();
    let at = t.g.binary(BinaryKind::Add, at, one).unwrap();
    let before = t.g.gather(state, at, 0).unwrap();
    let before = t.g.unary(UnaryKind::Exp, before).unwrap();
    t.case("before", before);
    let value = t.x(rows(&[8]));
    store(&mut t, "computed'", [state, at], value);
    t.all_native().run(&[1, 2, 11, 60]);
    let program = t.compiled();
    let stores = program.plan.regions.iter().filter(|r| !r.in_place.is_empty());
    assert!(stores.clone().count() >= 12 && stores.clone().all(|r| r.anchor == Anchor::Loops));
    // Nothing of a state is read but what is stored there.
    let bytes = stores.map(|r| r.bytes().to_string()).collect::<Vec<_>>();
    assert!(bytes.iter().all(|b| b.contains('n')), "{bytes:?}");
}

/// Rows that are made of others of the state come from the interpreter, which reads all before it writes.
#[test]
fn rows_of_the_state_itself() {
    let mut t = Table::new();
    let s = stored(&mut t, "s", DType::F32, &[20, 6]);
    let from = t.input(DType::I32, rows(&[]), Fill::Int(0, 19));
    let value = t.g.gather(s[0], from, 0).unwrap();
    store(&mut t, "moved", s, value);
    let program = t.compiled();
    assert!(program.plan.regions.iter().any(|r| r.anchor == Anchor::Eval));
    t.run(&[1, 11, 40]);
}

#[test]
fn the_same_bits_on_any_number_of_threads() {
    let mut t = Table::new();
    let s = stored(&mut t, "s", DType::F32, &[50, 3, 16]);
    let value = t.x(rows(&[3, 16]));
    store(&mut t, "s'", s, value);
    let leaves = t.values(300);
    let run = |threads| {
        let m = astrai::machine::Machine::new(astrai_runtime::Device::Host, threads).unwrap();
        let states = t.states();
        let mut session = t.open(&m, &states);
        (0..20).for_each(|_| _ = crate::table::run(&mut session, &leaves));
        states.read("s", |b| b.to_vec()).unwrap()
    };
    let one = run(1);
    assert!([2, 3, 8].iter().all(|n| run(*n) == one));
    assert_eq!(machine().pool.threads(), 2);
}
