//! Every rule against the interpreter, what limits and determinism promise, and the choices that cost alone must make.

use super::encode::Encoded;
use super::samples::Draw;
use super::*;
use astrai_ir::ops::*;
use astrai_ir::{Block, DType, Precision, Sizes, Tensor, eval, verify};

/// Sequences of the instances: the symbol `tokens`.
const TOKENS: usize = 5;

fn host() -> Target {
    Target {
        name: "two cores".into(),
        kind: "cpu".into(),
        isa: "avx512".into(),
        units: 2,
        flops: vec![(DType::F32, 348e9)],
        bandwidth: 30e9,
        launch: 2e-6,
        memory: 1 << 34,
        vector_bytes: 64,
        registers: 32,
        integer_dots: false,
        matrix_unit: false,
        shared_memory: 0,
        warp: 1,
        stack: 8 << 20,
        links: vec![],
    }
}

/// Values for the leaves of an instance: numbers between -1 and 1, integers that are indices and starts.
fn leaves(g: &Graph, draw: &mut Draw) -> HashMap<String, Tensor> {
    let mut all = HashMap::new();
    for n in g.nodes() {
        let Some(name) = n.op.leaf_name() else { continue };
        let size = |d: &astrai_ir::Dim| d.eval(&|_| Some(TOKENS as u64)).unwrap() as usize;
        let shape: Vec<usize> = n.ty().shape.iter().map(size).collect();
        let count: usize = shape.iter().product();
        let t = match n.ty().dtype {
            DType::I32 if shape == [2] => Tensor::int(DType::I32, &shape, vec![0, TOKENS as i64]),
            DType::I32 => Tensor::int(DType::I32, &shape, (0..count).map(|_| draw.below(3) as i64).collect()),
            dtype => {
                let real = |_| (draw.below(2001) as f64 - 1000.0) / 1000.0 + 1e-4;
                Tensor::float(dtype, &shape, (0..count).map(real).collect())
            }
        };
        all.insert(name.to_string(), t);
    }
    all
}

fn value(g: &Graph, leaves: &HashMap<String, Tensor>, exact: bool) -> Tensor {
    let sizes = Sizes::from([("tokens".to_string(), TOKENS as u64)]);
    eval(g, leaves, &sizes, Precision { exact }).unwrap_or_else(|e| panic!("{e}\n{g}")).remove(0).1
}

/// What the two sides of a rule may differ by, as a share of the largest number. Constants are rounded to f32.
fn tolerance(class: RuleClass) -> f64 {
    if class == RuleClass::Exact { 0.0 } else { 1e-6 }
}

fn weights(g: &Graph) -> HashSet<NodeId> {
    g.ids().filter(|id| matches!(g.node(*id).op, Op::Weight(_))).collect()
}

/// The graph after only this rule, its new side taken; `None` when the rule does not fire.
fn rewritten(g: &Graph, rule: usize) -> Option<Graph> {
    let mut e = Encoded::of(&Arc::new(g.clone()), weights(g)).unwrap();
    let times = rules::apply(&mut e.egraph, rule, TERMS);
    e.egraph.rebuild();
    if times == 0 {
        return None;
    }
    let target = host();
    let search = Saturator { target: &target, how: Saturate::default(), fold: false };
    let mut forms = ExtractorInput::of(&e, &search);
    // New terms cost nothing, old ones much.
    let classes = forms.classes.iter_mut().flatten();
    classes.for_each(|t| t.cost = if t.cost.1 == 0 { (1 << 20, 0, 1) } else { (1, 0, 1) });
    let roots: Vec<usize> = e.roots().iter().map(|r| forms.at[r]).collect();
    let choice = extract(&forms.classes, &roots, Extraction::Cheapest).unwrap();
    let terms = choice.iter().map(|(&c, &t)| (forms.ids[c], forms.terms[c][t].clone())).collect();
    Some(e.decode(&terms).unwrap())
}

