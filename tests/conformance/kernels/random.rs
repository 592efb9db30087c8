//! Random graphs of a dozen operators: through the hall against the interpreter, many in one program; and through the
//! passes one by one, whose results the interpreter must not tell apart.

use crate::kernels::table::{Fill, Table, compare, dims, mix, rows, tolerance};
use crate::machines::{emulated, own};
use astrai_ir::json::write_json;
use astrai_ir::ops::*;
use astrai_ir::{DType, Dim, Graph, NodeId, Precision, Real, Sizes, Tensor, eval};
use astrai_passes as passes;
use proptest::prelude::*;
use std::collections::HashMap;

/// A graph in the making: values `[n, width]` with widths of a few kinds.
struct Dice<'a> {
    t: &'a mut Table,
    seed: u64,
    drawn: u64,
    pool: Vec<NodeId>,
}

const WIDTHS: [usize; 5] = [1, 4, 8, 17, 33];

impl Dice<'_> {
    fn below(&mut self, n: usize) -> usize {
        self.drawn += 1;
        (mix(self.seed, self.drawn) % n as u64) as usize
    }

    fn any(&mut self) -> NodeId {
        // Late values more often, so that chains grow long.
        let n = self.pool.len();
        let back = self.below(n).min(self.below(n));
        self.pool[n - 1 - back]
    }

    fn width(&self, id: NodeId) -> usize {
        self.t.g.ty(id).shape[1].size().unwrap()
    }

    /// A value of this width, made from what there is.
    fn of_width(&mut self, width: usize) -> NodeId {
        let same: Vec<NodeId> = self.pool.iter().copied().filter(|&i| self.width(i) == width).collect();
        if !same.is_empty() {
            let i = self.below(same.len());
            return same[i];
        }
        let x = self.any();
        self.linear(x, width)
    }

    fn linear(&mut self, x: NodeId, n: usize) -> NodeId {
        let k = self.width(x);
        let dtype = if self.below(3) == 0 { DType::BF16 } else { DType::F32 };
        let w = self.t.weight(dtype, &[n, k]);
        let w = self.t.g.cast(w, DType::F32).unwrap();
        self.t.g.linear(x, w).unwrap()
    }

    fn step(&mut self) {
        let x = self.any();
        let w = self.width(x);
        let kind = self.below(20);
        let y = match kind {
            0..=2 => {
                let of =
                    [UnaryKind::Tanh, UnaryKind::Sigmoid, UnaryKind::Neg, UnaryKind::Abs, UnaryKind::Erf];
                let i = self.below(of.len());
                self.t.g.unary(of[i], x)
            }
            3..=5 => {
                let of = [BinaryKind::Add, BinaryKind::Sub, BinaryKind::Max, BinaryKind::Min];
                let (y, i) = (self.of_width(w), self.below(of.len()));
                self.t.g.binary(of[i], x, y)
            }
            6 => self.norm(x, w),
            7 => self.t.g.push(Softmax { log: false }, &[x]),
            8..=9 => {
                let i = self.below(WIDTHS.len());
                let y = self.linear(x, WIDTHS[i]);
                self.t.g.unary(UnaryKind::Tanh, y)
            }
            10..=11 => {
                let (y, act) =
                    (self.of_width(w), [Activation::Silu, Activation::Gelu][self.seed as usize % 2]);
                self.t.g.push(GatedAct { act }, &[x, y])
            }
            12 => self.rounded(x),
            13 => {
                let y = self.any();
                self.t.g.push(Concat { axis: 1 }, &[x, y])
            }
            14 => self.cut(x, w),
            15 => {
                let p = Pad {
                    axis: 1,
                    before: self.below(3).into(),
                    after: self.below(3).into(),
                    value: Real(0.25),
                };
                self.t.g.push(p, &[x])
            }
            16 => {
                let kind = [ReduceKind::Mean, ReduceKind::Max, ReduceKind::Min][self.below(3)];
                self.t.g.reduce_last(kind, x)
            }
            17 => {
                let c = self.t.input(DType::Bool, rows(&[w]), Fill::Int(0, 1));
                let y = self.of_width(w);
                self.t.g.select(c, x, y)
            }
            18 => self.across(x, w),
            _ => {
                let i = self.t.input(DType::I32, rows(&[]), Fill::Int(0, 0));
                self.t.g.gather(x, i, 0)
            }
        };
        self.pool.push(y.unwrap());
    }

    fn norm(&mut self, x: NodeId, w: usize) -> Result<NodeId, astrai_ir::IrError> {
        let scale = self.t.weight(DType::F32, &[w]);
        self.t.g.rms_norm(x, scale, 0.1)
    }

    fn rounded(&mut self, x: NodeId) -> Result<NodeId, astrai_ir::IrError> {
        let y = self.t.g.cast(x, DType::BF16)?;
        self.t.g.cast(y, DType::F32)
    }

    fn cut(&mut self, x: NodeId, w: usize) -> Result<NodeId, astrai_ir::IrError> {
        let start = self.below(w);
        let len = 1 + self.below(w - start);
        self.t.g.slice(x, 1, Dim::from(start), Dim::from(len))
    }

    /// Columns in another order, by views or by the interpreter's running sum.
    fn across(&mut self, x: NodeId, w: usize) -> Result<NodeId, astrai_ir::IrError> {
        if w.is_multiple_of(4) {
            let y = self.t.g.reshape(x, rows(&[4, w / 4]))?;
            let y = self.t.g.permute(y, &[0, 2, 1])?;
            return self.t.g.reshape(y, rows(&[w]));
        }
        let y = self.t.g.push(Cumsum { axis: 1, exclusive: false, reverse: false }, &[x])?;
        self.t.g.scale(y, 1.0 / w as f64)
    }
}

