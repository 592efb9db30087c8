//! The cases: operators with arguments on which they are smooth and well-conditioned.

use astrai_ir::ops::*;
use astrai_ir::{DType, Dim, Op, Real, Tensor};

/// An argument.
#[derive(Clone, Debug)]
pub enum Arg {
    /// f32 uniform between two bounds.
    Float(Vec<usize>, f64, f64),
    /// f32 of distinct magnitudes at least 0.1 apart and from zero, signs mixed, order shuffled.
    Apart(Vec<usize>),
    /// f32 as given.
    Given(Vec<usize>, Vec<f64>),
    /// i32 as given.
    Int(Vec<usize>, Vec<i64>),
    /// bool as given.
    Bool(Vec<usize>, Vec<i64>),
}

impl Arg {
    /// Same `salt`, same numbers.
    pub fn tensor(&self, salt: usize) -> Tensor {
        let mut state = (salt as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut unit = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state ^ (state >> 29)) >> 11 & ((1 << 40) - 1)) as f64 / (1u64 << 40) as f64
        };
        match self {
            Arg::Float(shape, lo, hi) => {
                let n = shape.iter().product();
                Tensor::float(DType::F32, shape, (0..n).map(|_| lo + (hi - lo) * unit()).collect())
            }
            Arg::Apart(shape) => {
                let n: usize = shape.iter().product();
                let mut v: Vec<f64> =
                    (0..n).map(|i| (0.15 + 0.1 * i as f64) * if i % 2 == 0 { 1.0 } else { -1.0 }).collect();
                (1..n).rev().for_each(|i| v.swap(i, (unit() * (i + 1) as f64) as usize));
                Tensor::float(DType::F32, shape, v)
            }
            Arg::Given(shape, v) => Tensor::float(DType::F32, shape, v.clone()),
            Arg::Int(shape, v) => Tensor::int(DType::I32, shape, v.clone()),
            Arg::Bool(shape, v) => Tensor::int(DType::Bool, shape, v.clone()),
        }
    }

    pub fn is_float(&self) -> bool {
        matches!(self, Arg::Float(..) | Arg::Apart(_) | Arg::Given(..))
    }
}

#[derive(Clone, Debug)]
pub struct Case {
    pub op: Op,
    pub args: Vec<Arg>,
    /// Outputs that join the loss; none for a case of the decomposition only.
    pub outputs: Vec<u32>,
    /// Arguments by which the operator is constant by definition (the tables of `rope`).
    pub constant: Vec<usize>,
}

fn x(shape: &[usize]) -> Arg {
    Arg::Float(shape.to_vec(), -1.2, 1.3)
}

fn positive(shape: &[usize]) -> Arg {
    Arg::Float(shape.to_vec(), 0.4, 2.0)
}

fn apart(shape: &[usize]) -> Arg {
    Arg::Apart(shape.to_vec())
}

fn ints(shape: &[usize], v: &[i64]) -> Arg {
    Arg::Int(shape.to_vec(), v.to_vec())
}

fn case(op: impl Into<Op>, args: Vec<Arg>) -> Case {
    Case { op: op.into(), args, outputs: vec![0], constant: vec![] }
}

fn dims(shape: &[usize]) -> Vec<Dim> {
    shape.iter().map(|&n| Dim::from(n)).collect()
}

/// Names of the kinds that must occur among the attributes of the cases.
pub fn kinds() -> Vec<String> {
    let name = |v: serde_json::Value| v.as_str().unwrap_or_default().to_string();
    let mut all = Vec::new();
    all.extend(UnaryKind::ALL.iter().filter(|k| **k != UnaryKind::Not).map(|k| name(serde_json::json!(k))));
    let logical = [BinaryKind::And, BinaryKind::Or];
    all.extend(BinaryKind::ALL.iter().filter(|k| !logical.contains(k)).map(|k| name(serde_json::json!(k))));
    all.extend(ReduceKind::ALL.iter().map(|k| name(serde_json::json!(k))));
    all.extend(
        ["set", "half", "interleaved", "silu", "gelu", "gelu_tanh", "sigmoid", "softmax_chosen"]
            .map(String::from),
    );
    all
}

