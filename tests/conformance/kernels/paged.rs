//! Keys and values in pages: rows stored into states, attention that finds its keys by tables.

use crate::driver::checks_everything;
use crate::kernels::table::{Fill, Table, dims, rows};
use crate::machines::{crowded, emulated, host, machine, machines};
use astrai_engine::Machine;
use astrai_ir::ops::{
    Attention, BinaryKind, Dequant, ReduceKind, RmsNorm, Rope, RopeLayout, Store, UnaryKind,
};
use astrai_ir::{Code, DType, Dim, Form, NodeId, Real, Type};

fn paged(d: usize, page: usize) -> Attention {
    let (scale, span) = (Real(1.0 / (d as f64).sqrt()), Dim::from(90));
    Attention { scale, causal: true, window: None, softcap: None, sinks: false, span, page: Some(page) }
}

/// Of four sequences: where their queries begin, and their keys.
type Batch = ([usize; 5], [usize; 4]);

/// Queries of a chunk, of a decoded token, of nothing and of a whole prompt.
const MIXED: Batch = ([0, 9, 10, 10, 16], [75, 66, 0, 6]);

/// Few enough that the keys of a query are shared by units: of many chunks, of two, of one; and of two queries.
const FEW: Batch = ([0, 1, 2, 3, 5], [4700, 700, 77, 600]);

/// The same keys and a query each: threads share rows of all key heads.
const SHARED: Batch = ([0, 1, 2, 3, 4], [4700, 700, 77, 600]);

/// About a query for each sequence, of which one has two and one none.
const EACH: Batch = ([0, 1, 1, 3, 4], [130, 0, 70, 64]);

/// Starts, tables of scattered pages, keys.
fn bounds(t: &mut Table, page: usize, (starts, lens): Batch) -> ([NodeId; 3], usize) {
    let width = (lens[0] + 15).div_ceil(page);
    let mut pages = 4 * width + 3;
    pages += usize::from(pages.is_multiple_of(7));
    let number = |i: usize| if i % width < lens[i / width].div_ceil(page) { i * 7 % pages } else { 1 << 30 };
    // Seven and the number of pages have no common factor.
    assert!(!pages.is_multiple_of(7));
    let list = |v: Vec<usize>| Fill::List(v.into_iter().map(|x| x as f64).collect());
    let starts = t.input(DType::I32, dims(&[5]), list(starts.to_vec()));
    let tables = t.input(DType::I32, dims(&[4, width]), list((0..4 * width).map(number).collect()));
    let lens = t.input(DType::I32, dims(&[4]), list(lens.to_vec()));
    ([starts, tables, lens], pages * page)
}

/// Query heads, key heads, numbers of a key, numbers of a value.
type Heads = (usize, usize, usize, usize);

/// What pages hold: numbers, or codes beside queries of this type.
#[derive(Clone, Copy)]
pub enum Pages {
    Of(DType),
    Codes(Code, DType),
}

impl From<DType> for Pages {
    fn from(dtype: DType) -> Pages {
        Pages::Of(dtype)
    }
}

fn attend(t: &mut Table, name: &str, op: Attention, pages: impl Into<Pages>, heads: Heads) {
    attend_in(t, name, op, pages, heads, MIXED);
}

/// Keys or values `[rows, kv, d]` in pages, as f32 where codes are, with these scales; one of e4m3 is odd, here and there.
pub fn state(t: &mut Table, name: &str, pages: Pages, shape: [usize; 3], scales: Fill, odd: f64) -> NodeId {
    let code = match pages {
        Pages::Of(dtype) => return t.state(name, Type::new(dtype, dims(&shape)), Fill::Real(-2.0, 2.0)),
        Pages::Codes(code, _) => code,
    };
    let e4m3 = |i| if i == 4000 { odd } else { (i * 131 % 897) as f64 - 448.0 };
    let fill =
        if code == Code::Fp8 { Fill::List((0..7919).map(e4m3).collect()) } else { Fill::Int(-127, 127) };
    let codes = t.state(&format!("{name}#codes"), Type::new(code.dtype(), dims(&shape)), fill);
    let ty = Type::new(DType::F32, dims(&[shape[0], shape[1], 1]));
    let scales = t.state(&format!("{name}#scales"), ty, scales);
    t.g.push(Dequant { code }, &[codes, scales]).unwrap()
}

