//! Experts: the choice and its lists, products of rows in groups from packed weights and from rows, their gradients; groups of
//! no row, of one, of many tiles.

use crate::kernels::dots::codes;
use crate::kernels::table::{Fill, Table, dims, rows};
use crate::machines::{machine, machines};
use astrai_ir::ops::{
    Activation, FakeQuant, GatedAct, GroupScore, GroupedDot, GroupedOuter, Groups, LowRank, ReduceKind,
    Route, Scores,
};
use astrai_ir::{Code, DType, Dim, Form, NodeId, Real};
use astrai_runtime::Value;

const SIZES: [u64; 8] = [1, 2, 3, 5, 17, 40, 130, 300];

fn route(k: usize, scores: Scores) -> Route {
    Route { k, scores, groups: None, normalise: true, scale: Real(1.0) }
}

/// The parts of a route of `experts` experts; a narrow range of logits lets few experts have most rows.
fn lists(t: &mut Table, op: Route, experts: usize) -> [NodeId; 5] {
    let logits = t.x(rows(&[experts]));
    let node = t.g.push(op, &[logits]).unwrap();
    [0, 1, 2, 3, 4].map(|i| t.g.part(node, i).unwrap())
}

#[test]
fn routes_of_every_kind() {
    let mut t = Table::new();
    for (experts, k) in [(1usize, 1usize), (4, 2), (33, 8), (128, 8)] {
        for scores in [Scores::Softmax, Scores::Sigmoid, Scores::SoftmaxChosen] {
            for normalise in [false, true] {
                let op = Route { normalise, scale: Real(1.5), ..route(k, scores) };
                for (name, part) in ["experts", "weights", "slots", "places", "offsets"]
                    .iter()
                    .zip(lists(&mut t, op, experts))
                {
                    t.case(&format!("{experts} {k} {scores:?} {normalise} {name}"), part);
                }
            }
        }
    }
    for score in [GroupScore::Best, GroupScore::BestTwo] {
        let groups = Some(Groups { count: 8, kept: 3, score });
        let logits = t.x(rows(&[32]));
        let correction = t.input(DType::F32, dims(&[32]), Fill::Real(-0.2, 0.2));
        for args in [&[logits][..], &[logits, correction]] {
            let node = t.g.push(Route { groups, ..route(4, Scores::Sigmoid) }, args).unwrap();
            for i in [0, 1, 4] {
                let part = t.g.part(node, i).unwrap();
                t.case(&format!("{score:?} {} {i}", args.len()), part);
            }
        }
    }
    t.all_native().run_some(&SIZES);
}

#[test]
fn ties_and_numbers_that_are_none() {
    let mut t = Table::new();
    let odd = vec![1.0, 1.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0, 1.0, 2.0, f64::NAN, 2.0];
    let logits = t.input(DType::F32, rows(&[5]), Fill::List(odd));
    for scores in [Scores::Sigmoid, Scores::SoftmaxChosen] {
        let node = t.g.push(route(3, scores), &[logits]).unwrap();
        for i in [0, 2, 3, 4] {
            let part = t.g.part(node, i).unwrap();
            t.case(&format!("{scores:?} {i}"), part);
        }
    }
    t.all_native().run_some(&[1, 11, 40]);
}

/// Rows in the order of experts and their offsets, two experts a token.
fn sorted(t: &mut Table, experts: usize, x: NodeId) -> (NodeId, NodeId) {
    let [_, _, slots, _, offsets] = lists(t, route(2, Scores::Softmax), experts);
    let two = t.g.fill(slots, 2.0).unwrap();
    let token = t.g.div(slots, two).unwrap();
    (t.g.gather(x, token, 0).unwrap(), offsets)
}

fn widened(t: &mut Table, w: NodeId) -> NodeId {
    t.g.cast(w, DType::F32).unwrap()
}

