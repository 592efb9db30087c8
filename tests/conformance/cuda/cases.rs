//! Graphs whose kernels are tried: every form that the archetype `loops` takes, at awkward sizes.

use astrai_ir::ops::{
    Activation, BinaryKind, CompareKind, Concat, Dot, GatedAct, Gather, Iota, LayerNorm, Pad, ReduceKind,
    Rope, RopeLayout, Softmax, UnaryKind,
};
use astrai_ir::{DType, Dim, Graph, IrError, NodeId, Op, Real, Sizes, Symbol, Tensor, Type};
use std::collections::HashMap;

/// What the leaves of a case hold, drawn from a seed; names of leaves say what else they must be.
#[derive(Clone, Copy, Debug)]
pub enum Draw {
    /// Floats in ±2, integers in ±128.
    Plain(u64),
    /// The same with edges among them: zeros, denormals, large numbers, infinities, NaN; the extremes of integers.
    Edges(u64),
    /// Whole numbers in ±3: many are equal.
    Ties(u64),
    /// Floats of magnitudes from 2^-20 to 2^20.
    Magnitudes(u64),
}

impl Draw {
    /// Its seed.
    pub fn seed(self) -> u64 {
        let (Draw::Plain(seed) | Draw::Edges(seed) | Draw::Ties(seed) | Draw::Magnitudes(seed)) = self;
        seed
    }
}

/// A value of the symbol `t`, and what the leaves hold.
pub type At = (u64, Draw);

/// A graph and the values of its symbol `t` at which it is run.
pub struct Case {
    /// Its name.
    pub name: String,
    /// What is computed.
    pub graph: Graph,
    /// Values of `t`.
    pub rows: Vec<u64>,
}

impl Case {
    /// What it is run at: every size, and edges and ties at the largest.
    pub fn runs(&self) -> Vec<At> {
        let most = self.rows.iter().copied().max().unwrap_or(1);
        let plain = self.rows.iter().map(|t| (*t, Draw::Plain(0)));
        plain.chain([(most, Draw::Edges(0)), (most, Draw::Ties(0))]).collect()
    }
}

type Made = Result<NodeId, IrError>;

const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Shape from sizes; 0 stands for the symbol `t`.
fn shape(sizes: &[usize]) -> Vec<Dim> {
    sizes.iter().map(|&n| if n == 0 { Dim::symbol("t") } else { Dim::from(n) }).collect()
}

struct Cases {
    all: Vec<Case>,
}

impl Cases {
    fn add(&mut self, name: &str, rows: &[u64], f: impl FnOnce(&mut Graph) -> Result<Vec<NodeId>, IrError>) {
        let t = Symbol { name: "t".into(), min: 1, max: 8192, multiple_of: 1 };
        self.add_with(name, rows, t, f);
    }

    fn add_with(
        &mut self,
        name: &str,
        rows: &[u64],
        t: Symbol,
        f: impl FnOnce(&mut Graph) -> Result<Vec<NodeId>, IrError>,
    ) {
        let mut graph = Graph::new(vec![t]);
        let outs = f(&mut graph).unwrap_or_else(|e| panic!("{name}: {e}"));
        for (i, o) in outs.iter().enumerate() {
            graph.set_output(&format!("out{i}"), *o).unwrap();
        }
        self.all.push(Case { name: name.to_string(), graph, rows: rows.to_vec() });
    }
}

/// All cases.
pub fn cases() -> Vec<Case> {
    let mut c = Cases { all: Vec::new() };
    pointwise(&mut c);
    casts(&mut c);
    norms(&mut c);
    ropes(&mut c);
    reductions(&mut c);
    rearranged(&mut c);
    integers(&mut c);
    c.all
}

