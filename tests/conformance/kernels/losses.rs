//! Cross-entropy of a linear layer and its gradient: several chunks of tokens and slices of the vocabulary at awkward sizes,
//! ignored and impossible targets, smoothing, soft-caps, narrow types; the same bits at any number of threads.

use crate::kernels::table::{Fill, Table, dims, mix, rows, run};
use crate::machines::host;
use astrai_ir::ops::{LinearCrossEntropy, LinearCrossEntropyGrad};
use astrai_ir::{DType, Dim, NodeId, Real, Shape, Tensor};

/// Chunks are of 512 tokens at most, slices of 1536 rows of the weight.
const TOKENS: [usize; 3] = [513, 1100, 7];

fn op(smoothing: f64, softcap: Option<f64>) -> LinearCrossEntropy {
    LinearCrossEntropy { label_smoothing: Real(smoothing), softcap: softcap.map(Real), statistics: false }
}

/// hidden, weight, targets and the losses' cotangent; some targets are ignored.
fn args(t: &mut Table, dtype: DType, tokens: Dim, vocab: usize, k: usize) -> [NodeId; 4] {
    let width: Shape = dims(&[k]);
    let h = t.input(dtype, [vec![tokens.clone()], width].concat(), Fill::Real(-2.0, 2.0));
    let w = t.input(dtype, dims(&[vocab, k]), Fill::Real(-1.0, 1.0));
    let targets =
        (0..41).map(|i| if i % 5 == 3 { -1.0 } else { (mix(7, i) % vocab as u64) as f64 }).collect();
    let targets = t.input(DType::I32, vec![tokens.clone()], Fill::List(targets));
    let grad = t.input(DType::F32, vec![tokens], Fill::Real(-1.0, 1.0));
    [h, w, targets, grad]
}

/// The forward operator and all outputs of its gradient as cases.
fn both(t: &mut Table, name: &str, forward: LinearCrossEntropy, args: &[NodeId; 4]) {
    let losses = t.g.push(forward.clone(), &args[..3]).unwrap();
    t.case(&format!("{name}, forward"), losses);
    let made = t.g.push(LinearCrossEntropyGrad { forward }, args).unwrap();
    for (i, part) in ["d hidden", "d weight", "losses"].into_iter().enumerate() {
        let x = t.g.part(made, i as u32).unwrap();
        t.case(&format!("{name}, {part}"), x);
    }
}

/// The statistics beside the loss, and the gradient by every cotangent that they have.
#[test]
fn statistics_and_their_gradients() {
    for dtype in [DType::F32, DType::BF16] {
        let mut t = Table::new();
        for (i, (s, cap)) in [(0.0, None), (0.2, None), (0.1, Some(3.0))].into_iter().enumerate() {
            let [h, w, targets, grad] = args(&mut t, dtype, Dim::symbol("n"), 63 + i, 12);
            let forward = LinearCrossEntropy { statistics: true, ..op(s, cap) };
            let made = t.g.push(forward.clone(), &[h, w, targets]).unwrap();
            let more = [0; 3].map(|_| t.input(DType::F32, rows(&[]), Fill::Real(-1.0, 1.0)));
            let both =
                t.g.push(LinearCrossEntropyGrad { forward }, &[&[h, w, targets, grad][..], &more].concat());
            let both = both.unwrap();
            for part in 0..8 {
                let x = t.g.part(both, part).unwrap();
                t.case(&format!("{s} {cap:?}, {part} of the gradient"), x);
            }
            for part in 0..6 {
                let x = t.g.part(made, part).unwrap();
                t.case(&format!("{s} {cap:?}, {part}"), x);
            }
        }
        all_on_the_core(&t).run_some(&[1, 31, 130]);
    }
}

/// Every region around the loss has the kernel.
fn all_on_the_core(t: &Table) -> &Table {
    let losses = |r: &&std::sync::Arc<astrai_ir::Region>| {
        r.graph().nodes().iter().any(|n| n.op.name().starts_with("linear_cross_entropy"))
    };
    let program = t.compiled();
    assert!(program.plan.regions.iter().filter(losses).all(|r| r.form().name() == "loss"));
    t.all_native()
}