#[test]
fn products_of_rows_in_groups() {
    let mut t = Table::new();
    for dtype in [DType::F32, DType::BF16] {
        for (experts, n, k) in
            [(3usize, 32usize, 40usize), (4, 96, 300), (5, 33, 31), (64, 64, 65), (2, 160, 257)]
        {
            let x = t.x(rows(&[k]));
            let (x, offsets) = sorted(&mut t, experts, x);
            let w = t.weight(dtype, &[experts * n, k]);
            let w = widened(&mut t, w);
            let y = t.g.push(GroupedDot { transposed: false }, &[x, w, offsets]).unwrap();
            t.case(&format!("{dtype} {experts} [{n}, {k}]"), y);
            // As a runtime value: not packed ahead.
            let x = t.x(rows(&[k]));
            let (x, offsets) = sorted(&mut t, experts, x);
            let w = t.input(dtype, dims(&[experts * n, k]), Fill::Real(-1.0, 1.0));
            let w = widened(&mut t, w);
            let y = t.g.push(GroupedDot { transposed: false }, &[x, w, offsets]).unwrap();
            let y = t.g.cast(y, DType::BF16).unwrap();
            t.case(&format!("{dtype} {experts} [{n}, {k}] of rows, narrowed"), y);
            let x = t.x(rows(&[n]));
            let (x, offsets) = sorted(&mut t, experts, x);
            let y = t.g.push(GroupedDot { transposed: true }, &[x, w, offsets]).unwrap();
            t.case(&format!("{dtype} {experts} [{n}, {k}] transposed"), y);
        }
    }
    t.all_native().run(&SIZES);
}

/// The same of rows that are stored so.
fn stored(t: &mut Table, dtype: DType, experts: usize, k: usize) -> (NodeId, NodeId) {
    let x = t.input(dtype, rows(&[k]), Fill::Real(-1.0, 1.0));
    let x = widened(t, x);
    sorted(t, experts, x)
}

/// Matrices of codes, of which only codes and scales are read.
#[test]
fn experts_are_read_as_codes() {
    let mut t = Table::new();
    let sizes =
        [(3usize, 32usize, 64usize, 32usize), (4, 96, 320, 64), (2, 64, 1056, 1056), (64, 160, 48, 16)];
    for code in Code::ALL.into_iter().chain([Code::Fp4]) {
        for (i, (experts, n, k, group)) in sizes.into_iter().enumerate() {
            let scales = [DType::F32, DType::BF16, DType::F16][i % 3];
            let w = codes(&mut t, code, scales, [experts * n, k, group], i % 2 == 1);
            for dtype in [DType::F32, DType::BF16] {
                let (x, offsets) = stored(&mut t, dtype, experts, k);
                let y = t.g.push(GroupedDot { transposed: false }, &[x, w, offsets]).unwrap();
                t.case(&format!("{code:?} {dtype} {experts} [{n}, {k}] of {group}"), y);
            }
        }
    }
    let program = t.compiled();
    let products = program.plan.regions.iter().filter(|r| r.form().name() == "grouped");
    assert_eq!(products.clone().count(), 2 * 4 * sizes.len());
    assert!(products.clone().all(|r| matches!(r.form(), Form::Grouped(f) if f.codes.is_some())));
    t.all_native().run(&SIZES);
}

/// The same by rows that are rounded to integers.
#[test]
fn experts_are_multiplied_as_integers() {
    let mut t = Table::new();
    let sizes = [
        [3usize, 32usize, 64usize, 32usize, 32usize],
        [4, 96, 320, 64, 64],
        [2, 64, 1056, 1056, 96],
        [64, 160, 128, 128, 128],
        [2, 192, 1152, 384, 192],
    ];
    for code in [Code::Int4, Code::Int8] {
        for (i, [experts, n, k, group, rounded]) in sizes.into_iter().enumerate() {
            let scales = [DType::F32, DType::BF16, DType::F16][i % 3];
            let w = codes(&mut t, code, scales, [experts * n, k, group], i % 2 == 1);
            for dtype in [DType::F32, DType::BF16] {
                let (x, offsets) = stored(&mut t, dtype, experts, k);
                let x = t.g.push(FakeQuant { group: rounded }, &[x]).unwrap();
                let y = t.g.push(GroupedDot { transposed: false }, &[x, w, offsets]).unwrap();
                t.case(&format!("{code:?} {dtype} {experts} [{n}, {k}] of {group} by {rounded}"), y);
            }
        }
    }
    let program = t.compiled();
    let rounded =
        |f: &Form| matches!(f, Form::Grouped(f) if f.codes.as_ref().is_some_and(|c| c.rounded.is_some()));
    assert_eq!(program.plan.regions.iter().filter(|r| rounded(r.form())).count(), 4 * sizes.len());
    t.all_native().run_on(machines(), &SIZES);
}