fn pointwise(c: &mut Cases) {
    for d in FLOATS {
        c.add(&format!("chain_{d}"), &[1, 67], |g| {
            let (x, b) = (g.input("x", d, shape(&[0, 6, 33]))?, g.input("b", d, shape(&[33]))?);
            let y = g.input("y", d, shape(&[6, 0, 66]))?;
            let y = g.slice(y, 2, Dim::from(33), Dim::from(33))?;
            let y = g.permute(y, &[1, 0, 2])?;
            let (s, p) = (g.add(x, b)?, g.mul(x, y)?);
            let e = g.unary(UnaryKind::Tanh, s)?;
            let m = g.binary(BinaryKind::Max, e, p)?;
            let r = g.reshape(m, shape(&[0, 99, 2]))?;
            let z = g.input("z", d, shape(&[0, 1, 2]))?;
            let (_, out) = (r, g.sub(r, z)?);
            Ok(vec![out])
        });
        let acts = [
            ("silu", Activation::Silu),
            ("gelu", Activation::Gelu),
            ("gelu_tanh", Activation::GeluTanh),
            ("swish", Activation::Swish(Real(1.702))),
        ];
        for (name, act) in acts {
            c.add(&format!("gated_{name}_{d}"), &[1, 33], |g| {
                let x = g.input("x", d, shape(&[0, 514]))?;
                let gate = g.slice(x, 1, Dim::from(0), Dim::from(257))?;
                let up = g.slice(x, 1, Dim::from(257), Dim::from(257))?;
                Ok(vec![g.push(GatedAct { act }, &[gate, up])?])
            });
        }
    }
    for kind in UnaryKind::ALL.into_iter().filter(|k| *k != UnaryKind::Not) {
        c.add(&format!("unary_{kind:?}"), &[1, 700], |g| {
            let x = g.input("x", DType::F32, shape(&[0, 3]))?;
            let safe = matches!(kind, UnaryKind::Log | UnaryKind::Sqrt | UnaryKind::Rsqrt);
            let x = if safe { g.unary(UnaryKind::Abs, x)? } else { x };
            Ok(vec![g.unary(kind, x)?])
        });
    }
    c.add("pow", &[300], |g| {
        let x = g.input("x", DType::F32, shape(&[0]))?;
        let (x, y) = (g.unary(UnaryKind::Abs, x)?, g.input("y", DType::F32, shape(&[0]))?);
        Ok(vec![g.binary(BinaryKind::Pow, x, y)?])
    });
    c.add("pow_of_any", &[300], |g| {
        let (x, y) = (g.input("x", DType::F32, shape(&[0]))?, g.input("y", DType::F32, shape(&[0]))?);
        Ok(vec![g.binary(BinaryKind::Pow, x, y)?])
    });
    c.add("scalar", &[1], |g| {
        let x = g.input("x", DType::F32, vec![])?;
        Ok(vec![g.scale(x, 1.5)?])
    });
    // Sizes that 32-bit indices cannot hold.
    let large = Symbol { name: "t".into(), min: 1, max: 1 << 32, multiple_of: 1 };
    c.add_with("large", &[40], large, |g| {
        let (x, b) =
            (g.input("x", DType::BF16, shape(&[0, 65]))?, g.input("b", DType::BF16, shape(&[0, 1]))?);
        Ok(vec![g.mul(x, b)?])
    });
}

fn casts(c: &mut Cases) {
    use DType::*;
    for to in DType::ALL {
        c.add(&format!("cast_{to}"), &[1, 300], |g| {
            let x = g.input("x", F32, shape(&[0, 5]))?;
            let y = g.cast(x, to)?;
            Ok(vec![y, g.cast(y, F32)?])
        });
    }
    // Numbers at the edges of the types, without tolerance.
    for to in DType::ALL.into_iter().filter(|d| d.is_float()) {
        c.add(&format!("exact_{to}"), &[200], |g| {
            let x = g.input("special", F32, shape(&[0, 16]))?;
            let y = g.cast(x, to)?;
            Ok(vec![y, g.cast(y, F32)?])
        });
    }
    c.add("exact_extremes", &[200], |g| {
        let x = g.input("special", F32, shape(&[0, 16]))?;
        let y = g.reshape(x, shape(&[16, 0]))?;
        let y = g.permute(y, &[1, 0])?;
        Ok(vec![g.binary(BinaryKind::Max, x, y)?, g.binary(BinaryKind::Min, x, y)?])
    });
    for (from, to) in [
        (BF16, F16),
        (F16, BF16),
        (F8E4M3, BF16),
        (F8E5M2, F8E4M3),
        (I64, I8),
        (I32, U8),
        (U8, BF16),
        (Bool, F16),
    ] {
        c.add(&format!("cast_{from}_{to}"), &[257], |g| {
            let x = g.input("x", from, shape(&[0]))?;
            Ok(vec![g.cast(x, to)?])
        });
    }
}

