//! Every form with a core of its own, as tables: dots in all orientations, rows and columns, attention and its gradient, losses, routes
//! and products by groups; element types, odd sizes, empty sequences.

use crate::kernels::dots::codes;
use crate::kernels::paged::{self, Pages};
use crate::kernels::table::{Fill, Table, dims, mix, rows};
use astrai_ir::ops::{
    Activation, Attention, AttentionGrad, Concat, Dot, Drawing, GatedAct, GroupScore, GroupedDot,
    GroupedOuter, Groups, LinearCrossEntropy, LinearCrossEntropyGrad, ReduceKind, Route, Sample, Scatter,
    ScatterKind, Scores, Store, UnaryKind,
};
use astrai_ir::{Code, DType, Dim, NodeId, Real, Shape, Type};

/// A table, its name, and the sizes at which it is run.
pub struct Form {
    pub name: &'static str,
    pub table: fn() -> Table,
    pub sizes: &'static [u64],
}

const NARROW: [DType; 2] = [DType::F32, DType::BF16];

/// All tables.
pub const FORMS: [Form; 8] = [
    Form { name: "dots", table: dots, sizes: &[1, 3, 12, 33, 150] },
    Form { name: "rows and columns", table: moved, sizes: &[1, 40, 1100] },
    Form { name: "attention", table: attention, sizes: &[11, 70] },
    Form { name: "pages", table: pages, sizes: &[1] },
    Form { name: "gradients of attention", table: gradients, sizes: &[11, 70] },
    Form { name: "losses", table: losses, sizes: &[1, 130] },
    Form { name: "experts", table: experts, sizes: &[1, 40, 130] },
    Form { name: "draws", table: draws, sizes: &[1, 17] },
];

/// A value of this type as f32.
fn wide(t: &mut Table, dtype: DType, shape: Shape) -> NodeId {
    let x = t.input(dtype, shape, Fill::Real(-1.0, 1.0));
    if dtype == DType::F32 { x } else { t.g.cast(x, DType::F32).unwrap() }
}

fn dot(t: &mut Table, [a, b]: [NodeId; 2], batch: &[(usize, usize)], contract: (usize, usize)) -> NodeId {
    t.g.push(Dot { batch: batch.to_vec(), contract: vec![contract] }, &[a, b]).unwrap()
}