/// Of joined layers too, of ranks that fill no vector, beside tokens without an adapter.
#[test]
fn what_adapters_add() {
    let mut t = Table::new();
    for dtype in [DType::F32, DType::BF16] {
        for (slots, k, rank, columns) in [
            (3, 40, 16, vec![32]),
            (1, 65, 8, vec![48, 16, 16]),
            (16, 96, 16, vec![320, 320]),
            (70, 33, 3, vec![33, 5]),
            (2, 257, 32, vec![576]),
        ] {
            let [slot, _, order, places, offsets] = lists(&mut t, route(1, Scores::Softmax), slots);
            let none = t.input(DType::I32, rows(&[1]), Fill::List(vec![0.0, 0.0, 100.0, 0.0, 100.0]));
            let slot = t.g.sub(slot, none).unwrap();
            let [slot, places] = [slot, places].map(|list| t.g.reshape(list, rows(&[])).unwrap());
            let x = t.x(rows(&[k]));
            let shapes = [[slots * k, columns.len() * rank], [slots * rank, columns.iter().sum()]];
            let [a, b] = shapes.map(|shape| {
                let factor = t.input(dtype, dims(&shape), Fill::Real(-1.0, 1.0));
                widened(&mut t, factor)
            });
            let name = format!("{dtype} {slots} of rank {rank}, {k} to {columns:?}");
            let y = t.g.push(LowRank { columns }, &[x, a, b, slot, order, places, offsets]).unwrap();
            t.case(&name, y);
        }
    }
    t.all_native().run(&SIZES);
}

#[test]
fn sums_of_outer_products() {
    let mut t = Table::new();
    for dtype in [DType::F32, DType::BF16] {
        for (experts, n, k) in [(3usize, 32usize, 40usize), (4, 200, 300), (70, 33, 31), (2, 1, 257)] {
            let a = t.input(dtype, rows(&[n]), Fill::Real(-1.0, 1.0));
            let b = t.input(dtype, rows(&[k]), Fill::Real(-1.0, 1.0));
            let (a, b) = (widened(&mut t, a), widened(&mut t, b));
            let (a, offsets) = sorted(&mut t, experts, a);
            let [_, _, slots, _, _] = lists(&mut t, route(2, Scores::Softmax), experts);
            let two = t.g.fill(slots, 2.0).unwrap();
            let token = t.g.div(slots, two).unwrap();
            let b = t.g.gather(b, token, 0).unwrap();
            let y = t.g.push(GroupedOuter {}, &[a, b, offsets]).unwrap();
            t.case(&format!("{dtype} {experts} [{n}, {k}]"), y);
        }
    }
    t.all_native().run(&SIZES);
}

/// In f32, groups of more rows than a block takes, and sums of more terms than one depth.
#[test]
fn groups_and_sums_of_several_blocks() {
    let mut t = Table::over(2000);
    let (n, k) = (40, 900);
    let w = t.input(DType::F32, dims(&[2 * n, k]), Fill::Real(-1.0, 1.0));
    let x = t.x(rows(&[k]));
    let (x, offsets) = sorted(&mut t, 2, x);
    let y = t.g.push(GroupedDot { transposed: false }, &[x, w, offsets]).unwrap();
    t.case("product", y);
    let g = t.x(rows(&[n]));
    let (g, offsets) = sorted(&mut t, 2, g);
    let y = t.g.push(GroupedDot { transposed: true }, &[g, w, offsets]).unwrap();
    t.case("transposed", y);
    let y = t.g.push(GroupedOuter {}, &[g, x, offsets]).unwrap();
    t.case("sums", y);
    t.all_native().run(&[1, 1300]);
}

