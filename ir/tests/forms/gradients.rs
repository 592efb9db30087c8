//! Every differentiable operator, in the middle of a graph, against central finite differences of the interpreter in
//! exact mode; and every decomposition against the operator it stands for. A new operator of the table fails here until
//! it is in the cases or in the list of those without a gradient.

use astrai_ir::{
    DType, Dim, Graph, IrError, NodeId, Op, Precision, Sizes, Tensor, eval, gradient, ops::UnaryKind,
};
use std::collections::{BTreeSet, HashMap};

mod cases;
use cases::{Arg, Case, cases};

/// Operators through which nothing flows by their nature, and those that only gradients are made of.
const WITHOUT: [&str; 16] = [
    "dequant",
    "fake_quant",
    "input",
    "weight",
    "state",
    "const",
    "iota",
    "random",
    "compare",
    "argmax",
    "sample",
    "store",
    "detach",
    "low_rank",
    "attention_grad",
    "linear_cross_entropy_grad",
];
/// `part` and `call` are the walk's business: `part` is in the cases of several outputs, `call` is refused.
const OF_THE_WALK: [&str; 2] = ["part", "call"];
/// Collectives have a gradient on several ranks only: `passes` and `tests/shard.rs` hold it there to that of the whole.
const OF_RANKS: [&str; 8] =
    ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "local_slice", "pvary", "send", "recv"];

const EXACT: Precision = Precision { exact: true };

fn run(g: &Graph, leaves: &HashMap<String, Tensor>) -> Vec<Tensor> {
    eval(g, leaves, &Sizes::new(), EXACT).unwrap().into_iter().map(|(_, t)| t).collect()
}

/// The loss of a case: each float argument passes through x·(1 + cos(x)/20), each float output through
/// c·sin(y + 0.3), and the arguments have a second path to the loss.
fn build(case: &Case) -> Result<(Graph, Vec<NodeId>), IrError> {
    let mut g = Graph::new(vec![]);
    let (mut leaves, mut args, mut sum) = (Vec::new(), Vec::new(), None);
    for (i, a) in case.args.iter().enumerate() {
        let t = a.tensor(i);
        let x = g.input(&format!("x{i}"), t.dtype, t.shape.iter().map(|&n| Dim::from(n)).collect())?;
        leaves.push(x);
        args.push(if a.is_float() {
            let c = g.unary(UnaryKind::Cos, x)?;
            let c = g.scale(c, 0.0625)?;
            let y = g.mul(x, c)?;
            g.add(x, y)?
        } else {
            x
        });
    }
    let node = g.push(case.op.clone(), &args)?;
    let mut terms = Vec::new();
    for i in case.outputs.clone() {
        let y = g.part(node, i)?;
        let y = g.cast(y, DType::F32)?;
        let three = g.fill(y, 0.3)?;
        let s = g.add(y, three)?;
        terms.push(g.unary(UnaryKind::Sin, s)?);
    }
    terms.extend(args.iter().zip(&case.args).filter(|(_, a)| a.is_float()).map(|(&x, _)| x));
    for (k, t) in terms.into_iter().enumerate() {
        let ty = g.ty(t).clone();
        let shape: Vec<usize> = ty.shape.iter().map(|d| d.size().unwrap()).collect();
        let c = Arg::Float(shape, 0.3, 1.0).tensor(100 + k);
        let c = g.push(astrai_ir::ops::Const::new(&c), &[])?;
        let t = g.mul(t, c)?;
        let axes: Vec<usize> = (0..ty.rank()).collect();
        let t = g.reduce(astrai_ir::ops::ReduceKind::Sum, t, &axes)?;
        sum = Some(sum.map_or(Ok(t), |s| g.add(s, t))?);
    }
    g.set_output("loss", sum.unwrap())?;
    Ok((g, leaves))
}

fn check(case: &Case) {
    let (mut g, ids) = build(case).unwrap_or_else(|e| panic!("{case:?}: {e}"));
    let leaves: HashMap<String, Tensor> =
        case.args.iter().enumerate().map(|(i, a)| (format!("x{i}"), a.tensor(i))).collect();
    let forward = g.clone();
    let loss = g.outputs()[0].1;
    let one = g.fill(loss, 1.0).unwrap();
    let wrt: Vec<usize> = (0..ids.len()).filter(|i| case.args[*i].is_float()).collect();
    let by: Vec<NodeId> = wrt.iter().map(|&i| ids[i]).collect();
    let grads = gradient(&mut g, &[(loss, one)], &by).unwrap_or_else(|e| panic!("{case:?}: {e}"));
    for (i, d) in wrt.iter().zip(&grads) {
        g.set_output(&format!("d{i}"), d.unwrap()).unwrap();
    }
    let got = run(&g, &leaves);
    for (k, i) in wrt.iter().enumerate().filter(|(_, i)| !case.constant.contains(i)) {
        let name = format!("x{i}");
        let x = leaves[&name].clone();
        for e in 0..x.len() {
            let at = |h: f64| {
                let mut v = x.reals();
                v[e] += h;
                let mut leaves = leaves.clone();
                leaves.insert(name.clone(), Tensor::exact(x.dtype, &x.shape, v));
                run(&forward, &leaves)[0].at(0)
            };
            let h = 1e-5;
            let want = (at(h) - at(-h)) / (2.0 * h);
            let got = got[k + 1].at(e);
            // Constants in the graph are f32, so gradient and difference agree to about its rounding.
            assert!(
                (got - want).abs() <= 1e-6 * want.abs().max(1.0),
                "{case:?}: d{name}[{e}] {got}, not {want}"
            );
        }
    }
}