fn dots() -> Table {
    let mut t = Table::new();
    let n = || Dim::symbol("n");
    // Neighbours one at a time, four, and eight: of bf16 on both sides, by tensor cores.
    let pairs = [
        (DType::F32, DType::F32, 33usize, 31usize),
        (DType::F32, DType::BF16, 72, 136),
        (DType::BF16, DType::F32, 72, 136),
        (DType::BF16, DType::BF16, 33, 136),
        (DType::BF16, DType::BF16, 72, 136),
    ];
    for (of, by, m, k) in pairs {
        let name = format!("{of} {by} {m} {k}");
        let sides = [wide(&mut t, of, rows(&[k])), wide(&mut t, by, dims(&[m, k]))];
        let y = dot(&mut t, sides, &[], (1, 1));
        t.case(&format!("{name}, both along"), y);
        let sides = [wide(&mut t, of, rows(&[k])), wide(&mut t, by, dims(&[k, m]))];
        let y = dot(&mut t, sides, &[], (1, 0));
        t.case(&format!("{name}, right across"), y);
        let sides = [wide(&mut t, of, rows(&[k])), wide(&mut t, by, rows(&[m]))];
        let y = dot(&mut t, sides, &[], (0, 0));
        t.case(&format!("{name}, over the symbol"), y);
        let sides = [wide(&mut t, of, vec![Dim::from(k), n()]), wide(&mut t, by, dims(&[m, k]))];
        let y = dot(&mut t, sides, &[], (0, 1));
        t.case(&format!("{name}, left across"), y);
        let sides = [wide(&mut t, of, dims(&[5, k])), wide(&mut t, by, dims(&[m, k]))];
        let y = dot(&mut t, sides, &[], (1, 1));
        t.case(&format!("{name}, few rows"), y);
        let each = if m == 72 { 24 } else { 20 };
        let sides = [wide(&mut t, of, rows(&[3, each])), wide(&mut t, by, dims(&[3, 9, each]))];
        let y = dot(&mut t, sides, &[(1, 0)], (2, 2));
        t.case(&format!("{name}, in batches"), y);
    }
    // Weights as codes: a scale for a row and for groups, with offsets, of each type; of a norm, and few rows.
    let coded = [
        (Code::Int8, DType::F32, [33usize, 64, 64], false),
        (Code::Int8, DType::BF16, [40, 96, 32], true),
        (Code::Int4, DType::F16, [33, 64, 32], false),
        (Code::Int4, DType::F32, [70, 96, 48], true),
        (Code::Fp8, DType::F32, [33, 128, 64], false),
        (Code::Fp4, DType::F32, [33, 64, 32], false),
    ];
    for (code, scales, size, offsets) in coded {
        let name = format!("{} {scales} {size:?}", code.name());
        let w = codes(&mut t, code, scales, size, offsets);
        for dtype in NARROW {
            let x = wide(&mut t, dtype, rows(&[size[1]]));
            let y = t.g.linear(x, w).unwrap();
            t.case(&format!("{dtype} by {name}"), y);
        }
        let (x, norm) = (t.x(rows(&[size[1]])), t.weight(DType::F32, &[size[1]]));
        let x = t.g.rms_norm(x, norm, 1e-6).unwrap();
        let y = t.g.linear(x, w).unwrap();
        t.case(&format!("a norm by {name}"), y);
    }
    for (dtype, k) in NARROW.into_iter().zip([37usize, 32]) {
        let (x, w) = (t.x(rows(&[k])), t.weight(DType::F32, &[k]));
        let x = t.g.rms_norm(x, w, 1e-6).unwrap();
        let w = wide(&mut t, dtype, dims(&[20, k]));
        let y = t.g.linear(x, w).unwrap();
        t.case(&format!("{dtype} {k} of a norm"), y);
        let (a, b) = (t.x(dims(&[3, k])), t.x(dims(&[3, k])));
        let x = t.g.push(GatedAct { act: Activation::Silu }, &[a, b]).unwrap();
        let x = t.g.cast(x, DType::BF16).unwrap();
        let x = t.g.cast(x, DType::F32).unwrap();
        let y = t.g.linear(x, w).unwrap();
        t.case(&format!("{dtype} {k} of gates, narrowed"), y);
        let (x, r, b) = (t.x(rows(&[k])), t.x(rows(&[20])), t.weight(DType::F32, &[20]));
        let y = t.g.linear(x, w).unwrap();
        let y = t.g.add(y, b).unwrap();
        let y = t.g.unary(UnaryKind::Tanh, y).unwrap();
        let y = t.g.add(r, y).unwrap();
        let y = t.g.cast(y, DType::BF16).unwrap();
        t.case(&format!("{dtype} {k} and on"), y);
    }
    t
}

/// Sums over rows, rows added and rows stored.
fn moved() -> Table {
    let mut t = Table::over(2000);
    for (dtype, (kind, width)) in NARROW.into_iter().zip([(ReduceKind::Sum, 33usize), (ReduceKind::Max, 64)])
    {
        let x = wide(&mut t, dtype, rows(&[width]));
        let xx = t.g.mul(x, x).unwrap();
        let y = t.g.reduce(kind, xx, &[0]).unwrap();
        t.case(&format!("{dtype} {kind:?} {width}"), y);
        let x = wide(&mut t, dtype, rows(&[3, 2, width]));
        let y = t.g.reduce(kind, x, &[0, 2]).unwrap();
        let y = t.g.scale(y, 0.5).unwrap();
        t.case(&format!("{dtype} {kind:?} {width} of two axes"), y);
    }
    for dtype in NARROW {
        let i = t.input(DType::I32, rows(&[]), Fill::Int(0, 10));
        let (x, u) = (t.x(dims(&[11, 37])), wide(&mut t, dtype, rows(&[37])));
        let add = Scatter { axis: 0, batch: 0, kind: ScatterKind::Add };
        let y = t.g.push(add, &[x, i, u]).unwrap();
        t.case(&format!("{dtype} rows added"), y);
        for (at, shape) in [&[20usize][..], &[20, 37], &[33, 3, 16]].into_iter().enumerate() {
            let ty = Type::new(dtype, dims(shape));
            let state = t.state(&format!("{dtype}{at}"), ty, Fill::Int(-9, 9));
            let i = t.input(DType::I32, rows(&[]), Fill::Int(-1, shape[0] as i64 - 1));
            let value = t.input(dtype, rows(&shape[1..]), Fill::Real(-1.0, 1.0));
            let next = t.g.push(Store {}, &[state, i, value]).unwrap();
            t.case(&format!("{dtype} {shape:?} stored"), next);
        }
    }
    t
}