fn attend_in(
    t: &mut Table,
    name: &str,
    op: Attention,
    pages: impl Into<Pages>,
    (h, kv, d, dv): Heads,
    batch: Batch,
) {
    let pages = pages.into();
    let (Pages::Of(dtype) | Pages::Codes(_, dtype)) = pages;
    let page = op.page.unwrap();
    let ([starts, tables, lens], rows) = bounds(t, page, batch);
    let mut q = t.input(dtype, dims(&[batch.0[4], h, d]), Fill::Real(-2.0, 2.0));
    let scales = || Fill::Real(0.002, 0.02);
    let k = state(t, &format!("{name}.k"), pages, [rows, kv, d], scales(), f64::NAN);
    let v = state(t, &format!("{name}.v"), pages, [rows, kv, dv], scales(), f64::NAN);
    if let Pages::Codes(..) = pages {
        q = t.g.cast(q, DType::F32).unwrap();
    }
    let mut args = vec![q, k, v, starts, tables, lens];
    if op.sinks {
        args.push(t.input(t.g.ty(q).dtype, dims(&[h]), Fill::Real(-1.0, 3.0)));
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
            attend_in(
                &mut t,
                &format!("a query each {i}, page {page}"),
                op.clone(),
                DType::BF16,
                heads,
                EACH,
            );
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
        attend(&mut t, &format!("sinks {dtype}"), op.clone(), dtype, heads);
        attend_in(&mut t, &format!("a query each, sinks {dtype}"), op, dtype, heads, EACH);
    }
    t.all_native().run(&[1]);
    // Four sequences are many for one thread, whose units take all heads.
    t.run_on([&host(1)], &[1]);
}

/// Codes of eight bits in pages, read where they lie: by words, by the matrix unit, one number after another.
#[test]
fn attention_over_pages_of_codes() {
    let mut t = Table::new();
    let unused = t.x(rows(&[]));
    t.case("unused", unused);
    let heads =
        [(4, 2, 16, 16), (6, 2, 33, 7), (9, 3, 64, 64), (8, 4, 128, 128), (8, 1, 32, 96), (10, 1, 64, 32)];
    // Outside of continuous integration every second.
    let step = if checks_everything() { 1 } else { 2 };
    for code in [Code::Int8, Code::Fp8] {
        for (dtype, page, window) in [(DType::F32, 16, None), (DType::BF16, 4, Some(30))] {
            for (i, heads) in heads.into_iter().enumerate().step_by(step) {
                let op = Attention { window, sinks: i == 2, ..paged(heads.2, page) };
                let name = format!("{} {dtype} {i}, page {page}", code.name());
                attend(&mut t, &name, op, Pages::Codes(code, dtype), heads);
            }
        }
        let op =
            Attention { window: Some(700), softcap: Some(Real(2.0)), span: Dim::from(4715), ..paged(64, 16) };
        for (few, batch) in [FEW, SHARED].into_iter().enumerate() {
            let name = format!("{} of many chunks {few}", code.name());
            attend_in(&mut t, &name, op.clone(), Pages::Codes(code, DType::BF16), (9, 3, 64, 64), batch);
        }
    }
    t.all_native().run_on(crowded().iter().chain(emulated()), &[1]);
    // Nothing but codes and scales is read, and of these what the sequences have.
    let program = t.compiled();
    let attends = program.plan.regions.iter().filter(|r| r.form().name() == "attention");
    assert_eq!(attends.clone().count(), 2 * (2 * heads.len() / step + 2));
    assert!(attends.clone().all(|r| matches!(r.form(), Form::Attention(f) if f.codes.is_some())));
}

