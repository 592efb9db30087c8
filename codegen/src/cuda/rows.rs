//! Loops by rows of the result. In: a region whose form is loops. Out: a phase whose blocks share rows, elements, or the sums that
//! make an element.

use super::fours::{FOUR, Fours, fours};
use super::program::{Program, WARP};
use crate::kernel_ir::expr::{Part, Stmt, reduces};
use crate::kernel_ir::index::Var;
use crate::kernel_ir::loops::{Loops, loops};
use crate::kernel_ir::print::{Printer, digit, dim};
use astrai_ir::ops::Op;
use astrai_ir::{Dim, Kernel, Region};

/// Threads of a block where rows are long.
const THREADS: usize = 256;

/// Registers of a thread: four blocks of so many share a multiprocessor.
pub(super) const REGISTERS: u32 = 64;

/// How results are shared out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mapping {
    /// A thread an element.
    Flat,
    /// A block a row of the last axis, whose threads share its statistics.
    Rows,
    /// A block an element, whose threads share the reduction that makes it.
    Elements,
}

/// The kernel of a region.
pub(super) fn kernel(region: &Region, name: &str) -> Result<Kernel, String> {
    let l = loops(region, false)?;
    let mapping = mapping(region, &l);
    let block = threads(&l, mapping);
    let last =
        region.piece.write_types().first().and_then(|t| t.shape.last().cloned()).unwrap_or(Dim::from(1));
    let units = if mapping == Mapping::Rows { l.row.extent.clone() } else { &l.row.extent * &last };
    // A thread takes four elements where it can; of several loops the one with fewest a thread counts.
    let mut taken = FOUR;
    each_loop(&l, |_, var, body| {
        taken = taken.min(if fours(region, var, body).is_some() { FOUR } else { 1 })
    });
    let per_block = if mapping == Mapping::Flat { block as usize * taken } else { 1 };
    let mut program = Program::new(region, name, block, REGISTERS);
    program.entry(&units.ceil_div(&Dim::from(per_block)), 0, |p| match mapping {
        Mapping::Flat => p.alone(|p| {
            p.statements(&l.before);
            each_loop(&l, |lets, var, body| flat(p, &l, lets, var, body, fours(region, var, body).as_ref()));
        }),
        Mapping::Rows => rows(p, region, &l),
        Mapping::Elements => {
            p.statements(&l.before);
            each_loop(&l, |lets, var, body| elements(p, &l, lets, var, body));
        }
    });
    Ok(program.finish())
}

/// Every loop of a row, with the statements of the row before it.
fn each_loop(l: &Loops, mut f: impl FnMut(&[&Stmt], &Var, &[Stmt])) {
    let mut lets = Vec::new();
    for s in &l.body {
        match s {
            Stmt::Loop { var, body } => f(&lets, var, body),
            s => lets.push(s),
        }
    }
}

fn rows(p: &mut Printer, region: &Region, l: &Loops) {
    p.statements(&l.before);
    let rows = dim(&l.row.extent);
    p.braces(&format!("for (index_t row = blockIdx.x; row < {rows}; row += gridDim.x)"), |p| {
        lead(p, l);
        for s in &l.body {
            let long = |var: &Var| var.extent.size().is_none_or(|n| n >= WARP * FOUR);
            let by_fours = match s {
                Stmt::Loop { var, body } if long(var) => {
                    fours(region, var, body).map(|f| (f, dim(&var.extent)))
                }
                _ => None,
            };
            let Some((f, n)) = by_fours else {
                p.statements(std::slice::from_ref(s));
                continue;
            };
            let head =
                format!("for (index_t four = threadIdx.x * {FOUR}; four < {n}; four += BLOCK * {FOUR})");
            p.braces(&head, |p| p.alone(|p| f.print(p)));
        }
    });
}

fn flat(p: &mut Printer, l: &Loops, lets: &[&Stmt], var: &Var, body: &[Stmt], by_fours: Option<&Fours>) {
    let (first, stride) = ("(index_t)blockIdx.x * BLOCK + threadIdx.x", "(index_t)gridDim.x * BLOCK");
    let lets = |p: &mut Printer| lets.iter().for_each(|s| p.statements(std::slice::from_ref(s)));
    let Some(f) = by_fours else {
        return units(p, l, var, first, stride, |p| {
            lets(p);
            p.statements(body);
        });
    };
    let by = var.extent.ceil_div(&Dim::from(FOUR));
    let quarter = Var { name: "quarter".into(), extent: by, depth: var.depth };
    units(p, l, &quarter, first, stride, |p| {
        p.line(&format!("const index_t four = quarter * {FOUR};"));
        lets(p);
        f.print(p);
    });
}