fn close(rule: &str, a: &Tensor, b: &Tensor, tolerance: f64) {
    assert_eq!((a.dtype, &a.shape), (b.dtype, &b.shape), "{rule}");
    let top = b.reals().iter().fold(0f64, |m, x| m.max(x.abs()));
    for (x, y) in a.reals().iter().zip(b.reals()) {
        let same =
            if tolerance == 0.0 { x.to_bits() == y.to_bits() } else { (x - y).abs() <= tolerance * top };
        assert!(same || x.is_nan() && y.is_nan(), "{rule}: {x} beside {y}, the largest is {top}");
    }
}

/// A wrong rule fails here, and so does one that its instances do not match.
#[test]
fn both_sides_of_every_rule_are_equal() {
    for (i, rule) in RULES.iter().enumerate() {
        for seed in 0..24 {
            let mut draw = Draw(seed * 7919 + i as u64 * 104_729);
            let before = (rule.sample)(&mut draw);
            let after = rewritten(&before, i);
            let after = after.unwrap_or_else(|| panic!("`{}` does not match\n{before}", rule.name));
            verify(&after).unwrap();
            assert_ne!(before.to_string(), after.to_string(), "`{}` changes nothing", rule.name);
            let leaves = leaves(&before, &mut draw);
            let at = |exact| (value(&after, &leaves, exact), value(&before, &leaves, exact));
            let (a, b) = at(true);
            close(rule.name, &a, &b, tolerance(rule.class));
            if rule.class == RuleClass::Exact {
                let (a, b) = at(false);
                close(rule.name, &a, &b, 0.0);
            }
        }
    }
}

#[test]
fn names_are_distinct_and_classes_are_used_as_the_fidelity_says() {
    let names: HashSet<&str> = RULES.iter().map(|r| r.name).collect();
    assert_eq!(names.len(), RULES.len());
    for (fidelity, classes) in [(Fidelity::Exact, 1), (Fidelity::Standard, 2), (Fidelity::Fast, 3)] {
        let all = [RuleClass::Exact, RuleClass::Reassoc, RuleClass::WeightFold];
        assert_eq!(all.iter().filter(|c| fidelity.allows(**c)).count(), classes);
    }
}

fn run(g: &Graph, fidelity: Fidelity, extraction: Extraction) -> (Graph, Vec<SaturationReport>) {
    let how = Saturate { fidelity, extraction, ..Saturate::default() };
    let (after, report) = saturate(g, &host(), how, false).unwrap();
    verify(&after).unwrap_or_else(|e| panic!("{e}\n{after}"));
    (after, report)
}

/// All rules at once on every rule's instances, whatever form is taken.
#[test]
fn any_form_means_the_same() {
    for (i, rule) in RULES.iter().enumerate() {
        let mut draw = Draw(i as u64);
        let before = (rule.sample)(&mut draw);
        let leaves = leaves(&before, &mut draw);
        let want = value(&before, &leaves, true);
        for fidelity in [Fidelity::Exact, Fidelity::Standard, Fidelity::Fast] {
            let share = if fidelity == Fidelity::Exact { 0.0 } else { 4e-6 };
            for extraction in
                [Extraction::Cheapest, Extraction::Costliest, Extraction::Random(1), Extraction::Random(2)]
            {
                let (after, _) = run(&before, fidelity, extraction);
                close(rule.name, &value(&after, &leaves, true), &want, share);
            }
        }
    }
}

#[test]
fn the_same_graph_gives_the_same_form() {
    for rule in RULES {
        let g = (rule.sample)(&mut Draw(3));
        for extraction in [Extraction::Cheapest, Extraction::Costliest, Extraction::Random(9)] {
            let text = |g: &Graph| run(g, Fidelity::Fast, extraction).0.to_string();
            assert_eq!(text(&g), text(&g), "{}", rule.name);
        }
    }
}