fn layer_norm(g: &mut Graph, x: NodeId, n: usize, d: DType) -> Made {
    let (w, b) = (g.input("w", d, shape(&[n]))?, g.input("b", d, shape(&[n]))?);
    g.push(LayerNorm { eps: Real(1e-5) }, &[x, w, b])
}

fn norms(c: &mut Cases) {
    for n in [1, 31, 32, 33, 255, 257, 4099] {
        let rows: &[u64] = if n > 1000 { &[1, 3] } else { &[1, 40] };
        c.add(&format!("rms_norm_{n}"), rows, |g| {
            let (x, w) = (g.input("x", DType::F32, shape(&[0, n]))?, g.input("w", DType::F32, shape(&[n]))?);
            Ok(vec![g.rms_norm(x, w, 1e-6)?])
        });
        c.add(&format!("softmax_{n}"), rows, |g| {
            let x = g.input("x", DType::F32, shape(&[0, n]))?;
            Ok(vec![g.push(Softmax { log: false }, &[x])?, g.push(Softmax { log: true }, &[x])?])
        });
        c.add(&format!("layer_norm_{n}"), rows, |g| {
            let x = g.input("x", DType::F32, shape(&[0, n]))?;
            Ok(vec![layer_norm(g, x, n, DType::F32)?])
        });
    }
    for d in [DType::BF16, DType::F16] {
        // Residual, norm, and what follows the norm in one kernel; and a norm of every head.
        c.add(&format!("residual_norm_{d}"), &[1, 20], |g| {
            let (x, y) = (g.input("x", d, shape(&[0, 768]))?, g.input("y", d, shape(&[0, 768]))?);
            let s = g.add(x, y)?;
            let wide = g.cast(s, DType::F32)?;
            let w = g.input("w", DType::F32, shape(&[768]))?;
            let n = g.rms_norm(wide, w, 1e-6)?;
            Ok(vec![s, g.cast(n, d)?])
        });
        c.add(&format!("head_norm_{d}"), &[1, 20], |g| {
            let (x, w) = (g.input("x", d, shape(&[0, 384]))?, g.input("w", d, shape(&[64]))?);
            let x = g.reshape(x, shape(&[0, 6, 64]))?;
            Ok(vec![g.rms_norm(x, w, 1e-6)?])
        });
    }
    c.add("softmax_over_t", &[1, 31, 300], |g| {
        let x = g.input("x", DType::F32, shape(&[4, 0]))?;
        let x = g.scale(x, 3.0)?;
        Ok(vec![g.push(Softmax { log: false }, &[x])?])
    });
    c.add("softmax_of_a_vector", &[1, 300], |g| {
        let x = g.input("x", DType::F32, shape(&[0]))?;
        Ok(vec![g.push(Softmax { log: false }, &[x])?])
    });
}

fn ropes(c: &mut Cases) {
    for d in [DType::F32, DType::BF16] {
        for (name, layout) in [("half", RopeLayout::Half), ("interleaved", RopeLayout::Interleaved)] {
            for dim in [64, 24] {
                c.add(&format!("rope_{name}_{dim}_{d}"), &[1, 19], |g| {
                    // The heads of a joined projection.
                    let qkv = g.input("qkv", d, shape(&[0, 5 * 64]))?;
                    let q = g.slice(qkv, 1, Dim::from(64), Dim::from(192))?;
                    let q = g.reshape(q, shape(&[0, 3, 64]))?;
                    let cos = g.input("cos", d, shape(&[0, dim / 2]))?;
                    let sin = g.input("sin", d, shape(&[0, dim / 2]))?;
                    Ok(vec![g.push(Rope { layout, dim }, &[q, cos, sin])?])
                });
            }
        }
    }
    c.add("norm_and_rope", &[1, 19], |g| {
        let (x, w) =
            (g.input("x", DType::BF16, shape(&[0, 3, 128]))?, g.input("w", DType::BF16, shape(&[128]))?);
        let n = g.rms_norm(x, w, 1e-6)?;
        let (cos, sin) =
            (g.input("cos", DType::BF16, shape(&[0, 64]))?, g.input("sin", DType::BF16, shape(&[0, 64]))?);
        Ok(vec![g.push(Rope { layout: RopeLayout::Half, dim: 128 }, &[n, cos, sin])?])
    });
}