fn attend(d: usize, span: usize) -> Attention {
    let (scale, span) = (Real(1.0 / (d as f64).sqrt()), Dim::from(span));
    Attention { scale, causal: true, window: None, softcap: None, sinks: false, span, page: None }
}

/// What is asked of attention: causal, window, soft cap, sinks.
const OPTIONS: [(bool, Option<usize>, Option<f64>, bool); 4] = [
    (true, None, None, false),
    (false, None, None, false),
    (true, Some(9), Some(2.0), false),
    (true, Some(40), None, true),
];

/// Query heads, key heads, numbers of a key, numbers of a value.
const HEADS: [(usize, usize, usize, usize); 5] =
    [(4, 2, 16, 16), (1, 1, 1, 1), (6, 2, 33, 7), (3, 1, 192, 128), (20, 1, 576, 512)];

/// Starts of four sequences in n tokens, the third empty, from data: 0, 1, 10, 10, n.
fn starts(t: &mut Table) -> NodeId {
    let fixed = t.input(DType::I32, dims(&[4]), Fill::List(vec![0.0, 1.0, 10.0, 10.0]));
    let ones = t.input(DType::I32, rows(&[]), Fill::Int(1, 1));
    let n = t.g.reduce(ReduceKind::Sum, ones, &[0]).unwrap();
    let n = t.g.reshape(n, dims(&[1])).unwrap();
    t.g.push(Concat { axis: 0 }, &[fixed, n]).unwrap()
}

/// Attention with these options and its arguments.
fn attended(
    t: &mut Table,
    starts: NodeId,
    dtype: DType,
    at: usize,
    heads: (usize, usize, usize, usize),
) -> (Attention, Vec<NodeId>) {
    let (causal, window, softcap, sinks) = OPTIONS[at];
    let op = Attention { causal, window, softcap: softcap.map(Real), sinks, ..attend(heads.2, 300) };
    let (h, kv, d, dv) = heads;
    let mut args: Vec<NodeId> = [rows(&[h, d]), rows(&[kv, d]), rows(&[kv, dv])]
        .map(|s| t.input(dtype, s, Fill::Real(-2.0, 2.0)))
        .into();
    args.push(starts);
    if sinks {
        args.push(t.input(dtype, dims(&[h]), Fill::Real(-1.0, 3.0)));
    }
    (op, args)
}

/// Options and heads whose products tensor cores make, of bf16: causal, in windows, with sinks; lines that are swizzled and padded.
const TENSOR: [(usize, (usize, usize, usize, usize)); 3] =
    [(0, (6, 2, 64, 64)), (2, (4, 2, 48, 32)), (3, (3, 1, 128, 128))];

/// Every option and every shape, of one type or another.
fn attention_cases() -> impl Iterator<Item = (usize, (usize, usize, usize, usize), DType)> {
    let types = [DType::F32, DType::BF16, DType::F16, DType::F32, DType::BF16, DType::F32];
    let options = (0..OPTIONS.len()).map(move |i| (i, HEADS[0], types[i]));
    let shapes = options.chain((1..HEADS.len()).map(move |i| (0, HEADS[i], types[i + 1])));
    shapes.chain(TENSOR.into_iter().map(|(at, heads)| (at, heads, DType::BF16)))
}

fn attention() -> Table {
    let mut t = Table::over(90);
    let s = starts(&mut t);
    for (at, heads, dtype) in attention_cases() {
        let (op, args) = attended(&mut t, s, dtype, at, heads);
        let both = t.g.push(op, &args).unwrap();
        for part in 0..2 {
            let x = t.g.part(both, part).unwrap();
            t.case(&format!("{dtype} {heads:?} {at}, {part}"), x);
        }
    }
    t
}