/// Peaks of one H100 (data sheet) and of the host of `bench/RESULTS.md` (measured dots, and the bytes that a row's dot reads).
fn machines() -> [Target; 2] {
    let h100 = Target {
        name: "h100".into(),
        units: 132,
        flops: vec![(DType::F32, 67e12), (DType::BF16, 989e12)],
        bandwidth: 3.35e12,
        launch: 3e-6,
        memory: 80 << 30,
        ..host()
    };
    let measured =
        Target { flops: vec![(DType::F32, 416e9), (DType::BF16, 3.4e12)], bandwidth: 58e9, ..host() };
    [h100, measured]
}

fn dims(n: &[usize]) -> Vec<astrai_ir::Dim> {
    n.iter().map(|&n| n.into()).collect()
}

/// Attention of DeepSeek-V3's sizes, `[heads, nope, rope, v, latent]`, of `queries` tokens over `keys` of latents: beside the
/// queries where there are as many, in pages of 16 otherwise.
fn latent([h, nope, rope, dv, latent]: [usize; 5], queries: usize, keys: usize) -> Graph {
    let mut g = Graph::new(vec![]);
    let input = |g: &mut Graph, name: &str, dtype, n: &[usize]| g.input(name, dtype, dims(n)).unwrap();
    let q = input(&mut g, "q", DType::F32, &[queries, h, nope + rope]);
    let c = input(&mut g, "c", DType::F32, &[keys, latent]);
    let kr = input(&mut g, "kr", DType::F32, &[keys, rope]);
    let starts = input(&mut g, "starts", DType::I32, &[2]);
    let (uk, uv) = (
        g.weight("uk", DType::F32, &[h * nope, latent]).unwrap(),
        g.weight("uv", DType::F32, &[h * dv, latent]).unwrap(),
    );
    let (k, v) = (g.linear(c, uk).unwrap(), g.linear(c, uv).unwrap());
    let k = g.reshape(k, dims(&[keys, h, nope])).unwrap();
    let v = g.reshape(v, dims(&[keys, h, dv])).unwrap();
    let kr = g.reshape(kr, dims(&[keys, 1, rope])).unwrap();
    let kr = g.broadcast(kr, &dims(&[keys, h, rope])).unwrap();
    let k = g.push(Concat { axis: 2 }, &[k, kr]).unwrap();
    let page = (queries != keys).then_some(16);
    let mut args = vec![q, k, v, starts];
    if page.is_some() {
        args.push(input(&mut g, "tables", DType::I32, &[1, keys / 16]));
        args.push(input(&mut g, "lens", DType::I32, &[1]));
    }
    let scale = astrai_ir::Real(1.0 / ((nope + rope) as f64).sqrt());
    let op =
        Attention { scale, causal: true, window: None, softcap: None, sinks: false, span: keys.into(), page };
    let a = g.push(op, &args).unwrap();
    let y = g.part(a, 0).unwrap();
    g.set_output("y", y).unwrap();
    g
}

/// Heads of keys that attention reads: as many as of queries where keys are materialised, one where the latent is read.
fn key_heads(g: &Graph) -> Option<usize> {
    let a = g.nodes().iter().rev().find(|n| matches!(n.op, Op::Attention(_)))?;
    g.ty(a.args[1]).shape[1].size()
}

#[test]
fn cost_alone_absorbs_for_decode_and_materialises_for_prefill() {
    let v3 = [128, 128, 64, 128, 512];
    for target in machines() {
        for (queries, want) in [(1, 1), (4096, 128)] {
            let g = latent(v3, queries, 4096);
            let how = Saturate { fidelity: Fidelity::Standard, ..Saturate::default() };
            let (after, report) = saturate(&g, &target, how, false).unwrap();
            verify(&after).unwrap();
            println!("{} {queries} queries: {:?} ps", target.name, report[0].cost);
            assert_eq!(key_heads(&after), Some(want), "{} {queries} queries", target.name);
            let exact = saturate(&g, &target, Saturate::default(), false).unwrap().0;
            assert_eq!(key_heads(&exact), Some(128), "the sums' order changes");
        }
    }
}