#[test]
fn chunks_of_keys_are_units() {
    let mut t = Table::new();
    let unused = t.x(rows(&[]));
    t.case("unused", unused);
    let of = |d, options: (bool, Option<usize>, Option<f64>, bool)| {
        let (causal, window, softcap, sinks) = options;
        Attention { causal, window, softcap: softcap.map(Real), sinks, span: Dim::from(4715), ..paged(d, 16) }
    };
    let options = [
        (true, None, None, false),
        (false, None, None, false),
        (true, Some(700), Some(2.0), false),
        (true, Some(3000), None, true),
    ];
    for (i, options) in options.into_iter().enumerate() {
        for (few, batch) in [FEW, SHARED].into_iter().enumerate() {
            let name = |dtype| format!("{dtype} {i} {few}");
            attend_in(&mut t, &name("f32"), of(32, options), DType::F32, (4, 2, 32, 32), batch);
            attend_in(&mut t, &name("bf16"), of(32, options), DType::BF16, (9, 3, 32, 64), batch);
        }
    }
    t.all_native().run_on(crowded(), &[1]);
}

/// A query alone reads values where they lie; among others they pass through the matrix unit. Bit for bit the same, also with
/// values that are no finite numbers, seen or not.
#[test]
fn a_query_alone_has_its_bits_among_others() {
    let heads = [(2, 2, 64, 64), (8, 4, 128, 128), (3, 1, 32, 96), (4, 1, 96, 64), (5, 1, 64, 64)];
    let finite = [(None, 0.0), (Some(70), f64::NAN), (Some(70), 1e-38)];
    alone(machines(), 200, DType::BF16, &heads, &[&finite[..], &[(None, f64::INFINITY)]].concat());
}

/// Its chunks of keys are units of their own then.
#[test]
fn a_query_alone_has_its_bits_among_others_after_many_keys() {
    let options = [(None, f64::INFINITY), (Some(1500), f64::NAN)];
    alone(crowded(), 5000, DType::BF16, &[(2, 2, 64, 64), (5, 1, 32, 96)], &options);
    alone(crowded(), 5000, DType::F32, &[(9, 1, 33, 20)], &options);
}

/// Of codes, too, by words and by the matrix unit, also beside a scale that is no finite number and is not seen.
#[test]
fn a_query_alone_has_its_bits_among_others_over_codes() {
    let heads = [(2, 2, 64, 64), (8, 4, 128, 128), (3, 1, 32, 96), (5, 1, 64, 64)];
    for (code, dtype) in [(Code::Int8, DType::BF16), (Code::Fp8, DType::BF16), (Code::Int8, DType::F32)] {
        let options = [(None, 0.01), (Some(70), f64::NAN)];
        alone(machines(), 200, Pages::Codes(code, dtype), &heads, &options);
    }
    alone(
        crowded(),
        5000,
        Pages::Codes(Code::Int8, DType::BF16),
        &[(9, 3, 64, 64)],
        &[(Some(1500), f64::NAN)],
    );
}