fn gradients() -> Table {
    let mut t = Table::over(90);
    let s = starts(&mut t);
    for (at, heads, dtype) in attention_cases() {
        let (forward, args) = attended(&mut t, s, dtype, at, heads);
        let both = t.g.push(forward.clone(), &args).unwrap();
        let (o, lse) = (t.g.part(both, 0).unwrap(), t.g.part(both, 1).unwrap());
        let g = t.input(dtype, rows(&[heads.0, heads.3]), Fill::Real(-1.0, 1.0));
        let mut all = args[..4].to_vec();
        all.extend([o, lse, g]);
        all.extend(args.get(4));
        let made = t.g.push(AttentionGrad { forward }, &all).unwrap();
        for part in 0..3 + all.len() as u32 - 7 {
            let x = t.g.part(made, part).unwrap();
            t.case(&format!("{dtype} {heads:?} {at}, {part}"), x);
        }
    }
    t
}

/// Where queries of four sequences begin, and their keys: a chunk, a token, nothing, a prompt; and steps of decoding, whose keys
/// are shared by units.
const BATCHES: [([usize; 5], [usize; 4]); 2] =
    [([0, 9, 10, 10, 16], [75, 66, 0, 6]), ([0, 1, 2, 3, 5], [1500, 700, 77, 600])];

fn pages() -> Table {
    let mut t = Table::new();
    let unused = t.x(rows(&[]));
    t.case("unused", unused);
    let list = |v: Vec<usize>| Fill::List(v.into_iter().map(|x| x as f64).collect());
    // Numbers, and codes beside queries of bf16.
    let shapes = [
        (None, (4usize, 2usize, 16usize, 16usize)),
        (None, (9, 3, 64, 64)),
        (None, (20, 1, 576, 512)),
        (None, (3, 3, 33, 7)),
        (Some(Code::Int8), (8, 2, 64, 128)),
        (Some(Code::Fp8), (6, 3, 128, 48)),
        (Some(Code::Int8), (5, 1, 96, 16)),
    ];
    for (which, (starts, lens)) in BATCHES.into_iter().enumerate() {
        for (i, (code, (h, kv, d, dv))) in shapes.into_iter().enumerate() {
            let at = i % 4;
            if which == 1 && at == 3 {
                continue;
            }
            let page = [16, 4, 16, 1][at];
            let dtype = if code.is_some() { DType::BF16 } else { NARROW[(at + which) % 2] };
            let width = (lens[0] + 15).div_ceil(page);
            let pages = 4 * width + 3 + usize::from((4 * width + 3).is_multiple_of(7));
            let number =
                |i: usize| if i % width < lens[i / width].div_ceil(page) { i * 7 % pages } else { 1 << 30 };
            let starts = t.input(DType::I32, dims(&[5]), list(starts.to_vec()));
            let tables = t.input(DType::I32, dims(&[4, width]), list((0..4 * width).map(number).collect()));
            let keys = t.input(DType::I32, dims(&[4]), list(lens.to_vec()));
            let mut q = t.input(dtype, dims(&[[16, 5][which], h, d]), Fill::Real(-2.0, 2.0));
            if code.is_some() {
                q = t.g.cast(q, DType::F32).unwrap();
            }
            let held = code.map_or(Pages::Of(dtype), |code| Pages::Codes(code, dtype));
            let mut state = |letter: &str, d: usize| {
                let (name, scales) = (format!("{letter}{which}{i}"), Fill::Real(0.002, 0.02));
                paged::state(&mut t, &name, held, [pages * page, kv, d], scales, f64::NAN)
            };
            let (k, v) = (state("k", d), state("v", dv));
            let (causal, window, softcap, sinks) = OPTIONS[at];
            let window = window.map(|w| w * [1, 20][which]);
            let op = Attention {
                causal,
                window,
                softcap: softcap.map(Real),
                sinks,
                page: Some(page),
                ..attend(d, 1515)
            };
            let mut args = vec![q, k, v, starts, tables, keys];
            if sinks {
                args.push(t.input(t.g.ty(q).dtype, dims(&[h]), Fill::Real(-1.0, 3.0)));
            }
            let both = t.g.push(op, &args).unwrap();
            for part in 0..2 {
                let x = t.g.part(both, part).unwrap();
                t.case(&format!("{which} {i}, {part}"), x);
            }
        }
    }
    t
}