/// The absorbed form over pages against the materialised one, at sizes that the interpreter takes.
#[test]
fn absorbed_attention_over_pages_is_attention() {
    let g = latent([3, 4, 2, 5, 4], 2, 48);
    let mut draw = Draw(11);
    let mut values = leaves(&g, &mut draw);
    values.insert("starts".into(), Tensor::int(DType::I32, &[2], vec![0, 2]));
    values.insert("tables".into(), Tensor::int(DType::I32, &[1, 3], vec![2, 0, 1]));
    values.insert("lens".into(), Tensor::int(DType::I32, &[1], vec![37]));
    let want = value(&g, &values, true);
    let (after, _) = run(&g, Fidelity::Standard, Extraction::Cheapest);
    assert_eq!(key_heads(&after), Some(1));
    close("latent", &value(&after, &values, true), &want, 1e-9);
}

/// `x·W + s·(x·A)·B`, or only `(x·A)·B`.
fn low_rank(tokens: usize, width: usize, rank: usize, base: bool) -> Graph {
    let mut g = Graph::new(vec![]);
    let x = g.input("x", DType::F32, dims(&[tokens, width])).unwrap();
    let a = g.weight("a", DType::F32, &[rank, width]).unwrap();
    let b = g.weight("b", DType::F32, &[width, rank]).unwrap();
    let low = g.linear(x, a).unwrap();
    let mut y = g.linear(low, b).unwrap();
    if base {
        let w = g.weight("w", DType::F32, &[width, width]).unwrap();
        let s = g.scale(y, 2.0).unwrap();
        let whole = g.linear(x, w).unwrap();
        y = g.add(whole, s).unwrap();
    }
    g.set_output("y", y).unwrap();
    g
}

/// Dots that are computed at every run.
fn dots(g: &Graph) -> usize {
    let g = crate::fold(g).unwrap().0;
    g.nodes().iter().filter(|n| matches!(n.op, Op::Dot(_))).count()
}

#[test]
fn low_rank_products_stay_apart_or_are_merged_by_cost() {
    for tokens in [1, 512] {
        for (rank, base, want) in [(16, false, 2), (1024, false, 1), (16, true, 1)] {
            let g = low_rank(tokens, 1024, rank, base);
            let (fast, report) = run(&g, Fidelity::Fast, Extraction::Cheapest);
            assert_eq!(dots(&fast), want, "{tokens} tokens, rank {rank}\n{fast}");
            assert!(report[0].cost[1] <= report[0].cost[0]);
            let how = Saturate { fidelity: Fidelity::Fast, ..Saturate::default() };
            let (trained, _) = saturate(&g, &host(), how, true).unwrap();
            let ahead = crate::fold(&trained).unwrap().1;
            assert!(ahead.is_empty(), "nothing is made ahead of weights that change\n{trained}");
        }
    }
}

/// A merged weight written by hand is taken apart again where that is cheaper: `x·(W + A·B)` with weights that change.
#[test]
fn products_of_trained_weights_are_factored() {
    let mut g = Graph::new(vec![]);
    let x = g.input("x", DType::F32, dims(&[4, 1024])).unwrap();
    let w = g.weight("w", DType::F32, &[1024, 1024]).unwrap();
    let (a, b) =
        (g.weight("a", DType::F32, &[8, 1024]).unwrap(), g.weight("b", DType::F32, &[1024, 8]).unwrap());
    let both = g.push(Dot { batch: vec![], contract: vec![(1, 0)] }, &[b, a]).unwrap();
    let w = g.add(w, both).unwrap();
    let y = g.linear(x, w).unwrap();
    g.set_output("y", y).unwrap();
    let how = Saturate { fidelity: Fidelity::Standard, ..Saturate::default() };
    let (after, _) = saturate(&g, &host(), how, true).unwrap();
    let of_x = |n: &&astrai_ir::Node| matches!(n.op, Op::Dot(_)) && after.ty(n.args[0]).shape[0] == 4.into();
    assert_eq!(after.nodes().iter().filter(of_x).count(), 3, "{after}");
}