fn reductions(c: &mut Cases) {
    use ReduceKind::*;
    let axes: [&[usize]; 6] = [&[2], &[0], &[1], &[0, 2], &[1, 2], &[0, 1, 2]];
    for kind in ReduceKind::ALL {
        for axes in axes.iter().filter(|a| matches!(kind, Sum | Max) || a.contains(&2) && a.len() < 3) {
            let letters: String = axes.iter().map(ToString::to_string).collect();
            c.add(&format!("reduce_{kind:?}_{letters}"), &[1, 11, 70], |g| {
                let x = g.input("near1", DType::F32, shape(&[0, 3, 37]))?;
                Ok(vec![g.reduce(kind, x, axes)?])
            });
        }
    }
    for (n, kind) in [(31, Sum), (33, Max), (257, Mean), (4099, Sum)] {
        c.add(&format!("reduce_row_{n}"), &[1, 5], |g| {
            let x = g.input("x", DType::BF16, shape(&[0, n]))?;
            let wide = g.cast(x, DType::F32)?;
            Ok(vec![g.reduce(kind, wide, &[1])?])
        });
    }
    for (d, kind) in [(DType::I64, Sum), (DType::I32, Max), (DType::I8, Sum), (DType::U8, Min)] {
        c.add(&format!("reduce_{d}_{kind:?}"), &[1, 5], |g| {
            let x = g.input("x", d, shape(&[0, 70]))?;
            let r = g.reduce(kind, x, &[1])?;
            Ok(vec![g.cast(r, DType::F32)?])
        });
    }
    // Over two batch axes, which no core takes, as loops.
    c.add("dot", &[1, 9], |g| {
        let a = g.input("a", DType::F32, shape(&[0, 3, 2, 20]))?;
        let b = g.input("b", DType::F32, shape(&[3, 2, 20, 7]))?;
        Ok(vec![g.push(Dot { batch: vec![(1, 0), (2, 1)], contract: vec![(3, 2)] }, &[a, b])?])
    });
}