fn losses() -> Table {
    let mut t = Table::over(140);
    let cases = [
        (DType::F32, 0.1, None, false, 33, 7, Dim::from(300)),
        (DType::BF16, 0.0, None, false, 72, 20, Dim::symbol("n")),
        (DType::BF16, 0.0, Some(2.0), false, 140, 36, Dim::from(300)),
        (DType::F32, 0.1, Some(3.0), true, 63, 12, Dim::symbol("n")),
        (DType::BF16, 0.0, None, true, 300, 12, Dim::from(150)),
    ];
    for (dtype, smoothing, softcap, statistics, vocab, k, tokens) in cases {
        let h = t.input(dtype, vec![tokens.clone(), Dim::from(k)], Fill::Real(-2.0, 2.0));
        let w = t.input(dtype, dims(&[vocab, k]), Fill::Real(-1.0, 1.0));
        let targets = t.input(DType::I32, vec![tokens.clone()], Fill::Int(-3, vocab as i64 - 1));
        let (softcap, label_smoothing) = (softcap.map(Real), Real(smoothing));
        let forward = LinearCrossEntropy { label_smoothing, softcap, statistics };
        let results = if statistics { 6 } else { 1 };
        let made = t.g.push(forward.clone(), &[h, w, targets]).unwrap();
        for part in 0..results {
            let x = if statistics { t.g.part(made, part).unwrap() } else { made };
            t.case(&format!("{dtype} {vocab} {tokens}, forward {part}"), x);
        }
        let mut args = vec![h, w, targets];
        for _ in 0..if statistics { 4 } else { 1 } {
            args.push(t.input(DType::F32, vec![tokens.clone()], Fill::Real(-1.0, 1.0)));
        }
        let made = t.g.push(LinearCrossEntropyGrad { forward }, &args).unwrap();
        for part in 0..2 + results {
            let x = t.g.part(made, part).unwrap();
            t.case(&format!("{dtype} {vocab} {tokens}, {part}"), x);
        }
    }
    t
}

fn experts() -> Table {
    let mut t = Table::new();
    let op = |k, scores| Route { k, scores, groups: None, normalise: true, scale: Real(1.5) };
    for (experts, k, scores) in [
        (1usize, 1usize, Scores::Softmax),
        (33, 8, Scores::Sigmoid),
        (1500, 4, Scores::SoftmaxChosen),
        (40, 3, Scores::Softmax),
    ] {
        let logits = t.x(rows(&[experts]));
        let node = t.g.push(op(k, scores), &[logits]).unwrap();
        for i in 0..5 {
            let part = t.g.part(node, i).unwrap();
            t.case(&format!("{experts} {k} {scores:?} {i}"), part);
        }
    }
    for score in [GroupScore::Best, GroupScore::BestTwo] {
        let groups = Some(Groups { count: 8, kept: 3, score });
        let (logits, more) = (t.x(rows(&[32])), t.input(DType::F32, dims(&[32]), Fill::Real(-0.2, 0.2)));
        let node = t.g.push(Route { groups, ..op(4, Scores::Sigmoid) }, &[logits, more]).unwrap();
        for i in 0..5 {
            let part = t.g.part(node, i).unwrap();
            t.case(&format!("{score:?} {i}"), part);
        }
    }
    for (dtype, (experts, n, k)) in NARROW.into_iter().zip([(3usize, 33usize, 31usize), (40, 64, 40)]) {
        let logits = t.x(rows(&[experts]));
        let node = t.g.push(op(2, Scores::Softmax), &[logits]).unwrap();
        let (slots, offsets) = (t.g.part(node, 2).unwrap(), t.g.part(node, 4).unwrap());
        let two = t.g.fill(slots, 2.0).unwrap();
        let token = t.g.div(slots, two).unwrap();
        let x = wide(&mut t, dtype, rows(&[k]));
        let x = t.g.gather(x, token, 0).unwrap();
        let w = wide(&mut t, dtype, dims(&[experts * n, k]));
        let y = t.g.push(GroupedDot { transposed: false }, &[x, w, offsets]).unwrap();
        t.case(&format!("{dtype} {experts} [{n}, {k}]"), y);
        let g = wide(&mut t, dtype, rows(&[n]));
        let g = t.g.gather(g, token, 0).unwrap();
        let back = t.g.push(GroupedDot { transposed: true }, &[g, w, offsets]).unwrap();
        t.case(&format!("{dtype} {experts} [{n}, {k}] transposed"), back);
        let sum = t.g.push(GroupedOuter {}, &[g, x, offsets]).unwrap();
        t.case(&format!("{dtype} {experts} [{n}, {k}] sums"), sum);
    }
    for (code, scales, offsets) in [(Code::Int8, DType::BF16, false), (Code::Int4, DType::F32, true)] {
        let (experts, n, k) = (5, 33, 64);
        let logits = t.x(rows(&[experts]));
        let node = t.g.push(op(2, Scores::Softmax), &[logits]).unwrap();
        let (slots, starts) = (t.g.part(node, 2).unwrap(), t.g.part(node, 4).unwrap());
        let two = t.g.fill(slots, 2.0).unwrap();
        let token = t.g.div(slots, two).unwrap();
        let x = t.x(rows(&[k]));
        let x = t.g.gather(x, token, 0).unwrap();
        let w = codes(&mut t, code, scales, [experts * n, k, 32], offsets);
        let y = t.g.push(GroupedDot { transposed: false }, &[x, w, starts]).unwrap();
        t.case(&format!("{experts} of {}", code.name()), y);
    }
    t
}