/// `rms_norm(x)·g` read by dots alone, or by something else as well.
fn normed(alone: bool, dtype: DType) -> Graph {
    let mut g = Graph::new(vec![]);
    let x = g.input("x", DType::F32, dims(&[8, 64])).unwrap();
    let gain = g.weight("g", DType::F32, &[64]).unwrap();
    let mut n = g.rms_norm(x, gain, 1e-5).unwrap();
    if dtype != DType::F32 {
        n = g.cast(n, dtype).unwrap();
        n = g.cast(n, DType::F32).unwrap();
    }
    for i in 0..2 {
        let w = g.weight(&format!("w{i}"), DType::F32, &[32, 64]).unwrap();
        let y = g.linear(n, w).unwrap();
        g.set_output(&format!("y{i}"), y).unwrap();
    }
    if !alone {
        g.set_output("n", n).unwrap();
    }
    g
}

#[test]
fn gains_of_norms_are_folded_only_where_dots_alone_read_them() {
    for (alone, dtype) in [(true, DType::F32), (true, DType::BF16), (false, DType::F32)] {
        let (after, _) = run(&normed(alone, dtype), Fidelity::Fast, Extraction::Cheapest);
        let (folded, derived) = crate::fold(&after).unwrap();
        verify(&folded).unwrap();
        assert_eq!(derived.len(), if alone { 2 } else { 0 }, "{after}");
        let narrow = |g: &Graph| g.nodes().iter().filter(|n| n.ty().dtype == DType::BF16).count();
        if dtype == DType::BF16 {
            assert!(narrow(&folded) > 0, "the rounding before the dots stays");
            assert!(derived.iter().all(|d| d.weight.ty.dtype == DType::BF16));
        }
    }
}

#[test]
fn a_version_that_is_overwritten_is_read_where_it_was() {
    let mut g = Graph::new(vec![]);
    let ty = astrai_ir::Type::new(DType::F32, dims(&[4]));
    let s = g.push(State { name: "s".into(), ty: ty.clone() }, &[]).unwrap();
    let x = g.input("x", DType::F32, ty.shape.clone()).unwrap();
    let old = g.unary(UnaryKind::Neg, s).unwrap();
    let next = g.push(Store {}, &[s, x]).unwrap();
    let late = g.mul(next, x).unwrap();
    let y = g.add(late, old).unwrap();
    g.set_output("s", next).unwrap();
    g.set_output("y", y).unwrap();
    let (after, report) = run(&g, Fidelity::Fast, Extraction::Costliest);
    assert_eq!(after.to_string(), g.to_string(), "`s` cannot be read after it was overwritten");
    assert!(report[0].fired.is_empty());
}

/// A long chain in which every rule of numbers fires everywhere.
#[test]
fn limits_hold() {
    let mut g = Graph::new(vec![]);
    let x = g.input("x", DType::F32, dims(&[4, 8])).unwrap();
    let mut y = x;
    for i in 0..60 {
        y = g.scale(y, 1.0 + i as f64 / 64.0).unwrap();
        let w = g.weight(&format!("w{i}"), DType::F32, &[8, 8]).unwrap();
        y = g.linear(y, w).unwrap();
    }
    g.set_output("y", y).unwrap();
    let leaves = leaves(&g, &mut Draw(5));
    let mut outer = Graph::new(vec![]);
    let args: Vec<NodeId> = g
        .nodes()
        .iter()
        .filter(|n| n.op.leaf_name().is_some())
        .map(|n| outer.push(n.op.clone(), &[]).unwrap())
        .collect();
    let block = outer.add_block(Arc::new(Block::new("chain", g)));
    let y = outer.push(Call { block, layer: 0 }, &args).unwrap();
    outer.set_output("y", y).unwrap();
    let (after, report) = run(&outer, Fidelity::Fast, Extraction::Cheapest);
    println!("{:?}", report[0]);
    assert!(report[0].size[0] <= ROUNDS && report[0].size[1] <= TERMS + OF_ONE_MATCH, "{report:?}");
    close("chain", &value(&after, &leaves, true), &value(&outer, &leaves, true), 1e-4);
}

/// Terms that one match may add.
const OF_ONE_MATCH: usize = 50;