/// Forty queries and the last of them, in windows, with a number among the values that may not be finite.
fn alone(
    machines: &[Machine],
    keys: usize,
    pages: impl Into<Pages>,
    heads: &[Heads],
    options: &[(Option<usize>, f64)],
) {
    let pages = pages.into();
    let (Pages::Of(dtype) | Pages::Codes(_, dtype)) = pages;
    let table = keys.div_ceil(16);
    let mut t = Table::new();
    let unused = t.x(rows(&[]));
    t.case("unused", unused);
    let list = |v: &[usize]| Fill::List(v.iter().map(|&x| x as f64).collect());
    let scattered: Vec<usize> = (0..table).map(|i| (i * 5 + 4) % table).collect();
    assert!(!table.is_multiple_of(5));
    let tables = t.input(DType::I32, dims(&[1, table]), list(&scattered));
    let lens = t.input(DType::I32, dims(&[1]), list(&[keys]));
    let [many, one] = [40, 1].map(|n| t.input(DType::I32, dims(&[2]), list(&[0, n])));
    let mut names = vec![];
    for &(h, kv, d, dv) in heads {
        for &(window, bad) in options {
            let span = Dim::from(table * 16);
            let op = Attention { window, span, ..paged(d, 16) };
            let name = format!("{h} {kv} {d} {dv} {window:?}");
            let scale = |i: usize| if i / kv == scattered[2] * 16 + 3 { bad } else { 0.01 + i as f64 * 1e-6 };
            let scales = (0..table * 16 * kv).map(scale).collect::<Vec<_>>();
            let held = |t: &mut Table, part: &str, d: usize, fill| {
                let (name, shape) = (format!("{name} {bad} {part}"), [table * 16, kv, d]);
                match pages {
                    Pages::Of(dtype) => t.state(&name, Type::new(dtype, dims(&shape)), fill),
                    codes => state(t, &name, codes, shape, Fill::List(scales.clone()), 0.0),
                }
            };
            let k = held(&mut t, "k", d, Fill::Real(-2.0, 2.0));
            // A row of a page near the beginning, and one of a page that windows see.
            let seen = (keys - 30) / 16;
            let at = |i: usize| {
                i / (kv * dv) == scattered[2] * 16 + 3 && i.is_multiple_of(5)
                    || i == (scattered[seen] * 16 + 5) * kv * dv + 2
            };
            let scale = if bad == 1e-38 { 1e-38 } else { 1.0 }; // times weights: subnormal
            let value = |i| if at(i) { bad } else { scale * (f64::from((i * 29 % 83) as u32) / 41.0 - 1.0) };
            let v = held(&mut t, "v", dv, Fill::List((0..table * 16 * kv * dv).map(value).collect()));
            // Scores far from one another, too: maxima of some rows rise from one tile of keys to the next.
            let reach = if bad == 0.0 { 512.0 } else { 2.0 };
            let mut q = t.input(dtype, dims(&[40, h, d]), Fill::Real(-reach, reach));
            if let Pages::Codes(..) = pages {
                q = t.g.cast(q, DType::F32).unwrap();
            }
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
    for machine in machines {
        let results = crate::kernels::table::run(&mut t.session_on(machine), &leaves);
        let bytes = |name: String| &results.iter().find(|(n, _)| *n == name).unwrap().1.bytes;
        for name in &names {
            let (all, one) = (bytes(format!("{name} many")), bytes(format!("{name} one")));
            assert!(all.ends_with(one), "{}: {name}", machine.isa());
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
    // Codes of a head and their scale.
    let top = t.g.unary(UnaryKind::Abs, k).unwrap();
    let top = t.g.reduce(ReduceKind::Max, top, &[2]).unwrap();
    let scale = t.g.scale(top, 1.0 / 127.0).unwrap();
    let scale = t.g.reshape(scale, rows(&[3, 1])).unwrap();
    let code = t.g.div(k, scale).unwrap();
    let code = t.g.unary(UnaryKind::Floor, code).unwrap();
    let code = t.g.cast(code, DType::I8).unwrap();
    for (name, dtype, width, value) in [("codes", DType::I8, 16, code), ("scales", DType::F32, 1, scale)] {
        let s = stored(&mut t, name, dtype, &[32, 3, width]);
        store(&mut t, &format!("{name}'"), s, value);
    }
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
    let stores = program.plan.regions.iter().filter(|r| !r.piece.in_place.is_empty());
    assert!(stores.clone().count() >= 12 && stores.clone().all(|r| r.form().name() == "loops"));
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
    assert!(program.plan.regions.iter().any(|r| !r.form().has_kernel()));
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
        let m = host(threads);
        let states = t.states(&m);
        let mut session = t.open(&m, &states);
        (0..20).for_each(|_| _ = crate::kernels::table::run(&mut session, &leaves));
        states.read("s", |b| b.to_vec()).unwrap()
    };
    let one = run(1);
    assert!([2, 3, 8].iter().all(|n| run(*n) == one));
    assert_eq!(machine().device.threads(), 2);
}