/// Ways to draw, each with words of its own: the first are 0 and the largest, which fall on the ends of sums.
fn drawings() -> Vec<Drawing> {
    let at = |temperature: f32, top_k, top_p, min_p: f32| Drawing {
        inverse: 1.0 / temperature,
        reach: if min_p > 0.0 { temperature * min_p.ln() } else { f32::NEG_INFINITY },
        top_k,
        top_p,
        ..Drawing::GREEDY
    };
    let mut all = vec![
        Drawing::GREEDY,
        at(1.0, 0, 1.0, 0.0),
        at(0.6, 0, 1.0, 0.0),
        at(1.0, 0, 0.9, 0.0),
        at(1.0, 3, 1.0, 0.0),
        at(1.5, 40, 0.9, 0.0),
        at(1.0, 0, 0.05, 0.0),
        at(2.5, 0, 0.7, 0.02),
        at(1.0, 1, 1.0, 0.0),
        at(0.8, 0, 1.0, 0.1),
        at(0.7, 999, 0.5, 0.01),
    ];
    for (i, drawing) in all.iter_mut().enumerate() {
        drawing.words = std::array::from_fn(|word| match i {
            1 => 0,
            2 => u64::MAX,
            _ => mix(i as u64, word as u64),
        });
    }
    all
}

/// Tokens of rows that are flat, sharp, full of equals, and no distribution.
fn draws() -> Table {
    let mut t = Table::new();
    let of = drawings();
    let reals = of.iter().flat_map(Drawing::reals).map(f64::from).collect();
    let integers = of.iter().flat_map(Drawing::integers).map(f64::from).collect();
    let sampling = t.input(DType::F32, rows(&[Drawing::REALS]), Fill::List(reals));
    let words = t.input(DType::I32, rows(&[Drawing::INTEGERS]), Fill::List(integers));
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let mut odd = vec![1.0; 12];
    odd.extend([-0.0, 0.0, -0.0, 0.0, -inf, 3.0, 3.0, -inf, nan, 1.0, 2.0, 3.0, 1.0, inf, 2.0, 3.0]);
    odd.extend([-inf, -inf, -inf, -inf, -1e38, 1e38, 0.0, -inf, 3e38, 3e38, -3e38, 1.0]);
    for (vocabulary, fill) in [
        (4, Fill::List(odd)),
        (1, Fill::Real(-2.0, 2.0)),
        (127, Fill::Real(-2.0, 2.0)),
        (129, Fill::Int(-2, 2)),
        (1000, Fill::Int(-20, 20)),
        (2100, Fill::Real(-9.0, 9.0)),
        (33_000, Fill::Real(-1.0, 1.0)),
    ] {
        let logits = t.input(DType::F32, rows(&[vocabulary]), fill);
        let token = t.g.push(Sample {}, &[logits, sampling, words]).unwrap();
        t.case(&format!("of {vocabulary}"), token);
    }
    t
}