#[test]
fn gradients_match_finite_differences() {
    cases().iter().filter(|c| !c.outputs.is_empty()).for_each(check);
}

#[test]
fn every_operator_is_checked_or_without_gradient() {
    let cases = cases();
    let checked: BTreeSet<&str> =
        cases.iter().filter(|c| !c.outputs.is_empty()).map(|c| c.op.name()).collect();
    let without: BTreeSet<&str> = WITHOUT.into_iter().chain(OF_THE_WALK).chain(OF_RANKS).collect();
    let all: BTreeSet<&str> = Op::NAMES.iter().copied().collect();
    assert_eq!(checked.intersection(&without).collect::<Vec<_>>(), Vec::<&&str>::new());
    assert_eq!(checked.union(&without).copied().collect::<BTreeSet<_>>(), all);
    let kinds: BTreeSet<String> = cases.iter().map(|c| c.op.attributes().to_string()).collect();
    for kind in cases::kinds() {
        assert!(kinds.iter().any(|k| k.contains(&format!("{kind:?}"))), "no case of {kind}");
    }
}

#[test]
fn decompositions_are_equal() {
    let mut seen = BTreeSet::new();
    for case in cases() {
        let mut g = Graph::new(vec![]);
        let (mut args, mut leaves) = (Vec::new(), HashMap::new());
        for (i, a) in case.args.iter().enumerate() {
            let t = a.tensor(i);
            let shape = t.shape.iter().map(|&n| Dim::from(n)).collect();
            args.push(g.input(&format!("x{i}"), t.dtype, shape).unwrap());
            leaves.insert(format!("x{i}"), t);
        }
        let node = g.push(case.op.clone(), &args).unwrap();
        let Some(parts) = case.op.decompose(&mut g, &args) else { continue };
        let parts = parts.unwrap_or_else(|e| panic!("{case:?}: {e}"));
        assert_eq!(parts.len(), g.node(node).types.len(), "{case:?}");
        seen.insert(case.op.name());
        for (i, p) in parts.into_iter().enumerate() {
            let whole = g.part(node, i as u32).unwrap();
            assert_eq!(g.ty(whole), g.ty(p), "{case:?}");
            g.set_output(&format!("whole{i}"), whole).unwrap();
            g.set_output(&format!("parts{i}"), p).unwrap();
        }
        for pair in run(&g, &leaves).chunks(2) {
            for (a, b) in pair[0].reals().iter().zip(pair[1].reals()) {
                assert!((a - b).abs() <= 1e-6 * a.abs().max(1.0), "{case:?}: {a} in one, {b} in parts");
            }
        }
    }
    let want = [
        "gated_act",
        "grouped_dot",
        "grouped_outer",
        "layer_norm",
        "linear_cross_entropy",
        "linear_cross_entropy_grad",
        "rms_norm",
        "rope",
        "softmax",
    ];
    assert!(want.iter().all(|w| seen.contains(w)), "{seen:?}");
}

/// Nodes that do not lie between `wrt` and an output get no rule applied and no cotangent.
#[test]
fn only_paths_are_walked() {
    use astrai_ir::ops;
    let mut g = Graph::new(vec![]);
    let shape = || vec![Dim::from(2), Dim::from(3)];
    let (x, y) = (g.input("x", DType::F32, shape()).unwrap(), g.input("y", DType::F32, shape()).unwrap());
    // argmax of x picks columns of y: y has a gradient, x none.
    let i = g.push(ops::Argmax { axis: 1 }, &[x]).unwrap();
    let picked = g.gather(y, i, 1).unwrap();
    let one = g.fill(picked, 1.0).unwrap();
    let grads = gradient(&mut g, &[(picked, one)], &[x, y, i]).unwrap();
    assert!(grads[0].is_none() && grads[1].is_some() && grads[2].is_none());
    let e = gradient(&mut g, &[(picked, y)], &[y]).unwrap_err();
    assert!(e.to_string().contains("its cotangent"), "{e}");
    assert!(gradient(&mut g, &[(NodeId(999), y)], &[y]).is_err());
}

/// Arguments that do not fit are errors with the operator's name, whatever they are.
#[test]
fn wrong_arguments_are_errors() {
    for case in cases() {
        let mut g = Graph::new(vec![]);
        let mut args = Vec::new();
        for (i, a) in case.args.iter().enumerate() {
            let t = a.tensor(i);
            let shape = t.shape.iter().map(|&n| Dim::from(n)).collect();
            args.push(g.input(&format!("x{i}"), t.dtype, shape).unwrap());
        }
        let scalar = g.input("scalar", DType::Bool, vec![]).unwrap();
        let flat = g.input("flat", DType::I64, vec![Dim::from(1)]).unwrap();
        let two = g.push(astrai_ir::ops::Topk { k: 1 }, &[flat]).unwrap();
        let n = args.len();
        let mut tries = vec![vec![], vec![scalar; n + 1], vec![two; n], [&args[..], &[flat; 9]].concat()];
        if !matches!(case.op, Op::Concat(_)) {
            tries.push(args[1..].to_vec());
        }
        for wrong in tries {
            let e = g.push(case.op.clone(), &wrong).unwrap_err();
            assert!(e.to_string().contains(case.op.name()), "{case:?}: {e}");
        }
        for wrong in [scalar, flat] {
            // Some operators take these; none may panic.
            let _ = g.push(case.op.clone(), &vec![wrong; n]);
        }
    }
}