fn rearranged(c: &mut Cases) {
    c.add("gather", &[1, 45], |g| {
        let (table, i) =
            (g.input("table", DType::BF16, shape(&[50, 96]))?, g.input("below50", DType::I32, shape(&[0]))?);
        let rows = g.gather(table, i, 0)?;
        let wide = g.cast(rows, DType::F32)?;
        Ok(vec![g.scale(wide, 2.0)?])
    });
    c.add("gather_columns", &[1, 300], |g| {
        let (x, i) =
            (g.input("x", DType::F32, shape(&[0, 50]))?, g.input("below50", DType::I64, shape(&[0, 4]))?);
        Ok(vec![g.push(Gather { axis: 1, batch: 1 }, &[x, i])?])
    });
    for (name, axis, a, b) in
        [("last", 1, [0, 30], [0, 35]), ("first", 0, [3, 33], [7, 33]), ("symbolic", 0, [0, 6], [5, 6])]
    {
        c.add(&format!("concat_{name}"), &[1, 40], |g| {
            let (x, y) = (g.input("x", DType::F32, shape(&a))?, g.input("y", DType::F32, shape(&b))?);
            let y = g.unary(UnaryKind::Neg, y)?;
            let z = g.push(Concat { axis }, &[x, y, x])?;
            Ok(vec![g.unary(UnaryKind::Exp, z)?])
        });
    }
    c.add("concat_of_vectors", &[1, 400], |g| {
        let (x, y) = (g.input("x", DType::F32, shape(&[0]))?, g.input("y", DType::F32, shape(&[33]))?);
        Ok(vec![g.push(Concat { axis: 0 }, &[y, x])?])
    });
    for axis in [0, 1] {
        c.add(&format!("pad_{axis}"), &[1, 300], |g| {
            let x = g.input("x", DType::BF16, shape(&[0, 31]))?;
            let p = Pad { axis, before: Dim::from(2), after: Dim::from(3), value: Real(0.1) };
            let p = g.push(p, &[x])?;
            Ok(vec![g.scale(p, 3.0)?])
        });
    }
    c.add("select_compare_iota", &[1, 45], |g| {
        let x = g.input("x", DType::F32, shape(&[0, 45]))?;
        let ty = Type::new(DType::I32, shape(&[0, 45]));
        let rows = g.push(Iota { ty: ty.clone(), axis: 0 }, &[])?;
        let columns = g.push(Iota { ty, axis: 1 }, &[])?;
        let seen = g.compare(CompareKind::Le, columns, rows)?;
        let zero = g.fill(x, 0.0)?;
        let positive = g.compare(CompareKind::Gt, x, zero)?;
        let not = g.unary(UnaryKind::Not, positive)?;
        let both = g.binary(BinaryKind::And, seen, not)?;
        let never = g.fill(x, -1e30)?;
        let masked = g.select(both, x, never)?;
        Ok(vec![both, masked])
    });
    c.add("masked_softmax", &[1, 45], |g| {
        let x = g.input("x", DType::F32, shape(&[0, 45]))?;
        let ty = Type::new(DType::I64, shape(&[0, 45]));
        let (rows, columns) =
            (g.push(Iota { ty: ty.clone(), axis: 0 }, &[])?, g.push(Iota { ty, axis: 1 }, &[])?);
        let seen = g.compare(CompareKind::Le, columns, rows)?;
        let never = g.fill(x, f64::NEG_INFINITY)?;
        let masked = g.select(seen, x, never)?;
        Ok(vec![g.push(Softmax { log: false }, &[masked])?])
    });
}

fn integers(c: &mut Cases) {
    use BinaryKind::*;
    for d in [DType::I64, DType::I32, DType::I8, DType::U8] {
        c.add(&format!("integer_{d}"), &[1, 300], |g| {
            let (x, y) = (g.input("x", d, shape(&[0, 3]))?, g.input("y", d, shape(&[0, 3]))?);
            let (s, p) = (g.binary(Sub, x, y)?, g.mul(x, y)?);
            let m = g.binary(Max, s, p)?;
            let seven = g.fill(x, 7.0)?;
            let q = g.div(m, seven)?;
            let q = g.binary(Min, q, x)?;
            let n = g.unary(UnaryKind::Neg, x)?;
            let a = g.unary(UnaryKind::Abs, n)?;
            // As a float, so that a value which did not wrap shows.
            let wide = g.cast(a, DType::F32)?;
            Ok(vec![q, wide, g.cast(p, DType::F32)?])
        });
    }
}

fn concrete(ty: &Type, sizes: &Sizes) -> Vec<usize> {
    let size = |d: &Dim| d.eval(&|s| sizes.get(s).copied()).unwrap() as usize;
    ty.shape.iter().map(size).collect()
}