#[test]
fn chunks_and_slices_at_odd_sizes() {
    for dtype in [DType::F32, DType::BF16] {
        let mut t = Table::new();
        for (tokens, vocab, k) in [
            (513, 33, 7),
            (1100, 65, 20),
            (7, 1537, 5),
            (3, 3105, 33),
            (1, 1, 1),
            (33, 31, 257),
            (513, 1540, 2),
        ] {
            let args = args(&mut t, dtype, Dim::from(tokens), vocab, k);
            both(&mut t, &format!("{tokens} {vocab} {k}"), op(0.0, None), &args);
        }
        all_on_the_core(&t).run(&[1]);
    }
}

#[test]
fn smoothing_and_soft_caps_over_the_symbol() {
    for dtype in [DType::F32, DType::BF16] {
        let mut t = Table::new();
        for (i, (s, cap)) in [(0.1, None), (0.0, Some(2.0)), (0.3, Some(5.0))].into_iter().enumerate() {
            let args = args(&mut t, dtype, Dim::symbol("n"), 63 + i, 12);
            both(&mut t, &format!("{s} {cap:?}"), op(s, cap), &args);
        }
        all_on_the_core(&t).run_some(&[1, 31, 257]);
    }
}

/// Results that nobody wants are not made.
#[test]
fn some_of_the_results() {
    let mut t = Table::new();
    for parts in [&[0u32][..], &[1], &[2], &[0, 1], &[1, 2], &[2, 0]] {
        let args = args(&mut t, DType::F32, Dim::symbol("n"), 40 + parts.len(), 9);
        let made = t.g.push(LinearCrossEntropyGrad { forward: op(0.0, None) }, &args).unwrap();
        for &p in parts {
            let x = t.g.part(made, p).unwrap();
            t.case(&format!("{p} of {parts:?}"), x);
        }
    }
    all_on_the_core(&t).run_some(&[5, 300]);
}

#[test]
fn arguments_where_they_lie_and_where_they_do_not() {
    let mut t = Table::new();
    let [_, _, targets, grad] = args(&mut t, DType::F32, Dim::symbol("n"), 21, 12);
    let narrow = t.input(DType::BF16, rows(&[3, 4]), Fill::Real(-2.0, 2.0));
    let wide = t.g.cast(narrow, DType::F32).unwrap();
    let h = t.g.reshape(wide, rows(&[12])).unwrap();
    let w = t.weight(DType::BF16, &[21, 12]);
    let w32 = t.g.cast(w, DType::F32).unwrap();
    both(&mut t, "widened", op(0.0, None), &[h, w32, targets, grad]);
    let y = t.g.linear(h, w32).unwrap();
    t.case("a dot on the same weight", y);
    let one = t.g.fill(grad, 0.25).unwrap();
    both(&mut t, "a constant cotangent", op(0.0, None), &[h, w32, targets, one]);
    let joined = t.x(rows(&[30]));
    let slice = t.g.slice(joined, 1, Dim::from(7), Dim::from(12)).unwrap();
    let across = t.x(dims(&[12, 21]));
    let across = t.g.permute(across, &[1, 0]).unwrap();
    both(&mut t, "a slice and a transpose", op(0.0, None), &[slice, across, targets, grad]);
    let halves = t.input(DType::F16, dims(&[21, 12]), Fill::Real(-1.0, 1.0));
    let halves = t.g.cast(halves, DType::F32).unwrap();
    both(&mut t, "a weight of halves", op(0.0, None), &[h, halves, targets, grad]);
    all_on_the_core(&t).run_some(&[1, 65]);
}

#[test]
fn all_targets_ignored() {
    let mut t = Table::new();
    for dtype in [DType::F32, DType::BF16] {
        let [h, w, _, _] = args(&mut t, dtype, Dim::from(600), 19, 6);
        let targets = t.input(DType::I32, dims(&[600]), Fill::List(vec![-1.0, -100.0]));
        let grad = t.input(DType::F32, dims(&[600]), Fill::List(vec![f64::NAN, f64::INFINITY, 1.0]));
        both(&mut t, &format!("{dtype}"), op(0.1, Some(3.0)), &[h, w, targets, grad]);
    }
    t.run_some(&[1]);
}

