//! Every rule against the interpreter, what limits and determinism promise, and the choices that cost alone must make.

use super::encode::Encoded;
use super::samples::Draw;
use super::*;
use astrai_ir::ops::*;
use astrai_ir::{DType, Precision, Simd, Sizes, Tensor, TargetKind, eval, verify};

/// Sequences of the instances: the symbol `tokens`.
const TOKENS: usize = 5;

fn host() -> Target {
    Target::host(Simd::Avx512, 2, 1 << 34)
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
fn tolerance(class: Class) -> f64 {
    if class == Class::Exact { 0.0 } else { 1e-6 }
}

fn weights(g: &Graph) -> HashSet<NodeId> {
    g.ids().filter(|id| matches!(g.node(*id).op, Op::Weight(_))).collect()
}

/// The graph after only this rule, its new side taken; `None` when the rule does not fire.
fn rewritten(g: &Graph, rule: usize) -> Option<Graph> {
    let mut e = Encoded::of(&Arc::new(g.clone()), weights(g)).unwrap();
    let times = rules::apply(&mut e.egraph, rule);
    e.egraph.rebuild();
    if times == 0 {
        return None;
    }
    let target = host();
    let search = Search { target: &target, how: Saturate::default(), fold: false };
    let mut forms = Forms::of(&e, &search);
    // New terms cost nothing, old ones much.
    let classes = forms.classes.iter_mut().flatten();
    classes.for_each(|t| t.cost = if t.cost.1 == 0 { (1 << 20, 0, 1) } else { (1, 0, 1) });
    let roots: Vec<usize> = e.roots().iter().map(|r| forms.at[r]).collect();
    let choice = extract(&forms.classes, &roots, Wanted::Cheapest).unwrap();
    let terms = choice.iter().map(|(&c, &t)| (forms.ids[c], forms.terms[c][t].clone())).collect();
    Some(e.decode(&terms).unwrap())
}

fn close(rule: &str, a: &Tensor, b: &Tensor, tolerance: f64) {
    assert_eq!((a.dtype, &a.shape), (b.dtype, &b.shape), "{rule}");
    let top = b.reals().iter().fold(0f64, |m, x| m.max(x.abs()));
    for (x, y) in a.reals().iter().zip(b.reals()) {
        let same = if tolerance == 0.0 { x.to_bits() == y.to_bits() } else { (x - y).abs() <= tolerance * top };
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
            if rule.class == Class::Exact {
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
        let all = [Class::Exact, Class::Reassoc, Class::WeightFold];
        assert_eq!(all.iter().filter(|c| fidelity.allows(**c)).count(), classes);
    }
}

fn run(g: &Graph, fidelity: Fidelity, wanted: Wanted) -> (Graph, Vec<Searched>) {
    let how = Saturate { fidelity, wanted, ..Saturate::default() };
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
            for wanted in [Wanted::Cheapest, Wanted::Dearest, Wanted::Random(1), Wanted::Random(2)] {
                let (after, _) = run(&before, fidelity, wanted);
                close(rule.name, &value(&after, &leaves, true), &want, share);
            }
        }
    }
}

#[test]
fn the_same_graph_gives_the_same_form() {
    for rule in RULES {
        let g = (rule.sample)(&mut Draw(3));
        for wanted in [Wanted::Cheapest, Wanted::Dearest, Wanted::Random(9)] {
            let text = |g: &Graph| run(g, Fidelity::Fast, wanted).0.to_string();
            assert_eq!(text(&g), text(&g), "{}", rule.name);
        }
    }
}