pub fn cases() -> Vec<Case> {
    let mut all = views();
    all.extend(pointwise());
    all.extend(contractions());
    all.extend(indexing());
    all.extend(composites());
    all.extend(attentions());
    all.extend(experts());
    all
}

fn views() -> Vec<Case> {
    let slice = |axis, start: usize, len: usize| Slice { axis, start: Dim::from(start), len: Dim::from(len) };
    let pad = |axis, before: usize, after: usize| Pad {
        axis,
        before: Dim::from(before),
        after: Dim::from(after),
        value: Real(0.5),
    };
    vec![
        case(Reshape { shape: dims(&[3, 4]) }, vec![x(&[2, 6])]),
        case(Reshape { shape: dims(&[]) }, vec![x(&[1, 1])]),
        case(Permute { axes: vec![2, 0, 1] }, vec![x(&[2, 3, 4])]),
        case(Expand { shape: dims(&[2, 3, 4]) }, vec![x(&[2, 1, 4])]),
        case(Expand { shape: dims(&[3, 2]) }, vec![x(&[1, 1])]),
        case(slice(1, 1, 2), vec![x(&[2, 4, 2])]),
        case(slice(0, 2, 1), vec![x(&[3])]),
        case(pad(1, 1, 2), vec![x(&[2, 3])]),
        case(pad(0, 0, 1), vec![x(&[2, 2])]),
        case(Concat { axis: 1 }, vec![x(&[2, 1, 2]), x(&[2, 3, 2]), x(&[2, 2, 2])]),
        case(Cast { dtype: DType::BF16 }, vec![x(&[2, 3])]),
        case(Cumsum { axis: 1, exclusive: false, reverse: false }, vec![x(&[2, 4, 2])]),
        case(Cumsum { axis: 0, exclusive: true, reverse: false }, vec![x(&[3, 2])]),
        case(Cumsum { axis: 1, exclusive: true, reverse: true }, vec![x(&[2, 3])]),
    ]
}

fn pointwise() -> Vec<Case> {
    let mut all = Vec::new();
    for kind in UnaryKind::ALL.into_iter().filter(|k| *k != UnaryKind::Not) {
        let arg = |shape: &[usize]| match kind {
            UnaryKind::Log | UnaryKind::Sqrt | UnaryKind::Rsqrt => positive(shape),
            UnaryKind::Abs | UnaryKind::Floor => Arg::Float(shape.to_vec(), 0.2, 0.8),
            _ => x(shape),
        };
        all.push(case(Unary { kind }, vec![arg(&[2, 3])]));
        all.push(case(Unary { kind }, vec![arg(&[])]));
    }
    all.push(case(Unary { kind: UnaryKind::Abs }, vec![apart(&[2, 3])]));
    all.push(case(Unary { kind: UnaryKind::Erf }, vec![Arg::Float(vec![6], -3.5, 3.5)]));
    for kind in BinaryKind::ALL.into_iter().filter(|k| !matches!(k, BinaryKind::And | BinaryKind::Or)) {
        let args = match kind {
            BinaryKind::Div => vec![x(&[2, 3]), positive(&[2, 3])],
            BinaryKind::Pow => vec![positive(&[2, 3]), x(&[2, 3])],
            BinaryKind::Max | BinaryKind::Min => vec![apart(&[2, 3]), apart(&[2, 3])],
            _ => vec![x(&[2, 3]), x(&[2, 3])],
        };
        all.push(case(Binary { kind }, args));
    }
    all.push(case(Select {}, vec![Arg::Bool(vec![4], vec![1, 0, 0, 1]), x(&[4]), x(&[4])]));
    for act in [Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::Swish(Real(1.702))] {
        all.push(case(GatedAct { act }, vec![x(&[2, 3]), x(&[2, 3])]));
    }
    all
}