fn elements(p: &mut Printer, l: &Loops, lets: &[&Stmt], var: &Var, body: &[Stmt]) {
    units(p, l, var, "blockIdx.x", "gridDim.x", |p| {
        for s in lets.iter().copied().chain(body) {
            let one = std::slice::from_ref(s);
            match s {
                Stmt::Store { .. } => p.braces("if (threadIdx.x == 0)", |p| p.statements(one)),
                _ => p.statements(one),
            }
        }
    });
}

/// A loop over the elements of all rows in this loop of the last axis.
fn units(p: &mut Printer, l: &Loops, var: &Var, first: &str, stride: &str, body: impl FnOnce(&mut Printer)) {
    let total = dim(&(&l.row.extent * &var.extent));
    p.braces(&format!("for (index_t unit = {first}; unit < {total}; unit += {stride})"), |p| {
        p.line(&format!("const index_t row = {}; (void)row;", digit("unit", &var.extent, None)));
        let inside = if l.row.extent.is_one() { None } else { Some(&var.extent) };
        p.line(&format!("const index_t {} = {}; (void){0};", var.name, digit("unit", &Dim::from(1), inside)));
        lead(p, l);
        body(p);
    });
}

/// Indices of the leading axes from the row.
fn lead(p: &mut Printer, l: &Loops) {
    digits(p, &l.row, &l.leading);
}

/// Indices of leading axes from the variable that counts them all.
pub(super) fn digits(p: &mut Printer, of: &Var, axes: &[(Var, Dim, Dim)]) {
    for (i, (v, divisor, size)) in axes.iter().enumerate().filter(|(_, (v, ..))| v != of) {
        let value = digit(&of.name, divisor, (i > 0).then_some(size));
        p.line(&format!("const index_t {} = {value}; (void){0};", v.name));
    }
}

fn mapping(region: &Region, l: &Loops) -> Mapping {
    let statistic = |s: &Stmt| matches!(s, Stmt::Reduce { .. });
    if l.before.iter().chain(&l.body).any(statistic) {
        return Mapping::Rows;
    }
    let reduced = l.body.iter().any(|s| reduces(std::slice::from_ref(s)));
    if reduced && sums_rows(region) { Mapping::Elements } else { Mapping::Flat }
}

/// True when reductions run along memory and are long enough for a warp; the threads of neighbouring results read
/// neighbouring elements otherwise.
fn sums_rows(region: &Region) -> bool {
    let g = region.graph();
    let has_dot = g.nodes().iter().any(|n| matches!(n.op, Op::Dot(_)));
    let along = |n: &astrai_ir::Node| {
        let Op::Reduce(r) = &n.op else { return false };
        let shape = &g.ty(n.args[0]).shape;
        let count = Dim::product(r.axes.iter().map(|&a| &shape[a]));
        r.axes.last().is_some_and(|a| a + 1 == shape.len()) && count.size().is_none_or(|c| c >= WARP)
    };
    !has_dot && g.nodes().iter().any(along)
}

/// Threads of a block: as many as the longest loop they share has iterations.
fn threads(l: &Loops, mapping: Mapping) -> u32 {
    let mut most = WARP;
    let mut see = |extent: Dim| most = most.max(extent.size().unwrap_or(THREADS));
    match mapping {
        Mapping::Flat => see(Dim::from(THREADS)),
        Mapping::Rows => l.before.iter().chain(&l.body).for_each(|s| shared(s, &mut see)),
        Mapping::Elements => each_loop(l, |lets, _, body| {
            lets.iter().copied().chain(body).for_each(|s| shared(s, &mut see));
        }),
    }
    most.next_power_of_two().min(THREADS) as u32
}

/// Iterations that a statement shares out to the threads of a block.
fn shared(s: &Stmt, see: &mut impl FnMut(Dim)) {
    match s {
        Stmt::Loop { var, .. } => see(var.extent.clone()),
        Stmt::Reduce { outer, parts, .. } => {
            let around = |p: &Part| &Dim::product(outer.iter().map(|v| &v.extent)) * &p.var.extent;
            parts.iter().for_each(|p| see(around(p)));
        }
        _ => {}
    }
}