/// Both sides bf16 values in memory, as in narrow training: the matrix unit's way where there is one. Widths of part of a tile,
/// of several blocks, and of more than one depth; groups of more rows than one depth.
#[test]
fn narrow_products_and_their_sums() {
    let mut t = Table::new();
    for (experts, n, k) in
        [(3usize, 32usize, 40usize), (4, 96, 300), (5, 33, 31), (64, 64, 65), (2, 300, 1601)]
    {
        let narrow = |t: &mut Table, width: usize| {
            let x = t.input(DType::BF16, rows(&[width]), Fill::Real(-1.0, 1.0));
            let x = widened(t, x);
            sorted(t, experts, x)
        };
        let w = t.input(DType::BF16, dims(&[experts * n, k]), Fill::Real(-1.0, 1.0));
        let w = widened(&mut t, w);
        let (x, offsets) = narrow(&mut t, k);
        let y = t.g.push(GroupedDot { transposed: false }, &[x, w, offsets]).unwrap();
        t.case(&format!("{experts} [{n}, {k}]"), y);
        let (x, offsets) = narrow(&mut t, n);
        let y = t.g.push(GroupedDot { transposed: true }, &[x, w, offsets]).unwrap();
        t.case(&format!("{experts} [{n}, {k}] transposed"), y);
        let (a, offsets) = narrow(&mut t, n);
        let (b, _) = narrow(&mut t, k);
        let [a, b] = [a, b].map(|x| {
            let stored = t.g.cast(x, DType::BF16).unwrap();
            widened(&mut t, stored)
        });
        let y = t.g.push(GroupedOuter {}, &[a, b, offsets]).unwrap();
        t.case(&format!("{experts} sums of [{n}, {k}]"), y);
    }
    t.all_native().run(&SIZES);
    let mut t = Table::over(2000);
    let [a, b] = [33usize, 40].map(|width| {
        let x = t.input(DType::BF16, rows(&[width]), Fill::Real(-1.0, 1.0));
        widened(&mut t, x)
    });
    let (a, offsets) = sorted(&mut t, 2, a);
    let (b, _) = sorted(&mut t, 2, b);
    let [a, b] = [a, b].map(|x| {
        let stored = t.g.cast(x, DType::BF16).unwrap();
        widened(&mut t, stored)
    });
    let y = t.g.push(GroupedOuter {}, &[a, b, offsets]).unwrap();
    t.case("many rows", y);
    t.all_native().run(&[2000]);
}

/// Two products with a gate between them and the sum of a token's results; and its gradient.
fn layer(t: &mut Table, experts: usize, hidden: usize, inner: usize) -> NodeId {
    let router = t.weight_named("router", DType::F32, &[experts, hidden]);
    let x = t.x(rows(&[hidden]));
    let logits = t.g.linear(x, router).unwrap();
    let node = t.g.push(route(2, Scores::Softmax), &[logits]).unwrap();
    let [weights, slots, places, offsets] = [1, 2, 3, 4].map(|i| t.g.part(node, i).unwrap());
    let two = t.g.fill(slots, 2.0).unwrap();
    let token = t.g.div(slots, two).unwrap();
    let x = t.g.gather(x, token, 0).unwrap();
    let up = t.weight_named("up", DType::F32, &[experts * 2 * inner, hidden]);
    let down = t.weight_named("down", DType::F32, &[experts * hidden, inner]);
    let g = &mut t.g;
    let both = g.push(GroupedDot { transposed: false }, &[x, up, offsets]).unwrap();
    let half =
        |g: &mut astrai_ir::Graph, at: usize| g.slice(both, 1, Dim::from(at), Dim::from(inner)).unwrap();
    let (gate, up) = (half(g, 0), half(g, inner));
    let h = g.push(GatedAct { act: Activation::Silu }, &[gate, up]).unwrap();
    let y = g.push(GroupedDot { transposed: false }, &[h, down, offsets]).unwrap();
    let n = Dim::symbol("n");
    let place = g.reshape(places, vec![&n * &Dim::from(2)]).unwrap();
    let y = g.gather(y, place, 0).unwrap();
    let shape = vec![n.clone(), Dim::from(2), Dim::from(hidden)];
    let y = g.reshape(y, shape.clone()).unwrap();
    let w = g.reshape(weights, vec![n, Dim::from(2), Dim::from(1)]).unwrap();
    let w = g.broadcast(w, &shape).unwrap();
    let y = g.mul(y, w).unwrap();
    g.reduce(ReduceKind::Sum, y, &[1]).unwrap()
}

#[test]
fn a_layer_and_its_gradient() {
    for (experts, hidden, inner) in [(4usize, 32usize, 16usize), (9, 40, 24)] {
        let mut t = Table::new();
        let y = layer(&mut t, experts, hidden, inner);
        t.case("y", y);
        let yy = t.g.mul(y, y).unwrap();
        let loss = t.g.reduce(ReduceKind::Sum, yy, &[0, 1]).unwrap();
        let loss = t.g.scale(loss, 0.01).unwrap();
        t.case("loss", loss);
        t.all_native().run_some(&SIZES);
        t.gradient_of("loss").all_native().run_some(&SIZES);
    }
}