/// The interpreter refuses targets beyond the vocabulary; the kernel answers NaN and reads nothing.
#[test]
fn impossible_targets_give_nan() {
    let mut t = Table::new();
    let [h, w, targets, grad] = args(&mut t, DType::F32, Dim::from(4), 9, 3);
    both(&mut t, "x", op(0.0, None), &[h, w, targets, grad]);
    let mut leaves = t.values(1);
    let name = t.g.node(targets).op.leaf_name().unwrap().to_string();
    leaves.insert(name, Tensor::int(DType::I32, &[4], vec![8, 9, -1, i32::MAX.into()]));
    let got = run(&mut t.session(), &leaves);
    let nans = |i: usize| got[i].1.to_f32().iter().map(|x| x.is_nan()).collect::<Vec<_>>();
    assert_eq!((nans(0), nans(3)), (vec![false, true, false, true], vec![false, true, false, true]));
    let rows: Vec<bool> = [false, true, false, true].iter().flat_map(|n| [*n; 3]).collect();
    assert_eq!(nans(1), rows);
}

#[test]
fn bits_do_not_depend_on_threads() {
    let mut t = Table::new();
    for dtype in [DType::F32, DType::BF16] {
        for (tokens, vocab, k) in [(TOKENS[1], 130, 65), (TOKENS[0], 2500, 40), (TOKENS[2], 5000, 300)] {
            let args = args(&mut t, dtype, Dim::from(tokens), vocab, k);
            both(&mut t, &format!("{dtype} {tokens} {vocab} {k}"), op(0.1, None), &args);
        }
    }
    let leaves = t.values(1);
    let on = |threads| run(&mut t.session_on(&host(threads)), &leaves);
    let (one, two) = (on(1), on(2));
    assert!(one == two && two == on(2), "results differ");
    // The losses do not depend on which kernel makes them.
    for case in one.chunks(4) {
        assert_eq!(case[0].1, case[3].1, "{}", case[0].0);
    }
}

/// A trained head: one making of the logits gives the loss and both gradients.
#[test]
fn a_trained_head() {
    for storage in [DType::F32, DType::BF16] {
        let mut t = Table::new();
        let x = t.x(rows(&[10]));
        let (w1, w2) = (t.weight(DType::F32, &[24, 10]), t.weight(DType::F32, &[50, 24]));
        let h = t.g.linear(x, w1).unwrap();
        let targets = t.input(DType::I32, rows(&[]), Fill::Int(-1, 49));
        let losses = t.g.push(op(0.0, None), &[h, w2, targets]).unwrap();
        let loss = t.g.reduce(astrai_ir::ops::ReduceKind::Sum, losses, &[0]).unwrap();
        t.case("loss", loss);
        let t = t.stored(storage, 1.0).gradient_of("loss");
        let program = t.compiled();
        let kernels = program.plan.regions.iter().filter(|r| r.form().name() == "loss").count();
        assert_eq!((kernels, program.plan.regions.iter().any(|r| !r.form().has_kernel())), (1, false));
        if storage == DType::F32 {
            t.run_some(&[1, 33, 257]);
        }
    }
}

/// Bounds of symbols are part of what emission reads: how many tokens' logits are made at a time depends on them.
#[test]
fn kernels_of_other_bounds_have_another_identity() {
    let identities = |most: u64| {
        let mut t = Table::over(most);
        let x = t.x(rows(&[16]));
        let w = t.weight(DType::F32, &[40, 16]);
        let targets = t.input(DType::I32, rows(&[]), Fill::Int(-1, 39));
        let op = LinearCrossEntropy { label_smoothing: Real(0.0), softcap: None, statistics: false };
        let loss = t.g.push(op, &[x, w, targets]).unwrap();
        t.case("loss", loss);
        let kernels = t.compiled().kernels;
        kernels.into_iter().flatten().map(|k| k.identity).collect::<Vec<_>>()
    };
    assert_eq!(identities(300), identities(300));
    assert_ne!(identities(300), identities(1 << 20));
}
