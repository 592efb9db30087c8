//! What a term costs on a target. In: an operator, what is known of its arguments. Out: integer picoseconds at the upper bounds
//! of the symbols: the roofline for what has a kernel, a share of the bytes for what is likely computed inside another's, nothing
//! for views and widening casts, and next to nothing for what is made of weights alone where they never change.

use super::algebra::{Algebra, Facts};
use astrai_ir::ops::{Cast, Op};
use astrai_ir::{DType, Target, Type};

/// Of the bytes of a pointwise value so many parts in this many are counted: most are computed where they are used.
const POINTWISE_SHARE: u64 = 4;

/// Runs in which what is made ahead of weights has to pay for being made.
const RUNS: u64 = 1024;

/// Picoseconds in a second.
const PS: f64 = 1e12;

/// Costs on a target.
pub struct Costs<'a> {
    /// The machine.
    pub target: &'a Target,
    /// Weights never change: what is made of them alone is made once.
    pub fold: bool,
}

impl Costs<'_> {
    /// Picoseconds of `op` on `args`, whose value is known as `facts`.
    pub fn of(&self, a: &Algebra, op: &Op, args: &[&Facts], facts: &Facts) -> u64 {
        let free = op.is_view()
            || op.leaf_name().is_some()
            || matches!(op, Op::Part(_) | Op::Const(_) | Op::Iota(_));
        let widens = |c: &Cast| args.iter().all(|x| c.dtype.represents(x.ty().dtype));
        if free || matches!(op, Op::Cast(c) if widens(c)) {
            return 0;
        }
        let out = facts.types.iter().fold(0u64, |sum, t| sum.saturating_add(a.size(&t.bytes())));
        if self.fold && facts.weight_only {
            return self.bytes(out) / RUNS;
        }
        let read = args.iter().fold(0u64, |sum, f| sum.saturating_add(f.bytes));
        match op {
            op if op.is_pointwise() => self.bytes(read.saturating_add(out)) / POINTWISE_SHARE,
            Op::Concat(_) | Op::Pad(_) => self.bytes(read.saturating_add(out)) / POINTWISE_SHARE,
            // Of a table only the rows that are picked are read.
            Op::Gather(_) => self.bytes(out.saturating_mul(2)).saturating_add(self.launch()),
            op => {
                let types: Vec<&Type> = args.iter().filter_map(|f| f.types.first()).collect();
                let whole = types.len() == args.len() && !matches!(op, Op::Call(_));
                let flops = if whole { a.size(&op.flops(&types, &facts.types)) } else { 0 };
                let work = ps(flops as f64 / self.target.peak(multiplied(args)));
                work.max(self.bytes(read.saturating_add(out))).saturating_add(self.launch())
            }
        }
    }

    fn bytes(&self, n: u64) -> u64 {
        ps(n as f64 / self.target.bandwidth)
    }

    fn launch(&self) -> u64 {
        ps(self.target.launch)
    }
}

/// Saturating: a size without bound costs all there is.
fn ps(seconds: f64) -> u64 {
    (seconds * PS).round() as u64
}

/// The type in which the first two arguments lie in memory, when it is one; f32 otherwise.
fn multiplied(args: &[&Facts]) -> DType {
    let stored = |f: &Facts| {
        let narrow = f.types.first().is_some_and(|t| t.dtype == DType::F32) && f.narrow;
        if narrow { DType::BF16 } else { f.types.first().map_or(DType::F32, |t| t.dtype) }
    };
    match args {
        [x, y, ..] if stored(x) == stored(y) => stored(x),
        _ => DType::F32,
    }
}