/// A graph of about a dozen operators; its last values are cases.
fn grow(t: &mut Table, seed: u64) {
    let mut d = Dice { t, seed, drawn: 0, pool: vec![] };
    for _ in 0..2 {
        let i = d.below(WIDTHS.len());
        let x = d.t.input(DType::F32, rows(&[WIDTHS[i]]), Fill::Real(-1.5, 1.5));
        d.pool.push(x);
    }
    for _ in 0..12 {
        d.step();
    }
    let (last, other) = (d.pool[d.pool.len() - 1], d.any());
    d.t.case(&format!("graph {seed}"), last);
    if other != last {
        d.t.case(&format!("graph {seed}, within"), other);
    }
}

#[test]
fn random_graphs_through_the_hall() {
    for part in 0..4u64 {
        let mut t = Table::new().stored(DType::F32, 8.0);
        (0..25).for_each(|i| grow(&mut t, 1000 * part + i));
        // A model of instructions adds a level to compile for and nothing that the table lacks.
        t.run_on(own().iter().chain(emulated()), &[1, 33]);
    }
}

fn value(g: &Graph, leaves: &HashMap<String, Tensor>) -> Vec<(String, Tensor)> {
    eval(g, leaves, &Sizes::from([("n".to_string(), 5)]), Precision::default()).unwrap()
}

/// Leaves of a graph whose weights may be joined: rows of each checkpoint tensor, one after another.
fn join(g: &Graph, leaves: &HashMap<String, Tensor>) -> HashMap<String, Tensor> {
    let mut all = leaves.clone();
    for n in g.nodes() {
        if let Op::Weight(w) = &n.op {
            let parts: Vec<&Tensor> = w.rows().iter().map(|r| &leaves[&r.name]).collect();
            let first = parts[0].clone();
            let joined = parts[1..].iter().fold(first, |a, b| a.append(b));
            let shape = w.ty.shape.iter().map(|d| d.size().unwrap()).collect();
            all.insert(w.name.clone(), Tensor { shape, ..joined });
        }
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn passes_keep_the_meaning(seed in any::<u64>()) {
        let mut t = Table::new();
        grow(&mut t, seed);
        let leaves = t.values(5);
        let want = value(&t.g, &leaves);
        let merged = passes::merge(&t.g).unwrap();
        prop_assert_eq!(&value(&merged, &join(&merged, &leaves)), &want);
        prop_assert_eq!(write_json(&passes::merge(&merged).unwrap()), write_json(&merged));
        let plain = passes::canonicalise(&merged).unwrap();
        prop_assert_eq!(&value(&plain, &join(&plain, &leaves)), &want);
        prop_assert_eq!(write_json(&passes::canonicalise(&plain).unwrap()), write_json(&plain));
        let apart = passes::decompose(&plain, |op| !matches!(op, Op::RmsNorm(_) | Op::Softmax(_) | Op::GatedAct(_))).unwrap();
        prop_assert!(!apart.nodes().iter().any(|n| matches!(n.op, Op::RmsNorm(_) | Op::Softmax(_) | Op::GatedAct(_))));
        for ((name, got), (_, want)) in value(&apart, &join(&apart, &leaves)).iter().zip(&want) {
            // Differences of values near one may cancel to almost nothing.
            let top = want.reals().iter().fold(1e-30f64, |m, x| m.max(x.abs()));
            let allowed = tolerance(&t.g, t.g.output(name).unwrap(), DType::F32) * 8.0 / top.min(1.0);
            prop_assert!(compare(got, want, allowed).is_ok(), "{}: {:?}", name, compare(got, want, allowed));
        }
    }
}

#[test]
fn casts_are_dropped_only_where_nothing_is_lost() {
    let mut t = Table::new();
    let x = t.input(DType::BF16, dims(&[40]), Fill::Real(-300.0, 300.0));
    for (i, through) in DType::ALL.into_iter().enumerate() {
        let y = t.g.cast(x, through).unwrap();
        let y = t.g.cast(y, DType::BF16).unwrap();
        t.case(&format!("{i}"), y);
    }
    let leaves = t.values(1);
    let plain = passes::canonicalise(&t.g).unwrap();
    assert_eq!(value(&plain, &leaves), value(&t.g, &leaves));
    assert_eq!(plain.outputs()[0].1, plain.outputs()[2].1, "bf16 through f32 is itself");
}