fn contractions() -> Vec<Case> {
    let mut all = Vec::new();
    for kind in ReduceKind::ALL {
        for (shape, axes) in [(&[2, 3, 2][..], vec![1]), (&[2, 3], vec![0, 1]), (&[2, 3, 2], vec![0, 2])] {
            all.push(case(Reduce { kind, axes }, vec![apart(shape)]));
        }
    }
    // One zero in a row, two zeros in a row.
    let zeros = Arg::Given(vec![3, 3], vec![0.0, 2.0, -1.5, 0.5, 0.0, 0.0, 0.7, 1.1, -0.4]);
    all.push(case(Reduce { kind: ReduceKind::Prod, axes: vec![1] }, vec![zeros]));
    let dot = |batch: &[(usize, usize)], contract: &[(usize, usize)], l: &[usize], r: &[usize]| {
        case(Dot { batch: batch.to_vec(), contract: contract.to_vec() }, vec![x(l), x(r)])
    };
    all.extend([
        dot(&[], &[(1, 1)], &[2, 3], &[4, 3]),
        dot(&[], &[(0, 1)], &[3, 2], &[4, 3]),
        dot(&[], &[(0, 0)], &[3], &[3]),
        dot(&[], &[], &[2], &[3]),
        dot(&[(0, 0)], &[(2, 1)], &[2, 3, 4], &[2, 4, 2]),
        dot(&[(1, 2)], &[(0, 1)], &[3, 2, 4], &[5, 3, 2]),
        dot(&[(2, 0), (0, 3)], &[(1, 2)], &[2, 3, 2, 2], &[2, 2, 3, 2]),
        dot(&[], &[(2, 0), (0, 2)], &[2, 3, 4], &[4, 2, 2]),
        dot(&[(1, 1)], &[(3, 0), (0, 3)], &[2, 3, 2, 4], &[4, 3, 2, 2]),
    ]);
    all
}

fn indexing() -> Vec<Case> {
    let scatter = |kind, axis, batch| Scatter { axis, batch, kind };
    let mut all = vec![
        case(Gather { axis: 0, batch: 0 }, vec![x(&[4, 2]), ints(&[5], &[3, 0, 3, 1, 3])]),
        case(Gather { axis: 1, batch: 0 }, vec![x(&[2, 3, 2]), ints(&[2, 2], &[2, 0, 2, 1])]),
        case(Gather { axis: 1, batch: 1 }, vec![x(&[2, 3]), ints(&[2, 2], &[2, 2, 0, 1])]),
        case(Gather { axis: 2, batch: 1 }, vec![x(&[2, 2, 3]), ints(&[2, 1], &[2, 0])]),
        Case { outputs: vec![0], ..case(Topk { k: 2 }, vec![apart(&[3, 4])]) },
        case(Topk { k: 3 }, vec![apart(&[3])]),
    ];
    for kind in [ScatterKind::Add, ScatterKind::Set] {
        all.push(case(scatter(kind, 0, 0), vec![x(&[4, 2]), ints(&[3], &[3, 0, 1]), x(&[3, 2])]));
        all.push(case(scatter(kind, 0, 0), vec![x(&[4, 2]), ints(&[3], &[3, 0, 3]), x(&[3, 2])]));
        all.push(case(scatter(kind, 1, 1), vec![x(&[2, 3]), ints(&[2, 2], &[2, 2, 0, 1]), x(&[2, 2])]));
        all.push(case(scatter(kind, 1, 0), vec![x(&[2, 3, 2]), ints(&[2], &[2, 0]), x(&[2, 2, 2])]));
    }
    all
}