/// Values for the leaves of a graph.
pub fn values(case: &Case, (t, draw): At) -> HashMap<String, Tensor> {
    let sizes = Sizes::from([("t".to_string(), t)]);
    let mut state = 0x1234_5678_9abc_def1u64 ^ draw.seed().wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    let mut leaves = HashMap::new();
    for n in case.graph.nodes() {
        let Op::Input(i) = &n.op else { continue };
        let (dtype, shape) = (i.ty.dtype, concrete(&i.ty, &sizes));
        let below = i.name.strip_prefix("below").and_then(|b| b.parse::<f64>().ok());
        let (numbers, width) = (0..shape.iter().product::<usize>(), shape.last().copied().unwrap_or(1));
        let value = if dtype.is_float() {
            let near1 = i.name == "near1";
            let of = |k: usize| match i.name == "special" {
                true => special(k, &mut random),
                false => float(draw, near1, k / width.max(1) % 3 == 1, &mut random),
            };
            Tensor::float(dtype, &shape, numbers.map(of).collect())
        } else {
            let of = |_| match (dtype, below) {
                (DType::Bool, _) => i64::from(random() < 0.5),
                (_, Some(below)) => (random() * below) as i64,
                _ => integer(draw, dtype, &mut random),
            };
            Tensor::int(dtype, &shape, numbers.map(of).collect())
        };
        leaves.insert(i.name.clone(), value);
    }
    leaves
}

/// A float; `near1`: factors of long products; `spreads`: in a row of edges that make all of it infinite or NaN. Others have the finite edges:
/// what vanishes in f32 and not in the interpreter is never multiplied by infinity.
fn float(draw: Draw, near1: bool, spreads: bool, random: &mut impl FnMut() -> f64) -> f64 {
    const FINITE: [f64; 15] = [
        0.0, -0.0, 1.0, -1.0, 0.5, 1e-40, -1e-40, 3e-5, 17.5, -17.5, 87.25, -87.25, 100.0, 65504.0, -65504.0,
    ];
    const OTHERS: [f64; 3] = [f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
    let plain = if near1 { 0.8 + 0.4 * random() } else { 4.0 * random() - 2.0 };
    match draw {
        Draw::Plain(_) => plain,
        Draw::Edges(_) => match random() {
            r if spreads && r < 0.02 => OTHERS[(random() * 3.0) as usize],
            _ if spreads => plain,
            r if r < 0.1 => FINITE[(random() * if near1 { 5.0 } else { 15.0 }) as usize],
            r if r < 0.15 && !near1 => few_bits(random),
            _ => plain,
        },
        Draw::Ties(_) => (random() * 7.0).floor() - 3.0,
        Draw::Magnitudes(_) => 2f64.powf(40.0 * random() - 20.0).copysign(random() - 0.5),
    }
}

/// A multiple of 1/512 of a power of two: ties of every narrow type among them.
fn few_bits(random: &mut impl FnMut() -> f64) -> f64 {
    let x = 1.0 + (random() * 512.0).floor() / 512.0;
    x * 2f64.powi((random() * 61.0) as i32 - 40).copysign(random() - 0.5)
}

fn integer(draw: Draw, dtype: DType, random: &mut impl FnMut() -> f64) -> i64 {
    let (bits, signed) = (8 * dtype.bytes() as u32, dtype != DType::U8);
    let least = if signed { i64::MIN >> (64 - bits) } else { 0 };
    let most = if signed { !least } else { i64::MAX >> (63 - bits) };
    match draw {
        Draw::Edges(_) if random() < 0.25 => [least, most, 0, -1, 1][(random() * 5.0) as usize],
        Draw::Ties(_) => (random() * 7.0) as i64 - 3,
        Draw::Magnitudes(_) => (random() * 2f64.powi(63)) as i64 >> (random() * 63.0) as u32,
        _ => (256.0 * random()) as i64 - 128,
    }
}

/// Zeros, infinities, NaN, denormals, the largest numbers of narrow types and what lies between two of their numbers, of either sign at even
/// and at odd places.
fn special(i: usize, random: &mut impl FnMut() -> f64) -> f64 {
    const EDGES: [f64; 14] = [
        0.0,
        f64::INFINITY,
        f64::NAN,
        1e-40,
        6e-8,
        3e-8,
        6.2e-5,
        65504.0,
        65520.0,
        57344.0,
        61440.0,
        448.0,
        464.0,
        480.0,
    ];
    match EDGES.get(i / 2 % 16) {
        Some(x) if i < 64 => {
            if i.is_multiple_of(2) == (i < 32) {
                *x
            } else {
                -x
            }
        }
        _ => few_bits(random),
    }
}