/// Matrices as `[experts, in, out]`, packed ahead or not, with a bias for each expert and gate and up in turn.
#[test]
fn stacked_matrices_and_their_gradients() {
    for (storage, experts, k, n) in
        [(DType::F32, 5usize, 24usize, 64usize), (DType::BF16, 5, 33, 64), (DType::F32, 3, 17, 40)]
    {
        let mut t = Table::new().stored(storage, 1.0);
        let x = t.x(rows(&[k]));
        let [chosen, _, slots, _, offsets] = lists(&mut t, route(2, Scores::SoftmaxChosen), experts);
        let w = t.weight_named("w", DType::F32, &[experts, k, n]);
        let b = t.weight_named("b", DType::F32, &[experts, n]);
        let g = &mut t.g;
        let two = g.fill(slots, 2.0).unwrap();
        let token = g.div(slots, two).unwrap();
        let x = g.gather(x, token, 0).unwrap();
        let flat = g.reshape(w, dims(&[experts * k, n])).unwrap();
        let y = g.push(GroupedDot { transposed: true }, &[x, flat, offsets]).unwrap();
        let chosen = g.reshape(chosen, vec![&Dim::symbol("n") * &Dim::from(2)]).unwrap();
        let own = g.gather(chosen, slots, 0).unwrap();
        let b = g.gather(b, own, 0).unwrap();
        let y = g.add(y, b).unwrap();
        let pairs = vec![&Dim::symbol("n") * &Dim::from(2), Dim::from(n / 2), Dim::from(2)];
        let pairs = g.reshape(y, pairs).unwrap();
        let mut side = |at: usize| {
            let s = g.slice(pairs, 2, Dim::from(at), Dim::from(1)).unwrap();
            g.reshape(s, vec![&Dim::symbol("n") * &Dim::from(2), Dim::from(n / 2)]).unwrap()
        };
        let (gate, up) = (side(0), side(1));
        let h = g.push(GatedAct { act: Activation::Swish(Real(1.702)) }, &[gate, up]).unwrap();
        t.case("h", h);
        let hh = t.g.mul(h, h).unwrap();
        let loss = t.g.reduce(ReduceKind::Sum, hh, &[0, 1]).unwrap();
        let loss = t.g.scale(loss, 0.01).unwrap();
        // A sum of narrow numbers, each of which may be rounded either way, has no tolerance.
        if storage == DType::F32 {
            t.case("loss", loss);
        }
        let packed = t.compiled().plan.weights.iter().any(|w| w.weight.name == "w" && w.layout.is_packed());
        assert_eq!(packed, n == 64);
        t.all_native().run_some(&SIZES);
        if storage == DType::F32 {
            t.gradient_of("loss").all_native().run_some(&SIZES);
        }
    }
}

#[test]
fn kernels_are_few_and_activations_are_fused() {
    let mut t = Table::new();
    let y = layer(&mut t, 4, 32, 16);
    t.case("y", y);
    let plan = t.compiled().plan;
    let count = |anchor| plan.regions.iter().filter(|r| r.form().name() == anchor).count();
    assert_eq!((count("grouped"), count("route"), count("dot")), (2, 1, 1));
    assert_eq!(plan.regions.len(), 5, "the sum of a token's results is the fifth");
}

#[test]
fn hostile_offsets_are_refused() {
    let mut t = Table::new();
    let x = t.named("x", DType::F32, rows(&[8]), Fill::Real(-1.0, 1.0));
    let w = t.weight(DType::F32, &[3 * 32, 8]);
    let offsets = t.named("offsets", DType::I32, dims(&[4]), Fill::Int(0, 0));
    let y = t.g.push(GroupedDot { transposed: false }, &[x, w, offsets]).unwrap();
    t.case("y", y);
    let mut session = t.session_on(machine());
    let x = Value::f32(&[5, 8], &[0.5; 40]);
    let mut run = |v: &[i32]| session.run(&[("x", &x), ("offsets", &Value::i32(&[4], v))]).map(|_| ());
    assert!(run(&[0, 0, 2, 5]).is_ok());
    for bad in [[0, 3, 2, 5], [0, 0, 2, 6], [1, 2, 2, 5], [0, -1, 2, 5], [0, 0, i32::MAX, 5], [0, 0, 2, 4]] {
        let e = run(&bad).unwrap_err().to_string();
        assert!(e.contains("offsets of groups must ascend from 0 to the 5 rows"), "{e}");
    }
    assert!(run(&[0, 5, 5, 5]).is_ok());
}