fn composites() -> Vec<Case> {
    let mut all = vec![
        case(RmsNorm { eps: Real(1e-5) }, vec![x(&[2, 3, 4]), positive(&[4])]),
        case(RmsNorm { eps: Real(0.1) }, vec![x(&[5]), x(&[5])]),
        case(LayerNorm { eps: Real(1e-5) }, vec![x(&[2, 3, 4]), positive(&[4]), x(&[4])]),
        case(LayerNorm { eps: Real(0.1) }, vec![x(&[5]), x(&[5]), x(&[5])]),
    ];
    for log in [false, true] {
        all.push(case(Softmax { log }, vec![x(&[2, 4])]));
        all.push(case(Softmax { log }, vec![Arg::Float(vec![2, 2, 3], -6.0, 6.0)]));
    }
    for layout in [RopeLayout::Half, RopeLayout::Interleaved] {
        for (dim, d) in [(4, 4), (4, 7), (2, 6)] {
            let args = vec![x(&[3, 2, d]), x(&[3, dim / 2]), x(&[3, dim / 2])];
            all.push(Case { constant: vec![1, 2], ..case(Rope { layout, dim }, args) });
        }
    }
    let heads = [(0.0, None), (0.1, None), (0.0, Some(0.7)), (0.3, Some(2.0))];
    for ((s, cap), statistics) in heads.into_iter().flat_map(|h| [(h, false), (h, true)]) {
        let op = LinearCrossEntropy { label_smoothing: Real(s), softcap: cap.map(Real), statistics };
        let args = || vec![x(&[4, 3]), x(&[5, 3]), ints(&[4], &[4, -100, 0, 2])];
        let grad = LinearCrossEntropyGrad { forward: op.clone() };
        let with = if statistics { Statistic::DIFFERENTIABLE as u32 } else { 1 };
        all.push(Case { outputs: (0..with).collect(), ..case(op, args()) });
        let cotangents = vec![x(&[4]); with as usize];
        all.push(Case { outputs: vec![], ..case(grad, [args(), cotangents].concat()) });
    }
    all
}

/// Sequences of 3, 0, 1 and 2 tokens.
fn attentions() -> Vec<Case> {
    let base = Attention {
        scale: Real(0.7),
        causal: true,
        window: None,
        softcap: None,
        sinks: false,
        span: Dim::from(8usize),
        page: None,
    };
    let variants = [
        (base.clone(), 2, 2),
        (Attention { causal: false, ..base.clone() }, 2, 1),
        (Attention { window: Some(2), ..base.clone() }, 2, 1),
        (Attention { softcap: Some(Real(1.5)), ..base.clone() }, 4, 2),
        (Attention { sinks: true, ..base.clone() }, 4, 2),
        (Attention { sinks: true, softcap: Some(Real(0.8)), window: Some(1), ..base.clone() }, 2, 1),
        (Attention { sinks: true, softcap: Some(Real(0.8)), window: Some(2), ..base }, 4, 2),
    ];
    let mut all = Vec::new();
    for (op, heads, kv) in variants {
        let mut args = vec![x(&[6, heads, 3]), x(&[6, kv, 3]), x(&[6, kv, 2]), ints(&[5], &[0, 3, 3, 4, 6])];
        args.extend(op.sinks.then(|| x(&[heads])));
        all.push(case(op, args));
    }
    all
}

/// Groups of 2, 0 and 3 rows; routers of every kind of score.
fn experts() -> Vec<Case> {
    let offsets = || ints(&[4], &[0, 2, 2, 5]);
    let mut all = vec![
        case(GroupedDot { transposed: false }, vec![x(&[5, 3]), x(&[6, 3]), offsets()]),
        case(GroupedDot { transposed: true }, vec![x(&[5, 2]), x(&[6, 3]), offsets()]),
        case(GroupedOuter {}, vec![x(&[5, 2]), x(&[5, 3]), offsets()]),
    ];
    for scores in [Scores::Softmax, Scores::Sigmoid, Scores::SoftmaxChosen] {
        for (normalise, scale) in [(false, 1.0), (true, 2.5)] {
            let op = Route { k: 2, scores, groups: None, normalise, scale: Real(scale) };
            let case = |op: Route, args| Case { outputs: vec![1], ..case(op, args) };
            all.push(case(op.clone(), vec![apart(&[3, 4])]));
            let groups = Some(Groups { count: 2, kept: 1, score: GroupScore::BestTwo });
            let args = vec![apart(&[3, 6]), Arg::Given(vec![6], vec![0.1, -0.2, 0.3, 0.0, 0.2, -0.1])];
            all.push(Case { constant: vec![1], ..case(Route { groups, ..op }, args) });
        }
    }
    all
}
